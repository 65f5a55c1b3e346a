// The sums of digests.py: of each of `count` arrays of `octets` octets one for each block of `block` words, one after the other.

#include <stdint.h>

typedef int32_t word __attribute__((aligned(1), may_alias));

void digests(const int64_t *restrict addresses, const int64_t *restrict octets, int64_t count, int64_t block,
             const int64_t *restrict weights, int64_t *restrict sums)
{
    for (int64_t i = 0; i < count; i++) {
        const word *words = (const word *)(intptr_t)addresses[i];
        int64_t whole = octets[i] / 4, rest = octets[i] % 4;
        for (int64_t begin = 0; begin < whole + (rest > 0); begin += block) {
            int64_t size = whole - begin < block ? whole - begin : block;
            uint64_t sum = 0;
            for (int64_t j = 0; j < size; j++)
                sum += (uint64_t)((int64_t)words[begin + j] * weights[j]);
            if (size < block && rest > 0) {  // a word that ends in zeros
                uint32_t last = 0;
                for (int64_t k = 0; k < rest; k++)
                    last |= (uint32_t)((const uint8_t *)(words + whole))[k] << 8 * k;
                sum += (uint64_t)((int64_t)(int32_t)last * weights[size]);
            }
            *sums++ = (int64_t)sum;
        }
    }
}
