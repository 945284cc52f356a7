/* SPDX-License-Identifier: Apache-2.0
 *
 * handle.h - an open ledger, and what the library's files share. Private to the library.
 */
#ifndef KVL_HANDLE_H
#define KVL_HANDLE_H

#include <stdatomic.h>
#include <time.h>

#include "layout.h"

struct kvl_ledger {
    struct layout_file *file;
    _Atomic int fd; /* -1 once the locks are given up: after kvl_release, and in a forked child */
    _Atomic uint64_t owned; /* bit n: slot n was registered through this handle */
    int writable;           /* else the mapping is read-only, and a store would end the process */
    int guard;              /* index of the mapping in the table of guard.c */
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

/* A relaxed store of a shared word: the one way to write where a crash between any two stores has to be survived. */
#define put(object, value) (KVL_POINT("store"), atomic_store_explicit((object), (value), memory_order_relaxed))

/* guard.c: mappings whose loss must not end the process. The index, or -EMFILE. */
int kvl_guard_add(void *base);
void kvl_guard_remove(int index);
int kvl_guard_hit(int index);

static inline struct layout_slot *slot_at(const kvl_ledger *ledger, uint32_t slot)
{
    return slot < KVL_SLOTS ? &ledger->file->slots[slot] : NULL;
}

static inline uint64_t realtime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Copy a structure into or out of shared words. Relaxed: whoever calls brackets the copy with a sequence or a seal. */
static inline void words_store(kvl_word *shared, const void *source, uint32_t count)
{
    const unsigned char *bytes = source;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t word;
        __builtin_memcpy(&word, bytes + 8 * (size_t)i, 8);
        put(&shared[i], word);
    }
}

static inline void words_load(void *target, const kvl_word *shared, uint32_t count)
{
    unsigned char *bytes = target;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&shared[i], memory_order_relaxed);
        __builtin_memcpy(bytes + 8 * (size_t)i, &word, 8);
    }
}

#endif /* KVL_HANDLE_H */
