/* Lapsed and overdue workers (subetha/_lapse.pxd, _recovery.pxd, _queue.pxd) in a small world: 1 client (submits, cancels, collects; immortal), a
   worker (2) that may be as slow as it likes or dead, a healthy worker (3), 1 or 2 watchdogs at once that copy and fence, rescue, and may
   die or be lapsed themselves at any step; with -DREUSE somebody (process 4) takes the number of the dead worker as soon as its record is free.
   2 or 3 cells, of which the first is kept back from submitters. The job area is two halves copied in two steps; collecting is one step a cell
   (mail.pml has the steps); `pub` is a reference to the cell's present version; a job's time runs (`late`) once a claim has started it.
   Checked: an accepted job gets a result or was cancelled; at most one is delivered when doubles are dropped by job id; nobody runs a torn job
   or writes into a cell that is not its own; nobody is called overdue for a claim that it has not started; at the end every cell is free.
   A cell that was fenced is discarded, by its holder or the holder's rescuer, by way of COLLECTED(me) of the next version.
     spin -a -DMAXDEATHS=1 lapsed.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                        560 thousand states, no error
     -DMAXDEATHS=2                                      686 thousand
     -DMAXDEATHS=1 -DNC=3 -DNJ=2 -DNOTIMEOUT -DNOCANCEL 946 thousand (a cell used again for another job)
     -DMAXDEATHS=1 -DNOCANCEL -DROUNDS=1 -DRELEASE      244 thousand (a worker may also give its job back)
     two watchdogs, -DNWD=2 -DNOHEALTHY -DNOCANCEL -DROUNDS=0 with
       -DMAXDEATHS=1                                    361 thousand
       -DMAXDEATHS=2 -DNOTIMEOUT                        428 thousand
       -DMAXDEATHS=1 -DNOTIMEOUT -DREUSE                921 thousand (and somebody takes the dead worker's number)
     three cells and two jobs, with timeouts and cancelling, are in check.py --long: NOT run as the model is now
   Variants that must fail:
     -DBROKEN_FENCEFIRST    fence, then copy (no spare cell, or dies between: job lost)
     -DBROKEN_TMO_NOCOPY    an overdue job is fenced without a copy (job lost: its cell is freed, nobody answers)
     -DBROKEN_CANCEL        cancel takes a waiting copy away and does not count that as cancelled (the original is then fenced: job lost)
     -DBROKEN_NOWITHDRAW    the copy is left when the fence fails (cell leaked)
     -DBROKEN_LEFT          a rescue leaves what the dead was discarding, a cell that had been fenced (leaked)
     -DBROKEN_NORECHECK -DNJ=2 -DNOHEALTHY -DNOTIMEOUT -DNOCANCEL -DROUNDS=1   the copy becomes RETRY without a second look at the
                            original's word (a torn job runs)
     and with two watchdogs
     -DBROKEN_NODROP        one watchdog fences the job that the other has in hand to put it back; that one does not free the cell (leaked)
     -DBROKEN_NOCHARGE      a deadline counts whoever has the job now (the one that took it over from the dead is called overdue, and killed)
     -DBROKEN_NOINC -DREUSE a slow rescuer does not look at the record again after reading a word (frees a cell of the number's new holder)
   Not in it: mailbox steps, the client's death, attempts and letters (bury.pml), the ring of put-backs, blocks, weak memory. */
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define DONE 4
#define RETRY 5
#define FENCED 6
#define OVERDUE 7
#define COLLECTED 8
#ifndef NC
#define NC 2
#endif
#ifndef RESERVE
#define RESERVE 1        /* cells below it are kept for copies */
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
#ifndef PASSES
#define PASSES 1         /* how often a watchdog looks for the lapsed */
#endif
#ifndef ROUNDS
#define ROUNDS 3         /* how often the client collects meanwhile */
#endif
#define P 1              /* the client */
#define W 2              /* number of the worker that may be slow or dead, and of who takes it over (process 4); 3: a healthy one */
/* job area in two halves (so that a torn copy shows); chg: the claim that was started (its version + 1); res: the job, or a JobTimeout */
typedef Cell { byte ver; byte st; byte own; byte a; byte b; byte res; byte chg; bit late; bit pub };
Cell c[NC];
/* records: number 2 has incarnations, whose processes are 2 and 4 */
#define USED 0
#define DYING 1
#define UNUSED 2
byte rec[8]; byte inc = 1;
byte deaths; bit dead[8]; bit over;
byte delivered[NJ+1]; bit accepted[NJ+1]; bit cancelled[NJ+1];
/* the client, the healthy worker and who cleans up at the end do not die */
#define STEP if :: true :: deaths < MAXDEATHS && me!=3 && me!=7 -> deaths++; dead[me]=1; goto die fi
#define WORD(i,v,s,o) (c[i].ver==v && c[i].st==s && c[i].own==o)
#define MINE(i,v) (c[i].ver==v && c[i].own==num && (c[i].st==TAKEN || c[i].st==FENCED || c[i].st==OVERDUE))
#define FREEIT(i,v) c[i].st=FREE; c[i].ver=v+1; c[i].own=0; c[i].pub=0; c[i].late=0
#define TIMEOUTRES 10
#ifdef BROKEN_NOCHARGE
#define STARTED(i,v) true
#else
#define STARTED(i,v) (c[i].chg==v+1)
#endif
#define ANYDEAD (ISDEAD(2) || ISDEAD(5) || ISDEAD(6))
#define ISDEAD(d) (rec[d]!=UNUSED && ((d!=W && dead[d]) || (d==W && ((inc==1 && dead[2]) || (inc==2 && dead[4])))))

inline publish(j, v) { atomic { STEP; if :: c[j].ver==v -> c[j].pub=1 :: else fi } }
/* job_discard of FENCED or OVERDUE(o) v: by way of COLLECTED(num) v+1 */
inline discard(j, v, o) {
  atomic { STEP; ok=0; if :: WORD(j,v,FENCED,o) || WORD(j,v,OVERDUE,o) -> c[j].st=COLLECTED; c[j].own=num; c[j].ver=v+1; ok=1 :: else fi }
  if
  :: ok -> atomic { STEP; assert(WORD(j,v+1,COLLECTED,num)); FREEIT(j,v+1) }
  :: else
  fi
}
/* claim_lost: a cell of mine that was fenced is mine to discard */
inline drop(j, v) {
#ifdef BROKEN_NODROP
  skip
#else
  discard(j, v, num)
#endif
}
/* queue_put_back of TAKEN(me) v */
inline putback(j, v) {
  atomic { STEP; ok = WORD(j,v,TAKEN,num) }
  if
  :: ok ->
     atomic { STEP; assert(MINE(j,v)); c[j].late=0 }
     atomic { STEP; if :: WORD(j,v,TAKEN,num) -> c[j].st=RETRY; c[j].ver=v+1; c[j].pub=0 :: else -> ok=0 fi }
  :: else
  fi;
  if :: ok -> publish(j, v+1) :: else -> drop(j, v) fi
}

inline collect() {
  /* the client's collecting, as one step a cell */
  i = 0;
  do
  :: i == NC -> i = 0; break
  :: i < NC -> atomic { if :: c[i].st==DONE ->
        if :: c[i].res==TIMEOUTRES :: else -> assert(c[i].res==c[i].a) fi;
        if :: delivered[c[i].a]==0 && !cancelled[c[i].a] -> delivered[c[i].a]=1 :: else /* a double: dropped by job id */ fi;
        v=c[i].ver; FREEIT(i,v); v=0 :: else fi; i++ }
  od
}
inline submit() {
  /* the next job, past the cells that are kept for copies */
  i=RESERVE; ok=0;
  do
  :: i == NC -> break
  :: i < NC -> atomic { if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=P; v=c[i].ver; ok=1 :: else fi }
     if :: ok -> break :: else -> i++ fi
  od;
  if
  :: ok -> n++; c[i].a = n; c[i].b = n;
     atomic { assert(WORD(i,v,WRITING,P)); c[i].st=READY; c[i].chg=0 }
     atomic { if :: c[i].ver==v -> c[i].pub=1 :: else fi; accepted[n]=1 }
  :: else
  fi; ok=0; i=0; v=0
}
proctype client() {
  byte i, v, n; bit ok; byte rounds = ROUNDS;
  do
  :: n < NJ && (n==0 || delivered[n] || cancelled[n]) -> submit()
  :: n > 0 && rounds > 0 -> rounds--; collect()
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
#endif
  :: n > 0 -> break
  od
}

/* a process `me` with the number `num` */
proctype worker(byte me, num, n) {
  byte i, v, job; bit ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     n--; i = 0;
     do
     :: i == NC -> break
     :: i < NC ->
        atomic { STEP; ok=0; if :: (c[i].st==READY || c[i].st==RETRY) && c[i].pub -> c[i].st=TAKEN; c[i].own=num; c[i].pub=0; v=c[i].ver; ok=1 :: else fi }
        if
        :: ok ->
           if
           :: true ->
              atomic { STEP; assert(MINE(i,v)); assert(c[i].a==c[i].b && c[i].a>0); job=c[i].a; c[i].chg=v+1; c[i].late=1 }       /* a whole job, started */
              /* writes its result area, perhaps much later: the cell must still be its own */
              atomic { STEP; assert(MINE(i,v)); assert(c[i].a==job && c[i].b==job); c[i].res=job }
              atomic { STEP; if :: WORD(i,v,TAKEN,num) -> c[i].st=DONE; ok=1 :: else -> ok=0 fi }
              if
              :: ok          /* published in the mailbox: mail.pml */
              :: !ok -> atomic { STEP; assert(WORD(i,v,FENCED,num) || WORD(i,v,OVERDUE,num)); if :: c[i].st==OVERDUE -> n=0 :: else fi }
                 discard(i, v, num);
                 if :: n==0 -> break :: else fi        /* condemned: claims nothing more */
              fi
#ifdef RELEASE
           :: !over -> putback(i, v)
#endif
           fi
        :: else
        fi;
        atomic { i++; v=0; job=0; ok=0 }
     od
  od;
  atomic { STEP }              /* or dies at rest */
die: atomic { n=0; i=0; v=0; job=0; ok=0 }
}

/* a dead one whose record is not free yet, in d; its incarnation in k */
inline finddead() {
  d = 2;
  do
  :: d==8 || ISDEAD(d) -> break
  :: else -> d++
  od;
  if :: d<8 -> k=(d==W -> inc : 0); if :: rec[d]==USED -> rec[d]=DYING :: else fi :: else -> d=0; k=0 fi
}
#ifdef BROKEN_NOINC
#define GOESON true
#else
#define GOESON (rec[d]==DYING && (d!=W || inc==k))
#endif
#ifdef BROKEN_LEFT
#define LEFT(s) (s!=COLLECTED)
#else
#define LEFT(s) true
#endif
proctype watchdog(byte me; byte n) {
  byte i, j, v, w, x, d, k, st, num=me; bit ok, tmo, found;
again:
  if
  :: atomic { n > 0 -> n-- }      /* the lapsed or overdue: any worker and the other watchdogs count as such at any time */
  :: atomic { ANYDEAD -> finddead(); assert(d>0); goto rescue }
  :: atomic { over && !ANYDEAD -> n=0; goto die }
  fi;
  do
  :: i == NC -> break
  :: i < NC ->
     atomic { STEP; v=c[i].ver; w=c[i].own; st=c[i].st; tmo=(st==TAKEN || (st==RETRY && !c[i].pub)); ok = (tmo && (w==W || (w>=5 && w!=me))); tmo=0;
        if :: ok :: else -> v=0; w=0; st=0 fi }
     if
     :: ok && st==TAKEN ->
        /* lapsed, or out of time: that is said of a claim that was started */
        if :: tmo=0
#ifndef NOTIMEOUT
           :: atomic { c[i].late && STARTED(i,v) -> tmo=1 }
#endif
        fi;
#ifdef BROKEN_TMO_NOCOPY
        if :: tmo -> atomic { STEP; if :: WORD(i,v,TAKEN,w) -> c[i].st=OVERDUE :: else fi }; goto next :: else fi;
#endif
#ifdef BROKEN_FENCEFIRST
        atomic { STEP; if :: WORD(i,v,TAKEN,w) -> c[i].st=FENCED; ok=1 :: else -> ok=0 fi }
        if :: !ok -> goto next :: else fi;
#endif
        j = 0; ok = 0;
        do
        :: j == NC -> break
        :: j < NC -> atomic { STEP; if :: c[j].st==FREE -> c[j].st=WRITING; c[j].own=me; d=c[j].ver; ok=1 :: else fi }
           if :: ok -> break :: else -> j++ fi
        od;
        if
        :: !ok -> goto next
        :: else
        fi;
        atomic { STEP; x = c[i].a; c[j].a = x; x=0 }
        atomic { STEP; x = c[i].b; c[j].b = x; x=0; c[j].chg=0 }
#ifndef BROKEN_NORECHECK
        /* were these really that job's bytes? only then may the copy be seen */
#ifdef BROKEN_FENCEFIRST
        atomic { STEP; ok = 1 }
#else
        atomic { STEP; ok = WORD(i,v,TAKEN,w) }
#endif
        if :: !ok -> atomic { STEP; assert(WORD(j,d,WRITING,me)); FREEIT(j,d) }; goto next :: else fi;
#endif
        /* RETRY(me); the version was bumped when this cell was last freed, so no reference to it exists */
        atomic { STEP; assert(WORD(j,d,WRITING,me)); c[j].st=RETRY }
#ifdef BROKEN_FENCEFIRST
        publish(j, d);
#else
        atomic { STEP; if :: WORD(i,v,TAKEN,w) -> assert(!tmo || c[i].chg==v+1); c[i].st=(tmo -> OVERDUE : FENCED); ok=1 :: else -> ok=0 fi }
        if
        :: ok && !tmo -> publish(j, d)
        :: ok && tmo ->      /* the copy becomes the answer */
           atomic { STEP; if :: WORD(j,d,RETRY,me) -> c[j].st=TAKEN :: else -> ok=0 fi }
           if
           :: ok ->
              atomic { STEP; assert(MINE(j,d)); c[j].res=TIMEOUTRES }
              atomic { STEP; if :: WORD(j,d,TAKEN,me) -> c[j].st=DONE :: else -> ok=0 fi }
              if :: !ok -> drop(j, d) :: else fi
           :: else
           fi
        :: !ok -> /* withdrawn */
#ifndef BROKEN_NOWITHDRAW
           atomic { STEP; if :: WORD(j,d,RETRY,me) -> FREEIT(j,d) :: else fi }
#endif
           skip
        fi;
#endif
next:   skip
     :: ok && st==RETRY ->
        /* not published, of one that lives but is slow: claimed and put back (rescue_unpublished) */
        atomic { STEP; ok=0; if :: WORD(i,v,RETRY,w) -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; ok=1 :: else fi }
        if :: ok -> putback(i, v) :: else fi
     :: else
     fi;
     atomic { j=0; d=0; tmo=0; ok=0; i++; v=0; w=0; st=0 }
  od;
  i=0; goto again;

rescue:
  do
  :: i == NC -> break
  :: i < NC ->
     atomic { STEP; v=c[i].ver; st=c[i].st; w=c[i].own; tmo=c[i].pub; ok=(w==d && st!=FREE && LEFT(st) && !((st==RETRY || st==READY) && tmo) && st!=DONE) }
     if :: ok -> atomic { STEP; if :: GOESON -> found=1 :: else -> ok=0; found=1; i=NC-1 fi } :: else fi;
     if
     :: ok && st==TAKEN ->
        /* taken over, so that one process alone writes into the cell */
        atomic { STEP; ok=0; if :: WORD(i,v,st,d) -> c[i].own=me; c[i].ver=v+1; ok=1 :: else fi }
        if
        :: ok ->
           atomic { STEP; assert(MINE(i,v+1)) }      /* writes down the death */
           putback(i, v+1)
        :: else
        fi
     :: ok && st==RETRY ->
        atomic { STEP; ok=0; if :: WORD(i,v,st,d) -> c[i].st=TAKEN; c[i].own=me; c[i].pub=0; ok=1 :: else fi }
        if :: ok -> putback(i, v) :: else fi
     :: ok && (st==FENCED || st==OVERDUE) -> discard(i, v, d)
     :: ok && st!=TAKEN && st!=RETRY && st!=FENCED && st!=OVERDUE ->
        atomic { STEP; if :: WORD(i,v,st,d) -> FREEIT(i,v) :: else fi }
     :: else
     fi;
     atomic { i++; v=0; st=0; w=0; tmo=0; ok=0 }
  od;
  atomic { STEP; i=0; if :: !found && rec[d]==DYING && (d!=W || inc==k) -> rec[d]=UNUSED :: else fi; d=0; k=0; found=0; goto again }
die: atomic { n=0; i=0; j=0; v=0; w=0; x=0; d=0; k=0; st=0; ok=0; tmo=0; found=0 }
}
#ifdef REUSE
proctype newcomer() {
  if
  :: atomic { rec[W]==UNUSED -> inc=2; rec[W]=USED } run worker(4, W, 1)
  :: true      /* or never comes */
  fi
}
#endif
byte q;
init {
  byte i, v;
  atomic {
#ifdef REUSE
    run newcomer();
#endif
    run client(); run worker(2, W, 1); 
#ifndef NOHEALTHY
    run worker(3, 3, 1);
#endif
    run watchdog(5, PASSES);
#if NWD>1
    run watchdog(6, PASSES);
#endif
  }
  /* everybody has finished, or waits for what will not come */
  (timeout);
  atomic { over = 1; deaths = MAXDEATHS } (_nr_pr == 1);
  run watchdog(7, 0); (_nr_pr == 1);
  run worker(3, 3, 1); (_nr_pr == 1);
  collect();
  atomic {
  q=0; do :: q<NC -> assert(c[q].st==FREE); q++ :: else -> break od;
  q=1; do :: q<=NJ -> assert(!accepted[q] || delivered[q]==1 || cancelled[q]); q++ :: else -> break od; q=0 }
}
