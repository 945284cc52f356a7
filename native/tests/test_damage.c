/* SPDX-License-Identifier: Apache-2.0
 *
 * test_damage.c - a peer that may write a ledger cuts it, empties it, or copies another one over it, and a stranger
 * closes its descriptor. Each answer is a code: no signal is raised, and nothing is written where it does not belong.
 */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An owner of a slot whose word is revision 3, a publisher and an observer, all open before the damage. */
struct scene {
    kvl_ledger *owner;
    kvl_ledger *publisher;
    kvl_ledger *observer;
    uint32_t slot;
};

#define PUBLISHED word_of(3, 30)

static struct scene make_scene(void)
{
    make("a");
    struct scene scene = {open_ledger("a", 1), open_ledger("a", 1), open_ledger("a", 0), 0};
    uint64_t found;
    scene.slot = register_as(scene.owner, "x", 1, word_of(1, 10));
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, PUBLISHED, 0, NULL, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_ring(scene.publisher, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), 0);
    return scene;
}

static void close_scene(struct scene *scene)
{
    kvl_close(scene->owner);
    kvl_close(scene->publisher);
    kvl_close(scene->observer);
}

/* Everything that would write is refused with the same code, and the file stays as it is. */
static void check_nothing_is_written(const struct scene *scene)
{
    struct bytes before = bytes_of("a");
    struct kvl_report report = {.idle = 1};
    struct kvl_audit record = {.after = 1};
    struct kvl_identity identity = identity_of("y");
    uint64_t found;
    CHECK_EQUAL(kvl_check(scene->owner, here, "a", REVISIONS(3, 0)), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_check(scene->publisher, here, "a", REVISIONS(3, 0)), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_raise(scene->publisher, scene->slot, 1, KVL_LIMIT, word_of(9, 90), 0, &record, &found), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_acknowledge(scene->owner, &report), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_register(scene->publisher, &identity, 5, WORDS(0, 0), NULL), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_audit_write(scene->publisher, &record), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_ring(scene->publisher, KVL_PUBLISHED), KVL_E_DAMAGED);
    CHECK_EQUAL(kvl_ring(scene->owner, KVL_ACKNOWLEDGED), KVL_E_DAMAGED);
    struct bytes after = bytes_of("a");
    CHECK_EQUAL(before.size, after.size);
    CHECK_EQUAL(memcmp(before.content, after.content, sizeof before.content), 0);
}

static void check_it_is_no_ledger(int code)
{
    struct kvl_file file;
    kvl_ledger *ledger;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), code);
}

static int agrees(const kvl_ledger *owner, uint64_t *word)
{
    return kvl_agree(&owner, 1, KVL_LIMIT, word);
}

TEST(cut_file, "A file that is cut under its users is damaged for each of them, and ends no process.")
{
    const int64_t sizes[] = {0, 1, 63, 64, 4095, 4096, 4097, KVL_FILE_BYTES / 2, KVL_FILE_BYTES - 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct scene scene = make_scene();
        cut("a", sizes[i]);
        check_nothing_is_written(&scene);
        check_it_is_no_ledger(KVL_E_SIZE);
        struct kvl_slot slot;
        struct kvl_audit records[KVL_AUDIT_RECORDS];
        uint64_t written;
        uint64_t word;
        uint32_t count = 0;
        int whole = sizes[i] >= 4096 + 512;
        CHECK_EQUAL(agrees(scene.owner, &word), whole);
        CHECK_EQUAL(kvl_desired(scene.owner, scene.slot, 1, KVL_LIMIT, &word), whole ? 0 : KVL_E_DAMAGED);
        CHECK_EQUAL(kvl_read_slot(scene.observer, scene.slot, &slot), whole ? KVL_ALIVE : KVL_E_DAMAGED);
        CHECK_EQUAL(kvl_is_owned(scene.observer, scene.slot, 1), whole ? 1 : KVL_E_DAMAGED);
        CHECK_EQUAL(kvl_read_slot(scene.observer, KVL_SLOTS - 1, &slot),
                    sizes[i] == KVL_FILE_BYTES - 1 ? KVL_DEAD : KVL_E_DAMAGED);
        CHECK_EQUAL(kvl_audit_read(scene.observer, records, &written), KVL_E_DAMAGED);
        CHECK_EQUAL(kvl_bell(scene.observer, KVL_PUBLISHED, &count), sizes[i] > 64 ? 0 : KVL_E_DAMAGED);
        if (sizes[i] == 0) {
            CHECK_EQUAL(kvl_wait(scene.observer, KVL_PUBLISHED, 0, monotonic_ns() + 20000000), KVL_E_DAMAGED);
            CHECK_EQUAL(kvl_wait(scene.observer, KVL_PUBLISHED, 1, monotonic_ns() + 20000000), KVL_E_DAMAGED);
        }
        close_scene(&scene);
        CHECK_EQUAL(unlinkat(here, "a", 0), 0);
    }
}

TEST(cut_between, "A lost ledger does not infect another one.")
{
    make("b");
    kvl_ledger *whole = open_ledger("b", 1);
    kvl_ledger *observer = open_ledger("b", 0);
    uint32_t index = register_as(whole, "x", 1, word_of(3, 30));
    struct scene scene = make_scene();
    const kvl_ledger *both[] = {scene.owner, whole};
    uint64_t word;
    CHECK_EQUAL(kvl_agree(both, 2, KVL_LIMIT, &word), 1);
    cut("a", 0);
    CHECK_EQUAL(kvl_agree(both, 2, KVL_LIMIT, &word), 0);
    CHECK_EQUAL(kvl_check(whole, here, "b", REVISIONS(3, 0)), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK_EQUAL(kvl_desired(whole, index, 1, KVL_LIMIT, &word), 0);
    close_scene(&scene);
    CHECK_EQUAL(kvl_agree(both + 1, 1, KVL_LIMIT, &word), 1);
}

TEST(cut_and_grown_again, "A file that was emptied and has its size again is damaged, and no word 0 is taken from it.")
{
    struct scene scene = make_scene();
    cut("a", 0);
    cut("a", KVL_FILE_BYTES);
    uint64_t word = 77;
    uint32_t count;
    check_nothing_is_written(&scene);
    check_it_is_no_ledger(KVL_E_MAGIC);
    CHECK_EQUAL(agrees(scene.owner, &word), 0);
    CHECK_EQUAL(word, 77);
    CHECK_EQUAL(kvl_desired(scene.owner, scene.slot, 1, KVL_LIMIT, &word), KVL_E_DISPLACED);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(scene.observer, scene.slot, &slot), KVL_DEAD);
    CHECK_EQUAL(kvl_is_owned(scene.observer, scene.slot, 1), 0);
    /* Who sleeps as long as the bell is 1 is woken at once; who looks again sleeps: no loop spins. */
    CHECK_EQUAL(kvl_wait(scene.owner, KVL_PUBLISHED, 1, INT64_MAX), 0);
    CHECK_EQUAL(kvl_bell(scene.owner, KVL_PUBLISHED, &count), 0);
    CHECK_EQUAL(kvl_wait(scene.owner, KVL_PUBLISHED, count, monotonic_ns() + 20000000), -ETIMEDOUT);
    close_scene(&scene);
}

static void punch(const char *name, off_t offset, off_t size)
{
    int fd = openat(here, name, O_RDWR | O_CLOEXEC);
    CHECK_EQUAL(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size), 0);
    close(fd);
}

TEST(punched_header, "A hole over the stamp damages the file, although its slots and its size are whole.")
{
    struct scene scene = make_scene();
    punch("a", 0, 4096);
    check_nothing_is_written(&scene);
    check_it_is_no_ledger(KVL_E_MAGIC);
    close_scene(&scene);
}

TEST(punched_slot, "A hole over a slot displaces its owner, and nobody publishes into it.")
{
    struct scene scene = make_scene();
    uint64_t word = 77;
    uint64_t found;
    punch("a", 4096, 4096);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_DISPLACED);
    CHECK_EQUAL(agrees(scene.owner, &word), 0);
    CHECK_EQUAL(word, 77);
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, word_of(9, 90), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_is_owned(scene.publisher, scene.slot, 1), 0);
    close_scene(&scene);
}

TEST(zeroed, "A file that was overwritten with zeros is damaged for whoever has it open.")
{
    struct scene scene = make_scene();
    struct bytes zeros;
    memset(&zeros, 0, sizeof zeros);
    put_bytes("a", &zeros);
    check_nothing_is_written(&scene);
    check_it_is_no_ledger(KVL_E_MAGIC);
    close_scene(&scene);
}

TEST(another_ledger_copied_over, "Another ledger copied over a live one in place gives its engine no limit and no life to "
                                 "the engines of the other.")
{
    make("b");
    kvl_ledger *other = open_ledger("b", 1);
    CHECK_EQUAL(register_as(other, "beta", 9, word_of(9, 0)), 0);
    struct bytes bytes = bytes_of("b");
    struct scene scene = make_scene();
    put_bytes("a", &bytes);
    uint64_t word = 77;
    uint64_t found;
    struct kvl_slot slot;
    check_nothing_is_written(&scene);
    CHECK_EQUAL(agrees(scene.owner, &word), 0);
    CHECK_EQUAL(word, 77);
    CHECK_EQUAL(kvl_desired(scene.owner, scene.slot, 1, KVL_LIMIT, &word), KVL_E_DISPLACED);
    CHECK_EQUAL(kvl_read_slot(scene.observer, scene.slot, &slot), KVL_DEAD);
    /* Who comes later finds a valid ledger, and in it nobody alive. */
    kvl_ledger *late = open_ledger("a", 1);
    CHECK_EQUAL(kvl_read_slot(late, scene.slot, &slot), KVL_DEAD);
    CHECK_EQUAL(kvl_raise(late, scene.slot, 9, KVL_LIMIT, word_of(10, 1), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_raise(late, scene.slot, 1, KVL_LIMIT, word_of(10, 1), 0, NULL, &found), -ESRCH);
    kvl_close(late);
    close_scene(&scene);
}

TEST(a_member_copied_over_another, "One member's ledger copied over another one of the same registration is damage.")
{
    struct scene scene = make_scene();
    make("b");
    kvl_ledger *member = open_ledger("b", 1);
    CHECK_EQUAL(register_as(member, "x", 1, PUBLISHED), scene.slot);
    struct bytes bytes = bytes_of("b");
    put_bytes("a", &bytes);
    check_nothing_is_written(&scene);
    CHECK_EQUAL(kvl_check(member, here, "b", REVISIONS(3, 0)), 0);
    kvl_close(member);
    close_scene(&scene);
}

TEST(an_old_copy_put_back, "An old copy of the same ledger is told from it by the word that went back, or by its owner.")
{
    make("a");
    struct bytes empty = bytes_of("a");
    CHECK_EQUAL(unlinkat(here, "a", 0), 0);
    struct scene scene = make_scene();
    struct bytes at_3 = bytes_of("a");
    uint64_t found;
    uint64_t word = 0;
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, word_of(6, 60), 0, NULL, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(6, 0)), 0);
    put_bytes("a", &at_3);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(6, 0)), KVL_E_SET_BACK);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), 0);
    put_bytes("a", &empty);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(6, 0)), KVL_E_DAMAGED); /* created again: another identity */
    close_scene(&scene);

    CHECK_EQUAL(unlinkat(here, "a", 0), 0);
    make("a");
    empty = bytes_of("a");
    kvl_ledger *owner = open_ledger("a", 1);
    CHECK_EQUAL(register_as(owner, "x", 1, PUBLISHED), 0);
    put_bytes("a", &empty);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(0, 0)), KVL_E_DISPLACED);
    CHECK_EQUAL(agrees(owner, &word), 0);
}

TEST(a_copied_identity_is_not_alive, "The identity of another engine, copied into a slot that is locked, is not alive.")
{
    make("b");
    kvl_ledger *other = open_ledger("b", 1);
    CHECK_EQUAL(register_as(other, "beta", 9, word_of(9, 0)), 0);
    struct bytes stolen = bytes_of("b");
    struct scene scene = make_scene();
    struct bytes bytes = bytes_of("a");
    memcpy(bytes.content + 4096, stolen.content + 4096, 512);
    put_bytes("a", &bytes);
    struct kvl_slot slot;
    uint64_t found;
    uint64_t word;
    CHECK_EQUAL(kvl_read_slot(scene.observer, scene.slot, &slot), KVL_DEAD);
    CHECK_EQUAL(kvl_is_owned(scene.observer, scene.slot, 9), 0);
    CHECK_EQUAL(kvl_is_owned(scene.observer, scene.slot, 1), 0);
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 9, KVL_LIMIT, word_of(10, 1), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, word_of(10, 1), 0, NULL, &found), -ESRCH);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_DISPLACED);
    CHECK_EQUAL(agrees(scene.owner, &word), 0);
    close_scene(&scene);
}

TEST(an_edited_identity_displaces, "An identity that was edited in its slot is noticed by its owner and read by nobody.")
{
    struct scene scene = make_scene();
    struct bytes bytes = bytes_of("a");
    bytes.content[4096] ^= 1;
    put_bytes("a", &bytes);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_DISPLACED);
    CHECK_EQUAL(kvl_read_slot(scene.observer, scene.slot, &slot), -EAGAIN);
    close_scene(&scene);
}

TEST(replaced_by_name, "An owner learns that its ledger's name is gone, or leads to another file.")
{
    struct scene scene = make_scene();
    CHECK_EQUAL(renameat(here, "a", here, "old"), 0);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_REPLACED);
    CHECK_EQUAL(symlinkat("old", here, "a"), 0);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_REPLACED);
    CHECK_EQUAL(unlinkat(here, "a", 0), 0);
    make("a");
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_REPLACED);
    CHECK_EQUAL(kvl_check(scene.owner, here, "old", REVISIONS(3, 0)), 0);
    close_scene(&scene);
}

/* Descriptors that somebody closed */

static void have_it_open(void *argument)
{
    CHECK(fcntl(*(int *)argument, F_GETFD) >= 0);
}

TEST(closed_behind_its_back, "After somebody closed its descriptor an owner is told so, and nothing else is closed.")
{
    struct scene scene = make_scene();
    struct kvl_report report = {.idle = 1};
    struct kvl_audit record = {.after = 1};
    uint64_t found;
    int number = scene.owner->fd;
    CHECK_EQUAL(close(number), 0);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_UNLOCKED);
    CHECK_EQUAL(kvl_acknowledge(scene.owner, &report), -EBADF);
    CHECK_EQUAL(kvl_is_owned(scene.observer, scene.slot, 1), 0);

    int foreign = openat(here, "foreign", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQUAL(foreign, number); /* the kernel gives the lowest number */
    char zeros[KVL_FILE_BYTES];
    memset(zeros, 0, sizeof zeros);
    CHECK_EQUAL(write(foreign, zeros, sizeof zeros), KVL_FILE_BYTES);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_UNLOCKED);
    CHECK_EQUAL(kvl_acknowledge(scene.owner, &report), -EBADF);
    CHECK_EQUAL(kvl_audit_write(scene.owner, &record), -EBADF);
    CHECK_EQUAL(kvl_raise(scene.owner, scene.slot, 1, KVL_LIMIT, word_of(9, 9), 0, &record, &found), -EBADF);
    CHECK_EQUAL(kvl_ring(scene.owner, KVL_ACKNOWLEDGED), -EBADF);
    join(start(have_it_open, &foreign));
    struct bytes bytes = bytes_of("foreign");
    CHECK_EQUAL(memcmp(bytes.content, zeros, sizeof zeros), 0);
    (void)kvl_unregister(scene.owner);
    close_scene(&scene);
    CHECK(fcntl(foreign, F_GETFD) >= 0);
    CHECK_EQUAL(pwrite(foreign, "x", 1, 0), 1);
}

TEST(reopened_behind_its_back, "A descriptor that is open on the same ledger again has no lock, which its owner is told.")
{
    struct scene scene = make_scene();
    CHECK_EQUAL(close(scene.owner->fd), 0);
    CHECK_EQUAL(openat(here, "a", O_RDWR | O_CLOEXEC), scene.owner->fd);
    CHECK_EQUAL(kvl_check(scene.owner, here, "a", REVISIONS(3, 0)), KVL_E_UNLOCKED);
    close_scene(&scene);
}

static void cut_and_grow(void *argument)
{
    const _Atomic int *stop = argument;
    struct bytes bytes = bytes_of("a");
    int fd = openat(here, "a", O_RDWR | O_CLOEXEC);
    for (int64_t turn = 0; *stop == 0; turn++) {
        for (int64_t until = monotonic_ns() + turn % 50 * 4000; monotonic_ns() < until;) { /* long enough for one raise */
        }
        CHECK_EQUAL(ftruncate(fd, 0), 0);
        CHECK_EQUAL(ftruncate(fd, KVL_FILE_BYTES), 0);
        put_bytes("a", &bytes);
    }
}

TEST(cut_again_and_again, "A file that is cut and restored without a pause gives codes to all who use it, and no signal.")
{
    struct scene scene = make_scene();
    _Atomic int *stop = shared_memory(sizeof *stop);
    pid_t child = start(cut_and_grow, (void *)stop);
    int64_t end = monotonic_ns() + stress_ns() / 2;
    struct kvl_audit record = {.after = 1};
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    struct kvl_report report = {.idle = 1};
    uint64_t faults = 0;
    uint64_t raises = 0;
    uint64_t calls = 0;
    for (uint32_t revision = 4; monotonic_ns() < end; revision++) {
        uint64_t found;
        uint32_t count;
        struct kvl_slot slot;
        int raised = -EAGAIN;
        if (isolates()) {
            raised = kvl_raise(scene.publisher, scene.slot, 1, KVL_LIMIT, word_of(revision, 1), 0, &record, &found);
        }
        raises += raised == KVL_RAISED;
        CHECK(raised == KVL_RAISED || raised == KVL_OVERTAKEN || raised == KVL_E_DAMAGED || raised == -ESRCH ||
              raised == -EAGAIN);
        faults += raised == KVL_E_DAMAGED;
        int acknowledged = kvl_acknowledge(scene.owner, &report);
        CHECK(acknowledged == 0 || acknowledged == KVL_E_DAMAGED);
        int rung = kvl_ring(scene.owner, KVL_ACKNOWLEDGED);
        CHECK(rung == 0 || rung == KVL_E_DAMAGED);
        int waited = kvl_wait(scene.owner, KVL_PUBLISHED, 1, 0);
        CHECK(waited == 0 || waited == -ETIMEDOUT || waited == KVL_E_DAMAGED);
        (void)kvl_bell(scene.owner, KVL_PUBLISHED, &count);
        (void)kvl_read_slot(scene.observer, scene.slot, &slot);
        (void)agrees(scene.owner, &found);
        (void)kvl_audit_read(scene.observer, records, &found);
        (void)kvl_check(scene.owner, here, "a", REVISIONS(3, 0));
        calls++;
    }
    *stop = 1;
    join(child);
    note("%llu rounds, %llu publications raised, %llu found damage", (unsigned long long)calls,
         (unsigned long long)raises, (unsigned long long)faults);
}
