/* SPDX-License-Identifier: Apache-2.0
 *
 * test_bounds.c - the two desired words of a slot, limit and cap: neither ever depends on the other or changes with it.
 */
#include "check.h"

#include <string.h>

#define BEGUN_LIMIT word_of(4, 40)
#define BEGUN_CAP word_of(9, 90)

struct scene {
    kvl_ledger *owner;
    kvl_ledger *publisher;
    uint32_t slot;
};

static struct scene make_scene(const char *name)
{
    make(name);
    struct scene scene = {.owner = open_ledger(name, 1), .publisher = open_ledger(name, 1)};
    struct kvl_identity identity = identity_of("x");
    int slot = kvl_register(scene.owner, &identity, 1, WORDS(BEGUN_LIMIT, BEGUN_CAP), NULL);
    CHECK(slot >= 0);
    scene.slot = (uint32_t)slot;
    return scene;
}

static int raise_to(const struct scene *scene, uint32_t bound, uint64_t word, uint32_t floor)
{
    uint64_t found;
    return kvl_raise(scene->publisher, scene->slot, 1, bound, word, floor, NULL, &found);
}

static void check_words(const struct scene *scene, uint64_t limit, uint64_t cap)
{
    const uint64_t expected[KVL_BOUNDS] = {limit, cap};
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(scene->publisher, scene->slot, &slot), KVL_ALIVE);
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        uint64_t word = 0;
        CHECK_EQUAL(kvl_desired(scene->owner, scene->slot, 1, bound, &word), 0);
        CHECK(word == expected[bound] && slot.desired[bound] == expected[bound]);
    }
}

TEST(raising_one_word_leaves_the_other, "Raising one word leaves the other, whichever of the two revisions is higher.")
{
    struct scene scene = make_scene("a");
    check_words(&scene, BEGUN_LIMIT, BEGUN_CAP);
    CHECK_EQUAL(raise_to(&scene, KVL_LIMIT, word_of(5, 50), 0), KVL_RAISED);
    check_words(&scene, word_of(5, 50), BEGUN_CAP);
    CHECK_EQUAL(raise_to(&scene, KVL_CAP, word_of(10, 100), 0), KVL_RAISED);
    check_words(&scene, word_of(5, 50), word_of(10, 100));
    CHECK_EQUAL(raise_to(&scene, KVL_LIMIT, word_of(UINT32_MAX, -1), 0), KVL_RAISED);
    CHECK_EQUAL(raise_to(&scene, KVL_CAP, word_of(11, 110), 0), KVL_RAISED);
    check_words(&scene, word_of(UINT32_MAX, -1), word_of(11, 110));
}

TEST(one_word_overtakes_no_other, "A publication is compared with revisions of its own bound, and so is its floor.")
{
    struct scene scene = make_scene("a");
    CHECK_EQUAL(raise_to(&scene, KVL_CAP, word_of(9, 1), 0), KVL_OVERTAKEN);
    CHECK_EQUAL(raise_to(&scene, KVL_LIMIT, word_of(6, 60), 9), KVL_E_SET_BACK);
    CHECK_EQUAL(raise_to(&scene, KVL_LIMIT, word_of(6, 60), 4), KVL_RAISED);
    CHECK_EQUAL(raise_to(&scene, KVL_CAP, word_of(10, 1), 9), KVL_RAISED);
    check_words(&scene, word_of(6, 60), word_of(10, 1));
}

TEST(agreement_is_of_one_word, "Members agree on one word while the other one is split.")
{
    struct scene first = make_scene("a");
    struct scene second = make_scene("b");
    const kvl_ledger *owners[] = {first.owner, second.owner};
    uint64_t word;
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        uint32_t other = KVL_BOUNDS - 1 - bound;
        uint64_t before;
        CHECK_EQUAL(kvl_agree(owners, 2, other, &before), 1);
        CHECK_EQUAL(raise_to(&first, bound, word_of(20, 7), 0), KVL_RAISED);
        CHECK_EQUAL(kvl_agree(owners, 2, bound, &word), 0);
        CHECK_EQUAL(kvl_agree(owners, 2, other, &word), 1);
        CHECK(word == before);
        CHECK_EQUAL(raise_to(&second, bound, word_of(20, 7), 0), KVL_RAISED);
        CHECK_EQUAL(kvl_agree(owners, 2, bound, &word), 1);
        CHECK(word == word_of(20, 7));
    }
}

TEST(either_set_back_word_is_noticed, "An owner is told when either of its words went back below what was read there.")
{
    struct scene scene = make_scene("a");
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(4, 9)), 0);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(5, 9)), KVL_E_SET_BACK);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(4, 10)), KVL_E_SET_BACK);
    struct bytes before = bytes_of("a");
    CHECK_EQUAL(raise_to(&scene, KVL_CAP, word_of(10, 100), 0), KVL_RAISED);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(4, 10)), 0);
    put_bytes("a", &before);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(4, 10)), KVL_E_SET_BACK);
}

TEST(no_third_word, "A bound that does not exist is refused, and touches nothing.")
{
    struct scene scene = make_scene("a");
    const kvl_ledger *owner = scene.owner;
    struct bytes before = bytes_of("a");
    uint64_t word;
    CHECK_EQUAL(raise_to(&scene, KVL_BOUNDS, word_of(99, 9), 0), -EINVAL);
    CHECK_EQUAL(raise_to(&scene, UINT32_MAX, word_of(99, 9), 0), -EINVAL);
    CHECK_EQUAL(kvl_desired(scene.owner, scene.slot, 1, KVL_BOUNDS, &word), -EINVAL);
    CHECK_EQUAL(kvl_agree(&owner, 1, KVL_BOUNDS, &word), 0);
    struct bytes after = bytes_of("a");
    CHECK_EQUAL(memcmp(&before, &after, sizeof before), 0);
}

TEST(records_say_which_word, "A record says which of the two words was raised, whatever its writer put there.")
{
    struct scene scene = make_scene("a");
    struct kvl_audit record = {.bound = 7, .program = "p"};
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t found;
    uint64_t written;
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_CAP, word_of(10, 5), 0, &record, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, word_of(5, 5), 0, &record, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_audit_read(scene.publisher, records, &written), 2);
    CHECK(records[0].bound == KVL_LIMIT && records[0].before == BEGUN_LIMIT && records[0].after == word_of(5, 5));
    CHECK(records[1].bound == KVL_CAP && records[1].before == BEGUN_CAP && records[1].after == word_of(10, 5));
}

TEST(a_first_report, "A slot that is registered with a report is never seen without it, and its time is that of the slot.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("x");
    struct kvl_report report = {.idle = 7, .pool_bytes = 8, .reported_ns = 1, .returns = "yes"};
    report.answers[KVL_CAP] = (struct kvl_answer){.applied = BEGUN_CAP, .settled_revision = 9, .outcome = 2};
    CHECK_EQUAL(kvl_register(owner, &identity, 1, WORDS(BEGUN_LIMIT, BEGUN_CAP), &report), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(open_ledger("a", 0), 0, &slot), KVL_ALIVE);
    CHECK(slot.report.reported_ns == slot.registered_ns && slot.registered_ns > 1);
    report.reported_ns = slot.report.reported_ns;
    CHECK_EQUAL(memcmp(&slot.report, &report, sizeof report), 0);
}

TEST(a_silent_slot, "A slot without a report shows the startup limit and the startup cap, and not the words it begins with.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("x");
    identity.startup_limit = -1;
    identity.startup_cap = 5000;
    CHECK_EQUAL(kvl_register(owner, &identity, 1, WORDS(BEGUN_LIMIT, BEGUN_CAP), NULL), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(open_ledger("a", 0), 0, &slot), KVL_ALIVE);
    CHECK(slot.report.answers[KVL_LIMIT].applied == word_of(0, -1));
    CHECK(slot.report.answers[KVL_CAP].applied == word_of(0, 5000));
    CHECK_EQUAL(slot.report.reported_ns, 0);
}

struct raiser {
    const struct scene *scene;
    uint32_t bound;
    uint32_t rounds;
};

static void raise_again_and_again(void *argument)
{
    const struct raiser *raiser = argument;
    kvl_ledger *publisher = open_ledger("a", 1);
    for (uint32_t round = 1; round <= raiser->rounds; round++) {
        uint64_t found;
        uint64_t word = word_of(100 + round, (int32_t)raiser->bound);
        CHECK_EQUAL(kvl_raise(publisher, raiser->scene->slot, 1, raiser->bound, word, 99, NULL, &found),
                    round == 1 ? KVL_E_SET_BACK : KVL_RAISED);
        if (round == 1) {
            CHECK_EQUAL(kvl_raise(publisher, raiser->scene->slot, 1, raiser->bound, word, 0, NULL, &found), KVL_RAISED);
        }
        CHECK(round == 1 || found == word - (UINT64_C(1) << 32));
    }
}

TEST(two_words_at_once, "Two publishers that raise one word each at the same moments never meet each other's pairs.")
{
    struct scene scene = make_scene("a");
    struct raiser raisers[KVL_BOUNDS];
    pid_t children[KVL_BOUNDS];
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        raisers[bound] = (struct raiser){&scene, bound, 500};
        children[bound] = start(raise_again_and_again, &raisers[bound]);
    }
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        join(children[bound]);
    }
    check_words(&scene, word_of(600, KVL_LIMIT), word_of(600, KVL_CAP));
}
