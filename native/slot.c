/* SPDX-License-Identifier: Apache-2.0
 *
 * slot.c - who owns a slot, what it is told, and what it answers.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "handle.h"

/* Locks: byte 0 of a slot is its owner's, byte 1 is shared by publishers ---------------------------------------- */

enum { OWNER_BYTE = 0, PUBLISHER_BYTE = 1 };

enum { READ_TRIES = 64 }; /* bounds how long a reader may meet a writer in mid-store; a store takes nanoseconds */

static struct flock lock_of(uint32_t slot, int first, int bytes, int type)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = (short)type;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)(offsetof(struct layout_file, slots) + slot * sizeof(struct layout_slot)) + first;
    lock.l_len = bytes;
    return lock;
}

static int set_lock(const kvl_ledger *ledger, struct flock lock)
{
    /* relaxed: the descriptor is no flag for data */
    int fd = atomic_load_explicit(&ledger->fd, memory_order_relaxed);
    if (fd < 0) {
        return -EBADF;
    }
    return fcntl(fd, F_OFD_SETLK, &lock) == 0 ? 0 : -errno;
}

/* 1 if another handle owns the slot and finished its registration, else 0, or -errno.
 * Asks what stands against a shared lock on both bytes. That is an exclusive lock: on the first byte alone by an owner,
 * on both by a registration at work, whose slot still shows who was there before. Shared locks prove no life: whoever
 * may read the file can take them. */
static int owner_lives(const kvl_ledger *ledger, uint32_t slot)
{
    struct flock lock = lock_of(slot, OWNER_BYTE, 2, F_RDLCK);
    off_t owner_byte = lock.l_start;
    int fd = atomic_load_explicit(&ledger->fd, memory_order_relaxed); /* as in set_lock */
    if (fd < 0) {
        return -EBADF;
    }
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0) {
        return -errno;
    }
    return lock.l_type != F_UNLCK && lock.l_start == owner_byte && lock.l_len == 1;
}

/* Registration -------------------------------------------------------------------------------------------------- */

static int claim_slot(kvl_ledger *ledger)
{
    uint64_t owned = atomic_load_explicit(&ledger->owned, memory_order_relaxed); /* registrations are one at a time */
    for (uint32_t slot = 0; slot < KVL_SLOTS; slot++) {
        if ((owned >> slot & 1) != 0) {
            continue; /* one's own lock would not stand in the way */
        }
        /* Both bytes: a publisher in mid-raise keeps its slot from changing hands, even stopped. */
        int result = set_lock(ledger, lock_of(slot, OWNER_BYTE, 2, F_WRLCK));
        if (result == 0) {
            return (int)slot;
        }
        if (result != -EAGAIN && result != -EACCES) {
            return result;
        }
    }
    return -EUSERS;
}

/* Not the pair that the slot begins with: the owner has yet to say that it holds to it. */
static void clear_report(struct layout_report *report, int32_t startup_limit)
{
    put(&report->applied, (uint64_t)(uint32_t)startup_limit);
    put(&report->settled_revision, 0);
    put(&report->idle, 0);
    put(&report->active, 0);
    put(&report->capacity, 0);
    put(&report->evicted, 0);
    put(&report->eviction_errors, 0);
    put(&report->outcome, 0);
    put(&report->reported_ns, 0);
    for (int i = 0; i < REASON_WORDS; i++) {
        put(&report->reason[i], 0);
    }
    put(&report->seq, 0);
}

int kvl_register(kvl_ledger *ledger, const struct kvl_identity *identity, uint64_t incarnation, uint64_t desired)
{
    if (incarnation == 0) {
        return -EINVAL;
    }
    int index = claim_slot(ledger);
    if (index < 0) {
        return index;
    }
    KVL_POINT("register:claimed");
    struct layout_slot *slot = &ledger->file->slots[index];
    put(&slot->incarnation, 0);
    /* Pairs with the acquire fence in read_settled_slot: who saw a field below also sees the 0 above. */
    atomic_thread_fence(memory_order_release);
    KVL_POINT("register:opened");
    words_store(slot->identity, identity, IDENTITY_WORDS);
    KVL_POINT("register:identity");
    put(&slot->registered_ns, realtime_ns());
    clear_report(&slot->report, identity->startup_limit);
    KVL_POINT("register:report");
    put(&slot->desired, desired);
    KVL_POINT("register:desired");
    /* Pairs with the acquire loads of incarnation: who sees it sees all of the above. */
    atomic_store_explicit(&slot->incarnation, incarnation, memory_order_release);
    atomic_fetch_or_explicit(&ledger->owned, UINT64_C(1) << index, memory_order_relaxed); /* as in claim_slot */
    KVL_POINT("register:published");
    int result = set_lock(ledger, lock_of((uint32_t)index, PUBLISHER_BYTE, 1, F_UNLCK));
    KVL_POINT("register:done");
    /* Two that register at once each look for the other afterwards: this keeps either's look behind its own stores, so
     * that at least one of them finds the other. */
    atomic_thread_fence(memory_order_seq_cst);
    return result < 0 ? result : index;
}

/* Whether the slot is one's own. Relaxed: it guards against misuse, not against another thread. */
static int owns(const kvl_ledger *ledger, uint32_t index)
{
    return atomic_load_explicit(&ledger->fd, memory_order_relaxed) >= 0 &&
           (atomic_load_explicit(&ledger->owned, memory_order_relaxed) >> index & 1) != 0;
}

int kvl_unregister(kvl_ledger *ledger, uint32_t index)
{
    struct layout_slot *slot = slot_at(ledger, index);
    if (slot == NULL) {
        return -EINVAL;
    }
    if (!owns(ledger, index)) {
        return -EBADF;
    }
    /* release: a reader that still sees the old incarnation sees the old fields, too */
    atomic_store_explicit(&slot->incarnation, 0, memory_order_release);
    KVL_POINT("unregister:closed");
    atomic_fetch_and_explicit(&ledger->owned, ~(UINT64_C(1) << index), memory_order_relaxed); /* as in claim_slot */
    return set_lock(ledger, lock_of(index, OWNER_BYTE, 1, F_UNLCK));
}

/* Reading ------------------------------------------------------------------------------------------------------- */

static void load_report_once(const struct layout_report *shared, struct kvl_report *out)
{
    out->applied = atomic_load_explicit(&shared->applied, memory_order_relaxed);
    out->idle = (int64_t)atomic_load_explicit(&shared->idle, memory_order_relaxed);
    out->active = (int64_t)atomic_load_explicit(&shared->active, memory_order_relaxed);
    out->capacity = (int64_t)atomic_load_explicit(&shared->capacity, memory_order_relaxed);
    out->evicted = (int64_t)atomic_load_explicit(&shared->evicted, memory_order_relaxed);
    out->eviction_errors = atomic_load_explicit(&shared->eviction_errors, memory_order_relaxed);
    out->outcome = atomic_load_explicit(&shared->outcome, memory_order_relaxed);
    out->reported_ns = atomic_load_explicit(&shared->reported_ns, memory_order_relaxed);
    out->settled_revision = atomic_load_explicit(&shared->settled_revision, memory_order_relaxed);
    words_load(out->reason, shared->reason, REASON_WORDS);
    out->reason[KVL_REASON_BYTES - 1] = '\0';
}

static void load_report(const struct layout_report *shared, struct kvl_report *out)
{
    for (int i = 0; i < READ_TRIES; i++) {
        /* acquire pairs with the release that ends kvl_acknowledge */
        uint32_t before = atomic_load_explicit(&shared->seq, memory_order_acquire);
        load_report_once(shared, out);
        /* Pairs with the release fence in kvl_acknowledge: who saw a newer field sees the odd number, too. */
        atomic_thread_fence(memory_order_acquire);
        uint32_t after = atomic_load_explicit(&shared->seq, memory_order_relaxed);
        if (before == after && before % 2 == 0) {
            out->consistent = 1;
            return;
        }
    }
    out->consistent = 0; /* the owner was stopped or killed in mid-report */
}

/* One attempt: 1 and a copy that belongs to one incarnation, 0 for nobody's slot, -EAGAIN if it changed meanwhile. */
static int read_settled_slot(const struct layout_slot *slot, struct kvl_slot *out)
{
    /* acquire pairs with the release store at the end of kvl_register */
    uint64_t incarnation = atomic_load_explicit(&slot->incarnation, memory_order_acquire);
    if (incarnation == 0) {
        return 0;
    }
    out->incarnation = incarnation;
    words_load(&out->identity, slot->identity, IDENTITY_WORDS);
    out->registered_ns = atomic_load_explicit(&slot->registered_ns, memory_order_relaxed);
    /* acquire pairs with the compare-and-swap in kvl_raise */
    out->desired = atomic_load_explicit(&slot->desired, memory_order_acquire);
    load_report(&slot->report, &out->report);
    /* Pairs with the release fence in kvl_register. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&slot->incarnation, memory_order_relaxed) == incarnation ? 1 : -EAGAIN;
}

int kvl_read_slot(const kvl_ledger *ledger, uint32_t index, struct kvl_slot *out)
{
    const struct layout_slot *slot = slot_at(ledger, index);
    if (slot == NULL) {
        return -EINVAL;
    }
    struct kvl_slot copy;
    int result = 0;
    for (int i = 0; i < READ_TRIES; i++) {
        result = read_settled_slot(slot, &copy);
        KVL_POINT("read:copied");
        if (result == 1) {
            result = owner_lives(ledger, index);
        }
        if (result == 0 || (result < 0 && result != -EAGAIN)) {
            return result;
        }
        /* The lock may be that of a later owner: it is this one's only if the slot is its own before and after. Acquire
         * keeps this load behind the question; the first one was kept before it by the fence in read_settled_slot. */
        if (result == 1 &&
            atomic_load_explicit(&slot->incarnation, memory_order_acquire) == copy.incarnation) {
            copy.identity.instance[KVL_NAME_BYTES - 1] = '\0'; /* a peer may have written anything */
            copy.identity.engine[KVL_ENGINE_BYTES - 1] = '\0';
            copy.identity.version[KVL_VERSION_BYTES - 1] = '\0';
            memcpy(out, &copy, sizeof copy);
            return 1;
        }
    }
    return -EAGAIN;
}

int kvl_is_owned(const kvl_ledger *ledger, uint32_t index, uint64_t incarnation)
{
    const struct layout_slot *slot = slot_at(ledger, index);
    if (slot == NULL || owner_lives(ledger, index) != 1) {
        return 0;
    }
    /* acquire, as in read_settled_slot */
    return atomic_load_explicit(&slot->incarnation, memory_order_acquire) == incarnation;
}

/* The desired word ---------------------------------------------------------------------------------------------- */

static uint32_t revision_of(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

const uint64_t *kvl_desired_word(const kvl_ledger *ledger, uint32_t index)
{
    const struct layout_slot *slot = slot_at(ledger, index);
    return slot == NULL ? NULL : (const uint64_t *)(const void *)&slot->desired;
}

int kvl_agree(const uint64_t *const *words, uint32_t count, uint64_t *word)
{
    if (count == 0) {
        return 0;
    }
    /* Publishers write members in order, so the last one is loaded first; acquire pairs with the compare-and-swap in
     * kvl_raise, which makes whatever the same publisher wrote to earlier members visible to the loads that follow. */
    uint64_t last = atomic_load_explicit((const kvl_word *)(const void *)words[count - 1], memory_order_acquire);
    for (uint32_t i = 0; i + 1 < count; i++) {
        if (atomic_load_explicit((const kvl_word *)(const void *)words[i], memory_order_acquire) != last) {
            return 0;
        }
    }
    *word = last;
    return 1;
}

static int raise_owned(struct layout_slot *slot, uint64_t word, uint64_t *found)
{
    uint64_t current = atomic_load_explicit(&slot->desired, memory_order_relaxed); /* the swap below decides */
    while (revision_of(current) < revision_of(word)) {
        KVL_POINT("raise:compared");
        /* release pairs with the acquire loads in kvl_agree and read_settled_slot; acquire on success keeps the stores
         * to later members behind this one */
        if (atomic_compare_exchange_weak_explicit(&slot->desired, &current, word, memory_order_acq_rel,
                                                  memory_order_relaxed)) {
            KVL_POINT("raise:swapped");
            *found = current;
            return KVL_RAISED;
        }
    }
    *found = current;
    return KVL_LOST;
}

int kvl_raise(kvl_ledger *ledger, uint32_t index, uint64_t incarnation, uint64_t word, uint64_t *found)
{
    struct layout_slot *slot = slot_at(ledger, index);
    *found = 0;
    if (slot == NULL) {
        return -EINVAL;
    }
    if (!ledger->writable) {
        return -EBADF;
    }
    int result = set_lock(ledger, lock_of(index, PUBLISHER_BYTE, 1, F_RDLCK));
    if (result == -EAGAIN || result == -EACCES) {
        return -ESRCH; /* the slot is being registered: it has another owner now */
    }
    if (result < 0) {
        return result;
    }
    KVL_POINT("raise:locked");
    result = kvl_is_owned(ledger, index, incarnation) ? raise_owned(slot, word, found) : -ESRCH;
    (void)set_lock(ledger, lock_of(index, PUBLISHER_BYTE, 1, F_UNLCK));
    KVL_POINT("raise:done");
    return result;
}

/* The report ---------------------------------------------------------------------------------------------------- */

int kvl_acknowledge(kvl_ledger *ledger, uint32_t index, const struct kvl_report *report)
{
    struct layout_slot *slot = slot_at(ledger, index);
    if (slot == NULL) {
        return -EINVAL;
    }
    if (!owns(ledger, index)) {
        return -EBADF;
    }
    struct layout_report *shared = &slot->report;
    uint32_t seq = atomic_load_explicit(&shared->seq, memory_order_relaxed) & ~1U; /* only the owner writes it */
    put(&shared->seq, seq + 1);
    /* Pairs with the acquire fence in load_report: who saw a field below also sees the odd number above. */
    atomic_thread_fence(memory_order_release);
    KVL_POINT("acknowledge:opened");
    put(&shared->applied, report->applied);
    put(&shared->idle, (uint64_t)report->idle);
    put(&shared->active, (uint64_t)report->active);
    KVL_POINT("acknowledge:half");
    put(&shared->capacity, (uint64_t)report->capacity);
    put(&shared->evicted, (uint64_t)report->evicted);
    put(&shared->eviction_errors, report->eviction_errors);
    put(&shared->outcome, report->outcome);
    put(&shared->reported_ns, realtime_ns());
    put(&shared->settled_revision, report->settled_revision);
    words_store(shared->reason, report->reason, REASON_WORDS);
    KVL_POINT("acknowledge:written");
    /* release pairs with the acquire load in load_report: who sees the even number sees all of the above */
    atomic_store_explicit(&shared->seq, seq + 2, memory_order_release);
    KVL_POINT("acknowledge:closed");
    return 0;
}
