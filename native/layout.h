/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h - what stands where in a ledger file. Private to the library: others go through kvledger.h.
 *
 * Who writes a cache line is the rule of the layout: owner, publishers and reports never share one.
 */
#ifndef KVL_LAYOUT_H
#define KVL_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "kvledger.h"

#define KVL_LINE 64
#define KVL_MAGIC UINT64_C(0x72656764656c766b) /* reads "kvledger" in a little-endian hex dump */
#define KVL_BYTE_ORDER UINT32_C(0x01020304)

typedef _Atomic uint64_t kvl_word;
typedef _Atomic uint32_t kvl_half;

enum {
    IDENTITY_WORDS = (int)(sizeof(struct kvl_identity) / 8),
    REASON_WORDS = KVL_REASON_BYTES / 8,
    AUDIT_WORDS = (int)(sizeof(struct kvl_audit) / 8)
};

struct layout_header {
    uint64_t magic; /* these five are written before the file gets its name, and never again */
    uint32_t byte_order;
    uint32_t abi;
    uint64_t layout;
    uint64_t file_bytes;
    uint64_t created_ns;
    _Alignas(KVL_LINE) kvl_half published;    /* KVL_PUBLISHED: rung by publishers */
    _Alignas(KVL_LINE) kvl_half acknowledged; /* KVL_ACKNOWLEDGED: rung by owners */
    _Alignas(KVL_LINE) kvl_word audit_tickets; /* how many records were begun */
};

struct layout_report {
    kvl_word applied;
    kvl_word idle;
    kvl_word active;
    kvl_word capacity;
    kvl_word evicted;
    kvl_half eviction_errors;
    kvl_half outcome;
    kvl_word reported_ns;
    kvl_half settled_revision;
    kvl_half seq; /* odd while the owner writes */
    kvl_word reason[REASON_WORDS];
};

struct layout_slot {
    _Alignas(KVL_LINE) kvl_word identity[IDENTITY_WORDS]; /* owner, at registration */
    _Alignas(KVL_LINE) kvl_word desired;                  /* publishers, by compare-and-swap */
    kvl_word incarnation;                                 /* owner, at registration; 0: nobody's */
    kvl_word registered_ns;
    _Alignas(KVL_LINE) struct layout_report report; /* owner */
};

struct layout_audit {
    kvl_word body[AUDIT_WORDS];
    kvl_word seal; /* hash over ticket and body: a record overtaken or left half-way does not match */
};

struct layout_file {
    struct layout_header header;
    struct layout_slot slots[KVL_SLOTS];
    _Alignas(KVL_LINE) struct layout_audit audit[KVL_AUDIT_RECORDS];
};

_Static_assert(sizeof(struct kvl_identity) == 128, "two cache lines");
_Static_assert(sizeof(struct kvl_report) == 192, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_slot) == 344, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_audit) == 176, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_file) == 48, "public structure, part of the ABI");
_Static_assert(offsetof(struct layout_header, published) == 1 * KVL_LINE, "publishers' line");
_Static_assert(offsetof(struct layout_header, acknowledged) == 2 * KVL_LINE, "owners' line");
_Static_assert(offsetof(struct layout_header, audit_tickets) == 3 * KVL_LINE, "publishers' line");
_Static_assert(sizeof(struct layout_header) == 4 * KVL_LINE, "");
_Static_assert(offsetof(struct layout_slot, desired) == 2 * KVL_LINE, "publishers' line");
_Static_assert(offsetof(struct layout_slot, report) == 3 * KVL_LINE, "owner's lines");
_Static_assert(offsetof(struct layout_report, reason) == KVL_LINE, "the figures fill one line");
_Static_assert(sizeof(struct layout_slot) == 6 * KVL_LINE, "");
_Static_assert(sizeof(struct layout_audit) == 184, "");
_Static_assert(sizeof(struct layout_file) <= KVL_FILE_BYTES, "a ledger file stays within 32 KiB");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "shared words need lock-free atomics");

/* A fingerprint of what the assertions above pin, so that a build that differs is told apart even at one version. */
#define KVL_MIX(hash, value) ((UINT64_C(1099511628211) * (hash)) ^ (uint64_t)(value))
#define KVL_LAYOUT                                                                                                     \
    KVL_MIX(KVL_MIX(KVL_MIX(KVL_MIX(KVL_MIX(KVL_MIX(UINT64_C(14695981039346656037), KVL_ABI),                          \
                                            sizeof(struct layout_file)),                                               \
                                    sizeof(struct layout_slot)),                                                       \
                            offsetof(struct layout_slot, desired)),                                                    \
                    offsetof(struct layout_slot, report)),                                                             \
            offsetof(struct layout_file, audit))

#endif /* KVL_LAYOUT_H */
