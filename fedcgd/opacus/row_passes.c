// The passes of row_passes.py over `rows` rows of `columns` numbers each.

#include <stdint.h>

#define LANES 32
#define TILE 2048  // numbers of the total, 16 KiB

void squares(const float *restrict values, int64_t rows, int64_t columns, double *restrict sums)
{
    for (int64_t i = 0; i < rows; i++) {
        const float *restrict row = values + i * columns;
        double lanes[LANES] = {0}, sum = 0;
        int64_t begin = 0;
        for (; begin + LANES <= columns; begin += LANES)
            for (int j = 0; j < LANES; j++)
                lanes[j] += (double)row[begin + j] * (double)row[begin + j];
        for (int64_t j = begin; j < columns; j++)
            lanes[j - begin] += (double)row[j] * (double)row[j];
        for (int j = 0; j < LANES; j++)
            sum += lanes[j];
        sums[i] = sum;
    }
}

// A tile of the total stays in the first cache while the rows go by, four at a time, each addition rounded as if alone.
void add(const float *restrict values, int64_t rows, int64_t columns, int64_t first, int64_t last,
         const double *restrict factors, double *restrict total)
{
    for (int64_t begin = first; begin < last; begin += TILE) {
        int64_t size = last - begin < TILE ? last - begin : TILE, i = 0;
        double *restrict out = total + begin;
        for (; i + 4 <= rows; i += 4) {
            const float *restrict a = values + i * columns + begin, *restrict b = a + columns;
            const float *restrict c = b + columns, *restrict d = c + columns;
            double f = factors[i], g = factors[i + 1], h = factors[i + 2], k = factors[i + 3];
            for (int64_t j = 0; j < size; j++)
                out[j] = out[j] + f * (double)a[j] + g * (double)b[j] + h * (double)c[j] + k * (double)d[j];
        }
        for (; i < rows; i++) {
            const float *restrict row = values + i * columns + begin;
            for (int64_t j = 0; j < size; j++)
                out[j] += factors[i] * (double)row[j];
        }
    }
}
