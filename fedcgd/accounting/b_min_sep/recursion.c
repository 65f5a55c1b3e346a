// The recursions of recursion.py through a few rounds, from the last to the first, a tile of draws at a time.

#include <stdint.h>

#define TILE 256  // draws: what b + 1 rounds hold of them stays in the cache

void bands(const double *restrict weights, int64_t rounds, int64_t draws, int64_t first, int64_t separation, double rest,
           double *restrict ring)
{
    int64_t kept = separation + 1;
    for (int64_t begin = 0; begin < draws; begin += TILE) {
        int64_t size = draws - begin < TILE ? draws - begin : TILE;
        for (int64_t i = rounds - 1; i >= 0; i--) {
            const double *weight = weights + i * draws + begin;
            const double *next = ring + (first + i + 1) % kept * draws + begin;
            const double *later = ring + (first + i + separation) % kept * draws + begin;
            double *restrict now = ring + (first + i) % kept * draws + begin;
            for (int64_t j = 0; j < size; j++)
                now[j] = next[j] * rest + weight[j] * later[j];
        }
    }
}

void tail(const double *restrict weights, int64_t rounds, int64_t draws, int64_t first, int64_t separation,
          int64_t points, const int64_t *restrict stay_at, const double *restrict stay, const int64_t *restrict kinds,
          const int64_t *restrict take_at, const double *restrict take, double *restrict ring, double *restrict firsts,
          int64_t kept_firsts)
{
    int64_t kept = separation + 1;
    for (int64_t begin = 0; begin < draws; begin += TILE) {
        int64_t size = draws - begin < TILE ? draws - begin : TILE;
        for (int64_t i = rounds - 1; i >= 0; i--) {
            int64_t t = first + i, kind = kinds[t];
            const double *weight = weights + i * draws + begin;
            const double *next = ring + (t + 1) % kept * points * draws + begin;
            const double *later = ring + (t + separation) % kept * points * draws + begin;
            double *now = ring + t % kept * points * draws + begin;
            for (int64_t q = 0; q < points; q++) {
                const double *a = next + stay_at[q] * draws, *b = a + draws;
                const double *c = later + take_at[kind * points + q] * draws, *d = c + draws;
                double e = stay[q], f = stay[points + q];
                double g = take[2 * kind * points + q], h = take[(2 * kind + 1) * points + q];
                double *restrict out = now + q * draws;
                for (int64_t j = 0; j < size; j++)
                    out[j] = (e * a[j] + f * b[j]) + (g * c[j] + h * d[j]) * weight[j];
            }
            if (t < kept_firsts)
                for (int64_t j = 0; j < size; j++)
                    firsts[t * draws + begin + j] = now[(points - 1) * draws + j];
        }
    }
}
