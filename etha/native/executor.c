/* Executes the steps of one call of a process group without the interpreter: copies, reductions, and waiting for others.
 *
 * Members are processes of one host. Each has a memfd that all of them map; its first page holds words by which members
 * wait for each other (below). A member writes its own tensors, its own memfd, and of other memfds the bell and the tail
 * of a ring only.
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
enum { COPY = 1, REDUCE = 2, POST = 3, WAIT = 4, MATCH = 5 };
enum { SUM = 1, AVG = 2, PREMUL_SUM = 3, PRODUCT = 4, MIN = 5, MAX = 6, BAND = 7, BOR = 8, BXOR = 9 };
enum { F16 = 1, BF16 = 2, F32 = 3, F64 = 4, U8 = 5, I8 = 6, I16 = 7, I32 = 8, I64 = 9, BOOL = 10 };
#define ALL 0xFFFFFFFFu

/* The first page of a member's memfd. */
#define POSTED 0
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
typedef struct { uint32_t space, pad; uint64_t offset; } source;

typedef struct {
    uint32_t rank, size;
    uint8_t **pages;
    uint64_t descriptor_offset, descriptor_stride;
    _Atomic uint32_t *stop;
    uint64_t ring_offset, ring_bytes;
    uint32_t spin_us, pad;
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

static void ring_others(const etha_group *group) {
    atomic_thread_fence(memory_order_seq_cst); /* the poster's half of the eventcount */
    for (uint32_t r = 0; r < group->size; r++)
        if (r != group->rank) ring_if_asleep(group->pages[r]);
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

typedef struct { int64_t deadline, slice_end, spin_end; } limits;

static limits begin_limits(const etha_group *group, int64_t deadline_ns, uint32_t slice_ms) {
    int64_t now = now_ns();
    limits l = {deadline_ns > 0 ? deadline_ns : INT64_MAX, slice_ms ? now + slice_ms * 1000000LL : INT64_MAX, 0};
    (void)group;
    return l;
}

/* Sleep on the own bell unless it has changed from `seen`. AGAIN if a signal came. */
static int sleep_on_bell(uint8_t *page, uint32_t seen, int64_t until) {
    struct timespec at = {until / 1000000000LL, until % 1000000000LL};
    long rc = syscall(SYS_futex, half(page, BELL), FUTEX_WAIT_BITSET, seen, until == INT64_MAX ? NULL : &at, NULL,
                      FUTEX_BITSET_MATCH_ANY);
    return rc < 0 && errno == EINTR ? AGAIN : DONE;
}

typedef int (*look)(void *); /* -1: go on waiting, otherwise the result */

/* Look until there is a result: spin for a short while, then sleep on the own bell. */
static int wait_until(const etha_group *group, limits *l, look look_at, void *what) {
    uint8_t *own = group->pages[group->rank];
    int found = look_at(what);
    if (found >= 0) return found;
    int64_t spin_end = now_ns() + group->spin_us * 1000LL;
    for (;;) {
        int64_t now = now_ns();
        if (atomic_load_explicit(group->stop, memory_order_acquire)) return STOPPED;
        if (now >= l->deadline) return TIMEOUT;
        if (now >= l->slice_end) return AGAIN;
        if (now < spin_end) {
            for (int i = 0; i < 16; i++) relax();
            if ((found = look_at(what)) >= 0) return found;
            continue;
        }
        uint32_t seen = atomic_load(half(own, BELL));
        atomic_fetch_add(half(own, SLEEPING), 1);
        atomic_thread_fence(memory_order_seq_cst); /* the sleeper's half of the eventcount */
        found = look_at(what);
        int slept = DONE;
        if (found < 0 && !atomic_load(group->stop))
            slept = sleep_on_bell(own, seen, l->deadline < l->slice_end ? l->deadline : l->slice_end);
        atomic_fetch_sub(half(own, SLEEPING), 1);
        if (found < 0) found = look_at(what);
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

/* A member that posted and then gave up has posted: its phase is read again after the other word. */
static int look_at_phase(void *what) {
    phase_wait *w = what;
    etha_run_args *a = w->args;
    etha_group *g = a->group;
    uint32_t from = w->rank == ALL ? 0 : w->rank, to = w->rank == ALL ? g->size : w->rank + 1;
    int missing = 0;
    for (uint32_t r = from; r < to; r++) {
        if (r == g->rank || has_posted(g->pages[r], w->phase)) continue;
        if (has_given_up(g->pages[r], a->call_number) && !has_posted(g->pages[r], w->phase)) {
            a->failed_rank = r;
            return GAVE_UP;
        }
        missing = 1;
    }
    return missing ? -1 : DONE;
}

static void note_failed(etha_run_args *a, uint32_t rank) {
    if (a->failed_rank == ALL) a->failed_rank = rank;
    if (a->failed) a->failed[rank] = 1;
}

static int run_wait(etha_run_args *a, const step *s, limits *l) {
    etha_group *g = a->group;
    phase_wait w = {a, a->phase_base + s->count, s->src_space};
    int result = wait_until(g, l, look_at_phase, &w);
    if (result == TIMEOUT || result == GAVE_UP)
        for (uint32_t r = 0; r < g->size; r++) {
            if (r == g->rank || (w.rank != ALL && w.rank != r)) continue;
            int failed = result == TIMEOUT ? !has_posted(g->pages[r], w.phase)
                                           : has_given_up(g->pages[r], a->call_number);
            if (failed) note_failed(a, r);
        }
    if (result == TIMEOUT && a->failed_rank == ALL) return DONE; /* it came while the ranks were counted */
    return result;
}

static void run_post(etha_run_args *a, const step *s) {
    etha_group *g = a->group;
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

static int64_t as_integer(double x) {
    return x >= -9223372036854775808.0 && x < 9223372036854775808.0 ? (int64_t)x : 0;
}

#define CHUNK (1u << 20)
#define MOST_SOURCES 1024

/* Both look at the stop word between pieces of about a MiB, so an abort does not wait for a long tensor. */
static int run_reduce(etha_run_args *a, const step *s) {
    if (a->dtype > BOOL || a->op > BXOR || !REDUCERS[a->dtype][a->op] || s->n == 0 || s->n > MOST_SOURCES) return INVALID;
    reducer reduce = REDUCERS[a->dtype][a->op];
    double divisor = a->divisor ? a->divisor : s->n;
    scalars k = {divisor, a->factor, (float)divisor, (float)a->factor, (int64_t)divisor, as_integer(a->factor)};
    const uint8_t *src[MOST_SOURCES];
    const source *from = a->sources + s->src;
    uint8_t *dst = a->spaces[s->dst_space] + s->dst;
    uint64_t size = ITEMSIZE[a->dtype], count = s->count;
    if (a->op >= BAND) count *= size, size = 1;
    uint64_t piece = CHUNK / size;
    for (uint64_t at = 0; at < count; at += piece) {
        uint64_t m = count - at < piece ? count - at : piece;
        if (at && atomic_load_explicit(a->group->stop, memory_order_relaxed)) return STOPPED;
        for (uint32_t i = 0; i < s->n; i++) src[i] = a->spaces[from[i].space] + from[i].offset + at * size;
        reduce(dst + at * size, src, s->n, m, &k);
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

static int run_step(etha_run_args *a, const step *s, limits *l) {
    switch (s->kind) {
    case COPY: return run_copy(a, s);
    case REDUCE: return run_reduce(a, s);
    case POST: run_post(a, s); return DONE;
    case WAIT: return run_wait(a, s, l);
    case MATCH: return run_match(a);
    default: return INVALID;
    }
}

/* Run the steps from `next`. After the last one the words are read again: this process may have been stopped while the
 * others gave the call up. */
int etha_run(etha_run_args *a) {
    etha_group *g = a->group;
    limits l = begin_limits(g, a->deadline_ns, a->slice_ms);
    a->failed_rank = ALL;
    if (atomic_load_explicit(g->stop, memory_order_acquire)) return STOPPED;
    for (; a->next < a->nsteps; a->next++) {
        int result = run_step(a, a->steps + a->next, &l);
        if (result != DONE) return result;
    }
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(g->stop)) return STOPPED;
    for (uint32_t r = 0; r < g->size; r++)
        if (r != g->rank && has_given_up(g->pages[r], a->call_number)) note_failed(a, r);
    return a->failed_rank == ALL ? DONE : GAVE_UP;
}
