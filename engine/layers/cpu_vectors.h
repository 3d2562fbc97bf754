// What the C files share: vectors of 16 numbers that are float32 in registers and bfloat16 in memory.

#ifndef CPU_VECTORS_H
#define CPU_VECTORS_H

#include <immintrin.h>
#include <stdint.h>

#define LANES 16

static inline __mmask16 lanes(long left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

static inline __m512 load_bf16(const uint16_t *x, __mmask16 mask) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}

static inline void store_bf16(uint16_t *y, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

#endif
