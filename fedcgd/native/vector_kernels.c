// The passes of passes.py. Lane j of LANES sums the terms j, j + LANES, ... one after the other, whatever the processor.

#include <stdint.h>

#define LANES 256

static void clear(double *lanes)
{
    for (int j = 0; j < LANES; j++)
        lanes[j] = 0;
}

// `term`, an expression of i, goes to each lane; the short loop inside becomes vector instructions.
#define SUM_TO_LANES(size, term)                                     \
    for (int64_t begin = 0; begin < (size); begin += LANES) {        \
        int64_t end = (size) - begin < LANES ? (size) - begin : LANES; \
        for (int64_t j = 0; j < end; j++) {                          \
            int64_t i = begin + j;                                   \
            double value = (term);                                   \
            lanes[j] += value * value;                               \
        }                                                            \
    }

void difference(const float *restrict x, const float *restrict y, int64_t size, double *restrict lanes)
{
    clear(lanes);
    SUM_TO_LANES(size, (double)x[i] - (double)y[i])
}

void squares(const float *restrict rows, int64_t count, int64_t size, double *restrict sums)
{
    double lanes[LANES];
    for (int64_t row = 0; row < count; row++) {
        const float *restrict x = rows + row * size;
        clear(lanes);
        SUM_TO_LANES(size, (double)x[i])
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int j = 0; j < half; j++)
                lanes[j] += lanes[half + j];
        sums[row] += lanes[0];
    }
}

void accumulate(const float *restrict rows, int64_t count, int64_t size, const double *restrict factors, double scale,
                int64_t *restrict total)
{
    for (int64_t row = 0; row < count; row++) {
        const float *restrict x = rows + row * size;
        double factor = factors[row];
        if (factor == 0)
            continue;
        for (int64_t i = 0; i < size; i++)
            total[i] += (int64_t)((double)x[i] * factor * scale);
    }
}

// Stretch by stretch, because `out` may lie in what was read of `total`.
void mean(const float *model, const int64_t *total, int64_t size, double step, double unit, double count, float *out)
{
    float made[LANES];
    for (int64_t begin = 0; begin < size; begin += LANES) {
        int64_t end = size - begin < LANES ? size - begin : LANES;
        for (int64_t j = 0; j < end; j++)
            made[j] = (float)((double)model[begin + j] + (double)total[begin + j] * step * unit / count);
        for (int64_t j = 0; j < end; j++)
            out[begin + j] = made[j];
    }
}

#define FOR_INTEGERS(integer, steps, add)                                                                       \
    int64_t steps(const float *restrict x, const float *restrict y, int64_t size, double factor, double scale,  \
                  integer *restrict out)                                                                        \
    {                                                                                                           \
        int64_t sum = 0;                                                                                        \
        for (int64_t i = 0; i < size; i++) {                                                                    \
            out[i] = (integer)(((double)x[i] - (double)y[i]) * factor * scale);                                 \
            sum += out[i];                                                                                      \
        }                                                                                                       \
        return sum;                                                                                             \
    }                                                                                                           \
                                                                                                                \
    int64_t add(const integer *restrict x, int64_t size, int64_t *restrict total, double *restrict lanes)       \
    {                                                                                                           \
        int64_t sum = 0;                                                                                        \
        clear(lanes);                                                                                           \
        for (int64_t begin = 0; begin < size; begin += LANES) {                                                 \
            int64_t end = size - begin < LANES ? size - begin : LANES;                                          \
            for (int64_t j = 0; j < end; j++) {                                                                 \
                integer step = x[begin + j];                                                                    \
                lanes[j] += (double)step * (double)step;                                                        \
                total[begin + j] += step;                                                                       \
                sum += step;                                                                                    \
            }                                                                                                   \
        }                                                                                                       \
        return sum;                                                                                             \
    }

FOR_INTEGERS(int32_t, steps_32, add_32)
FOR_INTEGERS(int64_t, steps_64, add_64)
