// Products of small float32 matrices that lie in the nearest caches: rows of a in scalars, rows of b in vectors.
//
//   c[m, n] = keep c[m, n] + sign sum_k a[m, k] b[k, n]      a: any strides; b and c: columns side by side
//
// b may be kept in bfloat16.
//
// A sum runs over k in order whatever the tile, so an element's bits do not depend on what it is computed with.
#pragma once
#include <utility>

#include "bf16.h"

namespace k3 {

constexpr int WIDE = W == 16 ? 4 : 2;  // vectors of a tile; with TALL rows they fill the registers
constexpr int TALL = 6;
constexpr int ALONE = 8;                // vectors of a tile of one row

enum class Into { set, add, subtract, fade };  // sum, c + sum, c - sum, keep[m] c + sum

struct Matrix {
  const float* data;
  int64_t row, column;  // strides
};

template <int M, int N, class B>
void tile(const Matrix& a, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row, Into into,
          const float* keep) {
  vf sum[M][N] = {};
  const float* at = a.data;
  for (int64_t k = 0; k < depth; k++, at += a.column, b += b_row) {
    vf row[N];
    for (int n = 0; n < N; n++) row[n] = load(b + n * W);
    for (int m = 0; m < M; m++) {
      const float x = at[m * a.row];
      for (int n = 0; n < N; n++) sum[m][n] += x * row[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float* to = c + m * c_row + n * W;
      if (into == Into::set) store(to, sum[m][n]);
      else if (into == Into::add) store(to, load(to) + sum[m][n]);
      else if (into == Into::subtract) store(to, load(to) - sum[m][n]);
      else store(to, load(to) * keep[m] + sum[m][n]);
    }
}

template <int M, int N, class B>
void tall(const Matrix& a, int64_t rows, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
          Into into, const float* keep) {
  if constexpr (M > 1) {
    if (rows < M) return tall<M - 1, N>(a, rows, b, b_row, depth, c, c_row, into, keep);
  }
  tile<M, N>(a, b, b_row, depth, c, c_row, into, keep);
}

// ``rows`` rows of c, N vectors wide. meanwhile(): called between tiles, for memory that will be wanted later.
template <int N, class B, class Hook>
void panel(const Matrix& a, int64_t rows, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
           Into into, const float* keep, const Hook& meanwhile) {
  for (int64_t m = 0; m < rows; m += TALL) {
    meanwhile();
    tall<TALL, N>({a.data + m * a.row, a.row, a.column}, rows - m, b, b_row, depth, c + m * c_row, c_row, into,
                  keep ? keep + m : nullptr);
  }
}

template <int N, class B>
void panel(const Matrix& a, int64_t rows, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
           Into into, const float* keep = nullptr) {
  panel<N>(a, rows, b, b_row, depth, c, c_row, into, keep, [] {});
}

constexpr int64_t DEEP = 64;  // products added up before the sum of all, where long sums would lose digits

// panel() in stretches of DEEP, whose sums are added to c one after the other.
template <int N, class B>
void deep_panel(const Matrix& a, int64_t rows, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                Into into, const float* keep = nullptr) {
  panel<N>(a, rows, b, b_row, depth < DEEP ? depth : DEEP, c, c_row, into, keep);
  for (int64_t k = DEEP; k < depth; k += DEEP)
    panel<N>({a.data + k * a.column, a.row, a.column}, rows, b + k * b_row, b_row, depth - k < DEEP ? depth - k : DEEP,
             c, c_row, Into::add);
}

// panel() for any number of vectors.
template <int N = WIDE, class B>
void product(const Matrix& a, int64_t rows, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
             int64_t vectors, Into into, const float* keep = nullptr) {
  if (rows == 1)  // alone a row has too few sums to keep the units busy, unless it is wide
    for (; vectors >= ALONE; vectors -= ALONE, b += ALONE * W, c += ALONE * W)
      tile<1, ALONE>(a, b, b_row, depth, c, c_row, into, keep);
  for (; vectors >= N; vectors -= N, b += N * W, c += N * W)
    panel<N>(a, rows, b, b_row, depth, c, c_row, into, keep);
  if constexpr (N > 1) {
    if (vectors) product<N - 1>(a, rows, b, b_row, depth, c, c_row, vectors, into, keep);
  }
}

inline void store_partial(float* p, vf v, int64_t count) {
  if (count >= W) return store(p, v);
  std::memcpy(p, &v, sizeof(float) * count);
}

// Rows of a W x W square become its columns: in stage s, rows 2^s apart exchange their off-diagonal blocks.
template <int S, bool High, int... I>
inline vf exchange(vf a, vf b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((I & S) ? (High ? I + W : I - S + W) : (High ? I + S : I))...);
#else
  const vi from = {((I & S) ? (High ? I + W : I - S + W) : (High ? I + S : I))...};
  return __builtin_shuffle(a, b, from);
#endif
}

template <int S = 1>
inline void transpose(vf (&r)[W]) {
  constexpr std::make_integer_sequence<int, W> lanes{};
  for (int i = 0; i < W; i++)
    if (!(i & S)) {
      const vf a = r[i], b = r[i + S];
      r[i] = exchange<S, false>(a, b, lanes);
      r[i + S] = exchange<S, true>(a, b, lanes);
    }
  if constexpr (2 * S < W) transpose<2 * S>(r);
}

// from [rows, columns] -> to [columns, rows] with the columns of a padded row of W left as they fall; ``rows``
// past ``known`` and columns past ``columns`` are not read and count as zero.
inline void transpose(const float* from, int64_t from_row, int64_t known, int64_t columns, float* to,
                      int64_t to_row, int64_t rows) {
  for (int64_t i = 0; i < rows; i += W)
    for (int64_t j = 0; j < columns; j += W) {
      vf r[W];
      for (int64_t x = 0; x < W; x++) r[x] = i + x < known ? partial(from + (i + x) * from_row + j, columns - j) : vf{};
      transpose(r);
      for (int64_t x = 0; x < W && j + x < columns; x++) store(to + (j + x) * to_row + i, r[x]);
    }
}

}  // namespace k3
