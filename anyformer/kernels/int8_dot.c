/* y = x Wᵀ · scale + bias for fp32 rows x and int8 weights, by the dot products of Arm CPUs (asimddp) or of x86 CPUs
 * (AVX-512 VNNI).
 *
 * Each row of x is rounded to 8 bits, by which its largest value is 127. Weights are in blocks of rows of W, which are
 * columns of y: block by block, 4 values of each of its rows after the other, [n / COLUMNS][k / 4][COLUMNS][4].
 */
#include <stdint.h>
#include <string.h>

typedef struct {
    float scale;
    int32_t offset; /* that its sums begin with */
} Row;

#if defined(__aarch64__)
#include <arm_neon.h>
#define COLUMNS 8 /* of a block */
#define BLOCKS 8  /* for which all rows are multiplied before the next ones */
#define MANY 1    /* blocks of a tile of 8 rows, and of fewer: at most 16 registers of sums */
#define FEW 2

/* Round rows [m, k]. FMAX returns NaN if a value is: a row with NaN or Inf gets such a scale, and so do its results. */
static void round_rows(const float *x, int8_t *q, Row *row, int64_t m, int64_t k) {
    for (int64_t i = 0; i < m; i++, x += k, q += k) {
        float32x4_t most = vdupq_n_f32(0);
        for (int64_t j = 0; j < k; j += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + j)));
        float top = vmaxvq_f32(most), by = top > 0 ? 127 / top : 0;
        row[i] = (Row){top / 127, 0};
        for (int64_t j = 0; j < k; j += 16) {
            int16x4_t part[4];
            for (int p = 0; p < 4; p++)
                part[p] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + j + 4 * p), by)));
            int8x8_t low = vmovn_s16(vcombine_s16(part[0], part[1])), high = vmovn_s16(vcombine_s16(part[2], part[3]));
            vst1q_s8(q + j, vcombine_s8(low, high));
        }
    }
}

/* One tile of y: `rows` rows by `blocks` blocks. Both are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(
    const int8_t *x, const Row *row, const int8_t *w, const float *scale, const float *bias, float *y, int64_t n,
    int64_t k, const int rows, const int blocks) {
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
            float32x4_t by = vmulq_n_f32(vld1q_f32(scale + 4 * s), row[r].scale);
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

/* Round rows [m, k]. The instruction multiplies unsigned by signed integers: weights are stored as w + 128, and the sums
 * of a row begin with -128 times its own sum. Bits of magnitudes are ordered as integers, with NaN above all others: a
 * row with NaN or Inf gets such a scale, and so do its results. */
static void round_rows(const float *x, int8_t *q, Row *row, int64_t m, int64_t k) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t i = 0; i < m; i++, x += k, q += k) {
        __m512i most = _mm512_setzero_si512(), sum = most;
        for (int64_t j = 0; j < k; j += 16)
            most = _mm512_max_epi32(most, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + j)));
        int32_t bits = _mm512_reduce_max_epi32(most);
        float top;
        memcpy(&top, &bits, 4);
        const __m512 by = _mm512_set1_ps(top > 0 ? 127 / top : 0);
        for (int64_t j = 0; j < k; j += 16) {
            __m512i part = _mm512_cvt_roundps_epi32(
                _mm512_mul_ps(_mm512_loadu_ps(x + j), by), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            sum = _mm512_add_epi32(sum, part);
            _mm_storeu_si128((__m128i *)(q + j), _mm512_cvtepi32_epi8(part));
        }
        row[i] = (Row){top / 127, (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(sum))};
    }
}

/* One tile of y: `rows` rows by `blocks` blocks. Both are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(
    const int8_t *x, const Row *row, const int8_t *w, const float *scale, const float *bias, float *y, int64_t n,
    int64_t k, const int rows, const int blocks) {
    __m512i sum[8][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) sum[r][b] = _mm512_set1_epi32(row[r].offset);
    for (int64_t j = 0; j < k; j += 4) {
        __m512i part[4];
        UNROLL for (int b = 0; b < blocks; b++) {
            const int8_t *next = w + COLUMNS * (b * k + j);
            part[b] = _mm512_loadu_si512(next);
            _mm_prefetch((const char *)next + 512, _MM_HINT_T0); /* 16 rows: 5 to 7 % faster; 64: no difference */
        }
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * k + j, 4);
            __m512i a = _mm512_set1_epi32(four);
            /* not the intrinsic, around which GCC 12 moves the sums to memory and back: half the speed */
            UNROLL for (int b = 0; b < blocks; b++)
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r][b]) : "v"(part[b]), "v"(a));
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512 by = _mm512_mul_ps(_mm512_loadu_ps(scale + COLUMNS * b), _mm512_set1_ps(row[r].scale));
            __m512 out = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][b]), by);
            if (bias) out = _mm512_add_ps(out, _mm512_loadu_ps(bias + COLUMNS * b));
            _mm512_storeu_ps(y + r * n + COLUMNS * b, out);
        }
}
#endif

/* x [m, k], w of blocks, scale and bias [n] (or no bias), y [m, n]; k a multiple of 16, n of COLUMNS.
 * row is working memory for m rows, and for their integers [m, k] after these. */
void linear(const float *x, const int8_t *w, const float *scale, const float *bias, float *y, Row *row, int64_t m,
            int64_t n, int64_t k, int threads) {
    int8_t *q = (int8_t *)(row + m);
    round_rows(x, q, row, m, k);
    const int64_t all = n / COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        const int64_t end = all * (thread + 1) / threads;
        for (int64_t from = all * thread / threads; from < end; from += BLOCKS) {
            const int64_t to = end - from < BLOCKS ? end : from + BLOCKS;
            int64_t done = 0; /* rows */
#define TILE(rows, blocks)                                                                                         \
    for (int64_t i = done; i + rows <= m; i += rows)                                                               \
        tile(q + i * k, row + i, w + b * COLUMNS * k, scale + b * COLUMNS, bias ? bias + b * COLUMNS : 0,          \
             y + i * n + b * COLUMNS, n, k, rows, blocks);
#define TILES(rows, blocks)                                                                                        \
    {                                                                                                              \
        int64_t b = from;                                                                                          \
        for (; b + blocks <= to; b += blocks) TILE(rows, blocks)                                                   \
        for (; b < to; b++) TILE(rows, 1)                                                                          \
        done = m - m % rows;                                                                                       \
    }
            TILES(8, MANY) TILES(4, FEW) TILES(1, FEW)
        }
    }
}
