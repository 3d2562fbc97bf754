// The matmul of our own for any number of bfloat16 rows, for the other C files: cpu_tiles_amx.c's or cpu_tiles_avx2.c's,
// by what the processor has. With AVX-512 for bfloat16 and without AMX there is none, since oneDNN's keeps a row's bits.

#ifndef CPU_TILES_H
#define CPU_TILES_H

#include <stdint.h>

#define TILES_AMX 1
#define TILES_AVX2 2

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define TILES TILES_AMX
#elif defined(__AVX512BF16__)
#define TILES 0
#else
#define TILES TILES_AVX2
#endif

// Asks the system for what tiles need, for the whole process and its forks. 0: they may be used.
int hearth_allow_tiles(void);

// Packs a weight, of each output all inputs beside each other. The packed one is as large with both rounded up to 32.
void hearth_pack_tiles(const uint16_t *weight, uint32_t *packed, long inputs, long outputs, int threads);

// x has `rows` rows of `inputs` numbers, y as many of `outputs`. A bias, which may be missing, is added before rounding.
void hearth_multiply_tiles(
    const uint16_t *packed, const uint16_t *bias, const uint16_t *x, uint16_t *y, long rows, long inputs, long outputs,
    int threads);

static inline long ceiling(long count, long size) { return (count + size - 1) / size; }
static inline long smaller(long a, long b) { return a < b ? a : b; }

#endif
