// y = W x for any number of bfloat16 rows by AMX, whose instructions multiply tiles: 16 rows by 16 outputs, over 32
// inputs. Each result is one float32 sum over the inputs from the first to the last, however the work is divided, so
// that a row has the same bits in any company. It knows no torch and no Python.
//
// The weight lies as it is read: 32 outputs after the other, of these 32 inputs after the other, and of these two tiles
// of 16 outputs, in each of which a line has two inputs of every output. What is missing to whole tiles is 0.

#include "cpu_tiles.h"

#if TILES == TILES_AMX

#include "cpu_vectors.h"
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define ROWS 32         // two tiles of them are multiplied at once
#define INPUTS 32       // of a tile
#define OUTPUTS 32      // of a block, which has two tiles for the same inputs
#define LINE 64         // bytes of each of a tile's lines
#define TILE_BYTES 1024
#define STEP_BYTES 2048 // of a block for INPUTS inputs
#define AHEAD 8192      // bytes; so far before it is multiplied a weight that is read once is fetched from memory
#define CHUNK 16        // steps whose weights a core's first cache keeps while more than ROWS rows are multiplied by them
#define PANEL 8         // times ROWS; so many rows are multiplied by the weights of a chunk
#define GROUP 16        // blocks by which the same steps of a panel's rows are multiplied
#define ROWS_BYTES (PANEL * ROWS * CHUNK * LINE)

typedef struct {
    const uint16_t *packed, *bias, *x; // no bias: 0
    uint16_t *y;
    long rows, inputs, outputs, steps;
} product;

typedef struct {
    long row, rows, first, last; // some rows, and the blocks from `first` to `last`
} piece;

typedef struct {
    char rows[ROWS_BYTES];
    char sums[PANEL][GROUP][4 * TILE_BYTES];
} workspace;

int hearth_allow_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return (int)syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

// What the compiler is not told of tiles: that they read memory, of which nothing may be left in registers.
static void settle_memory(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Tiles 0 to 3 are sums, of the first and of the second 16 rows by both tiles of outputs; 4 and 5 rows; 6 and 7 weights.
static void configure(long rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } config = {.palette = 1};
    long first = smaller(rows, TILE_ROWS), second = rows > TILE_ROWS ? rows - TILE_ROWS : TILE_ROWS;
    long lines[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; tile++) {
        config.line_bytes[tile] = LINE;
        config.lines[tile] = (uint8_t)lines[tile];
    }
    settle_memory(&config);
    _tile_loadconfig(&config);
}

// Some rows' inputs of some steps, step by step and in these row by row, for ROWS rows after the other. What is missing
// to the last step is 0.
static void copy_rows(const uint16_t *x, long inputs, long rows, long step, long steps, char *into) {
    for (long row = 0; row < rows; row++) {
        long above = row / ROWS * ROWS, height = smaller(rows - above, ROWS);
        char *line = into + (above * steps + row - above) * LINE;
        for (long first = step * INPUTS; first < (step + steps) * INPUTS; first += INPUTS, line += height * LINE) {
            __mmask32 mask = (__mmask32)((1ull << smaller(inputs - first, INPUTS)) - 1);
            _mm512_storeu_si512(line, _mm512_maskz_loadu_epi16(mask, x + row * inputs + first));
        }
    }
    settle_memory(into);
}

// Some steps of at most ROWS rows by a block. Of what `next` points to, so many bytes are fetched at each step.
static inline __attribute__((always_inline)) void add_steps(
    const char *packed, const char *x, long rows, long steps, int both, const char *next, long fetched) {
    for (long step = 0; step < steps; step++, packed += STEP_BYTES, x += rows * LINE, next += fetched) {
        for (long byte = 0; byte < fetched; byte += LINE) _mm_prefetch(next + byte, _MM_HINT_T0);
        _tile_loadd(4, x, LINE);
        _tile_loadd(6, packed, LINE);
        _tile_loadd(7, packed + TILE_BYTES, LINE);
        if (both) _tile_loadd(5, x + TILE_ROWS * LINE, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

static void begin_sums(const char *sums, long rows, int anew) {
    if (anew) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, LINE);
    _tile_loadd(1, sums + TILE_BYTES, LINE);
    if (rows <= TILE_ROWS) return;
    _tile_loadd(2, sums + 2 * TILE_BYTES, LINE);
    _tile_loadd(3, sums + 3 * TILE_BYTES, LINE);
}

static void keep_sums(char *sums, long rows) {
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + TILE_BYTES, LINE);
    if (rows > TILE_ROWS) {
        _tile_stored(2, sums + 2 * TILE_BYTES, LINE);
        _tile_stored(3, sums + 3 * TILE_BYTES, LINE);
    }
    settle_memory(sums);
}

// What is summed up, with the bias, into y.
static void round_sums(const product *p, const char *sums, long row, long rows, long output) {
    for (long part = 0; part < 2 && output < p->outputs; part++, output += LANES, sums += TILE_BYTES) {
        long left = p->outputs - output;
        vec bias = p->bias ? load_bf16(p->bias + output, left) : zeros();
        for (long i = 0; i < rows; i++) {
            vec sum = _mm512_load_ps(sums + i / TILE_ROWS * 2 * TILE_BYTES + i % TILE_ROWS * LINE);
            store_bf16(p->y + (row + i) * p->outputs + output, left, p->bias ? add(sum, bias) : sum);
        }
    }
}

static const char *weights(const product *p, long block, long step) {
    return (const char *)p->packed + (block * p->steps + step) * STEP_BYTES;
}

// What is multiplied after some steps of a block.
static const char *next_weights(const product *p, const piece *q, long block, long step, long steps) {
    if (block + 1 < q->last) return weights(p, block + 1, step);
    return step + steps < p->steps ? weights(p, q->first, step + steps) : weights(p, q->last, 0);
}

// A piece's rows by some steps of its blocks, one after the other. While many rows are multiplied by a block, the next
// one is fetched.
static void multiply_steps(const product *p, const piece *q, workspace *space, long step, long steps) {
    long count = ceiling(q->rows, ROWS), fetched = ceiling(STEP_BYTES / LINE, count) * LINE, configured = 0;
    copy_rows(p->x + q->row * p->inputs, p->inputs, q->rows, step, steps, space->rows);
    for (long block = q->first; block < q->last; block++) {
        const char *packed = weights(p, block, step);
        const char *next = count == 1 ? packed + AHEAD : next_weights(p, q, block, step, steps);
        for (long i = 0; i < count; i++, next += steps * fetched) {
            long rows = smaller(q->rows - i * ROWS, ROWS);
            const char *x = space->rows + i * ROWS * steps * LINE;
            char *sums = space->sums[i][block - q->first];
            if (rows != configured) configure(configured = rows);
            begin_sums(sums, rows, step == 0);
            if (rows > TILE_ROWS) add_steps(packed, x, rows, steps, 1, next, fetched);
            else add_steps(packed, x, rows, steps, 0, next, fetched);
            keep_sums(sums, rows);
            if (step + steps == p->steps) round_sums(p, sums, q->row + i * ROWS, rows, block * OUTPUTS);
        }
    }
}

static void multiply_blocks(const product *p, long first, long last) {
    workspace space __attribute__((aligned(LINE)));
    for (; first < last; first += GROUP)
        for (long row = 0; row < p->rows; row += PANEL * ROWS) {
            piece q = {row, smaller(p->rows - row, PANEL * ROWS), first, smaller(first + GROUP, last)};
            long chunk = q.rows > ROWS ? CHUNK : PANEL * CHUNK;
            for (long step = 0; step < p->steps; step += chunk)
                multiply_steps(p, &q, &space, step, smaller(p->steps - step, chunk));
        }
    _tile_release();
}

static void pack_tile(const uint16_t *weight, long inputs, long outputs, long step, uint32_t *packed) {
    uint32_t pairs[OUTPUTS / 2][INPUTS / 2] = {0};
    copy_rows(weight, inputs, outputs, step, 1, (char *)pairs);
    for (long pair = 0; pair < INPUTS / 2; pair++)
        for (long output = 0; output < OUTPUTS / 2; output++) *packed++ = pairs[output][pair];
}

void hearth_pack_tiles(const uint16_t *weight, uint32_t *packed, long inputs, long outputs, int threads) {
    long steps = ceiling(inputs, INPUTS);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long block = 0; block < ceiling(outputs, OUTPUTS); block++)
        for (long tile = 0; tile < 2 * steps; tile++) {
            long output = smaller(block * OUTPUTS + tile % 2 * OUTPUTS / 2, outputs);
            uint32_t *into = packed + (block * 2 * steps + tile) * TILE_BYTES / 4;
            pack_tile(weight + output * inputs, inputs, smaller(outputs - output, OUTPUTS / 2), tile / 2, into);
        }
}

void hearth_multiply_tiles(
    const uint16_t *packed, const uint16_t *bias, const uint16_t *x, uint16_t *y, long rows, long inputs, long outputs,
    int threads) {
    product p = {packed, bias, x, y, rows, inputs, outputs, ceiling(inputs, INPUTS)};
    long blocks = ceiling(outputs, OUTPUTS);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++)
        multiply_blocks(&p, blocks * part / threads, blocks * (part + 1) / threads);
}

#endif
