/* SPDX-License-Identifier: Apache-2.0
 *
 * kvledger - how many tokens of KV each serving engine on a GPU may hold, idle and in all, in one small shared file.
 *
 * WHAT IT IS
 *   One file per GPU ("<gpu-id>.ledger") with a header and 64 slots. A slot belongs to one engine at a time. It has one
 *   64-bit *desired* word for each of two bounds, which publishers write: KVL_LIMIT bounds idle tokens, KVL_CAP all
 *   tokens of KV. A word is a revision (upper 32 bits) and a number of tokens (lower 32 bits, signed). The two words
 *   have nothing to do with each other: neither is ever read or raised for the other's sake. The engine answers in the
 *   same slot with a *report*.
 *
 * USAGE
 *   engine:     kvl_create, kvl_open(writable), kvl_register in each of the replica's ledgers.
 *               A watcher thread: seen = kvl_bell(KVL_PUBLISHED) of the last ledger; kvl_agree over all of them, for
 *               each bound; hand a pair with a higher revision to the scheduler through a word of the engine's own;
 *               kvl_wait(seen) for at most a second; and once a second kvl_check of each ledger. If one is not current:
 *               kvl_unregister everywhere, kvl_desired of each once more (a publication may have come in between),
 *               kvl_close, and register again, each bound at a revision above all that was seen of it, with the report.
 *               After applying: kvl_acknowledge, kvl_ring(KVL_ACKNOWLEDGED).
 *   publisher:  kvl_open(writable), kvl_read_slot to find the instance, kvl_raise on each member in byte order of the
 *               GPU ids, kvl_ring(KVL_PUBLISHED), kvl_is_owned to confirm; kvl_close.
 *   observer:   kvl_open(read-only), kvl_bell(KVL_ACKNOWLEDGED), kvl_read_slot, kvl_wait.
 *
 * MEMORY AND SIGNALS
 *   Everything is read with pread and written with pwrite, apart from the compare-and-swap of kvl_raise and the record
 *   of kvl_audit_write. Those two run in a short-lived child that shares this process's memory but not its signal
 *   table, so that a file cut under them is an error code. The bells are counted and slept on by the kernel. So no
 *   function loads or stores ledger memory in this process, none can raise SIGBUS in it, and none installs a handler.
 *
 * OWNERSHIP AND LIFETIME
 *   A slot is alive while its owner holds an open-file-description lock on a byte far behind the end of the file, at an
 *   offset made from its incarnation. The kernel drops that lock when the owner ends, however it ends, so no pid is
 *   trusted and nothing needs cleaning up; and a lock never proves that another incarnation is alive, whatever was
 *   copied into the slot. The owner also locks the slot's first byte, which keeps the slot until kvl_close. Publishers
 *   hold a shared lock on the slot's second byte during kvl_raise, and kvl_register takes only slots of which it can
 *   lock both bytes: a slot cannot change its owner under a publisher's compare-and-swap.
 *   A forked child holds no lock: a pthread_atfork handler closes its copies of the descriptors. _Fork() and the raw
 *   system call are not covered. Files are never truncated, resized or removed. No descriptor is below 3.
 *
 * ORDERING AND THREADS
 *   The kernel's lock on the list of file locks orders an owner that gives its slot up and then looks at the word
 *   against a publisher that raises the word and then asks whether the slot is owned: one of them sees the other.
 *   The compare-and-swap releases what a publisher wrote to earlier members; kvl_agree reads the last member first.
 *   A handle may be used by several threads; kvl_register, kvl_unregister and kvl_acknowledge of one handle are for one
 *   thread at a time, and kvl_close may not run beside any other call with the same handle. A sleeping kvl_wait counts.
 *
 * WHAT A CRASH LEAVES
 *   A publisher killed anywhere leaves each word old or new. An engine killed anywhere leaves a dead slot. A report or
 *   record that was not written whole is recognised by its seal. A creation killed anywhere leaves no file, or the
 *   whole one. No lock can be held against others by a dead or stopped process, apart from its own slot.
 *
 * A DAMAGED FILE
 *   A peer that may write the file can also cut it, punch holes into it, or copy another ledger over it. kvl_open
 *   remembers the file's stamp, which holds a random identity. kvl_check and every function that writes compare it.
 *
 * FILE FORMAT
 *   Magic, byte order, format and a fingerprint of all offsets are checked on every open. The file is in the machine's
 *   own byte order and never leaves it. All times are CLOCK_REALTIME in nanoseconds. KVL_FORMAT is the version of the
 *   file, KVL_ABI that of the structures and functions below.
 *
 * ERRORS
 *   Functions return a value >= 0, a negated errno, or a KVL_E code below -1000.
 */
#ifndef KVLEDGER_H
#define KVLEDGER_H

#ifndef KVL_DECLARATIONS_ONLY /* the binding generator reads this header without its includes */
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#endif

enum {
    KVL_ABI = 3,
    KVL_FORMAT = 3,
    KVL_SLOTS = 64,
    KVL_FILE_BYTES = 81920,
    KVL_AUDIT_RECORDS = 64,
    KVL_NAME_BYTES = 64,
    KVL_ENGINE_BYTES = 16,
    KVL_VERSION_BYTES = 16,
    KVL_REASON_BYTES = 128,
    KVL_RETURNS_BYTES = 128,
    KVL_PROGRAM_BYTES = 24,
    KVL_NOTE_BYTES = 56
};

/* What a desired word bounds, and how many such words a slot has. */
enum { KVL_LIMIT = 0, KVL_CAP = 1, KVL_BOUNDS = 2 };

/* Why kvl_open refuses a file. */
enum {
    KVL_E_NOT_REGULAR = -1001, /* a symlink, directory, device or pipe */
    KVL_E_HARD_LINKED = -1002, /* more than one name */
    KVL_E_SIZE = -1003,        /* not KVL_FILE_BYTES long: cut, or no ledger */
    KVL_E_MAGIC = -1004,       /* not a ledger */
    KVL_E_BYTE_ORDER = -1005,  /* written by a machine with the opposite byte order */
    KVL_E_FORMAT = -1006,      /* a ledger of another version */
    KVL_E_LAYOUT = -1007       /* this version, but built with other sizes or offsets */
};

/* What became of an open ledger, or of a registration in it. */
enum {
    KVL_E_REPLACED = -1011,  /* the name is gone or leads to another file */
    KVL_E_DAMAGED = -1012,   /* the file was cut or overwritten: its stamp is not the one it was opened with */
    KVL_E_DISPLACED = -1013, /* the slot carries another incarnation */
    KVL_E_SET_BACK = -1014,  /* a word of the slot went back to a revision below one that was read there */
    KVL_E_UNLOCKED = -1015   /* the lock is gone, as after another thread closed the descriptor */
};

/* The two doorbells of a file. */
enum { KVL_PUBLISHED = 0, KVL_ACKNOWLEDGED = 1 };

/* Results of kvl_raise. */
enum { KVL_OVERTAKEN = 0, KVL_RAISED = 1 };

/* Results of kvl_read_slot. */
enum { KVL_DEAD = 0, KVL_ALIVE = 1, KVL_TORN = 2 };

typedef struct kvl_ledger kvl_ledger;

/* What a file is, whether it was accepted or refused. */
struct kvl_file {
    uint64_t device;
    uint64_t inode;
    uint64_t size;
    uint64_t links;
    uint32_t uid;
    uint32_t gid;
    uint32_t mode;   /* as in struct stat */
    uint32_t format; /* as found in the file; 0 when it could not be read */
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
    int32_t startup_cap;
    uint32_t block_tokens;
    uint32_t pid; /* for people only: nothing trusts it */
    uint32_t unused;
};

/* What the owner says of one bound. */
struct kvl_answer {
    uint64_t applied;          /* the pair in force, packed like the desired word */
    uint32_t settled_revision; /* newest revision applied or rejected */
    uint32_t outcome;          /* the caller's enumeration; this library only carries it */
    char reason[KVL_REASON_BYTES];
};

/* What the owner says of itself. Sizes are in tokens where their names do not say bytes. */
struct kvl_report {
    struct kvl_answer answers[KVL_BOUNDS];
    int64_t idle;
    int64_t active;
    int64_t capacity;
    int64_t evicted;
    int64_t token_bytes; /* of one token over all ranks; 0: unknown */
    int64_t pool_bytes;
    int64_t resident_bytes;
    int64_t returned_bytes;
    uint64_t reported_ns; /* set by kvl_register and kvl_acknowledge; 0 before the first report */
    uint32_t eviction_errors;
    uint32_t unused;
    char returns[KVL_RETURNS_BYTES]; /* whether memory is returned, or why not */
};

/* One slot as read. */
struct kvl_slot {
    uint64_t incarnation; /* random, the same in all members of one registration, never 0 */
    uint64_t desired[KVL_BOUNDS];
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
    uint32_t bound; /* which of the slot's words it was */
    uint32_t unused;
    char instance[KVL_NAME_BYTES];
    char program[KVL_PROGRAM_BYTES];
    char note[KVL_NOTE_BYTES];
};

/* Check that the caller was compiled against the structures above: 0, or -EPROTO. */
int kvl_check_abi(uint32_t abi, uint64_t file, uint64_t identity, uint64_t report, uint64_t slot, uint64_t audit);

/* Make the file `name` in directory `directory_fd` whole and allocated, and give it its name in one step.
 * 1 if this call made it, 0 if the name was taken, else -errno (-ENOSPC on a full file system; -EINVAL for a name that
 * is a path; -EOPNOTSUPP on a file system without unnamed files). Never follows or replaces what the name leads to.
 * The mode is set exactly, whatever the umask. Any thread. */
int kvl_create(int directory_fd, const char *name, uint32_t mode);

/* Open `name`, no path and never through a symlink. 0, KVL_E_*, or -errno; *file is filled as far as it is known.
 * Nothing is written to a refused file. Any thread. */
int kvl_open(int directory_fd, const char *name, int writable, struct kvl_file *file, kvl_ledger **out);

/* Close a handle: its locks end, and its slot is free. NULL is allowed. */
void kvl_close(kvl_ledger *ledger);

/* Claim a free slot, write `identity` with `incarnation` (not 0) and the KVL_BOUNDS words of `desired` into it, and own it
 * until kvl_unregister, kvl_close or the end of the process. The slot appears with `report` in it, so that nobody sees it
 * before what its owner says. A NULL report is empty and begins with the startup limit and cap: kvl_acknowledge says what
 * is in force. Once per handle.
 * The slot's index, -EUSERS if all are taken, -EBUSY if this handle registered before, or another error. */
int kvl_register(kvl_ledger *ledger, const struct kvl_identity *identity, uint64_t incarnation, const uint64_t *desired,
                 const struct kvl_report *report);

/* Stop owning the slot: it is dead for everybody from now on. Nobody else can claim it before kvl_close, so that its
 * word can be read once more. 0, -EBADF if this handle registered nothing (or was inherited by a fork), or -errno. */
int kvl_unregister(kvl_ledger *ledger);

/* Look whether an open ledger is the file that `name` (here also a path) leads to, whole and as it was opened; for an
 * owner, also whether its registration is as it was made: 0, or the KVL_E code that says why publishers cannot reach it
 * any more, or -errno, which says neither. For engines about once a second. `revisions` are KVL_BOUNDS revisions that were
 * read in the slot's words before, else 0. Any thread. */
int kvl_check(const kvl_ledger *ledger, int directory_fd, const char *name, const uint32_t *revisions);

/* Copy a slot. KVL_ALIVE; KVL_TORN if it is alive but its report is not whole (the report is then all zero); KVL_DEAD if
 * nobody owns it (*out is untouched); -EAGAIN if it kept changing; or another error, which says nothing about the
 * owner's life. The owner's own handle does not see its own lock. Any thread. */
int kvl_read_slot(const kvl_ledger *ledger, uint32_t slot, struct kvl_slot *out);

/* Read the desired word of one bound in a slot that carries `incarnation`, alive or not: 0, -EINVAL, KVL_E_DISPLACED,
 * KVL_E_DAMAGED, or -errno. */
int kvl_desired(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, uint32_t bound, uint64_t *word);

/* Read the desired words of one bound in the slots that `count` handles registered, the last one first. 1 and the word if
 * all are equal and all slots carry the incarnation of the first handle's registration; else 0. For the owner; any
 * thread. */
int kvl_agree(const kvl_ledger *const *ledgers, uint32_t count, uint32_t bound, uint64_t *word);

/* Set the desired word of one bound to `word` by compare-and-swap if its revision is lower, while `incarnation` owns the
 * slot, and append `record` (may be NULL) with `before`, `after` and `bound` filled in. `floor` is a revision that the
 * caller read in the word before.
 * KVL_RAISED, KVL_OVERTAKEN if the word found has this revision or a higher one, KVL_E_SET_BACK if it is below `floor`
 * (an old copy of the file was put back), -ESRCH if the slot has no or another owner, -EINVAL for a slot or bound that
 * does not exist, KVL_E_DAMAGED, -EBADF for a handle that is read-only or inherited, or -errno. *found is the word that
 * was replaced or that won. It repeats only when another publisher succeeded. */
int kvl_raise(kvl_ledger *ledger, uint32_t slot, uint64_t incarnation, uint32_t bound, uint64_t word, uint32_t floor,
              const struct kvl_audit *record, uint64_t *found);

/* 1 if `incarnation` owns the slot, 0 if not, or an error, which says neither. */
int kvl_is_owned(const kvl_ledger *ledger, uint32_t slot, uint64_t incarnation);

/* Write a report into the handle's slot. 0, -EBADF if it has none (or was inherited), KVL_E_DAMAGED, or -errno. */
int kvl_acknowledge(kvl_ledger *ledger, const struct kvl_report *report);

/* Append to the file's bounded record of publications. 0, KVL_E_DAMAGED, -EBADF for a read-only handle, or -errno. */
int kvl_audit_write(kvl_ledger *ledger, const struct kvl_audit *record);

/* Copy the records into `out`, newest first, and return how many there are, at most KVL_AUDIT_RECORDS; or -errno.
 * *written is how many were ever begun. Records that were not written whole are left out. */
int kvl_audit_read(const kvl_ledger *ledger, struct kvl_audit *out, uint64_t *written);

/* Read the count of a bell: 0, KVL_E_DAMAGED, or -errno. Take it before looking for what the bell announces. */
int kvl_bell(const kvl_ledger *ledger, uint32_t bell, uint32_t *count);

/* Ring a bell: count it up and wake all who wait, in a damaged file without counting. 0, -EBADF for a read-only handle, KVL_E_DAMAGED, or -errno. */
int kvl_ring(kvl_ledger *ledger, uint32_t bell);

/* Sleep until the bell's count differs from `seen` or CLOCK_MONOTONIC reaches `deadline_ns`.
 * 0, -ETIMEDOUT, -EINTR, or KVL_E_DAMAGED for a file that was cut. Needs no write access. */
int kvl_wait(const kvl_ledger *ledger, uint32_t bell, uint32_t seen, int64_t deadline_ns);

#ifndef KVL_DECLARATIONS_ONLY
#ifdef __cplusplus
}
#endif
#endif

#endif /* KVLEDGER_H */
