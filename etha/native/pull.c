/* Copies rows of other processes' memory into this process's own, on several threads: included by executor.c.
 *
 * The rows are cut into chunks, each of one process. A thread takes the next chunk, looks whether it shall stop, and calls
 * process_vm_readv, which needs nothing of the other process and reports errors as numbers. Both tables of a chunk have
 * the same number of bytes, of a cast the same number of elements, but may be cut differently. */

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PULL_ROWS = 512, PULL_THREADS = 16 };

typedef struct {
    struct iovec *local, *remote;         /* rows: address, bytes */
    uint64_t *local_ends, *remote_ends;   /* of each chunk: the number of the row after its last */
    int32_t *pids, *casts;                /* of each chunk */
    uint64_t chunks;
    uint32_t threads, stop;               /* `stop` is set by any thread */
    uint64_t next, done;                  /* the next chunk; bytes that have been copied, of a cast the fewer ones */
    int32_t error, pid;                   /* the first errno, of which process, where */
    uint64_t address;
    int32_t ended;                        /* etha_start_pull: an eventfd that is written when the last thread ends */
    uint32_t running, started;            /* threads of etha_start_pull */
    int32_t own;                          /* this process */
    pthread_t workers[PULL_THREADS];
} etha_pull;

/* The rows from number `*at` on, without the first `*skip` bytes of the first, up to PULL_ROWS. */
static uint64_t pull_window(const struct iovec *rows, uint64_t at, uint64_t end, uint64_t skip, struct iovec *window) {
    uint64_t n = 0;
    for (; at < end && n < PULL_ROWS; at++, n++) {
        window[n].iov_base = (uint8_t *)rows[at].iov_base + skip;
        window[n].iov_len = rows[at].iov_len - skip;
        skip = 0;
    }
    return n;
}

static void pull_advance(const struct iovec *rows, uint64_t *at, uint64_t *skip, uint64_t bytes) {
    bytes += *skip;
    while (bytes && bytes >= rows[*at].iov_len) bytes -= rows[(*at)++].iov_len;
    *skip = bytes;
}

static void pull_failed(etha_pull *p, int32_t pid, int32_t code, const struct iovec *row) {
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&p->error, &none, code, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
        p->pid = pid;
        p->address = (uint64_t)row->iov_base;
    }
    __atomic_store_n(&p->stop, 1, __ATOMIC_RELEASE);
}

/* Elements of a cast change their dtype in a buffer of its thread that stays in the caches: fewer, longer system calls
 * gain more than a smaller buffer. */
enum { CAST_NONE, CAST_F32_BF16, CAST_BF16_F32, CAST_F32_F16, CAST_F16_F32, CAST_BLOCK = 1 << 17 };
WIDE static void cast_f32_bf16(const float *from, uint16_t *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]); }
WIDE static void cast_bf16_f32(const uint16_t *from, float *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]); }
WIDE static void cast_f32_f16(const float *from, uint16_t *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = to_f16(from[i]); }
WIDE static void cast_f16_f32(const uint16_t *from, float *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = from_f16(from[i]); }

static void pull_cast(etha_pull *p, uint64_t chunk, void **buffer) {
    struct iovec local[PULL_ROWS], remote[PULL_ROWS];
    if (!*buffer && !(*buffer = malloc(CAST_BLOCK * (sizeof(float) + sizeof(uint16_t)))))
        return pull_failed(p, p->pids[chunk], ENOMEM, p->remote + (chunk ? p->remote_ends[chunk - 1] : 0));
    float *wide = *buffer;
    uint16_t *narrow = (uint16_t *)(wide + CAST_BLOCK);
    int32_t cast = p->casts[chunk], narrows = cast == CAST_F32_BF16 || cast == CAST_F32_F16;
    uint64_t size = narrows ? 4 : 2, target_size = narrows ? 2 : 4;
    uint64_t here = chunk ? p->local_ends[chunk - 1] : 0, there = chunk ? p->remote_ends[chunk - 1] : 0;
    uint64_t here_skip = 0, there_skip = 0;
    while (there < p->remote_ends[chunk] && !__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
        uint64_t remotes = pull_window(p->remote, there, p->remote_ends[chunk], there_skip, remote);
        struct iovec read = {.iov_base = narrows ? (void *)wide : (void *)narrow, .iov_len = CAST_BLOCK * size};
        ssize_t n = process_vm_readv(p->pids[chunk], &read, 1, remote, remotes, 0);
        if (n <= 0 || (uint64_t)n % size) return pull_failed(p, p->pids[chunk], n < 0 ? errno : EFAULT, remote);
        uint64_t count = (uint64_t)n / size;
        if (cast == CAST_F32_BF16) cast_f32_bf16(wide, narrow, count);
        if (cast == CAST_BF16_F32) cast_bf16_f32(narrow, wide, count);
        if (cast == CAST_F32_F16) cast_f32_f16(wide, narrow, count);
        if (cast == CAST_F16_F32) cast_f16_f32(narrow, wide, count);
        struct iovec made = {.iov_base = narrows ? (void *)narrow : (void *)wide, .iov_len = count * target_size};
        while (made.iov_len) { /* by the kernel, because memory that was unmapped must be an error and not a signal */
            uint64_t locals = pull_window(p->local, here, p->local_ends[chunk], here_skip, local);
            ssize_t written = process_vm_readv(p->own, local, locals, &made, 1, 0);
            if (written <= 0) return pull_failed(p, p->own, written < 0 ? errno : EFAULT, local);
            made.iov_base = (uint8_t *)made.iov_base + written;
            made.iov_len -= (size_t)written;
            pull_advance(p->local, &here, &here_skip, (uint64_t)written);
        }
        __atomic_fetch_add(&p->done, count * 2, __ATOMIC_RELAXED);
        pull_advance(p->remote, &there, &there_skip, (uint64_t)n);
    }
}

static void pull_chunk(etha_pull *p, uint64_t chunk) {
    struct iovec local[PULL_ROWS], remote[PULL_ROWS];
    uint64_t here = chunk ? p->local_ends[chunk - 1] : 0, there = chunk ? p->remote_ends[chunk - 1] : 0;
    uint64_t here_skip = 0, there_skip = 0;
    while (here < p->local_ends[chunk] && there < p->remote_ends[chunk]) {
        uint64_t locals = pull_window(p->local, here, p->local_ends[chunk], here_skip, local);
        uint64_t remotes = pull_window(p->remote, there, p->remote_ends[chunk], there_skip, remote);
        ssize_t n = process_vm_readv(p->pids[chunk], local, locals, remote, remotes, 0);
        if (n <= 0) {
            int32_t code = n < 0 ? errno : EFAULT;
            if (code == EFAULT) { /* at either end: it is this one if the first byte over there can be read */
                uint8_t byte;
                struct iovec to = {.iov_base = &byte, .iov_len = 1}, from = {.iov_base = remote[0].iov_base, .iov_len = 1};
                if (process_vm_readv(p->pids[chunk], &to, 1, &from, 1, 0) == 1) return pull_failed(p, p->own, code, local);
            }
            return pull_failed(p, p->pids[chunk], code, remote);
        }
        __atomic_fetch_add(&p->done, (uint64_t)n, __ATOMIC_RELAXED);
        pull_advance(p->local, &here, &here_skip, (uint64_t)n);
        pull_advance(p->remote, &there, &there_skip, (uint64_t)n);
    }
}

static void *pull_work(void *of) {
    etha_pull *p = of;
    void *buffer = NULL;
    while (!__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
        uint64_t chunk = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (chunk >= p->chunks) break;
        p->casts[chunk] ? pull_cast(p, chunk, &buffer) : pull_chunk(p, chunk);
    }
    free(buffer);
    return NULL;
}

static void *pull_until_last(void *of) {
    etha_pull *p = of;
    pull_work(p);
    int ended = p->ended; /* who sees 0 threads may free the struct once it has joined this one */
    if (__atomic_sub_fetch(&p->running, 1, __ATOMIC_ACQ_REL) == 0) {
        uint64_t one = 1;
        ssize_t written = write(ended, &one, sizeof one);
        (void)written; /* it is full only if nobody has read it, and then it is readable */
    }
    return NULL;
}

/* Begins to copy everything, until `stop` is set or a copy fails, and returns how many threads do so. If there are any,
 * etha_join_pull must follow, which waits for them. */
uint32_t etha_start_pull(etha_pull *p) {
    sigset_t all, before;
    sigfillset(&all); /* Python's signals go to threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    uint32_t wanted = p->threads < PULL_THREADS ? p->threads : PULL_THREADS;
    p->started = 0;
    p->own = getpid();
    p->running = wanted + 1; /* this one counts, too, until all have begun */
    while (p->started < wanted && !pthread_create(&p->workers[p->started], NULL, pull_until_last, p)) p->started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    uint32_t less = wanted - p->started + 1;
    if (__atomic_sub_fetch(&p->running, less, __ATOMIC_ACQ_REL) == 0 && p->started) {
        uint64_t one = 1;
        ssize_t written = write(p->ended, &one, sizeof one);
        (void)written;
    }
    return p->started;
}

void etha_join_pull(etha_pull *p) {
    for (uint32_t i = 0; i < p->started; i++) pthread_join(p->workers[i], NULL);
    p->started = 0;
}

uint64_t etha_pull_bytes(void) { return sizeof(etha_pull); }
