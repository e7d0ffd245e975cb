/* The hash map of SharedHashMap (subetha/_map.pxd) in a small world: 1 or 2 keys that begin at the same slot, 2 or 3 slots, 2 or 3 cells, generations
   from 1 on, up to five participants. The first one does N1 operations, any of those in OPS1 on any of the keys in KEYS1 (bit 0, bit 1); so do the
   others: GET, INS (if absent), SET, CAS (from the value that was there when the call began), DEL, REBUILD, RESCUE. Anybody may die (MAXDEATHS)
   or stop for ever (MAXSTOPS) at any step, or go on generations later. At the end all the dead are rescued; with -DMOVEATREST one more
   move must succeed, too.
   -DHAS0, -DHAS1: the key is there from the start; -DCLEANED: begins in a move, the other array clean; -DTORN: a value is two words;
   -DAPART: the second key begins at the second slot; -DBLOCKS: values lie in blocks (subetha/_mapvalues.pxd), NB of them; a call that finds no
   block does nothing.
   A slot's word: generation, form, cell, the cell's version. A reader looks into the array of the generation that it has read in this call and
   nowhere else: what a frozen slot says was current when the phase was read, or when it was frozen, whichever was later.
   Checked: each CAS that changes a key replaces what the map says (`now`); what a lookup answers was current at some moment of the call (`mask`),
   and in one piece; no key stands twice in a generation; a move carries every key on; nobody begins again unless the phase has changed; no
   word that is not frozen refers to a cell that has moved on; a block is written by its owner alone, and belongs to its cell while that is
   READY; at the end each cell is FREE, or READY(0) and referenced once, each block is FREE, its cell's, or of a cell that has moved on, and
   the slots are what the map says.
     spin -a -DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET+DEL -DN5=1 -DMAXDEATHS=1 -DCLEANED map.pml && gcc -w -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m1000000
                                                              0.6 million states, no error
   The other worlds are in check.py (two of the long ones were not run to their end: 32 and 22 million states without an error). So are the variants
   that must fail:
     -DBROKEN_NOGEN         words of keys do not say their generation (a stopped helper cleans a live one: lost)
     -DBROKEN_EMPTYNOGEN    EMPTY does not (a stopped writer inserts into a later generation)
     -DWRAP=4               generations modulo 4 in words of keys, somebody stopped for exactly 4 of them: a key that nobody touches is copied with the
                            same cell and version, so its word comes back. Nothing but enough bits helps against that
     -DBROKEN_NOLOOK        who fails to insert goes on to the next slot without another look at this one (key twice)
     -DBROKEN_DELEMPTY      a deleted key gives its slot back at once (what lies behind it is not seen: key twice)
     -DBROKEN_SKIP          "another key" is believed without a look whether the cell has moved on meanwhile (a key that is there is not found)
     -DBROKEN_FREEFIRST     the replaced cell is freed before the CAS of the slot
     -DBROKEN_NOLOOKAGAIN   no look at the slot after READY(me) -> READY(0) (somebody has replaced it and died, and its rescue has left alone what was
                            READY(me): leak)
     -DBROKEN_NOPHASE, -DBROKEN_DEADNOPHASE   a rescuer frees what it has not seen referenced, READY(0) or READY(dead), although the phase has changed
                            since (two moves went by during the scan: a live key's cell is freed)
     -DBROKEN_BOTH          it takes words of the other array for references, too (what was overwritten since is in a frozen one: leak)
     -DBROKEN_MARKFIRST     it reads the cells' words after the scan (published between: a live key's cell is freed)
     -DBROKEN_OLDPHASE      a reader uses the phase of an earlier call (answers what was deleted before this call)
     -DBLOCKS -DBROKEN_NOBLOCKLOOK   a reader believes what it has copied out of a block for as long as nobody has claimed the cell (the block of a free
                            cell is anybody's: what another one writes there is answered)
     -DBLOCKS -DBROKEN_LATELINK   the block is linked after its cell is READY (a reader finds a cell without a block)
     -DBLOCKS -DBROKEN_EARLYTAKE   a block whose cell is still of its version, in any hands, is taken
     -DBLOCKS -DBROKEN_NOBLOCKRESCUE   the rescue does not look at blocks (leak)
     -DREADYONLY -DLOOKATABSENT -DBROKEN_GONE   a reader begins again at a frozen absent slot whose cell has moved on (for as long as the mover is stopped)
   Switches that change nothing: -DREADBOTH (a reader goes on in the other array from a frozen word), -DFREEONCE (one try to free what was replaced).
   Not in it: whether new keys leave cells for overwrites, giving the disk space of a free block back (who does has it as OWNED, as one who writes), a reused number (cells.pml, lapsed.pml), versions that wrap, damage, weak memory. */
#define EMPTY 0
#define FEMPTY 1         /* frozen */
#define ABSENT 2
#define PRESENT 3
#define FABSENT 4
#define FPRESENT 5
#define FREE 0
#define WRITING 1
#define READY 2
#define STABLE 0
#define CLEANING 1
#define MOVING 2
/* operations */
#define GET 1
#define INS 2
#define SET 4
#define CAS 8
#define DEL 16
#define REBUILD 32
#define RESCUE 64
#define SWEEP 128
#ifndef S
#define S 2
#endif
#ifndef NC
#define NC 3
#endif
#ifndef MAXDEATHS
#define MAXDEATHS 0
#endif
#ifndef MAXSTOPS
#define MAXSTOPS 0
#endif
/* who takes part: how many operations, out of which, on which keys */
#ifndef N1
#define N1 1
#endif
#ifndef OPS1
#define OPS1 (INS|SET|CAS|DEL)
#endif
#ifndef KEYS1
#define KEYS1 1
#endif
#ifndef N2
#define N2 0
#endif
#ifndef OPS2
#define OPS2 (INS|SET|CAS|DEL)
#endif
#ifndef KEYS2
#define KEYS2 1
#endif
#ifndef N3
#define N3 0
#endif
#ifndef OPS3
#define OPS3 REBUILD
#endif
#ifndef KEYS3
#define KEYS3 1
#endif
#ifndef N4
#define N4 0
#endif
#ifndef OPS4
#define OPS4 GET
#endif
#ifndef KEYS4
#define KEYS4 1
#endif
#ifndef N5
#define N5 0
#endif
#ifndef OPS5
#define OPS5 RESCUE
#endif
#ifndef KEYS5
#define KEYS5 1
#endif
#define LAST 7

/* where a key's probe sequence begins */
#ifdef APART
#define HOME(k) (k)
#else
#define HOME(k) 0
#endif
/* the generations that words carry */
#ifdef BROKEN_NOGEN
#define KGEN(g) 0
#elif defined(WRAP)
#define KGEN(g) ((g)%WRAP)
#else
#define KGEN(g) (g)
#endif
#ifdef BROKEN_EMPTYNOGEN
#define EGEN(g) 0
#else
#define EGEN(g) (g)
#endif
#define WORD(g,t,c,v) ((g)<<9 | (t)<<6 | (c)<<4 | (v))
#define GEN(w) ((w)>>9)
#define TAG(w) (((w)>>6)&7)
#define CELL(w) (((w)>>4)&3)
#define VER(w) ((w)&15)
#define EMPTYWORD(g) WORD(EGEN(g),EMPTY,0,0)
#define FROZEN(w) (TAG(w)==FEMPTY || TAG(w)>=FABSENT)
/* a cell's word */
#define CW(v,st,o) ((v)<<5 | (st)<<3 | (o))
#define CVER(w) ((w)>>5)
#define CST(w) (((w)>>3)&3)
#define COWN(w) ((w)&7)
#define AT(g,m) ((((g)&1)*S)+((m)%S))
#define G (p>>2)
#define PH (p&3)
#define IS(c,w) (CST(cw[c])==READY && CVER(cw[c])==VER(w))
#ifndef NB
#define NB 3
#endif
/* a block's word */
#define BFREE 0
#define BOWNED(o) (256+(o))
#define LINK(c,v) (512 | (c)<<4 | (v))
#ifdef BROKEN_EARLYTAKE
#define ORPHAN(b) ((b)>=512 && CST(cw[((b)>>4)&3])!=WRITING)
#else
#define ORPHAN(b) ((b)>=512 && CVER(cw[((b)>>4)&3])>((b)&15))
#endif
/* asked after something was read: it was still there. Nobody writes into a cell that is only FREE */
#ifdef READYONLY
#define WAS(c,w) IS(c,w)
#else
#define WAS(c,w) (IS(c,w) || (CST(cw[c])==FREE && CVER(cw[c])==VER(w)+1))
#endif

short s[2*S];
short cw[NC]; byte key[NC], d0[NC], d1[NC];
#ifdef BLOCKS
short bw[NB]; byte b0[NB], b1[NB], ref[NC];     /* d0 and d1 are then what the cell's value was meant to be */
#endif
byte phase;
byte deaths, stops; bit dead[8], resc[8];
/* what a map would say: a key's value, 0 where it is absent; and the values that were current since an operation began */
byte now[2], mask[8], mkey[8];

/* each step may be the last one */
#define STEP if :: me!=LAST && deaths<MAXDEATHS -> deaths++; dead[me]=1; goto end :: me!=LAST && stops<MAXSTOPS -> stops++; goto end :: skip fi

inline becomes(val) {     /* the operation on k takes effect, by a CAS from w */
  assert(now[k] == (TAG(w)==PRESENT -> d0[CELL(w)] : 0));
  now[k] = val; q = 0;
  do :: q<8 -> if :: mask[q] && mkey[q]==k -> mask[q] = mask[q] | (1<<val) :: else fi; q++ :: else -> break od; q = 0
}
inline once(g, kk) {      /* no key stands twice in a generation */
  q = 0; qq = 0;
  do
  :: q<S -> if :: TAG(s[AT(g,q)])>=ABSENT && GEN(s[AT(g,q)])==KGEN(g) && IS(CELL(s[AT(g,q)]),s[AT(g,q)]) && key[CELL(s[AT(g,q)])]==kk -> qq++ :: else fi; q++
  :: else -> break
  od; assert(qq==1); q = 0; qq = 0
}
byte q, qq;

proctype P(byte me; byte n; byte ops; byte keys) {
  byte op, k, p, i, m, c, x, y, e, nc, d; bit o, found; short w, u, nw;
#ifdef BLOCKS
  byte b; bit is;
#endif
next:
  atomic {
#ifdef BLOCKS
    b=0; is=0;
#endif
    op=0; k=0; p=0; i=0; m=0; c=0; x=0; y=0; e=0; d=0; o=0; found=0; w=0; u=0; nw=0; mask[me]=0; mkey[me]=0; assert(nc==0);
    if :: n==0 -> goto end :: else fi; n--;
    if :: ops&GET -> op=GET :: ops&INS -> op=INS :: ops&SET -> op=SET :: ops&CAS -> op=CAS :: ops&DEL -> op=DEL
       :: ops&REBUILD -> op=REBUILD :: ops&RESCUE -> op=RESCUE fi;
    if
    :: op<=DEL -> if :: keys&1 :: keys&2 -> k=1 fi;
       mkey[me]=k; mask[me]=1<<now[k]; if :: op==CAS -> e=now[k] :: else fi
    :: op==RESCUE -> d=1;
       do :: d<LAST && !(dead[d] && !resc[d]) -> d++ :: else -> break od;
       if :: d==LAST -> d=0; goto next :: else fi
    :: else
    fi
  }
again:
  atomic {
    STEP; p=phase; m=0; i=0; o=0; u=0; w=0; c=0; x=0; y=0;
    if
    :: op==REBUILD ->
       if :: e==0 -> e=G+1 :: else fi;
       if :: G>=e -> goto next :: else fi;
       if :: PH==STABLE -> skip :: else -> goto help fi
    :: op>=RESCUE -> if :: PH==MOVING -> found=(op==RESCUE); goto help :: else -> if :: op==SWEEP -> i=k :: else fi; goto rescue fi
#ifdef BROKEN_OLDPHASE
    :: op==GET -> skip        /* the call begins after its look at the phase */
#else
    :: op==GET -> goto probe
#endif
    :: else -> if :: PH==MOVING -> goto help :: else -> goto probe fi
    fi
  }
#ifdef BROKEN_OLDPHASE
  if :: op==GET -> atomic { mask[me]=1<<now[k]; goto probe } :: else fi;
#endif
  atomic { STEP; if :: phase==p -> phase=p+CLEANING :: else fi; goto again }

  /* ---- lookup ---- */
probe:
  atomic {
    STEP; assert(m<S); w=s[AT(G+o,HOME(k)+m)];
    if
    :: TAG(w)==EMPTY -> if :: GEN(w)!=EGEN(G+o) -> goto restart :: else -> goto missing fi
    :: TAG(w)==FEMPTY -> if :: GEN(w)!=G+o || op!=GET || o -> goto restart :: else -> goto other fi
    :: else -> if :: GEN(w)!=KGEN(G+o) || (FROZEN(w) && (op!=GET || o)) -> goto restart :: else -> c=CELL(w) fi
    fi;
#if !defined(LOOKATABSENT) && !defined(READBOTH)
    /* whosever it is: if it is this key's, no other slot is */
    if :: op==GET && (TAG(w)==ABSENT || TAG(w)==FABSENT) -> m++; c=0; goto probe :: else fi
#endif
  }
  atomic { STEP; x=(key[c]==k) }
  if
  :: !x ->
#ifndef BROKEN_SKIP
     atomic { STEP; if :: WAS(c,w) -> m++ :: else -> goto gone fi }
#else
     m++;
#endif
     goto probe
  :: else
  fi;
  if
#ifdef READBOTH
  :: (op==GET || op==INS || op==CAS) && TAG(w)==PRESENT ->
#else
  :: ((op==GET || op==INS || op==CAS) && TAG(w)==PRESENT) || TAG(w)==FPRESENT ->
#endif
value:
#ifdef BLOCKS
     atomic { STEP; b=ref[c] }
     atomic { STEP; is=(bw[b]==LINK(c,VER(w))) }
     /* a cell that is READY has its block */
     atomic { STEP; if :: !is -> b=0; assert(!IS(c,w)); goto gone :: WAS(c,w) -> is=0 :: else -> b=0; is=0; goto gone fi }
     atomic { STEP; x=b0[b] }
#ifdef TORN
     atomic { STEP; y=b1[b] }
#else
     y=x;
#endif
#else
     atomic { STEP; x=d0[c] }
#ifdef TORN
     atomic { STEP; y=d1[c] }
#else
     y=x;
#endif
#endif
     atomic {
       STEP;
#if defined(BLOCKS) && !defined(BROKEN_NOBLOCKLOOK)
       if :: bw[b]==LINK(c,VER(w)) -> b=0 :: else -> b=0; goto gone fi;
#else
       if :: WAS(c,w) -> skip :: else -> goto gone fi;
#endif
       assert(x==y);
       if
       :: op==GET || op==INS -> assert(mask[me] & (1<<x)); goto answered
       :: op==CAS && x!=e -> assert(mask[me] & ~(1<<e)); goto answered
       :: else -> goto alloc
       fi
     }
  :: else
  fi;
  atomic {
    STEP; x=0;
    if :: WAS(c,w) -> skip :: else -> goto gone fi;
    if
    :: op==GET && TAG(w)==ABSENT -> assert(mask[me] & 1); goto answered
    :: op==GET && TAG(w)==FABSENT -> goto other
    :: op==GET && TAG(w)==FPRESENT -> u=w; goto other
    :: op==DEL && TAG(w)==PRESENT -> goto delete
    :: op==DEL && TAG(w)!=PRESENT -> assert(mask[me] & 1); goto answered
    :: op==CAS && e!=0 -> assert(mask[me] & ~(1<<e)); goto answered
    :: else -> goto alloc
    fi
  }
gone:    /* the cell has moved on, so the slot has, too, unless it was frozen */
  atomic {
    x=0; y=0;
    if
    :: TAG(w)==FABSENT ->
#ifdef BROKEN_GONE
       goto restart
#else
       m++; goto probe        /* whose it was cannot be seen any more; if it was this key's, then no other slot is */
#endif
    :: TAG(w)==FPRESENT -> goto restart
    :: else -> assert(s[AT(G+o,HOME(k)+m)]!=w); goto probe
    fi
  }
other:
#ifdef READBOTH
  atomic { o=1; m=0; x=0; goto probe }
#else
  atomic { assert(mask[me] & 1); goto answered }
#endif
missing:
  atomic {
    if
    :: op==GET && u!=0 -> w=u; c=CELL(w); goto value
    :: (op==GET && u==0) || op==DEL -> assert(mask[me] & 1); goto answered
    :: op==CAS && e!=0 -> assert(mask[me] & ~(1<<e)); goto answered
    :: else -> goto alloc
    fi
  }
restart:       /* nobody begins again but because somebody got on */
  atomic { assert(phase!=p); goto again }
answered:
  if :: nc -> atomic { STEP; assert(COWN(cw[nc-1])==me); cw[nc-1]=CW(CVER(cw[nc-1])+1,FREE,0); nc=0 } :: else fi;
  goto next;

  /* ---- writing ---- */
alloc:
  x=0; y=0;
  if
  :: nc==0 ->
     atomic {
       STEP;
       if
       :: CST(cw[0])==FREE -> nc=1
       :: CST(cw[1])==FREE -> nc=2
#if NC>2
       :: CST(cw[2])==FREE -> nc=3
#endif
#if NC>3
       :: CST(cw[3])==FREE -> nc=4
#endif
       :: else -> goto next
       fi;
       cw[nc-1]=CW(CVER(cw[nc-1]),WRITING,me); assert(CVER(cw[nc-1])<15)
     }
     atomic { STEP; key[nc-1]=k }
#ifdef BLOCKS
     do
     :: b==NB -> break
     :: else ->
        atomic { STEP; u=bw[b] }
        atomic { STEP; is=(u==BFREE || ORPHAN(u)) }
        if
        :: is -> is=0; atomic { STEP; if :: bw[b]==u -> bw[b]=BOWNED(me); u=0; break :: else -> b++ fi }
        :: else -> b++
        fi;
        u=0
     od;
     if
     :: b==NB -> b=0; w=0; c=0; goto answered
     :: else
     fi;
     atomic { STEP; assert(bw[b]==BOWNED(me)); d0[nc-1]=2*me-1+(n&1); d1[nc-1]=d0[nc-1]; b0[b]=d0[nc-1] }
#ifdef TORN
     atomic { STEP; assert(bw[b]==BOWNED(me)); b1[b]=d1[nc-1] }
#endif
#ifndef BROKEN_LATELINK
     atomic { STEP; assert(bw[b]==BOWNED(me)); bw[b]=LINK(nc-1,CVER(cw[nc-1])) }
#endif
     atomic { STEP; ref[nc-1]=b }
#else
     atomic { STEP; d0[nc-1]=2*me-1+(n&1) }
#ifdef TORN
     atomic { STEP; d1[nc-1]=2*me-1+(n&1) }
#endif
#endif
     atomic { STEP; cw[nc-1]=CW(CVER(cw[nc-1]),READY,me) }
#ifdef BLOCKS
     b=0
#endif
  :: else
  fi;
#ifdef BROKEN_FREEFIRST
  atomic { STEP; if :: TAG(w)>=ABSENT && IS(CELL(w),w) -> cw[CELL(w)]=CW(VER(w)+1,FREE,0) :: else fi }
#endif
  atomic {
    STEP;
    nw=WORD(KGEN(G),PRESENT,nc-1,CVER(cw[nc-1]));
    if
    :: s[AT(G,HOME(k)+m)]==w ->
       becomes(d0[nc-1]);
#if defined(BLOCKS) && !defined(BROKEN_LATELINK)
       assert(bw[ref[nc-1]]==LINK(nc-1,VER(nw)) && b0[ref[nc-1]]==d0[nc-1]);
#endif
       s[AT(G,HOME(k)+m)]=nw; 
       if :: TAG(w)==EMPTY -> once(G,k) :: else fi
    :: else ->
       nw=0; w=0; c=0;
#ifdef BROKEN_NOLOOK
       m++;
#endif
       goto probe
    fi
  }
#if defined(BLOCKS) && defined(BROKEN_LATELINK)
  atomic { STEP; bw[ref[nc-1]]=LINK(nc-1,VER(nw)) }
#endif
  atomic { STEP; c=nc-1; nc=0; if :: cw[c]==CW(VER(nw),READY,me) -> cw[c]=CW(VER(nw),READY,0); found=1 :: else fi }
#ifdef BROKEN_NOLOOKAGAIN
  found=0;
#else
  /* who has replaced it meanwhile may be dead, and its rescue has left alone what was READY(me) */
  if :: found -> atomic { STEP; found=(s[AT(G,HOME(k)+m)]!=nw) } :: else fi;
#endif
  if
  :: TAG(w)!=EMPTY ->
     do           /* its publisher, or a rescuer, may change the owner meanwhile */
     :: atomic { STEP; u=cw[CELL(w)]; if :: CST(u)==READY && CVER(u)==VER(w) -> skip :: else -> break fi }
        atomic { STEP; if :: cw[CELL(w)]==u -> cw[CELL(w)]=CW(VER(w)+1,FREE,0); break :: else fi }
#ifdef FREEONCE
        break
#endif
     od
  :: else
  fi;
  atomic { u=0; if :: found -> op=SWEEP; k=c; found=0; mask[me]=0; mkey[me]=0; goto again :: else -> goto next fi };
delete:
#ifdef BROKEN_DELEMPTY
  atomic { STEP; if :: s[AT(G,HOME(k)+m)]==w -> becomes(0); s[AT(G,HOME(k)+m)]=EMPTYWORD(G) :: else -> goto probe fi }
  do
  :: atomic { STEP; u=cw[CELL(w)]; if :: CST(u)==READY && CVER(u)==VER(w) -> skip :: else -> break fi }
     atomic { STEP; if :: cw[CELL(w)]==u -> cw[CELL(w)]=CW(VER(w)+1,FREE,0); break :: else fi }
  od;
  goto answered;
#else
  atomic { STEP; if :: s[AT(G,HOME(k)+m)]==w -> becomes(0); s[AT(G,HOME(k)+m)]=WORD(KGEN(G),ABSENT,CELL(w),VER(w)) :: else -> goto probe fi; goto answered }
#endif

  /* ---- moving ---- */
help:
  if :: PH==CLEANING -> goto clean :: PH==MOVING -> goto move :: else -> goto again fi;
clean:
  do
  :: i==S -> break
  :: i<S ->
     atomic {
       STEP; w=s[AT(G+1,i)];
       if
       :: w==EMPTYWORD(G+1) -> i++; w=0; goto clean
       :: TAG(w)==EMPTY && GEN(w)==EGEN(G-1) -> skip
       :: TAG(w)==FEMPTY && GEN(w)==G-1 -> skip
       :: TAG(w)>=FABSENT && GEN(w)==KGEN(G-1) -> skip
       :: else -> goto restart
       fi
     }
     atomic { STEP; if :: s[AT(G+1,i)]==w -> s[AT(G+1,i)]=EMPTYWORD(G+1); i++ :: else fi; w=0 }
  od;
  atomic { STEP; if :: phase==p -> phase=p-CLEANING+MOVING :: else fi; goto again }
move:
  do
  :: i==S -> break
  :: i<S ->
     atomic {
       STEP; w=s[AT(G,i)];
       if
       :: TAG(w)==EMPTY && GEN(w)==EGEN(G) -> u=WORD(G,FEMPTY,0,0)
       :: TAG(w)==FEMPTY && GEN(w)==G -> i++; w=0; goto move
       :: TAG(w)>=ABSENT && GEN(w)==KGEN(G) -> u=(FROZEN(w) -> w : w+(2<<6))
       :: else -> goto restart
       fi
     }
     if
     :: !FROZEN(w) -> atomic { STEP; if :: s[AT(G,i)]==w -> s[AT(G,i)]=u :: else -> u=0; w=0; goto move fi }
     :: else
     fi;
     w=0;
     if
     :: TAG(u)==FABSENT ->
        do
        :: atomic { STEP; w=cw[CELL(u)]; if :: CST(w)==READY && CVER(w)==VER(u) -> skip :: else -> break fi }
           atomic { STEP; if :: cw[CELL(u)]==w -> cw[CELL(u)]=CW(VER(u)+1,FREE,0); break :: else fi }
        od
     :: TAG(u)==FPRESENT ->
        atomic { STEP; x=key[CELL(u)]; m=0 }
        atomic { STEP; if :: WAS(CELL(u),u) -> skip :: else -> goto restart fi }
copy:
        atomic {
          STEP; assert(m<S); w=s[AT(G+1,HOME(x)+m)];
          if
          :: w==EMPTYWORD(G+1) -> skip
          :: TAG(w)>=ABSENT && !FROZEN(w) && GEN(w)==KGEN(G+1) -> c=CELL(w)
          :: else -> goto restart
          fi
        }
        if
        :: TAG(w)==EMPTY ->
           atomic {
             STEP;
             if
             :: s[AT(G+1,HOME(x)+m)]==w -> s[AT(G+1,HOME(x)+m)]=WORD(KGEN(G+1),PRESENT,CELL(u),VER(u)); once(G+1,x)
             :: else -> goto copy
             fi
           }
        :: else ->
           atomic { STEP; y=(key[c]!=x) }
#ifdef BROKEN_SKIP
           if :: y -> m++; y=0; c=0; goto copy :: else fi;
#endif
           atomic { STEP; if :: !WAS(c,w) -> assert(s[AT(G+1,HOME(x)+m)]!=w); y=0; c=0; goto copy :: WAS(c,w) && y -> m++; y=0; c=0; goto copy :: else fi }
        fi
     :: else
     fi;
     atomic { i++; w=0; u=0; x=0; y=0; m=0; c=0 }
  od;
  atomic {
    STEP;
    if
    :: phase==p ->
       phase=p-MOVING+4;
       /* every present key has been copied, with its value */
       q=0;
       do
       :: q<S -> if :: TAG(s[AT(G+1,q)])==PRESENT -> assert(IS(CELL(s[AT(G+1,q)]),s[AT(G+1,q)]) && now[key[CELL(s[AT(G+1,q)])]]==d0[CELL(s[AT(G+1,q)])]); qq++ :: else fi; q++
       :: else -> break
       od;
       assert(qq==(now[0]!=0)+(now[1]!=0)); q=0; qq=0
    :: else
    fi;
    goto again
  }

  /* ---- rescue ---- */
rescue:
  do
  :: i==NC -> break
  :: i<NC ->
#ifdef BROKEN_MARKFIRST
     m=0; y=0;
     do
     :: m==S || y -> break
     :: else -> atomic { STEP; w=s[AT(G,m)]; y=(TAG(w)>=ABSENT && CELL(w)==i -> VER(w)+1 : 0); w=0; m++ }
     od;
#endif
     atomic {
       STEP; u=cw[i];
       if
       :: CST(u)==WRITING && COWN(u)==d -> goto free
       :: CST(u)==READY && (COWN(u)==d || COWN(u)==0) -> skip
       :: else -> u=0; y=0; i++; if :: op==SWEEP -> goto next :: else -> goto rescue fi
       fi
     }
     atomic { STEP; m=0; x=0; p=phase; if :: PH==MOVING -> found=(op==RESCUE); goto again :: else fi }
#ifdef BROKEN_MARKFIRST
     x=(y==CVER(u)+1); m=S;
#endif
     do
     :: m==S || x -> break
     :: else -> atomic { STEP; x=(TAG(s[AT(G,m)])>=ABSENT && CELL(s[AT(G,m)])==i && VER(s[AT(G,m)])==CVER(u)); m++ }
     od;
#ifdef BROKEN_BOTH
     m=0;
     do
     :: m==S || x -> break
     :: else -> atomic { STEP; x=(TAG(s[AT(G+1,m)])>=ABSENT && CELL(s[AT(G+1,m)])==i && VER(s[AT(G+1,m)])==CVER(u)); m++ }
     od;
#endif
     m=0;
     if
     :: x -> x=0;
        if
        :: COWN(u)!=0 -> found=1; atomic { STEP; if :: cw[i]==u -> cw[i]=CW(CVER(u),READY,0) :: else fi }
        :: else
        fi
     :: else ->
#ifdef BROKEN_NOPHASE
        if :: COWN(u)==0 -> goto free :: else fi;
#endif
#ifdef BROKEN_DEADNOPHASE
        if :: COWN(u)!=0 -> goto free :: else fi;
#endif
        atomic { STEP; if :: (phase>>2)==G && (phase&3)!=MOVING -> skip :: else -> found=(op==RESCUE); goto again fi }
free:
        found=1;
        atomic { STEP; if :: cw[i]==u -> cw[i]=CW(CVER(u)+1,FREE,0) :: else fi }
     fi;
     i++; u=0; y=0; if :: op==SWEEP -> goto next :: else fi
  od;
#if defined(BLOCKS) && !defined(BROKEN_NOBLOCKRESCUE)
  do
  :: b==NB -> b=0; break
  :: else ->
     atomic { STEP; is=(bw[b]==BOWNED(d)) }
     if :: is -> found=1; is=0; atomic { STEP; if :: bw[b]==BOWNED(d) -> bw[b]=BFREE :: else fi } :: else fi;
     b++
  od;
#endif
  atomic { STEP; i=0; u=0; if :: found -> found=0; goto again :: else resc[d]=1; goto next fi };

end:
#ifdef BLOCKS
  atomic { b=0; is=0 }
#endif
  atomic { n=0; op=0; k=0; p=0; i=0; m=0; c=0; x=0; y=0; e=0; d=0; nc=0; o=0; found=0; w=0; u=0; nw=0; mask[me]=0; mkey[me]=0 }
}

init {
  byte f, g;
  atomic {
    /* generation 1, before it the frozen one of 0 */
    phase=1<<2 | STABLE;
#ifdef CLEANED
    phase=1<<2 | MOVING;
#endif
    f=0; do :: f<S -> s[AT(1,f)]=EMPTYWORD(1);
#ifdef CLEANED
      s[AT(0,f)]=EMPTYWORD(2);
#else
      s[AT(0,f)]=WORD(0,FEMPTY,0,0);
#endif
      f++ :: else -> break od;
#ifdef HAS0
    key[0]=0; d0[0]=7; d1[0]=7; now[0]=7; cw[0]=CW(0,READY,0); s[AT(1,HOME(0))]=WORD(KGEN(1),PRESENT,0,0);
#endif
#ifdef HAS1
    key[1]=1; d0[1]=7; d1[1]=7; now[1]=7; cw[1]=CW(0,READY,0); s[AT(1,HOME(1)+(HOME(1)==HOME(0)))]=WORD(KGEN(1),PRESENT,1,0);
#endif
#ifdef BLOCKS
#ifdef HAS0
    bw[0]=LINK(0,0); b0[0]=7; b1[0]=7;
#endif
#ifdef HAS1
    ref[1]=1; bw[1]=LINK(1,0); b0[1]=7; b1[1]=7;
#endif
#endif
    f=0;
    run P(1,N1,OPS1,KEYS1);
    if :: N2 -> run P(2,N2,OPS2,KEYS2) :: else fi;
    if :: N3 -> run P(3,N3,OPS3,KEYS3) :: else fi;
    if :: N4 -> run P(4,N4,OPS4,KEYS4) :: else fi;
    if :: N5 -> run P(5,N5,OPS5,KEYS5) :: else fi
  }
  (_nr_pr==1);
  run P(LAST,MAXDEATHS+1,RESCUE,1);
  (_nr_pr==1);
#ifdef MOVEATREST
  g=phase>>2; run P(LAST,1,REBUILD,1);
  (_nr_pr==1);
  assert((phase>>2)>g);
#endif
  atomic {
    if
    :: (phase&3)==MOVING -> skip     /* the next one moves on */
    :: else ->
       g=phase>>2; f=0;
#if MAXSTOPS==0
       do
       :: f<NC ->
          if
          :: CST(cw[f])==FREE
          :: else ->
             assert(cw[f]==CW(CVER(cw[f]),READY,0)); q=0; qq=0;
             do :: q<S -> if :: TAG(s[AT(g,q)])>=ABSENT && CELL(s[AT(g,q)])==f && VER(s[AT(g,q)])==CVER(cw[f]) -> qq++ :: else fi; q++ :: else -> break od;
             assert(qq==1); q=0; qq=0;
#ifdef BLOCKS
             assert(bw[ref[f]]==LINK(f,CVER(cw[f])) && b0[ref[f]]==d0[f])
#endif
          fi; f++
       :: else -> break
       od;
#ifdef BLOCKS
       f=0;
       do
       :: f<NB -> q=(bw[f]>>4)&3; assert(bw[f]==BFREE || (bw[f]>=512 && (ORPHAN(bw[f]) || (CST(cw[q])==READY && ref[q]==f)))); q=0; f++
       :: else -> break
       od;
#endif
#endif
       q=0; qq=0;
       do
       :: q<S ->
          if :: TAG(s[AT(g,q)])>=ABSENT -> assert(!FROZEN(s[AT(g,q)]) && IS(CELL(s[AT(g,q)]),s[AT(g,q)])) :: else fi;
          if :: TAG(s[AT(g,q)])==PRESENT -> assert(now[key[CELL(s[AT(g,q)])]]==d0[CELL(s[AT(g,q)])]); qq++ :: else fi; q++
       :: else -> break
       od;
       assert(qq==(now[0]!=0)+(now[1]!=0))
    fi
  }
}
