/* SPDX-License-Identifier: Apache-2.0
 *
 * test_crash.c - a process is killed, or stopped, at every store and system call of every operation that writes; then all
 * others must finish theirs within PATIENCE_NS, find the old state, the new one or a split, and heal it. Only in builds
 * with KVL_CRASH_POINTS.
 */
#ifdef KVL_CRASH_POINTS

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* What is promised is 100 ms. A build under a sanitizer on a loaded machine is given more; the longest is noted. */
#define PROMISED_NS INT64_C(100000000)
#define PATIENCE_NS (20 * PROMISED_NS)

enum { GHOSTS = 3, MAX_POINTS = 400 };

#define OLD word_of(1, 100)
#define NEW word_of(2, 200)
#define HEALED word_of(3, 300)

static int countdown;
static int fatal_signal;

static void crash_at_countdown(const char *point)
{
    (void)point;
    if (countdown > 0 && --countdown == 0) {
        kill(getpid(), fatal_signal);
    }
}

/* The scene: dead slots that show who was there, and a live engine. */

struct scene {
    kvl_ledger *engine;
    kvl_ledger *publisher;
    uint32_t slot;
};

static struct kvl_report report_of(uint64_t number)
{
    struct kvl_report report;
    memset(&report, 0, sizeof report);
    report.applied = number;
    report.idle = report.active = report.capacity = report.evicted = (int64_t)number;
    report.eviction_errors = report.outcome = report.settled_revision = (uint32_t)number;
    snprintf(report.reason, sizeof report.reason, "report %llu", (unsigned long long)number);
    return report;
}

static int is_report(const struct kvl_report *report, uint64_t number)
{
    struct kvl_report expected = report_of(number);
    expected.reported_ns = report->reported_ns;
    expected.consistent = 1;
    return memcmp(report, &expected, sizeof expected) == 0;
}

static struct scene make_scene(void)
{
    (void)unlinkat(here, "a", 0);
    make("a");
    kvl_ledger *ghosts[GHOSTS];
    for (uint64_t i = 0; i < GHOSTS; i++) {
        struct kvl_report report = report_of(66);
        ghosts[i] = open_ledger("a", 1);
        CHECK_EQUAL(kvl_acknowledge(ghosts[i], register_as(ghosts[i], "ghost", 666 + i, word_of(66, 66)), &report), 0);
    }
    struct scene scene = {.engine = open_ledger("a", 1), .publisher = open_ledger("a", 1)};
    scene.slot = register_as(scene.engine, "engine", 1, OLD);
    for (int i = 0; i < GHOSTS; i++) {
        kvl_close(ghosts[i]);
    }
    return scene;
}

static void close_scene(struct scene *scene)
{
    kvl_close(scene->engine);
    kvl_close(scene->publisher);
}

/* What others do meanwhile */

static int64_t longest_ns;

static void timed(int64_t started, const char *what)
{
    int64_t took = monotonic_ns() - started;
    longest_ns = took > longest_ns ? took : longest_ns;
    if (took > PATIENCE_NS) {
        fail_at(__FILE__, __LINE__, "%s took %lld ms", what, (long long)took / 1000000);
    }
}

/* Nobody is alive but the two of this scene, each as one owner wrote it. */
static int check_slots(const struct scene *scene)
{
    int newcomers = 0;
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        struct kvl_slot slot;
        int result = kvl_read_slot(scene->publisher, i, &slot);
        CHECK(result == 0 || result == 1);
        if (result == 0) {
            continue;
        }
        int is_engine = strcmp(slot.identity.instance, "engine") == 0 && slot.incarnation == 1;
        int is_newcomer = strcmp(slot.identity.instance, "newcomer") == 0 && slot.incarnation == 2;
        CHECK(is_engine || is_newcomer);
        CHECK(is_engine == (i == scene->slot));
        CHECK(is_engine || slot.desired == NEW);
        newcomers += is_newcomer;
    }
    CHECK(newcomers <= 1);
    return newcomers;
}

static void check_records(const kvl_ledger *ledger)
{
    for (uint32_t i = 0; i < KVL_AUDIT_RECORDS; i++) {
        struct kvl_audit record;
        if (kvl_audit_read(ledger, i, &record) == 1) {
            CHECK(record.before == OLD || record.before == NEW);
            CHECK(record.after == NEW || record.after == HEALED);
        }
    }
}

static void others_register(void)
{
    int64_t started = monotonic_ns();
    kvl_ledger *other = open_ledger("a", 1);
    struct kvl_slot slot;
    uint32_t index = register_as(other, "other", 77, OLD);
    kvl_ledger *observer = open_ledger("a", 0);
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    CHECK_EQUAL(slot.incarnation, 77);
    CHECK_EQUAL(kvl_unregister(other, index), 0);
    kvl_close(other);
    kvl_close(observer);
    timed(started, "registering");
}

static void others_go_on(const struct scene *scene)
{
    int64_t started = monotonic_ns();
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(scene->publisher, scene->slot, &slot), 1);
    CHECK(slot.desired == OLD || slot.desired == NEW);
    CHECK(slot.report.consistent == 1);
    (void)check_slots(scene);
    check_records(scene->publisher);
    timed(started, "reading");

    started = monotonic_ns();
    struct kvl_report report = report_of(5);
    CHECK_EQUAL(kvl_acknowledge(scene->engine, scene->slot, &report), 0);
    kvl_ring(scene->engine, KVL_ACKNOWLEDGED);
    timed(started, "acknowledging");

    started = monotonic_ns();
    uint64_t found = 0;
    struct kvl_audit record = {.before = slot.desired, .after = HEALED};
    uint32_t seen = kvl_bell(scene->engine, KVL_PUBLISHED);
    CHECK_EQUAL(kvl_raise(scene->publisher, scene->slot, 1, HEALED, &found), KVL_RAISED);
    CHECK(found == slot.desired);
    kvl_ring(scene->publisher, KVL_PUBLISHED);
    CHECK_EQUAL(kvl_audit_write(scene->publisher, &record), 0);
    CHECK_EQUAL(kvl_wait(scene->engine, KVL_PUBLISHED, seen, monotonic_ns() + PATIENCE_NS), 0);
    timed(started, "publishing");

    const uint64_t *place = kvl_desired_word(scene->engine, scene->slot);
    uint64_t word = 0;
    CHECK_EQUAL(kvl_agree(&place, 1, &word), 1);
    CHECK(word == HEALED);
    CHECK_EQUAL(kvl_audit_read(scene->publisher, 0, &record), 1);
    CHECK(record.after == HEALED);
    others_register();
}

static int current_point;

/* Called by an operation when its preparation is done: from here on points are counted. */
static void begin(void)
{
    countdown = current_point;
}

/* Run `operation` in a process that gets `number` at its point `current_point`. 0 if it ended before that. */
static int crash(void (*operation)(void *), void *argument, int number, pid_t *child)
{
    fflush(stdout);
    *child = fork();
    if (*child == 0) {
        fatal_signal = number;
        kvl_crash_hook = crash_at_countdown;
        operation(argument);
        _exit(0);
    }
    int status = 0;
    CHECK_EQUAL(waitpid(*child, &status, WUNTRACED), *child);
    if (WIFEXITED(status)) {
        CHECK_EQUAL(WEXITSTATUS(status), 0);
        return 0;
    }
    CHECK(WIFSTOPPED(status) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    return 1;
}

/* Crash at every point with both signals; `check` runs after each with whether the process is only stopped. */
static void at_every_point(void (*operation)(void *), int least, void (*check)(struct scene *, int stopped))
{
    const int signals[] = {SIGKILL, SIGSTOP};
    for (int way = 0; way < 2; way++) {
        int point = 1;
        for (;; point++) {
            CHECK(point < MAX_POINTS);
            struct scene scene = make_scene();
            pid_t child;
            current_point = point;
            int crashed = crash(operation, &scene, signals[way], &child);
            if (crashed) {
                check(&scene, signals[way] == SIGSTOP);
                if (signals[way] == SIGSTOP) {
                    finish_off(child);
                    others_register();
                }
            }
            close_scene(&scene);
            if (!crashed) {
                break;
            }
        }
        CHECK(point > least);
        note("%d points with signal %d, longest operation of others %.1f ms (promised: 100 ms)", point - 1,
             signals[way], (double)longest_ns / 1e6);
    }
}

/* register */

static void do_register(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    begin();
    (void)register_as(ledger, "newcomer", 2, NEW);
}

static void check_after_register(struct scene *scene, int stopped)
{
    CHECK(check_slots(scene) == 0 || stopped);
    others_go_on(scene);
}

TEST(crash_in_register, "An engine killed or stopped anywhere in its registration hinders nobody, and is seen whole or not.")
{
    at_every_point(do_register, 40, check_after_register);
}

/* publish */

static void do_publish(void *argument)
{
    const struct scene *scene = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record = {.before = OLD, .after = NEW};
    uint64_t found;
    begin();
    CHECK_EQUAL(kvl_raise(ledger, scene->slot, 1, NEW, &found), KVL_RAISED);
    kvl_ring(ledger, KVL_PUBLISHED);
    CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
}

/* For an engine that may be another one by the time this goes on. */
static void do_raise(void *argument)
{
    const struct scene *scene = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    uint64_t found;
    begin();
    (void)kvl_raise(ledger, scene->slot, 1, NEW, &found);
}

static void check_after_publish(struct scene *scene, int stopped)
{
    (void)stopped;
    others_go_on(scene);
}

TEST(crash_in_publish, "A publisher killed or stopped anywhere leaves the old pair or the new one, and the next one heals.")
{
    at_every_point(do_publish, 20, check_after_publish);
}

TEST(stopped_publisher_of_a_dead_engine, "A publisher stopped in mid-store keeps the slot from the next owner, who takes "
                                         "another one, and writes to nobody when it goes on.")
{
    for (int point = 1;; point++) {
        struct scene scene = make_scene();
        pid_t child;
        current_point = point;
        int crashed = crash(do_raise, &scene, SIGSTOP, &child);
        if (!crashed) {
            close_scene(&scene);
            break;
        }
        kvl_close(scene.engine);
        scene.engine = open_ledger("a", 1);
        uint32_t index = register_as(scene.engine, "engine", 3, OLD);
        kill(child, SIGCONT);
        join(child);
        struct kvl_slot slot;
        CHECK_EQUAL(kvl_read_slot(scene.publisher, index, &slot), 1);
        CHECK(slot.incarnation == 3 && slot.desired == OLD);
        close_scene(&scene);
    }
}

/* acknowledge */

static void do_acknowledge(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    uint32_t slot = register_as(ledger, "newcomer", 2, NEW);
    struct kvl_report report = report_of(10);
    CHECK_EQUAL(kvl_acknowledge(ledger, slot, &report), 0);
    report = report_of(20);
    begin();
    CHECK_EQUAL(kvl_acknowledge(ledger, slot, &report), 0);
    kvl_ring(ledger, KVL_ACKNOWLEDGED);
}

static void check_after_acknowledge(struct scene *scene, int stopped)
{
    CHECK_EQUAL(check_slots(scene), stopped);
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        struct kvl_slot slot;
        if (kvl_read_slot(scene->publisher, i, &slot) == 1 && slot.incarnation == 2 && slot.report.consistent) {
            CHECK(is_report(&slot.report, 10) || is_report(&slot.report, 20));
        }
    }
    others_go_on(scene);
}

TEST(crash_in_acknowledge, "A report cut short is the old one, the new one, or said to be neither.")
{
    at_every_point(do_acknowledge, 20, check_after_acknowledge);
}

/* unregister */

static void do_unregister(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    uint32_t slot = register_as(ledger, "newcomer", 2, NEW);
    begin();
    CHECK_EQUAL(kvl_unregister(ledger, slot), 0);
}

static void check_after_unregister(struct scene *scene, int stopped)
{
    CHECK(check_slots(scene) == 0 || stopped);
    others_go_on(scene);
}

TEST(crash_in_unregister, "An engine killed or stopped while it gives its slot back is there or gone.")
{
    at_every_point(do_unregister, 0, check_after_unregister);
}

/* create */

static void do_create(void *argument)
{
    (void)argument;
    (void)unlinkat(here, "new", 0);
    begin();
    CHECK_EQUAL(kvl_create(here, "new", 0640), 1);
}

static void check_after_create(struct scene *scene, int stopped)
{
    (void)scene;
    (void)stopped;
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    int64_t started = monotonic_ns();
    int found = kvl_open(here, "new", 1, &file, &ledger);
    CHECK(found == 0 || found == -ENOENT);
    kvl_close(ledger);
    CHECK_EQUAL(kvl_create(here, "new", 0640), found == 0 ? 0 : 1);
    ledger = open_ledger("new", 1);
    timed(started, "creating");
    struct stat status;
    CHECK_EQUAL(fstatat(here, "new", &status, 0), 0);
    CHECK_EQUAL(status.st_mode & 07777, 0640);
    CHECK_EQUAL(status.st_nlink, 1);
    CHECK_EQUAL(register_as(ledger, "x", 1, 0), 0);
    kvl_close(ledger);
    CHECK_EQUAL(unlinkat(here, "new", 0), 0);
}

TEST(crash_in_create, "A ledger whose creation was cut short is missing or whole, and the next creation succeeds.")
{
    at_every_point(do_create, 4, check_after_create);
}

/* Creation against whoever tidies up */

static int swept;

/* How many temporary files of a creation there are; with `sweep` they are removed. */
static int temporaries(int sweep)
{
    int found = 0;
    DIR *directory = fdopendir(openat(here, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    CHECK(directory != NULL);
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory)) {
        if (strncmp(entry->d_name, ".new.", 5) == 0) {
            found++;
            CHECK(!sweep || unlinkat(here, entry->d_name, 0) == 0);
        }
    }
    closedir(directory);
    return found;
}

static void sweep_temporaries(const char *point)
{
    if (strcmp(point, "create:filled") == 0 && swept < 5) {
        swept++;
        (void)temporaries(1);
    }
}

TEST(swept_creation, "A creation whose temporary file is tidied away by someone else starts over.")
{
    kvl_crash_hook = sweep_temporaries;
    CHECK_EQUAL(kvl_create(here, "new", 0600), 1);
    CHECK_EQUAL(swept, 5);
    kvl_crash_hook = NULL;
    kvl_close(open_ledger("new", 1));
}

/* Creation against another creation */

static void get_ahead(const char *point)
{
    if (strcmp(point, "create:filled") == 0) {
        kvl_crash_hook = NULL;
        CHECK_EQUAL(kvl_create(here, "new", 0600), 1);
    }
}

static void create_twice(void *argument)
{
    (void)argument;
    kvl_crash_hook = get_ahead;
    CHECK_EQUAL(kvl_create(here, "new", 0600), 0);
    CHECK_EQUAL(temporaries(0), 0);
    kvl_close(open_ledger("new", 1));
    CHECK_EQUAL(unlinkat(here, "new", 0), 0);
}

TEST(overtaken_creation, "A creation that another one overtakes takes that file for its own and leaves nothing.")
{
    create_twice(NULL);
}

/* From now on this process's renames that replace nothing fail, as on an older kernel or another file system. */
static int refuse_renames(uint32_t error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void create_without_renames(void *argument)
{
    if (!refuse_renames(*(uint32_t *)argument)) {
        note("no filter for system calls here: not tested");
        return;
    }
    CHECK_EQUAL(kvl_create(here, "new", 0600), 1);
    CHECK_EQUAL(temporaries(0), 0);
    kvl_close(open_ledger("new", 1));
    CHECK_EQUAL(unlinkat(here, "new", 0), 0);
    create_twice(NULL);
}

TEST(creation_by_links, "Where the kernel or the file system has no rename that replaces nothing, links do.")
{
    uint32_t errors[] = {EINVAL, ENOSYS};
    join(start(create_without_renames, &errors[0]));
    join(start(create_without_renames, &errors[1]));
}

/* Opening against who replaces files */

static void put_symlink(const char *point)
{
    if (strcmp(point, "open:looked") == 0) {
        CHECK_EQUAL(unlinkat(here, "a", 0), 0);
        CHECK_EQUAL(symlinkat("b", here, "a"), 0);
    }
}

static void put_another(const char *point)
{
    if (strcmp(point, "open:checked") == 0) {
        CHECK_EQUAL(renameat(here, "b", here, "a"), 0);
    }
}

TEST(replaced_while_opened, "A file that is replaced while it is opened, by a link or by another ledger, is not used.")
{
    struct kvl_file file;
    kvl_ledger *ledger;
    make("a");
    make("b");
    kvl_crash_hook = put_symlink;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), KVL_E_NOT_REGULAR);
    CHECK_EQUAL(unlinkat(here, "a", 0), 0);
    kvl_crash_hook = NULL;
    make("a");
    kvl_crash_hook = put_another;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), -ESTALE);
    kvl_crash_hook = NULL;
}

/* A look against whoever comes and goes */

static kvl_ledger *leaving;

static void change_hands(const char *point)
{
    if (strcmp(point, "read:copied") != 0 || leaving == NULL) {
        return;
    }
    kvl_release(leaving);
    leaving = NULL;
    (void)register_as(open_ledger("a", 1), "next", 2, 0);
}

TEST(nobody_gets_anothers_life, "A slot that changes hands while it is read is read as the new owner's.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 0);
    leaving = open_ledger("a", 1);
    uint32_t index = register_as(leaving, "old", 1, 0);
    kvl_crash_hook = change_hands;
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    kvl_crash_hook = NULL;
    CHECK(leaving == NULL);
    CHECK_EQUAL(slot.incarnation, 2);
    CHECK(strcmp(slot.identity.instance, "next") == 0);
}

#endif /* KVL_CRASH_POINTS */
