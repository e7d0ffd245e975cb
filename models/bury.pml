/* Taking over a dead worker's job, and dead letters (bury_job, rescue_pass, job_start, queue_put_back, queue_retry_letter, queue_drop_letter in
   subetha/_recovery.pxd and _queue.pxd) in a small world: 1 cell, workers that claim, start, finish or release, 2 rescuers at once, with
   -DRETRIER one who lets a letter run again, with -DDROPPER one who drops it; any of them may die or stop at any step, a rescuer also
   between taking over and putting back. A job is a letter after MAXA deaths. `pub` and `mail` are references to the cell's present
   version in `back` or `submit`, and in the client's mailbox.
   Checked: nobody writes into a cell that a living one other than itself holds; a letter has as many attempts as workers died that had
   started it, each named once as a cause; whoever is told reads a whole result or letter; the client is told once (once more for a
   letter that ran again), and at the end the cell is free or a letter that was told.
   A cell that was fenced, or a letter that was told and is dropped, is discarded by way of COLLECTED(me) of the next version.
     spin -a -DMAXDEATHS=3 bury.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                        1.0 million states, no error
     -DMAXDEATHS=2 -DRETRIER -DNRES=1                   45 thousand
     -DMAXDEATHS=1 -DFENCES=1                           789 thousand (a leader moves the job away from whoever has it, who discards the cell)
     -DMAXDEATHS=2 -DRETRIER -DNRES=1 -DFENCES=1        146 thousand
     -DMAXDEATHS=3 -DDROPPER                            2.0 million
     -DMAXDEATHS=3 -DDROPPER -DRETRIER -DNRES=1         347 thousand
   Variants that must fail (with -DMAXDEATHS=3):
     -DBROKEN_DIRECT        the death is written down without taking over (a slow rescuer writes into a cell that another one has)
     -DBROKEN_SAMEVERSION   taking over keeps the version (the next rescuer charges the job with the death of the first)
     -DBROKEN_CHARGEALL     a death is written down also where its claim was not started (the same)
     -DBROKEN_LETTERFIRST   DEAD before the letter is written (the client reads none)
     -DBROKEN_UNTOLD        nobody delivers the letter or the result of one that died before it did (the client waits for ever)
     -DBROKEN_CAUSELAST     the attempt is counted before its cause is prepared (dies between: a letter with a cause of nobody)
     -DMAXDEATHS=1 -DFENCES=1 -DBROKEN_NODISCARD   whoever finds its cell fenced leaves it (leaked)
     -DMAXDEATHS=2 -DFENCES=1 -DBROKEN_LEFT        a rescue leaves what the dead was discarding (leaked)
     -DDROPPER -DBROKEN_LEFT                       the same, of a letter that is dropped
     -DDROPPER -DBROKEN_DROPUNTOLD                 a letter that its client was not told of is discarded (the client waits for ever)
   Not in it: places of rings (cells.pml -DTAKEOVER), the client's death (mail.pml), the copy of a fenced job (lapsed.pml; here it is
   answered as soon as the job is fenced), more cells, blocks, weak memory. */
#define FREE 0
#define READY 2
#define TAKEN 3
#define DONE 4
#define RETRY 5
#define DEAD 6
#define FENCED 7
#define COLLECTED 8
#ifndef NW
#define NW 2             /* workers 2, 3, 4, each of which claims once */
#endif
#ifndef MAXA
#define MAXA 2           /* deaths after which a job is a letter */
#endif
#ifndef NRES
#define NRES 2           /* rescuers 5, 6 */
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 3
#endif
#ifndef FENCES
#define FENCES 0         /* how often a leader moves the job away from who has it, dead or alive */
#endif
#define CAUSES 3
#if defined(DROPPER) && NW>2
#error "the dropper has the third worker's number"
#endif
#define KNOWN 8          /* a cause: who died, and whether somebody has written how */
byte ver, st=READY, own=1; bit pub=1, mail;              /* the word, and the references to it */
byte att, chg, cause[CAUSES], text, res;                 /* the cell */
byte deaths, told, reruns; bit dead[8], ran[8], resc[8], over;
#define STEP if :: true :: deaths < MAXDEATHS && me!=7 -> deaths++; dead[me] = 1; goto die fi
#define WORD(v,s,o) (ver==v && st==s && own==o)
#define WAITS (st==READY || st==RETRY)
#define WRITES assert(st!=FREE && (WORD(v,TAKEN,me) || WORD(v,FENCED,me) || dead[own]))
#define CHARGE(v) ((v)+1)

inline publish(v) { atomic { STEP; if :: ver==v && WAITS -> pub=1 :: else fi } }
inline deliver(v) { atomic { STEP; if :: ver==v && (st==DONE || (st==DEAD && own!=0)) -> mail=1 :: else fi } }
/* job_discard of s(o) v: by way of COLLECTED(me) v+1 */
inline discard(v, s, o) {
  atomic { STEP; ok=0; if :: WORD(v,s,o) -> st=COLLECTED; own=me; ver=v+1; ok=1 :: else fi }
  if
  :: ok -> atomic { STEP; assert(WORD(v+1,COLLECTED,me)); st=FREE; own=0; ver=v+2 }
  :: else
  fi
}
/* claim_lost: a cell of mine that was fenced is mine to discard */
inline lost(v) {
#ifdef BROKEN_NODISCARD
  skip
#else
  discard(v, FENCED, me)
#endif
}
/* TAKEN(me) v -> RETRY(me) v+1, uncharged, published */
inline putback(v) {
  atomic { STEP; ok = WORD(v,TAKEN,me) }
  if
  :: ok && chg==CHARGE(v) ->
     atomic { STEP; WRITES; chg=0 }
     atomic { STEP; WRITES; att--; ran[me]=0 }
  :: else
  fi;
  if
  :: ok ->
     atomic { STEP; if :: WORD(v,TAKEN,me) -> st=RETRY; ver=v+1; pub=0 :: else -> ok=0 fi }
     if :: ok -> publish(v+1) :: else fi
  :: else
  fi;
  if :: ok :: else -> lost(v) fi
}
inline isletter() {
  /* every attempt ended with a death, and each is named once */
  assert(att==MAXA && text==MAXA);
  assert(ran[2]+ran[3]+ran[4]==MAXA);
  x=0; do :: x<MAXA -> assert(cause[x]!=0 && ran[cause[x]%KNOWN] && dead[cause[x]%KNOWN]); if :: x>0 -> assert(cause[x]%KNOWN!=cause[x-1]%KNOWN) :: else fi; x++ :: else -> break od; x=0
}
proctype worker(byte me) {
  byte v; bit ok;
  do
  :: atomic { WAITS && pub -> STEP; st=TAKEN; own=me; pub=0; v=ver } break
  :: atomic { over || dead[me] -> goto die }
  od;
  if
  :: true -> goto back                       /* claimed, and given back */
  :: true
  fi;
#ifndef BROKEN_CAUSELAST
  atomic { STEP; WRITES; cause[att%CAUSES]=me }
  atomic { STEP; WRITES; att++; ran[me]=1 }
#else
  atomic { STEP; WRITES; att++; ran[me]=1 }
  atomic { STEP; WRITES; cause[(att-1)%CAUSES]=me }
#endif
  atomic { STEP; WRITES; chg=CHARGE(v) }
  if
  :: true -> goto back                       /* started, and given back */
  :: true
  fi;
  atomic { STEP; WRITES; res=1 }
  atomic { STEP; if :: WORD(v,TAKEN,me) -> st=DONE; ok=1 :: else fi }
  if :: ok -> deliver(v) :: else -> lost(v) fi;
  goto die;
back:
  putback(v);
die: atomic { v=0; ok=0 }
}
#ifdef RETRIER
proctype retrier(byte me) {
  byte v, ow; bit ok;
  if
  :: atomic { st==DEAD && !over -> v=ver; ow=own }
     atomic { STEP; if :: WORD(v,DEAD,ow) -> st=TAKEN; own=me; ver=v+1; mail=0; reruns++; ok=1 :: else fi; ow=0 }
     if
     :: ok ->
        v=v+1; ok=0;
        atomic { STEP; WRITES; att=0; ran[2]=0; ran[3]=0; ran[4]=0; text=0 }
        atomic { STEP; WRITES; chg=0 }
        putback(v)
     :: else
     fi
  :: over
  fi;
die: atomic { v=0; ow=0; ok=0 }
}
#endif
#ifdef DROPPER
proctype dropper(byte me) {
  byte v, ow; bit ok;
  if
  :: atomic { st==DEAD && !over -> v=ver; ow=own }
#ifndef BROKEN_DROPUNTOLD
     if
     :: ow!=0 ->          /* its client has not been told: an ordinary result from here on */
        atomic { STEP; if :: WORD(v,DEAD,ow) -> st=DONE :: else fi }
     :: else -> discard(v, DEAD, 0)
     fi
#else
     discard(v, DEAD, ow)
#endif
  :: over
  fi;
die: atomic { v=0; ow=0; ok=0 }
}
#endif
proctype rescuer(byte me) {
  byte d, v, s, ow, w, x; bit ok, seen, found;
again:
  d=1; x=0;
  atomic { do :: d<7 && !(dead[d] && !resc[d]) -> d++ :: else -> break od }
  if
  :: d==7 && over -> goto die
  :: d==7 && !over -> atomic { over || (dead[1]&&!resc[1]) || (dead[2]&&!resc[2]) || (dead[3]&&!resc[3]) || (dead[4]&&!resc[4]) || (dead[5]&&!resc[5]) || (dead[6]&&!resc[6]) -> goto again }
  :: else
  fi;
  atomic { STEP; seen=(pub && WAITS) }
  atomic { STEP; v=ver; s=st; ow=own }
  if
  :: ow==d && s==TAKEN ->
     found=1;
#ifdef BROKEN_DIRECT
     w=v;
#else
#ifdef BROKEN_SAMEVERSION
     w=v;
#else
     w=v+1;
#endif
     atomic { STEP; if :: WORD(v,TAKEN,d) -> own=me; ver=w; ok=1 :: else fi }
     if :: ok :: else -> goto next fi;
#endif
     /* bury_job: the cell is TAKEN(me) with version w */
     atomic { s=v; v=w; ok=0 }
#ifdef BROKEN_CHARGEALL
     if :: att>0 ->
#else
     if :: chg==CHARGE(s) && att>0 ->
#endif
        atomic { STEP; WRITES; cause[(att-1)%CAUSES]=d+KNOWN }
     :: else fi;
#ifdef BROKEN_DIRECT
     atomic { STEP; if :: WORD(v,TAKEN,d) -> st=RETRY; own=me; ver=v+1; pub=0; ok=1 :: else fi }
     if :: ok -> publish(v+1) :: else fi;
#else
     if
     :: att==0 || att<MAXA -> putback(v)
     :: else ->
#ifdef BROKEN_LETTERFIRST
        atomic { STEP; if :: WORD(v,TAKEN,me) -> st=DEAD; ok=1 :: else fi }
        atomic { STEP; text=att }
#else
        atomic { STEP; WRITES; text=att }
        atomic { STEP; if :: WORD(v,TAKEN,me) -> isletter(); st=DEAD; ok=1 :: else fi }
#endif
        if :: ok -> deliver(v) :: else -> lost(v) fi
     fi;
#endif
     skip
  :: ow==d && s==FENCED -> found=1; discard(v, FENCED, d)
#ifndef BROKEN_LEFT
  :: ow==d && s==COLLECTED -> found=1; atomic { STEP; if :: WORD(v,COLLECTED,d) -> st=FREE; own=0; ver=v+1 :: else fi }
#endif
  :: ow==d && s==RETRY && !seen ->
     /* claimed, as anyone may, and put back */
     found=1;
     atomic { STEP; if :: WORD(v,RETRY,d) -> st=TAKEN; own=me; pub=0; ok=1 :: else fi }
     if :: ok -> putback(v) :: else fi
#ifndef BROKEN_UNTOLD
  :: ow==d && (s==DONE || s==DEAD) ->
     /* marked after the word was read, so the word is looked at again */
     atomic { STEP; seen=mail }
     atomic { STEP; ok=WORD(v,s,ow) }
     if
     :: ok && !seen -> found=1; deliver(v)
     :: !ok -> found=1
     :: else
     fi
#endif
  :: else
  fi;
next:
  atomic { STEP; if :: !found -> resc[d]=1 :: else fi; d=0; v=0; s=0; ow=0; w=0; ok=0; seen=0; found=0; goto again }
die: atomic { d=0; v=0; s=0; ow=0; w=0; x=0; ok=0; seen=0; found=0 }
}
#if FENCES>0
/* a leader, immortal: whoever has the job counts as lapsed. Its copy is answered elsewhere (lapsed.pml); this cell is its holder's to discard */
proctype leader(byte n) {
  do
  :: n==0 -> break
  :: atomic { n>0 && st==TAKEN -> n--; st=FENCED; told++ }
  :: atomic { over -> break }
  od
}
#endif
/* the client, immortal: what lies in its mailbox */
inline collect() {
  atomic {
    if
    :: mail && st==DONE -> assert(res==1 || text==MAXA); told++; mail=0; st=FREE; own=0; ver++; pub=0
    :: mail && st==DEAD && own!=0 -> assert(text==MAXA); told++; mail=0; own=0; ver++
    :: else
    fi }
}
proctype client() {
  do
  :: atomic { mail && (st==DONE || (st==DEAD && own!=0)) -> collect() }
  :: over -> break
  od
}
init {
  atomic {
    run client(); run worker(2);
#if NW>1
    run worker(3);
#endif
#if NW>2
    run worker(4);
#endif
#ifdef RETRIER
    run retrier(1);
#endif
#ifdef DROPPER
    run dropper(4);
#endif
#if FENCES>0
    run leader(FENCES);
#endif
    run rescuer(5);
#if NRES>1
    run rescuer(6);
#endif
  }
  /* everybody is at rest, or waits for something that will not come */
  (timeout);
  over=1; (_nr_pr==1);
  deaths=MAXDEATHS;
  /* what waits still is run once, by one who does not die */
  dead[7]=0;
  run rescuer(7); (_nr_pr==1);
  atomic { if :: WAITS -> assert(pub); pub=0; st=DONE; own=7; res=1; mail=1 :: else fi }
  run rescuer(7); (_nr_pr==1);
  collect();
  atomic { assert(st==FREE || (st==DEAD && own==0)); assert(told>=1 && told<=1+reruns) }
}
