// The recursions of recursion.py. LANES draws go through all rounds together: what a round needs of later ones stays in the cache.

#include <stdint.h>

#define LANES 16

static double *row(double *ring, int64_t t, int64_t separation, int64_t size)
{
    return ring + t % (separation + 1) * size;
}

static void start(double *ring, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        ring[i] = 1;
}

static void load(const double *weights, int64_t count, double *own)
{
    for (int64_t j = 0; j < LANES; j++)
        own[j] = j < count ? weights[j] : 0;
}

static void store(const double *now, int64_t count, double *firsts)
{
    for (int64_t j = 0; j < count; j++)
        firsts[j] = now[j];
}

void without_tail(const double *restrict weights, int64_t rounds, int64_t draws, int64_t separation, double rest,
                  double *restrict ring, int64_t kept, double *restrict firsts)
{
    double own[LANES];
    for (int64_t begin = 0; begin < draws; begin += LANES) {
        int64_t count = draws - begin < LANES ? draws - begin : LANES;
        start(ring, (separation + 1) * LANES);
        for (int64_t t = rounds - 1; t >= 0; t--) {
            double *now = row(ring, t, separation, LANES);
            const double *next = row(ring, t + 1, separation, LANES);
            const double *after = row(ring, t + separation, separation, LANES);
            load(weights + t * draws + begin, count, own);
            for (int j = 0; j < LANES; j++)
                now[j] = next[j] * rest + own[j] * after[j];
            if (t < kept)
                store(now, count, firsts + t * draws + begin);
        }
    }
}

void with_tail(const double *restrict weights, int64_t rounds, int64_t draws, int64_t separation, int64_t points,
               const int64_t *restrict stay_at, const double *restrict stay, const int64_t *restrict take_at,
               const double *restrict take, const int64_t *restrict kinds, double *restrict ring, int64_t kept,
               double *restrict firsts)
{
    double own[LANES];
    int64_t size = points * LANES;
    for (int64_t begin = 0; begin < draws; begin += LANES) {
        int64_t count = draws - begin < LANES ? draws - begin : LANES;
        start(ring, (separation + 1) * size);
        for (int64_t t = rounds - 1; t >= 0; t--) {
            double *now = row(ring, t, separation, size);
            const double *next = row(ring, t + 1, separation, size);
            const double *after = row(ring, t + separation, separation, size);
            const int64_t *at = take_at + kinds[t] * points;
            const double *of = take + kinds[t] * points * 2;
            load(weights + t * draws + begin, count, own);
            for (int64_t i = 0; i < points; i++) {
                const double *one = next + stay_at[i] * LANES, *two = after + at[i] * LANES;
                double a = stay[2 * i], b = stay[2 * i + 1], c = of[2 * i], d = of[2 * i + 1];
                double found[LANES];
                for (int j = 0; j < LANES; j++)
                    found[j] = (one[j] * a + one[j + LANES] * b) + own[j] * (two[j] * c + two[j + LANES] * d);
                for (int j = 0; j < LANES; j++)
                    now[i * LANES + j] = found[j];
            }
            if (t < kept)
                store(now + size - LANES, count, firsts + t * draws + begin);
        }
    }
}
