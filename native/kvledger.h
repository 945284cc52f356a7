/* SPDX-License-Identifier: Apache-2.0
 *
 * kvledger - how many idle prefix-cache tokens each serving engine on a GPU may retain, in one small shared file.
 *
 * WHAT IT IS
 *   One file per GPU ("<gpu-id>.ledger"), mapped by engines and by whoever changes their limits. It holds a header and
 *   64 slots. A slot belongs to one engine at a time. Publishers write one 64-bit word in it, the *desired* word:
 *   revision (upper 32 bits) and limit (lower 32 bits, signed). The engine answers in the same slot with a *report*.
 *
 * USAGE
 *   engine:     kvl_create, kvl_open(writable), kvl_register;
 *               each step: load *kvl_desired_word(); when it changed, kvl_agree() over all members of the replica;
 *               after applying: kvl_acknowledge, kvl_ring(KVL_ACKNOWLEDGED).
 *   publisher:  kvl_open(writable), kvl_read_slot to find the instance, kvl_raise on each member in byte order of
 *               the GPU ids, kvl_ring(KVL_PUBLISHED), kvl_is_owned to confirm; kvl_close.
 *   observer:   kvl_open(read-only), kvl_read_slot, kvl_wait(KVL_ACKNOWLEDGED).
 *
 * OWNERSHIP AND LIFETIME
 *   A slot is alive exactly while its owner holds an open-file-description lock on the slot's first byte. The kernel
 *   drops that lock when the owner ends, however it ends, so no pid is ever trusted and nothing needs a clean-up.
 *   Publishers hold a shared lock on the slot's second byte during kvl_raise, and kvl_register takes only slots of
 *   which it can lock both bytes: a slot cannot change its owner under a publisher's compare-and-swap.
 *   Locks are those of the handle: they end with kvl_release, and a forked child holds none (its copies are closed by
 *   a pthread_atfork handler; fork by a raw system call is not covered). Files are never truncated, resized or removed.
 *
 * ORDERING AND THREADS
 *   Every shared field is a C11 atomic. What pairs with what stands at each access in kvledger.c; in short:
 *     incarnation  release store after the identity    <-> acquire load before reading it, fence and re-load after
 *     desired      release compare-and-swap, members in order <-> acquire load, last member first
 *     report.seq   odd while writing, release when done <-> acquire load, fence and re-load
 *     bells        release add after the store they announce <-> acquire load before looking for it
 *   A handle may be used by several threads, but kvl_raise and kvl_close of one handle are for one thread at a time.
 *
 * WHAT A CRASH LEAVES
 *   A publisher killed anywhere leaves each word old or new. An engine killed anywhere leaves a dead slot. A torn
 *   report or audit record is recognised as such. There is no lock that a dead or stopped process could hold against
 *   others, apart from its own slot.
 *
 * A TRUNCATED FILE
 *   A peer that may write the file can also cut it, and touching the lost pages would raise SIGBUS. The library handles
 *   SIGBUS for its own mappings: the pages are replaced by private zero pages, kvl_is_lost turns true, and the process
 *   goes on. Other faults are passed on to the handler that stood before. kvl_guard re-installs the handler if
 *   someone else replaced it.
 *
 * FILE FORMAT
 *   Magic, byte order, version and a fingerprint of sizes and offsets are checked on every open. The file is in the
 *   machine's own byte order and never leaves it. All times are CLOCK_REALTIME in nanoseconds.
 *
 * ERRORS
 *   Functions return a value >= 0, or a negated errno, or one of the KVL_E codes below for a file that is refused.
 */
#ifndef KVLEDGER_H
#define KVLEDGER_H

#ifndef KVL_DECLARATIONS_ONLY /* the binding generator reads this header without its includes */
#include <stdint.h>
#endif

enum {
    KVL_ABI = 1,
    KVL_SLOTS = 64,
    KVL_FILE_BYTES = 32768,
    KVL_AUDIT_RECORDS = 32,
    KVL_NAME_BYTES = 64,
    KVL_ENGINE_BYTES = 16,
    KVL_VERSION_BYTES = 16,
    KVL_REASON_BYTES = 128,
    KVL_PROGRAM_BYTES = 24,
    KVL_NOTE_BYTES = 56
};

/* Why kvl_open refuses a file. */
enum {
    KVL_E_NOT_REGULAR = -1001, /* a symlink, directory, device or pipe */
    KVL_E_HARD_LINKED = -1002, /* more than one name, or none */
    KVL_E_SIZE = -1003,        /* not KVL_FILE_BYTES long, as a half-made or truncated file */
    KVL_E_MAGIC = -1004,       /* no ledger at all */
    KVL_E_BYTE_ORDER = -1005,  /* written by a machine of the other byte order */
    KVL_E_ABI = -1006,         /* a ledger of another version */
    KVL_E_LAYOUT = -1007       /* this version, but built with other sizes or offsets */
};

/* The two doorbells of a file. */
enum { KVL_PUBLISHED = 0, KVL_ACKNOWLEDGED = 1 };

/* Results of kvl_raise. */
enum { KVL_LOST = 0, KVL_RAISED = 1 };

typedef struct kvl_ledger kvl_ledger;

/* What a file is, whether it was accepted or refused. */
struct kvl_file {
    uint64_t device;
    uint64_t inode;
    uint64_t size;
    uint64_t links;
    uint32_t uid;
    uint32_t gid;
    uint32_t mode; /* as in struct stat */
    uint32_t abi;  /* as found in the file; 0 when it could not be read */
};

/* Who owns a slot; fixed from registration to its end. */
struct kvl_identity {
    char instance[KVL_NAME_BYTES];
    char engine[KVL_ENGINE_BYTES];
    char version[KVL_VERSION_BYTES];
    uint32_t replica;
    uint32_t member;
    uint32_t members;
    uint32_t tp_size;
    uint32_t pp_size;
    int32_t startup_limit;
    uint32_t block_tokens;
    uint32_t pid; /* for people only: nothing trusts it */
};

/* What the owner says of itself. Sizes are in tokens. */
struct kvl_report {
    uint64_t applied; /* the pair in force, packed like the desired word */
    int64_t idle;
    int64_t active;
    int64_t capacity;
    int64_t evicted;
    uint32_t eviction_errors;
    uint32_t outcome; /* the caller's enumeration; this library only carries it */
    uint64_t reported_ns;
    uint32_t settled_revision; /* newest revision applied or rejected */
    uint32_t consistent;       /* 0 when the owner stopped in mid-report: fields may belong to two reports */
    char reason[KVL_REASON_BYTES];
};

/* One slot as read. */
struct kvl_slot {
    uint64_t incarnation; /* random, the same in all members of one registration, never 0 */
    uint64_t desired;
    uint64_t registered_ns;
    struct kvl_identity identity;
    struct kvl_report report;
};

/* One publication, as its publisher recorded it. */
struct kvl_audit {
    uint64_t when_ns;
    uint64_t before; /* the word that was replaced */
    uint64_t after;
    uint32_t uid;
    uint32_t pid;
    char instance[KVL_NAME_BYTES];
    char program[KVL_PROGRAM_BYTES];
    char note[KVL_NOTE_BYTES];
};

/* Check that the caller was compiled against the structures above: 0, or -EPROTO. */
int kvl_check_abi(uint32_t abi, uint64_t file, uint64_t identity, uint64_t report, uint64_t slot, uint64_t audit);

/* Return the fingerprint of version, sizes and offsets that stands in every file of this library. */
uint64_t kvl_layout(void);

/* Make the file `name` in directory `directory_fd` whole and allocated, under a temporary name, and move it into place.
 * 1 if this call made it, 0 if the name was taken, else -errno (-ENOSPC on a full file system; -EINVAL for a name that
 * is a path). Never follows or replaces what stands there. The mode is set exactly, whatever the umask. Any thread.
 * One that is killed leaves ".<name>.<16 hex digits>.new" at most, which may be removed at any time. */
int kvl_create(int directory_fd, const char *name, uint32_t mode);

/* Open and map `name`, no path and never through a symlink. 0, KVL_E_*, or -errno; *file is filled as far as it is known.
 * Nothing is written to a refused file. Any thread. */
int kvl_open(int directory_fd, const char *name, int writable, struct kvl_file *file, kvl_ledger **out);

/* Drop the locks of a handle but keep its memory mapped, so that words already looked at stay readable. */
void kvl_release(kvl_ledger *ledger);

/* Release and unmap. No pointer obtained from the handle may be used afterwards. NULL is allowed. */
void kvl_close(kvl_ledger *ledger);

/* Claim a free slot, write `identity` with `incarnation` (not 0) and `desired` into it, and own it until
 * kvl_unregister, kvl_release, kvl_close or the end of the process.
 * The slot's report is empty and begins with the startup limit: kvl_acknowledge says what holds.
 * The slot's index, -EUSERS if all are taken, or -errno. One thread at a time. */
int kvl_register(kvl_ledger *ledger, const struct kvl_identity *identity, uint64_t incarnation, uint64_t desired);

/* Give a slot of one's own back. 0, -EBADF if it is not one's own (any more, as after fork), or -errno. */
int kvl_unregister(kvl_ledger *ledger, uint32_t slot);

/* Copy a slot. 1 if it is alive, 0 if not (then *out is untouched), -EAGAIN if it kept changing, or -errno. The owner's
 * own handle does not see its own lock: read one's own slots through another handle. Any thread; wait-free. */
int kvl_read_slot(const kvl_ledger *ledger, uint32_t slot, struct kvl_slot *out);

/* Return where the desired word of a slot stands, for the owner's hot look; valid until kvl_close. */
const uint64_t *kvl_desired_word(const kvl_ledger *ledger, uint32_t slot);

/* Load `count` words with acquire order, the last one first. 1 and the word if all are equal, else 0. Wait-free. */
int kvl_agree(const uint64_t *const *words, uint32_t count, uint64_t *word);

/* Set the desired word to `word` by compare-and-swap if its revision is lower, while `incarnation` owns the slot.
 * KVL_RAISED, KVL_LOST if the word found has this revision or a higher one, -ESRCH if the slot has no or another
 * owner, -EBADF for a handle that is read-only or released, or -errno. *found is the word that was replaced or that won. Lock-free: it repeats only when another
 * publisher succeeded. */
int kvl_raise(kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, uint64_t word, uint64_t *found);

/* 1 if `incarnation` still owns the slot, else 0. */
int kvl_is_owned(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation);

/* Write a report into a slot of one's own; `consistent` is ignored. 0, or -EBADF if it is not one's own (any more, as after fork or release).
 * One thread at a time. Wait-free, no system call. */
int kvl_acknowledge(kvl_ledger *ledger, uint32_t slot, const struct kvl_report *report);

/* Append to the file's bounded record of publications. 0, or -EBADF for a handle that is read-only or released.
 * Wait-free. */
int kvl_audit_write(kvl_ledger *ledger, const struct kvl_audit *record);

/* Read record `index` (0 is the newest). 1, or 0 if there is none or its writer died over it. */
int kvl_audit_read(const kvl_ledger *ledger, uint32_t index, struct kvl_audit *out);

/* Return the count of a bell, with acquire order. Take it before looking for what the bell announces. */
uint32_t kvl_bell(const kvl_ledger *ledger, uint32_t bell);

/* Ring a bell: count it up with release order and wake all who wait. Does nothing through a read-only handle. */
void kvl_ring(kvl_ledger *ledger, uint32_t bell);

/* Sleep until the bell's count differs from `seen` or CLOCK_MONOTONIC reaches `deadline_ns`.
 * 0, -ETIMEDOUT, -EINTR, or -EFAULT for a lost file. Needs no write access. */
int kvl_wait(const kvl_ledger *ledger, uint32_t bell, uint32_t seen, int64_t deadline_ns);

/* 1 once the file was found truncated under the mapping: nothing read from it counts any more. */
int kvl_is_lost(const kvl_ledger *ledger);

/* Make sure that this library's SIGBUS handler is the installed one. 0 or -errno. kvl_open does it too. */
int kvl_guard(void);

#endif /* KVLEDGER_H */
