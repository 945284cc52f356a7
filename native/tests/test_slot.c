/* SPDX-License-Identifier: Apache-2.0
 *
 * test_slot.c - who owns a slot, what it is told and what it answers; in one process, without haste.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static int alive_in(kvl_ledger *observer)
{
    struct kvl_slot slot;
    int alive = 0;
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        alive += kvl_read_slot(observer, i, &slot) == 1;
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
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    CHECK_EQUAL(slot.incarnation, 99);
    CHECK(slot.desired == word_of(7, -1));
    CHECK(strcmp(slot.identity.instance, "instance") == 0);
    CHECK_EQUAL(slot.report.consistent, 1);
    CHECK(slot.registered_ns > 0 && slot.report.reported_ns == 0);
    CHECK(kvl_is_owned(observer, index, 99) && !kvl_is_owned(observer, index, 98));
}

TEST(nothing_is_applied_before_it_is_said, "A slot that begins with a published pair does not show it as applied.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, word_of(7, 5));
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    CHECK(slot.report.applied == word_of(0, 16000));
    CHECK_EQUAL(slot.report.settled_revision, 0);
}

TEST(every_end_frees_the_slot, "Unregistering, releasing and closing each free a slot at once.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 1);
    kvl_ledger *owner = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    CHECK_EQUAL(kvl_unregister(owner, index), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_unregister(owner, index), -EBADF);
    CHECK_EQUAL(register_as(owner, "x", 2, 0), index);
    kvl_release(owner);
    CHECK_EQUAL(alive_in(observer), 0);
    kvl_close(owner);
    owner = open_ledger("a", 1);
    CHECK_EQUAL(register_as(owner, "x", 3, 0), index);
    CHECK_EQUAL(alive_in(observer), 1);
    kvl_close(owner);
    CHECK_EQUAL(alive_in(observer), 0);
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
    CHECK_EQUAL(kvl_register(late, &identity, 1000, 0), -EUSERS);
    CHECK_EQUAL(alive_in(late), KVL_SLOTS);
    kvl_close(owners[40]);
    CHECK_EQUAL(kvl_register(late, &identity, 1000, 0), 40);
}

TEST(one_handle_two_slots, "A second registration through one handle takes another slot and leaves the first alone.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t first = register_as(owner, "x", 1, 0);
    uint32_t second = register_as(owner, "y", 2, 0);
    CHECK(first != second);
    CHECK_EQUAL(alive_in(observer), 2);
    CHECK_EQUAL(kvl_unregister(owner, first), 0);
    CHECK_EQUAL(alive_in(observer), 1);
    CHECK_EQUAL(register_as(owner, "z", 3, 0), first);
}

TEST(what_is_not_ones_own, "Slots of others, indices beyond the table and the incarnation 0 are refused untouched.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *other = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    struct kvl_report report = {.idle = 5};
    struct kvl_slot slot;
    uint64_t found;
    CHECK_EQUAL(kvl_unregister(other, index), -EBADF);
    CHECK_EQUAL(kvl_acknowledge(other, index, &report), -EBADF);
    CHECK_EQUAL(kvl_read_slot(other, index, &slot), 1);
    CHECK_EQUAL(slot.report.idle, 0);
    CHECK_EQUAL(kvl_unregister(owner, KVL_SLOTS), -EINVAL);
    CHECK_EQUAL(kvl_acknowledge(owner, KVL_SLOTS, &report), -EINVAL);
    CHECK_EQUAL(kvl_read_slot(other, KVL_SLOTS, &slot), -EINVAL);
    CHECK_EQUAL(kvl_raise(other, KVL_SLOTS, 1, 1, &found), -EINVAL);
    CHECK_EQUAL(kvl_is_owned(other, UINT32_MAX, 1), 0);
    CHECK(kvl_desired_word(other, KVL_SLOTS) == NULL);
    struct kvl_identity identity = identity_of("x");
    CHECK_EQUAL(kvl_register(other, &identity, 0, 0), -EINVAL);
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
    CHECK_EQUAL(kvl_register(observer, &identity, 2, 0), -EBADF);
    CHECK_EQUAL(kvl_raise(observer, index, 1, word_of(1, 1), &found), -EBADF);
    CHECK_EQUAL(kvl_acknowledge(observer, index, &report), -EBADF);
    CHECK_EQUAL(kvl_unregister(observer, index), -EBADF);
    CHECK_EQUAL(kvl_audit_write(observer, &audit), -EBADF);
    uint32_t bell = kvl_bell(observer, KVL_PUBLISHED);
    kvl_ring(observer, KVL_PUBLISHED);
    CHECK_EQUAL(kvl_bell(observer, KVL_PUBLISHED), bell);
}

TEST(raise_only_raises, "A word is replaced by a higher revision only, and the caller learns what stood or stands there.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 5, word_of(0, 16000));
    uint64_t found = 1;
    CHECK_EQUAL(kvl_raise(publisher, index, 5, word_of(3, 30), &found), KVL_RAISED);
    CHECK(found == word_of(0, 16000));
    CHECK_EQUAL(kvl_raise(publisher, index, 5, word_of(3, 31), &found), KVL_LOST);
    CHECK(found == word_of(3, 30));
    CHECK_EQUAL(kvl_raise(publisher, index, 5, word_of(2, 99), &found), KVL_LOST);
    CHECK(found == word_of(3, 30));
    CHECK_EQUAL(kvl_raise(publisher, index, 6, word_of(9, 9), &found), -ESRCH);
    CHECK_EQUAL(kvl_raise(publisher, index + 1, 5, word_of(9, 9), &found), -ESRCH);
    CHECK(*kvl_desired_word(owner, index) == word_of(3, 30));
    kvl_release(owner);
    CHECK_EQUAL(kvl_raise(publisher, index, 5, word_of(9, 9), &found), -ESRCH);
    kvl_release(publisher);
    CHECK_EQUAL(kvl_raise(publisher, index, 5, word_of(9, 9), &found), -EBADF);
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
        CHECK_EQUAL(kvl_raise(publisher, index, UINT64_MAX, word, &found), KVL_RAISED);
        struct kvl_slot slot;
        CHECK_EQUAL(kvl_read_slot(publisher, index, &slot), 1);
        CHECK(slot.desired == word);
        CHECK_EQUAL(revision_in(slot.desired), words[i].revision);
        CHECK_EQUAL(limit_in(slot.desired), words[i].limit);
    }
}

TEST(agreement, "Words agree exactly when all are equal, and no words agree on nothing.")
{
    uint64_t words[3] = {5, 5, 5};
    const uint64_t *const places[3] = {&words[0], &words[1], &words[2]};
    uint64_t word = 0;
    CHECK_EQUAL(kvl_agree(places, 0, &word), 0);
    CHECK_EQUAL(kvl_agree(places, 3, &word), 1);
    CHECK_EQUAL(word, 5);
    for (int i = 0; i < 3; i++) {
        words[i] = 6;
        CHECK_EQUAL(kvl_agree(places, 3, &word), 0);
        words[i] = 5;
    }
    CHECK_EQUAL(kvl_agree(places, 1, &word), 1);
}

TEST(reports_come_back, "A report is read back field by field, with the time of its writing.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, 0);
    struct kvl_report report = {
        .applied = word_of(4, 40), .idle = INT64_MAX, .active = -2, .capacity = 3, .evicted = INT64_MIN,
        .eviction_errors = UINT32_MAX, .outcome = 6, .settled_revision = 5, .reason = "because",
    };
    CHECK_EQUAL(kvl_acknowledge(owner, index, &report), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    CHECK(slot.report.consistent == 1 && slot.report.reported_ns > 0);
    report.consistent = 1;
    report.reported_ns = slot.report.reported_ns;
    CHECK_EQUAL(memcmp(&report, &slot.report, sizeof report), 0);
}

TEST(hostile_content, "Texts without an end and absurd figures in a slot are read without leaving their fields.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, 0);
    struct layout_slot *slot = &owner->file->slots[index];
    memset((void *)slot->identity, 0xff, sizeof slot->identity);
    memset((void *)slot->report.reason, 0xff, sizeof slot->report.reason);
    slot->report.seq = 1;
    struct kvl_slot copy;
    CHECK_EQUAL(kvl_read_slot(observer, index, &copy), 1);
    CHECK_EQUAL(copy.report.consistent, 0);
    CHECK_EQUAL(strlen(copy.identity.instance), KVL_NAME_BYTES - 1);
    CHECK_EQUAL(strlen(copy.identity.engine), KVL_ENGINE_BYTES - 1);
    CHECK_EQUAL(strlen(copy.identity.version), KVL_VERSION_BYTES - 1);
    CHECK_EQUAL(strlen(copy.report.reason), KVL_REASON_BYTES - 1);
}

static struct flock whole_slot(uint32_t slot, short type, off_t bytes)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)(offsetof(struct layout_file, slots) + slot * sizeof(struct layout_slot));
    lock.l_len = bytes;
    return lock;
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
    kvl_release(owner);
    struct flock both = whole_slot(index, F_RDLCK, 2);
    CHECK_EQUAL(fcntl(fd, F_OFD_SETLK, &both), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
    publishers.l_type = F_UNLCK;
    CHECK_EQUAL(fcntl(fd, F_OFD_SETLK, &publishers), 0); /* what is left covers the owner's byte alone, as owners do */
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
}

TEST(no_ghosts, "A dead owner is not taken for alive while the next one has locked its slot and written nothing yet.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 1);
    uint32_t index = register_as(owner, "ghost", 1, 0);
    kvl_release(owner);
    int next = openat(here, "a", O_RDWR | O_CLOEXEC);
    struct flock both = whole_slot(index, F_WRLCK, 2);
    CHECK_EQUAL(fcntl(next, F_OFD_SETLK, &both), 0);
    CHECK_EQUAL(alive_in(observer), 0);
    CHECK_EQUAL(kvl_is_owned(observer, index, 1), 0);
    uint64_t found;
    CHECK_EQUAL(kvl_raise(observer, index, 1, word_of(1, 1), &found), -ESRCH);
}

TEST(no_lock_is_left, "A slot that was given back can be claimed, though its owner and a publisher have the file open.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    kvl_ledger *next = open_ledger("a", 1);
    uint32_t index = register_as(owner, "x", 1, 0);
    CHECK_EQUAL(kvl_unregister(owner, index), 0);
    CHECK_EQUAL(register_as(next, "y", 2, 0), index);
    uint64_t found;
    CHECK_EQUAL(kvl_raise(publisher, index, 2, word_of(1, 10), &found), KVL_RAISED);
    CHECK_EQUAL(kvl_unregister(next, index), 0);
    CHECK_EQUAL(register_as(owner, "z", 3, 0), index);
}

static void have_no_descriptor_zero(void *argument)
{
    (void)argument;
    CHECK_EQUAL(fcntl(0, F_GETFD), -1);
}

TEST(descriptor_zero, "Without a standard input a ledger gets descriptor 0, and works as with any other.")
{
    CHECK_EQUAL(close(0), 0);
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    CHECK_EQUAL(ledger->fd, 0);
    uint32_t index = register_as(ledger, "x", 1, 0);
    kvl_ledger *observer = open_ledger("a", 1);
    uint64_t found;
    CHECK_EQUAL(kvl_raise(observer, index, 1, word_of(1, 10), &found), KVL_RAISED);
    struct kvl_audit record = {.after = 1};
    CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
    CHECK_EQUAL(kvl_unregister(ledger, index), 0);
    kvl_release(observer); /* so that the next one to look is the one with descriptor 0 */
    uint32_t again = register_as(open_ledger("a", 1), "y", 2, 0);
    CHECK_EQUAL(kvl_is_owned(ledger, again, 2), 1);
    join(start(have_no_descriptor_zero, NULL));
    kvl_release(ledger);
    have_no_descriptor_zero(NULL);
}

/* Fork */

static void keep_copies(void *argument)
{
    *(_Atomic int *)argument = getpid();
    pause();
}

static void register_and_fork(void *argument)
{
    _Atomic int *grandchild = argument;
    kvl_ledger *owner = open_ledger("a", 1);
    (void)register_as(owner, "x", 1, 0);
    (void)start(keep_copies, (void *)grandchild);
    while (*grandchild == 0) { /* a child closes its copies before fork returns in it, which may be after this end */
        usleep(100);
    }
}

TEST(children_keep_nothing_alive, "A forked child of an engine that ended does not keep its slot alive.")
{
    make("a");
    _Atomic int *grandchild = shared_memory(sizeof *grandchild);
    join(start(register_and_fork, (void *)grandchild));
    CHECK(*grandchild > 0);
    CHECK_EQUAL(alive_in(open_ledger("a", 0)), 0);
    kill(*grandchild, SIGKILL);
}

struct inherited {
    kvl_ledger *owner;
    uint32_t index;
};

static void misuse_inherited(void *argument)
{
    const struct inherited *inherited = argument;
    struct kvl_report report = {.idle = 77};
    struct kvl_identity identity = identity_of("child");
    struct kvl_audit audit = {0};
    struct kvl_slot slot;
    uint64_t found;
    CHECK_EQUAL(kvl_acknowledge(inherited->owner, inherited->index, &report), -EBADF);
    CHECK_EQUAL(kvl_unregister(inherited->owner, inherited->index), -EBADF);
    CHECK_EQUAL(kvl_register(inherited->owner, &identity, 2, 0), -EBADF);
    CHECK_EQUAL(kvl_raise(inherited->owner, inherited->index, 1, word_of(9, 9), &found), -EBADF);
    CHECK_EQUAL(kvl_audit_write(inherited->owner, &audit), -EBADF);
    CHECK_EQUAL(kvl_read_slot(inherited->owner, inherited->index, &slot), -EBADF);
    kvl_close(inherited->owner);
}

TEST(children_own_nothing, "A forked child that uses its parent's handle is refused, and the slot stays as it was.")
{
    make("a");
    struct inherited inherited = {.owner = open_ledger("a", 1)};
    inherited.index = register_as(inherited.owner, "x", 1, word_of(2, 20));
    join(start(misuse_inherited, &inherited));
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(open_ledger("a", 0), inherited.index, &slot), 1);
    CHECK(slot.incarnation == 1 && slot.desired == word_of(2, 20) && slot.report.idle == 0);
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
    kvl_ring(ledger, KVL_PUBLISHED);
    kvl_ring(ledger, KVL_ACKNOWLEDGED);
    kvl_ring(ledger, KVL_ACKNOWLEDGED);
    CHECK_EQUAL(ledger->file->header.published, 1);
    CHECK_EQUAL(ledger->file->header.acknowledged, 2);
}

/* The record of publications */

TEST(audit_ring, "The record holds the last publications, newest first, and never more than it has room for.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record;
    memset(&record, 0, sizeof record);
    CHECK_EQUAL(kvl_audit_read(ledger, 0, &record), 0);
    for (uint64_t i = 1; i <= KVL_AUDIT_RECORDS + 5; i++) {
        record.after = i;
        CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
    }
    for (uint32_t i = 0; i < KVL_AUDIT_RECORDS; i++) {
        CHECK_EQUAL(kvl_audit_read(ledger, i, &record), 1);
        CHECK_EQUAL(record.after, KVL_AUDIT_RECORDS + 5 - i);
    }
    CHECK_EQUAL(kvl_audit_read(ledger, KVL_AUDIT_RECORDS, &record), 0);
    /* One figure for all releases: they read each other's records. */
    CHECK_EQUAL(ledger->file->audit[KVL_AUDIT_RECORDS - 1].seal, INT64_C(-440047775154728898));
    ledger->file->audit[0].body[3] ^= 1;
    int whole = 0;
    for (uint32_t i = 0; i < KVL_AUDIT_RECORDS; i++) {
        whole += kvl_audit_read(ledger, i, &record);
    }
    CHECK_EQUAL(whole, KVL_AUDIT_RECORDS - 1);
    ledger->file->header.audit_tickets = UINT64_MAX;
    (void)kvl_audit_read(ledger, 0, &record);
    ledger->file->header.audit_tickets = 0;
    CHECK_EQUAL(kvl_audit_read(ledger, 0, &record), 0);
}
