/* SPDX-License-Identifier: Apache-2.0
 *
 * slot.c - who owns a slot, what it is told, and what it answers.
 */
#include "handle.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { READ_TRIES = 64 }; /* bounds how long a reader may meet writers in mid-copy, which take nanoseconds */

static size_t offset_of(uint32_t slot)
{
    return offsetof(struct layout_file, slots) + slot * sizeof(struct layout_slot);
}

/* Locks ----------------------------------------------------------------------------------------------------------
 * Byte 0 of a slot: its owner, until kvl_close. Byte 1: publishers share it, a registration has it alone.
 * A byte far behind the file, made from the incarnation: that incarnation is alive. */

enum { OWNER_BYTE = 0, PUBLISHER_BYTE = 1 };

static struct flock lock_at(off_t start, int bytes, int type)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = (short)type;
    lock.l_whence = SEEK_SET;
    lock.l_start = start;
    lock.l_len = bytes;
    return lock;
}

static struct flock slot_lock(uint32_t slot, int first, int bytes, int type)
{
    return lock_at((off_t)offset_of(slot) + first, bytes, type);
}

static struct flock life_lock(uint64_t incarnation, int type)
{
    const uint64_t half = UINT64_C(1) << 62;
    return lock_at((off_t)(half | (incarnation & (half - 1))), 1, type);
}

static int set_lock(const kvl_ledger *ledger, struct flock lock)
{
    return fcntl(ledger->fd, F_OFD_SETLK, &lock) == 0 ? 0 : -errno;
}

static int is_taken(int error)
{
    return error == -EAGAIN || error == -EACCES;
}

/* 1 if `incarnation` is alive, 0 if not, or -errno. Asks what is in the way of a shared lock, which is an exclusive one:
 * shared locks prove no life, as whoever may read the file can take them. */
static int lives(int fd, uint64_t incarnation)
{
    struct flock lock = life_lock(incarnation, F_RDLCK);
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0) {
        return -errno;
    }
    return lock.l_type != F_UNLCK;
}

/* Registration -------------------------------------------------------------------------------------------------- */

static int claim_slot(const kvl_ledger *ledger)
{
    for (uint32_t slot = 0; slot < KVL_SLOTS; slot++) {
        /* Both bytes: a publisher in mid-raise keeps its slot from changing hands, even stopped. */
        int result = set_lock(ledger, slot_lock(slot, OWNER_BYTE, 2, F_WRLCK));
        if (result == 0) {
            return (int)slot;
        }
        if (!is_taken(result)) {
            return result;
        }
    }
    return -EUSERS;
}

static uint64_t identity_seal(const struct layout_slot *slot)
{
    const uint64_t parts[] = {slot->ownership.incarnation, slot->ownership.registered_ns};
    return kvl_seal(kvl_seal(0, parts, sizeof parts), &slot->identity, sizeof slot->identity);
}

/* What a slot says before its owner does: not the pairs that it begins with, which have yet to be applied. */
static struct kvl_report silent_report(const struct kvl_identity *identity)
{
    struct kvl_report report;
    memset(&report, 0, sizeof report);
    report.answers[KVL_LIMIT].applied = (uint64_t)(uint32_t)identity->startup_limit;
    report.answers[KVL_CAP].applied = (uint64_t)(uint32_t)identity->startup_cap;
    return report;
}

static void seal_report(struct layout_report *report, uint64_t incarnation)
{
    report->seal = kvl_seal(incarnation, &report->body, sizeof report->body);
}

struct registration {
    const struct kvl_identity *identity;
    uint64_t incarnation;
    const uint64_t *desired;
    const struct kvl_report *report;
};

static int write_slot(const kvl_ledger *ledger, uint32_t index, const struct registration *registration)
{
    struct layout_slot slot;
    memset(&slot, 0, sizeof slot);
    slot.identity = *registration->identity;
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        atomic_init(&slot.ownership.desired[bound], registration->desired[bound]);
    }
    slot.ownership.incarnation = registration->incarnation;
    slot.ownership.registered_ns = kvl_realtime_ns();
    slot.ownership.seal = identity_seal(&slot);
    if (registration->report != NULL) {
        slot.report.body = *registration->report;
        slot.report.body.reported_ns = slot.ownership.registered_ns;
    } else {
        slot.report.body = silent_report(registration->identity);
    }
    seal_report(&slot.report, registration->incarnation);
    return kvl_write_at(ledger, &slot, sizeof slot, offset_of(index));
}

static int take_slot(kvl_ledger *ledger, uint32_t index, const struct registration *registration)
{
    KVL_POINT("register:claimed");
    int result = set_lock(ledger, life_lock(registration->incarnation, F_WRLCK));
    KVL_POINT("register:alive");
    if (result == 0) {
        result = write_slot(ledger, index, registration);
    }
    KVL_POINT("register:written");
    if (result == 0) {
        result = set_lock(ledger, slot_lock(index, PUBLISHER_BYTE, 1, F_UNLCK));
    }
    KVL_POINT("register:open");
    if (result < 0) { /* undone: a slot that is never alive must not stay taken */
        (void)set_lock(ledger, life_lock(registration->incarnation, F_UNLCK));
        (void)set_lock(ledger, slot_lock(index, OWNER_BYTE, 2, F_UNLCK));
    }
    return result;
}

int kvl_register(kvl_ledger *ledger, const struct kvl_identity *identity, uint64_t incarnation, const uint64_t *desired,
                 const struct kvl_report *report)
{
    if (incarnation == 0) {
        return -EINVAL;
    }
    if (!ledger->writable) {
        return -EBADF;
    }
    if (ledger->slot >= 0) {
        return -EBUSY;
    }
    int result = kvl_check_stamp(ledger);
    int index = result < 0 ? result : claim_slot(ledger);
    if (index < 0) {
        return index;
    }
    const struct registration registration = {identity, incarnation, desired, report};
    result = take_slot(ledger, (uint32_t)index, &registration);
    if (result < 0) {
        return result;
    }
    ledger->incarnation = incarnation;
    ledger->slot = index;
    ledger->owns = 1;
    /* StoreLoad: two that register at once each look for the other afterwards, and one of them finds the other. */
    atomic_thread_fence(memory_order_seq_cst);
    return index;
}

int kvl_unregister(kvl_ledger *ledger)
{
    if (!ledger->owns || ledger->fd < 0) {
        return -EBADF;
    }
    ledger->owns = 0;
    KVL_POINT("unregister:called");
    /* The kernel's lock on the list of file locks pairs this with kvl_is_owned: a publisher that found the slot owned
     * raised its word before this returns. */
    return set_lock(ledger, life_lock(ledger->incarnation, F_UNLCK));
}

/* Reading ------------------------------------------------------------------------------------------------------- */

/* Desired words and incarnation as two reads in a row found them: a reader may meet a store in mid-copy, but not the same
 * half of it twice. */
static int read_ownership(const kvl_ledger *ledger, uint32_t slot, struct layout_ownership *out)
{
    size_t offset = offset_of(slot) + offsetof(struct layout_slot, ownership);
    int result = kvl_read_at(ledger, out, sizeof *out, offset);
    for (int i = 0; i < READ_TRIES && result == 0; i++) {
        struct layout_ownership again;
        result = kvl_read_at(ledger, &again, sizeof again, offset);
        if (result == 0 && memcmp(out, &again, sizeof again) == 0) {
            return 0;
        }
        memcpy(out, &again, sizeof again);
    }
    return result < 0 ? result : -EAGAIN;
}

static uint64_t desired_in(const struct layout_ownership *ownership, uint32_t bound)
{
    return atomic_load_explicit(&ownership->desired[bound], memory_order_relaxed); /* a private copy */
}

/* The ownership of a slot that carries `incarnation`: 0, KVL_E_DISPLACED, or another error. */
static int read_owned(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, struct layout_ownership *out)
{
    if (slot >= KVL_SLOTS) {
        return -EINVAL;
    }
    int result = read_ownership(ledger, slot, out);
    return result == 0 && out->incarnation != incarnation ? KVL_E_DISPLACED : result;
}

int kvl_desired(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, uint32_t bound, uint64_t *word)
{
    if (bound >= KVL_BOUNDS) {
        return -EINVAL;
    }
    struct layout_ownership ownership;
    int result = read_owned(ledger, slot, incarnation, &ownership);
    if (result == 0) {
        *word = desired_in(&ownership, bound);
    }
    return result;
}

int kvl_agree(const kvl_ledger *const *ledgers, uint32_t count, uint32_t bound, uint64_t *word)
{
    uint64_t agreed = 0;
    /* Publishers write members in order, so the last one is read first. */
    for (uint32_t i = count; i-- > 0;) {
        uint64_t found;
        if (kvl_desired(ledgers[i], (uint32_t)ledgers[i]->slot, ledgers[0]->incarnation, bound, &found) != 0) {
            return 0;
        }
        /* Pairs with the compare-and-swap in kvl_raise, which released what its publisher wrote to earlier members. */
        atomic_thread_fence(memory_order_acquire);
        if (i + 1 < count && found != agreed) {
            return 0;
        }
        agreed = found;
    }
    *word = agreed;
    return count > 0;
}

static void copy_report(const struct layout_slot *slot, struct kvl_report *out, int *whole)
{
    const struct layout_report *report = &slot->report;
    *whole = report->seal == kvl_seal(slot->ownership.incarnation, &report->body, sizeof report->body);
    memset(out, 0, sizeof *out);
    if (*whole) {
        *out = report->body;
        out->returns[KVL_RETURNS_BYTES - 1] = '\0'; /* a peer may have written anything */
        for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
            out->answers[bound].reason[KVL_REASON_BYTES - 1] = '\0';
        }
    }
}

static void copy_slot(const struct layout_slot *slot, struct kvl_slot *out)
{
    out->incarnation = slot->ownership.incarnation;
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        out->desired[bound] = desired_in(&slot->ownership, bound);
    }
    out->registered_ns = slot->ownership.registered_ns;
    out->identity = slot->identity;
    out->identity.instance[KVL_NAME_BYTES - 1] = '\0'; /* as in copy_report */
    out->identity.engine[KVL_ENGINE_BYTES - 1] = '\0';
    out->identity.version[KVL_VERSION_BYTES - 1] = '\0';
}

/* One attempt: KVL_ALIVE, KVL_TORN, KVL_DEAD, -EAGAIN if the slot is being written, or another error. */
static int read_slot_once(const kvl_ledger *ledger, uint32_t index, struct kvl_slot *out)
{
    struct layout_slot slot;
    int result = kvl_read_at(ledger, &slot, sizeof slot, offset_of(index));
    if (result < 0 || slot.ownership.incarnation == 0) {
        return result < 0 ? result : KVL_DEAD;
    }
    KVL_POINT("read:copied");
    result = lives(ledger->fd, slot.ownership.incarnation);
    if (result <= 0) {
        return result < 0 ? result : KVL_DEAD;
    }
    struct layout_ownership ownership;
    result = read_ownership(ledger, index, &ownership);
    if (result < 0) {
        return result;
    }
    if (ownership.incarnation != slot.ownership.incarnation || slot.ownership.seal != identity_seal(&slot)) {
        return -EAGAIN;
    }
    memcpy(&slot.ownership, &ownership, sizeof ownership);
    int whole;
    copy_report(&slot, &out->report, &whole);
    copy_slot(&slot, out);
    return whole ? KVL_ALIVE : KVL_TORN;
}

int kvl_read_slot(const kvl_ledger *ledger, uint32_t slot, struct kvl_slot *out)
{
    if (slot >= KVL_SLOTS) {
        return -EINVAL;
    }
    if (ledger->fd < 0) {
        return -EBADF;
    }
    struct kvl_slot copy;
    int result = -EAGAIN;
    for (int i = 0; i < READ_TRIES && (result == -EAGAIN || result == KVL_TORN); i++) {
        result = read_slot_once(ledger, slot, &copy);
    }
    if (result == KVL_ALIVE || result == KVL_TORN) {
        *out = copy;
    }
    return result;
}

int kvl_is_owned(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation)
{
    struct layout_ownership ownership;
    int result = ledger->fd < 0 ? -EBADF : read_owned(ledger, slot, incarnation, &ownership);
    if (result < 0) {
        return result == KVL_E_DISPLACED ? 0 : result;
    }
    return lives(ledger->fd, incarnation);
}

static uint32_t revision_of(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

/* `other` is a second description of the file: a handle does not see its own locks. */
static int check_registration(const kvl_ledger *ledger, int other, const uint32_t *revisions)
{
    struct layout_slot slot;
    int result = kvl_read_at(ledger, &slot, sizeof slot, offset_of((uint32_t)ledger->slot));
    if (result < 0) {
        return result;
    }
    if (slot.ownership.incarnation != ledger->incarnation || slot.ownership.seal != identity_seal(&slot)) {
        return KVL_E_DISPLACED;
    }
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        if (revision_of(desired_in(&slot.ownership, bound)) < revisions[bound]) {
            return KVL_E_SET_BACK;
        }
    }
    result = lives(other, ledger->incarnation);
    return result == 0 ? KVL_E_UNLOCKED : result < 0 ? result : 0;
}

static int check_through(const kvl_ledger *ledger, int directory_fd, const char *name, const uint32_t *revisions)
{
    int other;
    int result = kvl_open_again(ledger, directory_fd, name, &other);
    if (result < 0) {
        return result;
    }
    result = kvl_check_stamp(ledger);
    if (result == 0 && ledger->owns) {
        result = check_registration(ledger, other, revisions);
    } else if (result == -EBADF) { /* somebody closed the descriptor */
        result = KVL_E_UNLOCKED;
    }
    close(other);
    return result;
}

int kvl_check(const kvl_ledger *ledger, int directory_fd, const char *name, const uint32_t *revisions)
{
    if (ledger->fd < 0) {
        return -EBADF;
    }
    kvl_lock_handles();
    int result = check_through(ledger, directory_fd, name, revisions);
    kvl_unlock_handles();
    return result;
}

/* The desired words --------------------------------------------------------------------------------------------- */

struct raise {
    struct layout_file *file;
    uint32_t slot;
    uint32_t bound;
    uint64_t incarnation;
    uint64_t word;
    uint64_t found;
    uint32_t floor;
    int has_record;
    struct kvl_audit record;
};

static int swap(void *argument)
{
    struct raise *call = argument;
    kvl_word *desired = &call->file->slots[call->slot].ownership.desired[call->bound];
    uint64_t current = atomic_load_explicit(desired, memory_order_relaxed); /* the swap below decides */
    KVL_POINT("swap:read");
    while (revision_of(current) < revision_of(call->word)) {
        if (revision_of(current) < call->floor) {
            call->found = current;
            return KVL_E_SET_BACK;
        }
        /* release pairs with the acquire fence in kvl_agree; acquire keeps stores to later members behind this one */
        if (atomic_compare_exchange_weak_explicit(desired, &current, call->word, memory_order_acq_rel,
                                                  memory_order_relaxed)) {
            call->found = current;
            KVL_POINT("swap:swapped");
            if (call->has_record) {
                call->record.before = current;
                call->record.after = call->word;
                call->record.bound = call->bound;
                kvl_audit_append(call->file, &call->record);
            }
            return KVL_RAISED;
        }
    }
    call->found = current;
    return KVL_OVERTAKEN;
}

static int raise_owned(kvl_ledger *ledger, struct raise *call)
{
    int result = kvl_is_owned(ledger, call->slot, call->incarnation);
    if (result <= 0) {
        return result < 0 ? result : -ESRCH;
    }
    return kvl_isolated(swap, call, sizeof *call);
}

static int raise_locked(kvl_ledger *ledger, struct raise *call)
{
    int result = set_lock(ledger, slot_lock(call->slot, PUBLISHER_BYTE, 1, F_RDLCK));
    if (result < 0) {
        return is_taken(result) ? -ESRCH : result; /* taken by a registration: the slot has another owner now */
    }
    KVL_POINT("raise:locked");
    result = raise_owned(ledger, call);
    KVL_POINT("raise:swapped");
    (void)set_lock(ledger, slot_lock(call->slot, PUBLISHER_BYTE, 1, F_UNLCK));
    KVL_POINT("raise:done");
    return result;
}

int kvl_raise(kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, uint32_t bound, uint64_t word, uint32_t floor,
              const struct kvl_audit *record, uint64_t *found)
{
    *found = 0;
    if (slot >= KVL_SLOTS || bound >= KVL_BOUNDS) {
        return -EINVAL;
    }
    if (!ledger->writable) {
        return -EBADF;
    }
    int result = kvl_check_stamp(ledger);
    if (result < 0) {
        return result;
    }
    struct raise call = {.file = ledger->file, .slot = slot, .bound = bound, .incarnation = incarnation, .word = word,
                         .floor = floor};
    if (record != NULL) {
        call.record = *record;
        call.has_record = 1;
    }
    pthread_mutex_lock(&ledger->raising);
    result = raise_locked(ledger, &call);
    pthread_mutex_unlock(&ledger->raising);
    *found = call.found;
    return result;
}

/* The report ---------------------------------------------------------------------------------------------------- */

int kvl_acknowledge(kvl_ledger *ledger, const struct kvl_report *report)
{
    if (ledger->fd < 0 || !ledger->owns) {
        return -EBADF;
    }
    int result = kvl_check_stamp(ledger);
    if (result < 0) {
        return result;
    }
    struct layout_report copy = {.body = *report};
    copy.body.reported_ns = kvl_realtime_ns();
    seal_report(&copy, ledger->incarnation);
    KVL_POINT("acknowledge:sealed");
    result = kvl_write_at(ledger, &copy, sizeof copy,
                          offset_of((uint32_t)ledger->slot) + offsetof(struct layout_slot, report));
    KVL_POINT("acknowledge:written");
    return result;
}
