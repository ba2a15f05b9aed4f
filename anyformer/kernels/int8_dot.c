/* y = x Wᵀ · scale + bias for fp32 rows x and int8 weights, by the dot products of Arm CPUs (asimddp).
 *
 * Each row of x is rounded to 8 bits, by which its largest value is 127. Weights are in blocks of 8 rows of W, which
 * are 8 columns of y: block by block, 4 values of each of its rows after the other, [n / 8][k / 4][8][4].
 */
#include <arm_neon.h>
#include <stdint.h>

#define COLUMNS 8 /* of a block */
#define BLOCKS 8  /* that a thread takes at once */

/* Round rows [m, k]. FMAX returns NaN if a value is: a row with NaN or Inf gets such a scale, and so do its results. */
static void round_rows(const float *x, int8_t *q, float *scale, int64_t m, int64_t k) {
    for (int64_t i = 0; i < m; i++, x += k, q += k) {
        float32x4_t most = vdupq_n_f32(0);
        for (int64_t j = 0; j < k; j += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + j)));
        float top = vmaxvq_f32(most), by = top > 0 ? 127 / top : 0;
        scale[i] = top / 127;
        for (int64_t j = 0; j < k; j += 16) {
            int16x4_t part[4];
            for (int p = 0; p < 4; p++)
                part[p] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + j + 4 * p), by)));
            int8x8_t low = vmovn_s16(vcombine_s16(part[0], part[1])), high = vmovn_s16(vcombine_s16(part[2], part[3]));
            vst1q_s8(q + j, vcombine_s8(low, high));
        }
    }
}

/* One tile of y: `rows` rows by `blocks` blocks, at most 16 registers of sums. Both are constants where it is inlined. */
static inline __attribute__((always_inline)) void tile(
    const int8_t *x, const float *x_scale, const int8_t *w, const float *scale, const float *bias, float *y, int64_t n,
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
            float32x4_t by = vmulq_n_f32(vld1q_f32(scale + 4 * s), x_scale[r]);
            float32x4_t out = vmulq_f32(vcvtq_f32_s32(sum[2 * r * blocks + s]), by);
            vst1q_f32(y + r * n + 4 * s, bias ? vaddq_f32(out, vld1q_f32(bias + 4 * s)) : out);
        }
}

/* x [m, k], w of blocks, scale and bias [n] (or no bias), y [m, n]; k a multiple of 16, n of 8.
 * q [m, k] and x_scale [m] are working memory. */
void linear(const float *x, const int8_t *w, const float *scale, const float *bias, float *y, int8_t *q, float *x_scale,
            int64_t m, int64_t n, int64_t k, int threads) {
    round_rows(x, q, x_scale, m, k);
    const int64_t all = n / COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t from = 0; from < all; from += BLOCKS) {
        const int count = all - from < BLOCKS ? all - from : BLOCKS;
#define TILE(rows, blocks, b)                                                                                   \
    tile(q + i * k, x_scale + i, w + (from + b) * COLUMNS * k, scale + (from + b) * COLUMNS,                    \
         bias ? bias + (from + b) * COLUMNS : 0, y + i * n + (from + b) * COLUMNS, n, k, rows, blocks)
        int64_t i = 0;
        for (int b = 0; b < count; b++)
            for (i = 0; i + 8 <= m; i += 8) TILE(8, 1, b);
        for (; i + 4 <= m; i += 4)
            for (int b = 0; b < count; b += 2) b + 2 <= count ? TILE(4, 2, b) : TILE(4, 1, b);
        for (; i < m; i++)
            for (int b = 0; b < count; b += 2) b + 2 <= count ? TILE(1, 2, b) : TILE(1, 1, b);
    }
}
