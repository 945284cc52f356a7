/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - the harness of the C tests: a test is a sentence, and runs in a process and a directory of its own.
 */
#ifndef CHECK_H
#define CHECK_H

#include "../handle.h" /* first: it says which system the headers describe */

typedef void (*test_function)(void);

void add_test(const char *name, const char *sentence, test_function function);

/* TEST(name, "Sentence that holds.") { ... } */
#define TEST(name, sentence)                                                                                           \
    static void name(void);                                                                                            \
    __attribute__((constructor)) static void add_##name(void)                                                          \
    {                                                                                                                  \
        add_test(#name, sentence, name);                                                                               \
    }                                                                                                                  \
    static void name(void)

/* Fail the test, saying where and with which figures. */
_Noreturn void fail_at(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define CHECK(condition) ((condition) ? (void)0 : fail_at(__FILE__, __LINE__, "%s", #condition))
#define CHECK_EQUAL(left, right)                                                                                       \
    do {                                                                                                               \
        long long left_value = (long long)(left), right_value = (long long)(right);                                    \
        if (left_value != right_value) {                                                                               \
            fail_at(__FILE__, __LINE__, "%s is %lld, not %s, %lld", #left, left_value, #right, right_value);           \
        }                                                                                                              \
    } while (0)

/* Print a figure with the result of the test. */
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The test's own directory. */
extern int here;

/* For how long a stress goes on: KVL_STRESS_MS, default 300. */
int64_t stress_ns(void);
int64_t monotonic_ns(void);

/* Ledgers, slots and words, for tests that are about something else: failures end the test. */
void make(const char *name);
kvl_ledger *open_ledger(const char *name, int writable);
struct kvl_identity identity_of(const char *instance);
uint32_t register_as(kvl_ledger *ledger, const char *instance, uint64_t incarnation, uint64_t desired);
uint64_t word_of(uint32_t revision, int32_t limit);
/* One word or revision for each bound: the limit's and the cap's. */
#define WORDS(limit, cap) ((const uint64_t[KVL_BOUNDS]){(limit), (cap)})
#define REVISIONS(limit, cap) ((const uint32_t[KVL_BOUNDS]){(limit), (cap)})
uint32_t revision_in(uint64_t word);
int32_t limit_in(uint64_t word);

/* Start a process that runs `function` and ends with status 0; fail unless it does so when joined. */
pid_t start(void (*function)(void *), void *argument);
void join(pid_t child);
/* End a process that must not end by itself any more. */
void finish_off(pid_t child);
/* Zeroed memory that forked processes share. */
void *shared_memory(size_t size);

/* From now on this process's fcntl with `command` fails with `error`; with `fd` >= 0 only on that descriptor. 0 where
 * system calls cannot be filtered, which is noted: such a test holds nothing there. */
int refuse_fcntl(int command, int fd, int error);
/* Whether stores are made where a cut file ends nothing. Builds under a race detector make them in the process itself. */
int isolates(void);
/* Whether the tests run under an emulator (KVL_EMULATED is set), which forks and signals in its own way. */
int emulated(void);

/* The bytes of a ledger, and what damages them in place: the inode stays the same. */
struct bytes {
    unsigned char content[KVL_FILE_BYTES];
    int64_t size;
};
struct bytes bytes_of(const char *name);
void put_bytes(const char *name, const struct bytes *bytes);
void cut(const char *name, int64_t size);

#endif /* CHECK_H */
