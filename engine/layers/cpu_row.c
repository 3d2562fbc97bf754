// What a decoder does to few rows in bfloat16 on a CPU: y = W x for one row, with oneDNN's bits; norms, rotations, gates
// and copies for any number of rows, each by itself, so that a row has the same bits among others. It knows no torch and
// no Python.
//
// The weight of y = W x lies as oneDNN packs it for its own matmuls: 64 outputs beside each other, and of each the numbers of two
// inputs at a time. A result is summed up in oneDNN's order too, one pair of inputs after the other, by the same
// instruction, so that a row alone has the bits that it has among others.

#include "cpu_tiles.h"
#include "cpu_vectors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define UNDIVIDED 32768    // numbers up to which one thread is faster than several
#define LEAST -85.0f       // whose exponential is just above the least that is not rounded more coarsely

#if defined(__AVX512BF16__)

#define OUTPUTS 64
#define AHEAD 4096         // bytes; processors fetch ahead by themselves, but no further than a page of memory

static void multiply_block(const uint16_t *packed, const uint32_t *x, uint16_t *y, long pairs, long chunk_pairs) {
    __m512 totals[4];
    for (long first = 0; first < pairs; first += chunk_pairs) {
        long last = first + chunk_pairs < pairs ? first + chunk_pairs : pairs;
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (long pair = first; pair < last; pair++, packed += 2 * OUTPUTS) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)x[pair]);
            for (int part = 0; part < 4; part++) {
                _mm_prefetch((const char *)(packed + 32 * part) + AHEAD, _MM_HINT_T0);
                __m512bh weights = (__m512bh)_mm512_loadu_si512(packed + 32 * part);
                sums[part] = _mm512_dpbf16_ps(sums[part], both, weights);
            }
        }
        for (int part = 0; part < 4; part++)
            totals[part] = first ? _mm512_add_ps(sums[part], totals[part]) : sums[part];
    }
    for (int part = 0; part < 4; part++)
        _mm256_storeu_si256((__m256i *)(y + 16 * part), (__m256i)_mm512_cvtneps_pbh(totals[part]));
}

// x has `inputs` numbers, a multiple of 32; y `outputs`, a multiple of 64. Sums of `chunk` inputs each are added up.
void hearth_multiply_row(
    const uint16_t *packed, const uint16_t *x, uint16_t *y, long inputs, long outputs, long chunk, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long first = 0; first < outputs; first += OUTPUTS)
        multiply_block(packed + first * inputs, (const uint32_t *)x, y + first, inputs / 2, chunk / 2);
}

#endif

static float inverse_rms(vec squares, long width, float epsilon) {
    return 1.0f / sqrtf(sum_of(squares) / (float)width + epsilon);
}

static void add_norm_row(
    float *sum, const void *added, int added_bf16, const float *weight, uint16_t *y, long width, float epsilon) {
    vec squares = zeros();
    for (long i = 0; i < width; i += LANES) {
        vec x = load(sum + i, width - i);
        if (added) {
            vec more = added_bf16 ? load_bf16((const uint16_t *)added + i, width - i)
                                  : load((const float *)added + i, width - i);
            x = add(x, more);
            store(sum + i, width - i, x);
        }
        squares = multiply_add(x, x, squares);
    }
    vec scale = splat(inverse_rms(squares, width, epsilon));
    for (long i = 0; i < width; i += LANES) {
        vec x = mul(load(sum + i, width - i), scale);
        store_bf16(y + i, width - i, mul(x, load(weight + i, width - i)));
    }
}

// sum += added, which may be missing, and y = the RMS norm of sum in bfloat16, row by row.
void hearth_add_norm(
    float *sum, const void *added, int added_bf16, const float *weight, uint16_t *y, long rows, long width,
    float epsilon, int threads) {
    long bytes = width * (added_bf16 ? 2 : 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > UNDIVIDED)
    for (long row = 0; row < rows; row++) {
        const char *more = added ? (const char *)added + row * bytes : 0;
        add_norm_row(sum + row * width, more, added_bf16, weight, y + row * width, width, epsilon);
    }
}

static void norm_head(uint16_t *x, const float *weight, long size, float epsilon) {
    vec squares = zeros();
    for (long i = 0; i < size; i += LANES) {
        vec some = load_bf16(x + i, LANES);
        squares = multiply_add(some, some, squares);
    }
    vec scale = splat(inverse_rms(squares, size, epsilon));
    for (long i = 0; i < size; i += LANES)
        store_bf16(x + i, LANES, mul(mul(load_bf16(x + i, LANES), scale), load(weight + i, LANES)));
}

static void rotate_head(uint16_t *x, const float *cos, const float *sin, long size) {
    uint16_t *other = x + size / 2;
    for (long i = 0; i < size / 2; i += LANES) {
        long j = i + size / 2;
        vec low = load_bf16(x + i, LANES), high = load_bf16(other + i, LANES);
        vec first = mul(high, load(sin + i, LANES)), second = mul(low, load(sin + j, LANES));
        store_bf16(x + i, LANES, add(mul(low, load(cos + i, LANES)), first));
        store_bf16(other + i, LANES, add(mul(high, load(cos + j, LANES)), second));
    }
}

// Norms each head of q and k with its row of `norm`, if there is one, and rotates it by halves, if there are tables; then
// K and V go into their slots. A row of x has q's heads, k's, v's, of `size` numbers, a multiple of 32; cos and sin a row
// of so many.
void hearth_rotate_and_write(
    uint16_t *x, const float *norm, const float *cos, const float *sin, const int64_t *slots, uint16_t *cache, long rows,
    long heads, long kv_heads, long size, float epsilon, int threads) {
    long width = (heads + 2 * kv_heads) * size, slot = 2 * kv_heads * size;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > UNDIVIDED)
    for (long row = 0; row < rows; row++) {
        for (long head = 0; head < heads + kv_heads; head++) {
            uint16_t *some = x + row * width + head * size;
            if (norm) norm_head(some, norm + head * size, size, epsilon);
            if (cos) rotate_head(some, cos + row * size, sin + row * size, size);
        }
        memcpy(cache + slots[row] * slot, x + row * width + heads * size, 2 * slot);
    }
}

// e^x for x ≤ 0, to a few units in the last place: x = n·ln 2 + r, and a polynomial in r; 0 where it is below 1e-37.
static vec exponential(vec x) {
    static const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    vec over = sub(x, splat(LEAST));
    x = greatest(x, splat(LEAST));
    vec n = nearest(mul(x, splat(1.44269504f)));
    vec r = subtract_product(x, n, splat(0.693359375f));
    r = subtract_product(r, n, splat(-2.12194440e-4f));
    vec sum = splat(factors[0]);
    for (int i = 1; i < 7; i++) sum = multiply_add(sum, r, splat(factors[i]));
    return where_negative(over, zeros(), times_power(sum, n));
}

static vec silu(vec x) {
    vec one = splat(1.0f), e = exponential(sub(zeros(), greatest(x, sub(zeros(), x))));
    return divide(mul(x, where_negative(x, e, one)), add(one, e));
}

// y = silu of the first half of each row of x, rounded, times the second half.
void hearth_silu_and_multiply(const uint16_t *x, uint16_t *y, long rows, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > UNDIVIDED)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += LANES) {
            const uint16_t *gate = x + 2 * row * width + i;
            vec gated = rounded_to_bf16(silu(load_bf16(gate, width - i)));
            store_bf16(y + row * width + i, width - i, mul(gated, load_bf16(gate + width, width - i)));
        }
}

// Copies whole blocks of the cache beside each other, then clears rows of them.
void hearth_read_blocks(
    const char *cache, const int64_t *blocks, long count, long block_bytes, char *into, const int64_t *unwritten,
    long unwritten_count, long row_bytes, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * block_bytes > 8 * UNDIVIDED)
    for (long i = 0; i < count; i++) memcpy(into + i * block_bytes, cache + blocks[i] * block_bytes, block_bytes);
    for (long i = 0; i < unwritten_count; i++) memset(into + unwritten[i] * row_bytes, 0, row_bytes);
}

// One row's way through a whole layer but its attention. What the struct `row_layer` has is the layer's, for good; what
// `row_step` has is the row's: its sum, what the layer before gave, and memory that each layer uses anew.
typedef struct {
    const uint16_t *packed;
    long inputs, outputs, chunk; // 0: it is packed in tiles
} matrix;

typedef struct {
    matrix qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *qk_norm;
    uint16_t *cache;
} row_layer;

typedef struct {
    long hidden, heads, kv_heads, size;
    float *sum;
    uint16_t *added, *wide, *narrow;
    float epsilon;
    int threads;
} row_step;

static void multiply(const matrix *m, const uint16_t *x, uint16_t *y, int threads) {
#if TILES
    if (!m->chunk) {
        hearth_multiply_tiles(m->packed, 0, x, y, 1, m->inputs, m->outputs, threads);
        return;
    }
#endif
#if defined(__AVX512BF16__)
    hearth_multiply_row(m->packed, x, y, m->inputs, m->outputs, m->chunk, threads);
#else
    (void)x, (void)y, (void)threads;
    abort(); // all weights are in tiles here
#endif
}

// From the sum to q, k and v; K and V into their slot, the keys' blocks beside each other, and q's heads where attention
// takes them, those that share a KV head beside each other and each such group `q_stride` numbers after the one before.
void hearth_before_attention(
    const row_layer *layer, const row_step *step, int first, const float *cos, const float *sin, int64_t slot,
    const int64_t *blocks, long count, long block_bytes, char *keys, const int64_t *unwritten, long unwritten_count,
    uint16_t *q, long q_stride) {
    long fold = step->heads / step->kv_heads * step->size;
    add_norm_row(
        step->sum, first ? 0 : step->added, 1, layer->attention_norm, step->narrow, step->hidden, step->epsilon);
    multiply(&layer->qkv, step->narrow, step->wide, step->threads);
    hearth_rotate_and_write(
        step->wide, layer->qk_norm, cos, sin, &slot, layer->cache, 1, step->heads, step->kv_heads, step->size,
        step->epsilon, 1);
    hearth_read_blocks(
        (const char *)layer->cache, blocks, count, block_bytes, keys, unwritten, unwritten_count,
        4 * step->kv_heads * step->size, step->threads);
    for (long n = 0; n < step->kv_heads; n++) memcpy(q + n * q_stride, step->wide + n * fold, 2 * fold);
}

// From what was attended to what the layer adds to the sum. Heads lie as in q, with strides of their own.
void hearth_behind_attention(
    const row_layer *layer, const row_step *step, const uint16_t *attended, long group_stride, long head_stride) {
    long fold = step->heads / step->kv_heads;
    for (long head = 0; head < step->heads; head++) {
        const uint16_t *from = attended + head / fold * group_stride + head % fold * head_stride;
        memcpy(step->wide + head * step->size, from, 2 * step->size);
    }
    multiply(&layer->output, step->wide, step->narrow, step->threads);
    add_norm_row(step->sum, step->narrow, 1, layer->mlp_norm, step->narrow, step->hidden, step->epsilon);
    multiply(&layer->gate_up, step->narrow, step->wide, step->threads);
    hearth_silu_and_multiply(step->wide, step->narrow, 1, layer->down.inputs, 1);
    multiply(&layer->down, step->narrow, step->added, step->threads);
}
