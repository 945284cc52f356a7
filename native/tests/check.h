/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - the harness of the C tests: a test is a sentence, and runs in a process and a directory of its own.
 */
#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <sys/types.h>

#include "../handle.h"

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
uint32_t revision_in(uint64_t word);
int32_t limit_in(uint64_t word);

/* Let two handles of one file share a mapping, so that a race detector sees one memory. Neither is closed then. */
void share_mapping(kvl_ledger *ledger, const kvl_ledger *with);

/* Start a process that runs `function` and ends with status 0; fail unless it does so when joined. */
pid_t start(void (*function)(void *), void *argument);
void join(pid_t child);
/* End a process that must not end by itself any more. */
void finish_off(pid_t child);
/* Zeroed memory that forked processes share. */
void *shared_memory(size_t size);

#endif /* CHECK_H */
