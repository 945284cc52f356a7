/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h - what is stored where in a ledger file. Private to the library: others go through kvledger.h.
 *
 * A cache line has one kind of writer: owner, publishers or reports. A slot never crosses a page, so that one pwrite
 * into it is done or not done when its caller is killed.
 */
#ifndef KVL_LAYOUT_H
#define KVL_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "kvledger.h"

#define KVL_LINE 64
#define KVL_PAGE 4096
#define KVL_MAGIC UINT64_C(0x72656764656c766b) /* reads "kvledger" in a little-endian hex dump */
#define KVL_BYTE_ORDER UINT32_C(0x01020304)

typedef _Atomic uint64_t kvl_word;

enum { AUDIT_WORDS = (int)(sizeof(struct kvl_audit) / 8) };

/* Written before the file gets its name, and never again. */
struct layout_stamp {
    uint64_t magic;
    uint32_t byte_order;
    uint32_t format;
    uint64_t layout;
    uint64_t file_bytes;
    uint64_t created_ns;
    uint64_t identity[2]; /* random: two files never have the same stamp */
    uint64_t unused;
};

struct layout_header {
    struct layout_stamp stamp;
    _Alignas(KVL_LINE) uint32_t published;    /* KVL_PUBLISHED: rung by publishers */
    _Alignas(KVL_LINE) uint32_t acknowledged; /* KVL_ACKNOWLEDGED: rung by owners */
    _Alignas(KVL_LINE) kvl_word audit_tickets; /* how many records were begun */
};

/* The owner writes all of it at registration, and nothing afterwards: the desired words are the publishers' then. */
struct layout_ownership {
    kvl_word desired[KVL_BOUNDS]; /* publishers, by compare-and-swap of one word */
    uint64_t incarnation;         /* 0: nobody's */
    uint64_t registered_ns;
    uint64_t seal; /* over incarnation, registered_ns and identity */
};

struct layout_report {
    struct kvl_report body;
    uint64_t seal; /* over the owner's incarnation and the body */
};

struct layout_slot {
    _Alignas(1024) struct kvl_identity identity;
    _Alignas(KVL_LINE) struct layout_ownership ownership;
    _Alignas(KVL_LINE) struct layout_report report;
};

struct layout_audit {
    _Alignas(KVL_LINE) kvl_word body[AUDIT_WORDS];
    kvl_word seal; /* over ticket and body: a record overtaken or left half-way does not match */
};

struct layout_file {
    struct layout_header header;
    _Alignas(KVL_PAGE) struct layout_slot slots[KVL_SLOTS];
    _Alignas(KVL_PAGE) struct layout_audit audit[KVL_AUDIT_RECORDS];
};

_Static_assert(sizeof(void *) == 8, "engines run on 64-bit machines; futex and off_t are 64 bits wide here");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "shared words need lock-free atomics");
_Static_assert(sizeof(struct kvl_identity) == 136, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_report) == 496, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_slot) == 664, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_audit) == 184, "public structure, part of the ABI");
_Static_assert(sizeof(struct kvl_file) == 48, "public structure, part of the ABI");
_Static_assert(sizeof(struct layout_stamp) == KVL_LINE, "nothing else shares its line");
_Static_assert(offsetof(struct layout_slot, ownership) % KVL_LINE == 0, "publishers' line");
_Static_assert(offsetof(struct layout_slot, report) % KVL_LINE == 0, "owner's lines");
_Static_assert(sizeof(struct layout_ownership) <= KVL_LINE, "both words are in the publishers' line");
_Static_assert(sizeof(struct layout_slot) == 1024 && KVL_PAGE % 1024 == 0, "a slot crosses no page");
_Static_assert(sizeof(struct layout_audit) == 192, "");
_Static_assert(sizeof(struct layout_file) == KVL_FILE_BYTES, "");

#endif /* KVL_LAYOUT_H */
