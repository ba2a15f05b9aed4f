/* y = x Wᵀ + bias for fp32 rows x and integer weights with scales, by the dot products of Arm CPUs (asimddp) or of x86
 * CPUs (AVX-512 VNNI). Weights of 8 bits have a scale for each row of W, weights of 4 bits (x86 alone) a bf16 scale for
 * each group of a row.
 *
 * Each row of x is rounded to 8 bits, by which its largest value is 127. Weights are in blocks of rows of W, which are
 * columns of y: block by block, 4 values of each of its rows after the other, [n / COLUMNS][k / 4][COLUMNS][4]. Two
 * weights of 4 bits share a byte: the lower halves are 4 values of a row, the upper halves its next 4.
 */
#include <stdint.h>
#include <string.h>

typedef struct {
    const int8_t *q;       /* rows of x as integers [m, k], */
    const float *by;       /* their scales [m], */
    const int32_t *offset; /* and what the sums of each group begin with [m, groups] */
    const uint8_t *w;
    const void *scale;
    const float *bias;
    float *y;
    int64_t n, k, groups;
} Call;

#if defined(__aarch64__)
#include <arm_neon.h>
#define COLUMNS 8 /* of a block */
#define BLOCKS 8  /* for which all rows are multiplied before the next ones */
#define MANY 1    /* blocks of a tile of 8 rows, and of fewer: at most 16 registers of sums */
#define FEW 2

/* Round a row of x. FMAX returns NaN if a value is: a row with NaN or Inf gets such a scale, and so do its results. */
static float round_row(const float *x, int8_t *q, int32_t *offset, int64_t k, int64_t group, int bits) {
    (void)offset, (void)group, (void)bits; /* signed by signed integers: sums begin with 0 */
    float32x4_t most = vdupq_n_f32(0);
    for (int64_t j = 0; j < k; j += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + j)));
    float top = vmaxvq_f32(most), by = top > 0 ? 127 / top : 0;
    for (int64_t j = 0; j < k; j += 16) {
        int16x4_t part[4];
        for (int p = 0; p < 4; p++) part[p] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + j + 4 * p), by)));
        int8x8_t low = vmovn_s16(vcombine_s16(part[0], part[1])), high = vmovn_s16(vcombine_s16(part[2], part[3]));
        vst1q_s8(q + j, vcombine_s8(low, high));
    }
    return top / 127;
}

/* One tile of y: `rows` rows from i on by `blocks` blocks from `at` on. Both are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(
    const Call *call, int64_t i, int64_t at, const int rows, const int blocks) {
    const int64_t k = call->k, n = call->n;
    const int8_t *x = call->q + i * k, *w = (const int8_t *)call->w + at * COLUMNS * k;
    const float *scale = (const float *)call->scale + at * COLUMNS;
    const float *bias = call->bias ? call->bias + at * COLUMNS : 0;
    float *y = call->y + i * n + at * COLUMNS;
    int32x4_t sum[16];
    for (int s = 0; s < 2 * rows * blocks; s++) sum[s] = vdupq_n_s32(0);
    for (int64_t j = 0; j < k; j += 16) {
        int8x16_t a[8];
        for (int r = 0; r < rows; r++) a[r] = vld1q_s8(x + r * k + j);
        for (int b = 0; b < blocks; b++) {
            const int8_t *part = w + COLUMNS * (b * k + j);
#define FOUR(lane)                                                                          \
    {                                                                                       \
        int8x16_t first = vld1q_s8(part + 32 * lane), second = vld1q_s8(part + 32 * lane + 16); \
        for (int r = 0; r < rows; r++) {                                                    \
            int32x4_t *s = sum + 2 * (r * blocks + b);                                      \
            s[0] = vdotq_laneq_s32(s[0], first, a[r], lane);                                \
            s[1] = vdotq_laneq_s32(s[1], second, a[r], lane);                               \
        }                                                                                   \
    }
            FOUR(0) FOUR(1) FOUR(2) FOUR(3)
        }
    }
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < 2 * blocks; s++) {
            float32x4_t by = vmulq_n_f32(vld1q_f32(scale + 4 * s), call->by[i + r]);
            float32x4_t out = vmulq_f32(vcvtq_f32_s32(sum[2 * r * blocks + s]), by);
            vst1q_f32(y + r * n + 4 * s, bias ? vaddq_f32(out, vld1q_f32(bias + 4 * s)) : out);
        }
}

#else
#include <immintrin.h>
#define COLUMNS 16
#define BLOCKS 12
#define MANY 3 /* 24 of 32 registers are sums */
#define FEW 4
#define UNROLL _Pragma("GCC unroll 8") /* so that sums stay in registers */
/* not the intrinsic, around which GCC 12 moves the sums to memory and back: half the speed */
#define DOT(sum, weights, a) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(a))

/* Round a row of x. The instruction multiplies unsigned by signed integers: weights are stored as w + 128 or w + 8, and
 * the sums of a group begin with -128 or -8 times its own sum. Bits of magnitudes are ordered as integers, with NaN
 * above all others: a row with NaN or Inf gets such a scale, and so do its results. */
static float round_row(const float *x, int8_t *q, int32_t *offset, int64_t k, int64_t group, int bits) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int64_t j = 0; j < k; j += 16)
        most = _mm512_max_epi32(most, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + j)));
    int32_t largest = _mm512_reduce_max_epi32(most);
    float top;
    memcpy(&top, &largest, 4);
    const __m512 by = _mm512_set1_ps(top > 0 ? 127 / top : 0);
    for (int64_t from = 0; from < k; from += group) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t j = from; j < from + group; j += 16) {
            __m512i part = _mm512_cvt_roundps_epi32(
                _mm512_mul_ps(_mm512_loadu_ps(x + j), by), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            sum = _mm512_add_epi32(sum, part);
            _mm_storeu_si128((__m128i *)(q + j), _mm512_cvtepi32_epi8(part));
        }
        *offset++ = (int32_t)((uint32_t)-(1 << (bits - 1)) * (uint32_t)_mm512_reduce_add_epi32(sum));
    }
    return top / 127;
}

static inline __attribute__((always_inline)) __m512i four(const int8_t *x) {
    int32_t values;
    memcpy(&values, x, 4);
    return _mm512_set1_epi32(values);
}

/* One tile of y: `rows` rows from i on by `blocks` blocks from `at` on. Both are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(
    const Call *call, int64_t i, int64_t at, const int rows, const int blocks) {
    const int64_t k = call->k, n = call->n;
    const int8_t *x = call->q + i * k;
    const uint8_t *w = call->w + at * COLUMNS * k;
    const float *scale = (const float *)call->scale + at * COLUMNS;
    const float *bias = call->bias ? call->bias + at * COLUMNS : 0;
    float *y = call->y + i * n + at * COLUMNS;
    __m512i sum[8][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) sum[r][b] = _mm512_set1_epi32(call->offset[i + r]);
    for (int64_t j = 0; j < k; j += 4) {
        __m512i part[4];
        UNROLL for (int b = 0; b < blocks; b++) {
            const uint8_t *next = w + COLUMNS * (b * k + j);
            part[b] = _mm512_loadu_si512(next);
            _mm_prefetch((const char *)next + 512, _MM_HINT_T0); /* 16 rows: 5 to 7 % faster; 64: no difference */
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i a = four(x + r * k + j);
            UNROLL for (int b = 0; b < blocks; b++) DOT(sum[r][b], part[b], a);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512 by = _mm512_mul_ps(_mm512_loadu_ps(scale + COLUMNS * b), _mm512_set1_ps(call->by[i + r]));
            __m512 out = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][b]), by);
            if (bias) out = _mm512_add_ps(out, _mm512_loadu_ps(bias + COLUMNS * b));
            _mm512_storeu_ps(y + r * n + COLUMNS * b, out);
        }
}

/* The same for weights of 4 bits: the sums of a group, times its scales, are added to those of a row. Scales are in
 * blocks as well, [n / COLUMNS][groups][COLUMNS]. */
static inline __attribute__((always_inline)) void tile4(
    const Call *call, int64_t i, int64_t at, const int rows, const int blocks) {
    const int64_t k = call->k, n = call->n, groups = call->groups, group = k / groups;
    const int8_t *x = call->q + i * k;
    const uint8_t *w = call->w + at * COLUMNS * k / 2;
    const uint16_t *scale = (const uint16_t *)call->scale + at * COLUMNS * groups;
    const int32_t *offset = call->offset + i * groups;
    const float *bias = call->bias ? call->bias + at * COLUMNS : 0;
    float *y = call->y + i * n + at * COLUMNS;
    const __m512i half = _mm512_set1_epi8(15);
    __m512 total[8][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) total[r][b] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i sum[8][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int b = 0; b < blocks; b++) sum[r][b] = _mm512_set1_epi32(offset[r * groups + g]);
        for (int64_t j = g * group; j < (g + 1) * group; j += 8) {
            __m512i low[4], high[4];
            UNROLL for (int b = 0; b < blocks; b++) {
                const uint8_t *next = w + COLUMNS * (b * k + j) / 2;
                __m512i both = _mm512_loadu_si512(next);
                _mm_prefetch((const char *)next + 512, _MM_HINT_T0);
                low[b] = _mm512_and_si512(both, half);
                high[b] = _mm512_and_si512(_mm512_srli_epi32(both, 4), half);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                __m512i first = four(x + r * k + j), second = four(x + r * k + j + 4);
                UNROLL for (int b = 0; b < blocks; b++) DOT(sum[r][b], low[b], first);
                UNROLL for (int b = 0; b < blocks; b++) DOT(sum[r][b], high[b], second);
            }
        }
        UNROLL for (int b = 0; b < blocks; b++) {
            __m256i bf16 = _mm256_loadu_si256((const __m256i *)(scale + COLUMNS * (b * groups + g)));
            __m512 by = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
            UNROLL for (int r = 0; r < rows; r++)
                total[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][b]), by, total[r][b]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512 out = _mm512_mul_ps(total[r][b], _mm512_set1_ps(call->by[i + r]));
            if (bias) out = _mm512_add_ps(out, _mm512_loadu_ps(bias + COLUMNS * b));
            _mm512_storeu_ps(y + r * n + COLUMNS * b, out);
        }
}
#endif

/* Round all rows. `memory` holds m scales, their offsets [m, groups] and integers [m, k]. */
static void round_rows(Call *call, const float *x, float *memory, int64_t m, int bits) {
    int32_t *offset = (int32_t *)(memory + m);
    int8_t *q = (int8_t *)(offset + m * call->groups);
    call->by = memory, call->offset = offset, call->q = q;
    for (int64_t i = 0; i < m; i++)
        memory[i] = round_row(
            x + i * call->k, q + i * call->k, offset + i * call->groups, call->k, call->k / call->groups, bits);
}

#define TILE(tile, rows, blocks) \
    for (int64_t i = done; i + rows <= m; i += rows) tile(&call, i, b, rows, blocks);
#define TILES(tile, rows, blocks)                                      \
    {                                                                  \
        int64_t b = from;                                              \
        for (; b + blocks <= to; b += blocks) TILE(tile, rows, blocks) \
        for (; b < to; b++) TILE(tile, rows, 1)                        \
        done = m - m % rows;                                           \
    }

/* x [m, k], w of blocks, y [m, n], bias [n] or none; k a multiple of 16, n of COLUMNS; see `round_rows` for memory.
 * 8 bits: scale [n], one group. 4 bits: scale of blocks; groups of a multiple of 16. */
void linear(const float *x, const uint8_t *w, const void *scale, const float *bias, float *y, float *memory, int64_t m,
            int64_t n, int64_t k, int64_t groups, int bits, int threads) {
    Call call = {.w = w, .scale = scale, .bias = bias, .y = y, .n = n, .k = k, .groups = groups};
    round_rows(&call, x, memory, m, bits);
    const int64_t all = n / COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        const int64_t end = all * (thread + 1) / threads;
        for (int64_t from = all * thread / threads; from < end; from += BLOCKS) {
            const int64_t to = end - from < BLOCKS ? end : from + BLOCKS;
            int64_t done = 0; /* rows */
#if !defined(__aarch64__)
            if (bits == 4) { /* sums and totals: at most 16 registers */
                TILES(tile4, 8, 1) TILES(tile4, 4, 2) TILES(tile4, 1, 4)
                continue;
            }
#endif
            TILES(tile, 8, MANY) TILES(tile, 4, FEW) TILES(tile, 1, FEW)
        }
    }
}
