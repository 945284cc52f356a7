/* SPDX-License-Identifier: Apache-2.0
 *
 * bell.c - doorbells: counters that processes sleep on, so that nobody polls. The kernel counts and compares them, which
 * makes a file that was cut an error code.
 */
#include "handle.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint32_t *bell_of(const kvl_ledger *ledger, uint32_t bell)
{
    struct layout_header *header = &ledger->file->header;
    return bell == KVL_PUBLISHED ? &header->published : &header->acknowledged;
}

static int code_of(int error)
{
    return error == EFAULT ? KVL_E_DAMAGED : -error;
}

int kvl_bell(const kvl_ledger *ledger, uint32_t bell, uint32_t *count)
{
    size_t offset = bell == KVL_PUBLISHED ? offsetof(struct layout_header, published)
                                          : offsetof(struct layout_header, acknowledged);
    int result = kvl_read_at(ledger, count, sizeof *count, offset);
    /* Pairs with the kernel's add in kvl_ring: who reads the count reads what it announces afterwards. */
    atomic_thread_fence(memory_order_acquire);
    return result;
}

int kvl_ring(kvl_ledger *ledger, uint32_t bell)
{
    if (!ledger->writable) {
        return -EBADF;
    }
    uint32_t *count = bell_of(ledger, bell);
    int damaged = kvl_check_stamp(ledger);
    if (damaged < 0) { /* sleepers look again by themselves; the file may be another library's by now */
        (void)syscall(SYS_futex, (void *)count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return damaged;
    }
    /* Pairs with the fence in kvl_bell: what was written before is visible before the count changes. */
    atomic_thread_fence(memory_order_seq_cst);
    /* The kernel adds 1 and wakes all. Not FUTEX_PRIVATE: the waiters are other processes. The comparison and the second
     * wake that belong to the operation find nobody left to wake. */
    long result = syscall(SYS_futex, (void *)count, FUTEX_WAKE_OP, INT_MAX, NULL, (void *)count,
                          FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0));
    KVL_POINT("ring:rung");
    return result < 0 ? code_of(errno) : 0;
}

int kvl_wait(const kvl_ledger *ledger, uint32_t bell, uint32_t seen, int64_t deadline_ns)
{
    if (deadline_ns < 0) {
        deadline_ns = 0; /* long over; the kernel would call it invalid */
    }
    struct timespec deadline = {
        .tv_sec = (time_t)(deadline_ns / 1000000000),
        .tv_nsec = (long)(deadline_ns % 1000000000),
    };
    /* A bitset wait takes an absolute time, so that a loop over -EINTR does not stretch it. */
    long result = syscall(SYS_futex, (void *)bell_of(ledger, bell), FUTEX_WAIT_BITSET, seen, &deadline, NULL,
                          FUTEX_BITSET_MATCH_ANY);
    return result == 0 || errno == EAGAIN ? 0 : code_of(errno);
}
