// The recursions of recursion.py. LANES draws go through all rounds together: what a round needs of later ones stays in the cache.

#include <stdint.h>

#define LANES 32

typedef double Lanes __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

static Lanes load(const double *from, int64_t count)
{
    if (count >= LANES)
        return *(const Lanes *)from;
    Lanes own = {0};
    for (int64_t j = 0; j < count; j++)
        own[j] = from[j];
    return own;
}

static void store(Lanes now, int64_t count, double *firsts)
{
    for (int64_t j = 0; j < LANES && j < count; j++)
        firsts[j] = now[j];
}

// A ring of `separation` + 1 rounds of `size` numbers, 1 after the last round: each new round takes the place of the oldest.
typedef struct {
    Lanes *ring, *last, *now, *next, *after;
    int64_t size;
} Rows;

static Rows start(double *memory, int64_t separation, int64_t size)
{
    Lanes *ring = (Lanes *)memory, *last = ring + separation * size;
    for (int64_t i = 0; i < (separation + 1) * size; i++)
        ring[i] = (Lanes){0} + 1;
    return (Rows){ring, last, ring, ring, last, size};
}

static void step(Rows *rows)
{
    rows->next = rows->now;
    rows->now = rows->after;
    rows->after = rows->after == rows->ring ? rows->last : rows->after - rows->size;
}

void without_tail(const double *restrict weights, int64_t rounds, int64_t draws, int64_t separation, double rest,
                  double *restrict ring, int64_t kept, double *restrict firsts)
{
    for (int64_t begin = 0; begin < draws; begin += LANES) {
        Rows rows = start(ring, separation, 1);
        for (int64_t t = rounds - 1; t >= 0; t--) {
            step(&rows);
            *rows.now = *rows.next * rest + load(weights + t * draws + begin, draws - begin) * *rows.after;
            if (t < kept)
                store(*rows.now, draws - begin, firsts + t * draws + begin);
        }
    }
}

void with_tail(const double *restrict weights, int64_t rounds, int64_t draws, int64_t separation, int64_t points,
               const int64_t *restrict stay_at, const double *restrict stay, const int64_t *restrict take_at,
               const double *restrict take, const int64_t *restrict kinds, double *restrict ring, int64_t kept,
               double *restrict firsts)
{
    for (int64_t begin = 0; begin < draws; begin += LANES) {
        Rows rows = start(ring, separation, points);
        for (int64_t t = rounds - 1; t >= 0; t--) {
            step(&rows);
            const int64_t *at = take_at + kinds[t] * points;
            const double *of = take + kinds[t] * points * 2;
            Lanes own = load(weights + t * draws + begin, draws - begin);
            for (int64_t i = 0; i < points; i++) {
                const Lanes *one = rows.next + stay_at[i], *two = rows.after + at[i];
                rows.now[i] = (one[0] * stay[2 * i] + one[1] * stay[2 * i + 1]) + own * (two[0] * of[2 * i] + two[1] * of[2 * i + 1]);
            }
            if (t < kept)
                store(rows.now[points - 1], draws - begin, firsts + t * draws + begin);
        }
    }
}
