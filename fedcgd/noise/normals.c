// chacha20.py, box_muller.py and the addition to the grid in one pass over the sum, with the same bits.
//
// Nothing here defines anything: each function repeats arithmetic that is written out with NumPy elsewhere, in the same order,
// every operation rounded by itself. Constants are those of box_muller.py, which a test holds. Short loops over the columns of a
// tile become vector instructions, and what they share stays in the first cache.

#include <stdint.h>

#define COLUMNS 128
#define NUMBERS 12
#define MAGNITUDE 2147483647
#define MANTISSA 8388607
#define UNIT 0x1.0000000000000p+93f
#define TWO_UNITS 0x1.0000000000000p+94f
#define UNIT_BITS 1845493760
#define EXPONENT -0x1.62e4300000000p-24f
#define ODD 1
#define SHARE 2147483644
#define FRACTION 0x1.0000000000000p-31f
#define TWO_FRACTIONS 0x1.0000000000000p-30f
#define ONE 0x1.0000000000000p+0f
#define TWO 0x1.0000000000000p+1f
#define ATANH_0 0x1.fffffa0000000p+0f
#define ATANH_1 0x1.5561920000000p-1f
#define ATANH_2 0x1.9565660000000p-2f
#define ATANH_3 0x1.5e798a0000000p-2f
#define SINE_0 0x1.1c58320000000p+0f
#define SINE_1 -0x1.d3ba3e0000000p-4f
#define SINE_2 0x1.cd8e5a0000000p-9f
#define SINE_3 -0x1.aa7d8a0000000p-15f
#define TILE (NUMBERS * COLUMNS)
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define SIDE 16
#elif defined(__AVX2__)
#define SIDE 8
#else
#define SIDE 4
#endif
typedef uint32_t Words __attribute__((vector_size(4 * SIDE), may_alias));  // the same word of SIDE blocks, in one register

INLINE int32_t bits(float x) { union { float x; int32_t i; } same = {.x = x}; return same.i; }
INLINE float number(int32_t i) { union { int32_t i; float x; } same = {.i = i}; return same.x; }
INLINE int64_t wide_bits(double x) { union { double x; int64_t i; } same = {.x = x}; return same.i; }

#define TURNED(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define QUARTER(a, b, c, d)                             \
    a += b; d ^= a; d = TURNED(d, 16);                  \
    c += d; b ^= c; b = TURNED(b, 12);                  \
    a += b; d ^= a; d = TURNED(d, 8);                   \
    c += d; b ^= c; b = TURNED(b, 7);

// w[i][c] = word i of block tile * COLUMNS + c.
static void fill(const uint32_t *key, int64_t tile, int32_t *w)
{
    static const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // "expand 32-byte k"
    uint64_t first = (uint64_t)tile * COLUMNS;  // no carry within a tile: COLUMNS divides 2^32
    Words zero = {0}, column;
    for (int i = 0; i < SIDE; i++)
        column[i] = i;
    for (int c = 0; c < COLUMNS; c += SIDE) {
        Words start[16], x[16];
        for (int i = 0; i < 4; i++)
            start[i] = zero + constants[i];
        for (int i = 0; i < 8; i++)
            start[4 + i] = zero + key[i];
        start[12] = column + (uint32_t)(first + c);
        start[13] = zero + (uint32_t)(first >> 32);
        start[14] = start[15] = zero;
        for (int i = 0; i < 16; i++)
            x[i] = start[i];
        for (int i = 0; i < 10; i++) {
            QUARTER(x[0], x[4], x[8], x[12])
            QUARTER(x[1], x[5], x[9], x[13])
            QUARTER(x[2], x[6], x[10], x[14])
            QUARTER(x[3], x[7], x[11], x[15])
            QUARTER(x[0], x[5], x[10], x[15])
            QUARTER(x[1], x[6], x[11], x[12])
            QUARTER(x[2], x[7], x[8], x[13])
            QUARTER(x[3], x[4], x[9], x[14])
        }
        for (int i = 0; i < 16; i++)
            *(Words *)(w + i * COLUMNS + c) = x[i] + start[i];
    }
}

INLINE void make_lengths(const int32_t *k, float *lengths)
{
    const int32_t *k1 = k, *k2 = k + COLUMNS, *k3 = k2 + COLUMNS;
    for (int c = 0; c < COLUMNS; c++) {
        float factors = (float)(k1[c] | ODD) * (float)(k2[c] | ODD);
        int32_t product = bits(factors * (float)(k3[c] | ODD)) & MAGNITUDE;
        int32_t mantissa = (product & MANTISSA) | UNIT_BITS;
        float exponent = (float)(product - mantissa) * EXPONENT;
        float above = number(mantissa) - UNIT;
        float s = above / (above + TWO_UNITS), q = s * s;
        lengths[c] = (exponent - (((ATANH_3 * q + ATANH_2) * q + ATANH_1) * q + ATANH_0) * s) * TWO_FRACTIONS;
    }
}

INLINE void add_pair(int which, const float *lengths, const int32_t *v, const int32_t *k, const int32_t *a, double weight,
                     double *rows)
{
    double *cosines = rows, *sines = rows + COLUMNS;
    for (int c = 0; c < COLUMNS; c++) {
        int32_t first = (v[c] & SHARE) | 1, second = (v[COLUMNS + c] & SHARE) | 2;
        int32_t low = first < second ? first : second, high = first < second ? second : first;
        int32_t share = which == 0 ? low : which == 1 ? high - low : MAGNITUDE - high + ODD;
        float length = __builtin_sqrtf((float)share * lengths[c]);
        double radius = (double)number(bits(length) ^ (k[c] & ~MAGNITUDE)) * weight;
        float x = (float)a[c] * FRACTION, q = x * x;
        float half = (((SINE_3 * q + SINE_2) * q + SINE_1) * q + SINE_0) * x;
        float rest = TWO - half * half;
        cosines[c] += radius * (double)(rest - ONE);
        sines[c] += radius * (double)(half * __builtin_sqrtf(rest));
    }
}

// noise[i][c] += weight * (number i of block c).
void add_normals(const int32_t *w, double weight, double *noise)
{
    float lengths[COLUMNS];
    for (int g = 0; g < 2; g++) {
        const int32_t *k = w + 8 * g * COLUMNS, *v = k + 3 * COLUMNS, *a = v + 2 * COLUMNS;
        double *rows = noise + 6 * g * COLUMNS;
        make_lengths(k, lengths);
        add_pair(0, lengths, v, k, a, weight, rows);
        add_pair(1, lengths, v, k + COLUMNS, a + COLUMNS, weight, rows + 2 * COLUMNS);
        add_pair(2, lengths, v, k + 2 * COLUMNS, a + 2 * COLUMNS, weight, rows + 4 * COLUMNS);
    }
}

#define ALIGNED _Alignas(64)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// total += round(sum over j of weights[j] * Z_j + width * words); `keys` are those of the Z_j, `smoothing` that of the words.
void add_to_grid(int64_t *total, int64_t size, int64_t start, const uint32_t *keys, const double *weights, int64_t terms,
                 const uint32_t *smoothing, double width)
{
    const double rounding = 0x1.8p52;  // x + this, for |x| < 2^51, is rounded as by rint; its lowest bits hold the whole number
    ALIGNED int32_t w[16 * COLUMNS];
    ALIGNED double noise[TILE];
    int64_t stop = start + size;
    for (int64_t tile = start / TILE; tile * TILE < stop; tile++) {
        for (int i = 0; i < TILE; i++)
            noise[i] = 0;
        for (int64_t j = 0; j < terms; j++) {
            fill(keys + 8 * j, tile, w);
            add_normals(w, weights[j], noise);
        }
        fill(smoothing, tile, w);
        int64_t begin = tile * TILE, low = MAX(start, begin), high = MIN(stop, begin + TILE);
        for (int64_t i = low; i < high; i++) {
            double value = noise[i - begin] + width * (double)w[i - begin];
            total[i - start] += wide_bits(value + rounding) - wide_bits(rounding);
        }
    }
}

// out = Z.
void fill_normals(float *out, int64_t size, int64_t start, const uint32_t *key)
{
    ALIGNED int32_t w[16 * COLUMNS];
    ALIGNED double noise[TILE];
    int64_t stop = start + size;
    for (int64_t tile = start / TILE; tile * TILE < stop; tile++) {
        for (int i = 0; i < TILE; i++)
            noise[i] = 0;
        fill(key, tile, w);
        add_normals(w, 1, noise);
        int64_t begin = tile * TILE, low = MAX(start, begin), high = MIN(stop, begin + TILE);
        for (int64_t i = low; i < high; i++)
            out[i - start] = (float)noise[i - begin];
    }
}
