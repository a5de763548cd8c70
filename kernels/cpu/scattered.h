// Products of a few rows of x with rows of b that lie anywhere, each given by its address.
//
//   meet     sums[m, n] += <x[m], b[n]>               four rows of b at a time, as in tiles.h
//   blend    c[m] = keep[m] c[m] + sum_k a[m, k] b[k]     as in panels.h
//
// A sum has the order it has there, so it is the same number.
#pragma once
#include "panels.h"
#include "tiles.h"

namespace k3 {

constexpr int64_t LINE = 64;  // bytes of a cache line

// Asks for ``bytes`` at p, into L2: what a core may await in L1 is less than memory gives in that time.
inline void fetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// Up to M rows of x, ``pitch`` apart, over ``count`` columns, a multiple of W.
template <int M = TILE, class B>
void meet(const float* x, int64_t pitch, int64_t rows, const B* const* b, int64_t count, float* sums, int64_t stride) {
  if constexpr (M > 1) {
    if (rows < M) return meet<M - 1>(x, pitch, rows, b, count, sums, stride);
  }
  const B *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
  vf sum[M][4] = {};
  for (int64_t c = 0; c < count; c += W) {
    const vf four[4] = {load(b0 + c), load(b1 + c), load(b2 + c), load(b3 + c)};
    for (int m = 0; m < M; m++) {
      const vf a = load(x + m * pitch + c);
      for (int n = 0; n < 4; n++) sum[m][n] += a * four[n];
    }
  }
  for (int m = 0; m < M; m++) add_lanes(sum[m], sums + m * stride);
}

// Up to M rows of c, N vectors of them from ``column`` on.
template <int M, int N>
void blend_tile(const Matrix& a, int64_t rows, const float* const* b, int64_t column, int64_t depth, float* c,
                int64_t c_row, const float* keep) {
  if constexpr (M > 1) {
    if (rows < M) return blend_tile<M - 1, N>(a, rows, b, column, depth, c, c_row, keep);
  }
  vf sum[M][N] = {};
  for (int64_t k = 0; k < depth; k++) {
    const float* at = b[k] + column;
    vf row[N];
    for (int n = 0; n < N; n++) row[n] = load(at + n * W);
    for (int m = 0; m < M; m++) {
      const float x = a.data[m * a.row + k];
      for (int n = 0; n < N; n++) sum[m][n] += x * row[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float* to = c + m * c_row + column + n * W;
      store(to, load(to) * keep[m] + sum[m][n]);
    }
}

// ``vectors`` of c from ``column`` on; columns of a are side by side.
template <int N = WIDE>
void blend(const Matrix& a, int64_t rows, const float* const* b, int64_t depth, float* c, int64_t c_row,
           int64_t vectors, const float* keep, int64_t column = 0) {
  if (rows == 1)  // alone a row has too few sums to keep the units busy, unless it is wide
    for (; vectors >= ALONE; vectors -= ALONE, column += ALONE * W)
      blend_tile<1, ALONE>(a, rows, b, column, depth, c, c_row, keep);
  for (; vectors >= N; vectors -= N, column += N * W)
    for (int64_t m = 0; m < rows; m += TALL)
      blend_tile<TALL, N>({a.data + m * a.row, a.row, 1}, rows - m, b, column, depth, c + m * c_row, c_row, keep + m);
  if constexpr (N > 1) {
    if (vectors) blend<N - 1>(a, rows, b, depth, c, c_row, vectors, keep, column);
  }
}

}  // namespace k3
