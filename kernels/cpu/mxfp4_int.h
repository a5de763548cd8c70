// MXFP4 rows times a few float32 rows, as integers where bytes can be multiplied (AVX-512 VNNI and VBMI).
//
//   a group of x    X 2^(e - 30)       2^e about its largest; X in four signed digits of a byte each
//   a code          2 w + 12           0 .. 24, from a table of bytes: vpdpbusd multiplies unsigned by signed
//   a lane          8 columns          a sum for each digit, all exact, that starts at -12 times the digits' own
//
// What is within 2^-7 of the largest of its group is kept exactly and the rest to 2^-31 of that, so sums are
// closer than those of floats. A sum also starts at the bits of a float whose last place is worth as much as
// its digit: it ends as that float plus the sum, with nothing to convert or shift. A row with numbers for which
// this does not work, not finite, from 2^15 on, or a group of nothing but dust, stays in floats.
#pragma once
#include "mxfp4.h"

namespace k3 {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
constexpr bool INTEGERS = true;
constexpr int DIGITS = 4;
constexpr int VECTORS_OF_X = 3 * DIGITS;  // of a unit: each digit's even and odd columns, and where sums start
constexpr float ZERO[DIGITS] = {0x1.8p31f, 0x1.8p23f, 0x1.8p15f, 0x1.8p7f};  // last places 2^8, 1, 2^-8, 2^-16
constexpr uint32_t DUST = (127u - 100) << 23, TOO_LARGE = (127u + 15) << 23;  // the bits of 2^-100 and 2^15

// Floats that a formed row takes: whether it has digits, its units, and the scales of its groups, of which 16 are
// read at once.
inline int64_t formed_room(int64_t columns) {
  const int64_t units = padded(columns) / UNIT;
  return W + units * VECTORS_OF_X * W + (units + 7) / 4 * W;
}

inline bool has_digits(const float* row) { return *row != 0.0f; }
inline const float* in_floats(const float* row) { return row + W; }  // the dealt row, where there are no digits
inline const float* scales_of_row(const float* row, int64_t columns) {
  return row + W + padded(columns) / UNIT * VECTORS_OF_X * W;
}

// From the X of 16 columns to eight bytes for each vector of a digit, even columns before odd ones.
struct ByDigit {
  alignas(64) uint8_t of[64] = {};
  constexpr ByDigit() {
    for (int i = 0; i < 64; i++) {
      const int digit = i / 16, odd = i / 8 % 2, lane = i / 4 % 2, pair = i % 4;
      of[i] = uint8_t(4 * (8 * lane + 2 * pair + odd) + 3 - digit);
    }
  }
};
constexpr ByDigit BY_DIGIT;

// The 64-bit numbers v[i][j] and v[j][i] change places.
K3_INLINE void transpose(__m512i (&v)[8]) {
  __m512i t[2][4];
  for (int p = 0; p < 4; p++) {
    t[0][p] = _mm512_unpacklo_epi64(v[2 * p], v[2 * p + 1]);
    t[1][p] = _mm512_unpackhi_epi64(v[2 * p], v[2 * p + 1]);
  }
  for (int h = 0; h < 2; h++) {
    __m512i even[2], odd[2];
    for (int i = 0; i < 2; i++) {
      even[i] = _mm512_shuffle_i64x2(t[h][2 * i], t[h][2 * i + 1], 0x88);
      odd[i] = _mm512_shuffle_i64x2(t[h][2 * i], t[h][2 * i + 1], 0xdd);
    }
    v[h] = _mm512_shuffle_i64x2(even[0], even[1], 0x88);
    v[h + 2] = _mm512_shuffle_i64x2(odd[0], odd[1], 0x88);
    v[h + 4] = _mm512_shuffle_i64x2(even[0], even[1], 0xdd);
    v[h + 6] = _mm512_shuffle_i64x2(odd[0], odd[1], 0xdd);
  }
}

inline float power(int e) {  // 2^e
  const uint32_t bits = uint32_t(e + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A unit of x, of which ``count`` columns are there, and the scales of its groups. False: it has no digits.
K3_INLINE bool form_unit(const float* x, int64_t count, float* out, float* scale) {
  const __m512i carry = _mm512_set1_epi32(0x00808080);  // a byte from 128 on is a negative digit below one more
  const __m512i by_digit = _mm512_load_si512(BY_DIGIT.of), one = _mm512_set1_epi8(1);
  __m512i v[8];
  for (int g = 0; g < UNIT / GROUP; g++) {
    const bool there = g * GROUP < count;
    const vf pair[2] = {there ? load(x + g * GROUP) : vf{}, there ? load(x + g * GROUP + W) : vf{}};
    __m512i sizes[2];
    for (int h = 0; h < 2; h++) sizes[h] = _mm512_and_si512((__m512i)pair[h], _mm512_set1_epi32(0x7fffffff));
    const uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32(sizes[0], sizes[1]));
    if (largest != 0 && (largest < DUST || largest >= TOO_LARGE)) return false;
    const int e = largest ? int((largest + (1 << 17)) >> 23) - 127 : 15;  // |x| < 127/64 2^e: |X| < 127 2^24
    scale[g] = power(e - 15);  // of the second digit, and 2 w for w
    for (int h = 0; h < 2; h++) {
      const __m512i fixed = _mm512_cvtps_epi32((__m512)(pair[h] * power(30 - e)));
      v[2 * g + h] = _mm512_permutexvar_epi8(by_digit, _mm512_xor_si512(_mm512_add_epi32(fixed, carry), carry));
    }
  }
  transpose(v);
  for (int k = 0; k < DIGITS; k++) {
    const __m512i even = _mm512_dpbusd_epi32(_mm512_setzero_si512(), one, v[2 * k]);
    const __m512i own = _mm512_mullo_epi32(_mm512_dpbusd_epi32(even, one, v[2 * k + 1]), _mm512_set1_epi32(12));
    const int zero = int(127 + 31 - 8 * k) << 23 | 1 << 22, less = k == 1 ? int(ZERO[3]) : 0;
    _mm512_storeu_si512(out + 2 * k * W, v[2 * k]);
    _mm512_storeu_si512(out + (2 * k + 1) * W, v[2 * k + 1]);
    _mm512_storeu_si512(out + (2 * DIGITS + k) * W, _mm512_sub_epi32(_mm512_set1_epi32(zero - less), own));
  }
  return true;
}

// x [columns] -> a row in ``out`` [formed_room(columns)] as dot_formed reads it.
inline void form(const float* x, int64_t columns, float* out) {
  float *unit = out + W, *scale = unit + padded(columns) / UNIT * VECTORS_OF_X * W;
  *out = 1.0f;
  for (int64_t c = 0; c < columns; c += UNIT, unit += VECTORS_OF_X * W, scale += UNIT / GROUP)
    if (!form_unit(x + c, columns - c, unit, scale)) {
      *out = 0.0f;
      return deal(x, columns, out + W);
    }
}

// sum[m][i] += the unit w[i] times that unit, at x[m] + at, of M formed rows; scale[m][i] are those of the groups
// of both, the unit's from ``group`` on.
template <int M, int N>
K3_INLINE void dot_formed_unit(const float* const* x, int64_t at, const Unit (&w)[N],
                               const float (*scale)[N][PART / GROUP], int64_t group, vf (*sum)[N]) {
  const __m128i codes = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m512i table = _mm512_broadcast_i32x4(codes);
  __m512i even[N], odd[N];  // an index may have anything above its low four bits: the table is there four times
  for (int i = 0; i < N; i++) {
    even[i] = _mm512_permutexvar_epi8(w[i].codes, table);
    odd[i] = _mm512_permutexvar_epi8(_mm512_srli_epi16(w[i].codes, 4), table);
  }
  for (int m = 0; m < M; m++) {
    vf all[N];
#pragma GCC unroll 4
    for (int k = 0; k < DIGITS; k++) {
      const float* digit = x[m] + at + 2 * k * W;
      const __m512i a = _mm512_loadu_si512(digit), b = _mm512_loadu_si512(digit + W);
      const __m512i start = _mm512_loadu_si512(x[m] + at + (2 * DIGITS + k) * W);
      for (int i = 0; i < N; i++) {
        const vf s = (vf)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, even[i], a), odd[i], b);
        // the second digit starts ZERO[3] lower; only the last two sums round, and zero stays zero
        all[i] = k ? all[i] + s : s - (ZERO[0] + ZERO[1] + ZERO[2]);
      }
    }
    for (int i = 0; i < N; i++) sum[m][i] += all[i] * factor(scale[m][i] + group);
  }
}

// out[m][i] = <x[m], row i>: as dot_packed, for M formed rows. Inside its caller's loop it would lack registers.
template <int M>
__attribute__((noinline)) void dot_formed(const float* const* x, const uint8_t* const* codes,
                                          const uint8_t* const* scales, const uint8_t* const* next,
                                          int64_t columns, float (*out)[4]) {
  constexpr int N = 4;
  vf total[M][N] = {};
  for (int64_t first = 0; first < columns; first += PART) {
    const int64_t count = std::min(PART, columns - first), whole = count / UNIT * UNIT;
    alignas(64) float scale[M][N][PART / GROUP];
    for (int64_t g = 0; g < count / GROUP; g += 16) {
      const __mmask16 there = __mmask16((1 << std::min<int64_t>(16, count / GROUP - g)) - 1);
      for (int i = 0; i < N; i++) {
        const vf of = scales_of_16(_mm_maskz_loadu_epi8(there, scales[i] + first / GROUP + g));
        for (int m = 0; m < M; m++)
          store(scale[m][i] + g, of * load(scales_of_row(x[m], columns) + first / GROUP + g));
      }
    }
    vf sum[M][N] = {};
    int64_t at = W + first / UNIT * VECTORS_OF_X * W, c = 0;
    for (; c < whole; c += UNIT, at += VECTORS_OF_X * W) {
      const int64_t byte = (first + c) / 2;
      for (int i = 0; i < N; i++) __builtin_prefetch(next[i] + byte, 0, 2);
      const Unit w[N] = {codes[0] + byte, codes[1] + byte, codes[2] + byte, codes[3] + byte};
      dot_formed_unit<M, N>(x, at, w, scale, c / GROUP, sum);
    }
    if (const int64_t byte = (first + c) / 2, rest = (count - c) / 2; rest) {
      const Unit w[N] = {{codes[0] + byte, rest}, {codes[1] + byte, rest}, {codes[2] + byte, rest},
                         {codes[3] + byte, rest}};
      dot_formed_unit<M, N>(x, at, w, scale, c / GROUP, sum);
    }
    for (int m = 0; m < M; m++)
      for (int i = 0; i < N; i++) total[m][i] += sum[m][i];
  }
  for (int m = 0; m < M; m++) {
    std::fill(out[m], out[m] + N, 0.0f);
    add_lanes(total[m], out[m]);
  }
}
#else
constexpr bool INTEGERS = false;  // a formed row is a dealt one

inline int64_t formed_room(int64_t columns) { return padded(columns); }
inline bool has_digits(const float*) { return true; }
inline const float* in_floats(const float* row) { return row; }
inline void form(const float* x, int64_t columns, float* out) { deal(x, columns, out); }

template <int M>
void dot_formed(const float* const* x, const uint8_t* const* codes, const uint8_t* const* scales,
                const uint8_t* const* next, int64_t columns, float (*out)[4]) {
  dot_packed<M>(x, codes, scales, next, columns, out);
}
#endif

}  // namespace k3
