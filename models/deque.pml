/* The deque's indexes and `pushes` (subetha/_deque.pxd, _shareddeque.pxd, ring_repair and ring_rescue_pass in _sharedring.pxd) in a small
   world: an owner with 2 operations (push, push_batch of 2, pop, in any order), 2 thieves, a rescuer, a second owner process that takes over
   when the first has died and was rescued; 2 cells, 2 places (so positions wrap; with -DRELEASE -DBACKFIRST a push also finds a live reference
   in its way, which goes on into `back`), with -DNREP=1 a repair at any moment. Anybody may die or stop at any step. What is put back is published in the ring `back`
   in a step of its own; with -DRELEASE thieves put back too, with -DBACKFIRST every take looks there first.
   Checked: a pushed item has exactly one result, one that was not accepted at most one; of a batch either all have one or none, also where
   its owner died on the way; at the end a thief alone can drain everything and every cell is free.
     spin -a -DNT=2 deque.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                         1.2 million states, no error
     -DNT=2 -DNOPS=1 -DNOPS2=1                           305 thousand (both owners work)
     -DNT=1 -DNOPS=2 -DNOPS2=1 -DMAXDEATHS=2             398 thousand
     -DNT=1 -DNOPS=3                                     220 thousand
     -DNT=2 -DRELEASE -DBACKFIRST                        3.6 million
     -DNT=1 -DNREP=1                                     5.8 million
     -DNT=1 -DNOPS=1 -DNOPS2=1 -DNREP=1                  1.1 million
     in check.py --long, NOT run as the model is now: -DNT=2 -DNOPS=1 -DNOPS2=1 with -DEARLYTAKE (6.3 million where the second owner always
     came) or -DNREP=1; -DNT=2 -DNOPS=2 -DNOPS2=1 -DMAXDEATHS=2
   Variants that must fail:
     -DNT=1 and
     -DBROKEN_POPFIRST     pop moves bottom first and takes the cell then, as in Chase-Lev (the owner dies between: item outside [top, bottom), rescue frees it: lost)
     -DBROKEN_NOHELP       a thief does not advance top over a cell that is not claimable (a dead thief's place hides everything above it)
     -DBROKEN_REFANYWHERE  "referenced" means in any place (a cut push is not freed)
     -DNOPS=3 -DBROKEN_POPNOINDEX        pop leaves out the look at top after moving bottom (bottom falls below top: later pushes are invisible)
     -DNOPS2=1 -DBROKEN_TAKEOVER         the new owner goes on with the indexes as it finds them (position top is used twice, a late thief's
                                         top CAS skips the new item: lost)
     -DMAXDEATHS=2 -DBROKEN_UNPUBLISHED  a put-back that its rescuer did not live to publish is left (job lost)
     -DEARLYTAKE -DBROKEN_TOPFIRST       the rescuer reads top, then bottom (a take-over between: it sees a reference that is none; cell leaked)
     -DNOPS=1 -DNOPS2=1 -DBROKEN_EARLYTAKE  a dead owner's place is taken before its rescue has ended (a late thief sees a part of a batch)
     -DNT=2 -DBROKEN_NOLAP               a place is taken for its position's without a look at its lap (a late thief takes out of a batch that
                                         cannot be seen yet; its owner dies: a part of a batch)
     -DNT=1 -DNREP=1 and (a repair publishes what is READY and not visible yet; the owner dies: a part of a batch)
     -DBROKEN_NOTODD       there is no word `pushes`
     -DBROKEN_LATEODD      it is odd only after the first cell is READY
     -DBROKEN_EARLYEVEN    it is even again before bottom has moved
     -DBROKEN_NOTAGAIN     a repair looks at it before the cells only, not again after it has read one
   With -DEARLYTAKE the new owner does not wait for the rescue: then batches may be seen in part, all else holds (the indexes do not count on it).
   Two more, -DBROKEN_NOFENCE (pop's store of bottom after its load of top) and -DBROKEN_THIEFORDER (a thief's loads the other way round), did
   NOT fail in small worlds: the cell decides who has an item. That says nothing of larger worlds, so the order stays seq_cst.
   Not in it: weak memory but for that, the places of `back` (cells.pml), that Empty is said only where nothing waits, damage, an owner that
   closes its handle, results, blocks. */
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define RETRY 4
#ifndef NC
#define NC 2
#endif
#ifndef R
#define R 2
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#ifndef NOPS
#define NOPS 2           /* operations of the owner, ... */
#endif
#ifndef NOPS2
#define NOPS2 0          /* ... and of the one that takes over */
#endif
#ifndef NST
#define NST 1            /* takes of each thief */
#endif
#ifndef NITEM
#define NITEM 4
#endif
#ifndef NT
#define NT 2             /* thieves */
#endif
#ifndef NRES
#define NRES 1           /* rescuers at once */
#endif
#ifndef NREP
#define NREP 0           /* one repair, at any moment */
#endif
#define O1 1
#define O2 2
#define T1 3
#define T2 4
#define LATE 8           /* from this number on nobody dies */
/* pub: a reference to the present version lies in `back` */
typedef Cell { byte ver; byte st; byte own; byte dat; bit pub };
typedef Place { byte pos; byte ver; byte idx };       /* pos stands for the lap: of which position the reference is */
Cell c[NC]; Place a[R];
byte top = 1, bot = 1, owner = O1, pushes;
byte deaths, items; bit dead[9]; bit resc[9]; bit nomore;
byte results[NITEM]; bit accepted[NITEM], batch[NITEM];      /* batch: this item and the next one were pushed together */
#define STEP if :: true :: deaths < MAXDEATHS && me < LATE -> deaths++; dead[me]=1; goto die fi
#define WORD(i,v,s,o) (c[i].ver==v && c[i].st==s && c[i].own==o)
#define WAITS(i) (c[i].st==READY || c[i].st==RETRY)
#define LIVE(i,v) (c[i].ver==v && WAITS(i))
#ifdef BROKEN_EARLYTAKE
#define EARLY
#endif
#ifdef EARLYTAKE
#define EARLY
#define WHOLE(q) true      /* what a push that was cut has left may be seen then */
#else
#define WHOLE(q) (!batch[q] || results[q]==results[q+1])
#endif
#define NOVER 255        /* a version that no cell will have */
#ifdef BROKEN_NOLAP
#define OF(p) true
#else
#define OF(p) (a[(p)%R].pos==(p))
#endif
#define REF(p) pi=a[(p)%R].idx; pv=(OF(p) -> a[(p)%R].ver : NOVER)
#define FREEIT(i) c[i].st=FREE; c[i].ver++; c[i].own=0; c[i].pub=0

inline finish(i) { atomic { STEP; assert(c[i].st==TAKEN && c[i].own==me); results[c[i].dat]++; assert(results[c[i].dat]==1); FREEIT(i) } }
inline publish(i, v) { atomic { STEP; if :: LIVE(i,v) -> c[i].pub=1 :: else fi } }
/* a put-back, published in `back` in a step of its own */
inline putback(i, v) {
  atomic { STEP; assert(WORD(i,v,TAKEN,me)); c[i].st=RETRY; c[i].ver=v+1; c[i].pub=0 }
  publish(i, v+1)
}
inline take() {        /* the cell of reference (pv, pi): got */
  atomic { STEP; if :: LIVE(pi,pv) -> c[pi].st=TAKEN; c[pi].own=me; c[pi].pub=0; got=1 :: else -> got=0 fi }
}
inline castop(t) { atomic { STEP; if :: top==t -> top=t+1 :: else fi } }
inline stealback() {   /* the ring `back` beside the deque (its places: cells.pml): a bag of references */
  do
  :: atomic { !got && i<NC -> STEP; if :: WAITS(i) && c[i].pub -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; got=1 :: else -> i++ fi }
  :: else -> break
  od
}

inline takefree(i, v) {
  atomic { i=0; got=0 }
  do
  :: atomic { !got && i<NC -> STEP; if :: c[i].st==FREE && items<NITEM -> c[i].st=WRITING; c[i].own=me; v=c[i].ver; c[i].dat=items; items++; got=1 :: else -> i++ fi }
  :: else -> break
  od
}
inline room(n) {       /* stale places at the top are stepped over, a live one goes on into `back` */
  do
  :: atomic { STEP; t=top; got=(bot+n <= t+R); if :: !got -> REF(t) :: else fi }
     if :: got -> break :: else fi;
     take();
     castop(t);
     if :: got -> putback(pi, pv) :: else fi
  od;
  atomic { t=0; pv=0; pi=0; got=0 }
}
inline odd() {
#ifndef BROKEN_NOTODD
  atomic { STEP; pushes=pushes|1 }
#else
  skip
#endif
}
inline even() {
#ifndef BROKEN_NOTODD
  atomic { STEP; pushes=(pushes|1)+1 }
#else
  skip
#endif
}
inline fill(k, i, v) {
  atomic { STEP; assert(WORD(i,v,WRITING,me)); c[i].st=READY }
  atomic { STEP; a[(bot+k)%R].pos=bot+k; a[(bot+k)%R].ver=v; a[(bot+k)%R].idx=i }
}

inline ownerloop() {
  do
  :: n == 0 -> break
  :: atomic { n > 0 -> n-- } /* push */
     takefree(i, v);
     if
     :: got ->
        room(1); odd();
        fill(0, i, v);
        atomic { STEP; accepted[c[i].dat]=1; bot=bot+1 }
        even()
     :: else
     fi;
     atomic { i=0; v=0; got=0 }
#if NC>1
  :: atomic { n > 0 -> n-- } /* push_batch of 2 */
     takefree(i, v);
     if
     :: got ->
        x=c[i].dat;
        takefree(j, w);
        if
        :: !got -> atomic { STEP; assert(WORD(i,v,WRITING,me)); FREEIT(i) }
        :: got ->
           room(2);
           batch[x]=1;
#ifdef BROKEN_LATEODD
           fill(0, i, v); odd();
#else
           odd(); fill(0, i, v);
#endif
           fill(1, j, w);
#ifdef BROKEN_EARLYEVEN
           even();
           atomic { STEP; accepted[x]=1; accepted[x+1]=1; bot=bot+2 }
#else
           atomic { STEP; accepted[x]=1; accepted[x+1]=1; bot=bot+2 }
           even()
#endif
        fi
     :: else
     fi;
     atomic { i=0; v=0; j=0; w=0; x=0; got=0 }
#endif
  :: atomic { n > 0 -> n-- } /* pop */
     i=0; got=0;
#ifdef BACKFIRST
     stealback();
     if :: got -> finish(i); goto popped :: else fi;
#endif
#ifdef BROKEN_POPFIRST
     /* Chase-Lev's order: the index first, then the cell */
     atomic { STEP; bot = bot-1 }
     atomic { STEP; t = top }
     if
     :: t > bot -> atomic { STEP; bot = bot+1 }
     :: t <= bot ->
        REF(bot);
        take();
        if :: t == bot -> castop(t); atomic { STEP; bot = bot+1 } :: else fi;
        if :: got -> finish(pi) :: else fi
     fi;
#else
     do
     :: atomic { STEP; t=top; if :: bot-1 >= t -> b=bot-1; REF(b) :: else -> b=0 fi }
        if :: b==0 -> break :: else fi;
        take();                        /* the cell first, ... */
#ifdef BROKEN_POPNOINDEX
        atomic { STEP; bot = b }
#else
#ifdef BROKEN_NOFENCE
        atomic { STEP; t = top }       /* as if the store of bottom were seen after the load of top */
        atomic { STEP; bot = b }
#else
        atomic { STEP; bot = b }       /* ... then the index, as in Chase-Lev, whether the cell was got or not */
        atomic { STEP; t = top }
#endif
        if
        :: t < b
        :: t == b -> castop(t); atomic { STEP; bot = b+1 }
        :: t > b -> atomic { STEP; bot = b+1 }
        fi;
#endif
        if :: got -> finish(pi); break :: else fi
     od;
#endif
popped:
     atomic { i=0; pv=0; pi=0; b=0; t=0; got=0 }
  od;
  atomic { STEP }               /* or dies at rest */
}
proctype owner1(byte n) {
  byte me=O1, i, v, j, w, b, t, pv, pi, x; bit got;
  ownerloop();
die: atomic { n=0; i=0; v=0; j=0; w=0; b=0; t=0; pv=0; pi=0; x=0; got=0 }
}
proctype owner2(byte n) {   /* takes the deque over when the first owner has died */
  byte me=O2, i, v, j, w, b, t, pv, pi, x; bit got;
  if
#ifdef EARLY
  :: atomic { dead[O1] && owner==O1 -> STEP; owner=O2 }
#else
  :: atomic { dead[O1] && resc[O1] && owner==O1 -> STEP; owner=O2 }
#endif
#ifndef BROKEN_TAKEOVER
     atomic { STEP; t=top; got=(bot<=t) }
     if
     :: got ->   /* position top may have been used: it is consumed, as at the end of a pop */
        castop(t);
        atomic { STEP; t=top }
        atomic { STEP; bot=t }
     :: else
     fi;
     atomic { t=0; got=0 }
#endif
     if :: pushes%2 -> even() :: else fi;
     ownerloop()
  :: true                       /* or never comes */
  fi;
die: atomic { n=0; i=0; v=0; j=0; w=0; b=0; t=0; pv=0; pi=0; x=0; got=0 }
}
inline steal() {
  got = 0;
  do
#ifdef BROKEN_THIEFORDER
  :: atomic { STEP; b = bot }
     atomic { STEP; t = top }
#else
  :: atomic { STEP; t = top }
     atomic { STEP; b = bot }
#endif
     if
     :: t >= b -> break
     :: t < b ->
        atomic { STEP; REF(t); b=0 }
        take();
#ifdef BROKEN_NOHELP
        if :: got -> castop(t) :: else -> break fi;
#else
        castop(t);       /* whether the cell was got or not; its outcome decides nothing */
#endif
        if
        :: got ->
#ifdef RELEASE
           if :: finish(pi) :: me < LATE -> putback(pi, pv) fi;
#else
           finish(pi);
#endif
           break
        :: else
        fi
     fi
  od;
  atomic { pv=0; pi=0; t=0; b=0 }
}
proctype thief(byte me; byte n) {
  byte t, b, pv, pi, i; bit got;
  do
  :: n == 0 -> break
  :: atomic { n > 0 -> n--; got=0 }
#ifdef BACKFIRST
     i=0; stealback();
     if :: got -> finish(i) :: else -> i=0; steal() fi;
     i=0
#else
     steal()
#endif
  od;
die: atomic { n=0; t=0; b=0; pv=0; pi=0; i=0; got=0 }
}
/* which cells a visible reference leads to; bottom first, then top: the other way round than a thief */
inline mark() {
#ifdef BROKEN_TOPFIRST
  atomic { STEP; t = top }
  atomic { STEP; b = bot }
#else
  atomic { STEP; b = bot }
  atomic { STEP; t = top }
#endif
#ifdef BROKEN_REFANYWHERE
  t = 0; b = R;
#endif
  do
  :: atomic { t < b -> STEP; if :: OF(t) && LIVE(a[t%R].idx,a[t%R].ver) -> seen[a[t%R].idx]=1 :: else fi; t++ }
  :: t >= b -> break
  od;
  atomic { t=0; b=0 }
  do
  :: atomic { i < NC -> STEP; if :: c[i].pub && WAITS(i) -> seen[i]=1 :: else fi; i++ }
  :: i >= NC -> break
  od;
  i=0
}
#define WORK(d) (dead[d] && !resc[d])
proctype rescuer(byte me) {
  byte i, d, v, st, t, b; bit found, got; bit seen[NC];
  do
  ::
     if
     :: atomic { WORK(O1) -> d=O1 }
     :: atomic { WORK(O2) -> d=O2 }
     :: atomic { WORK(T1) -> d=T1 }
     :: atomic { WORK(T2) -> d=T2 }
     :: atomic { WORK(5) -> d=5 }
     :: atomic { WORK(6) -> d=6 }
     :: atomic { WORK(7) -> d=7 }
     :: atomic { nomore && !WORK(O1) && !WORK(O2) && !WORK(T1) && !WORK(T2) && !WORK(5) && !WORK(6) && !WORK(7) -> break }
     fi;
     mark();
     do
     :: i == NC -> break
     :: atomic { i < NC -> STEP; v=c[i].ver; st=c[i].st;
           if :: c[i].own!=d || ((st==READY || st==RETRY) && seen[i]) -> st=FREE; v=0 :: else fi }
        if
        :: st==WRITING || st==READY -> atomic { STEP; found=1; if :: WORD(i,v,st,d) -> FREEIT(i) :: else fi }
        :: st==TAKEN || st==RETRY ->
#ifdef BROKEN_UNPUBLISHED
           if :: st==RETRY -> goto next :: else fi;
#endif
           atomic { STEP; found=1; got=0; if :: WORD(i,v,st,d) -> c[i].st=RETRY; c[i].ver=v+1; c[i].own=me; c[i].pub=0; got=1 :: else fi }
           if :: got -> publish(i, v+1) :: else fi
        :: else
        fi;
next:
        atomic { i++; v=0; st=0; got=0 }
     od;
     atomic { STEP; if :: !found -> resc[d]=1 :: else fi; i=0; d=0; found=0; t=0; do :: t<NC -> seen[t]=0; t++ :: else -> break od; t=0 }
  od;
die: atomic { d=0; v=0; st=0; t=0; b=0; found=0; got=0; i=0; do :: i<NC -> seen[i]=0; i++ :: else -> break od; i=0 }
}
#if NREP>0
/* publishes in `back` what waits and no reference leads to, but no cell of a push that goes on */
proctype repairer(byte me) {
  byte i, v, st, t, b, p; bit got; bit seen[NC];
  atomic { STEP; p=pushes }
  mark();
  do
  :: i == NC -> break
  :: atomic { i < NC -> STEP; v=c[i].ver; st=c[i].st; got=(!seen[i] && WAITS(i)) }
     if
     :: got && st==READY ->
#ifdef BROKEN_NOTAGAIN
        got=(p%2==0)
#else
        atomic { STEP; got=(p%2==0 && pushes==p) }
#endif
     :: else
     fi;
     if :: got -> publish(i, v) :: else fi;
     atomic { i++; v=0; st=0; got=0 }
  od;
die: atomic { v=0; st=0; t=0; b=0; p=0; got=0; i=0; do :: i<NC -> seen[i]=0; i++ :: else -> break od; i=0 }
}
#endif
byte q;
init {
  byte me=LATE, t, b, pv, pi, i; bit got;
  atomic { q=0; do :: q<R -> a[q].ver=NOVER; q++ :: else -> break od; q=0 }
  atomic {
    run owner2(NOPS2); run owner1(NOPS); run thief(T1,NST);
#if NT>1
    run thief(T2,NST);
#endif
#if NRES>0
    run rescuer(5);
#endif
#if NRES>1
    run rescuer(6);
#endif
#if NREP>0
    run repairer(7);
#endif
  }
  /* everybody has finished, or waits for a death that will not come */
  (timeout);
  nomore = 1; (_nr_pr == 1);
  deaths = MAXDEATHS;
  run rescuer(LATE); (_nr_pr == 1);
  do
  :: i=0; got=0; stealback(); if :: got -> finish(i) :: else -> steal(); if :: got :: else -> break fi fi
  od;
  run rescuer(LATE); (_nr_pr == 1);
die:
  atomic {
  q=0; do :: q<NITEM -> assert(results[q]<=1); assert(!accepted[q] || results[q]==1); assert(WHOLE(q)); q++ :: else -> break od;
  q=0; do :: q<NC -> assert(c[q].st==FREE); q++ :: else -> break od; q=0 }
}
