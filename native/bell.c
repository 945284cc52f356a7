/* SPDX-License-Identifier: Apache-2.0
 *
 * bell.c - doorbells: counters that processes sleep on, so that nobody polls.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "handle.h"

static kvl_half *bell_of(const kvl_ledger *ledger, uint32_t bell)
{
    struct layout_header *header = &ledger->file->header;
    return bell == KVL_PUBLISHED ? &header->published : &header->acknowledged;
}

uint32_t kvl_bell(const kvl_ledger *ledger, uint32_t bell)
{
    /* acquire pairs with the release in kvl_ring: who sees the count sees what it announces */
    return atomic_load_explicit(bell_of(ledger, bell), memory_order_acquire);
}

void kvl_ring(kvl_ledger *ledger, uint32_t bell)
{
    kvl_half *count = bell_of(ledger, bell);
    if (!ledger->writable) {
        return;
    }
    /* release pairs with the acquire in kvl_bell */
    atomic_fetch_add_explicit(count, 1, memory_order_release);
    KVL_POINT("ring:counted");
    /* Not FUTEX_PRIVATE: the waiters are other processes. */
    (void)syscall(SYS_futex, (void *)count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int kvl_wait(const kvl_ledger *ledger, uint32_t bell, uint32_t seen, int64_t deadline_ns)
{
    kvl_half *count = bell_of(ledger, bell);
    if (deadline_ns < 0) {
        deadline_ns = 0; /* long over; the kernel would call it invalid */
    }
    struct timespec deadline = {
        .tv_sec = (time_t)(deadline_ns / 1000000000),
        .tv_nsec = (long)(deadline_ns % 1000000000),
    };
    /* A bitset wait takes an absolute time, so that a loop over -EINTR does not stretch it. */
    long result = syscall(SYS_futex, (void *)count, FUTEX_WAIT_BITSET, seen, &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
    if (result == 0 || errno == EAGAIN) {
        return 0;
    }
    return -errno;
}
