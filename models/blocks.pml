/* Blocks and their links (job_discard, job_free_if, queue_put_back, claim_lost, letters in subetha/_queue.pxd; _blocks.pxd; copy_block in _lapse.pxd;
   rescue_taken in _recovery.pxd) in a small world: 1 or 2 cells with long jobs, 2 blocks or 3, one that submits the next job (or does not), a
   worker that finishes or puts back, and may be stopped with the link moved and its cell not, the client, who drops or retries a letter, a
   leader that copies and fences (whoever has the job), rescuers; any of them may die or stop at any step. `told`: a result or a letter came.
   A block's link is moved to the next version before the cell is. Where the cell then goes another way the link has either version: whoever
   frees such a cell moves the link too, takes the cell by COLLECTED(me) of the next version, and frees both by that version.
   Checked: a job that waits, runs, is fenced, a letter or done has its own block, linked to its version or (not while it waits) to the next
   one; who writes into a block or links it owns it; every accepted job is told of even while the stopped one is stopped; at the end each
   cell is free, and each block is free or linked to a version that its cell has passed, so that an allocation takes it over.
     spin -a -DLETTERS -DNLET=2 -DMAXDEATHS=2 -DCLAIMS=0 blocks.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                        284 thousand states, no error (begins with a letter that nobody was told of)
     -DNLET=1 -DMAXDEATHS=2 -DNRES=2                    167 thousand (begins with a job that waits; a rescuer may make it a letter)
     -DNC=2 -DLEADS=1 -DSTOPS=1 -DMAXDEATHS=1           147 thousand (a leader, one may be stopped)
     -DNC=2 -DLEADS=2 -DSTOPS=1 -DMAXDEATHS=1 -DNB=3 -DCLAIMS=2   2.6 million
   Variants that must fail:
     -DLETTERS -DNLET=1 -DMAXDEATHS=1 -DCLAIMS=0 with
     -DBROKEN_FREENEXT      who drops a letter frees the cell by its version, then the links of it and of the next one (takes the block of
                            the cell's next job)
     -DBROKEN_RELEASE       a result is freed by its version, though it may be a letter that was dropped while somebody was about to tell
                            of it, or to let it run again (leak)
     -DNC=2 -DLEADS=1 -DSTOPS=1 -DMAXDEATHS=0 -DNRES=0 -DNJ=1 with
     -DBROKEN_OLDWAY        a fenced cell is freed by its version (its block has the next one: leak)
     -DBROKEN_ONEVERSION    a copy looks for a link of the cell's version only (the job is not moved on while its worker is stopped)
   Not in it: blocks for results, holes and punching, OVERDUE (freed as FENCED) and QUARANTINED (as DEAD), places (cells.pml), attempts (bury.pml),
   reuse of a dead one's number (cells.pml, lapsed.pml), a client that dies and whose number is taken (mail.pml), damage, versions that wrap,
   weak memory. */
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define DONE 4
#define RETRY 5
#define FENCED 6
#define DEAD 7
#define COLLECTED 8
#define OWNED 1
#define LINKED 2
#ifndef NC
#define NC 1             /* cells; submitters use the last one, where there are two the first is kept for copies */
#endif
#ifndef NB
#define NB 2             /* blocks, numbers from 1; 0: none */
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#ifndef NJ
#define NJ 2             /* jobs; the first one is there from the beginning */
#endif
#ifndef CLAIMS
#define CLAIMS 1         /* claims of the worker */
#endif
#ifndef STOPS
#define STOPS 0          /* how often somebody is stopped, until `resume`, with the link moved and the cell not */
#endif
#ifndef NRES
#define NRES 1           /* rescuers 6, 7 */
#endif
#ifndef LEADS
#define LEADS 0          /* fences of the leader */
#endif
#ifndef NLET
#define NLET 0           /* who drop or retry a letter: 3, 8 */
#endif
#define LATE 10          /* from this number on nobody dies */
#define WORD(v,s,o) ((v)*256 + (s)*16 + (o))
#define VER(w) ((w)/256)
#define ST(w) (((w)/16)%16)
#define OWN(w) ((w)%16)
#define LINK(i,v) ((v)*64 + (i)*4 + LINKED)
#define HAS(o) ((o)*4 + OWNED)
#define BSET(w) ((w)%4)
#define BOWN(w) (((w)/4)%16)
#define BVER(w) ((w)/64)
#define ORPHAN(w) (BSET(w)==LINKED && BVER(w) < VER(c[BOWN(w)]))
#define WAITS(i) (ST(c[i])==READY || ST(c[i])==RETRY)
#define ENDED(i) (ST(c[i])==DONE || (ST(c[i])==DEAD && OWN(c[i])!=0))
short c[NC]; byte jblock[NC], job[NC];       /* cells: word, block and job */
short bw[NB+1]; byte data[NB+1];             /* blocks: word, and whose job lies in it */
byte deaths, stops; bit dead[16], over, resume, told[NJ+1], accepted[NJ+1];
#define STEP if :: true :: deaths < MAXDEATHS && me < LATE -> deaths++; dead[me]=1; goto die fi
/* the job's own block, linked to the cell's version or, in a put-back, to the next one */
#define GOOD(i) (jblock[i] && data[jblock[i]]==job[i] && (bw[jblock[i]]==LINK(i,VER(c[i])) || (bw[jblock[i]]==LINK(i,VER(c[i])+1) && !WAITS(i))))
#define LIVE(i) (WAITS(i) || ST(c[i])==TAKEN || ST(c[i])==FENCED || ST(c[i])==DEAD || ST(c[i])==DONE)
#if NC>1
#define BAD ((LIVE(0) && !GOOD(0)) || (LIVE(1) && !GOOD(1)))
#else
#define BAD (LIVE(0) && !GOOD(0))
#endif
proctype monitor() {
end:
  atomic { BAD -> assert(!BAD) }
}

/* a block or none: number in k */
inline allocate() {
  k=1;
  do
  :: k > NB -> k=0; break
  :: k <= NB ->
     atomic { STEP; y=bw[k]; ok=(y==FREE || ORPHAN(y)) }
     if
     :: ok -> atomic { STEP; if :: bw[k]==y -> bw[k]=HAS(me) :: else -> ok=0 fi }
     :: else
     fi;
     if :: ok -> break :: else -> k++ fi
  od;
  atomic { y=0; ok=0 }
}
inline blockfree(bx, bi, bv) { atomic { STEP; if :: bx && bw[bx]==LINK(bi,bv) -> bw[bx]=FREE :: else fi } }
inline relink(rx, ri, rv) { atomic { STEP; if :: rx && bw[rx]==LINK(ri,rv) -> bw[rx]=LINK(ri,(rv)+1) :: else fi } }
inline move(mi, mf, mt) { atomic { STEP; if :: c[mi]==mf -> c[mi]=mt; ok=1 :: else -> ok=0 fi } }
/* job_free_if: the block is read before the word is changed, and freed after that */
inline free(fi_, fw) {
  atomic { STEP; f=jblock[fi_] }
  move(fi_, fw, WORD(VER(fw)+1,FREE,0));
  if :: ok -> blockfree(f, fi_, VER(fw)) :: else fi;
  f=0
}
inline discard(di, dw) {
#ifdef BROKEN_OLDWAY
  free(di, dw)
#else
  atomic { STEP; f=jblock[di] }
  relink(f, di, VER(dw));
  move(di, dw, WORD(VER(dw)+1,COLLECTED,me));
  if :: ok -> dw=WORD(VER(dw)+1,COLLECTED,me); free(di, dw) :: else fi;
  f=0
#endif
}
/* a result that was collected: COLLECTED(me) */
inline release(ei, ew) {
#ifdef BROKEN_RELEASE
  free(ei, ew)
#else
  discard(ei, ew)
#endif
}
inline lost(li, lw) {
  atomic { STEP; ok=(c[li]==WORD(VER(lw),FENCED,me)); if :: ok -> lw=c[li] :: else fi }
  if :: ok -> discard(li, lw) :: else fi
}
inline giveback(gi, gw) {
  atomic { STEP; ok=(c[gi]==gw); f=jblock[gi] }
  if
  :: ok ->
     relink(f, gi, VER(gw));
     if :: true :: atomic { stops < STOPS && me < LATE -> stops++ } (resume) fi;
     move(gi, gw, WORD(VER(gw)+1,RETRY,me))
  :: else
  fi;
  f=0;
  if :: ok :: else -> lost(gi, gw) fi
}

proctype submitter(byte me; byte n) {
  byte k, f; short w, y; bit ok; byte i=NC-1;
  if
  :: atomic { ST(c[i])==FREE -> w=WORD(VER(c[i]),WRITING,me); STEP; c[i]=w }
  :: atomic { true -> goto die }               /* or never comes */
  fi;
  allocate();
  if
  :: k ->
     atomic { STEP; assert(bw[k]==HAS(me)); data[k]=n }
     atomic { STEP; assert(bw[k]==HAS(me)); bw[k]=LINK(i,VER(w)) }
     atomic { STEP; assert(c[i]==w); jblock[i]=k; job[i]=n }
     atomic { STEP; assert(c[i]==w); c[i]=WORD(VER(w),READY,me); accepted[n]=1 }
  :: else -> move(i, w, WORD(VER(w)+1,FREE,0))
  fi;
die: skip
}
#if NC>1
#define PICK(COND) :: atomic { COND(0) -> i=0; w=c[0] } :: atomic { COND(1) -> i=1; w=c[1] } :: atomic { (over || me >= LATE) && !COND(0) && !COND(1) -> goto die }
#else
#define PICK(COND) :: atomic { COND(0) -> i=0; w=c[0] } :: atomic { (over || me >= LATE) && !COND(0) -> goto die }
#endif
/* claims, and finishes or puts back */
proctype worker(byte me; byte n) {
  byte f, i; short w; bit ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     if
     PICK(WAITS)
     fi;
     move(i, w, WORD(VER(w),TAKEN,me));
     if
     :: ok ->
        w=WORD(VER(w),TAKEN,me);
        if
        :: true -> move(i, w, WORD(VER(w),DONE,me)); if :: ok :: else -> lost(i, w) fi
        :: me < LATE -> giveback(i, w)
        fi;
        if :: me < LATE -> n-- :: else fi
     :: else
     fi;
     atomic { w=0; i=0; ok=0 }
  od;
die: skip
}
/* the client: a result is collected, a letter told of */
proctype collector(byte me) {
  byte f, i; short w; bit ok;
  do
  ::
     if
     PICK(ENDED)
     fi;
     if
     :: ST(w)==DONE ->
        atomic { STEP; if :: c[i]==w -> c[i]=WORD(VER(w),COLLECTED,me); told[job[i]]=1; ok=1 :: else fi }
        if :: ok -> w=WORD(VER(w),COLLECTED,me); release(i, w) :: else fi
     :: else ->
        atomic { STEP; f=jblock[i] }
        relink(f, i, VER(w));
        atomic { STEP; if :: c[i]==w -> c[i]=WORD(VER(w)+1,DEAD,0); told[job[i]]=1 :: else fi; f=0 }
     fi;
     atomic { w=0; i=0; ok=0 }
  od;
die: skip
}
#define LETTER(i) (ST(c[i])==DEAD)
#define OLDLETTER(i) (c[i]==WORD(VER(c[i]),DEAD,0))
/* queue_drop_letter and queue_retry_letter */
proctype letters(byte me) {
  byte f, i; short w; bit ok;
  do
  ::
     if
     PICK(LETTER)
     fi;
     if
     :: OWN(w)==0 ->
#ifdef BROKEN_FREENEXT
        atomic { STEP; f=jblock[i] }
        move(i, w, WORD(VER(w)+1,FREE,0));
        if :: ok -> blockfree(f, i, VER(w)); blockfree(f, i, VER(w)+1) :: else fi;
        f=0
#else
        discard(i, w)
#endif
     :: OWN(w)!=0 -> move(i, w, WORD(VER(w),DONE,OWN(w)))     /* the reference in the mailbox stays good */
     :: me < LATE ->
        atomic { STEP; f=jblock[i] }
        relink(f, i, VER(w));
        move(i, w, WORD(VER(w)+1,TAKEN,me));
        f=0;
        if :: ok -> w=WORD(VER(w)+1,TAKEN,me); giveback(i, w) :: else fi
     fi;
     atomic { w=0; i=0; ok=0 }
     if :: me < LATE -> break :: else fi
  od;
die: skip
}
/* fences what somebody else has in hand: lapsed is said of anybody at any time */
#define LAPSED(i) (ST(c[i])==TAKEN && OWN(c[i])!=me && ST(c[1-i])==FREE)
proctype leader(byte me; byte n) {
  byte f, i, j, k, x; short w, d, y; bit ok;
  do
  :: n == 0 -> break
  :: n > 0 ->
     if
     PICK(LAPSED)
     fi;
     if :: me < LATE -> n-- :: else fi;
     /* the spare cell */
     atomic { j=1-i; d=VER(c[j]) }
     move(j, WORD(d,FREE,0), WORD(d,WRITING,me));
     if :: !ok -> goto next :: else fi;
     d=WORD(d,WRITING,me);
     /* copy_block */
     atomic { STEP; job[j]=job[i]; x=jblock[i]; jblock[j]=0 }
     atomic { STEP; ok=(x && bw[x]==LINK(i,VER(w))) }
#ifndef BROKEN_ONEVERSION
     if :: !ok -> atomic { STEP; ok=(x && bw[x]==LINK(i,VER(w)+1)) } :: else fi;
#endif
     if :: !ok -> free(j, d); goto next :: else fi;
     allocate();
     if :: !k -> free(j, d); goto next :: else fi;
     atomic { STEP; assert(bw[k]==HAS(me)); data[k]=data[x] }
     atomic { STEP; assert(c[j]==d); jblock[j]=k }
     atomic { STEP; assert(bw[k]==HAS(me)); bw[k]=LINK(j,VER(d)) }
     /* is the original where it was? only then may the copy be seen */
     atomic { STEP; ok=(c[i]==w) }
     if :: !ok -> free(j, d); goto next :: else fi;
     atomic { STEP; assert(c[j]==d); d=WORD(VER(d),RETRY,me); c[j]=d }
     move(i, w, WORD(VER(w),FENCED,OWN(w)));
     if :: !ok -> free(j, d) :: else fi;
next:
     atomic { w=0; i=0; j=0; ok=0; d=0; k=0; x=0; f=0 }
     /* what could not be moved now is looked at again later */
     if :: me >= LATE -> break :: else fi
  od;
die: skip
}
#define DEADS(i) (OWN(c[i]) && dead[OWN(c[i])] && (ST(c[i])==WRITING || ST(c[i])==TAKEN || ST(c[i])==COLLECTED || ST(c[i])==FENCED))
#define DEADB(k) (BSET(bw[k])==OWNED && dead[BOWN(bw[k])])
#if NC>1
#define DEADC (DEADS(0) || DEADS(1))
#else
#define DEADC (DEADS(0))
#endif
#if NB>2
#define MOREDEAD (DEADC || DEADB(1) || DEADB(2) || DEADB(3))
#else
#define MOREDEAD (DEADC || DEADB(1) || DEADB(2))
#endif
proctype rescuer(byte me) {
  byte f, i, k; short w; bit ok;
  do
  ::
     if
     :: atomic { DEADS(0) -> i=0; w=c[0] }
#if NC>1
     :: atomic { DEADS(1) -> i=1; w=c[1] }
#endif
     :: atomic { DEADB(1) -> k=1; w=bw[k] }
     :: atomic { DEADB(2) -> k=2; w=bw[k] }
#if NB>2
     :: atomic { DEADB(3) -> k=3; w=bw[k] }
#endif
     :: atomic { over && !MOREDEAD -> goto die }
     fi;
     if
     :: k -> atomic { STEP; if :: bw[k]==w -> bw[k]=HAS(me) :: else -> k=0 fi }
        if :: k -> atomic { STEP; assert(bw[k]==HAS(me)); bw[k]=FREE } :: else fi
     :: !k && ST(w)==WRITING -> free(i, w)
     :: !k && ST(w)==COLLECTED -> release(i, w)
     :: !k && ST(w)==FENCED -> discard(i, w)
     :: !k && ST(w)==TAKEN ->
        atomic { STEP; f=jblock[i] }
        relink(f, i, VER(w));
        move(i, w, WORD(VER(w)+1,TAKEN,me));
        f=0;
        if
        :: ok ->
           w=WORD(VER(w)+1,TAKEN,me);
           if
           :: true -> giveback(i, w)
#if NLET>0
           :: me < LATE -> move(i, w, WORD(VER(w),DEAD,me)); if :: ok :: else -> lost(i, w) fi
#endif
           fi
        :: else
        fi
     fi;
     atomic { w=0; i=0; ok=0; k=0; f=0 }
  od;
die: skip
}
byte q, r;
#define IDLE (timeout)
inline allended() { q=1; do :: q<=NJ -> assert(!accepted[q] || told[q]); q++ :: else -> break od; q=0 }
/* everything that is left is done by those who do not die; twice, since the next job is perhaps handed in between */
inline finish() {
  do
  :: r == 2 -> r=0; break
  :: r < 2 -> r++;
     run letters(15); IDLE;
#if NC>1
     run leader(11,1); IDLE;
     run leader(11,1); IDLE;
#endif
     run worker(12,1); IDLE;
     run collector(13); IDLE
  od
}
init {
  atomic {
    accepted[1]=1; job[NC-1]=1; jblock[NC-1]=1; data[1]=1; bw[1]=LINK(NC-1,0);
#ifdef LETTERS
    c[NC-1]=WORD(0,DEAD,6);
#else
    c[NC-1]=WORD(0,READY,1);
#endif
    run monitor();
#if NJ>1
    run submitter(1,2);
#endif
#if NJ>2
    run submitter(9,3);
#endif
#if CLAIMS>0
    run worker(2,CLAIMS);
#endif
    run collector(4);
#if NLET>0
    run letters(3);
#endif
#if NLET>1
    run letters(8);
#endif
#if LEADS>0
    run leader(5,LEADS);
#endif
#if NRES>0
    run rescuer(6);
#endif
#if NRES>1
    run rescuer(7);
#endif
  }
  (timeout);
  atomic { deaths=MAXDEATHS; stops=STOPS }
  run rescuer(10); IDLE;
  finish();
  allended();
  resume=1; IDLE;
  over=1; IDLE;
  finish();
  allended();
  atomic {
    q=0; do :: q<NC -> assert(ST(c[q])==FREE); q++ :: else -> break od;
    q=1; do :: q<=NB -> assert(bw[q]==FREE || ORPHAN(bw[q])); q++ :: else -> break od; q=0 }
}
