/* SPDX-License-Identifier: Apache-2.0
 *
 * Publishes to all members of a directory the way the library's callers do, ROUNDS times, and prints the nanoseconds of
 * each round: what a publication costs without Python. Used by timing_goals.py.
 *   publish DIRECTORY MEMBERS ROUNDS
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "kvledger.h"

enum { MAX_MEMBERS = 64 };

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* One publication: open every ledger, find the live slot, raise with a record, ring, confirm, close. */
static void publish(const char *directory, unsigned members)
{
    kvl_ledger *ledgers[MAX_MEMBERS];
    struct kvl_slot slots[MAX_MEMBERS];
    uint32_t indices[MAX_MEMBERS];
    uint64_t newest = 0;
    int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (unsigned i = 0; i < members; i++) {
        char name[32];
        struct kvl_file file;
        snprintf(name, sizeof name, "cpu-%u.ledger", i);
        if (kvl_open(directory_fd, name, 1, &file, &ledgers[i]) != 0) {
            exit(1);
        }
        for (uint32_t slot = 0; slot < KVL_SLOTS; slot++) {
            if (kvl_read_slot(ledgers[i], slot, &slots[i]) == KVL_ALIVE) {
                indices[i] = slot;
            }
        }
        newest = slots[i].desired[KVL_LIMIT] >> 32 > newest ? slots[i].desired[KVL_LIMIT] >> 32 : newest;
    }
    struct kvl_audit record = {.program = "bench"};
    uint64_t found;
    for (unsigned i = 0; i < members; i++) {
        uint64_t word = (newest + 1) << 32;
        if (kvl_raise(ledgers[i], indices[i], slots[i].incarnation, KVL_LIMIT, word, 0, &record, &found) != KVL_RAISED) {
            exit(2);
        }
    }
    for (unsigned i = 0; i < members; i++) {
        kvl_ring(ledgers[i], KVL_PUBLISHED);
        if (kvl_is_owned(ledgers[i], indices[i], slots[i].incarnation) != 1) {
            exit(3);
        }
        kvl_close(ledgers[i]);
    }
    close(directory_fd);
}

int main(int count, char **arguments)
{
    if (count != 4) {
        return 64;
    }
    unsigned members = (unsigned)atoi(arguments[2]);
    for (int round = 0; round < atoi(arguments[3]); round++) {
        int64_t started = now_ns();
        publish(arguments[1], members);
        printf("%lld\n", (long long)(now_ns() - started));
    }
    return 0;
}
