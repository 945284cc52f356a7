/* SPDX-License-Identifier: Apache-2.0
 *
 * audit.c - the last publications of a file: who, when, what was replaced by what.
 *
 * Writers take a ticket and write the record it points to, without waiting for anyone. A writer that dies over its
 * record, or is overtaken by another one ring later, leaves a record whose seal does not match; readers skip it.
 */
#include "handle.h"

#include <string.h>

/* Called in the child of kvl_isolated: `file` is the mapping. */
void kvl_audit_append(struct layout_file *file, const struct kvl_audit *record)
{
    uint64_t words[AUDIT_WORDS];
    memcpy(words, record, sizeof words);
    /* relaxed: the seal, not the ticket, tells whether a record is whole */
    uint64_t ticket = atomic_fetch_add_explicit(&file->header.audit_tickets, 1, memory_order_relaxed);
    struct layout_audit *entry = &file->audit[ticket % KVL_AUDIT_RECORDS];
    KVL_POINT("audit:begun");
    for (int i = 0; i < AUDIT_WORDS; i++) {
        atomic_store_explicit(&entry->body[i], words[i], memory_order_relaxed);
        KVL_POINT("audit:stored");
    }
    /* release: the body is visible before its seal */
    atomic_store_explicit(&entry->seal, kvl_seal(ticket, words, sizeof words), memory_order_release);
}

struct append {
    struct layout_file *file;
    struct kvl_audit record;
};

static int append(void *argument)
{
    const struct append *call = argument;
    kvl_audit_append(call->file, &call->record);
    return 0;
}

int kvl_audit_write(kvl_ledger *ledger, const struct kvl_audit *record)
{
    if (!ledger->writable) {
        return -EBADF;
    }
    int result = kvl_check_stamp(ledger);
    if (result < 0) {
        return result;
    }
    struct append call = {.file = ledger->file, .record = *record};
    return kvl_isolated(append, &call, sizeof call);
}

int kvl_audit_read(const kvl_ledger *ledger, struct kvl_audit *out, uint64_t *written)
{
    /* Before the records: one that is written meanwhile carries a later ticket and is left out, never shown twice. */
    int result = kvl_read_at(ledger, written, sizeof *written, offsetof(struct layout_file, header.audit_tickets));
    struct {
        uint64_t body[AUDIT_WORDS];
        uint64_t seal;
    } entries[KVL_AUDIT_RECORDS];
    _Static_assert(sizeof entries[0] == sizeof(struct layout_audit), "as stored");
    if (result == 0) {
        result = kvl_read_at(ledger, entries, sizeof entries, offsetof(struct layout_file, audit));
    }
    if (result < 0) {
        return result;
    }
    int count = 0;
    for (uint64_t age = 0; age < KVL_AUDIT_RECORDS && age < *written; age++) {
        uint64_t ticket = *written - 1 - age;
        if (entries[ticket % KVL_AUDIT_RECORDS].seal ==
            kvl_seal(ticket, entries[ticket % KVL_AUDIT_RECORDS].body, sizeof entries[0].body)) {
            struct kvl_audit *record = &out[count++];
            memcpy(record, entries[ticket % KVL_AUDIT_RECORDS].body, sizeof *record);
            record->instance[KVL_NAME_BYTES - 1] = '\0'; /* a peer may have written anything */
            record->program[KVL_PROGRAM_BYTES - 1] = '\0';
            record->note[KVL_NOTE_BYTES - 1] = '\0';
        }
    }
    return count;
}
