/* SPDX-License-Identifier: Apache-2.0
 *
 * test_crash.c - a process is killed, or stopped, at every step of every operation that writes; then all others must
 * finish theirs within PATIENCE_NS, find the old state, the new one or a split, and heal it. Only in builds with
 * KVL_CRASH_POINTS.
 */
#include "check.h"

#ifdef KVL_CRASH_POINTS

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What is promised is 100 ms. A build under a sanitizer on a loaded machine is given more; the longest is noted. */
#define PROMISED_NS INT64_C(100000000)
#define PATIENCE_NS (20 * PROMISED_NS)

enum { GHOSTS = 3, MAX_POINTS = 400 };

#define OLD word_of(1, 100)
#define NEW word_of(2, 200)
#define HEALED word_of(3, 300)

/* What the crashing process says of itself. Some points lie in the child that makes a store for it: the parent of such a
 * child sleeps until it ends, and is killed or stopped with it. */
static struct said {
    _Atomic int countdown;
    _Atomic pid_t inner;
} *said;
static pid_t victim;
static int fatal_signal;

static void crash_at_countdown(const char *point)
{
    (void)point;
    if (said->countdown == 0 || --said->countdown != 0) {
        return;
    }
    kill(victim, fatal_signal);
    if (getpid() != victim) {
        said->inner = getpid();
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
    report.answers[KVL_LIMIT].applied = number;
    report.answers[KVL_CAP].applied = ~number;
    report.idle = report.active = report.capacity = report.evicted = (int64_t)number;
    report.eviction_errors = report.answers[KVL_LIMIT].outcome = (uint32_t)number;
    report.answers[KVL_LIMIT].settled_revision = (uint32_t)number;
    snprintf(report.answers[KVL_CAP].reason, KVL_REASON_BYTES, "report %llu", (unsigned long long)number);
    return report;
}

static int is_report(const struct kvl_report *report, uint64_t number)
{
    struct kvl_report expected = report_of(number);
    expected.reported_ns = report->reported_ns;
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
        (void)register_as(ghosts[i], "ghost", 666 + i, word_of(66, 66));
        CHECK_EQUAL(kvl_acknowledge(ghosts[i], &report), 0);
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
        CHECK(result == KVL_DEAD || result == KVL_ALIVE);
        if (result == KVL_DEAD) {
            continue;
        }
        int is_engine = strcmp(slot.identity.instance, "engine") == 0 && slot.incarnation == 1;
        int is_newcomer = strcmp(slot.identity.instance, "newcomer") == 0 && slot.incarnation == 2;
        CHECK(is_engine || is_newcomer);
        CHECK(is_engine == (i == scene->slot));
        CHECK(is_engine || slot.desired[KVL_LIMIT] == NEW);
        newcomers += is_newcomer;
    }
    CHECK(newcomers <= 1);
    return newcomers;
}

static void check_records(const kvl_ledger *ledger)
{
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t written;
    int count = kvl_audit_read(ledger, records, &written);
    CHECK(count >= 0);
    for (int i = 0; i < count; i++) {
        CHECK(records[i].before == OLD || records[i].before == NEW);
        CHECK(records[i].after == NEW || records[i].after == HEALED);
    }
}

static void others_register(void)
{
    int64_t started = monotonic_ns();
    kvl_ledger *other = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    struct kvl_slot slot;
    uint32_t index = register_as(other, "other", 77, OLD);
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK_EQUAL(slot.incarnation, 77);
    CHECK_EQUAL(kvl_unregister(other), 0);
    kvl_close(other);
    kvl_close(observer);
    timed(started, "registering");
}

static void others_publish(const struct scene *scene, uint64_t before)
{
    uint64_t found = 0;
    struct kvl_audit record = {.program = "other"};
    struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t written;
    uint32_t seen;
    CHECK_EQUAL(kvl_bell(scene->engine, KVL_PUBLISHED, &seen), 0);
    CHECK_EQUAL(kvl_raise(scene->publisher, scene->slot, 1, KVL_LIMIT, HEALED, 0, &record, &found), KVL_RAISED);
    CHECK(found == before);
    CHECK_EQUAL(kvl_ring(scene->publisher, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_wait(scene->engine, KVL_PUBLISHED, seen, monotonic_ns() + PATIENCE_NS), 0);
    CHECK(kvl_audit_read(scene->publisher, records, &written) >= 1);
    CHECK(records[0].before == before && records[0].after == HEALED);
}

static void others_go_on(const struct scene *scene)
{
    int64_t started = monotonic_ns();
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(scene->publisher, scene->slot, &slot), KVL_ALIVE);
    CHECK(slot.desired[KVL_LIMIT] == OLD || slot.desired[KVL_LIMIT] == NEW);
    (void)check_slots(scene);
    check_records(scene->publisher);
    timed(started, "reading");

    started = monotonic_ns();
    struct kvl_report report = report_of(5);
    CHECK_EQUAL(kvl_acknowledge(scene->engine, &report), 0);
    CHECK_EQUAL(kvl_ring(scene->engine, KVL_ACKNOWLEDGED), 0);
    CHECK_EQUAL(kvl_check(scene->engine, here, "a", REVISIONS(revision_in(slot.desired[KVL_LIMIT]), 0)), 0);
    timed(started, "acknowledging");

    started = monotonic_ns();
    others_publish(scene, slot.desired[KVL_LIMIT]);
    timed(started, "publishing");

    const kvl_ledger *engine = scene->engine;
    uint64_t word = 0;
    CHECK_EQUAL(kvl_agree(&engine, 1, KVL_LIMIT, &word), 1);
    CHECK(word == HEALED);
    others_register();
}

static int current_point;

/* Called by an operation when its preparation is done: from here on points are counted. */
static void begin(void)
{
    said->countdown = current_point;
}

static int is_stopped(pid_t process)
{
    char path[64];
    char state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        CHECK_EQUAL(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
        fclose(file);
    }
    return state == 'T';
}

/* Wait until the process was killed or stopped (1), or ended by itself (0). One that sleeps until its own child ends
 * cannot be reported as stopped. */
static int await_crash(pid_t child)
{
    for (;;) {
        int status = 0;
        pid_t changed = waitpid(child, &status, WUNTRACED | WNOHANG);
        CHECK(changed >= 0);
        if (changed == child && WIFEXITED(status)) {
            CHECK_EQUAL(WEXITSTATUS(status), 0);
            return 0;
        }
        if (changed == child) {
            CHECK(WIFSTOPPED(status) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
            return 1;
        }
        if (fatal_signal == SIGSTOP && said->inner != 0 && is_stopped(said->inner)) {
            return 1;
        }
        usleep(200);
    }
}

/* Run `operation` in a process that gets `number` at its point `current_point`. 0 if it ended before that. */
static int crash(void (*operation)(void *), void *argument, int number, pid_t *child)
{
    fflush(stdout);
    said->countdown = 0;
    said->inner = 0;
    fatal_signal = number;
    *child = fork();
    CHECK(*child >= 0);
    if (*child == 0) {
        victim = getpid();
        kvl_crash_hook = crash_at_countdown;
        operation(argument);
        _exit(0);
    }
    return await_crash(*child);
}

static void go_on(pid_t child)
{
    kill(child, SIGCONT);
    if (said->inner != 0) {
        kill(said->inner, SIGCONT);
    }
}

static void end_stopped(pid_t child)
{
    if (said->inner != 0) {
        kill(said->inner, SIGKILL);
    }
    finish_off(child);
}

/* Crash at every point with both signals; `check` runs after each with whether the process is only stopped. */
static void at_every_point(void (*operation)(void *), int points, void (*check)(struct scene *, int stopped))
{
    const int signals[] = {SIGKILL, SIGSTOP};
    said = shared_memory(sizeof *said);
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
                    end_stopped(child);
                    others_register();
                }
            }
            close_scene(&scene);
            if (!crashed) {
                break;
            }
        }
        CHECK_EQUAL(point - 1, points);
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
    at_every_point(do_register, 4, check_after_register);
}

static void do_register_anew(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("newcomer");
    struct kvl_report report = report_of(30);
    begin();
    CHECK(kvl_register(ledger, &identity, 2, WORDS(NEW, HEALED), &report) >= 0);
}

static void check_after_register_anew(struct scene *scene, int stopped)
{
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        struct kvl_slot slot;
        if (kvl_read_slot(scene->publisher, i, &slot) == KVL_ALIVE && slot.incarnation == 2) {
            CHECK(is_report(&slot.report, 30) && slot.desired[KVL_CAP] == HEALED);
        }
    }
    check_after_register(scene, stopped);
}

TEST(crash_in_register_anew, "An engine that registers with a report is seen with it, or not at all.")
{
    at_every_point(do_register_anew, 4, check_after_register_anew);
}

/* publish */

static void do_publish(void *argument)
{
    const struct scene *scene = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record = {.note = "of the one that crashed"};
    uint64_t found;
    begin();
    CHECK_EQUAL(kvl_raise(ledger, scene->slot, 1, KVL_LIMIT, NEW, 0, &record, &found), KVL_RAISED);
    CHECK_EQUAL(kvl_ring(ledger, KVL_PUBLISHED), 0);
}

/* For an engine that may be another one by the time this goes on. */
static void do_raise(void *argument)
{
    const struct scene *scene = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    uint64_t found;
    begin();
    (void)kvl_raise(ledger, scene->slot, 1, KVL_LIMIT, NEW, 0, NULL, &found);
}

static void check_after_publish(struct scene *scene, int stopped)
{
    (void)stopped;
    others_go_on(scene);
}

enum { POINTS_OF_A_RECORD = 1 + AUDIT_WORDS, POINTS_OF_A_RAISE = 5 };

TEST(crash_in_publish, "A publisher killed or stopped anywhere leaves the old pair or the new one, and the next one heals.")
{
    at_every_point(do_publish, POINTS_OF_A_RAISE + POINTS_OF_A_RECORD + 1, check_after_publish);
}

TEST(stopped_publisher_of_a_dead_engine, "A publisher stopped anywhere keeps the slot from the next owner, who takes "
                                         "another one, and writes to nobody when it goes on.")
{
    said = shared_memory(sizeof *said);
    for (int point = 1;; point++) {
        struct scene scene = make_scene();
        pid_t child;
        current_point = point;
        int crashed = crash(do_raise, &scene, SIGSTOP, &child);
        kvl_close(scene.engine);
        kvl_close(scene.publisher);
        if (!crashed) {
            CHECK_EQUAL(point - 1, POINTS_OF_A_RAISE);
            break;
        }
        kvl_ledger *owners[GHOSTS + 2];
        for (uint32_t i = 0; i < GHOSTS + 2; i++) { /* as many as reach beyond the slot of the dead engine */
            owners[i] = open_ledger("a", 1);
            (void)register_as(owners[i], "engine", 3 + i, OLD);
        }
        go_on(child);
        join(child);
        for (uint32_t i = 0; i < GHOSTS + 2; i++) {
            uint64_t word;
            CHECK_EQUAL(kvl_desired(owners[i], (uint32_t)owners[i]->slot, 3 + i, KVL_LIMIT, &word), 0);
            CHECK(word == OLD);
            kvl_close(owners[i]);
        }
    }
}

/* publish a cap */

static void do_raise_cap(void *argument)
{
    const struct scene *scene = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    uint64_t found;
    begin();
    CHECK_EQUAL(kvl_raise(ledger, scene->slot, 1, KVL_CAP, NEW, 0, NULL, &found), KVL_RAISED);
}

static void check_after_raise_cap(struct scene *scene, int stopped)
{
    struct kvl_slot slot;
    (void)stopped;
    CHECK_EQUAL(kvl_read_slot(scene->publisher, scene->slot, &slot), KVL_ALIVE);
    CHECK(slot.desired[KVL_LIMIT] == OLD && (slot.desired[KVL_CAP] == 0 || slot.desired[KVL_CAP] == NEW));
    others_go_on(scene);
}

TEST(crash_in_publishing_a_cap, "A publisher of a cap killed or stopped anywhere leaves the limit, and hinders none of one.")
{
    at_every_point(do_raise_cap, POINTS_OF_A_RAISE, check_after_raise_cap);
}

/* record */

static void do_record(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record = {.before = OLD, .after = NEW};
    begin();
    CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
}

TEST(crash_in_record, "A record whose writer was killed or stopped anywhere is whole or left out, and hinders nobody.")
{
    at_every_point(do_record, POINTS_OF_A_RECORD, check_after_publish);
}

/* acknowledge */

static void do_acknowledge(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    (void)register_as(ledger, "newcomer", 2, NEW);
    struct kvl_report report = report_of(10);
    CHECK_EQUAL(kvl_acknowledge(ledger, &report), 0);
    report = report_of(20);
    begin();
    CHECK_EQUAL(kvl_acknowledge(ledger, &report), 0);
    CHECK_EQUAL(kvl_ring(ledger, KVL_ACKNOWLEDGED), 0);
}

static void check_after_acknowledge(struct scene *scene, int stopped)
{
    CHECK_EQUAL(check_slots(scene), stopped);
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        struct kvl_slot slot;
        if (kvl_read_slot(scene->publisher, i, &slot) == KVL_ALIVE && slot.incarnation == 2) {
            CHECK(is_report(&slot.report, 10) || is_report(&slot.report, 20));
        }
    }
    others_go_on(scene);
}

TEST(crash_in_acknowledge, "A report whose writer was killed or stopped is the old one or the new one.")
{
    at_every_point(do_acknowledge, 3, check_after_acknowledge);
}

/* unregister */

static void do_unregister(void *argument)
{
    (void)argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    (void)register_as(ledger, "newcomer", 2, NEW);
    begin();
    CHECK_EQUAL(kvl_unregister(ledger), 0);
}

TEST(crash_in_unregister, "An engine killed or stopped while it gives its slot up is there or gone.")
{
    at_every_point(do_unregister, 1, check_after_register);
}

/* create */

static void do_create(void *argument)
{
    (void)argument;
    (void)unlinkat(here, "new", 0);
    begin();
    CHECK_EQUAL(kvl_create(here, "new", 0640), 1);
}

static int names_here(void)
{
    int found = 0;
    DIR *directory = fdopendir(openat(here, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    CHECK(directory != NULL);
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory)) {
        found += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    }
    closedir(directory);
    return found;
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
    CHECK_EQUAL(names_here(), found == 0 ? 2 : 1);
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

TEST(crash_in_create, "A ledger whose creation was cut short is missing or whole, leaves no other name, and can be made.")
{
    at_every_point(do_create, 3, check_after_create);
}

/* Creation against another creation */

static void get_ahead(const char *point)
{
    if (strcmp(point, "create:filled") == 0) {
        CHECK_EQUAL(renameat(here, "other", here, "new"), 0);
    }
}

TEST(overtaken_creation, "A creation that another one overtakes leaves that file as it is and no other name.")
{
    make("other");
    struct bytes bytes = bytes_of("other");
    kvl_crash_hook = get_ahead;
    CHECK_EQUAL(kvl_create(here, "new", 0600), 0);
    kvl_crash_hook = NULL;
    struct bytes after = bytes_of("new");
    CHECK_EQUAL(memcmp(&bytes, &after, sizeof bytes), 0);
    CHECK_EQUAL(names_here(), 1);
    kvl_close(open_ledger("new", 1));
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

static void remove_it(const char *point)
{
    if (strcmp(point, "open:checked") == 0) {
        CHECK_EQUAL(unlinkat(here, "a", 0), 0);
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
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), KVL_E_REPLACED);
    kvl_crash_hook = remove_it;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), KVL_E_REPLACED);
    kvl_crash_hook = NULL;
    CHECK(ledger == NULL);
}

/* A look against whoever comes and goes */

static kvl_ledger *leaving;

static void change_hands(const char *point)
{
    if (strcmp(point, "read:copied") != 0 || leaving == NULL) {
        return;
    }
    kvl_close(leaving);
    leaving = NULL;
    (void)register_as(open_ledger("a", 1), "next", 2, 0);
}

TEST(nobody_gets_anothers_life, "A slot that changes hands while it is read is read as dead or as the new owner's.")
{
    make("a");
    kvl_ledger *observer = open_ledger("a", 0);
    leaving = open_ledger("a", 1);
    uint32_t index = register_as(leaving, "old", 1, 0);
    kvl_crash_hook = change_hands;
    struct kvl_slot slot;
    int result = kvl_read_slot(observer, index, &slot);
    kvl_crash_hook = NULL;
    CHECK(leaving == NULL);
    CHECK(result == KVL_DEAD || (result == KVL_ALIVE && slot.incarnation == 2));
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), KVL_ALIVE);
    CHECK(strcmp(slot.identity.instance, "next") == 0);
}

/* Two threads that publish through one handle */

static _Atomic int reached;
static _Atomic int may_go_on;

static void hold_the_swap(const char *point)
{
    if (strcmp(point, "swap:read") == 0 && atomic_exchange(&reached, 1) == 0) {
        while (!may_go_on) {
            usleep(100);
        }
    }
}

static void own_and_wait(void *argument)
{
    (void)register_as(open_ledger("a", 1), "x", 1, OLD);
    *(_Atomic int *)argument = 1;
    pause();
}

static void *raise_high(void *argument)
{
    uint64_t found;
    (void)kvl_raise(argument, 0, 1, KVL_LIMIT, HEALED, 0, NULL, &found);
    return NULL;
}

static void *raise_low(void *argument)
{
    uint64_t found;
    (void)kvl_raise(argument, 0, 1, KVL_LIMIT, word_of(0, 1), 0, NULL, &found);
    return NULL;
}

TEST(one_lock_for_two_publishers, "A thread that has published does not unlock the slot for another one with its handle.")
{
    make("a");
    _Atomic int *ready = shared_memory(sizeof *ready);
    pid_t owner = start(own_and_wait, (void *)ready);
    kvl_ledger *publisher = open_ledger("a", 1);
    while (*ready == 0) {
        usleep(100);
    }
    kvl_crash_hook = hold_the_swap;
    pthread_t first;
    pthread_t second;
    CHECK_EQUAL(pthread_create(&first, NULL, raise_high, publisher), 0);
    while (!reached) {
        usleep(100);
    }
    CHECK_EQUAL(pthread_create(&second, NULL, raise_low, publisher), 0);
    usleep(100000); /* enough for the second one to be through, or to wait for the first one */
    finish_off(owner);
    kvl_ledger *next = open_ledger("a", 1);
    uint32_t slot = register_as(next, "y", 2, OLD);
    may_go_on = 1;
    CHECK_EQUAL(pthread_join(first, NULL), 0);
    CHECK_EQUAL(pthread_join(second, NULL), 0);
    kvl_crash_hook = NULL;
    uint64_t word;
    CHECK_EQUAL(kvl_desired(next, slot, 2, KVL_LIMIT, &word), 0);
    CHECK(word == OLD);
    CHECK(slot != 0);
}

/* A registration whose last step fails */

static kvl_ledger *registering;
static int filtered;

static void refuse_the_last_step(const char *point)
{
    if (strcmp(point, "register:written") == 0) {
        filtered = refuse_fcntl(F_OFD_SETLK, registering->fd, ENOLCK);
    } else if (strcmp(point, "register:open") == 0) {
        registering->fd = dup(registering->fd); /* the same locks, but no filter: from here on it works again */
    }
}

TEST(no_lock_at_the_last_step, "A registration that the kernel refuses at its last step, where it splits a lock, is undone.")
{
    make("a");
    kvl_ledger *other = open_ledger("a", 1);
    struct kvl_identity identity = identity_of("x");
    registering = open_ledger("a", 1);
    kvl_crash_hook = refuse_the_last_step;
    int result = kvl_register(registering, &identity, 1, WORDS(0, 0), NULL);
    kvl_crash_hook = NULL;
    if (!filtered) {
        return;
    }
    struct kvl_slot slot;
    CHECK_EQUAL(result, -ENOLCK);
    CHECK_EQUAL(kvl_read_slot(other, 0, &slot), KVL_DEAD);
    CHECK_EQUAL(kvl_is_owned(other, 0, 1), 0);
    CHECK_EQUAL(kvl_unregister(registering), -EBADF);
    CHECK_EQUAL(register_as(other, "y", 2, 0), 0);       /* the slot is free, */
    CHECK_EQUAL(register_as(registering, "x", 1, 0), 1); /* and the handle can try again */
}

#endif /* KVL_CRASH_POINTS */
