/* SPDX-License-Identifier: Apache-2.0
 *
 * test_stress.c - many threads and processes at once. Each test is about one pair of release and acquire.
 */
#include "check.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MEMBERS = 3, WRITERS = 2, READERS = 2 };

static const char *const files[MEMBERS] = {"m0", "m1", "m2"};

struct run {
    int64_t end;
    kvl_ledger *owners[MEMBERS];
    uint32_t slots[MEMBERS];
    int one_handle; /* the writers share one handle of each member */
    kvl_ledger *handles[MEMBERS];
    _Atomic uint64_t publications;
    _Atomic uint64_t agreements;
    _Atomic uint64_t looks;
};

static int32_t limit_for(uint32_t revision)
{
    return (int32_t)(revision * 2654435761U >> 1);
}

/* desired: release compare-and-swap in order of members, read with the last one first */

static void publish_once(kvl_ledger *const *handles, const struct run *run)
{
    uint32_t newest = 0;
    uint64_t found;
    for (int i = 0; i < MEMBERS; i++) {
        CHECK_EQUAL(kvl_desired(handles[i], run->slots[i], 1, KVL_LIMIT, &found), 0);
        newest = revision_in(found) > newest ? revision_in(found) : newest;
    }
    for (;;) {
        uint64_t word = word_of(newest + 1, limit_for(newest + 1));
        int first = kvl_raise(handles[0], run->slots[0], 1, KVL_LIMIT, word, 0, NULL, &found);
        if (first == KVL_OVERTAKEN) {
            newest = revision_in(found);
            continue;
        }
        CHECK_EQUAL(first, KVL_RAISED);
        for (int i = 1; i < MEMBERS; i++) {
            CHECK(kvl_raise(handles[i], run->slots[i], 1, KVL_LIMIT, word, 0, NULL, &found) >= 0);
        }
        return;
    }
}

static void write_pairs(void *argument)
{
    struct run *run = argument;
    kvl_ledger *handles[MEMBERS];
    for (int i = 0; i < MEMBERS; i++) {
        handles[i] = run->one_handle ? run->handles[i] : open_ledger(files[i], 1);
    }
    do {
        publish_once(handles, run);
        run->publications++;
    } while (monotonic_ns() < run->end);
}

/* A forked reader is no owner: it has handles of its own, which it makes look registered. */
static void open_as_owner(struct run *run, kvl_ledger **owners)
{
    for (int i = 0; i < MEMBERS; i++) {
        owners[i] = open_ledger(files[i], 0);
        owners[i]->slot = (int)run->slots[i];
        owners[i]->incarnation = 1;
    }
}

static void read_pairs(void *argument)
{
    struct run *run = argument;
    kvl_ledger *owners[MEMBERS];
    open_as_owner(run, owners);
    uint32_t before = 0;
    uint32_t floor[MEMBERS] = {0};
    while (monotonic_ns() < run->end) {
        uint64_t word;
        run->looks++;
        if (kvl_agree((const kvl_ledger *const *)owners, MEMBERS, KVL_LIMIT, &word) == 1) {
            CHECK(word == word_of(revision_in(word), limit_for(revision_in(word))) || word == 0);
            CHECK(revision_in(word) >= before);
            before = revision_in(word);
            run->agreements++;
        }
        for (int i = MEMBERS - 1; i >= 0; i--) {
            uint64_t each;
            CHECK_EQUAL(kvl_desired(owners[i], run->slots[i], 1, KVL_LIMIT, &each), 0);
            CHECK(each == 0 || limit_in(each) == limit_for(revision_in(each)));
            CHECK(revision_in(each) >= floor[i]);
            floor[i] = revision_in(each);
            /* Written in order of members: an earlier one is never behind what a later one was seen to hold. */
            CHECK(i == MEMBERS - 1 || floor[i] >= floor[i + 1]);
        }
    }
}

static void set_up(struct run *run, int one_handle)
{
    run->one_handle = one_handle;
    run->end = monotonic_ns() + stress_ns();
    for (int i = 0; i < MEMBERS; i++) {
        make(files[i]);
        run->owners[i] = open_ledger(files[i], 1);
        run->slots[i] = register_as(run->owners[i], "x", 1, 0);
        run->handles[i] = open_ledger(files[i], 1);
    }
}

static void conclude(const struct run *run)
{
    uint64_t word = 0;
    CHECK_EQUAL(kvl_agree((const kvl_ledger *const *)run->owners, MEMBERS, KVL_LIMIT, &word), 1);
    CHECK(revision_in(word) > 0);
    note("%llu publications up to revision %u, %llu looks, %llu of them agreed", (unsigned long long)run->publications,
         revision_in(word), (unsigned long long)run->looks, (unsigned long long)run->agreements);
}

static void *thread_writes(void *argument)
{
    write_pairs(argument);
    return NULL;
}

static void *thread_reads(void *argument)
{
    read_pairs(argument);
    return NULL;
}

static void race_threads(int one_handle)
{
    if (emulated()) { /* its forks may hang beside threads */
        return;
    }
    struct run *run = shared_memory(sizeof *run);
    set_up(run, one_handle);
    pthread_t threads[WRITERS + READERS];
    for (int i = 0; i < WRITERS + READERS; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, i < WRITERS ? thread_writes : thread_reads, run), 0);
    }
    for (int i = 0; i < WRITERS + READERS; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    conclude(run);
}

TEST(pairs_by_threads, "Threads that publish and read never see a torn, mixed or shrinking pair, and end equal.")
{
    race_threads(0);
}

TEST(pairs_through_one_handle, "Threads that publish through one handle never make a torn, mixed or shrinking pair.")
{
    race_threads(1);
}

TEST(pairs_by_processes, "Processes that publish and read never see a torn, mixed or shrinking pair, and end equal.")
{
    struct run *run = shared_memory(sizeof *run);
    set_up(run, 0);
    pid_t children[WRITERS + READERS];
    for (int i = 0; i < WRITERS + READERS; i++) {
        children[i] = start(i < WRITERS ? write_pairs : read_pairs, run);
    }
    for (int i = 0; i < WRITERS + READERS; i++) {
        join(children[i]);
    }
    conclude(run);
}

/* report: written by one pwrite, whole by its seal */

struct reporting {
    int64_t end;
    kvl_ledger *owner;
    uint32_t slot;
    _Atomic uint64_t written;
    _Atomic uint64_t whole;
    _Atomic uint64_t torn;
};

static void fill(struct kvl_report *report, uint64_t number)
{
    memset(report, 0, sizeof *report);
    report->answers[KVL_LIMIT].applied = number;
    report->answers[KVL_CAP].applied = ~number;
    report->idle = report->active = report->capacity = report->evicted = (int64_t)number;
    report->eviction_errors = report->answers[KVL_LIMIT].outcome = (uint32_t)number;
    report->answers[KVL_CAP].settled_revision = (uint32_t)number;
    for (int i = 0; i < KVL_REASON_BYTES / 8; i++) {
        memset(report->answers[KVL_CAP].reason + 8 * i, 'a' + (int)(number % 26), 8);
    }
    report->answers[KVL_CAP].reason[KVL_REASON_BYTES - 1] = '\0';
}

static void write_reports(void *argument)
{
    struct reporting *run = argument;
    struct kvl_report report;
    for (uint64_t number = 1; monotonic_ns() < run->end || number == 1; number++) {
        fill(&report, number);
        CHECK_EQUAL(kvl_acknowledge(run->owner, &report), 0);
        run->written++;
    }
}

static void read_reports(void *argument)
{
    struct reporting *run = argument;
    kvl_ledger *observer = open_ledger("a", 0);
    uint64_t before = 0;
    while (monotonic_ns() < run->end || before == 0) { /* one that came late reads the last report at least */
        struct kvl_slot slot;
        int result = kvl_read_slot(observer, run->slot, &slot);
        CHECK(result == KVL_ALIVE || result == KVL_TORN);
        if (result == KVL_TORN) {
            run->torn++;
            continue;
        }
        if (slot.report.reported_ns == 0) {
            continue;
        }
        struct kvl_report expected;
        fill(&expected, slot.report.answers[KVL_LIMIT].applied);
        expected.reported_ns = slot.report.reported_ns;
        CHECK_EQUAL(memcmp(&expected, &slot.report, sizeof expected), 0);
        CHECK(slot.report.answers[KVL_LIMIT].applied >= before);
        before = slot.report.answers[KVL_LIMIT].applied;
        run->whole++;
    }
}

static void *thread_reads_reports(void *argument)
{
    read_reports(argument);
    return NULL;
}

static struct reporting *set_up_reporting(void)
{
    struct reporting *run = shared_memory(sizeof *run);
    make("a");
    run->owner = open_ledger("a", 1);
    run->slot = register_as(run->owner, "x", 1, 0);
    run->end = monotonic_ns() + stress_ns();
    return run;
}

static void conclude_reporting(const struct reporting *run)
{
    CHECK(run->written > 0 && run->whole > 0);
    note("%llu reports written, %llu read whole, %llu recognised as torn", (unsigned long long)run->written,
         (unsigned long long)run->whole, (unsigned long long)run->torn);
}

TEST(reports_by_threads, "A report that is read as whole by another thread is one report, and never an older one.")
{
    struct reporting *run = set_up_reporting();
    pthread_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        CHECK_EQUAL(pthread_create(&readers[i], NULL, thread_reads_reports, run), 0);
    }
    write_reports(run);
    for (int i = 0; i < READERS; i++) {
        CHECK_EQUAL(pthread_join(readers[i], NULL), 0);
    }
    conclude_reporting(run);
}

TEST(reports_by_processes, "A report that is read as whole by another process is one report, and never an older one.")
{
    struct reporting *run = set_up_reporting();
    pid_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        readers[i] = start(read_reports, run);
    }
    write_reports(run);
    for (int i = 0; i < READERS; i++) {
        join(readers[i]);
    }
    conclude_reporting(run);
}

/* a slot: written in one go by who owns it, alive by its incarnation's lock, looked at again afterwards */

struct churn {
    int64_t end;
    _Atomic uint64_t registrations;
    _Atomic uint64_t sightings;
    _Atomic uint64_t incarnations;
};

static struct kvl_identity identity_for(uint64_t incarnation)
{
    struct kvl_identity identity = identity_of("");
    snprintf(identity.instance, sizeof identity.instance, "%016llx-%016llx", (unsigned long long)incarnation,
             (unsigned long long)incarnation);
    identity.replica = identity.member = identity.members = identity.pid = (uint32_t)incarnation;
    identity.startup_limit = (int32_t)(incarnation & 0x7fffffff);
    return identity;
}

static void register_again_and_again(void *argument)
{
    struct churn *churn = argument;
    do {
        uint64_t incarnation = (atomic_fetch_add(&churn->incarnations, 1) + 1) * UINT64_C(0x9e3779b97f4a7c15);
        kvl_ledger *owner = open_ledger("a", 1);
        struct kvl_identity identity = identity_for(incarnation);
        int slot = kvl_register(owner, &identity, incarnation, WORDS(word_of((uint32_t)incarnation, 1), 0), NULL);
        CHECK(slot >= 0);
        churn->registrations++;
        if (incarnation % 3 == 0) {
            CHECK_EQUAL(kvl_unregister(owner), 0);
        }
        kvl_close(owner);
    } while (monotonic_ns() < churn->end);
}

static void look_at_registrations(void *argument)
{
    struct churn *churn = argument;
    kvl_ledger *observer = open_ledger("a", 1);
    while (monotonic_ns() < churn->end) {
        for (uint32_t i = 0; i < 4; i++) {
            struct kvl_slot slot;
            int result = kvl_read_slot(observer, i, &slot);
            CHECK(result == KVL_DEAD || result == KVL_ALIVE || result == KVL_TORN || result == -EAGAIN);
            if (result != KVL_ALIVE) {
                continue;
            }
            struct kvl_identity expected = identity_for(slot.incarnation);
            expected.pid = slot.identity.pid;
            CHECK_EQUAL(memcmp(&expected, &slot.identity, sizeof expected), 0);
            CHECK_EQUAL(slot.identity.replica, (uint32_t)slot.incarnation);
            CHECK(revision_in(slot.desired[KVL_LIMIT]) == (uint32_t)slot.incarnation || limit_in(slot.desired[KVL_LIMIT]) == 2);
            CHECK_EQUAL(slot.report.idle, 0);
            churn->sightings++;
            uint64_t found;
            int raised = kvl_raise(observer, i, slot.incarnation, KVL_LIMIT, word_of(UINT32_MAX, 2), 0, NULL, &found);
            CHECK(raised == -ESRCH || raised == KVL_RAISED || raised == KVL_OVERTAKEN);
            CHECK(raised != KVL_RAISED || revision_in(found) == (uint32_t)slot.incarnation);
        }
    }
}

TEST(registrations_by_processes, "Slots that change hands all the time are seen as one owner's or nobody's, and are "
                                 "published to for the owner that was meant only.")
{
    make("a");
    struct churn *churn = shared_memory(sizeof *churn);
    churn->end = monotonic_ns() + stress_ns();
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = start(i < 2 ? register_again_and_again : look_at_registrations, churn);
    }
    for (int i = 0; i < 4; i++) {
        join(children[i]);
    }
    CHECK(churn->registrations > 0);
    note("%llu registrations, %llu sightings", (unsigned long long)churn->registrations,
         (unsigned long long)churn->sightings);
}

/* bells: counted by the kernel after what they announce, read before looking for it */

struct rally {
    int rounds;
    _Atomic uint32_t served; /* relaxed: only the bell orders it */
    _Atomic uint32_t returned;
};

static void wait_for(const kvl_ledger *ledger, uint32_t bell, const _Atomic uint32_t *place, uint32_t value)
{
    for (;;) {
        uint32_t seen;
        CHECK_EQUAL(kvl_bell(ledger, bell, &seen), 0);
        if (atomic_load_explicit(place, memory_order_relaxed) == value) {
            return;
        }
        int result = kvl_wait(ledger, bell, seen, monotonic_ns() + INT64_C(20000000000));
        if (result == -ETIMEDOUT) {
            fail_at(__FILE__, __LINE__, "the wake for round %u was lost", value);
        }
        CHECK(result == 0 || result == -EINTR);
    }
}

static void return_balls(void *argument)
{
    struct rally *rally = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    for (uint32_t round = 1; round <= (uint32_t)rally->rounds; round++) {
        wait_for(ledger, KVL_PUBLISHED, &rally->served, round);
        atomic_store_explicit(&rally->returned, round, memory_order_relaxed);
        CHECK_EQUAL(kvl_ring(ledger, KVL_ACKNOWLEDGED), 0);
    }
}

TEST(bells_lose_no_wake, "A rally of thousands of rounds over both doorbells loses no wake and no value.")
{
    make("a");
    struct rally *rally = shared_memory(sizeof *rally);
    rally->rounds = (int)(stress_ns() / 50000);
    pid_t other = start(return_balls, rally);
    kvl_ledger *ledger = open_ledger("a", 1);
    for (uint32_t round = 1; round <= (uint32_t)rally->rounds; round++) {
        atomic_store_explicit(&rally->served, round, memory_order_relaxed);
        CHECK_EQUAL(kvl_ring(ledger, KVL_PUBLISHED), 0);
        wait_for(ledger, KVL_ACKNOWLEDGED, &rally->returned, round);
    }
    join(other);
    note("%d rounds", rally->rounds);
}

static void wait_for_one_ring(void *argument)
{
    _Atomic int *waiting = argument;
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t seen;
    CHECK_EQUAL(kvl_bell(observer, KVL_ACKNOWLEDGED, &seen), 0);
    atomic_fetch_add(waiting, 1);
    uint32_t count = seen;
    while (count == seen) {
        CHECK_EQUAL(kvl_wait(observer, KVL_ACKNOWLEDGED, seen, monotonic_ns() + INT64_C(20000000000)), 0);
        CHECK_EQUAL(kvl_bell(observer, KVL_ACKNOWLEDGED, &count), 0);
    }
}

TEST(one_ring_wakes_all, "One ring wakes every process that waits, also through read-only handles.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    _Atomic int *waiting = shared_memory(sizeof *waiting);
    pid_t children[8];
    for (int i = 0; i < 8; i++) {
        children[i] = start(wait_for_one_ring, (void *)waiting);
    }
    while (*waiting < 8) {
        usleep(1000);
    }
    usleep(20000);
    CHECK_EQUAL(kvl_ring(ledger, KVL_ACKNOWLEDGED), 0);
    for (int i = 0; i < 8; i++) {
        join(children[i]);
    }
}

TEST(waits_end, "A wait ends at its deadline, at once if the bell rang before, and at once if the deadline is past.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    uint32_t seen;
    CHECK_EQUAL(kvl_bell(ledger, KVL_PUBLISHED, &seen), 0);
    int64_t started = monotonic_ns();
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, seen, started + 50000000), -ETIMEDOUT);
    CHECK(monotonic_ns() - started >= 50000000);
    started = monotonic_ns();
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, seen, 0), -ETIMEDOUT);
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, seen, INT64_MIN), -ETIMEDOUT);
    CHECK_EQUAL(kvl_ring(ledger, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_wait(ledger, KVL_PUBLISHED, seen, INT64_MAX), 0);
    CHECK(monotonic_ns() - started < INT64_C(10000000000));
}

/* the record: a seal over ticket and content */

struct recording {
    int64_t end;
    _Atomic uint64_t written;
    _Atomic uint64_t read;
};

static void write_records(void *argument)
{
    struct recording *run = argument;
    kvl_ledger *ledger = open_ledger("a", 1);
    for (uint32_t i = 1; monotonic_ns() < run->end || i == 1; i++) {
        struct kvl_audit record;
        memset(&record, (int)(i % 255) + 1, sizeof record);
        CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
        run->written++;
    }
}

static void read_records(void *argument)
{
    struct recording *run = argument;
    kvl_ledger *ledger = open_ledger("a", 0);
    while (monotonic_ns() < run->end) {
        struct kvl_audit records[KVL_AUDIT_RECORDS];
        uint64_t written;
        int count = kvl_audit_read(ledger, records, &written);
        CHECK(count >= 0);
        for (int i = 0; i < count; i++) {
            const unsigned char *bytes = (const unsigned char *)&records[i];
            for (size_t at = 0; at < offsetof(struct kvl_audit, instance) + KVL_NAME_BYTES - 1; at++) {
                CHECK_EQUAL(bytes[at], bytes[0]);
            }
            run->read++;
        }
    }
}

TEST(records_by_processes, "A record that is read at all is one publication's, however many write at once.")
{
    make("a");
    struct recording *run = shared_memory(sizeof *run);
    run->end = monotonic_ns() + stress_ns();
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = start(i < 2 ? write_records : read_records, run);
    }
    for (int i = 0; i < 4; i++) {
        join(children[i]);
    }
    CHECK(run->written > 0);
    note("%llu records written, %llu read", (unsigned long long)run->written, (unsigned long long)run->read);
}
