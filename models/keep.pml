/* Kept results (docs/design/cells.md) in a small world: one cell, in which a worker has a job whose result is to be kept; its client, which
   collects it and leaves; 1 or 2 rescuers at once; a reader; 1 or 2 that free what has expired; and one who hands the next job in, to be due
   at a time of its own, in the same cell. Worker, client and rescuers may die or stop at any step. The result's bytes are two halves, `due` is when
   it expires (0: nothing was written, so it has), `now` passes that at any moment; the mailbox is one bit, the client's record
   another. At the end a living rescuer runs.
   Checked: whatever dies, a complete result is delivered to its client once, if that lives and does not leave; it is there for whoever asks until
   its time has come, and nobody but who frees what has expired takes it away; what is read is whole and that job's; the next job keeps its cell and
   its due time; no cell is lost, that is, what is kept can expire.
     spin -a -DMAXDEATHS=1 -DNRES=1 -DNREAD=0 -DNEXP=1 keep.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                   1.3 million states, no error
     -DMAXDEATHS=2 -DNREAD=0 -DNEXP=0 -DNSUB=0     0.8 million, no error (two rescuers, two deaths, no next job)
     -DMAXDEATHS=2 -DDELIVERED -DNREAD=0 -DNEXP=0  0.5 million, no error (the worker is through; the next job)
     the same with -DNAMED=1                       0.5 million, no error (one of the rescuers acts in the dead one's name)
     -DMAXDEATHS=1 -DDELIVERED -DNRES=1 -DNEXP=1   1.1 million, no error (a reader)
     -DMAXDEATHS=1 -DDELIVERED -DNEXP=0            7.3 million, no error (a reader, two rescuers)
   Variants that must fail (the worlds are in check.py):
     -DBROKEN_RESCUEFREES  a rescue frees what a dead client was about to keep, as it frees COLLECTED (result lost)
     -DBROKEN_ENDFREES     a result whose client has gone is freed (result lost)
     -DBROKEN_NOCAS        who frees what has expired stores FREE instead of a CAS from the word read (the next job loses its cell)
     -DBROKEN_NOCHECK      a reader does not look at the word again (it reads another job's bytes)
     -DBROKEN_DUELAST      DONE becomes KEPT(0) at once, and its time is written after that (expired before its time; the next job's is overwritten)
     -DBROKEN_DUEFIRST     the time is written before the cell is one's own (the next job's is overwritten)
     -DBROKEN_TAKEOVER     a rescuer goes on with what the dead one had begun, in its name (two at once: the next job's time is overwritten)
     -DBROKEN_SAMEVERSION  what the dead one had begun is taken over with its version (with -DNAMED: another one takes it over too)
     -DBROKEN_STAYS        a rescue leaves alone what a dead client was about to keep (it never expires: cell lost)
   Not in it: the rings' laps (cells.pml), the mailbox's places and the number's next holder (mail.pml), blocks (blocks.pml: a kept result's has the
   version of its cell, as that of a DONE one), letters (bury.pml), weak memory. */
#ifndef NRES
#define NRES 2
#endif
#ifndef NAMED
#define NAMED 0          /* does the second rescuer act in the dead one's name, as one that finds no free slot? */
#endif
#ifndef NREAD
#define NREAD 1
#endif
#ifndef NSUB
#define NSUB 1
#endif
#ifndef NEXP
#define NEXP 2
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 2
#endif
#define FREE 0
#define WRITING 1
#define TAKEN 2
#define DONE 3
#define KEPT 4
#define PARKED 5
#define NOBODY 0
#define W 1
#define C 2
#define N 3              /* hands the next job in */
#define R 4              /* 4, 5: rescuers; 6: the one at the end */
#define OURS 1           /* when the result expires */
#define THEIRS 2         /* when the next job is due */
#ifdef DELIVERED
byte ver, st = DONE, own = W, a = 1, b = 1, due;
bit mailed = 1, done = 1;
#else
byte ver, st = TAKEN, own = W, a, b, due;
bit mailed, done;
#endif
byte deaths, got;
bit gone, left, waits, now, expired, accepted;
byte inc[7];
bit dead[7], rescued[7], taken[7];
#define IS(V, S, O) (ver == V && st == S && own == O)
#define MAYDIE(me) if :: skip :: atomic { deaths < MAXDEATHS -> deaths++; dead[me] = 1; if :: me == C -> gone = 1 :: else fi; goto die } fi

/* DONE(o) v, its client gone or collecting: KEPT(x), then its time, then KEPT(0); `ok`: this one has it */
inline keep(x) {
#ifdef BROKEN_DUEFIRST
  due = OURS;
  MAYDIE(me);
  atomic { ok = 0; if :: IS(v, DONE, o) -> st = KEPT; own = NOBODY; ok = 1 :: else fi }
#else
#ifdef BROKEN_DUELAST
  atomic { ok = 0; if :: IS(v, DONE, o) -> st = KEPT; own = NOBODY; ok = 1 :: else fi }
  MAYDIE(me);
  if :: ok -> due = OURS :: else fi
#else
  atomic { ok = 0; if :: IS(v, DONE, o) -> st = KEPT; own = x; ok = 1 :: else fi }
  MAYDIE(me);
  if :: ok -> keep_on(x) :: else fi
#endif
#endif
}
inline keep_on(y) {
  due = OURS;
  MAYDIE(me);
  atomic { if :: IS(v, KEPT, y) -> own = NOBODY :: else fi }
}
/* a result whose client has gone */
inline ended() {
#ifdef BROKEN_ENDFREES
  atomic { if :: IS(v, DONE, o) -> st = FREE; own = NOBODY; ver++ :: else fi }
#else
  keep(me)
#endif
}
inline deliver() {
  mailed = 1;
  MAYDIE(me);
  if :: gone -> ended() :: else fi
}

proctype worker(byte me) {
  byte v, o; bit ok;
  MAYDIE(me);
  a = 1;
  MAYDIE(me);
  b = 1;
  MAYDIE(me);
  atomic { assert(IS(0, TAKEN, W)); st = DONE; done = 1; o = W }
  MAYDIE(me);
  deliver();
die: skip
}

/* it waits for the result; or it leaves: it marks its record, then drains its mailbox */
proctype client(byte me) {
  byte v, o; bit ok;
  if
  :: atomic { left = 1; gone = 1 } MAYDIE(me)
  :: waits = 1; (mailed); waits = 0
  fi;
  if
  :: mailed ->
     atomic { v = ver; o = own; ok = (st == DONE) }
     MAYDIE(me);
     if
     :: ok && left -> ended()
     :: ok && !left -> keep(C); assert(ok); got++
     :: else -> assert(left)
     fi
  :: else
  fi;
die: skip
}

/* nobody holds the lock of its number, and the record is used */
#define ISDEAD(d) (dead[d] && !rescued[d] && (!taken[d] || dead[R + 1]))
proctype rescuer(byte me) {
  byte v, o, s, d, k; bit ok, found;
again:
  atomic {
    if
    :: ISDEAD(W) -> d = W
    :: ISDEAD(C) -> d = C
    :: me != R && ISDEAD(R) -> d = R
    :: me != R + 1 && ISDEAD(R + 1) -> d = R + 1
    :: else -> goto die
    fi;
    k = inc[d]
  }
  if
  :: NAMED && me == R + 1 ->
     /* in the dead one's name, of which it takes lock and next incarnation: others stop their rescue */
     atomic { if :: ISDEAD(d) && inc[d] == k -> taken[d] = 1; inc[d]++; k = inc[d] :: else -> goto again fi }
  :: else
  fi;
look:
  found = 0;
  atomic { v = ver; o = own; s = st }
  MAYDIE(me);
  if
  :: inc[d] != k || rescued[d] -> goto again
  :: else
  fi;
  if
  :: s == TAKEN && o == d ->
     /* taken over, put back, and run by another one: its result is as good */
     found = 1;
     atomic { ok = 0; if :: IS(v, TAKEN, d) -> own = me; ver++; v = v + 1; ok = 1 :: else fi }
     MAYDIE(me);
     if
     :: ok ->
        atomic { a = 1; b = 1 }
        MAYDIE(me);
        atomic { assert(IS(v, TAKEN, me)); st = DONE; done = 1; o = me }
        MAYDIE(me);
        deliver()
     :: else
     fi
  :: s == DONE && gone && (d == C || o == d) -> found = 1; ended()
  :: s == DONE && o == d && !gone && !mailed -> found = 1; deliver()
#ifndef BROKEN_STAYS
  :: s == KEPT && o == d -> found = 1;
#ifdef BROKEN_RESCUEFREES
     atomic { if :: IS(v, KEPT, d) -> st = FREE; own = NOBODY; ver++ :: else fi }
#else
#ifdef BROKEN_TAKEOVER
     keep_on(d)
#else
     if :: NAMED && me == R + 1 -> o = d :: else -> o = me fi;
     atomic { ok = 0; if :: IS(v, KEPT, d) -> own = o; ok = 1;
#ifndef BROKEN_SAMEVERSION
       ver++; v = v + 1
#endif
       :: else fi }
     MAYDIE(me);
     if :: ok -> keep_on(o) :: else fi
#endif
#endif
#endif
  :: else
  fi;
  MAYDIE(me);
  if :: found -> goto look :: else fi;
  atomic { if :: inc[d] == k -> rescued[d] = 1 :: else fi }
  goto again;
die: skip
}

/* of the job's id: looks for as long as it is there */
proctype reader() {
  byte v, o, s, x, y;
  atomic { v = ver; s = st; o = own }
  if
  :: s == DONE || s == KEPT ->
     x = a;
     y = b;
#ifndef BROKEN_NOCHECK
     if :: IS(v, s, o) -> skip :: else -> goto end fi;
#endif
     assert(x == 1 && y == 1)
  :: else
  fi;
end: skip
}

/* its time may have come by now */
inline free_expired() {
  if :: now = 1 :: skip fi;
  atomic { v = ver; s = st; o = own }
  if
  :: s == KEPT && o == NOBODY ->
     t = due;
     if
     :: t == 0 || (t == OURS && now) ->
#ifdef BROKEN_NOCAS
        st = FREE; own = NOBODY; ver++; expired = 1
#else
        atomic { if :: IS(v, KEPT, NOBODY) -> st = FREE; ver++; expired = 1; assert(now) :: else fi }
#endif
     :: else
     fi
  :: else
  fi
}
proctype expirer() { byte v, s, o, t; free_expired() }

/* frees what has expired where it finds no cell; never dies */
proctype submitter() {
  byte v, s, o, t;
  if :: st != FREE -> free_expired() :: else fi;
  atomic { if :: st == FREE -> st = WRITING; own = N; accepted = 1; v = ver :: else -> goto end fi }
  a = 2;
  b = 2;
  due = THEIRS;
  atomic { assert(IS(v, WRITING, N)); st = PARKED; own = NOBODY }
end: skip
}

init {
  byte v, s, o, t;
  atomic {
    run client(C);
#ifndef DELIVERED
    run worker(W);
#endif
#if NREAD > 0
    run reader();
#endif
#if NSUB > 0
    run submitter();
#endif
#if NRES > 0
    run rescuer(R);
#endif
#if NRES > 1
    run rescuer(R + 1);
#endif
#if NEXP > 0
    run expirer();
#endif
#if NEXP > 1
    run expirer();
#endif
  }
  (_nr_pr == 1 || (_nr_pr == 2 && waits && !mailed));
  deaths = MAXDEATHS;
  run rescuer(6);
  (_nr_pr == 1);
  assert(done);
  assert(left || dead[C] || got == 1);
  assert(got <= 1);
  if
  :: accepted -> assert(expired); assert(st == PARKED && own == NOBODY && due == THEIRS && a == 2 && b == 2)
  :: !accepted && expired -> assert(st == FREE)
  :: !accepted && !expired -> assert(st == KEPT && own == NOBODY && due == OURS && a == 1 && b == 1);
     now = 1;
     free_expired();
     assert(st == FREE)
  fi
}
