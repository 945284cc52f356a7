/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - ledger files: made whole, opened only when they fit, compared with what was opened, closed in forked children.
 */
#include "handle.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* A fingerprint of every offset, so that a different build is recognised even at the same version. */
static uint64_t layout_fingerprint(void)
{
    static const uint64_t offsets[] = {
        KVL_FORMAT, KVL_SLOTS, KVL_BOUNDS, KVL_AUDIT_RECORDS, sizeof(struct layout_file), sizeof(struct layout_slot),
        offsetof(struct layout_header, published), offsetof(struct layout_header, acknowledged),
        offsetof(struct layout_header, audit_tickets), offsetof(struct layout_file, slots),
        offsetof(struct layout_file, audit), offsetof(struct layout_audit, seal),
        offsetof(struct layout_slot, identity), offsetof(struct layout_slot, ownership),
        offsetof(struct layout_slot, report), offsetof(struct layout_report, seal),
        offsetof(struct layout_ownership, desired), offsetof(struct layout_ownership, incarnation),
        offsetof(struct layout_ownership, registered_ns), offsetof(struct layout_ownership, seal),
        offsetof(struct kvl_identity, instance), offsetof(struct kvl_identity, engine),
        offsetof(struct kvl_identity, version), offsetof(struct kvl_identity, replica),
        offsetof(struct kvl_identity, member), offsetof(struct kvl_identity, members),
        offsetof(struct kvl_identity, tp_size), offsetof(struct kvl_identity, pp_size),
        offsetof(struct kvl_identity, startup_limit), offsetof(struct kvl_identity, startup_cap),
        offsetof(struct kvl_identity, block_tokens), offsetof(struct kvl_identity, pid),
        offsetof(struct kvl_report, answers), offsetof(struct kvl_report, idle), offsetof(struct kvl_report, active),
        offsetof(struct kvl_report, capacity), offsetof(struct kvl_report, evicted),
        offsetof(struct kvl_report, token_bytes), offsetof(struct kvl_report, pool_bytes),
        offsetof(struct kvl_report, resident_bytes), offsetof(struct kvl_report, returned_bytes),
        offsetof(struct kvl_report, reported_ns), offsetof(struct kvl_report, eviction_errors),
        offsetof(struct kvl_report, returns), sizeof(struct kvl_answer), offsetof(struct kvl_answer, applied),
        offsetof(struct kvl_answer, settled_revision), offsetof(struct kvl_answer, outcome),
        offsetof(struct kvl_answer, reason),
        offsetof(struct kvl_audit, when_ns), offsetof(struct kvl_audit, before), offsetof(struct kvl_audit, after),
        offsetof(struct kvl_audit, uid), offsetof(struct kvl_audit, pid), offsetof(struct kvl_audit, bound),
        offsetof(struct kvl_audit, instance), offsetof(struct kvl_audit, program), offsetof(struct kvl_audit, note),
    };
    return kvl_seal(0, offsets, sizeof offsets);
}

/* A name is one component: it must not lead out of its directory. */
static int is_plain(const char *name)
{
    return name[0] != '\0' && strchr(name, '/') == NULL;
}

/* The lowest descriptor that a ledger may have. Whatever a library prints to a standard stream that was closed before
 * must not land in a ledger. */
enum { LOWEST_DESCRIPTOR = 3 };

static int open_above_standard(int directory_fd, const char *name, int flags, mode_t mode)
{
    int fd = openat(directory_fd, name, flags | O_CLOEXEC, mode);
    if (fd < 0 || fd >= LOWEST_DESCRIPTOR) {
        return fd < 0 ? -errno : fd;
    }
    int raised = fcntl(fd, F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR);
    int error = errno;
    close(fd);
    return raised < 0 ? -error : raised;
}

/* Handles and fork -----------------------------------------------------------------------------------------------
 * One lock, which fork takes: it guards the list of handles and every moment in which a descriptor is open that is not
 * on the list. So a child closes all of its copies, and never finds the lock taken. */

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static kvl_ledger *handles;

/* Whether the descriptor is still open on the file that was opened: 0, or -EBADF for one that somebody else closed and
 * that may be another file's by now. */
static int check_descriptor(const kvl_ledger *ledger, struct stat *status)
{
    if (ledger->fd < 0 || fstat(ledger->fd, status) != 0) {
        return -EBADF;
    }
    return (uint64_t)status->st_dev == ledger->device && (uint64_t)status->st_ino == ledger->inode ? 0 : -EBADF;
}

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
        struct stat status;
        if (check_descriptor(ledger, &status) == 0) {
            close(ledger->fd);
        }
        ledger->fd = -1;
    }
    pthread_mutex_unlock(&handles_lock);
}

/* As the library is loaded: at the first opening another thread could be past the handlers of its fork already. */
__attribute__((constructor)) static void watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void kvl_lock_handles(void)
{
    pthread_mutex_lock(&handles_lock);
}

void kvl_unlock_handles(void)
{
    pthread_mutex_unlock(&handles_lock);
}

/* Called with the handles locked, as is the next one. */
static void link_handle(kvl_ledger *ledger)
{
    ledger->next = handles;
    if (handles != NULL) {
        handles->previous = ledger;
    }
    handles = ledger;
}

static void unlink_handle(kvl_ledger *ledger)
{
    if (ledger->next != NULL) {
        ledger->next->previous = ledger->previous;
    }
    if (ledger->previous != NULL) {
        ledger->previous->next = ledger->next;
    } else {
        handles = ledger->next;
    }
}

/* Making a file ------------------------------------------------------------------------------------------------- */

static int fill_stamp(struct layout_stamp *stamp)
{
    memset(stamp, 0, sizeof *stamp);
    stamp->magic = KVL_MAGIC;
    stamp->byte_order = KVL_BYTE_ORDER;
    stamp->format = KVL_FORMAT;
    stamp->layout = layout_fingerprint();
    stamp->file_bytes = KVL_FILE_BYTES;
    stamp->created_ns = kvl_realtime_ns();
    ssize_t size = getrandom(stamp->identity, sizeof stamp->identity, 0);
    if (size < 0) {
        return -errno;
    }
    return size == (ssize_t)sizeof stamp->identity ? 0 : -EIO;
}

/* Allocate every byte now, so that a full file system is an error here and not in an engine later. */
static int fill_file(int fd, uint32_t mode)
{
    int error;
    do {
        error = posix_fallocate(fd, 0, KVL_FILE_BYTES);
    } while (error == EINTR); /* interrupted by any signal of a busy process */
    if (error != 0) {
        return -error;
    }
    KVL_POINT("create:allocated");
    if (fchmod(fd, (mode_t)mode) != 0) { /* the umask has cut what open was given */
        return -errno;
    }
    struct layout_stamp stamp;
    int result = fill_stamp(&stamp);
    if (result < 0) {
        return result;
    }
    ssize_t written = pwrite(fd, &stamp, sizeof stamp, 0);
    if (written != (ssize_t)sizeof stamp) {
        return written < 0 ? -errno : -EIO;
    }
    /* On a disk a name must not outlive a loss of power without the bytes; in memory this does nothing. */
    return fdatasync(fd) == 0 || errno == EINVAL || errno == ENOSYS ? 0 : -errno;
}

/* 1, 0 if the name is taken, or -errno. An empty path needs a capability before Linux 6.10; the other way needs /proc. */
static int give_name(int fd, int directory_fd, const char *name)
{
    KVL_POINT("create:filled");
    int result = linkat(fd, "", directory_fd, name, AT_EMPTY_PATH);
    if (result != 0 && errno == ENOENT) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        result = linkat(AT_FDCWD, path, directory_fd, name, AT_SYMLINK_FOLLOW);
    }
    int error = errno;
    KVL_POINT("create:named");
    return result == 0 ? 1 : error == EEXIST ? 0 : -error;
}

static int create_unnamed(int directory_fd, const char *name, uint32_t mode)
{
    struct stat existing;
    if (fstatat(directory_fd, name, &existing, AT_SYMLINK_NOFOLLOW) == 0) {
        return 0;
    }
    int fd = open_above_standard(directory_fd, ".", O_RDWR | O_TMPFILE, 0600);
    if (fd < 0) {
        return fd == -EISDIR || fd == -ENOENT ? -EOPNOTSUPP : fd; /* how older file systems answer O_TMPFILE */
    }
    int result = fill_file(fd, mode);
    if (result == 0) {
        result = give_name(fd, directory_fd, name);
    }
    close(fd);
    return result;
}

int kvl_create(int directory_fd, const char *name, uint32_t mode)
{
    if (!is_plain(name)) {
        return -EINVAL;
    }
    kvl_lock_handles();
    int result = create_unnamed(directory_fd, name, mode);
    kvl_unlock_handles();
    return result;
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
        return status.st_nlink == 0 ? -ENOENT : KVL_E_HARD_LINKED; /* removed in the meantime */
    }
    return status.st_size == KVL_FILE_BYTES ? 0 : KVL_E_SIZE;
}

static int read_stamp(int fd, struct layout_stamp *stamp, struct kvl_file *file)
{
    ssize_t size = pread(fd, stamp, sizeof *stamp, 0);
    if (size != (ssize_t)sizeof *stamp) {
        return size < 0 ? -errno : KVL_E_SIZE;
    }
    if (stamp->magic == __builtin_bswap64(KVL_MAGIC) || stamp->byte_order == __builtin_bswap32(KVL_BYTE_ORDER)) {
        return KVL_E_BYTE_ORDER;
    }
    if (stamp->magic != KVL_MAGIC || stamp->byte_order != KVL_BYTE_ORDER) {
        return KVL_E_MAGIC;
    }
    file->format = stamp->format;
    if (stamp->format != KVL_FORMAT) {
        return KVL_E_FORMAT;
    }
    return stamp->layout == layout_fingerprint() && stamp->file_bytes == KVL_FILE_BYTES ? 0 : KVL_E_LAYOUT;
}

/* Open `name` once more if it is still the file of `device` and `inode`: the descriptor, KVL_E_REPLACED, or -errno. */
static int reopen(int directory_fd, const char *name, int flags, uint64_t device, uint64_t inode)
{
    int fd = open_above_standard(directory_fd, name, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0) {
        return fd == -ENOENT || fd == -ELOOP || fd == -ENXIO ? KVL_E_REPLACED : fd;
    }
    struct stat status;
    int result = fstat(fd, &status) != 0 ? -errno : 0;
    if (result == 0 && ((uint64_t)status.st_dev != device || (uint64_t)status.st_ino != inode)) {
        result = KVL_E_REPLACED;
    }
    if (result == 0) {
        return fd;
    }
    close(fd);
    return result;
}

static int map_apart(int directory_fd, const char *name, kvl_ledger *ledger)
{
    int fd = reopen(directory_fd, name, ledger->writable ? O_RDWR : O_RDONLY, ledger->device, ledger->inode);
    if (fd < 0) {
        return fd;
    }
    int protection = ledger->writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *base = mmap(NULL, KVL_FILE_BYTES, protection, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    ledger->file = base;
    return base == MAP_FAILED ? -error : 0;
}

static int make_handle(int directory_fd, const char *name, const kvl_ledger *opened, kvl_ledger **out)
{
    kvl_ledger *ledger = malloc(sizeof *ledger);
    if (ledger == NULL) {
        return -ENOMEM;
    }
    *ledger = *opened;
    pthread_mutex_init(&ledger->raising, NULL); /* cannot fail without attributes */
    int result = map_apart(directory_fd, name, ledger);
    if (result < 0) {
        free(ledger);
        return result;
    }
    link_handle(ledger);
    *out = ledger;
    return 0;
}

/* Called with the handles locked. */
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
    int flags = (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    kvl_ledger opened = {.fd = open_above_standard(directory_fd, name, flags, 0), .writable = writable != 0, .slot = -1};
    if (opened.fd < 0) {
        return opened.fd == -ELOOP ? KVL_E_NOT_REGULAR : opened.fd;
    }
    int result = check_kind(opened.fd, file);
    if (result == 0) {
        result = read_stamp(opened.fd, &opened.stamp, file);
    }
    KVL_POINT("open:checked");
    if (result == 0) {
        opened.device = file->device;
        opened.inode = file->inode;
        result = make_handle(directory_fd, name, &opened, out);
    }
    if (result != 0) {
        close(opened.fd);
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
    kvl_lock_handles();
    int result = open_checked(directory_fd, name, writable, file, out);
    kvl_unlock_handles();
    return result;
}

void kvl_close(kvl_ledger *ledger)
{
    if (ledger == NULL) {
        return;
    }
    kvl_lock_handles();
    unlink_handle(ledger);
    struct stat status;
    if (check_descriptor(ledger, &status) == 0) {
        close(ledger->fd);
    }
    kvl_unlock_handles();
    munmap(ledger->file, KVL_FILE_BYTES);
    pthread_mutex_destroy(&ledger->raising);
    free(ledger);
}

/* An open file ------------------------------------------------------------------------------------------------- */

int kvl_read_at(const kvl_ledger *ledger, void *target, size_t size, size_t offset)
{
    ssize_t got = pread(ledger->fd, target, size, (off_t)offset);
    if (got < 0) {
        return -errno;
    }
    return got == (ssize_t)size ? 0 : KVL_E_DAMAGED;
}

int kvl_write_at(const kvl_ledger *ledger, const void *source, size_t size, size_t offset)
{
    ssize_t written = pwrite(ledger->fd, source, size, (off_t)offset);
    if (written < 0) {
        return -errno;
    }
    return written == (ssize_t)size ? 0 : -EIO;
}

int kvl_check_stamp(const kvl_ledger *ledger)
{
    struct stat status;
    int result = check_descriptor(ledger, &status);
    if (result < 0) {
        return result;
    }
    struct layout_stamp stamp;
    result = status.st_size == KVL_FILE_BYTES ? kvl_read_at(ledger, &stamp, sizeof stamp, 0) : KVL_E_DAMAGED;
    if (result == 0 && memcmp(&stamp, &ledger->stamp, sizeof stamp) != 0) {
        result = KVL_E_DAMAGED;
    }
    return result;
}

int kvl_open_again(const kvl_ledger *ledger, int directory_fd, const char *name, int *fd)
{
    *fd = reopen(directory_fd, name, O_RDONLY, ledger->device, ledger->inode);
    return *fd < 0 ? *fd : 0;
}
