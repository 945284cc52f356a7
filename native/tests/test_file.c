/* SPDX-License-Identifier: Apache-2.0
 *
 * test_file.c - making, opening and refusing files.
 */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

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

TEST(create_replaces_nothing, "Creation neither follows nor replaces what already has the name.")
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
        {offsetof(struct layout_stamp, magic), 8, 0, KVL_E_MAGIC},
        {offsetof(struct layout_stamp, magic), 8, KVL_MAGIC + 1, KVL_E_MAGIC},
        {offsetof(struct layout_stamp, magic), 8, __builtin_bswap64(KVL_MAGIC), KVL_E_BYTE_ORDER},
        {offsetof(struct layout_stamp, byte_order), 4, __builtin_bswap32(KVL_BYTE_ORDER), KVL_E_BYTE_ORDER},
        {offsetof(struct layout_stamp, byte_order), 4, 7, KVL_E_MAGIC},
        {offsetof(struct layout_stamp, format), 4, KVL_FORMAT + 1, KVL_E_FORMAT},
        {offsetof(struct layout_stamp, format), 4, KVL_FORMAT - 1, KVL_E_FORMAT},
        {offsetof(struct layout_stamp, layout), 8, 1, KVL_E_LAYOUT},
        {offsetof(struct layout_stamp, file_bytes), 8, KVL_FILE_BYTES + 1, KVL_E_LAYOUT},
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
    uint32_t format = 77;
    overwrite("a", offsetof(struct layout_stamp, format), &format, sizeof format);
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), KVL_E_FORMAT);
    CHECK(ledger == NULL);
    CHECK_EQUAL(file.format, 77);
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
}

TEST(layout_is_pinned, "The fingerprint of all offsets is the one that other builds of this format write.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 0);
    CHECK(ledger->stamp.layout == UINT64_C(0x9188192b2969147f));
    CHECK_EQUAL(KVL_FORMAT, 3); /* another layout needs another format */
}

TEST(files_have_an_identity, "Two files never have the same stamp, also when they are made at once.")
{
    make("a");
    make("b");
    kvl_ledger *one = open_ledger("a", 0);
    kvl_ledger *other = open_ledger("b", 0);
    CHECK(one->stamp.identity[0] != other->stamp.identity[0] && one->stamp.identity[1] != other->stamp.identity[1]);
    CHECK(one->stamp.identity[0] != 0 && one->stamp.identity[0] != one->stamp.identity[1]);
    CHECK(one->stamp.created_ns > UINT64_C(1700000000000000000) && one->stamp.unused == 0);
}

/* Creation by who has no capability */

static void create_as_nobody(void *argument)
{
    (void)argument;
    CHECK(getuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0));
    umask(0);
    CHECK_EQUAL(kvl_create(here, "mine", 0640), 1);
    CHECK_EQUAL(kvl_create(here, "mine", 0640), 0);
    kvl_close(open_ledger("mine", 1));
}

TEST(create_without_capabilities, "A user without capabilities creates a ledger with the same mode and content.")
{
    CHECK_EQUAL(fchmod(here, 0777), 0);
    join(start(create_as_nobody, NULL));
    struct stat status;
    CHECK_EQUAL(fstatat(here, "mine", &status, 0), 0);
    CHECK_EQUAL(status.st_mode & 07777, 0640);
    CHECK_EQUAL(status.st_nlink, 1);
    CHECK(geteuid() != 0 || status.st_uid == 65534);
}

TEST(create_in_no_directory, "Where no file can be made the creation says why and leaves nothing.")
{
    int file = openat(here, "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQUAL(kvl_create(file, "a", 0600), -ENOTDIR);
    CHECK_EQUAL(kvl_create(9999, "a", 0600), -EBADF);
    int proc = open("/proc/self", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(kvl_create(proc, "a", 0600) < 0);
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK_EQUAL(kvl_create(here, name, 0600), -ENAMETOOLONG);
    CHECK_EQUAL(unlinkat(here, "file", 0), 0);
}

TEST(create_without_room, "A creation that finds no room says so, and leaves no name and no descriptor.")
{
    const struct rlimit little = {KVL_PAGE, KVL_PAGE};
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &little), 0);
    int next = dup(here);
    CHECK_EQUAL(close(next), 0);
    CHECK_EQUAL(kvl_create(here, "a", 0600), -EFBIG);
    CHECK(faccessat(here, "a", F_OK, 0) != 0);
    CHECK_EQUAL(dup(here), next);
}

static void open_with_few(void *argument)
{
    const int free_ones = *(const int *)argument;
    int next = dup(here);
    CHECK_EQUAL(close(next), 0);
    const struct rlimit few = {(rlim_t)(next + free_ones), (rlim_t)(next + free_ones)};
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &few), 0);
    struct kvl_file file;
    kvl_ledger *ledger = NULL;
    CHECK_EQUAL(kvl_open(here, "a", 1, &file, &ledger), free_ones < 2 ? -EMFILE : 0);
    CHECK_EQUAL(kvl_create(here, "b", 0600), free_ones == 0 ? -EMFILE : 1);
    if (ledger != NULL) {
        CHECK_EQUAL(register_as(ledger, "x", 1, 0), 0);
        CHECK_EQUAL(kvl_check(ledger, here, "a", REVISIONS(0, 0)), 0);
        CHECK_EQUAL(dup(here), next + 1);
        CHECK_EQUAL(kvl_check(ledger, here, "a", REVISIONS(0, 0)), -EMFILE); /* no verdict on the registration */
        kvl_close(ledger);
    }
    CHECK_EQUAL(dup(here), free_ones == 0 ? -1 : next);
}

TEST(few_descriptors, "Without free descriptors opening, creating and checking say so, and leave none behind.")
{
    make("a");
    int counts[] = {0, 1, 2};
    for (int i = 0; i < 3; i++) {
        (void)unlinkat(here, "b", 0);
        join(start(open_with_few, &counts[i]));
    }
}

/* Descriptors 0, 1 and 2 */

static void without_standard_streams(void *argument)
{
    (void)argument;
    struct kvl_audit record = {.after = 1};
    struct kvl_report report = {.idle = 1};
    uint64_t found;
    for (int fd = 0; fd < 3; fd++) {
        CHECK_EQUAL(close(fd), 0);
    }
    if (kvl_create(here, "a", 0600) != 1) {
        _exit(1);
    }
    kvl_ledger *owner = open_ledger("a", 1);
    kvl_ledger *publisher = open_ledger("a", 1);
    if (owner->fd < 3 || publisher->fd < 3 || register_as(owner, "x", 1, 0) != 0 ||
        kvl_raise(publisher, 0, 1, KVL_LIMIT, word_of(1, 10), 0, &record, &found) != KVL_RAISED ||
        kvl_acknowledge(owner, &report) != 0 || kvl_check(owner, here, "a", REVISIONS(1, 0)) != 0 ||
        kvl_ring(publisher, KVL_PUBLISHED) != 0 || kvl_audit_write(publisher, &record) != 0) {
        _exit(2);
    }
    for (int fd = 0; fd < 3; fd++) {
        if (write(fd, "a stray message", 15) >= 0 || errno != EBADF) {
            _exit(3);
        }
    }
    if (kvl_check(owner, here, "a", REVISIONS(1, 0)) != 0) {
        _exit(4);
    }
    kvl_close(owner);
    kvl_close(publisher);
    _exit(0);
}

TEST(descriptors_of_standard_streams, "With the standard streams closed no ledger gets a descriptor below 3, so that a "
                                      "stray message lands in none.")
{
    join(start(without_standard_streams, NULL));
    kvl_close(open_ledger("a", 1));
}

static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

/* With this text in their line; with an empty one all. */
static int mappings(const char *text)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    char line[4096];
    int count = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        count += strstr(line, text) != NULL;
    }
    fclose(maps);
    return count;
}

TEST(hygiene, "Thousands of openings and registrations leave no descriptor and no mapping behind.")
{
    make("a");
    make("bad");
    CHECK_EQUAL(ftruncate(openat(here, "bad", O_RDWR), 5), 0);
    int before = open_descriptors();
    for (int i = 0; i < 6000; i++) {
        kvl_ledger *ledger = open_ledger("a", 1);
        CHECK_EQUAL(register_as(ledger, "x", (uint64_t)i + 1, 0), 0);
        if (i % 2 == 0) {
            CHECK_EQUAL(kvl_unregister(ledger), 0);
        }
        kvl_close(ledger);
        CHECK_EQUAL(open_code("bad"), KVL_E_SIZE);
        CHECK_EQUAL(kvl_create(here, "a", 0600), 0);
    }
    CHECK_EQUAL(open_descriptors(), before);
    CHECK_EQUAL(mappings("hygiene/"), 0);
}

TEST(publications_leave_no_memory, "Hundreds of publications leave no mapping and no descriptor behind.")
{
    make("a");
    kvl_ledger *ledger = open_ledger("a", 1);
    struct kvl_audit record = {.after = 1};
    uint64_t found;
    int before = 0;
    (void)register_as(open_ledger("a", 1), "x", 1, 0);
    int descriptors = open_descriptors();
    for (uint32_t i = 1; i <= 300; i++) {
        CHECK_EQUAL(kvl_raise(ledger, 0, 1, KVL_LIMIT, word_of(i, 1), 0, &record, &found), KVL_RAISED);
        CHECK_EQUAL(kvl_audit_write(ledger, &record), 0);
        before = i == 100 ? mappings("") : before;
    }
    CHECK(mappings("") < before + 50); /* an allocator may have taken some, but not one for each */
    CHECK_EQUAL(open_descriptors(), descriptors);
}

TEST(cycles, "A hundred thousand registrations, or KVL_CYCLES, leave the process and the file as they were.")
{
    const char *text = getenv("KVL_CYCLES");
    long cycles = text != NULL ? strtol(text, NULL, 10) : 2000;
    make("a");
    kvl_ledger *observer = open_ledger("a", 0);
    int before = open_descriptors();
    for (long i = 1; i <= cycles; i++) {
        kvl_ledger *owner = open_ledger("a", 1);
        CHECK_EQUAL(register_as(owner, "x", (uint64_t)i, 0), 0);
        CHECK_EQUAL(kvl_is_owned(observer, 0, (uint64_t)i), 1);
        CHECK_EQUAL(kvl_check(owner, here, "a", REVISIONS(0, 0)), 0);
        CHECK_EQUAL(kvl_unregister(owner), 0);
        CHECK_EQUAL(kvl_is_owned(observer, 0, (uint64_t)i), 0);
        kvl_close(owner);
    }
    CHECK_EQUAL(open_descriptors(), before);
    struct kvl_slot slot;
    CHECK_EQUAL(kvl_read_slot(observer, 0, &slot), KVL_DEAD);
    note("%ld cycles", cycles);
}
