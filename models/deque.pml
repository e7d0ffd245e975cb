/* The deque's indexes in a small world: an owner with 2 operations (push, push_batch of 2, pop, in any order), 1 or 2 thieves, a rescuer, a second owner
   process that takes over when the first has died; 2 cells, 2 places (so positions wrap). Anybody may die at any step. A put-back is taken over,
   made RETRY and published in the ring `back` beside the deque, in a step each; with -DRELEASE thieves put back too, with -DBACKFIRST they look there first.
   Checked: a pushed item has exactly one result, one that was not accepted at most one; at the end a thief alone can drain everything and every cell is free.
     spin -a -DMAXDEATHS=1 -DNOPS=2 -DNOPS2=0 -DNT=1 deque.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                              1.3 million states, no error
     the larger worlds (two thieves, three operations, a second owner that works) are in check.py --long: NOT exhausted yet as the model is now
   Variants that must fail (with the flags above; TAKEOVER with -DNOPS2=1, POPNOINDEX with -DNOPS=3, UNPUBLISHED with -DMAXDEATHS=2):
     -DBROKEN_POPFIRST     pop moves bottom first and takes the cell then, as in Chase-Lev (the owner dies between: item outside [top, bottom), rescue frees it: lost)
     -DBROKEN_POPNOINDEX   pop leaves out the look at top after moving bottom (bottom falls below top: later pushes are invisible)
     -DBROKEN_TAKEOVER     the new owner goes on with the indexes as it finds them (position top is used twice, a late thief's top CAS skips the new item: lost)
     -DBROKEN_NOHELP       a thief does not advance top over a cell that is not claimable (a dead thief's place hides everything above it)
     -DBROKEN_TOPFIRST     the rescuer reads top, then bottom (a take-over between: it sees a reference that is none; cell leaked)
     -DBROKEN_REFANYWHERE  "referenced" means in any place (cell leaked)
     -DBROKEN_UNPUBLISHED  a put-back that its rescuer did not live to publish is left (job lost)
   Two more, -DBROKEN_NOFENCE (pop's store of bottom after its load of top) and -DBROKEN_THIEFORDER (a thief's loads the other way round), do NOT fail in the
   world above: the cell decides who has an item. That says nothing of larger worlds, so the order stays seq_cst.
   Not in it: weak memory but for that, the places of `back` (cells.pml), results, blocks. */
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
#define NOPS 3
#endif
#ifndef NOPS2
#define NOPS2 2
#endif
#ifndef NST
#define NST 1
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
#define O1 1
#define O2 2
#define T1 3
#define T2 4
/* pub: a reference to the present version lies in `back` */
typedef Cell { byte ver; byte st; byte own; byte dat; bit pub };
typedef Place { byte ver; byte idx };
Cell c[NC]; Place a[R];
byte top = 1, bot = 1, owner = O1;
byte deaths, items; bit dead[8]; bit resc[8]; bit nomore;
byte results[NITEM]; bit accepted[NITEM];
#define ALIVE if :: dead[me] -> goto die :: else fi
#define WORD(i,v,s,o) (c[i].ver==v && c[i].st==s && c[i].own==o)
#define ISREADY(i,v) (c[i].ver==v && c[i].st==READY)

inline finish(i) { atomic { ALIVE; assert(c[i].st==TAKEN && c[i].own==me); results[c[i].dat]++; assert(results[c[i].dat]==1); c[i].st=FREE; c[i].ver++; c[i].own=0 } }

/* a put-back, published in `back` in a step of its own */
inline putback(i, v) {
  atomic { ALIVE; got=0; if :: WORD(i,v,TAKEN,me) -> c[i].st=RETRY; c[i].ver=v+1; c[i].pub=0; got=1 :: else fi }
  if :: got -> atomic { ALIVE; if :: c[i].ver==v+1 && c[i].st==RETRY -> c[i].pub=1 :: else fi } :: else fi
}
inline take() {        /* the cell of reference (pv, pi): got */
  atomic { ALIVE; got=0; if :: ISREADY(pi,pv) -> c[pi].st=TAKEN; c[pi].own=me; got=1 :: else fi }
}
inline castop(t, done) { atomic { ALIVE; if :: top==t -> top=t+1 :: else fi } }

inline takefree(i, v) {
  i = 0; got = 0;
  do
  :: i == NC -> break
  :: i < NC -> atomic { ALIVE; if :: c[i].st==FREE && items<NITEM -> c[i].st=WRITING; c[i].own=me; v=c[i].ver; c[i].dat=items; items++; got=1 :: else fi }
     if :: got -> break :: else -> i++ fi
  od
}
inline room(n) {       /* room for n more at b? stale places at the top are helped away */
  do
  :: atomic { ALIVE; t = top; got = (b + n <= t + R) }
     if :: got || t >= b -> break
        :: else -> atomic { ALIVE; pv=a[t%R].ver; pi=a[t%R].idx; got = ISREADY(pi,pv) }
           if :: got -> got=0; break :: else -> castop(t, got) fi
     fi
  od; pv=0; pi=0
}

inline ownerloop() {
  do
  :: n == 0 -> break
  :: n > 0 -> /* push */
     n--; b = bot; room(1);
     if :: got -> takefree(i, v) :: else fi;
     if
     :: got ->
        atomic { ALIVE; assert(WORD(i,v,WRITING,me)); c[i].st=READY }
        atomic { ALIVE; a[b%R].ver=v; a[b%R].idx=i }
        atomic { ALIVE; bot=b+1; accepted[c[i].dat]=1 }     /* dat read before the store of bot, see x */
     :: else
     fi; i=0; v=0; b=0; t=0; got=0
  :: n > 0 -> /* push_batch of 2 */
     n--; b = bot; room(2);
     if :: got -> takefree(i, v) :: else fi;
     if
     :: got ->
        takefree(j, w);
        if
        :: !got -> atomic { ALIVE; c[i].st=FREE; c[i].ver=v+1; c[i].own=0 }
        :: got ->
           x = c[i].dat; y = c[j].dat;
           atomic { ALIVE; c[i].st=READY }
           atomic { ALIVE; c[j].st=READY }
           atomic { ALIVE; a[b%R].ver=v; a[b%R].idx=i }
           atomic { ALIVE; a[(b+1)%R].ver=w; a[(b+1)%R].idx=j }
           atomic { ALIVE; bot=b+2; accepted[x]=1; accepted[y]=1 }
        fi
     :: else
     fi; i=0; v=0; j=0; w=0; x=0; y=0; b=0; t=0; got=0
  :: n > 0 -> /* pop */
     n--;
#ifdef BROKEN_POPFIRST
     /* Chase-Lev's order: the index first, then the cell */
     b = bot - 1;
     atomic { ALIVE; bot = b }
     atomic { ALIVE; t = top }
     if
     :: t > b -> atomic { ALIVE; bot = b+1 }
     :: t <= b ->
        pv=a[b%R].ver; pi=a[b%R].idx;
        take();
        if :: t == b -> castop(t, got); atomic { ALIVE; bot = b+1 } :: else fi;
        if :: got -> finish(pi) :: else fi
     fi;
#else
     atomic { ALIVE; b = bot - 1; t = top }
     if
     :: t > b       /* nothing there */
     :: t <= b ->
        pv=a[b%R].ver; pi=a[b%R].idx;
        take();                        /* the cell first, ... */
#ifndef BROKEN_POPNOINDEX
#ifdef BROKEN_NOFENCE
        atomic { ALIVE; t = top }      /* as if the store of bottom were seen after the load of top */
        atomic { ALIVE; bot = b }
#else
        atomic { ALIVE; bot = b }      /* ... then the index, as in Chase-Lev, whether the cell was got or not */
        atomic { ALIVE; t = top }
#endif
        if
        :: t < b
        :: t == b -> castop(t, got); atomic { ALIVE; bot = b+1 }
        :: t > b -> atomic { ALIVE; bot = b+1 }
        fi;
#else
        atomic { ALIVE; bot = b }
#endif
        if :: got -> finish(pi) :: else fi
     fi;
#endif
     pv=0; pi=0; b=0; t=0; got=0
  od
}
proctype owner1(byte n) {
  byte me=O1, i, v, j, w, b, t, pv, pi, x, y; bit got;
  ownerloop();
die: skip
}
proctype owner2(byte n) {   /* takes the deque over when the first owner has died */
  byte me=O2, i, v, j, w, b, t, pv, pi, x, y; bit got;
  if
  :: atomic { dead[O1] && owner==O1 && !dead[O2] -> owner=O2 }
#ifndef BROKEN_TAKEOVER
     do
     :: atomic { ALIVE; b=bot; t=top }
        if
        :: b > t -> break
        :: b <= t ->   /* position top may have been used: it is consumed, as at the end of a pop */
           castop(t, got); atomic { ALIVE; t = top; bot = t }
           break
        fi
     od; b=0; t=0;
#endif
     ownerloop()
  :: nomore || dead[O2]
  fi;
die: skip
}
inline steal() {
  got = 0;
  do
#ifdef BROKEN_THIEFORDER
  :: atomic { ALIVE; b = bot }
     atomic { ALIVE; t = top }
#else
  :: atomic { ALIVE; t = top }
     atomic { ALIVE; b = bot }
#endif
     if
     :: t >= b -> break
     :: t < b ->
        atomic { ALIVE; pv=a[t%R].ver; pi=a[t%R].idx }
        take();
#ifdef BROKEN_NOHELP
        if :: got -> castop(t, got) :: else -> break fi;
#else
        castop(t, got);       /* whether the cell was got or not; its outcome decides nothing */
#endif
        if
        :: got ->
#ifdef RELEASE
           if :: finish(pi) :: !nomore -> putback(pi, pv) fi;
#else
           finish(pi);
#endif
           break
        :: else
        fi
     fi
  od; pv=0; pi=0; t=0; b=0
}
inline stealback() {   /* the ring `back` beside the deque (its places: cells.pml): a bag of references */
  i=0;
  do
  :: i==NC -> break
  :: i<NC -> atomic { ALIVE; got=0; if :: c[i].st==RETRY && c[i].pub -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; got=1 :: else fi }
     if :: got -> finish(i) :: else fi; i++
  od; i=0; got=0
}
proctype thief(byte me; byte n) {
  byte t, b, pv, pi, i; bit got;
  do
  :: n == 0 -> break
  :: n > 0 -> n--;
#ifdef BACKFIRST
     stealback();
#endif
     steal()
  od;
die: skip
}
proctype rescuer(byte me) {
  byte i, d, v, st, ow, t, b; bit found, ref, got;
again:
  d = 1;
  do
  :: d < 7 && !(dead[d] && !resc[d]) -> d++
  :: else -> break
  od;
  if
  :: d < 7 ->
     i = 0; found = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { ALIVE; v=c[i].ver; st=c[i].st; ow=c[i].own; ref=c[i].pub; if :: ow!=d -> v=0; st=0; ref=0 :: else fi }
        if
        :: ow==d && st==WRITING -> found=1; atomic { ALIVE; if :: WORD(i,v,st,d) -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi }
        :: ow==d && st==TAKEN -> found=1;
           /* taken over, then put back, then published */
           atomic { ALIVE; got=0; if :: WORD(i,v,st,d) -> c[i].ver=v+1; c[i].own=me; got=1 :: else fi }
           if :: got -> putback(i, v+1) :: else fi
        :: ow==d && st==RETRY && !ref ->
#ifdef BROKEN_UNPUBLISHED
           skip
#else
           found=1;
           atomic { ALIVE; got=0; if :: WORD(i,v,st,d) -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; got=1 :: else fi }
           if :: got -> putback(i, v) :: else fi
#endif
        :: ow==d && st==READY ->
           ref = 0;
#ifdef BROKEN_TOPFIRST
           atomic { ALIVE; t = top }
           atomic { ALIVE; b = bot }
#else
           atomic { ALIVE; b = bot }      /* bottom first, then top: the other way round than a thief */
           atomic { ALIVE; t = top }
#endif
#ifdef BROKEN_REFANYWHERE
           t = 0; b = R;
#endif
           do
           :: t >= b -> break
           :: t < b -> atomic { ALIVE; if :: a[t%R].ver==v && a[t%R].idx==i -> ref=1 :: else fi; t++ }
           od;
           if :: !ref -> found=1; atomic { ALIVE; if :: WORD(i,v,st,d) -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi } :: else fi
        :: else
        fi;
        i++; v=0; st=0; ow=0; t=0; b=0; ref=0; got=0
     od;
     atomic { i=0; if :: !found -> resc[d]=1 :: else fi; found=0; goto again }
  :: else
  fi;
die: skip
}
proctype killer() {
  do
  :: atomic { deaths < MAXDEATHS -> deaths++;
     if :: !dead[O1] -> dead[O1]=1 :: !dead[O2] -> dead[O2]=1 :: !dead[T1] -> dead[T1]=1 :: !dead[5] -> dead[5]=1
#if NT>1
     :: !dead[T2] -> dead[T2]=1
#endif
#if NRES>1
     :: !dead[6] -> dead[6]=1
#endif
     fi }
  :: break
  od
}
byte q;
init {
  byte me=7, t, b, pv, pi, i; bit got;
  /* empty places refer to a version that no cell will have */
  atomic { q=0; do :: q<R -> a[q].ver=255; q++ :: else -> break od; q=0 }
  atomic { run owner2(NOPS2); run owner1(NOPS); run thief(T1,NST);
#if NT>1
    run thief(T2,NST);
#endif
    run rescuer(5);
#if NRES>1
    run rescuer(6);
#endif
    run killer() }
  (_nr_pr <= 2); nomore = 1; (_nr_pr == 1);
  run rescuer(7); (_nr_pr == 1);
  do
  :: steal(); if :: got :: else -> break fi
  od;
  stealback();
  run rescuer(7); (_nr_pr == 1);
die:
  atomic {
  q=0; do :: q<NITEM -> assert(results[q]<=1); assert(!accepted[q] || results[q]==1); q++ :: else -> break od;
  q=0; do :: q<NC -> assert(c[q].st==FREE); q++ :: else -> break od; q=0 }
}
