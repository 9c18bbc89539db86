/* The one piece of work that no synchronous server can leave out: the mean of all gradients, and Adam.
 *
 * Everything is float32. The threads that wait for gradients share the update, as many as there are processors;
 * where there are fewer workers than that, helpers join them. Adam is in TensorFlow's formulation, with the
 * numbers of workload.py. Every element is read and written once, in order, by vector instructions. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

static const double LEARNING_RATE = 0.001, BETA1 = 0.9, BETA2 = 0.999;

/* Floats whose new values wait in the L1 cache until they are written. */
enum { BLOCK = 512 };

/* Values that are larger than this are written past the caches, which saves reading what is overwritten; smaller
 * ones stay in the cache for those who send them. */
static const size_t STREAMED_FLOATS = 8 << 20;

/* Adam over one block, with the sum of up to four gradients: `rows` is known when this is compiled. */
static inline __attribute__((always_inline)) void adam_rows(
    int rows, const float *restrict g0, const float *restrict g1, const float *restrict g2, const float *restrict g3,
    float *restrict first, float *restrict second, const float *restrict old, float *restrict new, size_t count,
    float share, float rate) {
    const float rate1 = (float)(1 - BETA1), rate2 = (float)(1 - BETA2), epsilon = 1e-8f;
    for (size_t i = 0; i < count; i++) {
        float g = g0[i];
        if (rows > 1) g += g1[i];
        if (rows > 2) g += g2[i];
        if (rows > 3) g += g3[i];
        g *= share;
        float m = first[i] + (g - first[i]) * rate1, v = second[i] + (g * g - second[i]) * rate2;
        first[i] = m;
        second[i] = v;
        new[i] = old[i] - m * rate / (sqrtf(v) + epsilon);
    }
}

/* The sum of four gradients, of which the first may be `sum` itself. */
static void add_rows(const float *g0, const float *restrict g1, const float *restrict g2, const float *restrict g3,
                     float *sum, size_t count) {
    for (size_t i = 0; i < count; i++) sum[i] = g0[i] + g1[i] + g2[i] + g3[i];
}

static void write_past_caches(float *to, const float *from, size_t count) {
    size_t i = 0;
#ifdef __SSE__
    if ((uintptr_t)to % 16 == 0)
        for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
#endif
    memcpy(to + i, from + i, (count - i) * sizeof *to);
}

struct adam {
    float *first, *second, *values[2]; /* moments, and the values of even and of odd steps */
    float **gradients;                 /* in rank order */
    int workers;
    size_t count; /* floats of each of them */
};

static void adam_block(const struct adam *state, size_t at, size_t count, const float *old, float *new, float rate) {
    _Alignas(64) float sum[BLOCK];
    const float *rows[4];
    int used = 0;
    for (int i = 0; i < state->workers; i++) {
        if (used == 4) { /* more than the fused loop takes: what there is becomes one */
            add_rows(rows[0], rows[1], rows[2], rows[3], sum, count);
            rows[0] = sum;
            used = 1;
        }
        rows[used++] = state->gradients[i] + at;
    }
    float *first = state->first + at, *second = state->second + at, share = 1.0f / (float)state->workers;
    switch (used) {
    case 1: adam_rows(1, rows[0], 0, 0, 0, first, second, old, new, count, share, rate); break;
    case 2: adam_rows(2, rows[0], rows[1], 0, 0, first, second, old, new, count, share, rate); break;
    case 3: adam_rows(3, rows[0], rows[1], rows[2], 0, first, second, old, new, count, share, rate); break;
    default: adam_rows(4, rows[0], rows[1], rows[2], rows[3], first, second, old, new, count, share, rate);
    }
}

/* Make values[(step + 1) % 2] of values[step % 2], in the share of one thread of several. */
static void adam_share(const struct adam *state, int step, int thread, int threads) {
    _Alignas(64) float made[BLOCK];
    double rate = LEARNING_RATE * sqrt(1 - pow(BETA2, step + 1)) / (1 - pow(BETA1, step + 1));
    size_t blocks = (state->count + BLOCK - 1) / BLOCK;
    size_t start = blocks * (size_t)thread / (size_t)threads * BLOCK;
    size_t stop = blocks * (size_t)(thread + 1) / (size_t)threads * BLOCK;
    if (stop > state->count) stop = state->count;
    const float *old = state->values[step % 2];
    float *new = state->values[(step + 1) % 2];
    int streamed = state->count > STREAMED_FLOATS;
    for (size_t at = start; at < stop; at += BLOCK) {
        size_t count = stop - at < BLOCK ? stop - at : BLOCK;
        adam_block(state, at, count, old + at, streamed ? made : new + at, (float)rate);
        if (streamed) write_past_caches(new + at, made, count);
    }
#ifdef __SSE__
    if (streamed) _mm_sfence(); /* others send what was streamed */
#endif
}

/* Fill a gradient with numbers between -0.005 and 0.005 that differ by rank: none makes a moment denormal. */
static void fill_gradient(float *gradient, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) {
        uint32_t mixed = (uint32_t)i * 2654435761u + (uint32_t)rank * 2246822519u;
        gradient[i] = ((float)(mixed >> 8) / 16777216.0f - 0.5f) * 0.01f;
    }
}
