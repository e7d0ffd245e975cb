/* The rotation of a full ring `back` (queue_publish_back, queue_press_back, queue_take_back in subetha/_queue.pxd) in a small world:
   at the start the ring is full, LIVE0 live references first and stale ones behind. NPUT participants hold a job and put it back,
   one more may claim, put back and finish, rescuers may work meanwhile; any of them may die or stop at any step.
   Checked: nobody finds places and hints in contradiction; what a living participant put back has a reference once everybody is
   at rest; after a rescue every job runs exactly once and every cell is free.
     spin -a -DMAXDEATHS=2 -DNRES=1 -DTBACK=1 -DTDONE=1 rotate.pml && gcc -O1 -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                            2.5 million states, no error
     -DMAXDEATHS=2 -DNRES=2                                 579 thousand, no error (two rescuers)
     -DMAXDEATHS=1 -DNC=3 -DNPUT=2                          189 thousand, no error
     -DMAXDEATHS=1 -DNC=3 -DLIVE0=2 -DTBACK=1               49 thousand, no error
     -DMAXDEATHS=0 -DNC=4 -DLIVE0=2 -DNPUT=2                474 thousand, no error
     the last one with a death and a taker: NOT exhausted within a minute
   Variants that must fail:
     -DBROKEN_NOROTATE                                      nobody goes round (a job without a reference)
     -DBROKEN_ONETRY -DMAXDEATHS=0 -DNC=4 -DLIVE0=2 -DNPUT=2   what was taken out is published once only (the other putter filled the
                                                            place first: a job without a reference)
     -DBROKEN_READY                                         a put-back passes through READY (dies unpublished: job lost)
     -DNOBUMP -DTBACK=1 -DNRES=1                            a put-back keeps its version (old references come to life: places and
                                                            hints contradict each other)
   A hint and its place are read in one step. Not in it: the order of jobs, damage (repair.pml), blocks, weak memory. */
#define OK 1
#define EMPTY 2
#define NOPLACE 4
#define FREE 0
#define READY 2
#define TAKEN 3
#define RETRY 4
#ifndef NC
#define NC 2             /* cells */
#endif
#define R (2*NC)         /* places */
#ifndef LIVE0
#define LIVE0 1          /* cells whose references stand first in the full ring */
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 1
#endif
#ifndef NPUT
#define NPUT 1           /* participants that hold a job and put it back */
#endif
#ifndef TBACK
#define TBACK 0          /* one more claims and puts back so often, ... */
#endif
#ifndef TDONE
#define TDONE 0          /* ... then claims and finishes so often */
#endif
#ifndef NRES
#define NRES 0           /* rescuers beside the others */
#endif
#define LAPS 16
#define MOD(p) ((p) % (LAPS*R))
/* the words of a place and of a cell */
#define PLACE(l,f,v,i) ((l)*128 + (f)*64 + (v)*4 + (i))
#define LAP(w) ((w)/128)
#define FULL(w) (((w)/64)%2)
#define VER(w) (((w)/4)%16)
#define IDX(w) ((w)%4)
#define WORD(v,s,o) ((v)*64 + (s)*8 + (o))
#define CVER(w) ((w)/64)
#define CST(w) (((w)/8)%8)
#define COWN(w) ((w)%8)
#define WAITS(w) (CST(w)==READY || CST(w)==RETRY)
#define LIVE(w) (VER(w)==CVER(c[IDX(w)]) && WAITS(c[IDX(w)]))
#define LEAD(w,p) ((((LAP(w))-((p)/R)+LAPS+LAPS/2) % LAPS) - LAPS/2)
#define PDIFF(a,b) ((((a)-(b)+LAPS*R+LAPS*R/2) % (LAPS*R)) - LAPS*R/2)
#ifdef NOBUMP
#define BUMP 0
#else
#define BUMP 1
#endif
#ifdef BROKEN_READY
#define BACK READY
#else
#define BACK RETRY
#endif
short p[R], c[NC];
byte head, tail, deaths, results[NC];
bit dead[8], rescued[8];
/* a step, or death before it */
#define STEP if :: true :: deaths < MAXDEATHS -> deaths++; dead[me] = 1; goto die fi

inline advance(hint, at) { atomic { STEP; if :: hint==at -> hint=MOD(at+1) :: else fi } }
inline freeplace(at, w) { atomic { STEP; if :: p[at%R]==w -> p[at%R]=PLACE((LAP(w)+1)%LAPS,0,0,0) :: else fi } }

/* refs_publish: OK or NOPLACE in q. Nothing is damaged here: places and hints never contradict each other */
inline publish(i, v) {
  q=0;
  do
  :: q != 0 -> break
  :: else ->
     atomic { STEP; pos=tail; pw=p[pos%R] }
     if
     :: LAP(pw)==pos/R && !FULL(pw) ->
        atomic { STEP; if :: p[pos%R]==pw -> p[pos%R]=PLACE(pos/R,1,v,i); q=OK :: else fi }
        if :: q==OK -> advance(tail,pos) :: else fi
     :: pw==PLACE(pos/R,1,v,i) -> q=OK; advance(tail,pos)
     :: else ->
        if
        :: LEAD(pw,pos)>=0 -> advance(tail,pos)
        :: else ->
           atomic { STEP; if :: FULL(pw) && !LIVE(pw) -> x=1 :: else -> x=0 fi }
           if
           :: x==1 -> freeplace(pos,pw)
           :: else -> atomic { STEP; if :: tail==pos -> assert(LEAD(pw,pos)==-1 && FULL(pw)); q=NOPLACE :: else fi }
           fi
        fi
     fi
  od;
  atomic { pos=0; pw=0; x=0 }
}
/* refs_peek: OK or EMPTY in q; pos, pw, cw */
inline peek() {
  doubted=0; q=0;
  do
  :: q != 0 -> break
  :: else ->
     atomic { STEP; pos=head; pw=p[pos%R] }
     if
     :: LAP(pw)==pos/R && FULL(pw) ->
        atomic { STEP; if :: LIVE(pw) -> cw=c[IDX(pw)]; q=OK :: else fi }
        if :: q==OK :: else -> freeplace(pos,pw); advance(head,pos) fi
     :: LEAD(pw,pos)>0 -> advance(head,pos)
     :: else ->
        assert(LEAD(pw,pos)==0);
        atomic { STEP;
          if
          :: PDIFF(tail,pos)==0 || PDIFF(tail,pos)==-1 -> q=EMPTY
          :: PDIFF(tail,pos)>0 && !(doubted && PDIFF(et,pos)>0) -> doubted=1; et=tail
          :: else -> assert(head!=pos)
          fi }
     fi
  od;
  atomic { doubted=0; et=0; if :: q!=OK -> pos=0; pw=0; cw=0 :: else fi }
}

/* One program for all, so that each operation stands in it once. `todo` says what comes after a call:
   what is to be published is (j, v); the stack of those taken out for it (sj, sv, top); the round (n, first). */
#define ROLE_PUT 1
#define ROLE_TAKE 2
#define ROLE_RESCUE 3
#define ROLE_DRAIN 4
#define T_MAIN 0         /* a claim for its own sake */
#define T_ROUND 1        /* the next to go round */
#define T_PRESS 2        /* one taken out for room */
proctype actor(byte me, role, j, b, t) {
  byte pos, q, et, v, kj, kv, mj, mv, n, top, todo, d, i, s, seen, sv[NC+2], sj[NC+2];
  short pw, cw, x, first; bit doubted, found, round;
  if
  :: role==ROLE_PUT -> v=CVER(c[j]);
     atomic { STEP; assert(c[j]==WORD(v,TAKEN,me)); v=v+BUMP; c[j]=WORD(v,BACK,me) }
     goto putback
  :: role==ROLE_RESCUE -> goto rescue
  :: else
  fi;
main:
  if :: role==ROLE_DRAIN || (role==ROLE_TAKE && b+t>0) :: else -> goto die fi;
  todo=T_MAIN;
take:   /* queue_take of one, queue_take_back of the others */
  peek();
  if
  :: todo==T_ROUND && q==OK && n>0 && cw==first -> q=EMPTY; goto roundover
  :: else
  fi;
  if
  :: q==OK ->
     atomic { STEP; if :: c[IDX(pw)]==cw -> kj=IDX(pw); kv=CVER(cw); c[kj]=WORD(kv,TAKEN,me) :: else -> q=0 fi }
     if :: q==OK -> freeplace(pos,pw); advance(head,pos) :: else fi;
     atomic { pos=0; pw=0; cw=0 }
  :: else
  fi;
  if
  :: todo==T_MAIN ->
     if
     :: q==EMPTY -> goto die
     :: q==OK && b>0 -> b--;
        atomic { STEP; assert(c[kj]==WORD(kv,TAKEN,me)); j=kj; v=kv+BUMP; c[j]=WORD(v,BACK,me); kj=0; kv=0 }
        goto putback
     :: q==OK && b==0 -> if :: role==ROLE_TAKE -> t-- :: else fi;
        atomic { STEP; assert(c[kj]==WORD(kv,TAKEN,me)); results[kj]++; assert(results[kj]==1); c[kj]=WORD(kv+1,FREE,0); kj=0; kv=0 }
        goto main
     :: else -> goto main
     fi
  :: todo!=T_MAIN && q==OK ->
     atomic { STEP; if :: c[kj]==WORD(kv,TAKEN,me) -> kv=kv+BUMP; c[kj]=WORD(kv,BACK,me) :: else -> q=0 fi }
  :: else -> q=0
  fi;
  if
  :: todo==T_ROUND && q==OK -> atomic { if :: first==0 -> first=WORD(kv,BACK,me) :: else fi; sj[0]=kj; sv[0]=kv; top=0; kj=0; kv=0 } goto press
  :: todo==T_ROUND && q!=OK -> goto rounded
  :: todo==T_PRESS && q==OK -> atomic { top++; sj[top]=kj; sv[top]=kv; kj=0; kv=0 } goto press
  :: else -> goto press
  fi;
putback:   /* queue_publish_back */
  atomic { n=0; first=0; round=1; sj[0]=j; sv[0]=v; top=0 }
press:     /* queue_press_back; at first only its first step, a publish */
  publish(sj[top], sv[top]);
  if
  :: q==OK && top>0 -> atomic { sj[top]=0; sv[top]=0; top-- } goto press
  :: q==OK && top==0 -> atomic { sj[0]=0; sv[0]=0; if :: round && n==0 && first==0 -> round=0 :: else fi }
     if :: round -> goto rounded :: else -> goto published fi
#ifndef BROKEN_NOROTATE
  :: q!=OK && round && n==0 && first==0 -> todo=T_ROUND; goto take
#endif
  :: else ->
#if defined(BROKEN_NOROTATE) || defined(BROKEN_ONETRY)
     goto published
#else
     todo=T_PRESS; if :: top<NC+1 -> goto take :: else -> goto press fi
#endif
  fi;
rounded:
  n++;
  if :: n<NC -> todo=T_ROUND; goto take :: else fi;
roundover:
  atomic { n=0; first=0; round=0; pos=0; pw=0; cw=0; sj[0]=j; sv[0]=v; top=0 } goto press;
published:
  atomic { j=0; v=0; q=0; n=0; first=0; round=0; sj[0]=0; sv[0]=0; top=0; todo=0 }
  if :: role==ROLE_RESCUE -> goto nextcell :: else -> goto main fi;

rescue:
  atomic { d=0; found=0; i=0; s=0; seen=0; do :: d<7 && !(dead[d] && !rescued[d]) -> d++ :: else -> break od }
  if :: d==7 -> goto die :: else fi;
  do
  :: s==R -> break
  :: else ->
     atomic { STEP; pw=p[s] }
     if :: FULL(pw) -> atomic { STEP; if :: LIVE(pw) -> seen=seen|(1<<IDX(pw)) :: else fi } :: else fi;
     atomic { s++; pw=0 }
  od;
cell:
  if
  :: i==NC -> atomic { STEP; if :: !found -> rescued[d]=1 :: else fi } goto rescue
  :: else
  fi;
  atomic { STEP; cw=c[i] }
  if
  :: COWN(cw)==d && (CST(cw)==TAKEN || (CST(cw)==RETRY && !(seen&(1<<i)))) ->
     found=1;
     atomic { STEP; if :: c[i]==cw -> j=i; v=CVER(cw)+BUMP; c[i]=WORD(v,BACK,me); q=OK :: else -> q=0 fi; cw=0 }
     if :: q==OK -> goto putback :: else fi
  :: COWN(cw)==d && CST(cw)==READY && !(seen&(1<<i)) ->      /* a submit that had not returned */
     found=1;
     atomic { STEP; if :: c[i]==cw -> c[i]=WORD(CVER(cw)+1,FREE,0) :: else fi }
  :: else
  fi;
nextcell:
  atomic { i++; cw=0; q=0 } goto cell;
die: skip
}
init {
  byte j, v, x;
  atomic {
    /* the ring is full: live references of the first cells, stale ones behind; the last cells are held by the putters */
    do :: j<R -> if :: j<LIVE0 -> p[j]=PLACE(0,1,1,j) :: else -> p[j]=PLACE(0,1,0,j%NC) fi; j++ :: else -> break od;
    j=0; do :: j<LIVE0 -> c[j]=WORD(1,RETRY,1); j++ :: else -> break od;
    tail=R; j=0;
    c[NC-1]=WORD(1,TAKEN,2); run actor(2,ROLE_PUT,NC-1,0,0);
#if NPUT>1
    c[NC-2]=WORD(1,TAKEN,3); run actor(3,ROLE_PUT,NC-2,0,0);
#endif
#if TBACK+TDONE>0
    run actor(4,ROLE_TAKE,0,TBACK,TDONE);
#endif
#if NRES>0
    run actor(5,ROLE_RESCUE,0,0,0);
#endif
#if NRES>1
    run actor(6,ROLE_RESCUE,0,0,0);
#endif
  }
  (_nr_pr==1);
  /* at rest: what the living put back lies in the ring; the dead's is rescued, and then every job runs once */
  atomic { deaths=MAXDEATHS;
    do
    :: j<NC ->
       if
       :: WAITS(c[j]) && !dead[COWN(c[j])] -> x=0; v=0;
          do :: v<R -> if :: FULL(p[v]) && VER(p[v])==CVER(c[j]) && IDX(p[v])==j -> x=1 :: else fi; v++ :: else -> break od; assert(x)
       :: else
       fi; j++
    :: else -> break
    od; j=0; v=0; x=0;
    run actor(7,ROLE_RESCUE,0,0,0) }
  (_nr_pr==1);
  run actor(7,ROLE_DRAIN,0,0,0); (_nr_pr==1);
  atomic { do :: j<NC -> assert(results[j]==1 && CST(c[j])==FREE); j++ :: else -> break od }
}
