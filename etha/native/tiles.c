/* Copies tiles of mapped memory, a run of bytes at a time: included by executor.c.
 *
 * A tile is a box of runs: `counts` runs along each axis, the last axis innermost, a stride in bytes at either end. Whoever
 * calls has checked that every tile lies inside of what is mapped, and that no target overlaps what is still to be read. */

enum { TILE_AXES = 8 };

typedef struct {
    uint32_t axes, pad;
    uint64_t run; /* bytes that are contiguous at both ends */
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

static void copy_tile(const etha_tile *t, uint8_t *to, const uint8_t *from) {
    if (!t->axes) {
        if (to != from) memcpy(to, from, t->run);
        return;
    }
    uint32_t inner = t->axes - 1;
    uint64_t at[TILE_AXES] = {0};
    for (;;) {
        copy_runs(to, from, t->counts[inner], t->target[inner], t->source[inner], t->run);
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

/* Copies `n` tiles: number `i` has the shape tiles[tile[i]] and begins at source[i] and target[i]. */
void etha_copy_tiles(const etha_tile *tiles, const int32_t *tile, const uint64_t *source, const uint64_t *target, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) copy_tile(tiles + tile[i], (uint8_t *)target[i], (const uint8_t *)source[i]);
}

uint64_t etha_tile_bytes(void) { return sizeof(etha_tile); }
