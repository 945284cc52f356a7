/* SPDX-License-Identifier: Apache-2.0
 *
 * test_guard.c - files that are cut under a mapping, and faults that are none of this library's business.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void cut(const char *name, off_t size)
{
    int fd = openat(here, name, O_RDWR | O_CLOEXEC);
    CHECK_EQUAL(ftruncate(fd, size), 0);
    close(fd);
}

TEST(cut_file, "A file that is cut under its users reads as nobody's, says that it is lost, and ends no process.")
{
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    uint32_t index = register_as(owner, "x", 1, word_of(3, 30));
    CHECK_EQUAL(kvl_is_lost(owner), 0);
    cut("a", 0);
    struct kvl_slot slot;
    struct kvl_report report = {.idle = 1};
    struct kvl_audit audit = {0};
    uint64_t found;
    uint64_t word = 1;
    const uint64_t *place = kvl_desired_word(owner, index);
    CHECK_EQUAL(kvl_agree(&place, 1, &word), 1);
    CHECK_EQUAL(word, 0);
    CHECK_EQUAL(kvl_is_lost(owner), 1);
    CHECK_EQUAL(kvl_acknowledge(owner, index, &report), 0);
    CHECK(kvl_read_slot(observer, index, &slot) <= 0);
    CHECK_EQUAL(kvl_is_lost(observer), 1);
    kvl_ledger *other = owner;
    CHECK_EQUAL(kvl_raise(other, index, 1, word_of(9, 9), &found), -ESRCH);
    CHECK_EQUAL(kvl_audit_write(other, &audit), 0);
    kvl_ring(other, KVL_PUBLISHED);
    CHECK_EQUAL(kvl_wait(observer, KVL_PUBLISHED, kvl_bell(observer, KVL_PUBLISHED), 0), -ETIMEDOUT);
    kvl_close(owner);
    kvl_close(observer);
    struct kvl_file file;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &owner), KVL_E_SIZE);
}

TEST(cut_between, "Cutting a file to its first page loses the rest of it only, and a lost handle does not infect others.")
{
    make("a");
    make("b");
    kvl_ledger *lost = open_ledger("a", 1);
    kvl_ledger *whole = open_ledger("b", 1);
    kvl_ledger *observer = open_ledger("b", 0);
    uint32_t index = register_as(whole, "x", 1, word_of(3, 30));
    cut("a", 4096);
    CHECK_EQUAL(kvl_bell(lost, KVL_PUBLISHED), 0);
    CHECK_EQUAL(*kvl_desired_word(lost, KVL_SLOTS - 1), 0);
    CHECK_EQUAL(kvl_is_lost(lost), 1);
    CHECK_EQUAL(kvl_is_lost(whole), 0);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, index, &slot), 1);
    cut("b", 0);
    CHECK_EQUAL(*(volatile char *)whole->file, 0); /* the very first byte */
    CHECK_EQUAL(kvl_is_lost(whole), 1);
}

static volatile sig_atomic_t repaired;
static char *foreign;

static void repair(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    CHECK((char *)info->si_addr >= foreign && (char *)info->si_addr < foreign + 4096);
    CHECK(mmap(foreign, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
    repaired++;
}

static void map_foreign(void)
{
    int fd = openat(here, "foreign", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    foreign = mmap(foreign, 4096, PROT_READ, MAP_SHARED | (foreign != NULL ? MAP_FIXED : 0), fd, 0);
    CHECK(foreign != MAP_FAILED);
    close(fd);
}

TEST(foreign_handler, "Each fault outside ledgers reaches the handler that stood before, also after re-installing.")
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = repair;
    action.sa_flags = SA_SIGINFO;
    CHECK_EQUAL(sigaction(SIGBUS, &action, NULL), 0);
    make("a");
    (void)open_ledger("a", 1);
    map_foreign();
    CHECK(kvl_guard_add(foreign - KVL_FILE_BYTES) >= 0); /* as if a ledger ended where the foreign mapping begins */
    for (int round = 1; round <= 3; round++) {
        map_foreign();
        CHECK_EQUAL(*(volatile char *)foreign, 0);
        CHECK_EQUAL(repaired, round);
        CHECK_EQUAL(kvl_guard(), 0);
        CHECK_EQUAL(kvl_guard(), 0); /* it stands already, and must not be taken for one that stood before */
    }
    kvl_ledger *ledger = open_ledger("a", 1);
    cut("a", 0);
    CHECK_EQUAL(kvl_bell(ledger, KVL_PUBLISHED), 0);
    CHECK_EQUAL(repaired, 3);
}

static void fault(void *argument)
{
    (void)argument;
    signal(SIGBUS, SIG_DFL);
    (void)open_ledger("a", 1);
    map_foreign();
    (void)*(volatile char *)foreign;
}

static void send_fault(void *argument)
{
    (void)argument;
    signal(SIGBUS, SIG_DFL);
    (void)open_ledger("a", 1);
    raise(SIGBUS);
}

static void send_fault_from_outside(void *argument)
{
    (void)argument;
    signal(SIGBUS, SIG_DFL);
    (void)open_ledger("a", 1);
    kill(getpid(), SIGBUS);
}

TEST(foreign_fault_ends, "A fault outside ledgers, or a SIGBUS that someone sends, ends a process as it always did.")
{
    make("a");
    void (*const ways[])(void *) = {fault, send_fault, send_fault_from_outside};
    for (int i = 0; i < 3; i++) {
        pid_t child = start(ways[i], NULL);
        int status = 0;
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
}

TEST(taken_over_handler, "A handler that replaced the library's one is itself replaced again by kvl_guard.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    signal(SIGBUS, SIG_DFL);
    CHECK_EQUAL(kvl_guard(), 0);
    cut("a", 0);
    CHECK_EQUAL(kvl_bell(ledger, KVL_PUBLISHED), 0);
    CHECK_EQUAL(kvl_is_lost(ledger), 1);
}

static int is_mapped(const struct kvl_file *file)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    char line[512];
    unsigned long long inode;
    int found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        found |= sscanf(line, "%*s %*s %*s %*s %llu", &inode) == 1 && inode == file->inode;
    }
    fclose(maps);
    return found;
}

TEST(full_guard, "There is room for 4096 mappings, one more is refused, and room that is given back is used again.")
{
    make("a");
    uintptr_t fake = 4096; /* nothing is mapped there, and nothing is read */
    for (int i = 0; i < 4096; i++) {
        CHECK_EQUAL(kvl_guard_add((void *)fake), i);
    }
    CHECK_EQUAL(kvl_guard_add((void *)fake), -EMFILE);
    struct kvl_file file;
    kvl_ledger *ledger;
    int next = dup(here);
    close(next);
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), -EMFILE);
    CHECK_EQUAL(dup(here), next); /* no descriptor is left of it, */
    CHECK_EQUAL(is_mapped(&file), 0); /* and no mapping */
    kvl_guard_remove(77);
    CHECK_EQUAL(kvl_guard_add((void *)fake), 77);
}
