// What overlaps.py does: for each tuple of users, its rounds one after another, as sorted numbers t·users + user.

#include <stdint.h>

void overlaps(const int32_t *restrict turns, int64_t tuples, int64_t most, int32_t users, int64_t rounds,
              const double *restrict near, int64_t width, const double *restrict tail, const double *restrict scales,
              const double *restrict powers, double *restrict left, double *restrict found)
{
    for (int64_t tuple = 0; tuple < tuples; tuple++) {
        const int32_t *mine = turns + tuple * most;
        double *block = found + tuple * users * users;
        int32_t last = 0;
        for (int64_t i = 0; i < users * users; i++)
            block[i] = 0;
        for (int32_t a = 0; a < users; a++)
            left[a] = 0;
        for (int64_t e = 0; e < most; e++) {
            int32_t t = mine[e] / users, user = mine[e] % users;
            double *row = block + user * users;
            if (t >= rounds)
                break;
            for (int32_t a = 0; a < users; a++) {
                left[a] *= powers[t - last];
                row[a] += left[a] * tail[t];
            }
            left[user] += scales[t];
            last = t;
            for (int64_t f = e - 1; f >= 0; f--) {
                int32_t lag = t - mine[f] / users;
                if (lag >= width)
                    break;
                row[mine[f] % users] += near[lag * rounds + t];
            }
        }
    }
}
