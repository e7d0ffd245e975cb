/* Cells and references (docs/design/cells.md) in a small world: 1 or 2 producers, 1 or 2 consumers, 2 rescuers at once, 1 or 2 cells.
   Any process may die or stop at any step, the rescuers too; several rescuers may work on the same victim. With -DREUSE somebody takes
   the number of a dead consumer as soon as its record is free, while a slow rescuer may still work on the dead one. At the end living
   rescuers run, then a drain: an accepted item has exactly one result, and every cell is free.
     spin -a -DMAXDEATHS=2 cells.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                  1.3 million states, no error
     -DREUSE -DNKS=1 -DMAXDEATHS=2                157 thousand, no error
     -DTAKEOVER -DMAXDEATHS=1                     300 thousand, no error: a queue's rescue, TAKEN(dead) -> TAKEN(me) -> RETRY(me), and
                                                  RETRY(dead) -> TAKEN(me) -> RETRY(me); a ring's own goes to RETRY(me) at once
     -DTAKEOVER -DREUSE -DNKS=1 -DMAXDEATHS=1     30 thousand, no error
     -DNP=2 -DNKS=1 -DNRES=1 -DMAXDEATHS=1        11 thousand, no error (two submitters and one cell)
     -DNP=2 -DNC=2 -DRESERVE=1 -DCOPIES=1 -DNKS=1 -DNRES=0 -DMAXDEATHS=1
                                                  45 thousand, no error (one cell is kept for who copies, who always finds it)
   Variants that must fail (with -DMAXDEATHS=2):
     -DNOBUMP         a put-back keeps its version (a helper that judged the old place stale then frees a live reference: job lost);
                      also with -DTAKEOVER
     -DBROKEN_RETRY   a put-back job passes through READY (its rescuer dies unpublished: job lost)
     -DBROKEN_READY   a dead submitter's unpublished cell is left (cell leaked)
     -DBROKEN_NOINC -DREUSE -DNKS=1   a slow rescuer does not look at the record again after reading a word (takes the cell of
                      the number's new holder)
     -DBROKEN_RESERVE submitters take any cell (with the last world and no deaths: who copies finds none)
   Not in it: mailboxes (mail.pml), the lapsed worker (lapsed.pml), attempts and letters (bury.pml), blocks, weak memory. */
#ifdef NOBUMP
#define BUMP
#else
#define BUMP c[i].ver=v+1; v=v+1;
#endif
#ifndef NC
#define NC 1
#endif
#define R (2*NC)
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define DONE 4
#define RETRY 5
#ifndef NKS
#define NKS 2
#endif
#ifndef NP
#define NP 1             /* submitters */
#endif
#ifndef RESERVE
#define RESERVE 0        /* cells below it are kept from submitters, for COPIES that never find none */
#endif
#ifndef COPIES
#define COPIES 0
#endif
#ifndef NRES
#define NRES 2           /* rescuers at once */
#endif
#define NITEM (NP+COPIES)
typedef Cell { byte ver; byte st; byte own; byte dat };
typedef Place { byte lap; bit occ; byte ver; byte idx };
Cell c[NC]; Place p[R];
byte tail, head, results[NITEM], deaths;
bit accepted[NITEM];
bit dead[8]; bit rescued[8]; bit over; byte inc[8];
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#define REST pos=0; s=0; lap=0; pl=0; pf=0; pv=0; pi=0
#define STEP if :: true :: deaths < MAXDEATHS -> deaths++; dead[me]=1; goto die fi

inline publish(me, i, v) {
  /* returns ok */
  do
  :: atomic { STEP; pos = tail; s = pos % R; lap = pos / R; pl = p[s].lap; pf = p[s].occ; pv = p[s].ver; pi = p[s].idx }
     if
     :: pl == lap && !pf ->
        atomic { STEP; if :: p[s].lap==pl && p[s].occ==pf && p[s].ver==pv && p[s].idx==pi -> p[s].occ=1; p[s].ver=v; p[s].idx=i; ok=1 :: else -> ok=0 fi }
        if :: ok -> break :: else fi
     :: pl < lap || (pl == lap && pf && 0) ->
        /* occupied from the lap before: stale? help, else occ */
        atomic { STEP; stale = !(c[pi].ver==pv && (c[pi].st==READY || c[pi].st==RETRY)) }
        if
        :: pf && stale -> atomic { STEP; if :: p[s].lap==pl && p[s].occ && p[s].ver==pv && p[s].idx==pi -> p[s].occ=0; p[s].lap=pl+1; p[s].ver=0; p[s].idx=0 :: else fi }
        :: else -> ok=0; break
        fi
     :: else -> atomic { STEP; if :: tail==pos -> tail=pos+1 :: else fi }
     fi
  od
}

proctype producer(byte me; byte item) {
  byte i, v, pos, s, lap, pl, pv, pi; bit pf, ok, stale;
#ifndef BROKEN_RESERVE
  i = RESERVE;
#endif
  do
  :: i == NC -> goto end
  :: else -> atomic { STEP; ok=0; if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=me; v=c[i].ver; ok=1 :: else -> i++ fi }
     if :: ok -> break :: else fi
  od;
  atomic { STEP; c[i].dat = item }
  atomic { STEP; c[i].st = READY }
  publish(me, i, v);
  if
  :: ok -> atomic { STEP; accepted[item] = 1; if :: tail==pos -> tail=pos+1 :: else fi }
  :: else -> /* withdraw */
     atomic { STEP; if :: c[i].st==READY && c[i].own==me && c[i].ver==v -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else -> accepted[item]=1 fi }
  fi;
end: skip;
die: atomic { i=0; v=0; ok=0; stale=0; REST }
}

#if COPIES>0
/* takes a spare cell and puts its job back, as who copies a lapsed worker's: there always is one */
proctype copier(byte me; byte item) {
  byte i, v, pos, s, lap, pl, pv, pi; bit pf, ok, stale;
  do
  :: i == NC -> assert(0)
  :: else -> atomic { STEP; ok=0; if :: c[i].st==FREE -> c[i].st=WRITING; c[i].own=me; v=c[i].ver; ok=1 :: else -> i++ fi }
     if :: ok -> break :: else fi
  od;
  atomic { STEP; c[i].dat = item }
  atomic { STEP; c[i].st = RETRY }
  ok=0; do :: ok -> break :: else -> publish(me, i, v) od;
  atomic { STEP; accepted[item] = 1; if :: tail==pos -> tail=pos+1 :: else fi }
die: atomic { i=0; v=0; ok=0; stale=0; REST }
}
#endif
inline claim(me) {
  got = 0;
  do
  :: atomic { STEP; pos=head; s=pos%R; lap=pos/R; pl=p[s].lap; pf=p[s].occ; pv=p[s].ver; pi=p[s].idx }
     if
     :: pl==lap && !pf -> break
     :: pl==lap && pf ->
        atomic { STEP; v=c[pi].ver; st=c[pi].st; ow=c[pi].own }
        if
        :: v==pv && (st==READY || st==RETRY) ->
           atomic { STEP; if :: c[pi].ver==v && c[pi].st==st && c[pi].own==ow -> c[pi].st=TAKEN; c[pi].own=me; got=1 :: else fi }
        :: else
        fi;
        if :: got || !(v==pv && (st==READY||st==RETRY)) ->
           atomic { STEP; if :: p[s].lap==pl && p[s].occ==pf && p[s].ver==pv && p[s].idx==pi -> p[s].occ=0; p[s].lap=pl+1; p[s].ver=0; p[s].idx=0 :: else fi }
           atomic { STEP; if :: head==pos -> head=pos+1 :: else fi }
        :: else fi;
        if :: got -> break :: else fi
     :: pl > lap -> atomic { STEP; if :: head==pos -> head=pos+1 :: else fi }
     :: pl < lap -> break
     fi
  od;
  atomic { v=0; st=0; ow=0; pos=0; s=0; lap=0; pl=0; pf=0; pv=0 }
}
inline finish(me) {
  atomic { STEP; assert(c[pi].st==TAKEN && c[pi].own==me); c[pi].st=DONE; results[c[pi].dat]++ }
  atomic { STEP; c[pi].st=FREE; c[pi].ver=c[pi].ver+1; c[pi].own=0 }
}
proctype consumer(byte me; byte n) {
  byte pos, s, lap, pl, pv, pi, v, st, ow; bit pf, got;
  do
  :: n==0 -> break
  :: else -> n--; claim(me); if :: got -> finish(me) :: else fi
  od;
die: atomic { n=0; v=0; st=0; ow=0; got=0; REST }
}
#ifdef REUSE
/* somebody else takes the number of a dead consumer, once its record is free */
proctype newcomer(byte n) {
  if
  :: atomic { rescued[n] -> rescued[n]=0; dead[n]=0; inc[n]=1 } run consumer(n,1)
  :: true      /* or never comes */
  fi
}
#endif
#define R1 5
#define R2 6
#define WORK(d) (dead[d] && !rescued[d])
#define ANYDEAD (WORK(1) || WORK(2) || WORK(3) || WORK(4) || WORK(5) || WORK(6))
proctype rescuer(byte me) {
  byte i, k, d, v, st, pos, s, lap, pl, pv, pi; bit pf, ok, stale, inring, found, was; byte inck;
  /* several rescuers may work on one victim at once; the exact-word CAS decides */
again:
  if
  :: atomic { ANYDEAD ->
        do
        :: WORK(d) -> break
        :: d < 6 && (!WORK(d) || WORK(d+1) || (d<5 && WORK(d+2)) || (d<4 && WORK(d+3)) || (d<3 && WORK(d+4)) || (d<2 && WORK(d+5))) -> d++
        od;
        inck = inc[d] }
     do
     :: i == NC -> break
     :: else ->
        atomic { STEP; v=c[i].ver; st=c[i].st; ok=(c[i].own==d && c[i].st!=FREE) }
#ifndef BROKEN_NOINC
        if :: ok -> atomic { STEP; ok = (inc[d]==inck && !rescued[d]) } :: else fi;     /* still the dead incarnation, after reading the word */
#endif
        if
        :: ok ->
           was = found; found = 1;
           if
           :: st==WRITING -> atomic { STEP; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi }
           :: st==DONE -> atomic { STEP; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi }
           :: st==READY || st==RETRY ->
              inring=0; k=0;
              do :: k==R -> break
                 :: else -> atomic { STEP; if :: p[k].occ && p[k].ver==v && p[k].idx==i -> inring=1 :: else fi; k++ }
              od;
              if
              :: inring -> found = was
              :: !inring && st==READY ->
#ifdef BROKEN_READY
                 found = was
#else
                 atomic { STEP; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=FREE; c[i].ver=v+1; c[i].own=0 :: else fi }
#endif
              :: !inring && st==RETRY ->
#ifdef TAKEOVER
                 /* a queue's: claimed, as anyone may, and put back */
                 atomic { STEP; ok=0; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=TAKEN; c[i].own=me; ok=1 :: else fi }
                 if :: ok -> atomic { STEP; assert(c[i].ver==v && c[i].st==TAKEN && c[i].own==me); c[i].st=RETRY; BUMP } :: else fi;
#else
                 atomic { STEP; ok=0; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].own=me; BUMP ok=1 :: else fi }
#endif
                 if :: ok -> ok=0; do :: ok -> break :: else -> publish(me, i, v) od; atomic { STEP; if :: tail==pos -> tail=pos+1 :: else fi } :: else fi
              fi
           :: st==TAKEN ->
#ifdef BROKEN_RETRY
              atomic { STEP; ok=0; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=READY; c[i].own=me; ok=1 :: else fi }
#else
#ifdef TAKEOVER
              /* a queue's: taken over, so that this one alone writes into the cell, then put back */
              atomic { STEP; ok=0; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].own=me; BUMP ok=1 :: else fi }
              if :: ok -> atomic { STEP; assert(c[i].ver==v && c[i].st==TAKEN && c[i].own==me) } :: else fi;     /* writes down the death */
              if :: ok -> atomic { STEP; assert(c[i].ver==v && c[i].st==TAKEN && c[i].own==me); c[i].st=RETRY; BUMP } :: else fi;
#else
              atomic { STEP; ok=0; if :: c[i].ver==v && c[i].st==st && c[i].own==d -> c[i].st=RETRY; c[i].own=me; BUMP ok=1 :: else fi }
#endif
#endif
              if :: ok -> ok=0; do :: ok -> break :: else -> publish(me, i, v) od; atomic { STEP; if :: tail==pos -> tail=pos+1 :: else fi } :: else fi
           fi
        :: else
        fi;
        atomic { i++; v=0; st=0; k=0; ok=0; inring=0; was=0; stale=0; REST }
     od;
     atomic { STEP; if :: !found && inc[d]==inck -> rescued[d]=1 :: else fi; i=0; d=0; found=0; inck=0; goto again }
  :: atomic { over && !ANYDEAD }
  fi;
die: atomic { i=0; k=0; d=0; v=0; st=0; ok=0; stale=0; inring=0; found=0; was=0; inck=0; REST }
}
byte ii;
init {
  byte pos, s, lap, pl, pv, pi, v, st, ow; bit pf, got;
  atomic {
#ifdef REUSE
    run newcomer(3);
#endif
    run producer(1,0);
#if NP>1
    run producer(2,1);
#endif
    run consumer(3,1);
#if NKS>1
    run consumer(4,1);
#endif
#if COPIES>0
    run copier(4,NP);
#endif
#if NRES>0
    run rescuer(R1);
#endif
#if NRES>1
    run rescuer(R2);
#endif
  }
  /* everybody has finished, or waits for a death that will not come */
  (timeout);
  atomic { over = 1; deaths = MAXDEATHS } (_nr_pr == 1);
  run rescuer(7); (_nr_pr == 1);
  run rescuer(7); (_nr_pr == 1);
  /* drain */
  do
  :: claim(7); if :: got -> finish(7) :: else -> break fi
  od;
  ii=0;
  do :: ii<NITEM -> assert(results[ii] <= 1); assert(!accepted[ii] || results[ii]==1); ii++ :: else -> break od;
  ii=0;
  do :: ii<NC -> assert(c[ii].st==FREE); ii++ :: else -> break od;
  goto out;
die: assert(0);
out: skip
}
