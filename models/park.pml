/* Parked jobs (docs/design/cells.md) in a small world: one submitter with a due time and one without, 2 workers that claim from the
   rings or look for parked cells, park, give back and finish, one who cancels, 1 or 2 rescuers at once, 2 cells. Any process may die or
   stop at any step, the rescuers too. A job's number in the rings is one bit a version (cells.pml has the rings). The pool's word `due`
   is 0 (nothing is known), LOOKING, or the least of the dues 1 and 2; another one may look too while it is LOOKING, since who looks
   may have died. At the end living rescuers run; then every parked cell's due must be
   known by the word, and a drain by who looks only at rings and word must find every accepted job once: none is lost, none runs twice,
   each start was charged once, every cell is free.
     spin -a -DMAXDEATHS=1 -DNW=1 park.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                  7.8 million states, no error (two jobs, two cells, one worker)
     -DMAXDEATHS=1 -DNJ=1 -DNC=1                  8.4 million, no error (two workers that look at once)
     -DMAXDEATHS=2 -DNJ=1 -DNRES=2 -DNW=1 -DNC=1  4.1 million, no error (two rescuers at once, two deaths)
     -DMAXDEATHS=2 -DNJ=1 -DNC=1                  13.4 million, no error
   Variants that must fail (the worlds are in check.py):
     -DBROKEN_NOBUMP      a parked job keeps its version (its next start is taken for the last one, and not charged)
     -DBROKEN_OWNER       PARKED keeps its owner, whose rescuer takes it for a submit that had not returned (job lost)
     -DBROKEN_WORDFIRST   the due is put into the word before the cell is PARKED (somebody looks in between: forgotten)
     -DBROKEN_ZEROLAST    the word is taken away after the cells were looked at (who parks meanwhile is forgotten)
     -DBROKEN_GUARD       who parks while somebody looks leaves the word alone (the look has passed its cell: forgotten)
     -DBROKEN_NORESCUE    a rescue leaves the word alone (who looked, or parked, has died in between: forgotten)
     -DBROKEN_NOWORD      what was found is not put back
   Not in it: rings (cells.pml), the lapsed (lapsed.pml: parking is a CAS from the very word, as a release), letters (bury.pml),
   blocks (blocks.pml: parking moves the link as a put-back does), time (every due comes in the end), weak memory. */
#ifndef NC
#define NC 2
#endif
#ifndef NJ
#define NJ 2
#endif
#ifndef NW
#define NW 2
#endif
#ifndef NRES
#define NRES 1
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define RETRY 4
#define PARKED 5
#define LOOKING 9        /* the word while somebody looks */
typedef Cell { byte ver; byte st; byte own; byte dat; byte due; byte att; byte chg; byte pub };
Cell c[NC];
byte word, deaths, results[NJ], starts[NJ];
bit accepted[NJ], cancelled[NJ], dead[8], rescued[8];
#define CLAIMABLE(i) ((c[i].st == READY || c[i].st == RETRY) && (c[i].pub >> c[i].ver) & 1)
#define MAYDIE(me) if :: skip :: atomic { deaths < MAXDEATHS -> deaths++; dead[me] = 1; i = 0; v = 0; st = 0; ow = 0; goto die } fi
#define IS(i, V, S, O) (c[i].ver == V && c[i].st == S && c[i].own == O)

/* one CAS to the minimum; LOOKING is more than any due */
inline due_put(d) {
  atomic { if
#ifdef BROKEN_GUARD
           :: d != 0 && (word == 0 || (word > d && word != LOOKING)) -> word = d
#else
           :: d != 0 && (word == 0 || word > d) -> word = d
#endif
           :: else fi }
}
/* the end of a look */
inline due_found(d) {
  atomic { if :: word == LOOKING -> word = d :: word != LOOKING && d != 0 && (word == 0 || word > d) -> word = d :: else fi }
}

inline put_back(me) {
  /* TAKEN(me) v -> RETRY(me) v+1, then published */
  atomic { assert(IS(i, v, TAKEN, me)); c[i].st = RETRY; c[i].ver = v + 1; v = v + 1 }
  MAYDIE(me);
  atomic { c[i].pub = c[i].pub | (1 << v) }
}

inline park(me, d) {
  c[i].due = d;
  MAYDIE(me);
#ifdef BROKEN_WORDFIRST
  due_put(d);
  MAYDIE(me);
#endif
  atomic { assert(IS(i, v, TAKEN, me)); c[i].st = PARKED;
#ifndef BROKEN_OWNER
    c[i].own = 0;
#endif
#ifndef BROKEN_NOBUMP
    c[i].ver = v + 1
#endif
  }
#ifndef BROKEN_WORDFIRST
  MAYDIE(me);
  due_put(d)
#endif
}

/* a look at the parked cells; `i` is one of them, or NC */
inline look(me) {
  ow = word;
  MAYDIE(me);
#ifndef BROKEN_ZEROLAST
  atomic { if :: word == ow -> word = LOOKING :: else fi }
#endif
  MAYDIE(me);
  i = NC; k = 0; least = 0;
  do
  :: k == NC -> break
  :: else -> atomic {
       if :: c[k].st == PARKED ->
             if :: least == 0 || c[k].due < least -> least = c[k].due; i = k; v = c[k].ver; par = c[k].own :: else fi
          :: else fi;
       k++ }
  od;
  MAYDIE(me);
#ifdef BROKEN_ZEROLAST
  atomic { if :: word == ow -> word = LOOKING :: else fi }
#endif
#ifdef BROKEN_NOWORD
  atomic { if :: word == LOOKING -> word = 0 :: else fi };
#else
  due_found(least);
#endif
  MAYDIE(me);
}

inline claim(me) {
  got = 0;
  if
  :: /* from a ring: any live reference */
     atomic { if :: CLAIMABLE(0) -> i = 0 :: NC > 1 && CLAIMABLE(NC-1) -> i = NC - 1 :: else -> i = NC fi;
       if :: i < NC -> v = c[i].ver; st = c[i].st; ow = c[i].own :: else fi }
     if :: i < NC -> MAYDIE(me);
           atomic { if :: IS(i, v, st, ow) -> c[i].st = TAKEN; c[i].own = me; got = 1 :: else fi }
        :: else
     fi
  :: word != 0 ->
     look(me);
     if :: i < NC -> atomic { if :: IS(i, v, PARKED, par) -> c[i].st = TAKEN; c[i].own = me; got = 1 :: else fi } :: else fi
  fi;
  atomic { st = 0; ow = 0; k = 0; least = 0; par = 0 }
}

/* charged once a version, as `charged` in a cell */
inline start() {
  atomic { starts[c[i].dat]++; if :: c[i].chg != v + 1 -> c[i].att++; c[i].chg = v + 1 :: else fi }
}
inline uncharge() {
  atomic { if :: c[i].chg == v + 1 -> c[i].chg = 0; c[i].att--; starts[c[i].dat]-- :: else fi }
}

inline finish(me) {
  atomic { assert(IS(i, v, TAKEN, me)); assert(c[i].att == starts[c[i].dat]); results[c[i].dat]++;
    c[i].st = FREE; c[i].own = 0; c[i].ver = v + 1; c[i].att = 0; c[i].chg = 0; c[i].due = 0 }
}

proctype submitter(byte me; byte item; byte d) {
  byte i, v, st, ow;
  atomic { i = 0; do :: i < NC && c[i].st != FREE -> i++ :: i == NC -> break :: i < NC && c[i].st == FREE ->
    c[i].st = WRITING; c[i].own = me; v = c[i].ver; break od }
  if :: i == NC -> goto die :: else fi;
  MAYDIE(me);
  c[i].dat = item;
  if
  :: d != 0 ->
     c[i].due = d;
     MAYDIE(me);
#ifdef BROKEN_OWNER
     c[i].st = PARKED;
#else
     atomic { c[i].st = PARKED; c[i].own = 0 };
#endif
     MAYDIE(me);
     due_put(d)
  :: else ->
     c[i].st = READY;
     MAYDIE(me);
     atomic { c[i].pub = c[i].pub | (1 << v) }
  fi;
  MAYDIE(me);
  accepted[item] = 1;
die: skip
}

proctype worker(byte me; byte n) {
  byte i, k, v, st, ow, par, least; bit got;
  do
  :: n == 0 -> break
  :: else -> n--;
     claim(me);
     if
     :: got ->
        MAYDIE(me);
        if
        :: start(); MAYDIE(me);
           if
           :: finish(me)
           :: park(me, 2)
           :: uncharge(); MAYDIE(me); park(me, 1)
           fi
        :: park(me, 1)
        :: put_back(me)
        fi
     :: else
     fi
  od;
die: skip
}

proctype canceller() {
  byte i, v, st, ow;
  i = 0;
  do
  :: i == NC -> break
  :: else ->
     atomic { v = c[i].ver; st = c[i].st; ow = c[i].own; if :: c[i].dat == 0 && (st == READY || st == RETRY || st == PARKED) :: else -> st = FREE fi }
     if
     :: st != FREE -> atomic { if :: IS(i, v, st, ow) && c[i].dat == 0 ->
          c[i].st = FREE; c[i].own = 0; c[i].ver = v + 1; c[i].att = 0; c[i].chg = 0; cancelled[0] = 1 :: else fi }
     :: else
     fi;
     i++
  od
}

proctype rescuer(byte me) {
  byte i, v, st, ow, d; bit found, inring, ok;
again:
  d = 1;
  do
  :: d < 7 && !(dead[d] && !rescued[d]) -> d++
  :: d == 7 -> goto die
  :: d < 7 && dead[d] && !rescued[d] -> break
  od;
  i = 0; found = 0;
  do
  :: i == NC -> break
  :: else ->
     atomic { v = c[i].ver; st = c[i].st; ow = c[i].own; inring = (c[i].pub >> v) & 1; ok = (ow == d && st != FREE) }
     if
     :: ok && st == WRITING -> found = 1;
        atomic { if :: IS(i, v, st, d) -> c[i].st = FREE; c[i].own = 0; c[i].ver = v + 1; c[i].att = 0; c[i].chg = 0 :: else fi }
     :: ok && (st == READY
#ifdef BROKEN_OWNER
              || st == PARKED
#endif
              ) && !inring -> found = 1;
        atomic { if :: IS(i, v, st, d) -> c[i].st = FREE; c[i].own = 0; c[i].ver = v + 1; c[i].att = 0; c[i].chg = 0 :: else fi }
     :: ok && st == TAKEN -> found = 1;
        atomic { ok = 0; if :: IS(i, v, st, d) -> c[i].own = me; c[i].ver = v + 1; v = v + 1; ok = 1 :: else fi }
        MAYDIE(me);
        if :: ok -> put_back(me) :: else fi
     :: ok && st == RETRY && !inring -> found = 1;
        atomic { ok = 0; if :: IS(i, v, st, d) -> c[i].st = TAKEN; c[i].own = me; ok = 1 :: else fi }
        MAYDIE(me);
        if :: ok -> put_back(me) :: else fi
     :: else
     fi;
     i++
  od;
  MAYDIE(me);
#ifndef BROKEN_NORESCUE
  /* the dead one may have been looking, or had parked and not said so: before its record is free */
  i = 0;
  do
  :: i == NC -> break
  :: else -> atomic { v = 0; if :: c[i].st == PARKED -> v = c[i].due :: else fi } due_put(v); i++
  od;
  MAYDIE(me);
#endif
  atomic { if :: !found -> rescued[d] = 1 :: else fi; v = 0; st = 0; ow = 0; i = 0 } goto again;
die: skip
}

byte ii;
init {
  byte i, k, v, st, ow, par, least; bit got;
  atomic {
    run submitter(1, 0, 2);
#if NJ > 1
    run submitter(2, 1, 0);
#endif
    run worker(3, ROUNDS);
#if NW > 1
    run worker(4, ROUNDS);
#endif
    run canceller();
#if NRES > 0
    run rescuer(5);
#endif
#if NRES > 1
    run rescuer(6);
#endif
  }
  (_nr_pr == 1);
  deaths = MAXDEATHS;
  run rescuer(7); (_nr_pr == 1);
  run rescuer(7); (_nr_pr == 1);
  ii = 0;
  do
  :: ii == NC -> break
  :: else -> assert(c[ii].st != PARKED || (word != 0 && word <= c[ii].due)); ii++
  od;
  /* whoever works on looks at the rings and, while the word says so, at the parked cells */
  do
  :: CLAIMABLE(0) || CLAIMABLE(NC-1) || word != 0 ->
     claim(7);
     if :: got -> atomic { results[c[i].dat]++; c[i].st = FREE; c[i].own = 0; c[i].ver = v + 1 } :: else fi
  :: else -> break
  od;
  ii = 0;
  do
  :: ii == NJ -> break
  :: else -> assert(results[ii] + cancelled[ii] <= 1); assert(!accepted[ii] || results[ii] + cancelled[ii] == 1); ii++
  od;
  ii = 0;
  do :: ii == NC -> break :: else -> assert(c[ii].st == FREE); ii++ od;
  goto out;
die: assert(0);
out: skip
}
