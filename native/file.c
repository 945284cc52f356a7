/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - ledger files: made whole, opened only when they fit, closed in forked children.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "handle.h"

#ifdef KVL_CRASH_POINTS
void (*kvl_crash_hook)(const char *point);
#endif

int kvl_check_abi(uint32_t abi, uint64_t file, uint64_t identity, uint64_t report, uint64_t slot, uint64_t audit)
{
    int same = abi == KVL_ABI && file == sizeof(struct kvl_file) && identity == sizeof(struct kvl_identity) &&
               report == sizeof(struct kvl_report) && slot == sizeof(struct kvl_slot) &&
               audit == sizeof(struct kvl_audit);
    return same ? 0 : -EPROTO;
}

uint64_t kvl_layout(void)
{
    return KVL_LAYOUT;
}

enum { CREATE_TRIES = 64, NO_REPLACE = 1 /* RENAME_NOREPLACE of linux/fs.h */ };

/* A name is one component: it must not lead out of its directory. */
static int is_plain(const char *name)
{
    return name[0] != '\0' && strchr(name, '/') == NULL;
}

/* Making a file ------------------------------------------------------------------------------------------------- */

static int write_header(int fd)
{
    struct layout_header header;
    memset(&header, 0, sizeof header);
    header.magic = KVL_MAGIC;
    header.byte_order = KVL_BYTE_ORDER;
    header.abi = KVL_ABI;
    header.layout = KVL_LAYOUT;
    header.file_bytes = KVL_FILE_BYTES;
    header.created_ns = realtime_ns();
    ssize_t written = pwrite(fd, &header, sizeof header, 0);
    if (written < 0) {
        return -errno;
    }
    return written == (ssize_t)sizeof header ? 0 : -EIO;
}

/* Allocate every byte now, so that a full tmpfs is an error here and never a SIGBUS later. */
static int fill_file(int fd, uint32_t mode)
{
    int error;
    do {
        error = posix_fallocate(fd, 0, KVL_FILE_BYTES);
    } while (error == EINTR); /* any signal that a busy process gets meanwhile */
    if (error != 0) {
        return -error;
    }
    KVL_POINT("create:allocated");
    if (fchmod(fd, (mode_t)mode) != 0) { /* the umask has cut what open was given */
        return -errno;
    }
    KVL_POINT("create:mode");
    return write_header(fd);
}

static int make_temporary(int directory_fd, const char *name, char *temporary, size_t capacity)
{
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random) {
        return -EIO;
    }
    int length = snprintf(temporary, capacity, ".%s.%016llx.new", name, (unsigned long long)random);
    if (length < 0 || (size_t)length >= capacity) {
        return -ENAMETOOLONG;
    }
    int fd = openat(directory_fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return fd < 0 ? -errno : fd;
}

/* Give the finished file its name in one step, so that it never has two, with which it would be refused. 1, 0 if the
 * name is taken: that file is as good; or -errno. */
static int put_in_place(int directory_fd, const char *temporary, const char *name)
{
    int taken = syscall(SYS_renameat2, directory_fd, temporary, directory_fd, name, NO_REPLACE) == 0 ? 0 : errno;
    if (taken == EINVAL || taken == ENOSYS) { /* a file system or kernel without it: two names for a moment */
        taken = linkat(directory_fd, temporary, directory_fd, name, 0) == 0 ? 0 : errno;
        KVL_POINT("create:linked");
        unlinkat(directory_fd, temporary, 0);
    } else if (taken != 0) {
        unlinkat(directory_fd, temporary, 0);
    }
    if (taken == EEXIST) {
        return 0;
    }
    return taken == 0 ? 1 : -taken;
}

static int create_once(int directory_fd, const char *name, uint32_t mode)
{
    struct stat existing;
    if (fstatat(directory_fd, name, &existing, AT_SYMLINK_NOFOLLOW) == 0) {
        return 0;
    }
    char temporary[256];
    int fd = make_temporary(directory_fd, name, temporary, sizeof temporary);
    if (fd < 0) {
        return fd;
    }
    KVL_POINT("create:temporary");
    int result = fill_file(fd, mode);
    close(fd);
    KVL_POINT("create:filled");
    if (result < 0) {
        unlinkat(directory_fd, temporary, 0);
        return result;
    }
    result = put_in_place(directory_fd, temporary, name);
    KVL_POINT("create:placed");
    return result;
}

int kvl_create(int directory_fd, const char *name, uint32_t mode)
{
    if (!is_plain(name)) {
        return -EINVAL;
    }
    int result = -ENOENT;
    /* Who tidies up after killed creations cannot tell them from slow ones, and may have removed the temporary file. */
    for (int i = 0; i < CREATE_TRIES && result == -ENOENT; i++) {
        result = create_once(directory_fd, name, mode);
    }
    return result;
}

/* Handles and fork ---------------------------------------------------------------------------------------------- */

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static kvl_ledger *handles;

static void before_fork(void)
{
    pthread_mutex_lock(&handles_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&handles_lock);
}

/* An open-file-description lock lives as long as any copy of the descriptor: a child that kept one would keep a dead
 * engine alive. */
static void after_fork_in_child(void)
{
    for (kvl_ledger *ledger = handles; ledger != NULL; ledger = ledger->next) {
        int fd = atomic_exchange_explicit(&ledger->fd, -1, memory_order_relaxed); /* one thread is left after fork */
        if (fd >= 0) {
            close(fd);
        }
    }
    pthread_mutex_unlock(&handles_lock);
}

static void watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Called with handles_lock held. */
static void handle_link(kvl_ledger *ledger)
{
    ledger->next = handles;
    if (handles != NULL) {
        handles->previous = ledger;
    }
    handles = ledger;
}

static void handle_unlink(kvl_ledger *ledger)
{
    pthread_mutex_lock(&handles_lock);
    if (ledger->next != NULL) {
        ledger->next->previous = ledger->previous;
    }
    if (ledger->previous != NULL) {
        ledger->previous->next = ledger->next;
    } else {
        handles = ledger->next;
    }
    pthread_mutex_unlock(&handles_lock);
}

/* Opening a file ------------------------------------------------------------------------------------------------ */

static void describe(const struct stat *status, struct kvl_file *file)
{
    file->device = (uint64_t)status->st_dev;
    file->inode = (uint64_t)status->st_ino;
    file->size = (uint64_t)status->st_size;
    file->links = (uint64_t)status->st_nlink;
    file->uid = (uint32_t)status->st_uid;
    file->gid = (uint32_t)status->st_gid;
    file->mode = (uint32_t)status->st_mode;
}

static int check_kind(int fd, struct kvl_file *file)
{
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return -errno;
    }
    describe(&status, file);
    if (!S_ISREG(status.st_mode)) {
        return KVL_E_NOT_REGULAR;
    }
    if (status.st_nlink != 1) {
        return KVL_E_HARD_LINKED;
    }
    return status.st_size == KVL_FILE_BYTES ? 0 : KVL_E_SIZE;
}

/* The stamp is read with pread, before anything is mapped: no byte of a refused file is ever touched in memory. */
static int check_stamp(int fd, struct kvl_file *file)
{
    struct layout_header header;
    ssize_t size = pread(fd, &header, sizeof header, 0);
    if (size < 0) {
        return -errno;
    }
    if (size != (ssize_t)sizeof header) {
        return KVL_E_SIZE;
    }
    if (header.magic == __builtin_bswap64(KVL_MAGIC) || header.byte_order == __builtin_bswap32(KVL_BYTE_ORDER)) {
        return KVL_E_BYTE_ORDER;
    }
    if (header.magic != KVL_MAGIC || header.byte_order != KVL_BYTE_ORDER) {
        return KVL_E_MAGIC;
    }
    file->abi = header.abi;
    if (header.abi != KVL_ABI) {
        return KVL_E_ABI;
    }
    return header.layout == KVL_LAYOUT && header.file_bytes == KVL_FILE_BYTES ? 0 : KVL_E_LAYOUT;
}

/* A mapping keeps the open file description alive that it was made from, and with it all locks of that description:
 * in a forked child, too. So the mapping gets a description of its own, and the locks stay with `fd` alone. */
static void *map_apart(int directory_fd, const char *name, int flags, const struct kvl_file *file)
{
    int fd = openat(directory_fd, name, flags);
    if (fd < 0) {
        return MAP_FAILED;
    }
    int protection = (flags & O_ACCMODE) == O_RDWR ? PROT_READ | PROT_WRITE : PROT_READ;
    struct stat status;
    void *base = MAP_FAILED;
    if (fstat(fd, &status) == 0) {
        if ((uint64_t)status.st_ino == file->inode && (uint64_t)status.st_dev == file->device) {
            base = mmap(NULL, KVL_FILE_BYTES, protection, MAP_SHARED, fd, 0);
        } else {
            errno = ESTALE; /* replaced between the two opens */
        }
    }
    int error = errno;
    close(fd);
    errno = error;
    return base;
}

static int make_handle(int fd, void *base, int writable, kvl_ledger **out)
{
    kvl_ledger *ledger = calloc(1, sizeof *ledger);
    if (ledger == NULL) {
        return -ENOMEM;
    }
    ledger->guard = kvl_guard_add(base);
    if (ledger->guard < 0) {
        int error = ledger->guard;
        free(ledger);
        return error;
    }
    ledger->file = base;
    ledger->writable = writable != 0;
    atomic_init(&ledger->fd, fd);
    handle_link(ledger);
    *out = ledger;
    return 0;
}

/* Called with handles_lock held. */
static int open_checked(int directory_fd, const char *name, int writable, struct kvl_file *file, kvl_ledger **out)
{
    struct stat status;
    if (fstatat(directory_fd, name, &status, AT_SYMLINK_NOFOLLOW) == 0) { /* so that a refusal can name owner and mode */
        describe(&status, file);
        if (!S_ISREG(status.st_mode)) {
            return KVL_E_NOT_REGULAR;
        }
    }
    KVL_POINT("open:looked");
    /* O_NONBLOCK: a pipe put there in the meantime must not make the open wait. */
    int flags = (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int fd = openat(directory_fd, name, flags);
    if (fd < 0) {
        return errno == ELOOP ? KVL_E_NOT_REGULAR : -errno;
    }
    int result = check_kind(fd, file);
    if (result == 0) {
        result = check_stamp(fd, file);
    }
    KVL_POINT("open:checked");
    void *base = MAP_FAILED;
    if (result == 0) {
        base = map_apart(directory_fd, name, flags, file);
        result = base == MAP_FAILED ? -errno : make_handle(fd, base, writable, out);
    }
    if (result != 0) {
        if (base != MAP_FAILED) {
            munmap(base, KVL_FILE_BYTES);
        }
        close(fd);
    }
    return result;
}

int kvl_open(int directory_fd, const char *name, int writable, struct kvl_file *file, kvl_ledger **out)
{
    memset(file, 0, sizeof *file);
    *out = NULL;
    if (!is_plain(name)) {
        return -EINVAL;
    }
    pthread_once(&fork_once, watch_forks);
    int guarded = kvl_guard();
    if (guarded < 0) {
        return guarded;
    }
    /* A fork between opening and linking would leave the child a descriptor that nobody closes. */
    pthread_mutex_lock(&handles_lock);
    int result = open_checked(directory_fd, name, writable, file, out);
    pthread_mutex_unlock(&handles_lock);
    return result;
}

void kvl_release(kvl_ledger *ledger)
{
    /* acq_rel: what the owner wrote is visible before its locks are seen to be gone, and loads after this call are not
     * moved before it - an owner that gives its slots up looks at the words once more afterwards. */
    int fd = atomic_exchange_explicit(&ledger->fd, -1, memory_order_acq_rel);
    if (fd >= 0) {
        close(fd);
    }
}

void kvl_close(kvl_ledger *ledger)
{
    if (ledger == NULL) {
        return;
    }
    kvl_release(ledger);
    handle_unlink(ledger);
    kvl_guard_remove(ledger->guard); /* first: once unmapped, the address may become someone else's */
    munmap(ledger->file, KVL_FILE_BYTES);
    free(ledger);
}

int kvl_is_lost(const kvl_ledger *ledger)
{
    return kvl_guard_hit(ledger->guard);
}
