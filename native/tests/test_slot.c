/* SPDX-License-Identifier: Apache-2.0
 *
 * test_slot.c - who owns a slot, what it is told and what it answers; in one process, without haste.
 */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int alive_in(const kvl_ledger *observer)
{
    struct kvl_slot slot;
    int alive = 0;
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        alive += kvl_read_slot(observer, i, &slot) == KVL_ALIVE;
    }
    return alive;
}

TEST(registration_is_seen_whole, "Another handle reads exactly what was registered, and an empty report.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "instance", 99, word_of(7, -1));
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK_EQUAL(slot.incarnation, 99);
    CHECK(slot.desired[KVL_LIMIT] == word_of(7, -1));
    CHECK(strcmp(slot.identity.instance, "instance") == 0);
    CHECK(slot.registered_ns > 0 && slot.report.reported_ns == 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 99), 1);
    CHECK_EQUAL(kvl_is_owned(observer, index, 98), 0);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(7, 0)), 0);
}

TEST(nothing_is_applied_before_it_is_said, "A slot that begins with a published pair does not show it as applied.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, word_of(7, 5));
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK(slot.report.answers[KVL_LIMIT].applied == word_of(0, 16000));
    CHECK_EQUAL(slot.report.answers[KVL_LIMIT].settled_revision, 0);
}

TEST(every_end_makes_dead, "Unregistering and closing each make a slot dead at once; closing frees it.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 1);
    kvl_ledger *owner = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    CHECK_EQUAL(kvl_unregister(owner), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
    CHECK_EQUAL(kvl_unregister(owner), -EBADF);
    kvl_close(owner);
    owner = open_ledger("a", 1);
    CHECK_EQUAL(register_as(owner, "x", 2, 0), index);
    CHECK_EQUAL(alive_in(observer), 1);
    kvl_close(owner);
    CHECK_EQUAL(alive_in(observer), 0);
    kvl_close(NULL);
}

TEST(an_unregistered_slot_is_kept, "A slot that was given up stays its owner's for a last look until the handle is closed.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *other = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    uint64_t found;
    uint64_t word = 0;
    CHECK_EQUAL(kvl_raise(other, index, 1, KVL_LIMIT, word_of(1, 10), 0, NULL, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_unregister(owner), 0);
    CHECK(register_as(other, "y", 2, 0) != index);
    CHECK_EQUAL(kvl_raise(other, index, 1, KVL_LIMIT, word_of(2, 20), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_desired(owner, index, 1, KVL_LIMIT, &word), 0);
    CHECK(word == word_of(1, 10));
    const kvl_ledger *one = owner;
    CHECK_EQUAL(kvl_agree(&one, 1, KVL_LIMIT, &word), 1);
    CHECK(word == word_of(1, 10));
    kvl_close(owner);
    CHECK_EQUAL(register_as(open_ledger("a", 1), "z", 3, 0), index);
}

TEST(table_full, "The sixty-fifth registration is told that the table is full; one that ends makes room.")
{
    make("a");
    kvl_ledger *owners[KVL_SLOTS];
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        owners[i] = open_ledger("a", 1);
        CHECK_EQUAL(register_as(owners[i], "x", i + 1, 0), i);
    }
    kvl_ledger *late = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("late");
    CHECK_EQUAL(kvl_register(late, &identity, 1000, WORDS(0, 0), NULL), -EUSERS);
    CHECK_EQUAL(alive_in(late), KVL_SLOTS);
    kvl_close(owners[40]);
    CHECK_EQUAL(kvl_register(late, &identity, 1000, WORDS(0, 0), NULL), 40);
}

TEST(one_registration_per_handle, "A second registration through one handle is refused, before and after the first ends.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    struct kvl_identity identity = identity_of("y");
    (void)register_as(owner, "x", 1, 0);
    CHECK_EQUAL(kvl_register(owner, &identity, 2, WORDS(0, 0), NULL), -EBUSY);
    CHECK_EQUAL(alive_in(observer), 1);
    CHECK_EQUAL(kvl_unregister(owner), 0);
    CHECK_EQUAL(kvl_register(owner, &identity, 2, WORDS(0, 0), NULL), -EBUSY);
    CHECK_EQUAL(alive_in(observer), 0);
}

TEST(one_incarnation_once, "An incarnation that is alive in a file cannot be registered there once more.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *twin = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("twin");
    (void)register_as(owner, "x", 1, 0);
    CHECK(kvl_register(twin, &identity, 1, WORDS(0, 0), NULL) < 0);
    CHECK_EQUAL(register_as(twin, "twin", 2, 0), 1);
    CHECK_EQUAL(alive_in(open_ledger("a", 0)), 2);
}

TEST(what_is_not_ones_own, "Handles without a slot, indices beyond the table and the incarnation 0 are refused untouched.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *other = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    struct kvl_report report = {.idle = 5};
    struct kvl_slot slot;
    uint64_t found;
    CHECK_EQUAL(kvl_unregister(other), -EBADF);
    CHECK_EQUAL(kvl_acknowledge(other, &report), -EBADF);
    CHECK_EQUAL(kvl_check(other, here, "a", REVISIONS(9, 0)), 0); /* of the file: there is no registration to compare */
    CHECK_EQUAL(kvl_read_slot(other, index, &slot), KVL_ALIVE);
    CHECK_EQUAL(slot.report.idle, 0);
    CHECK_EQUAL(kvl_read_slot(other, KVL_SLOTS, &slot), -EINVAL);
    CHECK_EQUAL(kvl_raise(other, KVL_SLOTS, 1, KVL_LIMIT, 1, 0, NULL, &found), -EINVAL);
    CHECK(kvl_is_owned(other, UINT32_MAX, 1) < 0);
    CHECK_EQUAL(kvl_desired(other, KVL_SLOTS, 1, KVL_LIMIT, &found), -EINVAL);
    CHECK_EQUAL(kvl_desired(other, index, 2, KVL_LIMIT, &found), KVL_E_DISPLACED);
    struct kvl_identity identity = identity_of("x");
    CHECK_EQUAL(kvl_register(other, &identity, 0, WORDS(0, 0), NULL), -EINVAL);
    CHECK_EQUAL(kvl_unregister(owner), 0);
    CHECK_EQUAL(kvl_acknowledge(owner, &report), -EBADF);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(9, 0)), 0);
    const kvl_ledger *none[] = {owner, other};
    CHECK_EQUAL(kvl_agree(none, 2, KVL_LIMIT, &found), 0);
}

TEST(a_dead_slot_is_not_copied, "The caller's copy is untouched when the slot is dead or the index does not exist.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 0);
    struct kvl_slot slot;
    struct kvl_slot before;
    memset(&slot, 0x5a, sizeof slot);
    memcpy(&before, &slot, sizeof slot);
    CHECK_EQUAL(kvl_read_slot(observer, 0, &slot), KVL_DEAD);
    kvl_ledger *owner = open_ledger("a", 1);
    (void)register_as(owner, "x", 1, 0);
    kvl_close(owner);
    CHECK_EQUAL(kvl_read_slot(observer, 0, &slot), KVL_DEAD);
    CHECK_EQUAL(kvl_read_slot(observer, KVL_SLOTS, &slot), -EINVAL);
    CHECK_EQUAL(memcmp(&before, &slot, sizeof slot), 0);
}

TEST(read_only_handles, "Nothing that would write through a read-only handle does so, or ends the process.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, word_of(0, 5));
    struct kvl_identity identity = identity_of("y");
    struct kvl_report report = {0};
    struct kvl_audit audit = {0};
    uint64_t found;
    struct bytes before = bytes_of("a");
    CHECK_EQUAL(kvl_register(observer, &identity, 2, WORDS(0, 0), NULL), -EBADF);
    CHECK_EQUAL(kvl_raise(observer, index, 1, KVL_LIMIT, word_of(1, 1), 0, &audit, &found), -EBADF);
    CHECK_EQUAL(kvl_acknowledge(observer, &report), -EBADF);
    CHECK_EQUAL(kvl_unregister(observer), -EBADF);
    CHECK_EQUAL(kvl_audit_write(observer, &audit), -EBADF);
    CHECK_EQUAL(kvl_ring(observer, KVL_PUBLISHED), -EBADF);
    struct bytes after = bytes_of("a");
    CHECK_EQUAL(memcmp(&before, &after, sizeof before), 0);
}

TEST(set_back_words_are_not_raised, "A word below the revision that its publisher read there before is left as it is.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 5, word_of(6, 100));
    uint64_t found = 0;
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(8, 1), 7, NULL, &found), KVL_E_SET_BACK);
    CHECK(found == word_of(6, 100));
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(8, 1), 6, NULL, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(8, 1), 6, NULL, &found), KVL_OVERTAKEN);
}

TEST(raise_only_raises, "A word is replaced by a higher revision only, and the caller learns which word was or is there.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 5, word_of(0, 16000));
    uint64_t found = 1;
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(3, 30), 0, NULL, &found), KVL_RAISED);
    CHECK(found == word_of(0, 16000));
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(3, 31), 0, NULL, &found), KVL_OVERTAKEN);
    CHECK(found == word_of(3, 30));
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(2, 99), 0, NULL, &found), KVL_OVERTAKEN);
    CHECK(found == word_of(3, 30));
    CHECK_EQUAL(kvl_raise(publisher, index, 6, KVL_LIMIT, word_of(9, 9), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_raise(publisher, index + 1, 5, KVL_LIMIT, word_of(9, 9), 0, NULL, &found), -ESRCH);
    uint64_t word;
    CHECK_EQUAL(kvl_desired(owner, index, 5, KVL_LIMIT, &word), 0);
    CHECK(word == word_of(3, 30));
    kvl_close(owner);
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(9, 9), 0, NULL, &found), -ESRCH);
}

TEST(raise_records, "A publication that raises the word leaves a record of the pair before and after; no other one does.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 5, word_of(2, 20));
    struct kvl_audit record = {.when_ns = 7, .uid = 8, .pid = 9, .instance = "x", .program = "p", .note = "n"};
    struct kvl_audit found_records[KVL_AUDIT_RECORDS];
    uint64_t found;
    uint64_t written;
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(3, 30), 0, &record, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_raise(publisher, index, 5, KVL_LIMIT, word_of(3, 31), 0, &record, &found), KVL_OVERTAKEN);
    CHECK_EQUAL(kvl_raise(publisher, index, 6, KVL_LIMIT, word_of(4, 40), 0, &record, &found), -ESRCH);
    CHECK_EQUAL(kvl_audit_read(publisher, found_records, &written), 1);
    CHECK_EQUAL(written, 1);
    record.before = word_of(2, 20);
    record.after = word_of(3, 30);
    CHECK_EQUAL(memcmp(&record, found_records, sizeof record), 0);
}

TEST(extreme_words, "Limits and revisions at the edges of their types come back exactly.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", UINT64_MAX, word_of(0, INT32_MIN));
    const struct {
        uint32_t revision;
        int32_t limit;
    } words[] = {{1, -1}, {2, INT32_MAX}, {3, INT32_MIN}, {0x7fffffff, 0}, {0x80000000, 1}, {UINT32_MAX, INT32_MAX}};
    uint64_t found;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        uint64_t word = word_of(words[i].revision, words[i].limit);
        CHECK_EQUAL(kvl_raise(publisher, index, UINT64_MAX, KVL_LIMIT, word, 0, NULL, &found), KVL_RAISED);
        struct kvl_slot slot;
        CHECK_EQUAL(kvl_read_slot(publisher, index, &slot), KVL_ALIVE);
        CHECK(slot.desired[KVL_LIMIT] == word);
        CHECK_EQUAL(revision_in(slot.desired[KVL_LIMIT]), words[i].revision);
        CHECK_EQUAL(limit_in(slot.desired[KVL_LIMIT]), words[i].limit);
        CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(words[i].revision, 0)), 0);
    }
}

TEST(lives_far_apart, "Incarnations at the edges of their type are alive each for itself.")
{
    make("a");
    const uint64_t incarnations[] = {1, 2, INT64_MAX, UINT64_C(1) << 61, (UINT64_C(1) << 62) - 1, UINT64_MAX - 1};
    const int count = sizeof incarnations / sizeof *incarnations;
    kvl_ledger *owners[sizeof incarnations / sizeof *incarnations];
    kvl_ledger *observer = open_ledger("a", 0);
    /* (1 << 62) - 1, INT64_MAX and UINT64_MAX share their lower 62 bits: of such a pair only one registers. */
    for (int i = 0; i < count; i++) {
        owners[i] = open_ledger("a", 1);
        struct kvl_identity identity = identity_of("x");
        int slot = kvl_register(owners[i], &identity, incarnations[i], WORDS(0, 0), NULL);
        CHECK(slot >= 0 || incarnations[i] == (UINT64_C(1) << 62) - 1);
        if (slot >= 0) {
            CHECK_EQUAL(kvl_is_owned(observer, (uint32_t)slot, incarnations[i]), 1);
            CHECK_EQUAL(kvl_check(owners[i], here, "a", REVISIONS(0, 0)), 0);
        }
    }
    kvl_close(owners[1]);
    CHECK_EQUAL(kvl_is_owned(observer, 0, 1), 1);
    CHECK_EQUAL(kvl_is_owned(observer, 1, 2), 0);
    CHECK_EQUAL(kvl_is_owned(observer, 2, INT64_MAX), 1);
}

TEST(lives_are_behind_the_file, "A life is locked behind the end of the file, where it takes nobody's slot.")
{
    make("a");
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t incarnation = offsetof(struct layout_file, slots) + (i + 1) * sizeof(struct layout_slot);
        CHECK_EQUAL(register_as(open_ledger("a", 1), "x", incarnation, 0), i);
    }
}

TEST(agreement, "Members agree exactly when all their words are equal, and no members agree on nothing.")
{
    const char *const names[3] = {"a", "b", "c"};
    const kvl_ledger *owners[3];
    kvl_ledger *publishers[3];
    uint32_t slots[3];
    uint64_t word = 77;
    uint64_t found;
    for (int i = 0; i < 3; i++) {
        make(names[i]);
        kvl_ledger *owner = open_ledger(names[i], 1);
        slots[i] = register_as(owner, "x", 5, word_of(4, 4));
        owners[i] = owner;
        publishers[i] = open_ledger(names[i], 1);
    }
    CHECK_EQUAL(kvl_agree(owners, 0, KVL_LIMIT, &word), 0);
    CHECK_EQUAL(kvl_agree(owners, 3, KVL_LIMIT, &word), 1);
    CHECK(word == word_of(4, 4));
    for (uint32_t revision = 5; revision < 8; revision++) {
        for (int i = 0; i < 3; i++) {
            CHECK_EQUAL(kvl_raise(publishers[i], slots[i], 5, KVL_LIMIT, word_of(revision, 6), 0, NULL, &found), KVL_RAISED);
            CHECK_EQUAL(kvl_agree(owners, 3, KVL_LIMIT, &word), i == 2);
            CHECK_EQUAL(kvl_agree(owners, 1, KVL_LIMIT, &word), 1);
            CHECK(word == word_of(revision, 6));
        }
    }
}

TEST(agreement_is_of_one_registration, "Members whose slots carry different incarnations agree on nothing.")
{
    make("a");
    make("b");
    kvl_ledger *one = open_ledger("a", 1);
    kvl_ledger *other = open_ledger("b", 1);
    const kvl_ledger *both[] = {one, other};
    uint64_t word;
    (void)register_as(one, "x", 1, 7);
    CHECK_EQUAL(kvl_agree(both, 2, KVL_LIMIT, &word), 0);
    (void)register_as(other, "x", 2, 7);
    CHECK_EQUAL(kvl_agree(both, 2, KVL_LIMIT, &word), 0);
    CHECK_EQUAL(kvl_agree(both, 1, KVL_LIMIT, &word), 1);
    CHECK_EQUAL(kvl_agree(both + 1, 1, KVL_LIMIT, &word), 1);
}

TEST(reports_come_back, "A report is read back field by field, with the time of its writing.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, 0);
    struct kvl_report report = {
        .idle = INT64_MAX, .active = -2, .capacity = 3, .evicted = INT64_MIN, .eviction_errors = UINT32_MAX,
        .token_bytes = 4, .pool_bytes = 5, .resident_bytes = 6, .returned_bytes = -7, .returns = "yes",
    };
    report.answers[KVL_LIMIT] = (struct kvl_answer){word_of(4, 40), 5, 6, "because"};
    report.answers[KVL_CAP] = (struct kvl_answer){word_of(UINT32_MAX, -1), UINT32_MAX, UINT32_MAX, "for another reason"};
    CHECK_EQUAL(kvl_acknowledge(owner, &report), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK(slot.report.reported_ns > 0);
    report.reported_ns = slot.report.reported_ns;
    CHECK_EQUAL(memcmp(&report, &slot.report, sizeof report), 0);
}

static void patch(const char *name, size_t offset, const void *bytes, size_t count)
{
    int fd = openat(here, name, O_RDWR | O_CLOEXEC);
    CHECK_EQUAL(pwrite(fd, bytes, count, (off_t)offset), (ssize_t)count);
    close(fd);
}

static size_t slot_offset(uint32_t slot)
{
    return offsetof(struct layout_file, slots) + slot * sizeof(struct layout_slot);
}

TEST(torn_report, "A report with one byte changed anywhere is said to be torn, and none of its figures is handed out.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, word_of(7, 70));
    struct kvl_report report = {.idle = 5, .returns = "r"};
    report.answers[KVL_LIMIT].applied = word_of(7, 70);
    CHECK_EQUAL(kvl_acknowledge(owner, &report), 0);
    struct bytes whole = bytes_of("a");
    struct kvl_report nothing;
    memset(&nothing, 0, sizeof nothing);
    size_t start_at = slot_offset(index) + offsetof(struct layout_slot, report);
    for (size_t i = 0; i < sizeof(struct kvl_report) + 8; i++) {
        unsigned char changed = (unsigned char)(whole.content[start_at + i] ^ 0x80);
        patch("a", start_at + i, &changed, 1);
        struct kvl_slot slot;
        CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_TORN);
        CHECK_EQUAL(memcmp(&slot.report, &nothing, sizeof nothing), 0);
        CHECK(slot.desired[KVL_LIMIT] == word_of(7, 70) && slot.incarnation == 1);
        patch("a", start_at + i, &whole.content[start_at + i], 1);
        CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    }
}

TEST(seals_are_pinned, "The seals of identity and report are figures that all builds of this format agree on.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    struct kvl_identity identity = identity_of("x");
    identity.pid = 7;
    CHECK_EQUAL(kvl_register(owner, &identity, 5, WORDS(0, 0), NULL), 0);
    struct bytes bytes = bytes_of("a");
    struct layout_slot slot;
    memcpy(&slot, bytes.content + slot_offset(0), sizeof slot);
    CHECK(slot.report.seal == UINT64_C(0x3c72575f23bf4f40));
    slot.ownership.registered_ns = 11;
    slot.ownership.seal = UINT64_C(0x2941074a977f7538);
    memcpy(bytes.content + slot_offset(0), &slot, sizeof slot);
    put_bytes("a", &bytes);
    struct kvl_slot copy;
    CHECK_EQUAL(kvl_read_slot(observer, 0, &copy), KVL_ALIVE);
    CHECK_EQUAL(copy.registered_ns, 11);
}

TEST(hostile_content, "Texts without an end and absurd figures in a slot are read without leaving their fields.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    struct kvl_identity identity;
    struct kvl_report report;
    memset(&identity, 0xff, sizeof identity);
    memset(&report, 0xff, sizeof report);
    CHECK_EQUAL(kvl_register(owner, &identity, 1, WORDS(UINT64_MAX, 0), NULL), 0);
    CHECK_EQUAL(kvl_acknowledge(owner, &report), 0);
    struct kvl_slot copy;
    CHECK_EQUAL(kvl_read_slot(observer, 0, &copy), KVL_ALIVE);
    CHECK_EQUAL(strlen(copy.identity.instance), KVL_NAME_BYTES - 1);
    CHECK_EQUAL(strlen(copy.identity.engine), KVL_ENGINE_BYTES - 1);
    CHECK_EQUAL(strlen(copy.identity.version), KVL_VERSION_BYTES - 1);
    CHECK_EQUAL(strlen(copy.report.answers[KVL_LIMIT].reason), KVL_REASON_BYTES - 1);
    CHECK_EQUAL(strlen(copy.report.answers[KVL_CAP].reason), KVL_REASON_BYTES - 1);
    CHECK_EQUAL(strlen(copy.report.returns), KVL_RETURNS_BYTES - 1);
    CHECK(copy.desired[KVL_LIMIT] == UINT64_MAX && copy.report.idle == -1);
}

static struct flock bytes_lock(off_t start_at, short type, off_t bytes)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = start_at;
    lock.l_len = bytes;
    return lock;
}

static struct flock whole_slot(uint32_t slot, short type, off_t bytes)
{
    return bytes_lock((off_t)slot_offset(slot), type, bytes);
}

TEST(readers_locks_prove_nothing, "Shared locks, which anyone who may read can take, do not make a dead slot alive.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, 0);
    int fd = openat(here, "a", O_RDONLY | O_CLOEXEC);
    struct flock publishers = whole_slot(index, F_RDLCK, 1);
    publishers.l_start++;
    CHECK_EQUAL(fcntl(fd, F_OFD_SETLK, &publishers), 0);
    CHECK_EQUAL(alive_in(observer), 1);
    kvl_close(owner);
    struct flock all = bytes_lock(0, F_RDLCK, 0); /* everything, with the bytes behind the end that are lives */
    CHECK_EQUAL(fcntl(fd, F_OFD_SETLK, &all), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
}

TEST(no_ghosts, "A dead owner is not taken for alive while the next one has locked its slot and written nothing yet.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 1);
    uint32_t index = register_as(owner, "ghost", 1, 0);
    kvl_close(owner);
    int next = openat(here, "a", O_RDWR | O_CLOEXEC);
    struct flock both = whole_slot(index, F_WRLCK, 2);
    CHECK_EQUAL(fcntl(next, F_OFD_SETLK, &both), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
    uint64_t found;
    CHECK_EQUAL(kvl_raise(observer, index, 1, KVL_LIMIT, word_of(1, 1), 0, NULL, &found), -ESRCH);
}

TEST(no_lock_is_left, "A slot that was closed can be claimed, though a publisher that raised its word has the file open.")
{
    make("a");
    kvl_ledger *publisher = open_ledger("a", 1);
    uint64_t found;
    for (uint64_t i = 1; i < 10; i++) {
        kvl_ledger *owner = open_ledger("a", 1);
        CHECK_EQUAL(register_as(owner, "x", i, 0), 0);
        CHECK_EQUAL(kvl_raise(publisher, 0, i, KVL_LIMIT, word_of(1, 10), 0, NULL, &found), KVL_RAISED);
        CHECK_EQUAL(kvl_raise(publisher, 0, i + 1, KVL_LIMIT, word_of(1, 10), 0, NULL, &found), -ESRCH);
        CHECK_EQUAL(kvl_raise(publisher, 1, i, KVL_LIMIT, word_of(1, 10), 0, NULL, &found), -ESRCH);
        kvl_close(owner);
    }
}

TEST(ask_in_vain, "An error of the kernel when it is asked for an owner's lock is an error, and does not make it dead.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *other = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, word_of(1, 10));
    if (!refuse_fcntl(F_OFD_GETLK, -1, EINVAL)) {
        return;
    }
    struct kvl_slot slot;
    uint64_t found;
    CHECK_EQUAL(kvl_read_slot(other, index, &slot), -EINVAL);
    CHECK_EQUAL(kvl_is_owned(other, index, 1), -EINVAL);
    CHECK_EQUAL(kvl_raise(other, index, 1, KVL_LIMIT, word_of(2, 20), 0, NULL, &found), -EINVAL);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(0, 0)), -EINVAL);
    CHECK_EQUAL(kvl_desired(owner, index, 1, KVL_LIMIT, &found), 0);
    CHECK(found == word_of(1, 10));
}

TEST(no_locks_at_all, "Where the kernel refuses locks a registration says so, and the slot is written by nobody.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    struct bytes before = bytes_of("a");
    if (!refuse_fcntl(F_OFD_SETLK, -1, ENOLCK)) {
        return;
    }
    struct kvl_identity identity = identity_of("x");
    uint64_t found;
    CHECK_EQUAL(kvl_register(owner, &identity, 1, WORDS(0, 0), NULL), -ENOLCK);
    CHECK_EQUAL(kvl_raise(owner, 0, 1, KVL_LIMIT, 1, 0, NULL, &found), -ENOLCK);
    struct bytes after = bytes_of("a");
    CHECK_EQUAL(memcmp(&before, &after, sizeof before), 0);
}

static void register_and_wait(void *argument)
{
    kvl_ledger *owner = open_ledger("a", 1);
    (void)register_as(owner, "x", 1, 0);
    *(_Atomic int *)argument = 1;
    pause();
}

TEST(killed_owner, "An engine that is killed is dead for everybody at once, and its slot is free.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 1);
    _Atomic int *ready = shared_memory(sizeof *ready);
    for (int round = 0; round < 20; round++) {
        *ready = 0;
        pid_t child = start(register_and_wait, (void *)ready);
        while (*ready == 0) {
            usleep(100);
        }
        CHECK_EQUAL(alive_in(observer), 1);
        finish_off(child);
        CHECK_EQUAL(alive_in(observer), 0);
    }
    kvl_ledger *next = open_ledger("a", 1);
    CHECK_EQUAL(register_as(next, "y", 2, 0), 0);
}

/* The bells */

TEST(bells_have_their_places, "Each bell counts at its own place in the file, which other releases ring and hear, too.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    CHECK_EQUAL(kvl_ring(ledger, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_ring(ledger, KVL_ACKNOWLEDGED), 0);
    CHECK_EQUAL(kvl_ring(ledger, KVL_ACKNOWLEDGED), 0);
    uint32_t count;
    CHECK_EQUAL(kvl_bell(ledger, KVL_PUBLISHED, &count), 0);
    CHECK_EQUAL(count, 1);
    CHECK_EQUAL(kvl_bell(ledger, KVL_ACKNOWLEDGED, &count), 0);
    CHECK_EQUAL(count, 2);
    struct bytes bytes = bytes_of("a");
    CHECK_EQUAL(bytes.content[64], 1);
    CHECK_EQUAL(bytes.content[128], 2);
}

TEST(bells_wrap, "A bell that counted to its end goes on at 0, and its waiters are woken.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    uint32_t count = UINT32_MAX;
    patch("a", offsetof(struct layout_header, published), &count, sizeof count);
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, UINT32_MAX, 0), -ETIMEDOUT);
    CHECK_EQUAL(kvl_ring(ledger, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_bell(ledger, KVL_PUBLISHED, &count), 0);
    CHECK_EQUAL(count, 0);
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, UINT32_MAX, INT64_MAX), 0);
}

/* The record of publications */

TEST(audit_ring, "The record holds the last publications, newest first, and never more than it has room for.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record;
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t written = 1;
    memset(&record, 0, sizeof record);
    CHECK_EQUAL(kvl_audit_read(ledger, records, &written), 0);
    CHECK_EQUAL(written, 0);
    for (uint64_t i = 1; i <= KVL_AUDIT_RECORDS + 5; i++) {
        record.after = i;
        CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
    }
    CHECK_EQUAL(kvl_audit_read(ledger, records, &written), KVL_AUDIT_RECORDS);
    CHECK_EQUAL(written, KVL_AUDIT_RECORDS + 5);
    for (uint32_t i = 0; i < KVL_AUDIT_RECORDS; i++) {
        CHECK_EQUAL(records[i].after, KVL_AUDIT_RECORDS + 5 - i);
    }
    /* One figure for all releases: they read each other's records. */
    struct bytes bytes = bytes_of("a");
    struct layout_audit entry;
    memcpy(&entry, bytes.content + offsetof(struct layout_file, audit[KVL_AUDIT_RECORDS - 1]), sizeof entry);
    CHECK(entry.seal == UINT64_C(0xdda231e9e9eb00e6));
    unsigned char changed = 1;
    patch("a", offsetof(struct layout_file, audit) + 24, &changed, 1);
    CHECK_EQUAL(kvl_audit_read(ledger, records, &written), KVL_AUDIT_RECORDS - 1);
    for (int i = 0; i < KVL_AUDIT_RECORDS - 1; i++) {
        CHECK(records[i].after != KVL_AUDIT_RECORDS + 1 && (i == 0 || records[i].after < records[i - 1].after));
    }
    const uint64_t tickets[] = {UINT64_MAX, 1, 0};
    for (int i = 0; i < 3; i++) {
        patch("a", offsetof(struct layout_header, audit_tickets), &tickets[i], sizeof tickets[i]);
        CHECK_EQUAL(kvl_audit_read(ledger, records, &written), 0);
        CHECK(written == tickets[i]);
    }
}

TEST(hostile_records, "Records with texts without an end are read without leaving their fields.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record;
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t written;
    memset(&record, 0xff, sizeof record);
    CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
    CHECK_EQUAL(kvl_audit_read(ledger, records, &written), 1);
    CHECK_EQUAL(strlen(records[0].instance), KVL_NAME_BYTES - 1);
    CHECK_EQUAL(strlen(records[0].program), KVL_PROGRAM_BYTES - 1);
    CHECK_EQUAL(strlen(records[0].note), KVL_NOTE_BYTES - 1);
}
