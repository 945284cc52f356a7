/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fork.c - a process that forks while its threads use ledgers: its children own nothing and keep nothing alive.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

static void misuse_inherited(void *argument)
{
    kvl_ledger *owner = argument;
    struct kvl_report report = {.idle = 77};
    struct kvl_identity identity = identity_of("child");
    struct kvl_audit audit = {0};
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    struct kvl_slot slot;
    uint64_t found;
    uint32_t count;
    CHECK_EQUAL(kvl_acknowledge(owner, &report), -EBADF);
    CHECK_EQUAL(kvl_unregister(owner), -EBADF);
    CHECK(kvl_register(owner, &identity, 2, WORDS(0, 0), NULL) < 0);
    CHECK_EQUAL(kvl_raise(owner, 0, 1, KVL_LIMIT, word_of(9, 9), 0, &audit, &found), -EBADF);
    CHECK_EQUAL(kvl_audit_write(owner, &audit), -EBADF);
    CHECK_EQUAL(kvl_audit_read(owner, records, &found), -EBADF);
    CHECK_EQUAL(kvl_ring(owner, KVL_PUBLISHED), -EBADF);
    CHECK_EQUAL(kvl_bell(owner, KVL_PUBLISHED, &count), -EBADF);
    CHECK_EQUAL(kvl_read_slot(owner, 0, &slot), -EBADF);
    CHECK_EQUAL(kvl_is_owned(owner, 0, 1), -EBADF);
    CHECK_EQUAL(kvl_desired(owner, 0, 1, KVL_LIMIT, &found), -EBADF);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(0, 0)), -EBADF);
    const kvl_ledger *one = owner;
    CHECK_EQUAL(kvl_agree(&one, 1, KVL_LIMIT, &found), 0);
    kvl_close(owner);
    kvl_ledger *own = open_ledger("a", 1);
    CHECK_EQUAL(register_as(own, "child", 2, 0), 1);
    kvl_close(own);
}

TEST(children_own_nothing, "A forked child that uses its parent's handle is refused, and the slot stays as it was.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    (void)register_as(owner, "x", 1, word_of(2, 20));
    join(start(misuse_inherited, owner));
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(open_ledger("a", 0), 0, &slot), KVL_ALIVE);
    CHECK(slot.incarnation == 1 && slot.desired[KVL_LIMIT] == word_of(2, 20) && slot.report.idle == 0);
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(2, 0)), 0);
}

/* Threads at work beside fork */

static _Atomic int stop;
static _Atomic uint64_t rounds;
static struct stat ledger_file;

static void *come_and_go(void *argument)
{
    uint64_t incarnation = (uint64_t)(uintptr_t)argument;
    while (!stop) {
        kvl_ledger *owner = open_ledger("a", 1);
        (void)register_as(owner, "x", incarnation += 2, word_of(1, 1));
        CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(1, 0)), 0);
        if (incarnation % 8 < 4) {
            CHECK_EQUAL(kvl_unregister(owner), 0);
        }
        kvl_close(owner);
        CHECK_EQUAL(kvl_create(here, "a", 0600), 0);
        rounds++;
        usleep(10);
    }
    return NULL;
}

static void *create_and_remove(void *argument)
{
    (void)argument;
    while (!stop) {
        CHECK_EQUAL(kvl_create(here, "new", 0600), 1);
        CHECK_EQUAL(unlinkat(here, "new", 0), 0);
        usleep(10);
    }
    return NULL;
}

static void *publish(void *argument)
{
    kvl_ledger *publisher = open_ledger("a", 1);
    kvl_ledger *owner = argument;
    struct kvl_audit record = {.after = 1};
    struct kvl_report report = {.idle = 1};
    uint64_t found;
    for (uint32_t revision = 2; !stop; revision++) {
        CHECK_EQUAL(kvl_raise(publisher, 0, 1, KVL_LIMIT, word_of(revision, 1), 0, &record, &found), KVL_RAISED);
        CHECK_EQUAL(kvl_acknowledge(owner, &report), 0);
        CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(revision, 0)), 0);
        usleep(10);
    }
    kvl_close(publisher);
    return NULL;
}

/* In the child: 0, or what is wrong. It writes nothing: the text that its parent had buffered is not its own. */
static int check_child(void)
{
    for (int fd = 0; fd < 64; fd++) {
        struct stat status;
        if (fstat(fd, &status) == 0 && status.st_dev == ledger_file.st_dev &&
            (status.st_ino == ledger_file.st_ino || (S_ISREG(status.st_mode) && status.st_size == KVL_FILE_BYTES))) {
            return 2; /* a copy of a descriptor of this or of a new ledger */
        }
    }
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    if (kvl_open(here, "a", 1, &file, &ledger) != 0 || kvl_is_owned(ledger, 0, 1) != 1) {
        return 3;
    }
    kvl_close(ledger);
    return 0;
}

static void fork_once(void)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        _exit(check_child());
    }
    int status;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_at(__FILE__, __LINE__, "a child hung or kept a descriptor: wait status 0x%x", (unsigned)status);
    }
}

TEST(fork_beside_threads, "A process that forks while threads open, register, publish and close has children that can open "
                          "ledgers at once and hold none of its descriptors.")
{
    const char *text = getenv("KVL_FORKS");
    long forks = text != NULL ? strtol(text, NULL, 10) : 300;
    make("a");
    CHECK_EQUAL(fstatat(here, "a", &ledger_file, 0), 0);
    kvl_ledger *owner = open_ledger("a", 1);
    CHECK_EQUAL(register_as(owner, "steady", 1, word_of(1, 1)), 0);
    void *(*const work[])(void *) = {come_and_go, come_and_go, create_and_remove, publish};
    void *const arguments[] = {(void *)1000, (void *)1001, NULL, owner};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, work[i], arguments[i]), 0);
    }
    alarm(0); /* each child has a limit of its own */
    for (long i = 0; i < forks; i++) {
        fork_once();
    }
    stop = 1;
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(1, 0)), 0);
    kvl_close(owner);
    CHECK_EQUAL(alive_in(open_ledger("a", 0)), 0);
    note("%ld forks, %llu registrations beside them", forks, (unsigned long long)rounds);
}
