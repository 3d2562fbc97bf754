// y = W x for any number of bfloat16 rows by AVX2: tiles of up to 5 rows by 16 outputs lie in registers, or of one row by
// 64. Each result is one float32 sum over the inputs from the first to the last, however the work is divided, so that a
// row has the same bits in any company. It knows no torch and no Python.
//
// The weight lies as it is read: 16 outputs after the other, of these all inputs by twos, and of two inputs both numbers
// of each output beside each other. What is missing to whole ones is 0.

#include "cpu_tiles.h"

#if TILES == TILES_AVX2

#include "cpu_vectors.h"

#define TILE_ROWS 5
#define OUTPUTS 16          // of a block
#define BLOCKS 4            // by which one row is multiplied at once
#define MULTIPLE 32         // to which inputs and outputs are rounded up
#define AHEAD 1024          // bytes; so far before it is multiplied a weight that is read once is fetched from memory
#define PANEL 50            // rows that are multiplied by a group's blocks, some inputs after the other
#define GROUP 16            // blocks
#define WIDENED 12800       // inputs of a panel's rows that a core's second cache keeps as float32

typedef struct {
    const uint16_t *packed, *bias, *x; // no bias: 0
    uint16_t *y;
    long rows, inputs, outputs, pairs, block_words; // pairs of inputs, and a block's words, rounded up
} product;

typedef struct {
    float rows[WIDENED];
    float sums[PANEL][GROUP * OUTPUTS];
} workspace;

int hearth_allow_tiles(void) { return 0; }

// The first or the second number of each of some outputs' pairs.
static inline vec one_of_pairs(const uint32_t *pairs, int second) {
    __m256i both = _mm256_loadu_si256((const __m256i *)pairs);
    return second ? (vec)_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)) : (vec)_mm256_slli_epi32(both, 16);
}

// Some rows by some pairs of inputs of blocks that lie `block_words` apart, added to the sums. The x of a row lie
// `x_stride` apart.
static inline __attribute__((always_inline)) void add_tile(
    const uint32_t *packed, long block_words, const float *x, long x_stride, long pairs, float *sums, const int rows,
    const int blocks) {
    vec tile[TILE_ROWS][BLOCKS][2];
    for (int row = 0; row < rows; row++)
        for (int block = 0; block < blocks; block++)
            for (int half = 0; half < 2; half++)
                tile[row][block][half] = load(sums + row * GROUP * OUTPUTS + block * OUTPUTS + half * LANES, LANES);
    for (long pair = 0; pair < pairs; pair++, packed += OUTPUTS, x += 2)
#pragma GCC unroll 8
        for (int block = 0; block < blocks; block++) {
            const uint32_t *line = packed + block * block_words;
            _mm_prefetch((const char *)line + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int second = 0; second < 2; second++) {
                // Has the compiler load pairs twice: in registers they would leave too few for the sums.
                __asm__ volatile("" : : : "memory");
                vec low = one_of_pairs(line, second), high = one_of_pairs(line + LANES, second);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    vec input = splat(x[row * x_stride + second]);
                    tile[row][block][0] = multiply_add(input, low, tile[row][block][0]);
                    tile[row][block][1] = multiply_add(input, high, tile[row][block][1]);
                }
            }
        }
    for (int row = 0; row < rows; row++)
        for (int block = 0; block < blocks; block++)
            for (int half = 0; half < 2; half++)
                store(sums + row * GROUP * OUTPUTS + block * OUTPUTS + half * LANES, LANES, tile[row][block][half]);
}

// At most TILE_ROWS rows by some blocks beside each other, of which fewer rows take more at once.
static void add_tiles(
    const uint32_t *packed, long block_words, const float *x, long x_stride, long pairs, float *sums, long rows,
    long blocks) {
    long block = 0;
#define ADD(ROWS, AT_ONCE)                                                                                             \
    for (; block + AT_ONCE <= blocks; block += AT_ONCE)                                                                \
    add_tile(packed + block * block_words, block_words, x, x_stride, pairs, sums + block * OUTPUTS, ROWS, AT_ONCE)
    if (rows == 1) {
        ADD(1, 4);
        ADD(1, 1);
    } else if (rows == 2) {
        ADD(2, 2);
        ADD(2, 1);
    } else if (rows == 3) ADD(3, 1);
    else if (rows == 4) ADD(4, 1);
    else ADD(5, 1);
#undef ADD
}

// Some inputs of some rows as float32, row by row. What is missing to a whole pair is 0.
static void widen_rows(const product *p, long row, long rows, long pair, long pairs, float *into) {
    for (long i = 0; i < rows; i++) {
        const uint16_t *x = p->x + (row + i) * p->inputs + 2 * pair;
        long left = smaller(2 * pairs, p->inputs - 2 * pair);
        float *line = into + i * 2 * pairs;
        line[2 * pairs - 1] = 0;
        for (long j = 0; j < left; j += LANES) store(line + j, left - j, load_bf16(x + j, left - j));
    }
}

// What is summed up, with the bias, into y.
static void round_sums(const product *p, const workspace *space, long row, long rows, long output, long outputs) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < outputs; j += LANES) {
            vec sum = load(space->sums[i] + j, LANES);
            if (p->bias) sum = add(sum, load_bf16(p->bias + output + j, outputs - j));
            store_bf16(p->y + (row + i) * p->outputs + output + j, outputs - j, sum);
        }
}

// A panel's rows by a group's blocks.
static void multiply_panel(const product *p, long row, long rows, long block, long blocks, workspace *space) {
    long alone = rows <= TILE_ROWS, chunk = WIDENED / (alone ? rows : PANEL) / 2;
    memset(space->sums, 0, rows * sizeof space->sums[0]);
    for (long pair = 0; pair < p->pairs; pair += chunk) {
        long pairs = smaller(chunk, p->pairs - pair);
        const uint32_t *packed = (const uint32_t *)p->packed + block * p->block_words + pair * OUTPUTS;
        widen_rows(p, row, rows, pair, pairs, space->rows);
        long at_once = alone ? blocks : 1; // one block's weights stay in the first cache while all rows take them
        for (long i = 0; i < blocks; i += at_once)
            for (long first = 0; first < rows; first += TILE_ROWS)
                add_tiles(
                    packed + i * p->block_words, p->block_words, space->rows + first * 2 * pairs, 2 * pairs, pairs,
                    space->sums[first] + i * OUTPUTS, smaller(TILE_ROWS, rows - first), at_once);
    }
    long output = block * OUTPUTS;
    round_sums(p, space, row, rows, output, smaller(blocks * OUTPUTS, p->outputs - output));
}

static void multiply_blocks(const product *p, long first, long last) {
    workspace space __attribute__((aligned(64)));
    for (; first < last; first += GROUP)
        for (long row = 0; row < p->rows; row += PANEL)
            multiply_panel(p, row, smaller(PANEL, p->rows - row), first, smaller(GROUP, last - first), &space);
}

void hearth_pack_tiles(const uint16_t *weight, uint32_t *packed, long inputs, long outputs, int threads) {
    long pairs = ceiling(inputs, MULTIPLE) * MULTIPLE / 2, blocks = ceiling(outputs, MULTIPLE) * MULTIPLE / OUTPUTS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long i = 0; i < OUTPUTS; i++) {
            long output = block * OUTPUTS + i;
            const uint16_t *row = weight + output * inputs;
            uint32_t *into = packed + block * pairs * OUTPUTS + i;
            for (long pair = 0; pair < pairs; pair++, into += OUTPUTS) {
                uint32_t first = output < outputs && 2 * pair < inputs ? row[2 * pair] : 0;
                uint32_t second = output < outputs && 2 * pair + 1 < inputs ? row[2 * pair + 1] : 0;
                *into = first | second << 16;
            }
        }
}

void hearth_multiply_tiles(
    const uint16_t *packed, const uint16_t *bias, const uint16_t *x, uint16_t *y, long rows, long inputs, long outputs,
    int threads) {
    long block_words = ceiling(inputs, MULTIPLE) * MULTIPLE / 2 * OUTPUTS;
    product p = {packed, bias, x, y, rows, inputs, outputs, ceiling(inputs, 2), block_words};
    long blocks = ceiling(outputs, OUTPUTS);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++)
        multiply_blocks(&p, blocks * part / threads, blocks * (part + 1) / threads);
}

#endif
