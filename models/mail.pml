/* Mailboxes (docs/design/cells.md) in a small world: one client number with two incarnations (the second takes the number over), the first with a submitting and
   two collecting threads (all die together), 1 worker, 1 or 2 rescuers at once, 1 cell (so it is reused), 2 places. Anybody may die at any step. The mailbox is a bag of
   references (cells.pml has the ring's laps); the kernel's lock is lockh, the client's record (state, incarnation) is (rs, inc).
   Checked: a living client gets exactly one result for each of its jobs and never another's; a cell being written, run or read is taken away from nobody alive;
   at the end every cell is free, every place is empty or stale; a mailbox is never full of live references.
     spin -a -DMAXDEATHS=2 -DNRES=1 -DONECOL mail.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000   1.2 million states, no error
     -DMAXDEATHS=1 -DNRES=2 -DONECOL    7.8 million, no error (two rescuers)
     -DMAXDEATHS=2 -DNRES=1 (two threads that collect) is in check.py --long: NOT run as the model is now
   Variants that must fail (with -DMAXDEATHS=2 -DNRES=1 -DONECOL, except BROKEN_NOINC: -DMAXDEATHS=2), and do within seconds:
     -DMARKLATE           the text before: drain, mark and free the number in one step, drain again (the rescuer dies between: cell leaked)
     -DBROKEN_NOINC       a slow rescuer does not look at the incarnation again after reading a word (frees a cell of the number's new holder)
     -DBROKEN_REG         registration writes the record first and locks then (a rescuer sees a used number unlocked: takes cells of the living)
     -DBROKEN_CHECKFIRST  the publisher looks at the incarnation before publishing instead of after (cell leaked)
     -DBROKEN_RESC        the rescuer publishes a dead worker's DONE without that look (cell leaked)
     -DBROKEN_NOJOBID     the collector does not check the job id (gets an earlier incarnation's result)
     -DNODUPCHECK         DONE is published again although its reference lies there (mailbox full of live references)
   Not in it: laps of the ring, cancellation, copies (lapsed.pml), reuse of the worker's number, blocks, weak memory (publish - look, mark - drain is a store-load pair: seq_cst). */
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define DONE 4
#define COLLECTED 5
#define RETRY 6
/* record of the client's number */
#define UNUSED 0
#define USED 1
#define DYING 2
#ifndef NC
#define NC 1
#endif
#ifndef M
#define M 2
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 2
#endif
#ifndef NJ1
#define NJ1 1
#endif
#ifndef NJ2
#define NJ2 1
#endif
#ifndef NCOL
#define NCOL 1
#endif
#ifndef NRES
#define NRES 2
#endif
#define C 1
#define W 2
#define C2 4
#define LATE 7           /* from this number on nobody dies */
#define W2 8
typedef Cell { byte ver; byte st; byte own; byte jinc; byte jseq; byte res };
typedef Place { bit occ; byte ver; byte idx };
Cell c[NC]; Place m[M];
byte rs = USED, inc = 1, lockh = C;      /* record word (state, incarnation); who holds the kernel's lock */
byte deaths; bit wresc; bit over;
bit dead[9];
byte got[8]; bit accepted[8];            /* by inc*2+seq */
/* C's threads die together, with its lock */
#define STEP if :: dead[me] -> goto die :: else -> if :: true :: deaths < MAXDEATHS && me < LATE -> deaths++; dead[me]=1; if :: lockh==me -> lockh=0 :: else fi; goto die fi fi
#define WORD(i,a,b,d) (c[i].ver==a && c[i].st==b && c[i].own==d)
#define MOVED(k) (!(rs==USED && inc==k))

inline freeplace(s, pv, pi) { atomic { STEP; if :: m[s].occ && m[s].ver==pv && m[s].idx==pi -> m[s].occ=0; m[s].ver=0; m[s].idx=0 :: else fi } }

inline publish(i, v) {
  s = 0; already = 0;
  do
  :: s == M -> /* a result always has room: never a mailbox full of live references */
     atomic { s=0; ok=1; do :: s<M -> if :: m[s].occ && c[m[s].idx].ver==m[s].ver && c[m[s].idx].st==DONE :: else -> ok=0 fi; s++ :: else -> break od; s=0; assert(!ok) }
  :: s < M ->
     atomic { STEP; pf=m[s].occ; pv=m[s].ver; pi=m[s].idx }
     if
#ifndef NODUPCHECK
     :: pf && pv==v && pi==i -> already = 1; break
#endif
     :: !pf -> atomic { STEP; if :: !m[s].occ -> m[s].occ=1; m[s].ver=v; m[s].idx=i; ok=1 :: else -> ok=0 fi }
        if :: ok -> break :: else fi
#ifdef NODUPCHECK
     :: pf ->
#else
     :: pf && !(pv==v && pi==i) ->
#endif
        atomic { STEP; ok = !(c[pi].ver==pv && c[pi].st==DONE) }
        if :: ok -> freeplace(s, pv, pi) :: else -> s++ fi
     fi
  od;
  atomic { ok = 0; pf = 0; pv = 0; pi = 0; s = 0 }
}

proctype submitter(byte me; byte k; byte n) {
  byte i, v; bit ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     n--; i = 0; ok = 0;
     do
     :: i == NC -> break
     :: else -> atomic { STEP; if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=C; v=c[i].ver; ok=1 :: else fi }
        if :: ok -> break :: else -> i++ fi
     od;
     if
     :: ok ->
        atomic { STEP; assert(WORD(i,v,WRITING,C)); c[i].jinc=k; c[i].jseq=n }
        atomic { STEP; assert(WORD(i,v,WRITING,C)); c[i].st=READY; accepted[k*2+n]=1 }
     :: else
     fi;
     atomic { ok = 0; i = 0; v = 0 }
  od;
  atomic { STEP }                              /* or dies at rest */
die: atomic { n = 0; ok = 0; i = 0; v = 0 }
}
proctype client2() {      /* a new incarnation that takes the same number */
  byte me = C2;
  if
#ifdef BROKEN_REG
  :: atomic { rs==UNUSED -> STEP; rs=USED; inc=2 }      /* the record first, ... */
     atomic { STEP; if :: lockh==0 -> lockh=C2 :: else fi }   /* ... then the lock */
     if :: !(rs==USED && inc==2) || dead[me] -> goto die :: else fi
#else
  :: atomic { rs==UNUSED && lockh==0 -> STEP; lockh=C2 }
     atomic { STEP; rs=USED; inc=2 }
#endif
     run submitter(C2, 2, NJ2); run collector(C2, 2, NCOL);
#ifdef TWOCOL2
     run collector(C2, 2, NCOL)
#endif
  :: true      /* or never comes */
  fi;
die: skip
}

proctype collector(byte me; byte k; byte n) {
  byte s, pv, pi, v, st, ow, ji, js; bit pf, ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     n--; s = 0;
     do
     :: s == M -> break
     :: s < M ->
        atomic { STEP; pf=m[s].occ; pv=m[s].ver; pi=m[s].idx }
        if
        :: pf ->
           atomic { STEP; v=c[pi].ver; st=c[pi].st; ow=c[pi].own }
           if
           :: v==pv && st==DONE ->
              atomic { STEP; ji=c[pi].jinc; js=c[pi].jseq }
#ifdef BROKEN_NOJOBID
              ji = k;
#endif
              if
              :: ji == k ->
                 atomic { STEP; ok=0; if :: WORD(pi,v,DONE,ow) -> c[pi].st=COLLECTED; c[pi].own=C; ok=1 :: else fi }
                 if
                 :: ok -> /* read the result, then free: nobody may have taken the cell away */
                    atomic { STEP; assert(WORD(pi,v,COLLECTED,C)); assert(c[pi].jinc==k && c[pi].res==k*2+js); got[k*2+js]++; assert(got[k*2+js]==1) }
                    atomic { STEP; assert(WORD(pi,v,COLLECTED,C)); c[pi].st=FREE; c[pi].ver=v+1; c[pi].own=0 }
                 :: else
                 fi
              :: else -> atomic { STEP; if :: WORD(pi,v,DONE,ow) -> c[pi].st=FREE; c[pi].ver=v+1; c[pi].own=0 :: else fi }
              fi
           :: else
           fi;
           freeplace(s, pv, pi)
        :: else
        fi;
        atomic { s++; pf=0; pv=0; pi=0; v=0; st=0; ow=0; ji=0; js=0; ok=0 }
     od
  od;
die: atomic { n=0; s=0; pf=0; pv=0; pi=0; v=0; st=0; ow=0; ji=0; js=0; ok=0 }
}

proctype worker(byte me; byte n) {
  byte i, v, ji, js, s, pv, pi; bit pf, ok, already, mov;
  do
  :: n == 0 -> break
  :: n > 0 ->
     n--; i = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { STEP; ok=0; if :: c[i].st==READY || c[i].st==RETRY -> c[i].st=TAKEN; c[i].own=me; v=c[i].ver; ok=1 :: else fi }
        if
        :: ok ->
           atomic { STEP; assert(WORD(i,v,TAKEN,me)); ji=c[i].jinc; js=c[i].jseq; c[i].res=ji*2+js }
           atomic { STEP; assert(WORD(i,v,TAKEN,me)); c[i].st=DONE }
#ifdef BROKEN_CHECKFIRST
           atomic { STEP; mov = MOVED(ji) }
           if :: !mov -> publish(i, v) :: else fi;
#else
           publish(i, v);
           atomic { STEP; mov = MOVED(ji) }
#endif
           if :: mov -> atomic { STEP; if :: WORD(i,v,DONE,me) -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi } :: else fi
        :: else
        fi;
        atomic { i++; v=0; ji=0; js=0; mov=0; ok=0; already=0 }
     od
  od;
  atomic { STEP }
die: atomic { n=0; i=0; v=0; ji=0; js=0; s=0; pv=0; pi=0; pf=0; mov=0; ok=0; already=0 }
}

inline drain(k) {
  s = 0;
  do
  :: s == M -> break
  :: s < M ->
     atomic { STEP; pf=m[s].occ; pv=m[s].ver; pi=m[s].idx }
     if
     :: pf ->
        atomic { STEP; v=c[pi].ver; st=c[pi].st; ow=c[pi].own }
        if
        :: v==pv && st==DONE ->
           atomic { STEP; ji=c[pi].jinc }
           if
           :: ji <= k -> found = 1; atomic { STEP; if :: WORD(pi,v,DONE,ow) -> c[pi].st=FREE; c[pi].ver=v+1; c[pi].own=0 :: else fi }
              freeplace(s, pv, pi)
           :: else      /* a later incarnation's: not ours */
           fi
        :: else -> freeplace(s, pv, pi)
        fi
     :: else
     fi;
     atomic { s++; pf=0; pv=0; pi=0; v=0; st=0; ow=0; ji=0 }
  od; s = 0
}

#define WWORK (dead[W] && !wresc)
/* a record that is used, and its lock free; looked at one after the other */
#define CWORK (rs!=UNUSED && (rs==DYING || lockh==0))
proctype rescuer(byte me) {
  byte i, k, v, st, ow, ji, s, pv, pi; bit pf, ok, already, mov, found;
again:
  if
  :: atomic { WWORK -> i = 0; found = 0 }
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { STEP; v=c[i].ver; st=c[i].st; ow=c[i].own }
        if
        :: ow==W && st==TAKEN -> found=1; atomic { STEP; if :: WORD(i,v,st,W) -> c[i].st=RETRY; c[i].own=me; c[i].ver=v+1 :: else fi }
        :: ow==W && st==DONE ->
           atomic { STEP; ji=c[i].jinc }
           publish(i, v);
#ifdef ALWAYSFOUND
           found = 1;
#else
           if :: already :: else -> found = 1 fi;
#endif
           atomic { STEP; mov = MOVED(ji) }
#ifdef BROKEN_RESC
           mov = 0;
#endif
           if :: mov -> found=1; atomic { STEP; if :: WORD(i,v,DONE,W) -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi } :: else fi
        :: else
        fi;
        atomic { i++; v=0; st=0; ow=0; ji=0; mov=0; already=0 }
     od;
     i = 0;
     atomic { STEP; if :: !found -> wresc=1 :: else fi; found = 0; goto again }
  :: atomic { CWORK -> k=inc; st=rs }
     atomic { STEP; ok = (st==DYING || lockh==0) }       /* the kernel's word, tested after the record was read */
     if
     :: ok ->
        found = 0;
#ifndef MARKLATE
        /* mark first: from here on every publisher sees that this incarnation has gone */
        atomic { STEP; if :: rs==USED && inc==k -> rs=DYING :: else fi }
#endif
        i = 0; v=0; st=0;
        do
        :: i == NC -> break
        :: i < NC ->
           atomic { STEP; v=c[i].ver; st=c[i].st; ow=c[i].own }
           if
           :: ow==C && (st==WRITING || st==COLLECTED) ->
#ifdef BROKEN_NOINC
              ok = 1;
#else
              atomic { STEP; ok = (rs!=UNUSED && inc==k) }     /* still the dead incarnation's number, after reading the word */
#endif
              if :: ok -> found=1; atomic { STEP; if :: WORD(i,v,st,C) -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi } :: else fi
           :: else
           fi;
           atomic { i++; v=0; st=0; ow=0 }
        od; i = 0;
        drain(k);
#ifdef MARKLATE
        atomic { STEP; if :: !found && rs==USED && inc==k -> rs=UNUSED :: else fi }
        drain(k);
#else
        atomic { STEP; if :: !found && rs==DYING && inc==k -> rs=UNUSED :: else fi }
#endif
        atomic { found = 0; k=0; ok=0; goto again }
     :: else -> atomic { k=0; st=0; goto again }
     fi
  :: atomic { over && !WWORK && !CWORK }
  fi;
die: atomic { i=0; k=0; v=0; st=0; ow=0; ji=0; s=0; pv=0; pi=0; pf=0; ok=0; already=0; mov=0; found=0 }
}
byte q;
init {
  atomic { run client2(); run submitter(C,1,NJ1); run collector(C,1,NCOL);
#ifndef ONECOL
  run collector(C,1,NCOL);
#endif
  run worker(W,NJ1+NJ2); run rescuer(5);
#if NRES>1
  run rescuer(6);
#endif
  }
  /* everybody has finished, or waits for what will not come */
  (timeout); atomic { over = 1; deaths = MAXDEATHS } (_nr_pr == 1);
  /* the end: everybody left is alone and immortal */
  run rescuer(7); (_nr_pr == 1);
  run worker(W2, 1); (_nr_pr == 1);
  run rescuer(7); (_nr_pr == 1);
  if :: rs==USED && inc==1 -> run collector(C,1,1) :: rs==USED && inc==2 -> run collector(C2,2,1) :: else fi; (_nr_pr == 1);
  atomic {
  q=0; do :: q<NC -> assert(c[q].st==FREE); q++ :: else -> break od;
  q=0; do :: q<M -> assert(!m[q].occ || !(c[m[q].idx].ver==m[q].ver && c[m[q].idx].st==DONE)); q++ :: else -> break od;
  q=0; do :: q<8 -> assert(got[q]<=1);
     if :: (q/2==1 && !dead[C]) || (q/2==2 && rs==USED && inc==2 && !dead[C2]) -> assert(got[q]==accepted[q]) :: else fi; q++ :: else -> break od;
  q=0 }
}
