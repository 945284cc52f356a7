/* SPDX-License-Identifier: Apache-2.0
 *
 * test_isolated.c - what the library leaves alone in its process: signals and their handlers, other children, and threads
 * that use one handle at once.
 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* Signals */

enum { SIGNALS = 64 };

static struct sigaction table[SIGNALS + 1];
static sigset_t mask;

static void remember_signals(void)
{
    memset(table, 0, sizeof table);
    for (int number = 1; number <= SIGNALS; number++) {
        (void)sigaction(number, NULL, &table[number]);
    }
    CHECK_EQUAL(pthread_sigmask(SIG_SETMASK, NULL, &mask), 0);
}

/* Nothing of the table and the mask changed since the last look. */
static void same_signals(const char *after)
{
    for (int number = 1; number <= SIGNALS; number++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        (void)sigaction(number, NULL, &action);
        if (memcmp(&action.sa_handler, &table[number].sa_handler, sizeof action.sa_handler) != 0 ||
            action.sa_flags != table[number].sa_flags) {
            fail_at(__FILE__, __LINE__, "%s changed the handler of signal %d", after, number);
        }
    }
    sigset_t now;
    CHECK_EQUAL(pthread_sigmask(SIG_SETMASK, NULL, &now), 0);
    for (int number = 1; number <= SIGNALS; number++) {
        if (sigismember(&now, number) != sigismember(&mask, number)) {
            fail_at(__FILE__, __LINE__, "%s changed the mask of signal %d", after, number);
        }
    }
}

#define LEAVES_SIGNALS(call) ((void)(call), same_signals(#call))

static void never(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    (void)context;
    _exit(99);
}

static void call_everything(void)
{
    struct kvl_file file;
    struct kvl_identity identity = identity_of("x");
    struct kvl_audit record = {.after = 1};
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    struct kvl_report report = {.idle = 1};
    struct kvl_slot slot;
    kvl_ledger *owner;
    kvl_ledger *publisher;
    const kvl_ledger *one;
    uint64_t found;
    uint32_t count;
    remember_signals();
    LEAVES_SIGNALS(kvl_create(here, "a", 0600));
    LEAVES_SIGNALS(kvl_open(here, "a", 1, &file, &owner));
    LEAVES_SIGNALS(kvl_open(here, "a", 1, &file, &publisher));
    one = owner;
    LEAVES_SIGNALS(kvl_register(owner, &identity, 1, WORDS(0, 0), NULL));
    for (int cut_before = 0; cut_before < 2; cut_before++) {
        LEAVES_SIGNALS(kvl_raise(publisher, 0, 1, KVL_LIMIT, word_of(3, 3), 0, &record, &found));
        LEAVES_SIGNALS(kvl_audit_write(publisher, &record));
        LEAVES_SIGNALS(kvl_audit_read(publisher, records, &found));
        LEAVES_SIGNALS(kvl_acknowledge(owner, &report));
        LEAVES_SIGNALS(kvl_ring(owner, KVL_PUBLISHED));
        LEAVES_SIGNALS(kvl_bell(owner, KVL_PUBLISHED, &count));
        LEAVES_SIGNALS(kvl_wait(owner, KVL_PUBLISHED, count, monotonic_ns() + 1000000));
        LEAVES_SIGNALS(kvl_read_slot(publisher, 0, &slot));
        LEAVES_SIGNALS(kvl_is_owned(publisher, 0, 1));
        LEAVES_SIGNALS(kvl_desired(owner, 0, 1, KVL_LIMIT, &found));
        LEAVES_SIGNALS(kvl_agree(&one, 1, KVL_LIMIT, &found));
        LEAVES_SIGNALS(kvl_check(owner, here, "a", REVISIONS(0, 0)));
        cut("a", 0);
    }
    LEAVES_SIGNALS(kvl_unregister(owner));
    LEAVES_SIGNALS(kvl_close(owner));
    LEAVES_SIGNALS(kvl_close(publisher));
    CHECK_EQUAL(unlinkat(here, "a", 0), 0);
}

TEST(signals_are_left_alone, "No function changes a signal's handler or the thread's mask, also in a file that was cut.")
{
    if (emulated()) { /* its forks end with SIGCHLD */
        return;
    }
    for (int number = SIGRTMAX; number >= 1; number--) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = never;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        if (number != SIGKILL && number != SIGSTOP && number != SIGCONT) {
            (void)sigaction(number, &action, NULL);
        }
    }
    call_everything();
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGBUS);
    sigaddset(&some, SIGCHLD);
    sigaddset(&some, SIGUSR1);
    CHECK_EQUAL(pthread_sigmask(SIG_SETMASK, &some, NULL), 0);
    call_everything();
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_IGN;
    CHECK_EQUAL(sigaction(SIGBUS, &action, NULL), 0);
    CHECK_EQUAL(sigaction(SIGCHLD, &action, NULL), 0);
    call_everything();
}

/* Stores beyond the end of a file */

struct touch {
    struct layout_file *file;
    size_t offset;
};

static int touch(void *argument)
{
    const struct touch *call = argument;
    atomic_fetch_add((kvl_word *)(void *)((char *)call->file + call->offset), 1);
    return 7;
}

TEST(a_store_beyond_the_end, "A store into a file that was cut is a code for whoever makes it, wherever it is cut.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    remember_signals();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; isolates() && offset < KVL_FILE_BYTES; offset += page) {
        struct touch call = {ledger->file, offset};
        CHECK_EQUAL(kvl_isolated(touch, &call, sizeof call), 7);
        cut("a", (int64_t)offset);
        CHECK_EQUAL(kvl_isolated(touch, &call, sizeof call), KVL_E_DAMAGED);
        cut("a", KVL_FILE_BYTES);
        CHECK_EQUAL(kvl_isolated(touch, &call, sizeof call), 7);
        same_signals("an isolated store");
    }
    kvl_close(ledger);
}

/* Children */

static volatile sig_atomic_t deaths;

static void count_deaths(int number)
{
    (void)number;
    deaths++;
}

static void raise_often(int times)
{
    static uint32_t revision;
    kvl_ledger *publisher = open_ledger("a", 1);
    struct kvl_audit record = {.after = 1};
    uint64_t found;
    for (int i = 0; i < times; i++) {
        CHECK_EQUAL(kvl_raise(publisher, 0, 1, KVL_LIMIT, word_of(++revision, 1), 0, &record, &found), KVL_RAISED);
        CHECK_EQUAL(kvl_audit_write(publisher, &record), 0);
    }
    kvl_close(publisher);
}

TEST(no_child_is_seen, "A publication raises no SIGCHLD and leaves no zombie, whatever the process does with SIGCHLD.")
{
    if (emulated()) {
        return;
    }
    make("a");
    (void)register_as(open_ledger("a", 1), "x", 1, 0);
    void (*const handlers[])(int) = {count_deaths, SIG_DFL, SIG_IGN};
    for (int i = 0; i < 3; i++) {
        CHECK(signal(SIGCHLD, handlers[i]) != SIG_ERR);
        raise_often(50);
        siginfo_t info;
        CHECK_EQUAL(waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL), -1);
        CHECK_EQUAL(errno, ECHILD);
    }
    CHECK_EQUAL(deaths, 0);
}

static void *wait_for_any(void *argument)
{
    int status;
    *(pid_t *)argument = waitpid(-1, &status, 0);
    return NULL;
}

static void be_waited_for(void *argument)
{
    const _Atomic int *go = argument;
    while (*go == 0) {
        usleep(1000);
    }
}

TEST(no_strangers_wait_ends, "A thread that waits for any child gets its own one, not the ones of publications.")
{
    if (emulated()) {
        return;
    }
    make("a");
    (void)register_as(open_ledger("a", 1), "x", 1, 0);
    _Atomic int *go = shared_memory(sizeof *go);
    pid_t child = start(be_waited_for, (void *)go);
    pid_t got = 0;
    pthread_t waiter;
    CHECK_EQUAL(pthread_create(&waiter, NULL, wait_for_any, &got), 0);
    raise_often(100);
    *go = 1;
    CHECK_EQUAL(pthread_join(waiter, NULL), 0);
    CHECK_EQUAL(got, child);
}

static _Atomic int done;

static void *reap_everything(void *argument)
{
    (void)argument;
    while (!done) {
        int status;
        (void)waitpid(-1, &status, WNOHANG | __WALL);
    }
    return NULL;
}

TEST(a_reaper_of_everything, "A publication whose child another thread reaped first still says what became of it.")
{
    if (emulated()) {
        return;
    }
    make("a");
    (void)register_as(open_ledger("a", 1), "x", 1, 0);
    pthread_t reaper;
    CHECK_EQUAL(pthread_create(&reaper, NULL, reap_everything, NULL), 0);
    raise_often(1000);
    done = 1;
    CHECK_EQUAL(pthread_join(reaper, NULL), 0);
}

/* Signals that arrive meanwhile */

static _Atomic int arrived;
static pid_t own_pid;

static void arrive(int number)
{
    (void)number;
    if (getpid() == own_pid) {
        arrived++;
    } else {
        arrived = -1000000;
    }
}

static void *signal_often(void *argument)
{
    const pthread_t *target = argument;
    while (!done) {
        (void)pthread_kill(*target, SIGUSR1);
        usleep(50);
    }
    return NULL;
}

TEST(signals_meanwhile, "Signals that arrive during publications are handled in the process, never in their children.")
{
    make("a");
    (void)register_as(open_ledger("a", 1), "x", 1, 0);
    own_pid = getpid();
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = arrive;
    action.sa_flags = SA_RESTART;
    CHECK_EQUAL(sigaction(SIGUSR1, &action, NULL), 0);
    pthread_t self = pthread_self();
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, signal_often, &self), 0);
    raise_often(300);
    done = 1;
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(arrived > 0);
}

/* One handle, many threads */

struct shared {
    kvl_ledger *owner;
    kvl_ledger *publisher;
    int64_t end;
};

static void *use_publisher(void *argument)
{
    const struct shared *shared = argument;
    struct kvl_audit record = {.after = 1};
    while (monotonic_ns() < shared->end) {
        struct kvl_slot slot;
        struct kvl_audit records[KVL_AUDIT_RECORDS];
        uint64_t found;
        CHECK_EQUAL(kvl_read_slot(shared->publisher, 0, &slot), KVL_ALIVE);
        uint64_t word = word_of(revision_in(slot.desired[KVL_LIMIT]) + 1, 1);
        CHECK(kvl_raise(shared->publisher, 0, 1, KVL_LIMIT, word, 0, &record, &found) >= 0);
        CHECK_EQUAL(kvl_ring(shared->publisher, KVL_PUBLISHED), 0);
        CHECK(kvl_audit_read(shared->publisher, records, &found) > 0);
    }
    return NULL;
}

static void *use_owner(void *argument)
{
    const struct shared *shared = argument;
    const kvl_ledger *one = shared->owner;
    uint32_t revision = 0;
    while (monotonic_ns() < shared->end) {
        uint64_t word;
        uint32_t count;
        if (kvl_agree(&one, 1, KVL_LIMIT, &word) == 1) {
            CHECK(revision_in(word) >= revision);
            revision = revision_in(word);
        }
        int checked = kvl_check(shared->owner, here, "a", REVISIONS(revision, 0));
        CHECK(checked == 0 || checked == KVL_E_UNLOCKED);
        CHECK_EQUAL(kvl_bell(shared->owner, KVL_PUBLISHED, &count), 0);
        (void)kvl_wait(shared->owner, KVL_PUBLISHED, count, monotonic_ns() + 1000000);
    }
    return NULL;
}

TEST(one_handle_many_threads, "Threads use one handle at once, up to an unregistration beside their looks.")
{
    if (emulated()) { /* its forks may hang beside threads */
        return;
    }
    make("a");
    struct shared shared = {open_ledger("a", 1), open_ledger("a", 1), monotonic_ns() + stress_ns()};
    struct kvl_report report = {.idle = 1};
    struct kvl_identity identity = identity_of("x");
    pthread_t early;
    CHECK_EQUAL(pthread_create(&early, NULL, use_owner, &shared), 0);
    CHECK_EQUAL(kvl_register(shared.owner, &identity, 1, WORDS(0, 0), NULL), 0);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, i < 2 ? use_publisher : use_owner, &shared), 0);
    }
    while (monotonic_ns() < shared.end) {
        CHECK_EQUAL(kvl_acknowledge(shared.owner, &report), 0);
    }
    CHECK_EQUAL(pthread_join(threads[0], NULL), 0);
    CHECK_EQUAL(pthread_join(threads[1], NULL), 0);
    CHECK_EQUAL(kvl_unregister(shared.owner), 0);
    CHECK_EQUAL(pthread_join(threads[2], NULL), 0);
    CHECK_EQUAL(pthread_join(threads[3], NULL), 0);
    CHECK_EQUAL(pthread_join(early, NULL), 0);
    kvl_close(shared.owner);
    kvl_close(shared.publisher);
}
