/* Repair of a ring (subetha/_repair.pxd, _ring.pxd) in a small world: 1 cell, 2 places, the word `due`, laps that wrap.
   Somebody writes any of six words into each place, once, at any moment, with -DDHINTS also a hint; repairers, a pusher and a taker
   that also puts back go on, repair where they meet a contradiction, and may die or stop at any step.
   The rule: the word `due` names the lap that all repairers empty the places to. Whoever finds it set helps with the same lap and
   leaves alone what has that lap already, and nobody empties a place for a repair that is over. So a late one cannot empty a
   place that the repair has filled again.
   Checked: once `due` is off and everybody is at rest, each waiting cell has a reference, except one whose owner died before it
   published, and one whose reference the damage took without a contradiction; after one more repair that one has it too, every
   waiting cell is found through the hints, and no job is taken twice.
     spin -a -DNREP=2 -DMAXDEATHS=2 repair.pml && gcc -O0 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                           178 thousand states, no error
     -DNREP=2 -DMAXDEATHS=1 -DDHINTS                       279 thousand, no error
     -DNREP=1 -DTAKES=1 -DBACKS=1 -DMAXDEATHS=1            2.1 million, no error
     -DNREP=1 -DTAKES=1 -DPUSHES=1 -DMAXDEATHS=1           2.0 million, no error
     -DNREP=1 -DTAKES=1 -DBACKS=1 -DCALLS -DMAXDEATHS=1    1.7 million, no error (who cannot publish calls for a repair, and goes)
     two repairers and a taker (-DNREP=2 -DTAKES=1): NOT exhausted within a minute
   Variants that must fail:
     -DBROKEN_COUNT   `due` only counts the repairers and becomes 0 when the last one to count has published: one that counted
                      before empties the places after that and dies (job without a reference, and nobody looks for it)
     -DNODUE          no word `due` (dies after emptying: the same)
     -DCALLS -DNREP=1 -DTAKES=1 -DBACKS=1 -DMAXDEATHS=0 with
     -DBROKEN_CALLONCE  the call is given up where the word `due` has just changed (the repair that ended had passed the cell: the same)
     -DBROKEN_NOCALL    nobody calls, since a repair goes on (the same)
   A hint and its place are read in one step. Not in it: more than one cell, a ring full of live references (rotate.pml),
   a second damage, weak memory. */
#ifdef NODUE
#define BROKEN_COUNT
#endif
#define OK 1
#define EMPTY 2
#define CORRUPT 3
#define NOPLACE 4
#define FREE 0
#define WRITING 1
#define READY 2
#define TAKEN 3
#define RETRY 4
#ifndef NC
#define NC 1
#endif
#define R (2*NC)
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#ifndef TRIES
#define TRIES 1
#endif
#ifndef NREP
#define NREP 2           /* participants that only repair, once the damage is done */
#endif
#ifndef PUSHES
#define PUSHES 0         /* one more pushes so often */
#endif
#ifndef TAKES
#define TAKES 0          /* one more takes so often, ... */
#endif
#ifndef BACKS
#define BACKS 0          /* ... after it took and put back so often */
#endif
#define LAPS 16
#define MOD(p) ((p) % (LAPS*R))
/* words: a place, a cell */
#define PLACE(l,f,v,i) ((l)*64 + (f)*32 + (v)*4 + (i))
#define LAP(w) ((w)/64)
#define FULL(w) (((w)/32)%2)
#define VER(w) (((w)/4)%8)
#define IDX(w) ((w)%4)
#define WORD(v,s,o) ((v)*64 + (s)*8 + (o))
#define CVER(w) ((w)/64)
#define CST(w) (((w)/8)%8)
#define COWN(w) ((w)%8)
#define WAITS(w) (CST(w)==READY || CST(w)==RETRY)
#define LIVE(w) (IDX(w) < NC && VER(w)==CVER(c[IDX(w)]) && WAITS(c[IDX(w)]))
#define SDIFF(a,b) ((((a)-(b)+LAPS+LAPS/2) % LAPS) - LAPS/2)
#define LEAD(w,p) SDIFF(LAP(w),(p)/R)
#ifdef BROKEN_COUNT
#define ISDUE (due != 0)
#else
#define ISDUE (due%2)
#endif
short p[R], c[NC];
byte head, tail, due, deaths;
bit pub[NC], lost[NC];
byte dat[NC], results[4]; bit accepted[4];
bit dead[8]; bit damaged;
#define STEP if :: true :: deaths < MAXDEATHS -> deaths++; dead[me] = 1; goto die fi

inline advance(hint, at) { atomic { STEP; if :: hint==at -> hint=MOD(at+1) :: else fi } }
inline freeplace(at, w) { atomic { STEP; if :: p[at%R]==w -> p[at%R]=PLACE((LAP(w)+1)%LAPS,0,0,0) :: else fi } }

/* the hints from the places: OK or CORRUPT in r */
inline rebuild() {
  atomic { STEP; oh=head; ot=tail; s=0; lh=99; lt=99; g=-99; gf=-99; r=OK }
  do
  :: s == R || r == CORRUPT -> break
  :: else ->
     atomic { STEP; w=p[s]; if :: s==0 -> base=LAP(w) :: else fi;
        x = SDIFF(LAP(w),base);
        if
        :: x > 1 || x < -1 -> r=CORRUPT
        :: else ->
           x = x*R + s;
           if :: x < lh -> lh=x :: else fi;
           if :: x > g -> g=x :: else fi;
           if :: FULL(w) -> if :: x > gf -> gf=x :: else fi; x=x+R :: else fi;
           if :: x < lt -> lt=x :: else fi
        fi;
        s++; x=0; w=0 }
  od;
  if
  :: r == CORRUPT || g - lh >= R || gf > lt ->
     atomic { STEP; if :: head!=oh || tail!=ot -> r=OK :: else -> r=CORRUPT fi }
  :: else ->
     atomic { STEP; if :: head==oh -> head=MOD(base*R+LAPS*R+lh) :: else fi }
     atomic { STEP; if :: tail==ot -> tail=MOD(base*R+LAPS*R+lt) :: else fi }
  fi;
  atomic { s=0; lh=0; lt=0; g=0; gf=0; base=0; oh=0; ot=0 }
}

/* refs_publish_due: OK, NOPLACE, CORRUPT in q */
inline publish(i, v) {
  rebuilt=0; q=0;
  do
  :: q != 0 -> break
  :: else ->
     atomic { STEP; pos=tail; pw=p[pos%R] }
     if
     :: LAP(pw)==pos/R && !FULL(pw) ->
        atomic { STEP; if :: p[pos%R]==pw -> p[pos%R]=PLACE(pos/R,1,v,i); q=OK; if :: CVER(c[i])==v && WAITS(c[i]) -> pub[i]=1; lost[i]=0 :: else fi :: else fi }
        if :: q==OK -> advance(tail,pos) :: else fi
     :: pw==PLACE(pos/R,1,v,i) -> atomic { q=OK; if :: CVER(c[i])==v && WAITS(c[i]) && p[pos%R]==pw -> pub[i]=1; lost[i]=0 :: else fi } advance(tail,pos)
     :: else ->
        if
        :: (LEAD(pw,pos)==0 && FULL(pw) && pw!=PLACE(pos/R,1,v,i)) || LEAD(pw,pos)==1 -> advance(tail,pos)
        :: LEAD(pw,pos)==-1 && FULL(pw) && !LIVE(pw) -> freeplace(pos,pw)
        :: (LEAD(pw,pos)!=0 && LEAD(pw,pos)!=1) && !(LEAD(pw,pos)==-1 && FULL(pw) && !LIVE(pw)) ->
           atomic { STEP; if :: tail!=pos -> r=EMPTY :: else -> r=OK fi }
           if
           :: r==OK && rebuilt -> if :: LEAD(pw,pos)==-1 && FULL(pw) -> q=NOPLACE :: else -> q=CORRUPT fi
           :: r==OK && !rebuilt -> rebuilt=1; rebuild(); if :: r!=OK -> q=CORRUPT :: else fi
           :: else
           fi
        :: else
        fi
     fi
  od;
  atomic { rebuilt=0; pos=0; pw=0; r=0 }
}

/* refs_peek: OK, EMPTY, CORRUPT in q; pos, pw, cw */
inline peek() {
  atomic { STEP; rebuilt=0; doubted=0; q=0;
#ifndef NODUE
    if :: ISDUE -> q=CORRUPT :: else fi
#endif
  }
  do
  :: q != 0 -> break
  :: else ->
     atomic { STEP; pos=head; pw=p[pos%R] }
     if
     :: LAP(pw)==pos/R && FULL(pw) ->
        atomic { STEP; if :: LIVE(pw) -> cw=c[IDX(pw)]; q=OK :: else fi }
        if :: q==OK :: else -> freeplace(pos,pw); advance(head,pos) fi
     :: LEAD(pw,pos)==1 -> advance(head,pos)
     :: else ->
        r=OK;
        if
        :: LEAD(pw,pos)==0 ->
           atomic { STEP; x = (tail - pos + LAPS*R + LAPS*R/2) % (LAPS*R) - LAPS*R/2;
             if
             :: x==0 || x==-1 -> q=EMPTY; r=0
             :: x > 0 && !(doubted && ((et - pos + LAPS*R + LAPS*R/2) % (LAPS*R) - LAPS*R/2) > 0) -> doubted=1; et=tail; r=0
             :: else
             fi; x=0 }
        :: else
        fi;
        if
        :: r==OK ->
           atomic { STEP; if :: head!=pos -> r=0 :: else fi }
           if
           :: r==OK && rebuilt -> q=CORRUPT
           :: r==OK && !rebuilt -> rebuilt=1; doubted=0; rebuild(); if :: r!=OK -> q=CORRUPT :: else fi
           :: else
           fi
        :: else
        fi
     fi
  od;
  atomic { rebuilt=0; doubted=0; et=0; r=0; if :: q!=OK -> pos=0; pw=0; cw=0 :: else fi }
}

/* from here on the ring says that a repair is due: what damage took is to be found */
inline owe() { s=0; do :: s<NC -> if :: lost[s] -> lost[s]=0; pub[s]=1 :: else fi; s++ :: else -> break od; s=0 }
inline fresh() {
  /* a lap that neither a place nor `due` shows, nor one near it */
  t = (tail/R + 2) % LAPS;
  do
  :: atomic { r=OK; s=0;
       do :: s<R -> if :: SDIFF(LAP(p[s]),t) >= -1 && SDIFF(LAP(p[s]),t) <= 3 -> r=0 :: else fi; s++ :: else -> break od; s=0;
       if :: SDIFF(due/2,t) >= -1 && SDIFF(due/2,t) <= 1 -> r=0 :: else fi }
     if :: r==OK -> break :: else -> t=(t+1)%LAPS fi
  od; r=0
}
/* One program for all, so that each operation stands in it once */
#define ROLE_REPAIR 1
#define ROLE_PUSH 2
#define ROLE_TAKE 3
#define ROLE_END 4       /* one repair, then takes everything */
#define VARS byte pos, s, base, oh, ot, r, q, d, t, i, seen, et, j, k, v, kj, kv, todo; short pw, cw, w, x, lh, lt, g, gf; bit rebuilt, doubted, whole, mending
#define T_END 0
#define T_PUSH 1
#define T_TAKE 2
#define T_BACK 3
proctype actor(byte me, role, n, b) {
  VARS;
  if
  :: role==ROLE_REPAIR -> (damaged); todo=T_END; goto repair
  :: role==ROLE_END -> todo=T_TAKE; goto repair
  :: else
  fi;
main:
  atomic { j=0; k=0; v=0; q=0; todo=0 }
  if :: role!=ROLE_END && n==0 -> goto die :: else fi;
  if :: role!=ROLE_PUSH -> goto take :: else fi;
  n--;
  atomic { STEP; do :: j<NC && CST(c[j])!=FREE -> j++ :: else -> break od;
     if :: j<NC -> v=CVER(c[j]); c[j]=WORD(v,WRITING,me); pub[j]=0; lost[j]=0; dat[j]=n+1 :: else fi }
  if :: j==NC -> goto main :: else fi;
  atomic { STEP; c[j]=WORD(v,READY,me) }
  todo=T_PUSH;
push:
  atomic { STEP; if :: ISDUE -> q=CORRUPT :: else -> kj=j; kv=v fi }
  if :: q==CORRUPT -> goto pushed :: else -> goto publishing fi;
pushed:
  atomic { kj=0; kv=0 }
  if
  :: todo==T_PUSH && q==OK -> atomic { STEP; accepted[dat[j]]=1 } goto main
  :: todo==T_PUSH && q!=OK && k<TRIES -> k++; goto repair
  :: todo==T_PUSH && q!=OK && k==TRIES -> atomic { STEP; if :: c[j]==WORD(v,READY,me) -> c[j]=WORD(v+1,FREE,0); pub[j]=0; lost[j]=0 :: else fi } goto main
  :: todo==T_BACK && q==OK -> goto main
#ifdef CALLS
  :: todo==T_BACK && q!=OK -> goto call
#else
  :: todo==T_BACK && q!=OK -> todo=T_END; goto repair
#endif
  fi;
#ifdef CALLS
call:   /* refs_call_for_repair, and goes away: the repair that goes on may have passed the cell */
  do
#ifndef BROKEN_NOCALL
  :: atomic { STEP; d=due }
     atomic { STEP; fresh(); }
     atomic { STEP; if :: due==d -> due=t*2+1; owe(); r=OK :: else -> r=0 fi; t=0; d=0 }
#ifndef BROKEN_CALLONCE
     if :: r==OK -> break :: else fi
#else
     break
#endif
#else
  :: break
#endif
  od;
  goto die;
#endif
take:
  todo=T_TAKE;
  peek();
  if
  :: q==CORRUPT && k<TRIES -> k++; goto repair
  :: q==OK ->
     atomic { STEP; j=IDX(pw); if :: c[j]==cw -> v=CVER(cw); c[j]=WORD(v,TAKEN,me); pub[j]=0; lost[j]=0 :: else -> q=0 fi }
     if :: q==OK -> freeplace(pos,pw); advance(head,pos) :: else fi;
     atomic { pos=0; pw=0; cw=0 }
     if :: q==0 -> goto main :: else fi
  :: else -> assert(role!=ROLE_END || q==EMPTY); goto die
  fi;
  if
  :: b>0 -> b--;
     atomic { STEP; assert(c[j]==WORD(v,TAKEN,me)); v=v+1; c[j]=WORD(v,RETRY,me) }
     todo=T_BACK; q=0; goto push
  :: else ->
     if :: role==ROLE_TAKE -> n-- :: else fi;
     atomic { STEP; assert(c[j]==WORD(v,TAKEN,me)); results[dat[j]]++; assert(results[dat[j]]==1); c[j]=WORD(v+1,FREE,0) }
     goto main
  fi;
publishing:
  publish(kj, kv);
  if
  :: !mending -> goto pushed
  :: else -> if :: q!=OK -> whole=0 :: else fi; goto nextcell
  fi;
repair:
  q=0;
  d=0;
#ifdef BROKEN_COUNT
  atomic { STEP; d=due }
  rebuild();
  if
  :: r!=OK ->
#ifndef NODUE
     atomic { STEP; due=due+1; owe(); d=due; t=(tail/R+2)%LAPS }
#endif
     s=0;
     do
     :: s==R -> break
     :: else -> atomic { STEP; pw=p[s] }
        atomic { STEP; if :: p[s]==pw -> p[s]=PLACE(t,0,0,0); s++ :: else fi }
     od; s=0; pw=0;
     atomic { STEP; head=t*R }
     atomic { STEP; tail=t*R; t=0 }
  :: else
  fi;
#else
  do
  :: atomic { STEP; d=due }
     if :: d%2 -> break :: else fi;
     rebuild();
     if :: r==OK -> break :: else fi;
     atomic { STEP; fresh(); }
     atomic { STEP; if :: due==d -> due=t*2+1; owe(); d=due :: else -> d=0 fi; t=0 }
     if :: d%2 -> break :: else fi
  od; r=0;
  if
  :: d%2 ->
     s=0;
     do
     :: s==R -> break
     :: else ->
        atomic { STEP; pw=p[s] }
        if
        :: SDIFF(LAP(pw),d/2) >= 0 && SDIFF(LAP(pw),d/2) <= 3 -> s++
        :: else ->
           atomic { STEP; if :: due!=d -> s=R :: else fi }
           if
           :: s<R -> atomic { STEP; if :: p[s]==pw -> p[s]=PLACE(d/2,0,0,0); s++ :: else fi }
           :: else
           fi
        fi
     od; s=0; pw=0;
     rebuild()
  :: else
  fi;
#endif
  /* which cells have a reference? */
  seen=0; s=0; whole=1;
  do
  :: s==R -> break
  :: else -> atomic { STEP; pw=p[s] }
     if :: FULL(pw) -> atomic { STEP; if :: LIVE(pw) -> seen=seen|(1<<IDX(pw)) :: else fi } :: else fi;
     atomic { s++; pw=0 }
  od; s=0;
  i=0;
  do
  :: i==NC -> break
  :: else ->
     atomic { STEP; cw=c[i] }
     if
     :: WAITS(cw) && !(seen&(1<<i)) -> atomic { kj=i; kv=CVER(cw); mending=1; cw=0 } goto publishing
     :: else
     fi;
nextcell:
     atomic { i++; cw=0; kj=0; kv=0; mending=0; q=0 }
  od;
  atomic { STEP; i=0; seen=0;
#ifdef BROKEN_COUNT
     if :: whole && d && due==d -> due=0 :: else fi;
#else
     if :: whole && d%2 && due==d -> due=d-1 :: else fi;
#endif
     d=0; whole=0 }

  if
  :: todo==T_PUSH -> goto push
  :: todo==T_TAKE -> goto take
  :: else -> if :: role==ROLE_TAKE -> goto main :: else fi
  fi;
die: skip
}
proctype damager() {
  byte s; byte l; 
  atomic {
    do
    :: s<R ->
       l = LAP(p[s]);
       if
       :: true
       :: p[s]=PLACE(l,0,0,0)
       :: p[s]=PLACE((l+1)%LAPS,0,0,0)
       :: p[s]=PLACE((l+3)%LAPS,0,0,0)
       :: p[s]=PLACE(l,1,0,0)
       :: p[s]=PLACE((l+2)%LAPS,1,0,0)
       fi; s++
    :: else -> break
    od; s=0; l=0;
    do :: s<NC -> if :: pub[s] -> pub[s]=0; lost[s]=1; do :: l<R -> if :: FULL(p[l]) && IDX(p[l])==s && VER(p[l])==CVER(c[s]) -> pub[s]=1; lost[s]=0 :: else fi; l++ :: else -> break od; l=0 :: else fi; s++ :: else -> break od; s=0;
    damaged=1;
#ifdef DHINTS
    if :: true :: head=MOD(head+1) :: tail=MOD(tail+R) fi
#endif
  }
}
inline atrest() {
  atomic { i=0;
    do
    :: i<NC ->
       if
       :: WAITS(c[i]) ->
          r=0; s=0; do :: s<R -> if :: FULL(p[s]) && VER(p[s])==CVER(c[i]) && IDX(p[s])==i -> r=1 :: else fi; s++ :: else -> break od; s=0;
          assert(r || (!pub[i] && (lost[i] || dead[COWN(c[i])]))); r=0
       :: else
       fi; i++
    :: else -> break
    od; i=0 }
}
init {
  byte i, r, s;
  atomic {
    c[0]=WORD(0,READY,1); dat[0]=0; accepted[0]=1; pub[0]=1; dead[1]=1;
    p[0]=PLACE(0,1,0,0); tail=1;
    run damager();
#if NREP>0
    run actor(2,ROLE_REPAIR,0,0);
#endif
#if NREP>1
    run actor(3,ROLE_REPAIR,0,0);
#endif
#if PUSHES>0
    run actor(4,ROLE_PUSH,PUSHES,0);
#endif
#if TAKES>0
    run actor(5,ROLE_TAKE,TAKES,BACKS);
#endif
  }
  (_nr_pr==1);
  deaths=MAXDEATHS;
  if :: !ISDUE -> atrest() :: else fi;
  /* the last one, alone: repairs once, then finds everything */
  run actor(7,ROLE_END,0,0); (_nr_pr==1);
  assert(!ISDUE);
  atomic { do :: i<NC -> assert(!(WAITS(c[i]) && (pub[i] || !dead[COWN(c[i])]))); i++ :: else -> break od }
}
