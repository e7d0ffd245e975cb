/* Lapsed and overdue workers in a small world: 1 client (submits, cancels, collects; immortal), a worker (2) that may be as slow as it likes or dead,
   a healthy worker (3), 1 or 2 watchdogs that copy and fence, and rescue, and may die anywhere; 2 or 3 cells of which one is kept back from submitters.
   The job area is two halves copied in two steps; collecting is one step a cell (mail.pml has the steps); `pub` is a reference to the cell's present version.
   Checked: an accepted job gets a result or was cancelled; at most one is delivered when doubles are dropped by job id; nobody runs a torn job or writes into a cell
   that is not its own TAKEN or FENCED; at the end every cell is free.
     spin -a -DMAXDEATHS=1 lapsed.pml && gcc -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m400000    4.6 million states, no error (3 s)
     -DMAXDEATHS=2                                                   8.3 million, no error
     -DMAXDEATHS=1 -DNC=3 -DNJ=2 -DNOTIMEOUT -DNOCANCEL              7.9 million, no error (a cell reused for another job)
     -DMAXDEATHS=1 -DNC=3 -DNJ=2                                     54.8 million, no error (62 s; with cancel and timeouts)
     two watchdogs (-DNWD=2): NOT exhausted; no error in the first 94 million states (1 death), 93 million (2 deaths), 41 million (-DTAKEOVER, 1 death)
   Variants that must fail, and do within seconds (-DMAXDEATHS=1):
     -DBROKEN_FENCEFIRST    fence, then copy (no spare cell, or dies between: job lost)
     -DBROKEN_TMO_NOCOPY    an overdue job is fenced without a copy (job lost: its cell is freed, nobody answers)
     -DBROKEN_CANCEL        cancel takes a waiting copy away and does not count that as cancelled (the original is then fenced: job lost)
     -DBROKEN_NOWITHDRAW    the copy is left when the fence fails (cell leaked)
     -DBROKEN_NORECHECK -DNC=3 -DNJ=2   the copy becomes RETRY without a second look at the original's word (a torn job runs)
   Not in it: mailbox steps, the client's death, attempts, blocks, weak memory. */
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define DONE 4
#define RETRY 5
#define FENCED 6
#ifndef NC
#define NC 2
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#ifndef NJ
#define NJ 1
#endif
#ifndef NWD
#define NWD 1
#endif
#ifndef NW
#define NW 1
#endif
#define P 1      /* the client */
#define W 2      /* the worker that may be slow or dead; 3: a healthy one */
/* job area in two halves (so that a torn copy shows), pub: a reference with the present version has been published; tmo: a TimeoutError result */
typedef Cell { byte ver; byte st; byte own; byte a; byte b; byte res; bit pub };
Cell c[NC];
byte deaths; bit dead[8]; bit resc[8];
byte delivered[3]; bit accepted[3]; bit cancelled[3]; 
bit over;
#define ALIVE if :: dead[me] -> goto die :: else fi
#define WORD(i,v,s,o) (c[i].ver==v && c[i].st==s && c[i].own==o)
#define FREEIT(i,v) c[i].st=FREE; c[i].ver=v+1; c[i].own=0; c[i].pub=0
#define TIMEOUTRES 10

inline collect() {
  /* the client's collecting, as one step a cell (mail.pml has the steps) */
  i = 0;
  do
  :: i == NC -> i = 0; break
  :: i < NC -> atomic { if :: c[i].st==DONE ->
        if :: c[i].res==TIMEOUTRES :: else -> assert(c[i].res==c[i].a) fi;
        if :: delivered[c[i].a]==0 && !cancelled[c[i].a] -> delivered[c[i].a]=1 :: else /* a double: dropped by job id */ fi;
        v=c[i].ver; FREEIT(i,v); v=0 :: else fi; i++ }
  od
}
proctype client() {     /* immortal here */
  byte i, v, n=0, k; bit ok; byte rounds = 3;
  do
  :: n < NJ && (n==0 || delivered[n] || cancelled[n]) ->
     /* submit the next job: one cell is kept back for put-backs and copies */
     atomic { k=0; i=0; do :: i<NC -> if :: c[i].st==FREE -> k++ :: else fi; i++ :: else -> break od; i=0 }
     if
     :: k >= 2 ->
        ok=0;
        do
        :: i == NC -> break
        :: i < NC -> atomic { if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=P; v=c[i].ver; ok=1 :: else fi }
           if :: ok -> break :: else -> i++ fi
        od;
        if
        :: ok -> n++; c[i].a = n; c[i].b = n;
           atomic { assert(WORD(i,v,WRITING,P)); c[i].st=READY }
           atomic { if :: c[i].ver==v -> c[i].pub=1 :: else fi; accepted[n]=1 }
        :: else
        fi; ok=0; i=0; v=0; k=0
     :: else -> k=0
     fi
  :: rounds > 0 -> rounds--; collect()
#ifndef NOCANCEL
  :: n > 0 && !cancelled[n] && !delivered[n] ->
     /* cancel: sweep every cell with this job id that is waiting, copies too; one success is enough */
     i = 0; ok = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { if :: (c[i].st==READY || c[i].st==RETRY) && c[i].a==n && c[i].b==n ->
#ifdef BROKEN_CANCEL
              if :: c[i].st==READY -> ok=1 :: else fi;     /* takes a copy away and does not call the job cancelled */
#else
              ok=1;
#endif
              v=c[i].ver; FREEIT(i,v); v=0 :: else fi; i++ }
     od;
     atomic { i=0; if :: ok -> cancelled[n]=1 :: else fi; ok=0 }
     goto nextjob
#endif
  :: n > 0 -> break
  od;
  goto out;
nextjob:
  if :: n < NJ -> goto again2 :: else fi;
again2:
  /* after a cancel: collect, perhaps one more job */
  do
  :: rounds > 0 -> rounds--; collect()
  :: n < NJ && (delivered[n] || cancelled[n]) ->
     atomic { k=0; i=0; do :: i<NC -> if :: c[i].st==FREE -> k++ :: else fi; i++ :: else -> break od; i=0 }
     if
     :: k >= 2 ->
        ok=0;
        do
        :: i == NC -> break
        :: i < NC -> atomic { if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=P; v=c[i].ver; ok=1 :: else fi }
           if :: ok -> break :: else -> i++ fi
        od;
        if
        :: ok -> n++; c[i].a = n; c[i].b = n;
           atomic { assert(WORD(i,v,WRITING,P)); c[i].st=READY }
           atomic { if :: c[i].ver==v -> c[i].pub=1 :: else fi; accepted[n]=1 }
        :: else
        fi; ok=0; i=0; v=0; k=0
     :: else -> k=0
     fi
  :: break
  od;
out: skip
}

proctype worker(byte me; byte n) {
  byte i, v, job; bit ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     n--; i = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { ALIVE; ok=0; if :: (c[i].st==READY || c[i].st==RETRY) && c[i].pub -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; v=c[i].ver; ok=1 :: else fi }
        if
        :: ok ->
           atomic { ALIVE; assert(c[i].own==me && c[i].ver==v); assert(c[i].a==c[i].b && c[i].a>0); job=c[i].a }       /* a whole job */
           /* writes its result area, perhaps much later: the cell must still be its own */
           atomic { ALIVE; assert(c[i].own==me && c[i].ver==v && (c[i].st==TAKEN || c[i].st==FENCED)); assert(c[i].a==job && c[i].b==job); c[i].res=job }
           atomic { ALIVE; if :: WORD(i,v,TAKEN,me) -> c[i].st=DONE; ok=1 :: else -> ok=0 fi }
           if
           :: ok          /* published in the mailbox: mail.pml */
           :: !ok -> atomic { ALIVE; assert(WORD(i,v,FENCED,me)); FREEIT(i,v) }
#ifndef CLAIMSON
              if :: atomic { ALIVE; goto die } fi
#endif
           fi
        :: else
        fi;
        i++; v=0; job=0; ok=0
     od
  od;
die: skip
}

inline publish(j, v) { atomic { ALIVE; if :: c[j].ver==v -> c[j].pub=1 :: else fi } }

proctype watchdog(byte me; byte n) {
  byte i, j, v, w, ja, st, ow; bit ok, tmo, found; byte d;
again:
  if
  :: dead[me] -> goto die
  :: atomic { n > 0 && !dead[me] -> n-- } ->
     /* a lapsed (or overdue) worker: any worker counts as one at any time */
     i = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { ALIVE; v=c[i].ver; w=c[i].own; ok = (c[i].st==TAKEN && w==W) }
        if
        :: ok ->
           if :: tmo=0 
#ifndef NOTIMEOUT
              :: tmo=1
#endif
           fi;
#ifdef BROKEN_TMO_NOCOPY
           if :: tmo -> atomic { ALIVE; if :: WORD(i,v,TAKEN,w) -> c[i].st=FENCED :: else fi }; goto next :: else fi;
#endif
#ifdef BROKEN_FENCEFIRST
           atomic { ALIVE; if :: WORD(i,v,TAKEN,w) -> c[i].st=FENCED; ok=1 :: else -> ok=0 fi }
           if :: !ok -> goto next :: else fi;
#endif
           j = 0; ok = 0;
           do
           :: j == NC -> break
           :: j < NC -> atomic { ALIVE; if :: c[j].st==FREE -> c[j].st=WRITING; c[j].own=me; d=c[j].ver; ok=1 :: else fi }
              if :: ok -> break :: else -> j++ fi
           od;
           if
           :: !ok -> goto next
           :: else
           fi;
           atomic { ALIVE; ja = c[i].a; c[j].a = ja; ja=0 }
           atomic { ALIVE; ja = c[i].b; c[j].b = ja; ja=0; if :: tmo -> c[j].res=TIMEOUTRES :: else fi }
#ifndef BROKEN_NORECHECK
           /* were these really that job's bytes? only then may the copy be seen */
#ifdef BROKEN_FENCEFIRST
           atomic { ALIVE; ok = 1 }
#else
           atomic { ALIVE; ok = WORD(i,v,TAKEN,w) }
#endif
           if :: !ok -> atomic { ALIVE; assert(WORD(j,d,WRITING,me)); FREEIT(j,d) }; goto next :: else fi;
#endif
#ifndef TMO_EARLYDONE
           /* RETRY(me); the version was bumped when this cell was last freed, so no reference to it exists */
           atomic { ALIVE; assert(WORD(j,d,WRITING,me)); c[j].st=RETRY }
#else
           atomic { ALIVE; assert(WORD(j,d,WRITING,me)); if :: tmo -> c[j].st=DONE :: else -> c[j].st=RETRY fi }
#endif
#ifdef BROKEN_FENCEFIRST
           publish(j, d);
#else
           atomic { ALIVE; if :: WORD(i,v,TAKEN,w) -> c[i].st=FENCED; ok=1 :: else -> ok=0 fi }
           if
           :: ok ->
#ifndef TMO_EARLYDONE
              if :: tmo -> atomic { ALIVE; if :: WORD(j,d,RETRY,me) -> c[j].st=DONE :: else fi }     /* its result is the TimeoutError */
                 :: else -> publish(j, d) fi
#else
              if :: tmo :: else -> publish(j, d) fi
#endif
           :: !ok -> /* withdrawn */
#ifndef BROKEN_NOWITHDRAW
              atomic { ALIVE; if :: WORD(j,d,RETRY,me) -> FREEIT(j,d) :: else fi }
#endif
           fi;
#endif
next:      j=0; d=0; tmo=0; ok=0
        :: else
        fi;
        i++; v=0; w=0
     od;
     i=0; goto again
  :: atomic { !dead[me] && ((dead[2]&&!resc[2]) || (dead[5]&&!resc[5]) || (dead[6]&&!resc[6]) || over) ->
       if :: dead[2]&&!resc[2] -> d=2 :: dead[5]&&!resc[5] -> d=5 :: dead[6]&&!resc[6] -> d=6 :: over && !(dead[2]&&!resc[2]) && !(dead[5]&&!resc[5]) && !(dead[6]&&!resc[6]) -> goto die fi } ->
     i = 0; found = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { ALIVE; v=c[i].ver; st=c[i].st; ow=c[i].own; tmo=c[i].pub }
        if
        :: ow==d && st==TAKEN -> found=1;
           atomic { ALIVE; ok=0; if :: WORD(i,v,st,d) -> c[i].st=RETRY; c[i].own=me; c[i].ver=v+1; c[i].pub=0; ok=1 :: else fi }
           if :: ok -> publish(i, v+1) :: else fi
        :: ow==d && st==RETRY && !tmo -> found=1;
           atomic { ALIVE; ok=0; if :: WORD(i,v,st,d) -> c[i].own=me; c[i].ver=v+1; c[i].pub=0; ok=1 :: else fi }
           if :: ok -> publish(i, v+1) :: else fi
        :: ow==d && (st==WRITING || st==FENCED) -> found=1;
           atomic { ALIVE; if :: WORD(i,v,st,d) -> FREEIT(i,v) :: else fi }
        :: else
        fi;
        i++; v=0; st=0; ow=0; tmo=0; ok=0
     od;
     atomic { i=0; if :: !found -> resc[d]=1 :: else fi; d=0; found=0 } goto again
#ifdef TAKEOVER
  :: atomic { n > 0 && !dead[me] && !over -> n-- } ->
     /* RETRY without a reference of another watchdog that lives but is slow */
     i = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { ALIVE; v=c[i].ver; w=c[i].own; ok=(c[i].st==RETRY && !c[i].pub && w!=me) }
        if :: ok -> atomic { ALIVE; ok=0; if :: WORD(i,v,RETRY,w) -> c[i].own=me; c[i].ver=v+1; c[i].pub=0; ok=1 :: else fi }
              if :: ok -> publish(i, v+1) :: else fi
           :: else fi;
        i++; v=0; w=0; ok=0
     od; i=0; goto again
#endif
  :: !over -> goto die
  fi;
die: skip
}
proctype killer() {
  do
  :: atomic { deaths < MAXDEATHS -> deaths++;
     if :: !dead[W] -> dead[W]=1 :: !dead[5] -> dead[5]=1
#if NWD>1
        :: !dead[6] -> dead[6]=1
#endif
     fi }
  :: break
  od
}
byte q;
init {
  byte i, v;
  atomic { run client(); run worker(W, 1); run worker(3, NW); run watchdog(5, 1);
#if NWD>1
    run watchdog(6, 1);
#endif
    run killer() }
  (_nr_pr == 1);
  over = 1;
  run watchdog(7, 0); (_nr_pr == 1);
  run worker(3, 1); (_nr_pr == 1);
  collect();
  atomic {
  q=0; do :: q<NC -> assert(c[q].st==FREE); q++ :: else -> break od;
  q=1; do :: q<=NJ -> assert(!accepted[q] || delivered[q]==1 || cancelled[q]); q++ :: else -> break od; q=0 }
}
