/* SPDX-License-Identifier: Apache-2.0
 *
 * isolate.c - stores into mapped ledger memory, made where a file that is cut meanwhile ends nothing.
 *
 * A load or store beyond the end of a mapped file raises SIGBUS. Its handler is process-wide and not this library's to
 * take. So the store is made by a child as posix_spawn makes one: it shares this process's memory (CLONE_VM) but has a
 * signal table of its own, and the calling thread sleeps until it has ended (CLONE_VFORK). 60 us on a small machine.
 */
#include "handle.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK_BYTES = 64 * 1024, FAULTED = 101 };

/* Lies at the start of the child's stack memory. That memory is shared, because user-mode emulators fork where they are
 * asked for CLONE_VM. */
struct call {
    int (*function)(void *);
    sigset_t mask;
    int result; /* not by the exit status: another thread may reap every child, whosever it is */
    _Alignas(16) unsigned char argument[1024];
};

#ifndef __SANITIZE_THREAD__
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#endif

#ifndef __SANITIZE_THREAD__
static void on_fault(int number)
{
    (void)number;
    _exit(FAULTED);
}

static int run_in_child(void *memory)
{
    struct call *call = memory;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault;
    sigemptyset(&action.sa_mask);
    (void)sigaction(SIGBUS, &action, NULL); /* in this child's own table */
    sigset_t mask;
    sigfillset(&mask);
    sigdelset(&mask, SIGBUS);
    (void)sigprocmask(SIG_SETMASK, &mask, NULL); /* handlers of the parent must not run here */
    call->result = call->function(call->argument);
    return 0; /* which ends it */
}

/* The result is -EIO until the child stores one, so a child that is killed leaves -EIO. */
static int reap(pid_t child, const struct call *call)
{
    int status = 0;
    pid_t reaped;
    do {
        reaped = waitpid(child, &status, __WALL);
    } while (reaped < 0 && errno == EINTR);
    return reaped == child && WIFEXITED(status) && WEXITSTATUS(status) == FAULTED ? KVL_E_DAMAGED : call->result;
}

static int run(unsigned char *memory)
{
    struct call *call = (struct call *)(void *)memory;
    sigset_t all;
    sigfillset(&all);
    call->result = -EIO;
    sigprocmask(SIG_SETMASK, &all, &call->mask);
    /* No signal at its end: a server may count its own children by SIGCHLD. Emulators know no other than SIGCHLD. */
    pid_t child = clone(run_in_child, memory + STACK_BYTES, CLONE_VM | CLONE_VFORK, memory);
    if (child < 0 && errno == EINVAL) {
        child = clone(run_in_child, memory + STACK_BYTES, CLONE_VM | CLONE_VFORK | SIGCHLD, memory);
    }
    int result = child < 0 ? -errno : reap(child, call);
    sigset_t mask = call->mask;
    sigprocmask(SIG_SETMASK, &mask, NULL);
    return result;
}
#else
/* A race detector does not follow stores into another process: its builds make them here, unprotected. */
static int run(unsigned char *memory)
{
    struct call *call = (struct call *)(void *)memory;
    return call->function(call->argument);
}
#endif

int kvl_isolated(int (*function)(void *argument), void *argument, size_t size)
{
    unsigned char *memory =
        mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
        return -errno;
    }
    struct call *call = (struct call *)(void *)memory;
    call->function = function;
    memcpy(call->argument, argument, size);
    int result = run(memory);
    memcpy(argument, call->argument, size);
    munmap(memory, STACK_BYTES);
    return result;
}
