/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - runs the tests: `tests DIRECTORY [PART OF A NAME]`. Prints a line per test, in the form of TAP.
 */
#include "check.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_TESTS = 200, TIME_LIMIT_S = 240 };

static struct {
    const char *name;
    const char *sentence;
    test_function function;
} tests[MAX_TESTS];
static int test_count;

int here = -1;

#ifdef KVL_COVERAGE
extern void __gcov_dump(void);
#endif

/* End a process of the tests without what its parent left to be done at exit. */
_Noreturn static void leave(int status)
{
    fflush(stdout);
#ifdef KVL_COVERAGE
    __gcov_dump();
#endif
    _exit(status);
}

void add_test(const char *name, const char *sentence, test_function function)
{
    if (test_count == MAX_TESTS) {
        abort();
    }
    tests[test_count].name = name;
    tests[test_count].sentence = sentence;
    tests[test_count++].function = function;
}

void fail_at(const char *file, int line, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("# %s:%d: ", file, line);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    leave(1);
}

void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("# ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
}

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t stress_ns(void)
{
    const char *text = getenv("KVL_STRESS_MS");
    return (text != NULL ? strtoll(text, NULL, 10) : 300) * 1000000;
}

void make(const char *name)
{
    CHECK_EQUAL(kvl_create(here, name, 0600), 1);
}

kvl_ledger *open_ledger(const char *name, int writable)
{
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    CHECK_EQUAL(kvl_open(here, name, writable, &file, &ledger), 0);
    return ledger;
}

struct kvl_identity identity_of(const char *instance)
{
    struct kvl_identity identity;
    memset(&identity, 0, sizeof identity);
    strncpy(identity.instance, instance, sizeof identity.instance - 1);
    strncpy(identity.engine, "test", sizeof identity.engine - 1);
    identity.members = 1;
    identity.tp_size = 1;
    identity.pp_size = 1;
    identity.startup_limit = 16000;
    identity.block_tokens = 16;
    identity.pid = (uint32_t)getpid();
    return identity;
}

uint32_t register_as(kvl_ledger *ledger, const char *instance, uint64_t incarnation, uint64_t desired)
{
    struct kvl_identity identity = identity_of(instance);
    int slot = kvl_register(ledger, &identity, incarnation, WORDS(desired, 0), NULL);
    CHECK(slot >= 0);
    return (uint32_t)slot;
}

uint64_t word_of(uint32_t revision, int32_t limit)
{
    return (uint64_t)revision << 32 | (uint32_t)limit;
}

uint32_t revision_in(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

int32_t limit_in(uint64_t word)
{
    return (int32_t)(uint32_t)word;
}

pid_t start(void (*function)(void *), void *argument)
{
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        function(argument);
        leave(0);
    }
    return child;
}

void join(pid_t child)
{
    int status = 0;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_at(__FILE__, __LINE__, "a process of this test ended with wait status 0x%x", (unsigned)status);
    }
}

void finish_off(pid_t child)
{
    kill(child, SIGKILL);
    CHECK_EQUAL(waitpid(child, NULL, 0), child);
}

void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

int refuse_fcntl(int command, int fd, int error)
{
    const unsigned low = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 4; /* half of a 64-bit argument */
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1]) + low),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)command, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]) + low),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)fd, 0, (unsigned char)(fd < 0 ? 0 : 1)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    int done = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    if (!done) {
        note("no filter for system calls here: not tested");
    }
    return done;
}

int isolates(void)
{
#ifdef __SANITIZE_THREAD__
    return 0;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
    return 0;
#endif
#endif
    return 1;
}

int emulated(void)
{
    if (getenv("KVL_EMULATED") == NULL) {
        return 0;
    }
    note("under an emulator: not tested");
    return 1;
}

struct bytes bytes_of(const char *name)
{
    struct bytes bytes;
    int fd = openat(here, name, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    memset(&bytes, 0, sizeof bytes);
    bytes.size = pread(fd, bytes.content, sizeof bytes.content, 0);
    close(fd);
    return bytes;
}

void put_bytes(const char *name, const struct bytes *bytes)
{
    int fd = openat(here, name, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQUAL(pwrite(fd, bytes->content, sizeof bytes->content, 0), KVL_FILE_BYTES);
    close(fd);
}

void cut(const char *name, int64_t size)
{
    int fd = openat(here, name, O_RDWR | O_CLOEXEC);
    CHECK_EQUAL(ftruncate(fd, size), 0);
    close(fd);
}

static int run(int root, int index)
{
    if (mkdirat(root, tests[index].name, 0700) != 0) {
        perror(tests[index].name);
        return 1;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    if (child == 0) {
        setpgid(0, 0);
        alarm(TIME_LIMIT_S);
        here = openat(root, tests[index].name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        tests[index].function();
        leave(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    kill(-child, SIGKILL); /* what a failed test left behind */
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int count, char **arguments)
{
    if (count < 2) {
        fprintf(stderr, "usage: %s DIRECTORY [PART OF A NAME]\n", arguments[0]);
        return 2;
    }
    int root = open(arguments[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) {
        perror(arguments[1]);
        return 2;
    }
    int failed = 0;
    int ran = 0;
    for (int i = 0; i < test_count; i++) {
        if (count > 2 && strstr(tests[i].name, arguments[2]) == NULL) {
            continue;
        }
        int result = run(root, i);
        printf("%s %d - %s (%s)\n", result == 0 ? "ok" : "not ok", ++ran, tests[i].sentence, tests[i].name);
        failed += result;
    }
    printf("1..%d\n", ran);
    return failed != 0 || ran == 0;
}
