// Pairs of users, each from one round in which one of the two takes part to the next.

#include <stdint.h>

typedef double uniform(void *);

typedef struct {
    int64_t rounds, separation, limit, states, free, levels;
    double rate;
    const int64_t *ages, *free_index, *taken;
    const double *waiting, *after, *both, *overlaps, *gained, *together, *gained_together, *rests;
} Tables;

static int64_t passed(const Tables *of, int64_t state, int64_t rounds)
{
    int64_t left = of->limit - of->ages[state];
    return state + (rounds < left ? rounds : left);
}

static int64_t beyond(int64_t rounds, int64_t bound)
{
    return rounds > bound ? rounds - bound : 0;
}

static double weight(const Tables *of, int64_t t, int64_t first, int64_t second, int64_t rounds)
{
    int64_t free = beyond(rounds, beyond(of->separation, of->ages[first]));
    free += beyond(rounds, beyond(of->separation, of->ages[second]));
    int64_t one = passed(of, first, rounds), two = passed(of, second, rounds);
    if (of->free_index[two] < 0) {
        int64_t kept = one;
        one = two;
        two = kept;
    }
    return of->rests[free] * of->waiting[((t + rounds) * of->states + one) * of->free + of->free_index[two]];
}

static int64_t quiet(const Tables *of, int64_t t, int64_t first, int64_t second, double u)
{
    int64_t low = 0, high = of->rounds - t + 1;
    double limit = u * weight(of, t, first, second, 0);
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (weight(of, t, first, second, middle) > limit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

void draw(uniform *next, void *state, const Tables *of, int64_t count, int64_t *restrict t, int64_t *restrict first,
          int64_t *restrict second, int64_t most, int32_t *restrict turns, int64_t *restrict used,
          double *restrict drawn, int64_t *restrict place)
{
    int64_t total = count, states = of->states, levels = of->levels;
    double p = of->rate;
    for (int64_t i = 0; i < count; i++)
        place[i] = i;
    for (;;) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t one = first[i], two = second[i];
            int64_t age = of->ages[one] > of->ages[two] ? of->ages[one] : of->ages[two];
            int64_t rounds = beyond(of->separation, age), now = t[i] + rounds;
            if (now >= of->rounds)
                continue;
            one = passed(of, one, rounds);
            two = passed(of, two, rounds);
            rounds = quiet(of, now, one, two, next(state));
            now += rounds;
            if (now >= of->rounds)
                continue;
            t[left] = now;
            first[left] = passed(of, one, rounds);
            second[left] = passed(of, two, rounds);
            place[left++] = place[i];
        }
        count = left;
        if (count == 0)
            return;
        for (int64_t i = 0; i < count; i++) {
            int64_t one = first[i], two = second[i], now = t[i];
            int swap = of->free_index[two] < 0;
            int64_t free = swap ? one : two, other = swap ? two : one;
            int either = of->free_index[other] >= 0;
            const double *after = of->after + now * levels * states;
            double by_other = of->gained[now * states + other], by_free = of->gained[now * states + free];
            double alone = (either ? p * (1 - p) : p) * by_other * after[of->taken[free] * states + other];
            double other_alone = (either ? p * (1 - p) : 0) * by_free * after[of->taken[other] * states + free];
            double pair = (either ? p * p : 0) * (by_other * by_free * of->gained_together[now])
                          * of->both[(now * levels + of->taken[free]) * levels + of->taken[other]];
            double u = next(state) * (alone + other_alone + pair);
            int with_free = u < alone || u >= alone + other_alone, with_other = either && u >= alone;
            drawn[place[i]] += with_free * of->overlaps[now * states + other] + with_other * of->overlaps[now * states + free]
                               + (with_free && with_other) * of->together[now];
            int with_first = swap ? with_free : with_other, with_second = swap ? with_other : with_free;
            if (with_first)
                turns[used[place[i]]++ * total + place[i]] = (int32_t)now;
            if (with_second)
                turns[(most + used[total + place[i]]++) * total + place[i]] = (int32_t)now;
            first[i] = with_first ? of->taken[one] * of->limit : passed(of, one, 1);
            second[i] = with_second ? of->taken[two] * of->limit : passed(of, two, 1);
            t[i] = now + 1;
        }
    }
}
