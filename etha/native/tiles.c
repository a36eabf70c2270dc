/* Copies tiles of mapped memory, a run of bytes at a time: included by executor.c.
 *
 * A tile is a box of runs: `counts` runs along each axis, the last axis innermost, a stride in bytes at either end, and
 * perhaps a cast. Whoever calls has checked that every tile lies inside of what is mapped, and that no target overlaps
 * what is still to be read. */

enum { TILE_AXES = 8 };

typedef struct {
    uint32_t axes, cast; /* CAST_NONE or how the dtype changes */
    uint64_t run;        /* bytes of the source that are contiguous at both ends */
    uint64_t counts[TILE_AXES];
    int64_t source[TILE_AXES], target[TILE_AXES];
} etha_tile;

/* A size that the compiler knows becomes one or two instructions. */
#define RUNS_OF(BYTES) \
    case BYTES: for (; count; count--, to += target, from += source) memcpy(to, from, BYTES); break;

INLINE void copy_runs(uint8_t *to, const uint8_t *from, uint64_t count, int64_t target, int64_t source, uint64_t run) {
    switch (run) {
    RUNS_OF(16)
    RUNS_OF(32)
    RUNS_OF(64)
    RUNS_OF(128)
    RUNS_OF(256)
    default: for (; count; count--, to += target, from += source) memcpy(to, from, run);
    }
}

/* Shortest run whose bytes go past the caches: for less, that saves nothing. */
enum { STREAMED_RUN = 1024 };

/* Writes past the caches, which then need not read what is overwritten, and keep what others need. `streamed` stores are
 * ordered before later ones by etha_copy_tiles. */
#ifdef CONVERTS_F16 /* x86 */
__attribute__((target("avx512f"))) static void stream_512(uint8_t *to, const uint8_t *from, uint64_t n) {
    for (; n >= 64; n -= 64, to += 64, from += 64) _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
    memcpy(to, from, n);
}

__attribute__((target("avx2"))) static void stream_256(uint8_t *to, const uint8_t *from, uint64_t n) {
    for (; n >= 32; n -= 32, to += 32, from += 32) _mm256_stream_si256((void *)to, _mm256_loadu_si256((const void *)from));
    memcpy(to, from, n);
}

static void copy_streamed(uint8_t *to, const uint8_t *from, uint64_t n) {
    uint64_t head = -(uint64_t)to & 63; /* up to the next cache line */
    if (head > n) head = n;
    memcpy(to, from, head);
    if (__builtin_cpu_supports("avx512f")) stream_512(to + head, from + head, n - head);
    else if (__builtin_cpu_supports("avx2")) stream_256(to + head, from + head, n - head);
    else memcpy(to + head, from + head, n - head);
}

static void end_of_streamed(void) { _mm_sfence(); }
#else
static void copy_streamed(uint8_t *to, const uint8_t *from, uint64_t n) { memcpy(to, from, n); }
static void end_of_streamed(void) {}
#endif

enum { CAST_PART = 2048 }; /* elements that are cast in the first cache before they are written past it */

static void cast_run(uint32_t cast, uint8_t *to, const uint8_t *from, uint64_t run, int streamed) {
    uint64_t size = cast_narrows(cast) ? 4 : 2, target_size = 6 - size, n = run / size;
    if (!streamed || n * target_size < STREAMED_RUN) return cast_elements(cast, from, to, n);
    uint8_t part[CAST_PART * 4] __attribute__((aligned(64)));
    for (uint64_t count; n; n -= count, from += count * size, to += count * target_size) {
        count = n < CAST_PART ? n : CAST_PART;
        cast_elements(cast, from, part, count);
        copy_streamed(to, part, count * target_size);
    }
}

static void copy_row(const etha_tile *t, uint8_t *to, const uint8_t *from, uint64_t count, int64_t target, int64_t source, int streamed) {
    if (t->cast)
        for (; count; count--, to += target, from += source) cast_run(t->cast, to, from, t->run, streamed);
    else if (streamed && t->run >= STREAMED_RUN)
        for (; count; count--, to += target, from += source) copy_streamed(to, from, t->run);
    else
        copy_runs(to, from, count, target, source, t->run);
}

static void copy_tile(const etha_tile *t, uint8_t *to, const uint8_t *from, int streamed) {
    if (!t->axes) {
        if (to != from) copy_row(t, to, from, 1, 0, 0, streamed);
        return;
    }
    uint32_t inner = t->axes - 1;
    uint64_t at[TILE_AXES] = {0};
    for (;;) {
        copy_row(t, to, from, t->counts[inner], t->target[inner], t->source[inner], streamed);
        uint32_t axis = inner;
        for (;;) {
            if (!axis) return;
            axis--;
            to += t->target[axis];
            from += t->source[axis];
            if (++at[axis] < t->counts[axis]) break;
            to -= t->target[axis] * (int64_t)t->counts[axis];
            from -= t->source[axis] * (int64_t)t->counts[axis];
            at[axis] = 0;
        }
    }
}

/* Copies `n` tiles: number `i` has the shape tiles[tile[i]] and begins at source[i] and target[i]. `streamed`: what is
 * written will not be read before much else has been. */
void etha_copy_tiles(const etha_tile *tiles, const int32_t *tile, const uint64_t *source, const uint64_t *target, uint64_t n, int streamed) {
    for (uint64_t i = 0; i < n; i++) copy_tile(tiles + tile[i], (uint8_t *)target[i], (const uint8_t *)source[i], streamed);
    if (streamed) end_of_streamed();
}

uint64_t etha_tile_bytes(void) { return sizeof(etha_tile); }
