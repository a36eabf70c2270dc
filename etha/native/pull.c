/* Copies rows of other processes' memory into this process's own, on several threads: included by executor.c.
 *
 * A row is `count` runs of `nbytes` bytes, each `step` bytes behind the one before. The rows are cut into chunks, each of
 * one process. A thread takes the next chunk, looks whether it shall stop, and calls
 * process_vm_readv, which needs nothing of the other process and reports errors as numbers. Both tables of a chunk have
 * the same number of bytes, of a cast the same number of elements, but may be cut differently. */

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PULL_RUNS = 1024, PULL_THREADS = 16 }; /* runs of a call at each end: the kernel takes no more */

typedef struct {
    uint64_t address, nbytes, step, count;
} pull_row;

typedef struct {
    pull_row *local, *remote;
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

/* A place in a table of rows: byte `skip` of run number `run` of row number `at`, of the rows before number `end`. */
typedef struct {
    const pull_row *rows;
    uint64_t at, end, run, skip;
} pull_place;

static pull_place pull_chunk_of(const pull_row *rows, const uint64_t *ends, uint64_t chunk) {
    return (pull_place){.rows = rows, .at = chunk ? ends[chunk - 1] : 0, .end = ends[chunk]};
}

/* What is left of the run there. */
static struct iovec pull_run(const pull_place *place) {
    const pull_row *row = place->rows + place->at;
    uint64_t address = row->address + place->run * row->step + place->skip;
    return (struct iovec){.iov_base = (void *)address, .iov_len = row->nbytes - place->skip};
}

static void pull_advance(pull_place *place, uint64_t bytes) {
    bytes += place->skip;
    while (bytes && bytes >= place->rows[place->at].nbytes) {
        bytes -= place->rows[place->at].nbytes;
        if (++place->run == place->rows[place->at].count) place->run = 0, place->at++;
    }
    place->skip = bytes;
}

/* The kernel takes some 0.5 us to find the pages of each run over there, and as long to copy 4 KiB or more. So runs with at
 * most PULL_GAP bytes between them are read as one, and what lies between goes to `nowhere`, which nobody reads. */
enum { PULL_GAP = 4096 };

typedef struct {
    struct iovec local[PULL_RUNS], remote[PULL_RUNS];
    uint64_t locals, remotes, gaps;
    uint8_t nowhere[PULL_GAP];
} pull_call;

/* Makes the next call: as much from `here` and `there` on as it has room for. */
static void pull_prepare(pull_call *call, pull_place here, pull_place there) {
    call->locals = call->remotes = call->gaps = 0;
    while (there.at < there.end && here.at < here.end && call->locals + 2 <= PULL_RUNS) {
        struct iovec from = pull_run(&there), *last = call->remotes ? &call->remote[call->remotes - 1] : NULL;
        /* Huge if the run lies before the last one. */
        uint64_t gap = last ? (uint64_t)from.iov_base - ((uint64_t)last->iov_base + last->iov_len) : UINT64_MAX;
        if (gap <= PULL_GAP) {
            if (gap) call->local[call->locals++] = (struct iovec){.iov_base = call->nowhere, .iov_len = gap};
            last->iov_len += gap;
            call->gaps += gap;
        } else {
            last = &call->remote[call->remotes++];
            *last = (struct iovec){.iov_base = from.iov_base};
        }
        uint64_t taken = 0;
        while (taken < from.iov_len && here.at < here.end && call->locals < PULL_RUNS) {
            struct iovec *to = &call->local[call->locals++];
            *to = pull_run(&here);
            if (to->iov_len > from.iov_len - taken) to->iov_len = from.iov_len - taken;
            taken += to->iov_len;
            pull_advance(&here, to->iov_len);
        }
        last->iov_len += taken;
        pull_advance(&there, taken);
    }
}

/* How many of the first `bytes` bytes of a call did not go to nowhere. */
static uint64_t pull_kept(const pull_call *call, uint64_t bytes) {
    uint64_t kept = 0;
    for (uint64_t i = 0; bytes && i < call->locals; i++) {
        uint64_t part = call->local[i].iov_len < bytes ? call->local[i].iov_len : bytes;
        if (call->local[i].iov_base != call->nowhere) kept += part;
        bytes -= part;
    }
    return kept;
}

/* Reads the next bytes of process `pid`. Returns how many came, or the negative errno if none did. */
static int64_t pull_read(pull_call *call, int32_t pid, pull_place here, pull_place there) {
    pull_prepare(call, here, there);
    ssize_t n = process_vm_readv(pid, call->local, call->locals, call->remote, call->remotes, 0);
    if (n < 0) return -(int64_t)errno;
    /* It ends early at what cannot be read, also between two runs, and the next call begins with the run behind that. */
    return call->gaps ? (int64_t)pull_kept(call, (uint64_t)n) : n;
}

static void pull_failed(etha_pull *p, int32_t pid, int32_t code, const void *address) {
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&p->error, &none, code, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
        p->pid = pid;
        p->address = (uint64_t)address;
    }
    __atomic_store_n(&p->stop, 1, __ATOMIC_RELEASE);
}

/* Elements of a cast change their dtype in a buffer of its thread that stays in the caches: fewer, longer system calls
 * gain more than a smaller buffer. */
enum { CAST_BLOCK = 1 << 17 };

static void pull_cast(etha_pull *p, uint64_t chunk, pull_call *call, void **buffer) {
    pull_place here = pull_chunk_of(p->local, p->local_ends, chunk), there = pull_chunk_of(p->remote, p->remote_ends, chunk);
    if (!*buffer && !(*buffer = malloc(CAST_BLOCK * (sizeof(float) + sizeof(uint16_t)))))
        return pull_failed(p, p->pids[chunk], ENOMEM, pull_run(&there).iov_base);
    float *wide = *buffer;
    uint16_t *narrow = (uint16_t *)(wide + CAST_BLOCK);
    int32_t cast = p->casts[chunk], narrows = cast_narrows(cast);
    uint64_t size = narrows ? 4 : 2, target_size = narrows ? 2 : 4;
    while (there.at < there.end && !__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
        pull_row read = {.address = narrows ? (uint64_t)wide : (uint64_t)narrow, .nbytes = CAST_BLOCK * size, .count = 1};
        int64_t n = pull_read(call, p->pids[chunk], (pull_place){.rows = &read, .end = 1}, there);
        if (n <= 0 || (uint64_t)n % size) return pull_failed(p, p->pids[chunk], n < 0 ? (int32_t)-n : EFAULT, call->remote[0].iov_base);
        uint64_t count = (uint64_t)n / size;
        pull_advance(&there, (uint64_t)n);
        cast_elements(cast, narrows ? (void *)wide : (void *)narrow, narrows ? (void *)narrow : (void *)wide, count);
        pull_row made = {.address = narrows ? (uint64_t)narrow : (uint64_t)wide, .nbytes = count * target_size, .count = 1};
        pull_place from = {.rows = &made, .end = 1};
        while (from.at < from.end) { /* by the kernel, because memory that was unmapped must be an error and not a signal */
            int64_t written = pull_read(call, p->own, here, from);
            if (written <= 0) return pull_failed(p, p->own, written < 0 ? (int32_t)-written : EFAULT, call->local[0].iov_base);
            pull_advance(&from, (uint64_t)written);
            pull_advance(&here, (uint64_t)written);
        }
        __atomic_fetch_add(&p->done, count * 2, __ATOMIC_RELAXED);
    }
}

static void pull_chunk(etha_pull *p, uint64_t chunk, pull_call *call) {
    pull_place here = pull_chunk_of(p->local, p->local_ends, chunk), there = pull_chunk_of(p->remote, p->remote_ends, chunk);
    while (here.at < here.end && there.at < there.end) {
        int64_t n = pull_read(call, p->pids[chunk], here, there);
        if (n <= 0) {
            int32_t code = n < 0 ? (int32_t)-n : EFAULT;
            if (code == EFAULT) { /* at either end: it is this one if the first byte over there can be read */
                uint8_t byte;
                struct iovec to = {.iov_base = &byte, .iov_len = 1};
                struct iovec from = {.iov_base = call->remote[0].iov_base, .iov_len = 1};
                if (process_vm_readv(p->pids[chunk], &to, 1, &from, 1, 0) == 1) return pull_failed(p, p->own, code, call->local[0].iov_base);
            }
            return pull_failed(p, p->pids[chunk], code, call->remote[0].iov_base);
        }
        __atomic_fetch_add(&p->done, (uint64_t)n, __ATOMIC_RELAXED);
        pull_advance(&here, (uint64_t)n);
        pull_advance(&there, (uint64_t)n);
    }
}

static void *pull_work(void *of) {
    etha_pull *p = of;
    void *buffer = NULL;
    pull_call call;
    while (!__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
        uint64_t chunk = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (chunk >= p->chunks) break;
        p->casts[chunk] ? pull_cast(p, chunk, &call, &buffer) : pull_chunk(p, chunk, &call);
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
