/* SPDX-License-Identifier: Apache-2.0
 *
 * test_file.c - making, opening and refusing files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static int open_code(const char *name)
{
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    int code = kvl_open(here, name, 1, &file, &ledger);
    kvl_close(ledger);
    return code;
}

static void overwrite(const char *name, off_t offset, const void *bytes, size_t count)
{
    int fd = openat(here, name, O_RDWR | O_CLOEXEC);
    CHECK_EQUAL(pwrite(fd, bytes, count, offset), (ssize_t)count);
    close(fd);
}

TEST(create_makes_one_file, "A created ledger is whole, has the mode that was asked for, and is made once.")
{
    umask(077);
    CHECK_EQUAL(kvl_create(here, "a", 0660), 1);
    CHECK_EQUAL(kvl_create(here, "a", 0600), 0);
    struct stat status;
    CHECK_EQUAL(fstatat(here, "a", &status, AT_SYMLINK_NOFOLLOW), 0);
    CHECK_EQUAL(status.st_size, KVL_FILE_BYTES);
    CHECK(status.st_blocks * 512 >= KVL_FILE_BYTES);
    CHECK_EQUAL(status.st_mode & 07777, 0660);
    CHECK_EQUAL(status.st_nlink, 1);
    CHECK_EQUAL(open_code("a"), 0);
}

TEST(create_replaces_nothing, "Creation neither follows nor replaces what stands under the name.")
{
    CHECK_EQUAL(symlinkat("target", here, "link"), 0);
    CHECK_EQUAL(kvl_create(here, "link", 0600), 0);
    CHECK(faccessat(here, "target", F_OK, 0) != 0);
    CHECK_EQUAL(open_code("link"), KVL_E_NOT_REGULAR);
}

TEST(names_are_no_paths, "A name that leads out of its directory is refused by every function that takes one.")
{
    CHECK_EQUAL(kvl_create(here, "../a", 0600), -EINVAL);
    CHECK_EQUAL(kvl_create(here, "", 0600), -EINVAL);
    CHECK_EQUAL(open_code("../a"), -EINVAL);
    CHECK_EQUAL(open_code("/dev/null"), -EINVAL);
    CHECK_EQUAL(open_code(".."), KVL_E_NOT_REGULAR);
}

TEST(missing_file, "A missing file is reported as such.")
{
    CHECK_EQUAL(open_code("nothing"), -ENOENT);
}

static void create_one(void *result)
{
    int code = kvl_create(here, "one", 0600);
    CHECK(code == 0 || code == 1);
    atomic_fetch_add((_Atomic int *)result, code);
    CHECK_EQUAL(open_code("one"), 0);
}

TEST(fifty_creators, "Of fifty processes that create one file at once, one makes it and all can open it at once.")
{
    _Atomic int *made = shared_memory(sizeof *made);
    pid_t children[50];
    for (int i = 0; i < 50; i++) {
        children[i] = start(create_one, (void *)made);
    }
    for (int i = 0; i < 50; i++) {
        join(children[i]);
    }
    CHECK_EQUAL(*made, 1);
}

TEST(unfit_kinds, "Symlinks, directories, pipes and files with two names are refused, each by its reason.")
{
    make("a");
    CHECK_EQUAL(symlinkat("a", here, "symlink"), 0);
    CHECK_EQUAL(open_code("symlink"), KVL_E_NOT_REGULAR);
    CHECK_EQUAL(mkdirat(here, "directory", 0700), 0);
    CHECK_EQUAL(open_code("directory"), KVL_E_NOT_REGULAR);
    CHECK_EQUAL(mkfifoat(here, "pipe", 0600), 0);
    CHECK_EQUAL(open_code("pipe"), KVL_E_NOT_REGULAR);
    CHECK_EQUAL(linkat(here, "a", here, "b", 0), 0);
    CHECK_EQUAL(open_code("a"), KVL_E_HARD_LINKED);
    CHECK_EQUAL(unlinkat(here, "b", 0), 0);
    CHECK_EQUAL(open_code("a"), 0);
}

TEST(unfit_content, "Files of another size, magic, byte order, version or layout are refused, each by its reason.")
{
    const off_t sizes[] = {0, 1, KVL_FILE_BYTES / 2, KVL_FILE_BYTES - 1, KVL_FILE_BYTES + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        make("size");
        int fd = openat(here, "size", O_RDWR | O_CLOEXEC);
        CHECK_EQUAL(ftruncate(fd, sizes[i]), 0);
        close(fd);
        CHECK_EQUAL(open_code("size"), KVL_E_SIZE);
        CHECK_EQUAL(unlinkat(here, "size", 0), 0);
    }
    static const struct {
        size_t offset;
        size_t bytes;
        uint64_t value;
        int code;
    } cases[] = {
        {offsetof(struct layout_header, magic), 8, 0, KVL_E_MAGIC},
        {offsetof(struct layout_header, magic), 8, KVL_MAGIC + 1, KVL_E_MAGIC},
        {offsetof(struct layout_header, magic), 8, __builtin_bswap64(KVL_MAGIC), KVL_E_BYTE_ORDER},
        {offsetof(struct layout_header, byte_order), 4, __builtin_bswap32(KVL_BYTE_ORDER), KVL_E_BYTE_ORDER},
        {offsetof(struct layout_header, byte_order), 4, 7, KVL_E_MAGIC},
        {offsetof(struct layout_header, abi), 4, KVL_ABI + 1, KVL_E_ABI},
        {offsetof(struct layout_header, abi), 4, KVL_ABI - 1, KVL_E_ABI},
        {offsetof(struct layout_header, layout), 8, 1, KVL_E_LAYOUT},
        {offsetof(struct layout_header, file_bytes), 8, KVL_FILE_BYTES + 1, KVL_E_LAYOUT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make("stamp");
        overwrite("stamp", (off_t)cases[i].offset, &cases[i].value, cases[i].bytes);
        CHECK_EQUAL(open_code("stamp"), cases[i].code);
        CHECK_EQUAL(unlinkat(here, "stamp", 0), 0);
    }
}

TEST(refused_files_are_described, "A refusal says size, owner, mode and version of what was found.")
{
    make("a");
    uint32_t abi = 77;
    overwrite("a", offsetof(struct layout_header, abi), &abi, sizeof abi);
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), KVL_E_ABI);
    CHECK(ledger == NULL);
    CHECK_EQUAL(file.abi, 77);
    CHECK_EQUAL(file.size, KVL_FILE_BYTES);
    CHECK_EQUAL(file.mode & 0777, 0600);
    CHECK_EQUAL(file.uid, getuid());
}

TEST(abi_check, "A caller compiled against other structures is told so.")
{
    uint64_t sizes[] = {sizeof(struct kvl_file), sizeof(struct kvl_identity), sizeof(struct kvl_report),
                        sizeof(struct kvl_slot), sizeof(struct kvl_audit)};
    CHECK_EQUAL(kvl_check_abi(KVL_ABI, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), 0);
    CHECK_EQUAL(kvl_check_abi(KVL_ABI + 1, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), -EPROTO);
    for (int i = 0; i < 5; i++) {
        sizes[i]++;
        CHECK_EQUAL(kvl_check_abi(KVL_ABI, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), -EPROTO);
        sizes[i]--;
    }
    CHECK(kvl_layout() == KVL_LAYOUT && kvl_layout() != 0);
}

static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

static int mappings_here(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    char line[4096];
    int count = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        count += strstr(line, "hygiene") != NULL;
    }
    fclose(maps);
    return count;
}

TEST(hygiene, "Thousands of openings and registrations leave no descriptor, mapping or table entry behind.")
{
    make("a");
    make("bad");
    CHECK_EQUAL(ftruncate(openat(here, "bad", O_RDWR), 5), 0);
    int before = open_descriptors();
    for (int i = 0; i < 6000; i++) { /* more than the table of guarded mappings holds */
        kvl_ledger *ledger = open_ledger("a", 1);
        uint32_t slot = register_as(ledger, "x", (uint64_t)i + 1, 0);
        CHECK_EQUAL(slot, 0);
        if (i % 2 == 0) {
            CHECK_EQUAL(kvl_unregister(ledger, slot), 0);
        }
        kvl_close(ledger);
        CHECK_EQUAL(open_code("bad"), KVL_E_SIZE);
    }
    CHECK_EQUAL(open_descriptors(), before);
    CHECK_EQUAL(mappings_here(), 0);
}

TEST(cycles, "A hundred thousand registrations, or KVL_CYCLES, leave the process and the file as they were.")
{
    const char *text = getenv("KVL_CYCLES");
    long cycles = text != NULL ? strtol(text, NULL, 10) : 2000;
    make("a");
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *observer = open_ledger("a", 0);
    int before = open_descriptors();
    for (long i = 1; i <= cycles; i++) {
        uint32_t slot = register_as(owner, "x", (uint64_t)i, 0);
        CHECK_EQUAL(slot, 0);
        CHECK_EQUAL(kvl_unregister(owner, slot), 0);
        kvl_ledger *ledger = open_ledger("a", i % 2 == 0);
        CHECK_EQUAL(kvl_is_owned(ledger, slot, (uint64_t)i), 0);
        kvl_close(ledger);
    }
    CHECK_EQUAL(open_descriptors(), before);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, 0, &slot), 0);
    note("%ld cycles", cycles);
}
