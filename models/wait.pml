/* Waking and sleeping on a waiters' word (subetha/_process.pxd): bit b "somebody may sleep", and a count that every wake bumps.
   A small world: two pushers, two waiters, a few items. Checked: when nobody can go on, nobody sleeps beside an item.
     spin -a -DNP1=2 -DNP2=1 -DNW0=2 -DNW1=1 wait.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
   Variants that must fail:
     -DBROKEN_NOSECONDWAKE   the bit is taken away after a vain wake and nobody is woken again (a waiter that fell asleep in between stays)
     -DBROKEN_NOBUMP         the count is not bumped with the bit (another waiter sets the bit again: the first one sleeps on an equal word)
   Not in it: deaths (a sleep is bounded, so a death between two steps costs at most one bounded sleep), weak memory (both sides seq_cst). */
#ifndef NP1
#define NP1 2
#define NP2 1
#define NW0 2
#define NW1 1
#endif
byte count, items; bit b; bool asleep[2];

inline wake_all() { asleep[0] = 0; asleep[1] = 0 }

inline wake_one() {
  if
  :: b ->
     ok = 0;
     do
     :: ok -> break
     :: else ->
        atomic { sc = count; sb = b }
        atomic { if :: count == sc && b == sb -> count = (sc + 1) % 16; ok = 1 :: else fi }
     od;
     atomic {
        if
        :: asleep[0] -> asleep[0] = 0; woke = 1
        :: !asleep[0] && asleep[1] -> asleep[1] = 0; woke = 1
        :: else -> woke = 0
        fi }
     if
     :: !woke ->
        atomic {
           ok = 0;
           if
           :: count == (sc + 1) % 16 && b == sb -> b = 0; ok = 1;
#ifndef BROKEN_NOBUMP
              count = (count + 1) % 16
#endif
           :: else
           fi }
#ifndef BROKEN_NOSECONDWAKE
        if :: ok -> atomic { wake_all() } :: else fi
#endif
     :: else
     fi
  :: else
  fi
}

proctype pusher(byte n) {
  byte sc; bit sb, ok, woke;
  do :: n > 0 -> n--; items++; wake_one() :: else -> break od
}

proctype waiter(byte id; byte n) {
  byte sc;
  do
  :: n == 0 -> break
  :: n > 0 ->
     atomic { if :: items > 0 -> items--; n--; goto next :: else fi }
     atomic { b = 1; sc = count }
     atomic { if :: items > 0 -> items--; n--; goto next :: else fi }
     atomic { if :: count == sc && b == 1 -> asleep[id] = 1 :: else -> goto next fi }
     (!asleep[id]);
next: skip
  od
}

init {
  atomic { run pusher(NP1); run pusher(NP2); run waiter(0, NW0); run waiter(1, NW1) }
  timeout -> assert(_nr_pr == 1 || items == 0 || !(asleep[0] || asleep[1]))
}
