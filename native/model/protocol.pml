/* SPDX-License-Identifier: Apache-2.0
 *
 * protocol.pml - publishing, polling, applying, dying and repairing, as a model for the checker spin (scripts/model).
 *
 * PUBLISHERS publishers at once, each with a limit of its own (its number), raise the words of MEMBERS members and ring;
 * each may be killed after any of its steps. An engine polls, applies and sleeps on the doorbell; one step in which it
 * polled may be dropped before it applied anything. When all have ended and somebody died, one more publisher repairs.
 * Modelled is what publication.py, slot.c and subscription.py do; each load, swap, ring and wait is one atomic step.
 *
 * Checked in every reachable state:
 *   I1          what is applied stood in all members at one time
 *   I2          applied revisions only grow, and so does every word
 *   accepted    what a publisher calls accepted was written into all members
 *   I4          when nothing moves any more, all members are equal and their pair is applied
 *   no livelock no endless run (spin's search for non-progress cycles), and no more revisions than publications: a
 *               publisher starts over only because another one succeeded
 *
 * Each mistake is a macro, and has to be found:
 *   SEEN        the engine compares with the pair last seen instead of the one last settled
 *   UNORDERED   publishers go through the members in different orders
 *   STORE       a plain store instead of a compare-and-swap
 *   REVISION    an equal revision is taken for a match whatever its limit
 *   EARLYBELL   the doorbell is rung before the store
 */
#ifndef PUBLISHERS
#define PUBLISHERS 3
#endif
#ifndef MEMBERS
#define MEMBERS 3
#endif
#define HEALER (PUBLISHERS + 1)
#define MAXREV (PUBLISHERS + 1)
#define PAIRS ((MAXREV + 1) * (HEALER + 1))
#define KEY(r, l) ((r) * (HEALER + 1) + (l))
#define ALL ((1 << MEMBERS) - 1)

byte rev[MEMBERS];
byte lim[MEMBERS];
byte bell;           /* modulo 8 */
byte finished;       /* publishers that ended, either way */
byte dead;
byte settled_rev;
byte settled_lim;
bit dropped;

/* For the properties alone: which members a pair was written to, and whether it ever stood in all at once. */
byte written[PAIRS];
bit stood[PAIRS];

/* One store, and what it means for the properties. */
inline write(at, r, l) {
    assert(rev[at] < r);                /* I2: a word only rises */
    rev[at] = r;
    lim[at] = l;
    written[KEY(r, l)] = written[KEY(r, l)] | (1 << at);
    j = 0;
    equal = 1;
    do
    :: j < MEMBERS ->
        equal = equal && rev[j] == r && lim[j] == l;
        j++
    :: else -> break
    od;
    stood[KEY(r, l)] = stood[KEY(r, l)] || equal;
    j = 0;
    equal = 0
}

/* One step of a publisher, or its death in place of it. */
#define STEP(what) atomic { if :: me != HEALER -> dead++; finished++; goto ended :: true fi; what }

proctype publisher(byte me) {
    byte newest, wanted, found_rev, found_lim, step, m, j;
    bit equal, everywhere;

    /* The highest revision of all members: everybody writes the first one first, so it has it at every moment. */
    STEP(newest = rev[0]);
again:
    atomic {
        wanted = newest + 1;
        assert(wanted <= MAXREV);                               /* no livelock */
        step = 0;
        everywhere = 1
    };
    do
    :: step < MEMBERS ->
#ifdef UNORDERED
        m = (me == 1 -> MEMBERS - 1 - step : step);
#else
        m = step;
#endif
#ifdef EARLYBELL
        if
        :: step == MEMBERS - 1 -> STEP(bell = (bell + 1) % 8)
        :: else
        fi;
#endif
#ifdef STORE
        STEP(found_rev = rev[m]; found_lim = lim[m]);
        STEP(if :: found_rev < wanted -> write(m, wanted, me) :: else fi);
#else
        STEP(found_rev = rev[m]; found_lim = lim[m]; if :: found_rev < wanted -> write(m, wanted, me) :: else fi);
#endif
        atomic {
            if
            :: found_rev < wanted                               /* raised */
#ifdef REVISION
            :: found_rev == wanted                              /* taken for its own */
#else
            :: found_rev == wanted && found_lim != me -> newest = found_rev; goto again
            :: found_rev == wanted && found_lim == me
#endif
            :: found_rev > wanted && step == 0 -> newest = found_rev; goto again
            :: found_rev > wanted && step > 0 -> everywhere = 0 /* overtaken */
            fi;
            step++
        }
    :: else -> break
    od;
    assert(!everywhere || written[KEY(wanted, me)] == ALL);     /* accepted */
#ifdef EARLYBELL
    finished++;
#else
    STEP(bell = (bell + 1) % 8; finished++);
#endif
ended:
    skip
}

proctype engine() {
    byte seen_bell, word_rev, word_lim, m, j;
    bit equal, hot;
#ifdef SEEN
    byte last_rev, last_lim;
#endif

    do
    :: atomic { seen_bell = bell };
        /* the hot look: the last member's word */
        atomic {
#ifdef SEEN
            hot = rev[MEMBERS - 1] != last_rev || lim[MEMBERS - 1] != last_lim;
            last_rev = rev[MEMBERS - 1];
            last_lim = lim[MEMBERS - 1]
#else
            hot = rev[MEMBERS - 1] != settled_rev || lim[MEMBERS - 1] != settled_lim
#endif
        };
        if
        :: hot ->
            /* the last member first, then the others in order */
            atomic { word_rev = rev[MEMBERS - 1]; word_lim = lim[MEMBERS - 1]; equal = 1; m = 0 };
            do
            :: m < MEMBERS - 1 && equal ->
                atomic {
                    if
#ifdef REVISION
                    :: rev[m] != word_rev -> equal = 0
#else
                    :: rev[m] != word_rev || lim[m] != word_lim -> equal = 0
#endif
                    :: else
                    fi;
                    m++
                }
            :: else -> break
            od;
            if
            :: equal && word_rev > settled_rev ->
                if
                :: atomic {
                    assert(stood[KEY(word_rev, word_lim)]);     /* I1 */
                    assert(word_rev > settled_rev);             /* I2 */
                    settled_rev = word_rev;
                    settled_lim = word_lim
                   }
                :: !dropped -> dropped = 1                      /* the step ends before it applied anything */
                fi
            :: else ->
                goto sleep
            fi
        :: else ->
sleep:
            /* asleep until the bell's count differs from what was seen before looking; all over, it may sleep for ever */
end_asleep:
            atomic { bell != seen_bell -> skip }
        fi
    od
}

inline settle() {
    timeout;                                                    /* nothing else can move: the engine is asleep */
    m = 1;
    do
    :: m < MEMBERS ->
        assert(rev[m] == rev[0] && lim[m] == lim[0]);           /* I4 */
        m++
    :: else -> break
    od;
    assert(settled_rev == rev[0] && settled_lim == lim[0])      /* I4 */
}

init {
    byte m;
    atomic {
        written[KEY(0, 0)] = ALL;
        stood[KEY(0, 0)] = 1;
        run engine();
        m = 1;
        do
        :: m <= PUBLISHERS -> run publisher(m); m++
        :: else -> break
        od;
        m = 0
    };
    finished == PUBLISHERS;
    if
    :: dead > 0 -> run publisher(HEALER); finished == PUBLISHERS + 1
    :: else
    fi;
    settle()
}
