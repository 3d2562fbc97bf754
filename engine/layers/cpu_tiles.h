// cpu_tiles.c's matmul, for the other C files.

#ifndef CPU_TILES_H
#define CPU_TILES_H

#include <stdint.h>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

void hearth_multiply_tiles(
    const uint16_t *packed, const uint16_t *bias, const uint16_t *x, uint16_t *y, long rows, long inputs, long outputs,
    int threads);

#endif
