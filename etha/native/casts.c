/* Changes the dtype of elements that lie one behind the other: included by executor.c. The bits are those of torch. */

enum { CAST_NONE, CAST_F32_BF16, CAST_BF16_F32, CAST_F32_F16, CAST_F16_F32 };

WIDE static void cast_f32_bf16(const float *from, uint16_t *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]); }
WIDE static void cast_bf16_f32(const uint16_t *from, float *to, uint64_t n) { SAME_INDEX for (uint64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]); }

/* Whether elements of 4 bytes become elements of 2, and not the other way round. */
INLINE int cast_narrows(uint32_t cast) { return cast == CAST_F32_BF16 || cast == CAST_F32_F16; }

static void cast_elements(uint32_t cast, const void *from, void *to, uint64_t n) {
    if (cast == CAST_F32_BF16) cast_f32_bf16(from, to, n);
    if (cast == CAST_BF16_F32) cast_bf16_f32(from, to, n);
    if (cast == CAST_F32_F16) narrow(F16, to, from, n);
    if (cast == CAST_F16_F32) widen(F16, to, from, n);
}
