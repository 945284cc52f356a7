/* SPDX-License-Identifier: Apache-2.0
 *
 * protocol.pml - publishing, taking, applying, dying, losing a file and registering again, as a model for the checker
 * spin (scripts/proofs/model).
 *
 * PUBLISHERS publishers at once, each with a limit of its own (its number), raise the words of MEMBERS members, ring and
 * confirm; the last CONDITIONAL of them publish with if_revision. Each may be killed after any of its steps, unless
 * DEATHLESS. An engine looks, takes, applies and sleeps on the doorbell; once it may put off applying. When all have
 * ended and somebody died, one more publisher repairs.
 *
 * With LOSS, at any time one member
 *   REMOVED   has its file removed or replaced: who has it open goes on, who opens now does not find it; or
 *   SPOILED   has its content cut or overwritten: nobody finds the slot there, and the word is gone;
 * with LOSS and SETBACK, one member
 *   SET_BACK  gets an old copy of its content: the word is lower than what is settled.
 * Once the engine notices, it gives up its slots, looks at the words for the last time, and registers again: with the pair
 * of all members that are not lost if that is new; else, if a revision is above the last pair taken, with the
 * revision after it and the limit of the last pair taken; else with the last pair taken.
 *
 * Modelled is what publication.py, slot.c and subscription.py do; each load, lock, swap, ring and wait is one atomic step.
 *
 * Checked in every reachable state:
 *   I1          what is applied was stored in all members at one time, or in all that were not lost when the engine looked for
 *               the last time
 *   I2          applied revisions only grow, and so does every word that is not set back
 *   ONE         no revision has two limits, over both registrations. Not counted are words that nobody can know of (in a
 *               lost file alone, or swapped into a slot that was given up) and those in a file that was set back
 *   DECIDED     no revision is accepted or applied with two limits, without any exception
 *   accepted    what a publisher calls accepted was written into all members; when nothing moves any more, it or something
 *               newer is applied, and it itself if nobody began to publish anything newer
 *   IF          a conditional publication takes the very next revision or none
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
 *   RESTART     a conditional publication that lost its revision starts over above (with CONDITIONAL)
 * with LOSS:
 *   PRESSON     a publisher goes on after a member that is missing or failed
 *   UNCONFIRMED publishers do not confirm what they wrote
 *   LASTTAKEN   the new registration begins at the last pair taken, whatever revision is higher
 *   HIGHEST     it begins at the highest revision instead of the one after it
 *   LOOKFIRST   the last look comes before the slots are given up
 *   LOSTWORD    the word of a lost member counts in the last look
 *   ANYOWNER    a word counts whosever slot it is in
 * with LOSS and SETBACK:
 *   OWNEDONLY   publishers confirm that the slots are owned, but not that their words are still there
 *   NOFLOOR     a publisher raises a word that is lower than when it looked the member up
 *
 * Not checked, as nothing could be done: an old copy whose word is not below what is settled looks like a publisher that
 * died half-way.
 */
#ifndef PUBLISHERS
#define PUBLISHERS 3
#endif
#ifndef MEMBERS
#define MEMBERS 3
#endif
#ifndef CONDITIONAL
#define CONDITIONAL 0
#endif
#define HEALER (PUBLISHERS + 1)
#define START 1         /* the revision that is settled at first; an old copy holds a lower one */
#define NOBODYS (HEALER + 1)    /* a limit that nobody published */
#ifdef LOSS
#define REGISTRATIONS 2
#define MAXREV (START + PUBLISHERS + 2)
#else
#define REGISTRATIONS 1
#define MAXREV (START + PUBLISHERS + 1)
#endif
#define KEY(r, l) ((r) * (HEALER + 1) + (l))
#define PAIRS KEY(MAXREV + 1, 0)
#define ALL ((1 << MEMBERS) - 1)
#define AT(g, m) ((g) * MEMBERS + (m))
#define LAST (MEMBERS - 1)
#define IS_CONDITIONAL (me != HEALER && me > PUBLISHERS - CONDITIONAL)

#define REMOVED 1
#define SPOILED 2
#define SET_BACK 3
#define IS_LOST(g, m, how) (lost == (how) && lost_member == (m) && (g) == 0)

byte rev[REGISTRATIONS * MEMBERS];
byte lim[REGISTRATIONS * MEMBERS];
bit alive[REGISTRATIONS * MEMBERS];
bit rung;                       /* the newest registration's doorbell, since the engine saw it last */
byte registration;              /* the engine's newest whole one */
byte lost, lost_member;
byte finished;                  /* publishers that ended, either way */
bit died;
bit repairing;
byte taken_rev, taken_lim;      /* the newest pair that the engine's watcher handed on */
byte settled_rev, settled_lim;
bit dropped;

/* For the properties alone: which members a pair was written to, whether it was ever in all at once, which limit a
 * revision was decided with (plus 1), and the highest publications. */
byte written[PAIRS];
bit stood[PAIRS];
byte decided[MAXREV + 2];
byte accepted_rev, accepted_lim, published_rev;
bit looked;                     /* the engine has looked for the last time */

#ifdef LOSS
/* What the owner's look once a second finds out. */
#define IS_NOTICED (registration == 0 && (lost == REMOVED || lost == SPOILED || \
                    lost == SET_BACK && rev[lost_member] < settled_rev))
#else
#define IS_NOTICED false
#endif

inline decide(r, l) {
    assert(decided[r] == 0 || decided[r] == (l) + 1);           /* DECIDED */
    decided[r] = (l) + 1
}

/* One store, and what it means for the properties. */
inline write(g, at, r, l) {
    assert(rev[AT(g, at)] < r);                                 /* I2: a word only rises */
    rev[AT(g, at)] = r;
    lim[AT(g, at)] = l;
    if
    :: alive[AT(g, at)] && !IS_LOST(g, at, SET_BACK) ->
        j = 0;
        do
        :: j <= HEALER ->
            assert(j == (l) || written[KEY(r, j)] == 0);        /* ONE */
            j++
        :: else -> break
        od;
        written[KEY(r, l)] = written[KEY(r, l)] | (1 << (at))
    :: else
    fi;
    if
    :: alive[AT(g, at)] ->
        j = 0;
        equal = 1;
        do
        :: j < MEMBERS ->
            equal = equal && rev[AT(g, j)] == r && lim[AT(g, j)] == l;
            j++
        :: else -> break
        od;
        stood[KEY(r, l)] = stood[KEY(r, l)] || equal
    :: else
    fi;
    j = 0;
    equal = 0
}

/* One step of a publisher, or its death in place of it. */
#ifdef DEATHLESS
#define STEP(what) atomic { what }
#else
#define STEP(what) atomic { if :: me != HEALER -> died = 1; finished++; goto ended :: true fi; what }
#endif

#ifdef LOSS
#define CAN_FIND(g, m) (alive[AT(g, m)] && !IS_LOST(g, m, REMOVED) && !IS_LOST(g, m, SPOILED))
#define IS_OWNED(g, m) (alive[AT(g, m)] && !IS_LOST(g, m, SPOILED))
#else
#define IS_OWNED(g, m) true
#endif

proctype publisher(byte me) {
    byte newest, told, wanted, found_rev, found_lim, step, m, j, g, present, raised;
    bit equal, everywhere;
#ifdef SETBACK
    byte floor[MEMBERS];
#endif

    /* The highest revision of all members. */
#ifdef LOSS
    do
    :: m < MEMBERS ->
        atomic {
            if
            :: CAN_FIND(0, m) && (present == 0 || g == 0) -> g = 0; present = present | (1 << m)
            :: CAN_FIND(1, m) && (present == 0 || g == 1) -> g = 1; present = present | (1 << m)
            :: CAN_FIND(0, m) && present != 0 && g == 1 || CAN_FIND(1, m) && present != 0 && g == 0 ->
                goto unwritten                                  /* two engines, it seems */
            :: !CAN_FIND(0, m) && !CAN_FIND(1, m)
            fi;
            if
            :: present & (1 << m) && rev[AT(g, m)] > newest -> newest = rev[AT(g, m)]
            :: else
            fi;
#ifdef SETBACK
            floor[m] = rev[AT(g, m)];
#endif
            m++
        }
    :: else -> break
    od;
    atomic {
#ifdef PRESSON
        if :: present == 0 -> goto unwritten :: else fi;
#else
        if :: present != ALL -> goto unwritten :: else fi;      /* the engine is registering again */
#endif
        told = (IS_CONDITIONAL -> newest : 0);
        m = 0
    };
#else
    /* Everybody writes the first one first: it is there at every moment. */
    atomic { newest = rev[0]; told = (IS_CONDITIONAL -> newest : 0) };
#endif
again:
    atomic {
        wanted = newest + 1;
        assert(wanted <= MAXREV);                               /* no livelock */
        step = 0;
        raised = 0;
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
        :: step == LAST -> STEP(rung = rung || g == registration)
        :: else
        fi;
#endif
#ifdef LOSS
        STEP(
            if
            :: (present & (1 << m)) && IS_OWNED(g, m)
            :: else ->
                everywhere = 0;
#ifdef PRESSON
                step++;
                goto next
#else
                goto written_all
#endif
            fi
        );
#endif
#ifdef STORE
        STEP(found_rev = rev[AT(g, m)]; found_lim = lim[AT(g, m)]);
        STEP(if :: found_rev < wanted -> write(g, m, wanted, me) :: else fi);
#else
        STEP(
#ifdef LOSS
            if
            :: IS_LOST(g, m, SPOILED) -> everywhere = 0; goto written_all
            :: else
            fi;
#endif
            found_rev = rev[AT(g, m)];
            found_lim = lim[AT(g, m)];
#if defined(SETBACK) && !defined(NOFLOOR)
            if
            :: found_rev < floor[m] -> everywhere = 0; died = 1; goto written_all
            :: else
            fi;
#endif
            if
            :: found_rev < wanted ->
                write(g, m, wanted, me);
                published_rev = (!(looked && g == 0) && published_rev < wanted -> wanted : published_rev)
            :: else
            fi
        );
#endif
        atomic {
            if
            :: found_rev < wanted -> raised = raised | (1 << m)
#ifdef REVISION
            :: found_rev == wanted                              /* taken for its own */
#else
            :: found_rev == wanted && found_lim != me -> newest = found_rev; goto lost_race
            :: found_rev == wanted && found_lim == me
#endif
            :: found_rev > wanted && step == 0 -> newest = found_rev; goto lost_race
            :: found_rev > wanted && step > 0 -> everywhere = 0 /* overtaken */
            fi;
            step++;
            found_rev = 0;
            found_lim = 0
        };
next:
        skip
    :: else -> break
    od;
written_all:
    assert(!everywhere || lost || written[KEY(wanted, me)] == ALL);     /* accepted */
#ifndef EARLYBELL
    if
    :: raised & (1 << LAST) -> STEP(rung = rung || g == registration)
    :: else
    fi;
#endif
    atomic { m = 0; step = 0; newest = 0 };
#if defined(LOSS) && !defined(UNCONFIRMED)
    do
    :: m < MEMBERS && everywhere -> STEP(
#ifdef OWNEDONLY
        everywhere = IS_OWNED(g, m);
#else
        everywhere = IS_OWNED(g, m) && (rev[AT(g, m)] > wanted || rev[AT(g, m)] == wanted && lim[AT(g, m)] == me);
#endif
        m++
      )
    :: else -> break
    od;
#endif
    atomic {
        if
        :: everywhere ->
            decide(wanted, me);
            assert(!IS_CONDITIONAL || wanted == told + 1); /* IF */
            if
            :: wanted > accepted_rev -> accepted_rev = wanted; accepted_lim = me
            :: else
            fi
        :: else
        fi;
        goto unwritten
    };
lost_race:
    atomic {
#ifdef RESTART
        goto again
#else
        if
        :: IS_CONDITIONAL -> goto unwritten
        :: else -> goto again
        fi
#endif
    };
unwritten:
    atomic {
        finished++;
ended:
        newest = 0; told = 0; wanted = 0; found_rev = 0; found_lim = 0; step = 0; m = 0; g = 0; present = 0;
        raised = 0; everywhere = 0
    }
}

#ifdef ANYOWNER
#define IS_MINE(g, m) true
#else
#define IS_MINE(g, m) (!IS_LOST(g, m, SPOILED))
#endif

inline apply() {
    assert(stood[KEY(taken_rev, taken_lim)]);                   /* I1 */
    assert(taken_rev > settled_rev);                            /* I2 */
    decide(taken_rev, taken_lim);
    settled_rev = taken_rev;
    settled_lim = taken_lim
}

inline look_for_the_last_time() {
    m = 0;
    do
    :: m < MEMBERS ->
        atomic {
            if
#ifdef LOSTWORD
            :: true ->
#else
            :: IS_MINE(0, m) && rev[m] >= settled_rev ->
#endif
                equal = equal && (word_rev == 0 || rev[m] == word_rev && lim[m] == word_lim);
                if
                :: rev[m] > word_rev -> word_rev = rev[m]; word_lim = lim[m]
                :: else
                fi
            :: else
            fi;
            m++
        }
    :: else -> break
    od
}

inline give_up_slots() {
    m = 0;
    do
    :: m < MEMBERS -> atomic { alive[m] = 0; m++ }
    :: else -> break
    od
}

inline register_anew() {
    atomic { equal = 1; word_rev = 0; word_lim = 0 };
#ifdef LOOKFIRST
    look_for_the_last_time();
    give_up_slots();
#else
    give_up_slots();
    look_for_the_last_time();
#endif
    atomic {
        looked = 1;
        assert(word_lim <= HEALER);                             /* I1 */
        if
        :: word_rev > taken_rev && equal ->
            taken_rev = word_rev;
            taken_lim = word_lim;
            stood[KEY(word_rev, word_lim)] = 1
#ifdef LASTTAKEN
        :: word_rev > taken_rev && !equal -> word_rev = taken_rev; word_lim = taken_lim
#elif defined(HIGHEST)
        :: word_rev > taken_rev && !equal -> word_lim = taken_lim
#else
        :: word_rev > taken_rev && !equal -> word_rev = word_rev + 1; word_lim = taken_lim
#endif
        :: else -> word_rev = taken_rev; word_lim = taken_lim
        fi;
        m = 0
    };
    do
    :: m < MEMBERS -> atomic { alive[AT(1, m)] = 1; write(1, m, word_rev, word_lim); m++ }
    :: else -> break
    od;
    atomic { registration = 1; rung = 0; m = 0 }
}

proctype engine() {
    byte word_rev, word_lim, m, j;
    bit equal;
#ifdef SEEN
    byte last_rev, last_lim;
#endif

    do
    ::
#ifdef LOSS
        if
        :: IS_NOTICED -> register_anew()
        :: atomic { !IS_NOTICED -> rung = 0 }
        fi;
#else
        rung = 0;
#endif
        /* the last member first, then the others in order */
        atomic {
            word_rev = rev[AT(registration, LAST)];
            word_lim = lim[AT(registration, LAST)];
            m = 0;
#ifdef SEEN
            equal = word_rev != last_rev || word_lim != last_lim;
            last_rev = word_rev;
            last_lim = word_lim
#else
            equal = word_rev > settled_rev && IS_MINE(registration, LAST)
#endif
        };
        do
        :: m < LAST && equal ->
            atomic {
                if
#ifdef REVISION
                :: rev[AT(registration, m)] != word_rev -> equal = 0
#else
                :: rev[AT(registration, m)] != word_rev || lim[AT(registration, m)] != word_lim -> equal = 0
#endif
                :: !IS_MINE(registration, m) -> equal = 0
                :: else
                fi;
                m++
            }
        :: else -> break
        od;
        if
        :: equal && word_rev > settled_rev ->
            atomic {
                taken_rev = word_rev;
                taken_lim = word_lim;
                assert(taken_lim <= HEALER);                    /* I1 */
                if
                :: apply()
                :: !dropped -> dropped = 1                      /* the scheduler comes to it later */
                fi
            }
        :: !(equal && word_rev > settled_rev) ->
            if
#ifndef SEEN
            :: taken_rev > settled_rev -> atomic { apply() }
#endif
            :: else ->
                atomic { m = 0; word_rev = 0; word_lim = 0; equal = 0 };
                /* asleep until the bell's count differs from what was seen before looking; all over, it may sleep for
                 * ever */
end_asleep:
                atomic { rung || IS_NOTICED -> skip }
            fi
        fi
    od
}

#ifdef LOSS
proctype loss() {
    byte j;

    atomic {
        if
        :: repairing -> goto ended
#ifdef SETBACK
        :: !repairing -> lost = SET_BACK
#else
        :: !repairing -> lost = REMOVED
        :: !repairing -> lost = SPOILED
#endif
        fi;
        do
        :: lost_member < LAST -> lost_member++
        :: true -> break
        od;
        if
        :: lost == REMOVED
        :: lost == SPOILED -> rev[lost_member] = MAXREV; lim[lost_member] = NOBODYS
        :: lost == SET_BACK -> rev[lost_member] = START - 1; lim[lost_member] = 0
        fi;
        if
        :: lost != REMOVED ->
            do
            :: j < PAIRS ->
                if
                :: written[j] == 1 << lost_member -> written[j] = 0
                :: else
                fi;
                j++
            :: else -> break
            od
        :: else
        fi;
ended:
        j = 0
    }
}
#endif

inline settle() {
    timeout;                                                    /* nothing else can move: the engine is asleep */
    m = 1;
    do
    :: m < MEMBERS ->
        assert(rev[AT(registration, m)] == rev[AT(registration, 0)]);           /* I4 */
        assert(lim[AT(registration, m)] == lim[AT(registration, 0)]);           /* I4 */
        m++
    :: else -> break
    od;
    assert(settled_rev == rev[AT(registration, 0)] && settled_lim == lim[AT(registration, 0)]); /* I4 */
    assert(settled_rev >= accepted_rev);                        /* accepted */
    assert(published_rev > accepted_rev || accepted_rev == 0 || settled_lim == accepted_lim)    /* accepted */
}

init {
    byte m;
    atomic {
        settled_rev = START;
        taken_rev = START;
        written[KEY(START, 0)] = ALL;
        stood[KEY(START, 0)] = 1;
        do
        :: m < MEMBERS -> rev[m] = START; alive[m] = 1; m++
        :: else -> break
        od;
        run engine();
#ifdef LOSS
        run loss();
#endif
        m = 1;
        do
        :: m <= PUBLISHERS -> run publisher(m); m++
        :: else -> break
        od;
        m = 0
    };
    atomic { finished == PUBLISHERS -> repairing = 1 };
    if
    :: died ->
        atomic { !IS_NOTICED && alive[AT(registration, 0)] -> run publisher(HEALER) };
        finished == PUBLISHERS + 1
    :: else
    fi;
    settle()
}
