/* Executes the steps of one call of a process group without the interpreter: copies, reductions, and waiting for others.
 *
 * Each member has a memfd that all members of its host map; its first page holds words by which members wait for each other
 * (below). A member writes its own tensors, its own memfd, and of other memfds the bell and the tail of a ring only. Of a
 * member of another host this process has a mirror (streams.c), which is used like a memfd.
 *
 * Memory ordering. `posted` is stored with release and loaded with acquire, so whoever sees phase p sees all bytes that
 * were written before p was posted. Sleeping is an eventcount: the sleeper adds itself to `sleeping`, then has a full
 * fence, then looks at the words; the poster stores its word, then has a full fence, then looks at `sleeping`. One of the two
 * sees the other (Dekker), so no wake-up is lost. A sleeper that read the bell before it looked is woken by a changed bell.
 *
 * Nothing here allocates, takes a lock or calls back. etha/native/__init__.py mirrors the structs. */

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef ETHA_SOURCE
#define ETHA_SOURCE "unknown"
#endif
#define STRING(x) #x
#define STRING_OF(x) STRING(x)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a member are little-endian"
#endif

/* Wide loops: one body, compiled for several processors, chosen when the library is loaded. Contraction of a * b + c must
 * be off (-ffp-contract=off), because members on different processors must compute the same bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(ETHA_PLAIN)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#define CONVERTS_F16 1
#include <immintrin.h>
#else
#define WIDE
#endif
#if defined(__clang__)
#define SAME_INDEX _Pragma("clang loop vectorize(assume_safety)")
#else
#define SAME_INDEX _Pragma("GCC ivdep")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { DONE = 0, AGAIN = 1, TIMEOUT = 2, STOPPED = 3, GAVE_UP = 4, MISMATCH = 5, INVALID = 6 };
enum { COPY = 1, REDUCE = 2, POST = 3, WAIT = 4, MATCH = 5, SEND_BYTES = 6, FLUSH = 7, PARTIAL = 8, COMBINE = 9, GROUPED = 10 };
enum { SUM = 1, AVG = 2, PREMUL_SUM = 3, PRODUCT = 4, MIN = 5, MAX = 6, BAND = 7, BOR = 8, BXOR = 9 };
enum { F16 = 1, BF16 = 2, F32 = 3, F64 = 4, U8 = 5, I8 = 6, I16 = 7, I32 = 8, I64 = 9, BOOL = 10 };
#define ALL 0xFFFFFFFFu

/* The first page of a member's memfd. */
#define POSTED 0
#define PROCESSOR 8 /* 1 + the processor on which the member last ran, 0 unknown */
#define GAVE_UP_AT 64
#define BELL 128
#define SLEEPING 132
#define CLAIM 192
#define CLAIM_LOCK 200
/* A descriptor. */
#define COMMON_BYTES 128
#define FLAGS_AT 128
#define CALL_AT 136
#define SPLITS_AT 256
#define HAS_SPLITS 2

typedef struct { uint32_t kind, n, dst_space, src_space; uint64_t dst, src, count; } step;
typedef struct { uint32_t space, host; uint64_t offset; } source;

typedef struct etha_streams etha_streams; /* streams.c */

typedef struct {
    uint32_t rank, size;
    uint8_t **pages;
    uint64_t descriptor_offset, descriptor_stride;
    _Atomic uint32_t *stop;
    uint64_t ring_offset, ring_bytes;
    uint32_t spin_us, pad;
    etha_streams *streams; /* NULL if all members are processes of this host */
} etha_group;

typedef struct {
    etha_group *group;
    const step *steps;
    uint64_t nsteps, next;
    const source *sources;
    uint8_t **spaces;
    uint64_t phase_base, call_number;
    uint32_t dtype, op;
    double factor;
    uint32_t divisor, slice_ms;
    int64_t deadline_ns;
    uint8_t *failed;
    uint32_t failed_rank, flags_all;
    uint32_t brief_us, pad;
} etha_run_args;

/* ---- words ---- */

INLINE _Atomic uint64_t *word(uint8_t *page, uint64_t at) { return (_Atomic uint64_t *)(page + at); }
INLINE _Atomic uint32_t *half(uint8_t *page, uint64_t at) { return (_Atomic uint32_t *)(page + at); }
INLINE uint64_t load_u64(const uint8_t *at) { uint64_t x; memcpy(&x, at, 8); return x; }
INLINE int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

const char *etha_source(void) { return STRING_OF(ETHA_SOURCE); }

/* Wake the member's sleepers. The bell changes first, so one that is about to sleep does not. */
void etha_ring(uint8_t *page) {
    atomic_fetch_add(half(page, BELL), 1);
    syscall(SYS_futex, half(page, BELL), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void ring_if_asleep(uint8_t *page) {
    if (atomic_load_explicit(half(page, SLEEPING), memory_order_relaxed)) etha_ring(page);
}

static void wake_streams(const etha_group *group);

static void ring_others(const etha_group *group) {
    atomic_thread_fence(memory_order_seq_cst); /* the poster's half of the eventcount */
    for (uint32_t r = 0; r < group->size; r++)
        if (r != group->rank) ring_if_asleep(group->pages[r]);
    if (group->streams) wake_streams(group);
}

/* Say that this member takes no further part in this call and later ones. The first call that it names counts. */
void etha_give_up(etha_group *group, uint64_t call_number) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(word(group->pages[group->rank], GAVE_UP_AT), &none, call_number + 1);
    ring_others(group);
}

/* End the calls of this process: `reason` is not 0. */
void etha_stop(etha_group *group, uint32_t reason) {
    atomic_store(group->stop, reason);
    etha_ring(group->pages[group->rank]);
}

/* 1 + the rank whose cause is the first of the group: `rank`'s own if nobody was earlier. `page0` is rank 0's page. The lock
 * is taken by the kernel, because the fallback in Python has no other compare-and-swap. 0: another one is just taking it. */
uint64_t etha_claim_cause(uint8_t *page0, uint32_t rank) {
    if (syscall(SYS_futex, half(page0, CLAIM_LOCK), FUTEX_TRYLOCK_PI, 0, NULL, NULL, 0) == 0)
        atomic_store_explicit(word(page0, CLAIM), (uint64_t)rank + 1, memory_order_release);
    return atomic_load_explicit(word(page0, CLAIM), memory_order_acquire);
}

/* ---- waiting ---- */

typedef struct { int64_t deadline, slice_end; } limits;

static limits begin_limits(int64_t deadline_ns, int64_t slice_ns) {
    return (limits){deadline_ns > 0 ? deadline_ns : INT64_MAX, slice_ns ? now_ns() + slice_ns : INT64_MAX};
}

/* Spinning keeps a member from running that shares this processor: such a member is waited for asleep. */
static uint32_t note_processor(const etha_group *group) {
    uint32_t own = (uint32_t)sched_getcpu() + 1;
    atomic_store_explicit(half(group->pages[group->rank], PROCESSOR), own, memory_order_relaxed);
    return own;
}

static int64_t spin_until(const etha_group *group) {
    uint32_t own = note_processor(group);
    for (uint32_t r = 0; r < group->size; r++)
        if (r != group->rank && atomic_load_explicit(half(group->pages[r], PROCESSOR), memory_order_relaxed) == own)
            return 0;
    return now_ns() + group->spin_us * 1000LL;
}

/* Sleep on the own bell unless it has changed from `seen`. AGAIN if a signal came. */
static int sleep_on_bell(uint8_t *page, uint32_t seen, int64_t until) {
    struct timespec at = {until / 1000000000LL, until % 1000000000LL};
    long rc = syscall(SYS_futex, half(page, BELL), FUTEX_WAIT_BITSET, seen, until == INT64_MAX ? NULL : &at, NULL,
                      FUTEX_BITSET_MATCH_ANY);
    return rc < 0 && errno == EINTR ? AGAIN : DONE;
}

/* What a look found: the result of the wait, or these. */
#define NOTHING (-1)
#define PROGRESS (-2) /* bytes have moved: look again before sleeping */
typedef int (*look)(void *);

/* Look until there is a result: spin for a short while, then sleep on the own bell. */
static int wait_until(const etha_group *group, limits *l, look look_at, void *what) {
    uint8_t *own = group->pages[group->rank];
    int found = look_at(what);
    if (found >= 0) return found;
    int64_t spin_end = spin_until(group);
    for (;;) {
        int64_t now = now_ns();
        if (atomic_load_explicit(group->stop, memory_order_acquire)) return STOPPED;
        if (now >= l->deadline) return TIMEOUT;
        if (now >= l->slice_end) return AGAIN;
        if (now < spin_end || found == PROGRESS) {
            if (found == PROGRESS) spin_end = spin_until(group);
            else for (int i = 0; i < 16; i++) relax();
            if ((found = look_at(what)) >= 0) return found;
            continue;
        }
        uint32_t seen = atomic_load(half(own, BELL));
        atomic_fetch_add(half(own, SLEEPING), 1);
        atomic_thread_fence(memory_order_seq_cst); /* the sleeper's half of the eventcount */
        found = look_at(what);
        int slept = DONE;
        if (found == NOTHING && !atomic_load(group->stop))
            slept = sleep_on_bell(own, seen, l->deadline < l->slice_end ? l->deadline : l->slice_end);
        atomic_fetch_sub(half(own, SLEEPING), 1);
        if (found == NOTHING) found = look_at(what);
        if (found >= 0) return found;
        if (slept == AGAIN) return AGAIN;
    }
}

typedef struct { etha_run_args *args; uint64_t phase; uint32_t rank; } phase_wait;

INLINE int has_posted(uint8_t *page, uint64_t phase) {
    return atomic_load_explicit(word(page, POSTED), memory_order_acquire) >= phase;
}
INLINE int has_given_up(uint8_t *page, uint64_t call_number) {
    uint64_t at = atomic_load_explicit(word(page, GAVE_UP_AT), memory_order_acquire);
    return at && at - 1 <= call_number;
}

/* The first of the waited for ranks that has not posted the phase; ALL if there is none. */
static uint32_t missing_rank(const phase_wait *w) {
    etha_group *g = w->args->group;
    uint32_t from = w->rank == ALL ? 0 : w->rank, to = w->rank == ALL ? g->size : w->rank + 1;
    for (uint32_t r = from; r < to; r++)
        if (r != g->rank && !has_posted(g->pages[r], w->phase)) return r;
    return ALL;
}

static void note_failed(etha_run_args *a, uint32_t rank) {
    if (a->failed_rank == ALL) a->failed_rank = rank;
    if (a->failed) a->failed[rank] = 1;
}

/* Note who has given this call up, which therefore fails for everybody. */
static int find_given_up(etha_run_args *a) {
    etha_group *g = a->group;
    for (uint32_t r = 0; r < g->size; r++)
        if (r != g->rank && has_given_up(g->pages[r], a->call_number)) note_failed(a, r);
    return a->failed_rank != ALL;
}

/* Phases are read again after the other words, because a member that posted and then gave up has posted. */
static int look_at_phase(void *what) {
    phase_wait *w = what;
    if (missing_rank(w) == ALL) return DONE;
    if (!find_given_up(w->args)) return NOTHING;
    if (missing_rank(w) != ALL) return GAVE_UP;
    w->args->failed_rank = ALL;
    return DONE;
}

static int run_wait(etha_run_args *a, const step *s, limits *l) {
    etha_group *g = a->group;
    phase_wait w = {a, a->phase_base + s->count, s->src_space};
    int result = wait_until(g, l, look_at_phase, &w);
    if (result != TIMEOUT) return result;
    for (uint32_t r = 0; r < g->size; r++)
        if (r != g->rank && (w.rank == ALL || w.rank == r) && !has_posted(g->pages[r], w.phase)) note_failed(a, r);
    return a->failed_rank == ALL ? DONE : TIMEOUT; /* DONE: it came while the ranks were counted */
}

static void run_post(etha_run_args *a, const step *s) {
    etha_group *g = a->group;
    note_processor(g);
    atomic_store_explicit(word(g->pages[g->rank], POSTED), a->phase_base + s->count, memory_order_release);
    ring_others(g);
}

/* Compare this call's descriptors of all members with the own. */
static int run_match(etha_run_args *a) {
    etha_group *g = a->group;
    uint64_t at = g->descriptor_offset + a->call_number % 2 * g->descriptor_stride;
    const uint8_t *own = g->pages[g->rank] + at;
    const uint8_t *give = own + SPLITS_AT, *take = give + 8ull * g->size;
    uint64_t flags = load_u64(own + FLAGS_AT);
    int splits = (flags & HAS_SPLITS) != 0, result = DONE;
    for (uint32_t r = 0; r < g->size; r++) {
        const uint8_t *other = g->pages[r] + at;
        int same = !memcmp(own, other, COMMON_BYTES) && load_u64(own + CALL_AT) == load_u64(other + CALL_AT);
        if (same && splits) {
            const uint8_t *its_give = other + SPLITS_AT, *its_take = its_give + 8ull * g->size;
            same = load_u64(take + 8ull * r) == load_u64(its_give + 8ull * g->rank) &&
                   load_u64(give + 8ull * r) == load_u64(its_take + 8ull * g->rank);
        }
        if (!same) {
            note_failed(a, r);
            result = MISMATCH;
        }
        flags &= load_u64(other + FLAGS_AT);
    }
    a->flags_all = (uint32_t)flags;
    return result;
}

/* ---- reductions ---- */

/* Elements may lie at any address, and a source may be the destination. */
#define ANY_ADDRESS __attribute__((aligned(1), may_alias))
typedef uint8_t ANY_ADDRESS any_u8;
typedef int8_t ANY_ADDRESS any_i8;
typedef uint16_t ANY_ADDRESS any_u16;
typedef int16_t ANY_ADDRESS any_i16;
typedef uint32_t ANY_ADDRESS any_u32;
typedef int32_t ANY_ADDRESS any_i32;
typedef uint64_t ANY_ADDRESS any_u64;
typedef int64_t ANY_ADDRESS any_i64;
typedef float ANY_ADDRESS any_f32;
typedef double ANY_ADDRESS any_f64;

typedef struct { double divisor, factor; float divisor_f32, factor_f32; int64_t divisor_i64, factor_i64; } scalars;

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* The exponent is rebased as an integer. Denormals become normal numbers by a subtraction of floats that is exact. */
INLINE float from_f16(uint16_t h) {
    uint32_t x = (uint32_t)(h & 0x7FFFu) << 13, exponent = x & 0x0F800000u;
    uint32_t normal = x + 0x38000000u;
    uint32_t special = x + 0x70000000u; /* infinity, NaN */
    uint32_t denormal = bits_of(float_of(x + 0x38800000u) - float_of(0x38800000u));
    uint32_t bits = exponent == 0x0F800000u ? special : exponent == 0 ? denormal : normal;
    return float_of(bits | (uint32_t)(h & 0x8000u) << 16);
}
/* Rounds to nearest even. For results below the normal numbers the addition of 0.5 rounds: its last place is theirs. */
INLINE uint16_t to_f16(float f) {
    uint32_t b = bits_of(f), x = b & 0x7FFFFFFFu;
    uint32_t normal = (x - 0x38000000u + 0x0FFFu + ((x >> 13) & 1u)) >> 13;
    uint32_t denormal = bits_of(float_of(x < 0x38800000u ? x : 0) + 0.5f) - 0x3F000000u;
    uint32_t h = x > 0x7F800000u ? 0x7E00u : x >= 0x477FF000u ? 0x7C00u : x < 0x38800000u ? denormal : normal;
    return (uint16_t)(h | (b >> 16 & 0x8000u));
}
INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }
INLINE uint16_t to_bf16(float f) {
    uint32_t b = bits_of(f), rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return (uint16_t)((b & 0x7FFFFFFFu) > 0x7F800000u ? (b >> 16 | 0x40u) : rounded);
}

#define BLOCK 1024
#define MOST_SOURCES 1024
typedef void (*reducer)(uint8_t *dst, const uint8_t *const *src, uint32_t n, uint64_t count, const scalars *k);

/* One reduction: T in memory, A in the accumulator; FIRST is applied to each element of each source, COMBINE(a, x) in the
 * order of the sources, LAST to the result. Blocks of the accumulator stay in the first cache. */
#define EACH(BODY) SAME_INDEX for (uint64_t i = 0; i < m; i++) { BODY; }
#define REDUCER(NAME, T, A, FROM, TO, FIRST, COMBINE, LAST)                                                             \
    WIDE static void NAME(uint8_t *dst, const uint8_t *const *src, uint32_t n, uint64_t count, const scalars *k) {     \
        A acc[BLOCK];                                                                                                   \
        (void)k;                                                                                                        \
        for (uint64_t at = 0; at < count; at += BLOCK) {                                                                \
            uint64_t m = count - at < BLOCK ? count - at : BLOCK;                                                       \
            any_##T *d = (any_##T *)dst + at;                                                                           \
            const any_##T *p = (const any_##T *)src[0] + at;                                                            \
            if (n == 1) {                                                                                               \
                EACH(A a = FIRST((A)FROM(p[i])); d[i] = (T##_t)TO(LAST(a)))                                             \
                continue;                                                                                               \
            }                                                                                                           \
            const any_##T *q = (const any_##T *)src[1] + at;                                                            \
            if (n == 2) {                                                                                               \
                EACH(A a = FIRST((A)FROM(p[i])); A x = FIRST((A)FROM(q[i])); a = COMBINE(a, x);                         \
                     d[i] = (T##_t)TO(LAST(a)))                                                                         \
                continue;                                                                                               \
            }                                                                                                           \
            EACH(A a = FIRST((A)FROM(p[i])); A x = FIRST((A)FROM(q[i])); acc[i] = COMBINE(a, x))                        \
            for (uint32_t s = 2; s + 1 < n; s++) {                                                                      \
                p = (const any_##T *)src[s] + at;                                                                       \
                EACH(A a = acc[i]; A x = FIRST((A)FROM(p[i])); acc[i] = COMBINE(a, x))                                  \
            }                                                                                                           \
            p = (const any_##T *)src[n - 1] + at;                                                                       \
            EACH(A a = acc[i]; A x = FIRST((A)FROM(p[i])); a = COMBINE(a, x); d[i] = (T##_t)TO(LAST(a)))                \
        }                                                                                                               \
    }

typedef uint8_t u8_t; typedef int8_t i8_t; typedef uint16_t u16_t; typedef int16_t i16_t; typedef uint32_t u32_t;
typedef int32_t i32_t; typedef uint64_t u64_t; typedef int64_t i64_t; typedef float f32_t; typedef double f64_t;

#define SAME(x) (x)
#define ADD(a, x) ((a) + (x))
#define TIMES(a, x) ((a) * (x))
#define LEAST(a, x) ((x) != (x) || (x) < (a) ? (x) : (a)) /* NaN wins, as in torch */
#define MOST(a, x) ((x) != (x) || (x) > (a) ? (x) : (a))
#define LESS(a, x) ((x) < (a) ? (x) : (a))
#define MORE(a, x) ((x) > (a) ? (x) : (a))
#define AND(a, x) ((a) & (x))
#define OR(a, x) ((a) | (x))
#define XOR(a, x) ((a) ^ (x))
#define BY_DIVISOR_F32(x) ((x) / k->divisor_f32)
#define BY_DIVISOR_F64(x) ((x) / k->divisor)
#define BY_DIVISOR_INT(x) ((x) / k->divisor_i64)
#define BY_FACTOR_F32(x) ((x) * k->factor_f32)
#define BY_FACTOR_F64(x) ((x) * k->factor)
#define BY_FACTOR_INT(x) ((x) * (uint64_t)k->factor_i64)
#define TRUTH(x) ((x) != 0)

#define FLOATS(NAME, T, A, FROM, TO, DIVIDE, FACTOR)                       \
    REDUCER(sum_##NAME, T, A, FROM, TO, SAME, ADD, SAME)                   \
    REDUCER(avg_##NAME, T, A, FROM, TO, SAME, ADD, DIVIDE)                 \
    REDUCER(premul_##NAME, T, A, FROM, TO, FACTOR, ADD, SAME)              \
    REDUCER(product_##NAME, T, A, FROM, TO, SAME, TIMES, SAME)             \
    REDUCER(min_##NAME, T, A, FROM, TO, SAME, LEAST, SAME)                 \
    REDUCER(max_##NAME, T, A, FROM, TO, SAME, MOST, SAME)
FLOATS(f16, u16, float, from_f16, to_f16, BY_DIVISOR_F32, BY_FACTOR_F32)
FLOATS(bf16, u16, float, from_bf16, to_bf16, BY_DIVISOR_F32, BY_FACTOR_F32)
FLOATS(f32, f32, float, SAME, SAME, BY_DIVISOR_F32, BY_FACTOR_F32)
FLOATS(f64, f64, double, SAME, SAME, BY_DIVISOR_F64, BY_FACTOR_F64)

/* Integers wrap, as torch's do, so sums and products are those of unsigned numbers. The sum of an average wraps in 64 bits,
 * and its division truncates. */
#define WRAPPING(T)                                                        \
    REDUCER(sum_##T, T, T##_t, SAME, SAME, SAME, ADD, SAME)                \
    REDUCER(premul_##T, T, T##_t, SAME, SAME, BY_FACTOR_INT, ADD, SAME)    \
    REDUCER(product_##T, T, T##_t, SAME, SAME, SAME, TIMES, SAME)
#define ORDERED(T)                                                         \
    REDUCER(avg_##T, T, int64_t, SAME, SAME, SAME, ADD, BY_DIVISOR_INT)    \
    REDUCER(min_##T, T, T##_t, SAME, SAME, SAME, LESS, SAME)               \
    REDUCER(max_##T, T, T##_t, SAME, SAME, SAME, MORE, SAME)
WRAPPING(u8) WRAPPING(u16) WRAPPING(u32) WRAPPING(u64)
ORDERED(u8) ORDERED(i8) ORDERED(i16) ORDERED(i32) ORDERED(i64)

/* Bitwise operators know no elements: any integer's bytes. */
REDUCER(band_bytes, u8, uint8_t, SAME, SAME, SAME, AND, SAME)
REDUCER(bor_bytes, u8, uint8_t, SAME, SAME, SAME, OR, SAME)
REDUCER(bxor_bytes, u8, uint8_t, SAME, SAME, SAME, XOR, SAME)

/* A bool is 0 or 1. Its sum and its maximum are "any", its product and its minimum "all". */
REDUCER(any_bool, u8, uint8_t, SAME, SAME, TRUTH, OR, SAME)
REDUCER(all_bool, u8, uint8_t, SAME, SAME, TRUTH, AND, SAME)
REDUCER(odd_bool, u8, uint8_t, SAME, SAME, TRUTH, XOR, SAME)

#define FLOAT_ROW(N) {0, sum_##N, avg_##N, premul_##N, product_##N, min_##N, max_##N, 0, 0, 0}
#define INTEGER_ROW(U, S) \
    {0, sum_##U, avg_##S, premul_##U, product_##U, min_##S, max_##S, band_bytes, bor_bytes, bxor_bytes}
static const reducer REDUCERS[11][10] = {
    {0}, FLOAT_ROW(f16), FLOAT_ROW(bf16), FLOAT_ROW(f32), FLOAT_ROW(f64), INTEGER_ROW(u8, u8),
    INTEGER_ROW(u8, i8), INTEGER_ROW(u16, i16), INTEGER_ROW(u32, i32), INTEGER_ROW(u64, i64),
    {0, any_bool, 0, 0, all_bool, all_bool, any_bool, all_bool, any_bool, odd_bool}};
static const uint8_t ITEMSIZE[11] = {0, 2, 2, 4, 8, 1, 1, 2, 4, 8, 1};

#ifdef CONVERTS_F16
/* Processors convert fp16 four times faster than the integer operations above do; the results are the same. */
__attribute__((target("avx,f16c"))) static void widen_f16(float *to, const uint8_t *from, uint64_t m) {
    const any_u16 *p = (const any_u16 *)from;
    uint64_t i = 0;
    for (; i + 8 <= m; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 2 * i))));
    for (; i < m; i++) to[i] = from_f16(p[i]);
}
__attribute__((target("avx,f16c"))) static void narrow_f16(uint8_t *to, const float *from, uint64_t m) {
    any_u16 *p = (any_u16 *)to;
    uint64_t i = 0;
    for (; i + 8 <= m; i += 8)
        _mm_storeu_si128((void *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < m; i++) p[i] = to_f16(from[i]);
}

/* Block by block through the reductions of float32. */
static void reduce_f16(uint32_t op, uint8_t *dst, const uint8_t *const *src, uint32_t n, uint64_t count,
                       const scalars *k) {
    float acc[BLOCK], x[BLOCK];
    const uint8_t *both[2] = {(const uint8_t *)acc, (const uint8_t *)x};
    reducer combine = op == AVG || op == PREMUL_SUM ? sum_f32 : REDUCERS[F32][op];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t m = count - at < BLOCK ? count - at : BLOCK;
        for (uint32_t s = 0; s < n; s++) {
            float *to = s ? x : acc;
            widen_f16(to, src[s] + 2 * at, m);
            if (op == PREMUL_SUM) premul_f32((uint8_t *)to, both + (s ? 1 : 0), 1, m, k);
            if (s) combine((uint8_t *)acc, both, 2, m, k);
        }
        if (op == AVG) avg_f32((uint8_t *)acc, both, 1, m, k);
        narrow_f16(dst + 2 * at, acc, m);
    }
}
#endif

/* ---- reductions in two levels: the sources of each host, then the hosts ---- */

/* 16-bit floats are summed as float32. What is between the two levels is of that type, so that a result is rounded once. */
INLINE int widens(uint32_t dtype, uint32_t op) { return (dtype == F16 || dtype == BF16) && op < MIN; }

static void widen(uint32_t dtype, float *to, const uint8_t *from, uint64_t m) {
    const any_u16 *p = (const any_u16 *)from;
#ifdef CONVERTS_F16
    if (dtype == F16 && __builtin_cpu_supports("f16c")) {
        widen_f16(to, from, m);
        return;
    }
#endif
    if (dtype == F16)
        for (uint64_t i = 0; i < m; i++) to[i] = from_f16(p[i]);
    else
        for (uint64_t i = 0; i < m; i++) to[i] = from_bf16(p[i]);
}

static void narrow(uint32_t dtype, uint8_t *to, const float *from, uint64_t m) {
    any_u16 *p = (any_u16 *)to;
#ifdef CONVERTS_F16
    if (dtype == F16 && __builtin_cpu_supports("f16c")) {
        narrow_f16(to, from, m);
        return;
    }
#endif
    if (dtype == F16)
        for (uint64_t i = 0; i < m; i++) p[i] = to_f16(from[i]);
    else
        for (uint64_t i = 0; i < m; i++) p[i] = to_bf16(from[i]);
}

/* One host: an average is not divided yet, a factor is applied to each element. */
static void reduce_partial(uint32_t dtype, uint32_t op, uint8_t *dst, const uint8_t *const *src, uint32_t n, uint64_t count,
                           const scalars *k) {
    uint32_t sum = op == AVG ? SUM : op;
    if (!widens(dtype, op)) {
        REDUCERS[dtype][sum](dst, src, n, count, k);
        return;
    }
    float acc[BLOCK], x[BLOCK];
    const uint8_t *both[2] = {(const uint8_t *)acc, (const uint8_t *)x};
    reducer combine = REDUCERS[F32][sum == PREMUL_SUM ? SUM : sum];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t m = count - at < BLOCK ? count - at : BLOCK;
        for (uint32_t s = 0; s < n; s++) {
            float *to = s ? x : acc;
            widen(dtype, to, src[s] + 2 * at, m);
            if (op == PREMUL_SUM) premul_f32((uint8_t *)to, both + (s ? 1 : 0), 1, m, k);
            if (s) combine((uint8_t *)acc, both, 2, m, k);
        }
        memcpy(dst + 4 * at, acc, 4 * m);
    }
}

/* The hosts: what PARTIAL made, into elements of the call's type. */
static void reduce_combine(uint32_t dtype, uint32_t op, uint8_t *dst, const uint8_t *const *src, uint32_t n, uint64_t count,
                           const scalars *k) {
    uint32_t sum = op == PREMUL_SUM ? SUM : op;
    if (!widens(dtype, op)) {
        REDUCERS[dtype][sum](dst, src, n, count, k);
        return;
    }
    float acc[BLOCK];
    const uint8_t *from[MOST_SOURCES];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t m = count - at < BLOCK ? count - at : BLOCK;
        for (uint32_t s = 0; s < n; s++) from[s] = src[s] + 4 * at;
        REDUCERS[F32][sum]((uint8_t *)acc, from, n, m, k);
        narrow(dtype, dst + 2 * at, acc, m);
    }
}

/* Both levels at once. Sources of one host stand together, in the table `from`. */
static void reduce_grouped(uint32_t dtype, uint32_t op, uint8_t *dst, const uint8_t *const *src, const source *from, uint32_t n,
                           uint64_t count, const scalars *k) {
    uint64_t acc[BLOCK], x[BLOCK]; /* of the widest element */
    const uint8_t *both[2] = {(const uint8_t *)acc, (const uint8_t *)x}, *part[MOST_SOURCES];
    uint64_t size = ITEMSIZE[dtype];
    uint32_t sum = op == AVG || op == PREMUL_SUM ? SUM : op;
    reducer add = REDUCERS[widens(dtype, op) ? F32 : dtype][sum];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t m = count - at < BLOCK ? count - at : BLOCK;
        for (uint32_t first = 0, end; first < n; first = end) {
            for (end = first; end < n && from[end].host == from[first].host; end++) part[end - first] = src[end] + size * at;
            reduce_partial(dtype, op, (uint8_t *)(first ? x : acc), part, end - first, m, k);
            if (first) add((uint8_t *)acc, both, 2, m, k);
        }
        reduce_combine(dtype, op, dst + size * at, both, 1, m, k);
    }
}

static int64_t as_integer(double x) {
    return x >= -9223372036854775808.0 && x < 9223372036854775808.0 ? (int64_t)x : 0;
}

#define CHUNK (1u << 20)

/* Both look at the stop word between pieces of about a MiB, so an abort does not wait for a long tensor. */
static int run_reduce(etha_run_args *a, const step *s) {
    if (a->dtype > BOOL || a->op > BXOR || !REDUCERS[a->dtype][a->op] || s->n == 0 || s->n > MOST_SOURCES) return INVALID;
    uint32_t kind = s->kind, integer_average = a->op == AVG && a->dtype > F64;
    if (kind == GROUPED && integer_average) kind = REDUCE; /* the order of integers changes nothing */
    if (kind != REDUCE && integer_average) return INVALID; /* its sum is of 64 bits */
    uint32_t dtype = a->dtype;
    uint64_t count = s->count;
    if (a->op >= BAND && dtype != BOOL) count *= ITEMSIZE[dtype], dtype = U8; /* any integer's bytes */
    reducer reduce = REDUCERS[dtype][a->op];
    double divisor = a->divisor ? a->divisor : s->n;
    scalars k = {divisor, a->factor, (float)divisor, (float)a->factor, (int64_t)divisor, as_integer(a->factor)};
    const uint8_t *src[MOST_SOURCES];
    const source *from = a->sources + s->src;
    uint8_t *dst = a->spaces[s->dst_space] + s->dst;
    uint64_t size = ITEMSIZE[dtype], wide = widens(dtype, a->op) ? 4 : size;
    uint64_t size_in = kind == COMBINE ? wide : size, size_out = kind == PARTIAL ? wide : size;
    uint64_t piece = CHUNK / size;
    for (uint64_t at = 0; at < count; at += piece) {
        uint64_t m = count - at < piece ? count - at : piece;
        if (at && atomic_load_explicit(a->group->stop, memory_order_relaxed)) return STOPPED;
        for (uint32_t i = 0; i < s->n; i++) src[i] = a->spaces[from[i].space] + from[i].offset + at * size_in;
        uint8_t *to = dst + at * size_out;
        switch (kind) {
        case PARTIAL: reduce_partial(dtype, a->op, to, src, s->n, m, &k); continue;
        case COMBINE: reduce_combine(dtype, a->op, to, src, s->n, m, &k); continue;
        case GROUPED: reduce_grouped(dtype, a->op, to, src, from, s->n, m, &k); continue;
        }
#ifdef CONVERTS_F16
        if (a->dtype == F16 && __builtin_cpu_supports("f16c")) {
            reduce_f16(a->op, to, src, s->n, m, &k);
            continue;
        }
#endif
        reduce(to, src, s->n, m, &k);
    }
    return DONE;
}

static int run_copy(etha_run_args *a, const step *s) {
    uint8_t *dst = a->spaces[s->dst_space] + s->dst;
    const uint8_t *src = a->spaces[s->src_space] + s->src;
    if (dst == src) return DONE;
    for (uint64_t at = 0; at < s->count; at += CHUNK) {
        if (at && atomic_load_explicit(a->group->stop, memory_order_relaxed)) return STOPPED;
        memcpy(dst + at, src + at, s->count - at < CHUNK ? s->count - at : CHUNK);
    }
    return DONE;
}

/* ---- a call ---- */

static int run_send(etha_run_args *a, const step *s, limits *l);
static int run_flush(etha_run_args *a, limits *l);

static int run_step(etha_run_args *a, const step *s, limits *l) {
    switch (s->kind) {
    case COPY: return run_copy(a, s);
    case REDUCE:
    case PARTIAL:
    case COMBINE:
    case GROUPED: return run_reduce(a, s);
    case POST: run_post(a, s); return DONE;
    case WAIT: return run_wait(a, s, l);
    case MATCH: return run_match(a);
    case SEND_BYTES: return run_send(a, s, l);
    case FLUSH: return run_flush(a, l);
    default: return INVALID;
    }
}

/* Run the steps from `next`. After the last one the words are read again: this process may have been stopped while the
 * others gave the call up. */
static int run(etha_run_args *a, limits l) {
    etha_group *g = a->group;
    a->failed_rank = ALL;
    if (atomic_load_explicit(g->stop, memory_order_acquire)) return STOPPED;
    for (; a->next < a->nsteps; a->next++) {
        int result = run_step(a, a->steps + a->next, &l);
        if (result != DONE) return result;
    }
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(g->stop)) return STOPPED;
    return find_given_up(a) ? GAVE_UP : DONE;
}

int etha_run(etha_run_args *a) { return run(a, begin_limits(a->deadline_ns, a->slice_ms * 1000000LL)); }

/* The same, AGAIN after brief_us. It is called with the interpreter's lock held, because a thread that lets go of the lock
 * beside a busy one gets it back after 5 ms only. */
int etha_run_briefly(etha_run_args *a) { return run(a, begin_limits(a->deadline_ns, a->brief_us * 1000LL)); }

/* ---- point to point ----
 *
 * For each destination a member's memfd has a ring: head (bytes written by the owner), tail (bytes taken by the destination),
 * each on a line of its own, and the bytes. A message is a header and its bytes; both may wrap. Messages of one ring come in
 * the order in which they were sent; rings do not wait for each other, nor do sends and receives. The receiver compares size
 * and dtype with what it expects. A message that nobody waits for stays in the ring, unless somebody waits for a later one
 * of that ring: then it is set aside in private memory, if there is room. */

enum { SEND = 1, RECEIVE = 2 };
enum { IDLE = 0, TO_MESSAGE = 1, TO_ASIDE = 2, TO_NOWHERE = 3 };
#define RING_LINES 128

typedef struct {
    uint32_t kind, peer;
    uint64_t tag;
    uint8_t *data;
    uint64_t nbytes, done;
    uint32_t dtype, status, source, started;
    int64_t deadline_ns;
    uint64_t call_number, got_bytes;
    uint32_t got_dtype, pad;
} message;
typedef struct { uint64_t tag, nbytes, sequence; uint32_t dtype, pad; } header;
typedef struct { uint64_t sent, received, in_left, out_left; uint32_t in_state, out_busy, touched, broken; } peer_link;
typedef struct { uint64_t length, tag, nbytes, done; uint32_t source, dtype; } set_aside;

typedef struct {
    etha_group *group;
    peer_link *links;
    message *messages;
    uint64_t count;
    uint8_t *aside;
    uint64_t aside_bytes, aside_used;
    _Atomic uint32_t kick;
    uint32_t slice_ms;
} etha_progress_args;

INLINE uint8_t *ring_of(const etha_group *g, uint32_t owner, uint32_t destination) {
    return g->pages[owner] + g->ring_offset + destination * (RING_LINES + g->ring_bytes);
}
INLINE int is_pending(const message *m, uint32_t kind) { return m->kind == kind && m->status == AGAIN; }
INLINE int takes_from(const message *m, uint32_t source) {
    return is_pending(m, RECEIVE) && !m->started && (m->peer == source || m->peer == ALL);
}

static void ring_write(const etha_group *g, uint8_t *ring, uint64_t at, const void *from, uint64_t n) {
    uint64_t begin = at % g->ring_bytes, first = g->ring_bytes - begin < n ? g->ring_bytes - begin : n;
    memcpy(ring + RING_LINES + begin, from, first);
    memcpy(ring + RING_LINES, (const uint8_t *)from + first, n - first);
}
static void ring_read(const etha_group *g, const uint8_t *ring, uint64_t at, void *to, uint64_t n) {
    uint64_t begin = at % g->ring_bytes, first = g->ring_bytes - begin < n ? g->ring_bytes - begin : n;
    memcpy(to, ring + RING_LINES + begin, first);
    memcpy((uint8_t *)to + first, ring + RING_LINES, n - first);
}

static set_aside *aside_at(etha_progress_args *a, uint64_t at) { return (set_aside *)(a->aside + at); }

/* The message of that peer that is not complete yet: at most one. */
static set_aside *aside_open(etha_progress_args *a, uint32_t source) {
    for (uint64_t at = 0; at < a->aside_used; at += aside_at(a, at)->length)
        if (aside_at(a, at)->source == source && aside_at(a, at)->done < aside_at(a, at)->nbytes) return aside_at(a, at);
    return NULL;
}

static int finish(message *m, uint32_t source, uint64_t got_bytes, uint32_t got_dtype) {
    m->source = source;
    m->got_bytes = got_bytes;
    m->got_dtype = got_dtype;
    m->status = m->nbytes == got_bytes && m->dtype == got_dtype ? DONE : MISMATCH;
    return m->status == DONE;
}

/* Hand messages that were set aside to whom they fit, the oldest first. */
static int take_aside(etha_progress_args *a) {
    int finished = 0;
    for (uint64_t i = 0; i < a->count && a->aside_used; i++) {
        message *m = a->messages + i;
        for (uint64_t at = 0; at < a->aside_used; at += aside_at(a, at)->length) {
            set_aside *s = aside_at(a, at);
            if (s->done < s->nbytes || s->tag != m->tag || !takes_from(m, s->source)) continue;
            if (finish(m, s->source, s->nbytes, s->dtype)) memcpy(m->data, s + 1, s->nbytes);
            uint64_t length = s->length;
            memmove(a->aside + at, a->aside + at + length, a->aside_used - at - length);
            a->aside_used -= length;
            finished++;
            break;
        }
    }
    return finished;
}

/* Decide where the message goes whose header is next in the ring. 0: it stays there. */
static int begin_message(etha_progress_args *a, peer_link *link, uint32_t p, const header *h, int *finished) {
    message *wanted = NULL, *found = NULL;
    for (uint64_t i = 0; i < a->count && !found; i++) {
        if (!takes_from(a->messages + i, p)) continue;
        wanted = a->messages + i;
        if (wanted->tag == h->tag) found = wanted;
    }
    if (h->sequence != link->received) link->broken = 1;
    if (link->broken) return 0;
    if (found) {
        found->source = p;
        if (found->nbytes == h->nbytes && found->dtype == h->dtype) {
            found->started = 1;
            link->in_state = TO_MESSAGE;
        } else {
            finish(found, p, h->nbytes, h->dtype);
            *finished += 1;
            link->in_state = TO_NOWHERE;
        }
    } else {
        uint64_t room = a->aside_bytes - a->aside_used;
        if (!wanted || room < sizeof(set_aside) + 8 || h->nbytes > room - sizeof(set_aside) - 8) return 0;
        uint64_t length = (sizeof(set_aside) + h->nbytes + 7) / 8 * 8;
        *aside_at(a, a->aside_used) = (set_aside){length, h->tag, h->nbytes, 0, p, h->dtype};
        a->aside_used += length;
        link->in_state = TO_ASIDE;
    }
    link->in_left = h->nbytes;
    link->received++;
    return 1;
}

static message *started_message(etha_progress_args *a, uint32_t source) {
    for (uint64_t i = 0; i < a->count; i++)
        if (is_pending(a->messages + i, RECEIVE) && a->messages[i].started && a->messages[i].source == source)
            return a->messages + i;
    return NULL;
}

/* Take what the ring has. Whoever was receiving a message and is no longer among the messages has abandoned it. */
static int receive_from(etha_progress_args *a, uint32_t p, int *finished) {
    etha_group *g = a->group;
    peer_link *link = a->links + p;
    uint8_t *ring = ring_of(g, p, g->rank);
    uint64_t head = atomic_load_explicit(word(ring, 0), memory_order_acquire);
    uint64_t tail = atomic_load_explicit(word(ring, 64), memory_order_relaxed), from = tail;
    if (head - tail > g->ring_bytes) link->broken = 1;
    while (!link->broken) {
        if (link->in_state == IDLE) {
            header h;
            if (head - tail < sizeof h) break;
            ring_read(g, ring, tail, &h, sizeof h);
            if (!begin_message(a, link, p, &h, finished)) break;
            tail += sizeof h;
        }
        message *m = link->in_state == TO_MESSAGE ? started_message(a, p) : NULL;
        set_aside *s = link->in_state == TO_ASIDE ? aside_open(a, p) : NULL;
        uint64_t n = head - tail < link->in_left ? head - tail : link->in_left;
        if (m) ring_read(g, ring, tail, m->data + m->done, n), m->done += n;
        if (s) ring_read(g, ring, tail, (uint8_t *)(s + 1) + s->done, n), s->done += n;
        tail += n;
        link->in_left -= n;
        if (link->in_left) break;
        if (m) *finished += 1, finish(m, p, m->nbytes, m->dtype);
        if (link->in_state == TO_ASIDE) *finished += take_aside(a);
        link->in_state = IDLE;
    }
    if (tail == from) return 0;
    atomic_store_explicit(word(ring, 64), tail, memory_order_release);
    return link->touched = 1;
}

/* Put as much of the message into the ring as there is room for. */
static int send_message(etha_progress_args *a, message *m) {
    etha_group *g = a->group;
    peer_link *link = a->links + m->peer;
    uint8_t *ring = ring_of(g, g->rank, m->peer);
    uint64_t head = atomic_load_explicit(word(ring, 0), memory_order_relaxed), from = head;
    uint64_t room = g->ring_bytes - (head - atomic_load_explicit(word(ring, 64), memory_order_acquire));
    if (room > g->ring_bytes || (!m->started && link->out_left)) {
        m->status = INVALID; /* an earlier message was abandoned half way, or the words make no sense */
        return 0;
    }
    if (!m->started) {
        if (room < sizeof(header)) return 0;
        header h = {m->tag, m->nbytes, link->sent++, m->dtype, 0};
        ring_write(g, ring, head, &h, sizeof h);
        head += sizeof h, room -= sizeof h;
        m->started = 1;
        link->out_left = m->nbytes;
    }
    uint64_t n = room < link->out_left ? room : link->out_left, piece = g->ring_bytes / 4;
    if (n > piece) n = piece; /* the receiver copies one piece while this member copies the next */
    if (n) ring_write(g, ring, head, m->data + m->done, n);
    m->done += n, head += n, link->out_left -= n;
    if (head == from) return 0;
    atomic_store_explicit(word(ring, 0), head, memory_order_release);
    if (!link->out_left) m->status = DONE;
    return link->touched = 1;
}

/* End a message whose peer has given up, unless what that peer had sent before is enough. */
static int check_given_up(etha_progress_args *a, message *m) {
    etha_group *g = a->group;
    uint32_t from = m->started && m->kind == RECEIVE ? m->source : m->peer, finished = 0;
    for (uint32_t r = 0; r < g->size; r++) {
        if (r == g->rank || (from != ALL && from != r) || !has_given_up(g->pages[r], m->call_number)) continue;
        int moved = 0;
        if (m->kind == RECEIVE && m->status == AGAIN) receive_from(a, r, &moved);
        finished += moved;
        if (m->status == AGAIN) m->status = GAVE_UP, m->source = r, finished++;
    }
    return finished;
}

static void ring_touched(etha_progress_args *a) {
    atomic_thread_fence(memory_order_seq_cst); /* the poster's half of the eventcount */
    for (uint32_t r = 0; r < a->group->size; r++)
        if (a->links[r].touched) {
            a->links[r].touched = 0;
            ring_if_asleep(a->group->pages[r]);
        }
    if (a->group->streams) wake_streams(a->group);
}

static int is_impossible(etha_progress_args *a, const message *m) {
    etha_group *g = a->group;
    if (m->peer == ALL) return m->kind != RECEIVE;
    if (m->peer >= g->size || m->peer == g->rank) return 1;
    return m->kind == RECEIVE ? (int)a->links[m->peer].broken : m->kind != SEND;
}

static int look_at_messages(void *what) {
    etha_progress_args *a = what;
    etha_group *g = a->group;
    int finished = take_aside(a), moved = 0;
    for (uint32_t r = 0; r < g->size; r++) {
        a->links[r].out_busy = 0;
        if (r != g->rank) moved |= receive_from(a, r, &finished);
    }
    for (uint64_t i = 0; i < a->count; i++) {
        message *m = a->messages + i;
        if (m->status != AGAIN) continue;
        if (is_impossible(a, m)) m->status = INVALID;
        else if (m->kind == SEND && !a->links[m->peer].out_busy) {
            moved |= send_message(a, m);
            a->links[m->peer].out_busy = m->status == AGAIN;
        }
        if (m->status == AGAIN) finished += check_given_up(a, m);
        else finished++;
    }
    ring_touched(a);
    if (finished) return DONE;
    if (atomic_exchange(&a->kick, 0)) return AGAIN;
    return moved ? PROGRESS : NOTHING;
}

/* Let messages move until one of them has ended, which its status says. AGAIN: a signal, a kick, or the slice is over. */
int etha_progress(etha_progress_args *a) {
    limits l = begin_limits(0, a->slice_ms * 1000000LL);
    for (uint64_t i = 0; i < a->count; i++) {
        const message *m = a->messages + i;
        if (m->status == AGAIN && m->deadline_ns > 0 && m->deadline_ns < l.deadline) l.deadline = m->deadline_ns;
    }
    if (atomic_load_explicit(a->group->stop, memory_order_acquire)) return STOPPED;
    int result = wait_until(a->group, &l, look_at_messages, a);
    if (result != TIMEOUT) return result;
    for (uint64_t i = 0; i < a->count; i++) {
        message *m = a->messages + i;
        if (m->status == AGAIN && m->deadline_ns > 0 && m->deadline_ns <= l.deadline) m->status = TIMEOUT;
    }
    return DONE;
}

/* Have etha_progress return, because there are more messages. */
void etha_kick(etha_progress_args *a) {
    atomic_store(&a->kick, 1);
    etha_ring(a->group->pages[a->group->rank]);
}

#include "streams.c"
#include "casts.c"
#include "pull.c"
#include "direct.c"
#include "worker_stream.c"
#include "difference.c"
#include "tiles.c"
#include "unmoved.c"
