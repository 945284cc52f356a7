/* SPDX-License-Identifier: Apache-2.0
 *
 * two_words.pml - the limit and the cap in one slot, as a model for the checker spin (scripts/proofs/model).
 *
 * protocol.pml checks the protocol of one word. This one checks that two of them in a slot stay two: LIMITS publishers of
 * limits and CAPS publishers of caps raise the words of two members, each may be killed after any of its steps; the
 * watcher reads both words, each for itself, and leaves what is new for the scheduler, which polls one update at a time,
 * applies it to what it bounds, and acknowledges both.
 *
 * Modelled is what publication.py, slot.c, settlement.py and bound_settlement.py do; each swap, look, poll and
 * acknowledgement is one atomic step.
 *
 * Checked in every reachable state:
 *   MIX      a word holds, and an engine applies, only what was published of its own bound
 *   I2       words and applied revisions of a bound only grow
 *   COUNT    a bound has no more revisions than publications
 *   TURNS    an update that is pending is passed over for one of the other bound once at most
 *   I4       when nothing moves any more, the members agree and the pair that they carry is applied, of both bounds,
 *            unless a publisher died
 *
 * Each mistake is a macro, and has to be found:
 *   WRONGWORD    the publisher of a cap raises the limit's word
 *   SHARED       the next revision is the one after the highest of both words
 *   FORGETS      an update does not say what it bounds: it is applied as a limit
 *   ONESETTLED   one settled revision stands for both bounds
 *   LIMITFIRST   the limit is handed out first, whenever there is one
 *   OTHERCLEARED an acknowledgement of one bound takes the pending update of the other away
 */
#ifndef LIMITS
#define LIMITS 2
#endif
#ifndef CAPS
#define CAPS 2
#endif
#define LIMIT 0
#define CAP 1
#define TOTAL (LIMITS + CAPS)
#define WIDTH 2
#define AT(b, m) ((b) * WIDTH + (m))
#define BOUND_OF(number) ((number) > LIMITS -> CAP : LIMIT)
#define NONE 2                  /* no bound: nothing is handed out */

byte rev[2 * WIDTH];
byte num[2 * WIDTH];          /* who wrote it: its number says what it was published of; 0 at first */
byte begun[2];                  /* publications of each bound */
byte finished;
bit died;
bit rung;

/* The settlement, which the watcher and the scheduler share under a lock. */
byte taken_rev[2], taken_num[2];
bit pending[2];
byte settled_rev[2];
byte handed = NONE;             /* the bound of the update that poll returns */

/* The engine. */
byte applied_rev[2], applied_num[2];
byte passed[2];                 /* how often the other bound was applied while this one was pending, for TURNS alone */

/* Two pending updates: the one that was handed out before, but after an acknowledgement the other one. */
inline hand_out(after) {
    if
#ifdef LIMITFIRST
    :: pending[LIMIT] -> handed = LIMIT
    :: !pending[LIMIT] && pending[CAP] -> handed = CAP
#else
    :: pending[LIMIT] && pending[CAP] ->
        if
        :: after != NONE -> handed = 1 - after
        :: after == NONE && handed == NONE -> handed = LIMIT
        :: else
        fi
    :: pending[LIMIT] && !pending[CAP] -> handed = LIMIT
    :: !pending[LIMIT] && pending[CAP] -> handed = CAP
#endif
    :: !pending[LIMIT] && !pending[CAP] -> handed = NONE
    fi
}

#define STEP(what) atomic { if :: died = 1; finished++; goto ended :: true fi; what }

proctype publisher(byte me) {
    byte b, word, newest, wanted, m, found;
    bit lost;

    atomic {
        b = BOUND_OF(me);
        word = b;
#ifdef WRONGWORD
        word = LIMIT;
#endif
        begun[b]++;
        newest = rev[AT(b, 0)];
#ifdef SHARED
        newest = (rev[AT(1 - b, 0)] > newest -> rev[AT(1 - b, 0)] : newest)
#endif
    };
again:
    atomic { wanted = newest + 1; m = 0; lost = 0 };
    do
    :: m < WIDTH && !lost ->
        STEP(
            found = rev[AT(word, m)];
            if
            :: found < wanted ->
                assert(BOUND_OF(me) == word);                   /* MIX */
                rev[AT(word, m)] = wanted;
                num[AT(word, m)] = me
            :: found == wanted && num[AT(word, m)] != me || found > wanted && m == 0 -> newest = found; lost = 1
            :: else
            fi;
            m++
        )
    :: else -> break
    od;
    if
    :: lost -> goto again
    :: else
    fi;
    STEP(assert(wanted <= begun[b]); rung = 1);                 /* COUNT */
    finished++;
ended:
    atomic { b = 0; word = 0; newest = 0; wanted = 0; m = 0; found = 0; lost = 0 }
}

/* One bound of a look: the last member first. */
inline look(b) {
    if
    :: rev[AT(b, 1)] == rev[AT(b, 0)] && num[AT(b, 1)] == num[AT(b, 0)] && rev[AT(b, 1)] > taken_rev[b] ->
        taken_rev[b] = rev[AT(b, 1)];
        taken_num[b] = num[AT(b, 1)];
        pending[b] = 1
    :: else
    fi
}

proctype watcher() {
end_asleep:
    do
    :: atomic {
        rung ->
        rung = 0;
        look(LIMIT);
        look(CAP);
        hand_out(NONE)
    }
    od
}

inline settle(b) {
    if
    :: pending[b] && taken_rev[b] <= settled_rev[b] -> pending[b] = 0
    :: else
    fi
}

proctype scheduler() {
    byte update_rev, update_num, update_bound, to;

end_idle:
    do
    :: atomic {                                                 /* poll: what is on its way stays what it was */
        handed != NONE ->
        update_bound = handed;
        update_rev = taken_rev[update_bound];
        update_num = taken_num[update_bound]
    };
    atomic {                                                    /* apply, on all ranks at one step */
        to = update_bound;
#ifdef FORGETS
        to = LIMIT;
#endif
        assert(BOUND_OF(update_num) == to);                     /* MIX */
#ifdef ONESETTLED
        if
        :: update_rev > settled_rev[LIMIT] ->
#else
        assert(update_rev > applied_rev[to]);                   /* I2 */
        if
        :: true ->
#endif
            applied_rev[to] = update_rev;
            applied_num[to] = update_num
#ifdef ONESETTLED
        :: else
#endif
        fi;
        passed[to] = 0;
        passed[1 - to] = (pending[1 - to] -> passed[1 - to] + 1 : 0);
        assert(passed[1 - to] <= 1)                             /* TURNS */
    };
    atomic {                                                    /* acknowledge */
#ifdef ONESETTLED
        settled_rev[LIMIT] = (update_rev > settled_rev[LIMIT] -> update_rev : settled_rev[LIMIT]);
        settled_rev[CAP] = settled_rev[LIMIT];
#else
        settled_rev[to] = update_rev;
#endif
        settle(LIMIT);
        settle(CAP);
#ifdef OTHERCLEARED
        pending[1 - to] = 0;
#endif
        hand_out(to);
        update_rev = 0; update_num = 0; update_bound = 0; to = 0
    }
    od
}

inline at_rest(b) {
    assert(died || rev[AT(b, 0)] == rev[AT(b, 1)] && num[AT(b, 0)] == num[AT(b, 1)]);                   /* I4 */
    assert(died || applied_rev[b] == rev[AT(b, 0)] && applied_num[b] == num[AT(b, 0)])                  /* I4 */
}

init {
    byte m;
    atomic {
        run watcher();
        run scheduler();
        m = 1;
        do
        :: m <= TOTAL -> run publisher(m); m++
        :: else -> break
        od;
        m = 0
    };
    finished == TOTAL;
    timeout;
    at_rest(LIMIT);
    at_rest(CAP)
}
