// Dot products of a tile of rows: M rows of x times N rows of w, both with their columns side by side.
//
//   sums[m][n] += <x[m], w[n]>      each of M * N sums is a vector; four of them are added up together
//
// Every sum goes over lanes first, in an order that depends on the columns alone.
#pragma once
#include "vectors.h"

namespace k3 {

constexpr int TILE = W == 16 ? 6 : 3;  // rows of x in a tile; with 4 rows of w it fills the registers

// out[i] += the lanes of v[i], for four vectors.
inline void add_lanes(const vf* v, float* out) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums));
#elif defined(__AVX2__)
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums));
#else
  for (int i = 0; i < 4; i++) out[i] += lane_sum(v[i]);
#endif
}

// M rows of x and 4 rows of w, ``pitch`` apart, over ``count`` columns, a multiple of W.
template <int M>
void dot_tile(const float* const* x, const float* w, int64_t pitch, int64_t count, float* sums, int64_t stride) {
  vf sum[M][4] = {};
  for (int64_t c = 0; c < count; c += W) {
    vf b[4];
    for (int n = 0; n < 4; n++) b[n] = load(w + n * pitch + c);
    for (int m = 0; m < M; m++) {
      const vf a = load(x[m] + c);
      for (int n = 0; n < 4; n++) sum[m][n] += a * b[n];
    }
  }
  for (int m = 0; m < M; m++) add_lanes(sum[m], sums + m * stride);
}

// sums [m, weight_rows] of up to M rows, each read from column ``first`` on; weight_rows is a multiple of 4.
template <int M = TILE>
void tiles(const float* const* x, int64_t m, int64_t first, const float* w, int64_t weight_rows, int64_t pitch,
           int64_t count, float* sums) {
  if constexpr (M > 1) {
    if (m < M) return tiles<M - 1>(x, m, first, w, weight_rows, pitch, count, sums);
  }
  const float* at[M];
  for (int i = 0; i < M; i++) at[i] = x[i] + first;
  for (int64_t n = 0; n < weight_rows; n += 4)
    dot_tile<M>(at, w + n * pitch, pitch, count, sums + n, weight_rows);
}

}  // namespace k3
