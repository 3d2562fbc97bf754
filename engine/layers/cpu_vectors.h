// What the C files share: vectors of numbers that are float32 in registers and bfloat16 in memory. They have 16 numbers
// on a processor with AVX-512 for bfloat16, and 8 on one with AVX2. Of `left` numbers from an address on, as many are
// loaded or stored as a vector has; what is missing to a whole one is 0.

#ifndef CPU_VECTORS_H
#define CPU_VECTORS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__)

#define LANES 16
typedef __m512 vec;

static inline __mmask16 lanes(long left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

static inline vec zeros(void) { return _mm512_setzero_ps(); }
static inline vec splat(float x) { return _mm512_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec divide(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec greatest(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec subtract_product(vec c, vec a, vec b) { return _mm512_fnmadd_ps(a, b, c); }
static inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
static inline vec nearest(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// x times 2 to the power of n, a whole number from -126 to 0.
static inline vec times_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }

// `a` where x is below 0, else `b`.
static inline vec where_negative(vec x, vec a, vec b) {
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), a);
}

static inline vec load(const float *x, long left) { return _mm512_maskz_loadu_ps(lanes(left), x); }
static inline void store(float *y, long left, vec values) { _mm512_mask_storeu_ps(y, lanes(left), values); }

static inline vec load_bf16(const uint16_t *x, long left) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(left), x)), 16);
}

static inline void store_bf16(uint16_t *y, long left, vec values) {
    _mm256_mask_storeu_epi16(y, lanes(left), (__m256i)_mm512_cvtneps_pbh(values));
}

static inline vec rounded_to_bf16(vec x) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16);
}

#else

#define LANES 8
typedef __m256 vec;

static inline __m256i lanes(long left) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec zeros(void) { return _mm256_setzero_ps(); }
static inline vec splat(float x) { return _mm256_set1_ps(x); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec divide(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec greatest(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec subtract_product(vec c, vec a, vec b) { return _mm256_fnmadd_ps(a, b, c); }
static inline vec nearest(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline float sum_of(vec x) {
    __m128 halves = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
}

// x times 2 to the power of n, a whole number from -126 to 0.
static inline vec times_power(vec x, vec n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(x, (vec)_mm256_slli_epi32(exponent, 23));
}

// `a` where x is below 0, else `b`.
static inline vec where_negative(vec x, vec a, vec b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}

static inline vec load(const float *x, long left) {
    return left >= LANES ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, lanes(left));
}

static inline void store(float *y, long left, vec values) {
    if (left >= LANES) _mm256_storeu_ps(y, values);
    else _mm256_maskstore_ps(y, lanes(left), values);
}

static inline vec load_bf16(const uint16_t *x, long left) {
    uint16_t some[LANES] = {0};
    if (left < LANES) x = memcpy(some, x, 2 * left);
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
}

// The nearest bfloat16, of two as near the even one, as float32; what is no number stays none.
static inline vec rounded_to_bf16(vec x) {
    __m256i bits = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i whole = (__m256i)_mm256_blendv_ps((vec)up, (vec)quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return (vec)_mm256_and_si256(whole, _mm256_set1_epi32((int)0xffff0000));
}

static inline void store_bf16(uint16_t *y, long left, vec values) {
    __m256i high = _mm256_srli_epi32((__m256i)rounded_to_bf16(values), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    uint16_t some[LANES];
    _mm_storeu_si128((__m128i *)(left < LANES ? some : y), _mm256_castsi256_si128(packed));
    if (left < LANES) memcpy(y, some, 2 * left);
}

#endif

#endif
