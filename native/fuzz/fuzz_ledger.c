/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_ledger.c - what a hostile peer may have written into a ledger, as input to everything that reads one.
 *
 * An input is a list of patches to a valid file (place, length, bytes), applied before and after it is opened, so that
 * short inputs reach deep. Its first bytes choose what is done then: copying another ledger over it, cutting it, opening,
 * listing, publishing, agreeing, checking, registering, acknowledging, reading the record. Whatever happens, the process
 * must live, no byte outside the file may be touched, and a file that is refused or damaged must be left as it is.
 *
 *   clang -fsanitize=fuzzer,address,undefined fuzz_ledger.c ../?*.c (see scripts/proofs/fuzz)
 */
#include "../handle.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MEMBERS = 2, LOCKED = 2, OWN_SLOT = 3, LISTED = 6 };
enum { OWN_LIFE = 99, OWN_REVISION = 3, OWN_CAP_REVISION = 4 };

/* What the first two bytes of an input choose. */
enum {
    PATCH_AGAIN = 1,
    CUT = 2,
    PUBLISH = 4 + 8 + 32768, /* all three: it starts a process, and has to be rare */
    REGISTER = 16,
    ACKNOWLEDGE = 32,
    RECORDS = 64,
    BELLS = 128,
    OPEN = 256,
    COPY_OVER = 512,
    RECORD = 1024 + 2048, /* as PUBLISH */
    LIST_ALL = 4096 + 8192,
    CUT_BEFORE = 16384
};

static int directory = -1;
static const char *const names[MEMBERS] = {"a", "b"};
static int files[MEMBERS];
static unsigned char pristine[MEMBERS][KVL_FILE_BYTES];
static unsigned char *image; /* the first file, mapped here as well: not to be touched while the file is cut */
static kvl_ledger *owners[MEMBERS];
static kvl_ledger *publisher;
static kvl_ledger *observer;

static void must(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "broken promise: %s\n", what);
        abort();
    }
}
#define MUST(condition) must(condition, #condition)

static kvl_ledger *open_now(int index, int writable)
{
    kvl_ledger *ledger = NULL;
    struct kvl_file file;
    MUST(kvl_open(directory, names[index], writable, &file, &ledger) == 0);
    return ledger;
}

static void lock_life(int fd, uint64_t incarnation)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    lock.l_start = (off_t)(UINT64_C(1) << 62 | incarnation);
    MUST(fcntl(fd, F_OFD_SETLK, &lock) == 0);
}

/* Four slots with content: three of strangers, of whom two are alive, and one of the engine that this process plays. */
static void fill_member(int index)
{
    struct kvl_identity identity = {.instance = "x", .members = MEMBERS, .startup_limit = 5, .tp_size = 2};
    struct kvl_report report = {.idle = 3, .returns = "yes"};
    struct kvl_audit record = {.after = 3, .instance = "x"};
    kvl_ledger *strangers[OWN_SLOT];
    for (uint64_t i = 0; i < OWN_SLOT; i++) {
        strangers[i] = open_now(index, 1);
        const uint64_t words[KVL_BOUNDS] = {(i + 1) << 32 | 7, 0};
        MUST(kvl_register(strangers[i], &identity, i + 1, words, i == 0 ? &report : NULL) == (int)i);
        MUST(kvl_acknowledge(strangers[i], &report) == 0 && kvl_audit_write(strangers[i], &record) == 0);
    }
    owners[index] = open_now(index, 1);
    const uint64_t words[KVL_BOUNDS] = {(uint64_t)OWN_REVISION << 32 | 7, (uint64_t)OWN_CAP_REVISION << 32 | 8};
    MUST(kvl_register(owners[index], &identity, OWN_LIFE, words, NULL) == OWN_SLOT);
    for (int i = 0; i < OWN_SLOT; i++) {
        kvl_close(strangers[i]);
    }
    MUST(pread(files[index], pristine[index], KVL_FILE_BYTES, 0) == KVL_FILE_BYTES);
    for (uint64_t i = 0; i < LOCKED; i++) {
        lock_life(files[index], i + 1);
    }
}

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
        fill_member(i);
    }
    publisher = open_now(0, 1);
    observer = open_now(0, 0);
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
        return offsetof(struct layout_file, slots) + index % LISTED * sizeof(struct layout_slot) +
               within % sizeof(struct layout_slot);
    case 2:
        return offsetof(struct layout_file, audit) + index % KVL_AUDIT_RECORDS * sizeof(struct layout_audit) +
               within % sizeof(struct layout_audit);
    default:
        return (index << 8 | within) % KVL_FILE_BYTES;
    }
}

static void patch(struct input *input, uint32_t patches)
{
    for (uint32_t i = 0; i < patches && input->left > 0; i++) {
        size_t at = place(input);
        size_t count = take(input, 1) % 33;
        for (size_t n = 0; n < count && at + n < KVL_FILE_BYTES && input->left > 0; n++) {
            image[at + n] = (unsigned char)take(input, 1);
        }
    }
}

/* The other member's content, or an older one of this file, from one page to another. */
static void copy_over(struct input *input)
{
    uint32_t first = take(input, 1) % (KVL_FILE_BYTES / KVL_PAGE);
    uint32_t pages = take(input, 1) % (KVL_FILE_BYTES / KVL_PAGE - first) + 1;
    memcpy(image + first * KVL_PAGE, pristine[1] + first * KVL_PAGE, (size_t)pages * KVL_PAGE);
}

/* What is stored in the first file now. */
struct state {
    size_t size;
    int same_stamp;
    struct layout_file *now; /* NULL while the file is cut */
};

static struct state look(size_t size)
{
    struct state state = {size, 0, NULL};
    if (size == KVL_FILE_BYTES) {
        state.now = (struct layout_file *)(void *)image;
        state.same_stamp = memcmp(image, pristine[0], sizeof(struct layout_stamp)) == 0;
    }
    return state;
}

static int is_whole(const struct state *state)
{
    return state->now != NULL && state->same_stamp;
}

static void check_slot(const struct kvl_slot *slot, int result)
{
    MUST(strnlen(slot->identity.instance, KVL_NAME_BYTES) < KVL_NAME_BYTES);
    MUST(strnlen(slot->identity.engine, KVL_ENGINE_BYTES) < KVL_ENGINE_BYTES);
    MUST(strnlen(slot->identity.version, KVL_VERSION_BYTES) < KVL_VERSION_BYTES);
    MUST(strnlen(slot->report.returns, KVL_RETURNS_BYTES) < KVL_RETURNS_BYTES);
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        MUST(strnlen(slot->report.answers[bound].reason, KVL_REASON_BYTES) < KVL_REASON_BYTES);
    }
    MUST(slot->incarnation == 1 || slot->incarnation == 2 || slot->incarnation == OWN_LIFE); /* only these are locked */
    struct kvl_report nothing;
    memset(&nothing, 0, sizeof nothing);
    MUST(result == KVL_ALIVE || memcmp(&nothing, &slot->report, sizeof nothing) == 0);
}

static void raise_one(kvl_ledger *ledger, uint32_t index, const struct kvl_slot *slot, const struct state *state)
{
    struct kvl_audit record = {.program = "fuzz"};
    uint64_t found;
    uint32_t bound = index % KVL_BOUNDS;
    uint32_t other = KVL_BOUNDS - 1 - bound;
    uint64_t word = ((slot->desired[bound] >> 32) + 1) << 32 | 9;
    int result = kvl_raise(ledger, index, slot->incarnation, bound, word, 0, &record, &found);
    MUST(result == KVL_RAISED || result == KVL_OVERTAKEN || result == KVL_E_DAMAGED);
    MUST(result != KVL_E_DAMAGED || !is_whole(state));
    if (result == KVL_RAISED) {
        const struct layout_ownership *ownership = &state->now->slots[index].ownership;
        MUST(found == slot->desired[bound] && atomic_load(&ownership->desired[bound]) == word);
        MUST(atomic_load(&ownership->desired[other]) == slot->desired[other]);
    } else if (result == KVL_OVERTAKEN) {
        MUST((uint32_t)(slot->desired[bound] >> 32) == UINT32_MAX);
    }
}

static void list_and_publish(kvl_ledger *ledger, uint32_t choice, const struct state *state)
{
    int published = (choice & PUBLISH) != PUBLISH;
    uint32_t count = (choice & LIST_ALL) == LIST_ALL ? KVL_SLOTS : LISTED;
    for (uint32_t i = 0; i < count; i++) {
        struct kvl_slot slot;
        int result = kvl_read_slot(ledger, i, &slot);
        MUST(result == KVL_DEAD || result == KVL_ALIVE || result == KVL_TORN || result == -EAGAIN ||
             (result == KVL_E_DAMAGED && state->now == NULL));
        if (result != KVL_ALIVE && result != KVL_TORN) {
            continue;
        }
        check_slot(&slot, result);
        MUST(kvl_is_owned(ledger, i, slot.incarnation) == 1);
        MUST(kvl_is_owned(ledger, i, slot.incarnation + 1000) == 0);
        if (!published && ledger->writable) {
            published = 1;
            raise_one(ledger, i, &slot, state);
        }
    }
}

static void read_records(const kvl_ledger *ledger, const struct state *state)
{
    static struct kvl_audit records[KVL_AUDIT_RECORDS];
    uint64_t written;
    int count = kvl_audit_read(ledger, records, &written);
    MUST(count == KVL_E_DAMAGED ? state->now == NULL : count >= 0 && count <= KVL_AUDIT_RECORDS);
    for (int i = 0; i < count; i++) {
        MUST(strnlen(records[i].instance, KVL_NAME_BYTES) < KVL_NAME_BYTES);
        MUST(strnlen(records[i].program, KVL_PROGRAM_BYTES) < KVL_PROGRAM_BYTES);
        MUST(strnlen(records[i].note, KVL_NOTE_BYTES) < KVL_NOTE_BYTES);
    }
}

/* The engine: what it takes as agreed is in both files, and its own; what it takes for whole is so. */
static void play_owner(const struct state *state)
{
    const uint32_t revisions[KVL_BOUNDS] = {OWN_REVISION, OWN_CAP_REVISION};
    int checked = kvl_check(owners[0], directory, names[0], revisions);
    MUST(checked == 0 || checked == KVL_E_DAMAGED || checked == KVL_E_DISPLACED || checked == KVL_E_SET_BACK);
    MUST(checked == KVL_E_DAMAGED ? !is_whole(state) : is_whole(state));
    for (uint32_t bound = 0; bound < KVL_BOUNDS; bound++) {
        uint64_t word;
        int agreed = kvl_agree((const kvl_ledger *const *)owners, MEMBERS, bound, &word);
        MUST(agreed == 0 || agreed == 1);
        if (state->now != NULL) {
            const struct layout_ownership *own = &state->now->slots[OWN_SLOT].ownership;
            uint64_t current = atomic_load(&own->desired[bound]);
            MUST(!agreed || (current == word && own->incarnation == OWN_LIFE));
            MUST(checked != 0 || (own->incarnation == OWN_LIFE && current >> 32 >= revisions[bound]));
        }
    }
}

static void acknowledge(const struct state *state)
{
    struct kvl_report report = {.idle = 1};
    MUST(kvl_acknowledge(owners[0], &report) == (is_whole(state) ? 0 : KVL_E_DAMAGED));
}

static void register_new(kvl_ledger *ledger)
{
    struct kvl_identity identity = {.instance = "y"};
    struct kvl_report report = {.idle = 1};
    const uint64_t words[KVL_BOUNDS] = {0, 0};
    const uint32_t revisions[KVL_BOUNDS] = {0, 0};
    int slot = kvl_register(ledger, &identity, 77, words, &report);
    MUST((slot >= 0 && slot != OWN_SLOT) || slot == KVL_E_DAMAGED);
    if (slot >= 0) {
        MUST(kvl_check(ledger, directory, names[0], revisions) == 0);
        MUST(kvl_acknowledge(ledger, &report) == 0 && kvl_unregister(ledger) == 0);
    }
}

static void use_bells(kvl_ledger *ledger, const struct state *state)
{
    uint32_t before;
    uint32_t after;
    int known = kvl_bell(ledger, KVL_PUBLISHED, &before);
    int rung = kvl_ring(ledger, KVL_PUBLISHED);
    MUST(rung == 0 || rung == KVL_E_DAMAGED);
    MUST(known == 0 || state->now == NULL);
    if (known == 0) {
        MUST(kvl_bell(ledger, KVL_PUBLISHED, &after) == 0 && after == (rung == 0 ? before + 1 : before));
        int waited = kvl_wait(ledger, KVL_PUBLISHED, after, 0);
        MUST(waited == -ETIMEDOUT || (waited == KVL_E_DAMAGED && state->now == NULL));
    }
}

static void exercise(kvl_ledger *writer, kvl_ledger *reader, uint32_t choice, const struct state *state)
{
    list_and_publish(choice & 1 ? reader : writer, choice, state);
    play_owner(state);
    if (choice & ACKNOWLEDGE) {
        acknowledge(state);
    }
    if (choice & RECORDS) {
        read_records(reader, state);
    }
    if (choice & BELLS) {
        use_bells(writer, state);
    }
    if ((choice & RECORD) == RECORD) {
        struct kvl_audit record = {.after = 1};
        int written = kvl_audit_write(writer, &record);
        MUST(written == 0 || written == KVL_E_DAMAGED);
    }
}

/* Open; a refusal must come with a known reason. */
static kvl_ledger *open_patched(int writable)
{
    kvl_ledger *ledger = NULL;
    struct kvl_file file;
    int code = kvl_open(directory, names[0], writable, &file, &ledger);
    MUST(code == 0 || (code <= KVL_E_NOT_REGULAR && code >= KVL_E_LAYOUT));
    MUST((ledger != NULL) == (code == 0));
    return ledger;
}

/* What may be done to a file before and after it is opened. Returns its size. */
static size_t damage(struct input *input, uint32_t choice, int cut)
{
    if (choice & COPY_OVER) {
        copy_over(input);
    }
    patch(input, take(input, 1) % 16);
    if (!cut) {
        return KVL_FILE_BYTES;
    }
    size_t size = take(input, 2) % (KVL_FILE_BYTES + 2);
    MUST(ftruncate(files[0], (off_t)size) == 0);
    return size;
}

/* Through a handle that is opened on the damaged file, if it is accepted. */
static void with_opening(struct input *input, uint32_t choice)
{
    size_t size = damage(input, choice, (choice & CUT_BEFORE) != 0);
    kvl_ledger *ledger = open_patched(1);
    if (ledger == NULL) {
        return;
    }
    struct layout_stamp opened = ledger->stamp;
    MUST(size == KVL_FILE_BYTES);
    if (choice & PATCH_AGAIN) {
        patch(input, take(input, 1) % 8);
    }
    if (choice & REGISTER) {
        register_new(ledger);
    }
    struct state state = look(size);
    state.same_stamp = memcmp(image, &opened, sizeof opened) == 0;
    list_and_publish(ledger, choice, &state);
    read_records(ledger, &state);
    kvl_close(ledger);
}

/* Through handles that were opened before the damage. */
static void with_kept(struct input *input, uint32_t choice)
{
    size_t size = damage(input, choice, (choice & CUT) != 0);
    struct state state = look(size);
    static unsigned char before[KVL_FILE_BYTES + 2];
    static unsigned char after[KVL_FILE_BYTES + 2];
    ssize_t count = is_whole(&state) ? 0 : pread(files[0], before, sizeof before, 0);
    exercise(publisher, observer, choice, &state);
    if (!is_whole(&state)) { /* nothing was written into it */
        MUST(pread(files[0], after, sizeof after, 0) == count && memcmp(before, after, (size_t)count) == 0);
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t count);

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t count)
{
    if (directory < 0) {
        set_up();
    }
    struct input input = {bytes, count};
    uint32_t choice = take(&input, 2);
    if (choice & OPEN) {
        with_opening(&input, choice);
    } else {
        with_kept(&input, choice);
    }
    if (choice & (CUT | CUT_BEFORE)) {
        MUST(ftruncate(files[0], KVL_FILE_BYTES) == 0);
    }
    memcpy(image, pristine[0], KVL_FILE_BYTES);
    return 0;
}
