/* SPDX-License-Identifier: Apache-2.0
 *
 * handle.h - an open ledger, and what the library's files share. Private to the library. Every file includes it first.
 */
#ifndef KVL_HANDLE_H
#define KVL_HANDLE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* open-file-description locks, O_TMPFILE, clone: for all files of the library, in this one place */
#endif

#include <errno.h>
#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "layout.h"

struct kvl_ledger {
    /* The whole file, through a description of its own: a mapping keeps its description alive, in forked children too,
     * and with it all locks of that description. Only addresses in it are used here; see isolate.c for the loads. */
    struct layout_file *file;
    int fd; /* holds the locks; -1 in a forked child */
    int writable;
    /* Set by kvl_register in this order, while other threads may look. */
    _Atomic uint64_t incarnation;
    _Atomic int slot; /* what was registered through this handle, else -1 */
    _Atomic int owns; /* whether it is still registered */
    pthread_mutex_t raising; /* threads share the handle's locks: the first one to finish would unlock for the others */
    uint64_t device;
    uint64_t inode;
    struct layout_stamp stamp; /* as the file was opened */
    kvl_ledger *next;
    kvl_ledger *previous;
};

/* A build for crash tests stops at these points; every other build has none. */
#ifdef KVL_CRASH_POINTS
extern void (*kvl_crash_hook)(const char *point);
#define KVL_POINT(name) (kvl_crash_hook ? kvl_crash_hook(name) : (void)0)
#else
#define KVL_POINT(name) ((void)0)
#endif

/* file.c: 0, KVL_E_DAMAGED for a file that is not the one that was opened, or -errno. What every write begins with: also
 * a descriptor that somebody closed and the kernel gave to another file does not pass. */
int kvl_check_stamp(const kvl_ledger *ledger);

/* Read `size` bytes at `offset`: 0, KVL_E_DAMAGED if the file ends before, or -errno. */
int kvl_read_at(const kvl_ledger *ledger, void *target, size_t size, size_t offset);
int kvl_write_at(const kvl_ledger *ledger, const void *source, size_t size, size_t offset);

/* The lock that fork takes: held while a descriptor is open that no handle has. */
void kvl_lock_handles(void);
void kvl_unlock_handles(void);

/* Open the file once more under its name, read-only, for looking at the handle's own locks: 0, KVL_E_REPLACED, -errno. */
int kvl_open_again(const kvl_ledger *ledger, int directory_fd, const char *name, int *fd);

/* isolate.c: run `function` where a fault in mapped ledger memory ends nothing: its result, KVL_E_DAMAGED
 * after such a fault, or -errno. What it leaves in `argument`, `size` bytes, is copied back. */
int kvl_isolated(int (*function)(void *argument), void *argument, size_t size);

/* audit.c: append a record; only inside kvl_isolated. */
void kvl_audit_append(struct layout_file *file, const struct kvl_audit *record);

static inline uint64_t kvl_realtime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* FNV-1a over 64-bit words with a shift, so that high bits reach low ones: it tells whole records from torn ones, not
 * honest writers from hostile ones. */
static inline uint64_t kvl_hash(uint64_t hash, const void *source, size_t size)
{
    const unsigned char *bytes = source;
    for (size_t i = 0; i + 8 <= size; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, bytes + i, 8);
        hash = (hash ^ word) * UINT64_C(1099511628211);
        hash ^= hash >> 29;
    }
    return hash;
}

static inline uint64_t kvl_seal(uint64_t key, const void *source, size_t size)
{
    return kvl_hash(kvl_hash(UINT64_C(14695981039346656037), &key, sizeof key), source, size);
}

#endif /* KVL_HANDLE_H */
