// MXFP4 rows times float32 rows, straight from the packed bytes.
//
//   bytes of a row    l h l h l h ...     a column a nibble, the low one first
//   one decode        UNIT columns, W to a vector, in an order in which nothing has to be interleaved
//
// AVX-512: shifting 8 neighbours in a lane of 32 bits brings up the next one as the index of a table. AVX2: two
// tables give the two bytes of a bfloat16 for 32 codes at once, and a pair of those in a lane is two vectors.
// Activations are put into that order once (deal), and a scale is multiplied onto the sum of its group.
#pragma once
#include <algorithm>

#include "tiles.h"

namespace k3 {

constexpr int GROUP = 32;  // columns of one scale
#if defined(__AVX512F__)
constexpr int UNIT = 128;  // columns that are decoded together
#elif defined(__AVX2__)
constexpr int UNIT = 64;
#else
constexpr int UNIT = 32;
#endif
constexpr int VECTORS = UNIT / W;
constexpr int64_t PART = 1024;             // columns added up before the sum of all, and whose scales are at hand

alignas(64) constexpr float E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#if defined(__AVX2__) && !defined(__AVX512F__)  // the bytes of those numbers as bfloat16
alignas(16) constexpr uint8_t BF16_LOW[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
alignas(16) constexpr uint8_t BF16_HIGH[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                               0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
#endif

struct Mxfp4 {  // one matrix [outputs, columns]
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t columns;
  const uint8_t* row(int64_t r) const { return codes + r * (columns / 2); }
  const uint8_t* scale(int64_t r) const { return scales + r * (columns / GROUP); }
  Mxfp4 from(int64_t r) const { return {row(r), scale(r), columns}; }
};

// The column of a unit whose number is in place ``p`` of its vectors.
constexpr int column_at(int p) {
#if defined(__AVX512F__)
  return p % 16 * 8 + p / 16;
#elif defined(__AVX2__)
  const int nibble = p / 32, half = p / 16 % 2, odd = p / 8 % 2, lane = p / 4 % 2, pair = p % 4;
  return 32 * lane + 16 * half + 4 * pair + 2 * odd + nibble;
#else
  return p % 16 * 2 + p / 16;
#endif
}

struct Places {  // the inverse
  uint8_t of[UNIT] = {};
  constexpr Places() {
    for (int p = 0; p < UNIT; p++) of[column_at(p)] = uint8_t(p);
  }
};
constexpr Places PLACES;

inline int64_t padded(int64_t columns) { return (columns + UNIT - 1) / UNIT * UNIT; }

#if defined(__AVX512F__)
inline vf scales_of_16(__m128i bytes) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
  return (vf)_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000));
}
#endif

// 2^(byte - 127) of 16 bytes; byte 0 is a subnormal.
inline void scales_of_16(const uint8_t* bytes, float* out) {
#if defined(__AVX512F__)
  store(out, scales_of_16(_mm_loadu_si128((const __m128i*)bytes)));
#elif defined(__AVX2__)
  for (int j = 0; j < 16; j += 8) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(bytes + j))), 23);
    _mm256_storeu_si256((__m256i*)(out + j), _mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
  }
#else
  for (int j = 0; j < 16; j++) {
    const uint32_t bits = bytes[j] ? uint32_t(bytes[j]) << 23 : 0x00400000u;
    std::memcpy(out + j, &bits, 4);
  }
#endif
}

// The same of ``count`` bytes; ``out`` has room for 16 more.
inline void scales_of(const uint8_t* bytes, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) scales_of_16(bytes + i, out + i);
  uint8_t rest[16] = {};  // a factor may reach beyond the last group
  std::memcpy(rest, bytes + i, count - i);
  scales_of_16(rest, out + i);
}

#define K3_INLINE inline __attribute__((always_inline))

// The codes of a unit; ``numbers`` gives them as vectors, without their scales.
struct Unit {
#if defined(__AVX512F__)
  __m512i codes;
  K3_INLINE Unit(const uint8_t* at) : codes(_mm512_loadu_si512(at)) {}
  K3_INLINE Unit(const uint8_t* at, int64_t bytes)  // the last of a row: nothing behind it is read
      : codes(_mm512_maskz_loadu_epi8((__mmask64(1) << bytes) - 1, at)) {}
  K3_INLINE vf vector(int k) const {  // a permutation reads the low four bits of each index
    return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * k), _mm512_load_ps(E2M1));
  }
  K3_INLINE void numbers(vf (&v)[VECTORS]) const {
    for (int k = 0; k < VECTORS; k++) v[k] = vector(k);
  }
#elif defined(__AVX2__)
  __m256i codes;
  K3_INLINE Unit(const uint8_t* at) : codes(_mm256_loadu_si256((const __m256i*)at)) {}
  K3_INLINE Unit(const uint8_t* at, int64_t)  // half a unit, the last of a row
      : codes(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)at))) {}
  K3_INLINE void numbers(vf (&v)[VECTORS]) const {
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)BF16_LOW));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)BF16_HIGH));
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xffff0000));
    const __m256i index[2] = {_mm256_and_si256(codes, nibble), _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble)};
    for (int n = 0; n < 2; n++) {
      const __m256i l = _mm256_shuffle_epi8(low, index[n]), h = _mm256_shuffle_epi8(high, index[n]);
      const __m256i pairs[2] = {_mm256_unpacklo_epi8(l, h), _mm256_unpackhi_epi8(l, h)};
      for (int half = 0; half < 2; half++) {
        v[4 * n + 2 * half] = (vf)_mm256_slli_epi32(pairs[half], 16);
        v[4 * n + 2 * half + 1] = (vf)_mm256_and_si256(pairs[half], upper);
      }
    }
  }
#else
  const uint8_t* codes;
  Unit(const uint8_t* at, int64_t = 0) : codes(at) {}
  void numbers(vf (&v)[VECTORS]) const {
    for (int p = 0; p < UNIT; p++) v[p / W][p % W] = E2M1[p < 16 ? codes[p] & 15 : codes[p - 16] >> 4];
  }
#endif
};

// For each lane of a unit's vectors the scale of the group it belongs to.
K3_INLINE vf factor(const float* scales) {
#if defined(__AVX512F__)
  const __m512i group = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return (vf)_mm512_permutexvar_ps(group, _mm512_castps128_ps512(_mm_loadu_ps(scales)));
#elif defined(__AVX2__)
  return (vf)_mm256_blend_ps(_mm256_broadcast_ss(scales), _mm256_broadcast_ss(scales + 1), 0xf0);
#else
  return splat(*scales);
#endif
}

// x [columns] into the order of decode, zeros up to a whole unit.
inline void deal(const float* x, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += UNIT)
    for (int p = 0; p < UNIT; p++) out[c + p] = c + column_at(p) < columns ? x[c + column_at(p)] : 0.0f;
}

// Where ``deal`` puts column c.
inline int64_t dealt_at(int64_t c) { return c / UNIT * UNIT + PLACES.of[c % UNIT]; }

#if defined(__AVX512F__)
// sum[m][i] += the unit w[i] times the same columns, from ``at`` on, of M dealt rows.
template <int M, int N>
K3_INLINE void dot_unit(const float* const* x, int64_t at, const Unit* w, const vf* by, vf (*sum)[N]) {
  vf part[M][N];
#pragma GCC unroll 8
  for (int k = 0; k < VECTORS; k++) {
    vf v[N];
    for (int i = 0; i < N; i++) v[i] = w[i].vector(k);
    for (int m = 0; m < M; m++) {
      const vf a = load(x[m] + at + k * W);
      for (int i = 0; i < N; i++) part[m][i] = k ? part[m][i] + v[i] * a : v[i] * a;
    }
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < N; i++) sum[m][i] += part[m][i] * by[i];
}

// out[m][i] = <x[m], row i>, for M dealt rows and four packed ones, which may be of several matrices; ``next`` is
// what will be read after them, and is fetched meanwhile.
template <int M>
void dot_packed(const float* const* x, const uint8_t* const* codes, const uint8_t* const* scales,
                const uint8_t* const* next, int64_t columns, float (*out)[4]) {
  constexpr int N = M <= 4 ? 4 : 2;  // rows whose sums fit the registers
  for (int at = 0; at < 4; at += N, codes += N, scales += N, next += N) {
    vf total[M][N] = {};
    for (int64_t first = 0; first < columns; first += PART) {
      const int64_t count = std::min(PART, columns - first), whole = count / UNIT * UNIT;
      alignas(64) float scale[N][PART / GROUP + 16];
      for (int i = 0; i < N; i++) scales_of(scales[i] + first / GROUP, count / GROUP, scale[i]);
      vf sum[M][N] = {};
      for (int64_t c = 0; c < whole; c += UNIT) {
        vf by[N];
        for (int i = 0; i < N; i++) by[i] = factor(scale[i] + c / GROUP);
        const int64_t byte = (first + c) / 2;
        if (byte % 64 == 0)
          for (int i = 0; i < N; i++) __builtin_prefetch(next[i] + byte, 0, 2);
        if constexpr (N == 4) {
          const Unit w[4] = {codes[0] + byte, codes[1] + byte, codes[2] + byte, codes[3] + byte};
          dot_unit<M, N>(x, first + c, w, by, sum);
        } else {
          const Unit w[2] = {codes[0] + byte, codes[1] + byte};
          dot_unit<M, N>(x, first + c, w, by, sum);
        }
      }
      if (whole < count)
        for (int i = 0; i < N; i++) {
          const Unit w(codes[i] + (first + whole) / 2, (count - whole) / 2);
          const vf by = factor(scale[i] + whole / GROUP);
          vf rest[M][1] = {};
          dot_unit<M, 1>(x, first + whole, &w, &by, rest);
          for (int m = 0; m < M; m++) sum[m][i] += rest[m][0];
        }
      for (int m = 0; m < M; m++)
        for (int i = 0; i < N; i++) total[m][i] += sum[m][i];
    }
    for (int m = 0; m < M; m++) {
      vf lanes[4] = {};  // added in one order for any M
      float sums[4] = {};
      std::copy(total[m], total[m] + N, lanes);
      add_lanes(lanes, sums);
      std::copy(sums, sums + N, out[m] + at);
    }
  }
}
#else
// sum[m] += one unit times the same columns, from ``at`` on, of M dealt rows.
template <int M>
K3_INLINE void dot_unit(const float* const* x, int64_t at, const Unit& w, vf by, vf (&sum)[M]) {
  vf v[VECTORS];
  w.numbers(v);
  for (int m = 0; m < M; m++) {
    const float* a = x[m] + at;
    vf even = v[0] * load(a), odd = v[1] * load(a + W);
    for (int k = 2; k < VECTORS; k += 2) {
      even += v[k] * load(a + k * W);
      odd += v[k + 1] * load(a + (k + 1) * W);
    }
    sum[m] += (even + odd) * by;
  }
}

// The same with 16 registers: one packed row after the other.
template <int M>
void dot_packed(const float* const* x, const uint8_t* const* codes, const uint8_t* const* scales,
                const uint8_t* const* next, int64_t columns, float (*out)[4]) {
  vf total[M][4];
  for (int i = 0; i < 4; i++)
    for (int64_t first = 0; first < columns; first += PART) {
      const int64_t count = std::min(PART, columns - first), whole = count / UNIT * UNIT;
      alignas(64) float scale[PART / GROUP + 16];
      scales_of(scales[i] + first / GROUP, count / GROUP, scale);
      const uint8_t *at = codes[i] + first / 2, *ahead = next[i] + first / 2;
      vf sum[M] = {};
      for (int64_t c = 0; c < whole; c += UNIT) {
        __builtin_prefetch(ahead + c / 2, 0, 2);
        dot_unit<M>(x, first + c, Unit(at + c / 2), factor(scale + c / GROUP), sum);
      }
      if (whole < count)
        dot_unit<M>(x, first + whole, Unit(at + whole / 2, (count - whole) / 2), factor(scale + whole / GROUP), sum);
      for (int m = 0; m < M; m++) total[m][i] = first ? total[m][i] + sum[m] : sum[m];
    }
  for (int m = 0; m < M; m++) {
    for (int i = 0; i < 4; i++) out[m][i] = 0.0f;
    add_lanes(total[m], out[m]);
  }
}
#endif

// One row decoded: columns [first, first + count), at most PART -> out [padded(count)], in the order of decode.
inline void unpack(const Mxfp4& w, int64_t row, int64_t first, int64_t count, float* out) {
  alignas(64) float scale[PART / GROUP + 16];
  scales_of(w.scale(row) + first / GROUP, count / GROUP, scale);
  for (int64_t c = 0; c < count; c += UNIT) {
    const uint8_t* at = w.row(row) + (first + c) / 2;
    const Unit u = count - c >= UNIT ? Unit(at) : Unit(at, (count - c) / 2);
    const vf by = factor(scale + c / GROUP);
    vf v[VECTORS];
    u.numbers(v);
    for (int k = 0; k < VECTORS; k++) store(out + c + k * W, v[k] * by);
  }
}

}  // namespace k3
