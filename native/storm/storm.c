/* SPDX-License-Identifier: Apache-2.0
 *
 * storm.c - the kill storm at the level of the library, where a life is short and a hundred thousand deaths are cheap.
 *
 *   storm DIRECTORY KILLS SEED
 *
 * Publishers of limits and caps and engines are killed by a timer, one in eight by one of its own processor time. One
 * engine of eight members lives through it. After each batch: its words hold only what was published of their own bound,
 * a revision of a bound means one number, words only rose, the dead are dead, and an undisturbed publication of either is
 * raised everywhere. Prints figures; 1 on a violation.
 */
#include "../handle.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MEMBERS = 8, BATCH = 100, AT_ONCE = 4, REVISIONS = 1 << 22 };

struct shared {
    _Atomic uint64_t publications;
    _Atomic uint64_t registrations;
    _Atomic int32_t limits[KVL_BOUNDS][REVISIONS]; /* what the first member's winner gave a revision; 0: not yet seen */
};

static int directory;
static struct shared *shared;
static uint32_t slots[MEMBERS];
static kvl_ledger *engine[MEMBERS];
static char names[MEMBERS][8];
static uint64_t splits;

_Noreturn static void violated(const char *what, long long one, long long other)
{
    printf("storm: VIOLATION %s (%lld, %lld)\n", what, one, other);
    exit(1);
}

static kvl_ledger *open_member(int member, int writable)
{
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    int code = kvl_open(directory, names[member], writable, &file, &ledger);
    if (code != 0) {
        violated("a ledger was refused", member, code);
    }
    return ledger;
}

/* A number that is unlike any other publisher's; odd for caps, so that words that mix are seen. */
static int32_t fresh_limit(uint32_t bound)
{
    static uint32_t count;
    return (int32_t)((((uint32_t)getpid() << 12 | (count++ & 0x7ff) << 1) & 0x7fffffff) | bound);
}

static uint32_t revision_of(const struct kvl_slot *slot, uint32_t bound)
{
    return (uint32_t)(slot->desired[bound] >> 32);
}

static int publish(kvl_ledger *const *ledgers, uint32_t bound)
{
    int32_t limit = fresh_limit(bound);
    uint32_t newest = 0;
    uint64_t found;
    for (int i = 0; i < MEMBERS; i++) {
        struct kvl_slot slot;
        if (kvl_read_slot(ledgers[i], slots[i], &slot) != KVL_ALIVE) {
            violated("the engine was not alive", i, 0);
        }
        newest = revision_of(&slot, bound) > newest ? revision_of(&slot, bound) : newest;
    }
    struct kvl_audit record = {.pid = (uint32_t)getpid()};
    for (;;) {
        uint64_t word = (uint64_t)(newest + 1) << 32 | (uint32_t)limit;
        int first = kvl_raise(ledgers[0], slots[0], 1, bound, word, 0, &record, &found);
        if (first == KVL_OVERTAKEN) {
            newest = (uint32_t)(found >> 32);
            continue;
        }
        if (first != KVL_RAISED) {
            violated("raising failed", first, 0);
        }
        int everywhere = 1;
        for (int i = 1; i < MEMBERS; i++) {
            everywhere &= kvl_raise(ledgers[i], slots[i], 1, bound, word, 0, &record, &found) == KVL_RAISED;
        }
        for (int i = 0; i < MEMBERS; i++) {
            (void)kvl_ring(ledgers[i], KVL_PUBLISHED);
        }
        shared->publications++;
        return everywhere;
    }
}

static void be_publisher(void)
{
    for (;;) {
        kvl_ledger *ledgers[MEMBERS];
        for (int i = 0; i < MEMBERS; i++) {
            ledgers[i] = open_member(i, 1);
        }
        for (int n = 0; n < 4; n++) {
            (void)publish(ledgers, (uint32_t)(getpid() + n) % KVL_BOUNDS);
        }
        for (int i = 0; i < MEMBERS; i++) {
            kvl_close(ledgers[i]);
        }
    }
}

static void be_engine(void)
{
    struct kvl_identity identity = {.instance = "victim", .members = MEMBERS, .startup_limit = 5};
    struct kvl_report report = {.returns = "alive"};
    const uint64_t words[KVL_BOUNDS] = {7, 7};
    for (;;) {
        kvl_ledger *ledgers[MEMBERS];
        for (int i = 0; i < MEMBERS; i++) {
            ledgers[i] = open_member(i, 1);
            int slot = kvl_register(ledgers[i], &identity, (uint64_t)getpid() | UINT64_C(1) << 40, words, &report);
            if (slot < 0) {
                violated("registering failed", i, slot);
            }
        }
        for (int n = 0; n < 8 * MEMBERS; n++) {
            (void)kvl_acknowledge(ledgers[n % MEMBERS], &report);
            (void)kvl_ring(ledgers[n % MEMBERS], KVL_ACKNOWLEDGED);
        }
        for (int i = 0; i < MEMBERS; i++) {
            if (i % 2 == 0) {
                (void)kvl_unregister(ledgers[i]);
            }
            kvl_close(ledgers[i]);
        }
        shared->registrations++;
        char name[16];
        snprintf(name, sizeof name, "n%d", getpid());
        if (kvl_create(directory, name, 0600) < 0) {
            violated("creating failed", errno, 0);
        }
        (void)unlinkat(directory, name, 0);
    }
}

static void die_after(clockid_t clock, uint64_t ns)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct itimerspec span = {.it_value = {.tv_sec = 0, .tv_nsec = (long)ns + 1}};
    timer_t timer;
    if (timer_create(clock, &event, &timer) != 0 || timer_settime(timer, 0, &span, NULL) != 0) {
        violated("no timer", errno, 0);
    }
}

static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void observe_word(const struct kvl_slot *slot, uint32_t bound, uint32_t *newest)
{
    uint32_t revision = revision_of(slot, bound);
    int32_t limit = (int32_t)(uint32_t)slot->desired[bound];
    if (revision < *newest) {
        violated("a word went back", *newest, revision);
    }
    *newest = revision;
    if (revision > 0 && ((uint32_t)limit & 1) != bound) {
        violated("a word holds what was published of the other bound", bound, limit);
    }
    if (revision > 0 && revision < REVISIONS) {
        int32_t known = 0;
        if (!atomic_compare_exchange_strong(&shared->limits[bound][revision], &known, limit) && known != limit) {
            violated("a revision has two limits", known, limit);
        }
    }
}

/* What an observer sees at any time: one revision, one limit, never back, and split at most for a while. */
static void observe(kvl_ledger *const *observers, uint32_t (*newest)[KVL_BOUNDS])
{
    int split = 0;
    uint64_t first[KVL_BOUNDS] = {0};
    for (int i = MEMBERS - 1; i >= 0; i--) {
        struct kvl_slot slot;
        if (kvl_read_slot(observers[i], slots[i], &slot) != KVL_ALIVE || slot.incarnation != 1) {
            violated("the engine was not alive", i, 0);
        }
        for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
            observe_word(&slot, bound, &newest[i][bound]);
        }
        split |= i < MEMBERS - 1 && memcmp(slot.desired, first, sizeof first) != 0;
        memcpy(first, slot.desired, sizeof first);
    }
    splits += (uint64_t)split;
}

/* A creation that was killed leaves no other name than the one it was asked for, and that one whole. */
static void sweep(void)
{
    DIR *listing = fdopendir(openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (listing == NULL) {
        violated("no listing", errno, 0);
    }
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing)) {
        if (entry->d_name[0] == 'n') {
            struct kvl_file file;
            kvl_ledger *ledger = NULL;
            int code = kvl_open(directory, entry->d_name, 1, &file, &ledger);
            if (code != 0) {
                violated("a ledger was made in part", code, (long long)file.size);
            }
            kvl_close(ledger);
            (void)unlinkat(directory, entry->d_name, 0);
        } else if (entry->d_name[0] != 'm' && strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            violated("a creation left another name", entry->d_name[0], 0);
        }
    }
    closedir(listing);
}

static void check_rest(kvl_ledger *const *observers, kvl_ledger *const *publishers)
{
    for (int i = 0; i < MEMBERS; i++) {
        for (uint32_t slot = 0; slot < KVL_SLOTS; slot++) {
            struct kvl_slot copy;
            if (kvl_read_slot(observers[i], slot, &copy) > KVL_DEAD && strcmp(copy.identity.instance, "target") != 0) {
                violated("a dead engine is alive", i, slot);
            }
        }
    }
    uint32_t revisions[KVL_BOUNDS];
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        uint64_t word;
        if (!publish(publishers, bound)) {
            violated("an undisturbed publication was overtaken", bound, 0);
        }
        if (kvl_agree((const kvl_ledger *const *)engine, MEMBERS, bound, &word) != 1) {
            violated("an undisturbed publication left a split", bound, 0);
        }
        revisions[bound] = (uint32_t)(word >> 32);
    }
    for (int i = 0; i < MEMBERS; i++) {
        int code = kvl_check(engine[i], directory, names[i], revisions);
        if (code != 0) {
            violated("the engine's own registration is not as it was made", i, code);
        }
    }
}

static void set_up(void)
{
    struct kvl_identity identity = {.instance = "target", .members = MEMBERS, .startup_limit = 5};
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        violated("no memory", errno, 0);
    }
    for (int i = 0; i < MEMBERS; i++) {
        snprintf(names[i], sizeof names[i], "m%d", i);
        if (kvl_create(directory, names[i], 0600) != 1) {
            violated("creating failed", i, errno);
        }
        engine[i] = open_member(i, 1);
        int slot = kvl_register(engine[i], &identity, 1, (const uint64_t[KVL_BOUNDS]){0, 0}, NULL);
        if (slot < 0) {
            violated("registering failed", i, slot);
        }
        slots[i] = (uint32_t)slot;
    }
}

static pid_t start_victim(int is_engine, clockid_t clock, uint64_t ns)
{
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < MEMBERS; i++) {
            kvl_close(engine[i]);
        }
        die_after(clock, ns);
        if (is_engine) {
            be_engine();
        } else {
            be_publisher();
        }
    }
    return pid;
}

int main(int count, char **arguments)
{
    if (count != 4 || (directory = open(arguments[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) {
        fprintf(stderr, "usage: %s DIRECTORY KILLS SEED\n", arguments[0]);
        return 2;
    }
    uint64_t wanted = strtoull(arguments[2], NULL, 10);
    random_state = strtoull(arguments[3], NULL, 10) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    set_up();
    kvl_ledger *observers[MEMBERS];
    kvl_ledger *publishers[MEMBERS];
    uint32_t newest[MEMBERS][KVL_BOUNDS] = {{0}};
    for (int i = 0; i < MEMBERS; i++) {
        observers[i] = open_member(i, 0);
        publishers[i] = open_member(i, 1);
    }
    uint64_t kills = 0;
    uint64_t engines = 0;
    while (kills < wanted) {
        pid_t alive[AT_ONCE] = {0};
        for (int n = 0; n < BATCH + AT_ONCE; n++) {
            if (n >= AT_ONCE) {
                int status;
                observe(observers, newest);
                waitpid(alive[n % AT_ONCE], &status, 0);
                if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
                    violated("a victim ended by itself", status, 0);
                }
                kills++;
            }
            if (n < BATCH) {
                int is_engine = next_random() % 4 == 0;
                engines += (uint64_t)is_engine;
                clockid_t clock = next_random() % 8 == 0 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
                alive[n % AT_ONCE] = start_victim(is_engine, clock, next_random() % 2000000);
            }
        }
        observe(observers, newest);
        check_rest(observers, publishers);
        sweep();
    }
    printf("storm: %llu kills in C (%llu of engines), %llu publications completed by victims and checks, "
           "%llu registrations completed, last revisions %u of the limit and %u of the cap, %llu looks at a split, "
           "violations 0\n",
           (unsigned long long)kills, (unsigned long long)engines, (unsigned long long)shared->publications,
           (unsigned long long)shared->registrations, newest[0][KVL_LIMIT], newest[0][KVL_CAP],
           (unsigned long long)splits);
    return 0;
}
