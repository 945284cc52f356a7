/* SPDX-License-Identifier: Apache-2.0
 *
 * audit.c - the last publications of a file: who, when, what was replaced by what.
 *
 * Writers take a ticket and write the record it points to, without waiting for anyone. A writer that dies over its
 * record, or is overtaken by another one ring later, leaves a record whose seal does not match; readers skip it.
 */
#include <errno.h>
#include <string.h>

#include "handle.h"

static uint64_t seal_of(uint64_t ticket, const uint64_t *body)
{
    uint64_t hash = KVL_MIX(UINT64_C(14695981039346656037), ticket + 1);
    for (int i = 0; i < AUDIT_WORDS; i++) {
        hash = KVL_MIX(hash, body[i]);
        hash ^= hash >> 29;
    }
    return hash;
}

int kvl_audit_write(kvl_ledger *ledger, const struct kvl_audit *record)
{
    if (!ledger->writable || atomic_load_explicit(&ledger->fd, memory_order_relaxed) < 0) {
        return -EBADF;
    }
    uint64_t body[AUDIT_WORDS];
    memcpy(body, record, sizeof body);
    /* relaxed: the seal, not the ticket, tells whether a record is whole */
    uint64_t ticket = atomic_fetch_add_explicit(&ledger->file->header.audit_tickets, 1, memory_order_relaxed);
    struct layout_audit *entry = &ledger->file->audit[ticket % KVL_AUDIT_RECORDS];
    KVL_POINT("audit:ticket");
    words_store(entry->body, body, AUDIT_WORDS);
    KVL_POINT("audit:body");
    /* release pairs with the acquire in kvl_audit_read */
    atomic_store_explicit(&entry->seal, seal_of(ticket, body), memory_order_release);
    return 0;
}

int kvl_audit_read(const kvl_ledger *ledger, uint32_t index, struct kvl_audit *out)
{
    uint64_t tickets = atomic_load_explicit(&ledger->file->header.audit_tickets, memory_order_relaxed);
    if (index >= KVL_AUDIT_RECORDS || index >= tickets) {
        return 0;
    }
    uint64_t ticket = tickets - 1 - index;
    const struct layout_audit *entry = &ledger->file->audit[ticket % KVL_AUDIT_RECORDS];
    /* acquire pairs with the release in kvl_audit_write */
    uint64_t seal = atomic_load_explicit(&entry->seal, memory_order_acquire);
    uint64_t body[AUDIT_WORDS];
    words_load(body, entry->body, AUDIT_WORDS);
    if (seal != seal_of(ticket, body)) {
        return 0;
    }
    memcpy(out, body, sizeof body);
    out->instance[KVL_NAME_BYTES - 1] = '\0';
    out->program[KVL_PROGRAM_BYTES - 1] = '\0';
    out->note[KVL_NOTE_BYTES - 1] = '\0';
    return 1;
}
