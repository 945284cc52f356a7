/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_ledger.c - what a hostile peer may have written into a ledger, as input to everything that reads one.
 *
 * An input is a list of patches to a valid file (place, length, bytes), applied before and after it is opened, so that
 * short inputs reach deep. The first byte chooses what is done then: opening, listing, publishing, polling, reading the
 * record, acknowledging, or cutting the file under the mapping. Whatever happens, the process must live, no byte outside
 * the mapping may be touched, and a file that is refused must be left as it was.
 *
 *   clang -fsanitize=fuzzer,address,undefined fuzz_ledger.c ../?*.c (see scripts/fuzz)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../handle.h"

enum { MEMBERS = 2, MAX_PATCHES = 64 };

static int directory = -1;
static unsigned char pristine[KVL_FILE_BYTES];
static unsigned char *image; /* the first file, mapped here as well */
static kvl_ledger *kept[MEMBERS]; /* open over many inputs: what an engine or a caller has open already */
static int files[MEMBERS];
static const char *const names[MEMBERS] = {"a", "b"};

static void must(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "broken promise: %s\n", what);
        abort();
    }
}
#define MUST(condition) must(condition, #condition)

static void set_up(void)
{
    char path[] = "/dev/shm/kvledger-fuzz-XXXXXX";
    MUST(mkdtemp(path) != NULL);
    directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MUST(directory >= 0);
    for (int i = 0; i < MEMBERS; i++) {
        MUST(kvl_create(directory, names[i], 0600) == 1);
        files[i] = openat(directory, names[i], O_RDWR | O_CLOEXEC);
        MUST(files[i] >= 0);
    }
    /* Three slots with content, one of them alive by its lock alone: patches turn them into anything. */
    kvl_ledger *ledger = NULL;
    struct kvl_file file;
    MUST(kvl_open(directory, names[0], 1, &file, &ledger) == 0);
    struct kvl_identity identity = {.instance = "x", .members = MEMBERS, .startup_limit = 5, .tp_size = 2};
    struct kvl_report report = {.idle = 3, .reason = "r"};
    struct kvl_audit audit = {.after = 3, .instance = "x"};
    for (uint64_t i = 1; i <= 3; i++) {
        int slot = kvl_register(ledger, &identity, i, i << 32 | 7);
        MUST(slot >= 0 && kvl_acknowledge(ledger, (uint32_t)slot, &report) == 0);
        MUST(kvl_audit_write(ledger, &audit) == 0);
    }
    kvl_close(ledger);
    MUST(pread(files[0], pristine, sizeof pristine, 0) == (ssize_t)sizeof pristine);
    for (int i = 0; i < MEMBERS; i++) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
        for (uint32_t slot = 0; slot < 2; slot++) {
            lock.l_start = (off_t)(offsetof(struct layout_file, slots) + slot * sizeof(struct layout_slot));
            MUST(fcntl(files[i], F_OFD_SETLK, &lock) == 0);
        }
    }
    image = mmap(NULL, KVL_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, files[0], 0);
    MUST(image != MAP_FAILED);
}

struct input {
    const unsigned char *bytes;
    size_t left;
};

static uint32_t take(struct input *input, size_t count)
{
    uint32_t value = 0;
    for (size_t i = 0; i < count && input->left > 0; i++, input->left--) {
        value = value << 8 | *input->bytes++;
    }
    return value;
}

/* Where patches go: a kind of place, then which one, so that mutations keep their meaning. */
static size_t place(struct input *input)
{
    uint32_t kind = take(input, 1) % 4;
    uint32_t index = take(input, 1);
    uint32_t within = take(input, 2);
    switch (kind) {
    case 0:
        return within % sizeof(struct layout_header);
    case 1:
        return offsetof(struct layout_file, slots) + index % 4 * sizeof(struct layout_slot) +
               within % sizeof(struct layout_slot);
    case 2:
        return offsetof(struct layout_file, audit) + index % KVL_AUDIT_RECORDS * sizeof(struct layout_audit) +
               within % sizeof(struct layout_audit);
    default:
        return (index << 8 | within) % KVL_FILE_BYTES;
    }
}

/* Whether a patch touched what is checked at opening only. */
static int patch(struct input *input, uint32_t patches)
{
    int stamp = 0;
    for (uint32_t i = 0; i < patches && input->left > 0; i++) {
        size_t at = place(input);
        stamp |= at < offsetof(struct layout_header, published);
        size_t count = take(input, 1) % 33;
        for (size_t n = 0; n < count && at + n < KVL_FILE_BYTES && input->left > 0; n++) {
            image[at + n] = (unsigned char)take(input, 1);
        }
    }
    return stamp;
}

static void check_slot(const struct kvl_slot *slot)
{
    MUST(strnlen(slot->identity.instance, KVL_NAME_BYTES) < KVL_NAME_BYTES);
    MUST(strnlen(slot->identity.engine, KVL_ENGINE_BYTES) < KVL_ENGINE_BYTES);
    MUST(strnlen(slot->identity.version, KVL_VERSION_BYTES) < KVL_VERSION_BYTES);
    MUST(strnlen(slot->report.reason, KVL_REASON_BYTES) < KVL_REASON_BYTES);
    MUST(slot->report.consistent <= 1 && slot->incarnation != 0);
}

static void list_and_publish(kvl_ledger *ledger, int publishing)
{
    for (uint32_t i = 0; i < KVL_SLOTS; i++) {
        struct kvl_slot slot;
        int result = kvl_read_slot(ledger, i, &slot);
        MUST(result == 0 || result == 1 || result == -EAGAIN);
        if (result != 1) {
            continue;
        }
        MUST(i < 2 || kvl_is_lost(ledger)); /* only these are locked */
        check_slot(&slot);
        if (publishing) {
            uint64_t found;
            uint64_t word = ((slot.desired >> 32) + 1) << 32 | 9;
            int raised = kvl_raise(ledger, i, slot.incarnation, word, &found);
            MUST(raised == KVL_RAISED || raised == KVL_LOST || raised == -ESRCH);
            MUST(raised != KVL_RAISED || found >> 32 < word >> 32);
        }
    }
}

static void read_records(kvl_ledger *ledger)
{
    for (uint32_t i = 0; i <= KVL_AUDIT_RECORDS; i++) {
        struct kvl_audit record;
        if (kvl_audit_read(ledger, i, &record) == 1) {
            MUST(strnlen(record.instance, KVL_NAME_BYTES) < KVL_NAME_BYTES);
            MUST(strnlen(record.program, KVL_PROGRAM_BYTES) < KVL_PROGRAM_BYTES);
            MUST(strnlen(record.note, KVL_NOTE_BYTES) < KVL_NOTE_BYTES);
        }
    }
}

static void engine_side(kvl_ledger *ledger)
{
    struct kvl_identity identity = {.instance = "y"};
    int slot = kvl_register(ledger, &identity, 99, 0);
    MUST(slot >= 2 || slot == -EUSERS);
    if (slot < 0) {
        return;
    }
    struct kvl_report report = {.idle = 1};
    MUST(kvl_acknowledge(ledger, (uint32_t)slot, &report) == 0);
    MUST(kvl_unregister(ledger, (uint32_t)slot) == 0);
}

static void poll_members(kvl_ledger *const *ledgers)
{
    const uint64_t *words[MEMBERS];
    uint64_t word;
    for (uint32_t slot = 0; slot < 4; slot++) {
        for (int i = 0; i < MEMBERS; i++) {
            words[i] = kvl_desired_word(ledgers[i], slot);
        }
        if (kvl_agree(words, MEMBERS, &word) == 1) {
            MUST(word == *words[0] && word == *words[1]);
        }
    }
}

/* Open; a refusal must come with a known reason and leave the file as it was. */
static kvl_ledger *open_patched(int index, int writable)
{
    static unsigned char before[KVL_FILE_BYTES];
    ssize_t size = pread(files[index], before, sizeof before, 0);
    kvl_ledger *ledger = NULL;
    struct kvl_file file;
    int code = kvl_open(directory, names[index], writable, &file, &ledger);
    MUST(code == 0 || (code <= KVL_E_NOT_REGULAR && code >= KVL_E_LAYOUT) == (code != 0));
    MUST((ledger != NULL) == (code == 0));
    if (code != 0) {
        static unsigned char after[KVL_FILE_BYTES];
        MUST(pread(files[index], after, sizeof after, 0) == size && memcmp(after, before, (size_t)size) == 0);
    }
    return ledger;
}

static void exercise(kvl_ledger *const *ledgers, uint32_t choice, struct input *input)
{
    if (choice & 1) { /* patched again under the mapping */
        (void)patch(input, take(input, 1) % 8);
    }
    if (choice & 2) { /* cut under the mapping */
        MUST(ftruncate(files[0], take(input, 2) % (KVL_FILE_BYTES + 1)) == 0);
    }
    list_and_publish(ledgers[0], (choice & 4) != 0);
    read_records(ledgers[0]);
    if (ledgers[1] != NULL) {
        poll_members(ledgers);
    }
    if (choice & 8) {
        engine_side(ledgers[0]);
    }
    if (choice & 16) {
        struct kvl_audit record = {.after = 1};
        MUST(kvl_audit_write(ledgers[0], &record) == 0);
        kvl_ring(ledgers[0], KVL_PUBLISHED);
        (void)kvl_wait(ledgers[0], KVL_PUBLISHED, kvl_bell(ledgers[0], KVL_PUBLISHED), 0);
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t count);

/* A file that may be refused, or that is smaller than it should be. */
static void with_opening(uint32_t choice, uint32_t size, struct input *input)
{
    if (size != KVL_FILE_BYTES) {
        MUST(ftruncate(files[0], size) == 0);
    }
    kvl_ledger *ledgers[MEMBERS] = {open_patched(0, 1), NULL};
    if (ledgers[0] != NULL) {
        if (choice & 32) {
            ledgers[1] = open_patched(1, 0);
        }
        exercise(ledgers, choice, input);
    }
    kvl_close(ledgers[0]);
    kvl_close(ledgers[1]);
}

static void with_kept(uint32_t choice, struct input *input)
{
    for (int i = 0; i < MEMBERS; i++) {
        if (kept[i] == NULL) {
            kept[i] = open_patched(i, i == 0);
            MUST(kept[i] != NULL);
        }
    }
    exercise(kept, choice, input);
    for (int i = 0; i < MEMBERS; i++) {
        if (kvl_is_lost(kept[i])) {
            kvl_close(kept[i]);
            kept[i] = NULL;
        }
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t count)
{
    if (directory < 0) {
        set_up();
    }
    struct input input = {bytes, count};
    uint32_t choice = take(&input, 1);
    int stamp = patch(&input, take(&input, 1) % 16);
    uint32_t size = KVL_FILE_BYTES;
    if (choice & 64) {
        size = take(&input, 2) % (KVL_FILE_BYTES + 2);
    }
    if (stamp || size != KVL_FILE_BYTES || choice & 128) {
        with_opening(choice, size, &input);
        if (kept[0] != NULL) { /* it may have lost its pages */
            kvl_close(kept[0]);
            kept[0] = NULL;
        }
    } else {
        with_kept(choice, &input);
    }
    if (size != KVL_FILE_BYTES || choice & 2) {
        MUST(ftruncate(files[0], KVL_FILE_BYTES) == 0);
    }
    memcpy(image, pristine, sizeof pristine);
    return 0;
}
