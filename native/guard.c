/* SPDX-License-Identifier: Apache-2.0
 *
 * guard.c - a truncated ledger must not end the process that has it mapped.
 *
 * A peer that may write a ledger may also cut it, and the next load from a lost page raises SIGBUS. The handler here
 * answers faults inside the library's own mappings by putting private zero pages in their place; every other fault goes
 * to the handler that stood before. The table is read by a signal handler, hence plain atomics in a fixed array.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include "handle.h"

enum { GUARDED_MAPPINGS = 4096 };

static struct {
    _Atomic uintptr_t base; /* 0: free */
    _Atomic int hit;
} mappings[GUARDED_MAPPINGS];

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static _Atomic int passed_on;

/* acquire pairs with the release in kvl_guard_add: whoever sees the base sees the cleared hit. */
static int mapping_of(uintptr_t address)
{
    for (int i = 0; i < GUARDED_MAPPINGS; i++) {
        uintptr_t base = atomic_load_explicit(&mappings[i].base, memory_order_acquire);
        if (base != 0 && address >= base && address - base < KVL_FILE_BYTES) {
            return i;
        }
    }
    return -1;
}

/* Not ours: let the handler that stood before have the fault, which the return to the faulting instruction repeats. If it
 * comes back once more, that handler led here again, and only the default action ends the loop. */
static void pass_on(int number, const siginfo_t *info)
{
    if (atomic_exchange_explicit(&passed_on, 1, memory_order_relaxed) == 0) {
        sigaction(number, &previous, NULL);
    } else {
        struct sigaction standard;
        memset(&standard, 0, sizeof standard);
        standard.sa_handler = SIG_DFL;
        sigaction(number, &standard, NULL);
    }
    if (info->si_code <= 0) { /* sent by a process: nothing would repeat it */
        raise(number);
    }
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    int saved_errno = errno;
    int index = info->si_code > 0 ? mapping_of((uintptr_t)info->si_addr) : -1;
    if (index < 0) {
        pass_on(number, info);
    } else {
        /* relaxed: the flag carries no data with it, and its reader polls */
        atomic_store_explicit(&mappings[index].hit, 1, memory_order_relaxed);
        void *base = (void *)atomic_load_explicit(&mappings[index].base, memory_order_relaxed);
        if (mmap(base, KVL_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED) {
            pass_on(number, info);
        }
    }
    errno = saved_errno;
}

static int install(void)
{
    struct sigaction current;
    if (sigaction(SIGBUS, NULL, &current) != 0) {
        return -errno;
    }
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_sigbus) {
        return 0;
    }
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_sigbus;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    previous = current; /* before the handler can run, which reads it */
    /* Another handler to pass faults on to: it gets its try as well. */
    atomic_store_explicit(&passed_on, 0, memory_order_relaxed);
    return sigaction(SIGBUS, &ours, NULL) == 0 ? 0 : -errno;
}

int kvl_guard(void)
{
    pthread_mutex_lock(&install_lock);
    int result = install();
    pthread_mutex_unlock(&install_lock);
    return result;
}

int kvl_guard_add(void *base)
{
    for (int i = 0; i < GUARDED_MAPPINGS; i++) {
        uintptr_t free_entry = 0;
        if (atomic_load_explicit(&mappings[i].base, memory_order_relaxed) != 0) {
            continue;
        }
        atomic_store_explicit(&mappings[i].hit, 0, memory_order_relaxed);
        /* release pairs with the acquire in mapping_of */
        if (atomic_compare_exchange_strong_explicit(&mappings[i].base, &free_entry, (uintptr_t)base,
                                                    memory_order_release, memory_order_relaxed)) {
            return i;
        }
    }
    return -EMFILE;
}

void kvl_guard_remove(int index)
{
    atomic_store_explicit(&mappings[index].base, 0, memory_order_relaxed);
}

int kvl_guard_hit(int index)
{
    return atomic_load_explicit(&mappings[index].hit, memory_order_relaxed);
}
