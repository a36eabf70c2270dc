/* The difference between two versions of some bytes, block by block: included by executor.c.
 *
 * A difference is a row of records. Each begins with a word of 32 bits, little-endian: its kind in the upper 4 bits, a
 * count in the others.
 *
 *     SAME     `count` blocks that have not changed
 *     SPARSE   a block of which `count` elements have changed: their places (16 bits each), then their values
 *     DENSE    a block of `count` bytes: the bytes
 *
 * Elements are compared as integers, so that a NaN equals itself and -0.0 is not 0.0. */

enum { DIFFERENCE_BLOCK = 1 << 16, DIFFERENCE_STEP = 64 };
enum { DIFFERENCE_SAME, DIFFERENCE_SPARSE, DIFFERENCE_DENSE, DIFFERENCE_KIND = 28 };

static uint8_t *difference_word(uint8_t *out, uint32_t kind, uint32_t count) {
    uint32_t word = kind << DIFFERENCE_KIND | count;
    memcpy(out, &word, sizeof word);
    return out + sizeof word;
}

/* The places and values of the elements that differ; their number, or `most` + 1 if there are more than `most`. Steps of
 * 64 bytes that are equal are passed over. Both tables have room for `most` and the elements of one step. */
#define DIFFERENCE_ELEMENTS(T)                                                                                        \
    static uint32_t difference_##T(const uint8_t *newer, const uint8_t *older, uint32_t n, uint32_t most,              \
                                   uint16_t *places, uint8_t *values) {                                                \
        const T *a = (const T *)newer, *b = (const T *)older;                                                          \
        T *v = (T *)values;                                                                                            \
        const uint32_t step = DIFFERENCE_STEP / sizeof(T);                                                             \
        uint32_t found = 0;                                                                                            \
        for (uint32_t first = 0; first < n; first += step) {                                                           \
            uint32_t last = n - first < step ? n : first + step;                                                       \
            if (last - first == step) {                                                                                \
                uint64_t x[8], y[8], differs = 0;                                                                      \
                memcpy(x, a + first, sizeof x);                                                                        \
                memcpy(y, b + first, sizeof y);                                                                        \
                for (int i = 0; i < 8; i++) differs |= x[i] ^ y[i];                                                    \
                if (!differs) continue;                                                                                \
            }                                                                                                          \
            for (uint32_t i = first; i < last; i++) {                                                                  \
                places[found] = (uint16_t)i;                                                                           \
                v[found] = a[i];                                                                                       \
                found += a[i] != b[i];                                                                                 \
            }                                                                                                          \
            if (found > most) return most + 1;                                                                         \
        }                                                                                                              \
        return found;                                                                                                  \
    }

DIFFERENCE_ELEMENTS(uint8_t)
DIFFERENCE_ELEMENTS(uint16_t)
DIFFERENCE_ELEMENTS(uint32_t)
DIFFERENCE_ELEMENTS(uint64_t)

static uint32_t difference_of(const uint8_t *newer, const uint8_t *older, uint32_t nbytes, uint32_t item, uint32_t most,
                              uint16_t *places, uint8_t *values) {
    switch (item) {
        case 1: return difference_uint8_t(newer, older, nbytes, most, places, values);
        case 2: return difference_uint16_t(newer, older, nbytes / 2, most, places, values);
        case 4: return difference_uint32_t(newer, older, nbytes / 4, most, places, values);
        default: return difference_uint64_t(newer, older, nbytes / 8, most, places, values);
    }
}

/* Writes the difference of `nbytes` bytes to `out`, which has room for them and a word for each block; its length.
 * `older` NULL: all blocks are dense. `item` is 1, 2, 4 or 8, and divides `nbytes`. */
uint64_t etha_encode_difference(const uint8_t *newer, const uint8_t *older, uint64_t nbytes, uint32_t item,
                                uint8_t *out) {
    uint16_t places[DIFFERENCE_BLOCK / 3 + DIFFERENCE_STEP + 1];
    uint64_t values[DIFFERENCE_BLOCK / 8 + DIFFERENCE_STEP + 1];
    uint8_t *begin = out;
    uint32_t same = 0;
    for (uint64_t at = 0; at < nbytes; at += DIFFERENCE_BLOCK) {
        uint32_t size = nbytes - at < DIFFERENCE_BLOCK ? (uint32_t)(nbytes - at) : DIFFERENCE_BLOCK;
        uint32_t most = size / (2 + item), found = most + 1;
        if (older) found = difference_of(newer + at, older + at, size, item, most, places, (uint8_t *)values);
        if (found == 0) {
            same++;
            continue;
        }
        if (same) out = difference_word(out, DIFFERENCE_SAME, same);
        same = 0;
        if (found > most) {
            out = difference_word(out, DIFFERENCE_DENSE, size);
            memcpy(out, newer + at, size);
            out += size;
        } else {
            out = difference_word(out, DIFFERENCE_SPARSE, found);
            memcpy(out, places, found * 2);
            memcpy(out + found * 2, values, found * item);
            out += found * (2 + item);
        }
    }
    if (same) out = difference_word(out, DIFFERENCE_SAME, same);
    return (uint64_t)(out - begin);
}

/* Applies a difference to `nbytes` bytes; the number of blocks that it changes, or -1 if it is not one of such bytes.
 * It writes nothing outside of them, whatever the difference says. `target` NULL: only reads it. */
int64_t etha_apply_difference(uint8_t *target, uint64_t nbytes, uint32_t item, const uint8_t *records,
                              uint64_t length) {
    const uint8_t *end = records + length;
    uint64_t at = 0;
    int64_t changed = 0;
    while ((uint64_t)(end - records) >= 4) {
        uint32_t word, kind, count;
        memcpy(&word, records, sizeof word);
        records += sizeof word;
        kind = word >> DIFFERENCE_KIND;
        count = word & ((1u << DIFFERENCE_KIND) - 1);
        if (at >= nbytes || !count) return -1;
        uint64_t left = (uint64_t)(end - records), rest = nbytes - at;
        uint32_t size = rest < DIFFERENCE_BLOCK ? (uint32_t)rest : DIFFERENCE_BLOCK;
        if (kind == DIFFERENCE_SAME) {
            if (count > (rest + DIFFERENCE_BLOCK - 1) / DIFFERENCE_BLOCK) return -1;
            at += (uint64_t)count * DIFFERENCE_BLOCK;
            continue;
        }
        if (kind == DIFFERENCE_DENSE) {
            if (count != size || left < count) return -1;
            if (target) memcpy(target + at, records, count);
            records += count;
        } else if (kind == DIFFERENCE_SPARSE) {
            uint64_t bytes = (uint64_t)count * (2 + item);
            const uint8_t *values = records + (uint64_t)count * 2;
            if (count > size / item || left < bytes) return -1;
            for (uint32_t i = 0; i < count; i++) {
                uint16_t place;
                memcpy(&place, records + 2 * i, 2);
                if ((uint32_t)place >= size / item) return -1;
                if (!target) continue;
                uint8_t *to = target + at + (uint64_t)place * item;
                switch (item) {
                    case 1: *to = values[i]; break;
                    case 2: memcpy(to, values + 2 * i, 2); break;
                    case 4: memcpy(to, values + 4 * i, 4); break;
                    default: memcpy(to, values + 8 * i, 8); break;
                }
            }
            records += bytes;
        } else {
            return -1;
        }
        changed++;
        at += size;
    }
    return records == end && at >= nbytes ? changed : -1;
}
