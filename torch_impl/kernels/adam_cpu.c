/* Adam in one pass: 28 bytes an element for float32, 30 for bfloat16 with a float32 master, as on CUDA
   (torch_impl/kernels/adam.py). Every operation rounds once: compile without contraction. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* of one parameter; master is NULL where there is none */
    void *param;
    const void *grad;
    float *exp_avg, *exp_avg_sq, *master;
    int64_t size;
} Tensors;

typedef struct { /* a1 = 1 - b1, a2 = 1 - b2; c1 and c2 correct the bias of the moments */
    float lr, weight_decay, b1, a1, b2, a2, c1, c2, eps, grad_factor;
} Rule;

typedef float float32;
typedef uint16_t bfloat16;

static inline float widened_float32(float32 x) { return x; }

static inline float32 rounded_float32(float x) { return x; }

static inline float widened_bfloat16(bfloat16 high) {
    uint32_t bits = (uint32_t)high << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline bfloat16 rounded_bfloat16(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof x);
    uint32_t high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7FC0 : (bfloat16)high;
}

/* update: constants for has_master and adam_w_mode make loops without branches, which vectorize. A parameter that is not
   the rounded master was changed from outside: it wins.
   adam: elements first to last (exclusive), counted through all tensors in turn; threads share the work by such ranges. */
#define ADAM(TYPE)                                                                                                     \
    static inline __attribute__((always_inline)) void update_##TYPE(                                                   \
        const Tensors *t, int64_t first, int64_t last, const Rule *rule, int has_master, int adam_w_mode) {            \
        const Rule r = *rule;                                                                                          \
        TYPE *restrict param = t->param;                                                                               \
        const TYPE *restrict grad = t->grad;                                                                           \
        float *restrict exp_avg = t->exp_avg, *restrict exp_avg_sq = t->exp_avg_sq, *restrict master = t->master;      \
        for (int64_t i = first; i < last; i++) {                                                                       \
            float p = widened_##TYPE(param[i]), g = widened_##TYPE(grad[i]) * r.grad_factor;                           \
            if (has_master) p = widened_##TYPE(rounded_##TYPE(master[i])) == p ? master[i] : p;                        \
            if (!adam_w_mode) g += r.weight_decay * p;                                                                 \
            float m = r.b1 * exp_avg[i] + r.a1 * g;                                                                    \
            float v = r.b2 * exp_avg_sq[i] + r.a2 * g * g;                                                             \
            float u = m / r.c1 / (sqrtf(v / r.c2) + r.eps);                                                            \
            if (adam_w_mode) u += r.weight_decay * p;                                                                  \
            p -= r.lr * u;                                                                                             \
            exp_avg[i] = m;                                                                                            \
            exp_avg_sq[i] = v;                                                                                         \
            if (has_master) master[i] = p;                                                                             \
            param[i] = rounded_##TYPE(p);                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    void adam_##TYPE(const Tensors *tensors, int64_t count, int64_t first, int64_t last, const Rule *rule,             \
                     int adam_w_mode) {                                                                                \
        for (int64_t k = 0; k < count && last > 0; k++) {                                                              \
            const Tensors *t = tensors + k;                                                                            \
            int64_t from = first > 0 ? first : 0, to = last < t->size ? last : t->size;                                \
            if (from < to) {                                                                                           \
                if (t->master && adam_w_mode) update_##TYPE(t, from, to, rule, 1, 1);                                  \
                else if (t->master) update_##TYPE(t, from, to, rule, 1, 0);                                            \
                else if (adam_w_mode) update_##TYPE(t, from, to, rule, 0, 1);                                          \
                else update_##TYPE(t, from, to, rule, 0, 0);                                                           \
            }                                                                                                          \
            first -= t->size;                                                                                          \
            last -= t->size;                                                                                           \
        }                                                                                                              \
    }

ADAM(float32)
ADAM(bfloat16)
