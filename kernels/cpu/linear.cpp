// y = x w^T for float32 rows x and a bfloat16 matrix w [outputs, columns], summed in float32.
//
//   few rows    w streams by once and is widened in registers; a thread reads whole rows, one after the other
//   many rows   BLOCK rows of w are widened and turned once for ROWS rows of x: panels [columns, PANEL]
//
// How a sum is cut depends on the number of columns alone, so a result does not depend on the thread that made it.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int64_t FEW = 8;         // rows of x up to which w is widened as it streams, anew for each GROUP
constexpr int GROUP = 8;           // rows of x whose sums fit the registers
constexpr int64_t STRIP = 16;      // rows of w that a thread takes at a time where it streams, or a multiple
constexpr int64_t MOST = 4;        // STRIPs in a row: what is fetched ahead of the last is another thread's
constexpr int64_t PANEL = WIDE * W;              // rows of w side by side
constexpr int64_t BLOCK = W == 16 ? 128 : 64;    // rows of w turned together
constexpr int64_t ROWS = 192;                    // rows of x for each turning
constexpr int64_t NEAR = 128;                    // columns added up before the sum of all: long sums would lose digits
constexpr int64_t DEPTH = 64 * W;  // columns added up before the sum of all: long sums would lose digits
constexpr int64_t LINE = 32;       // elements of a cache line
constexpr int64_t AHEAD = 4096;    // elements that a row by itself is fetched ahead; several rows: the next ones
constexpr int64_t SMALL = 1 << 17;  // multiply-adds of a call that one thread does alone

struct Linear {
  const float* x;
  int64_t x_stride, rows, columns;
  const uint16_t* w;
  int64_t w_stride, outputs;
  float* y;  // [rows, outputs]
};

// sums of M rows of x and N rows of w over columns [first, last), U vectors of each row at a time.
template <int M, int N, int U>
void stream(const Linear& p, const float* x, const uint16_t* w, int64_t first, int64_t last, vf (&total)[M][N]) {
  vf sum[M][N][U] = {};
  int64_t c = first;
  for (; c + U * W <= last; c += U * W)
    for (int i = 0; i < N; i++)
      for (int u = 0; u < U; u++) {
        const uint16_t* at = w + i * p.w_stride + c + u * W;
        // into L2: what a core may await in L1 is less than memory gives in that time
        if (u * W % LINE == 0) __builtin_prefetch(at + (N == 1 ? AHEAD : N * p.w_stride), 0, 2);
        const vf wide = load(at);
        for (int r = 0; r < M; r++) sum[r][i][u] += wide * load(x + r * p.x_stride + c + u * W);
      }
  for (; c < last; c += W)
    for (int i = 0; i < N; i++) {
      const vf wide = load(w + i * p.w_stride + c);
      for (int r = 0; r < M; r++) sum[r][i][0] += wide * load(x + r * p.x_stride + c);
    }
  for (int r = 0; r < M; r++)
    for (int i = 0; i < N; i++)
      for (int u = 0; u < U; u++) total[r][i] += sum[r][i][u];
}

// y[m .. m + M)[n .. n + N).
template <int M, int N, int U>
void dots(const Linear& p, int64_t m, int64_t n) {
  const float* x = p.x + m * p.x_stride;
  const uint16_t* w = p.w + n * p.w_stride;
  const int64_t whole = p.columns / W * W;
  vf total[M][N] = {};
  for (int64_t c = 0; c < whole; c += DEPTH) stream<M, N, U>(p, x, w, c, std::min(c + DEPTH, whole), total);
  for (int r = 0; r < M; r++)
    for (int i = 0; i < N; i++) {
      float sum = lane_sum(total[r][i]);
      for (int64_t k = whole; k < p.columns; k++) sum += x[r * p.x_stride + k] * load_one(&w[i * p.w_stride + k]);
      p.y[(m + r) * p.outputs + n + i] = sum;
    }
}

// Rows of x from m on, at most M, against the rows [n, n + count) of w.
template <int M>
void strip(const Linear& p, int64_t m, int64_t n, int64_t count) {
  if constexpr (M > 1) {
    if (p.rows - m < M) return strip<M - 1>(p, m, n, count);
  }
  constexpr int N = M <= 2 ? 1 : M <= 4 ? 4 : 2, U = M <= 2 ? 8 / M : 1;
  int64_t i = 0;
  for (; i + N <= count; i += N) dots<M, N, U>(p, m, n + i);
  for (; i < count; i++) dots<M, 1, U>(p, m, n + i);
}

// Rows [n, n + count) of w over ``depth`` columns -> panels [depth, PANEL], zeros past the last row.
void turn(const Linear& p, int64_t n, int64_t count, int64_t first, int64_t depth, float* panels) {
  for (int64_t i = 0; i < count; i += W) {
    float* to = panels + i / PANEL * PANEL * depth + i % PANEL;
    for (int64_t k = 0; k < depth; k += W) {
      vf square[W];
      for (int64_t j = 0; j < W; j++)
        square[j] = i + j < count ? partial(p.w + (n + i + j) * p.w_stride + first + k, depth - k) : vf{};
      transpose(square);
      for (int64_t j = 0; j < W && k + j < depth; j++) store(to + (k + j) * PANEL, square[j]);
    }
  }
}

// Rows [m, m + rows) of x against rows [n, n + count) of w.
void block(const Linear& p, int64_t m, int64_t rows, int64_t n, int64_t count, float* panels, float* sums) {
  for (int64_t first = 0; first < p.columns; first += NEAR) {
    const int64_t depth = std::min(NEAR, p.columns - first);
    turn(p, n, count, first, depth, panels);
    for (int64_t i = 0; i < count; i += PANEL)
      panel<WIDE>({p.x + m * p.x_stride + first, p.x_stride, 1}, rows, panels + i * depth, PANEL, depth,
                  sums + i * ROWS, PANEL, first ? Into::add : Into::set);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i += PANEL)
      std::memcpy(p.y + (m + r) * p.outputs + n + i, sums + i * ROWS + r * PANEL,
                  sizeof(float) * std::min(PANEL, count - i));
}

void run(const Linear& p, int64_t threads) {
  if (p.rows * p.outputs * p.columns <= SMALL) threads = 1;
  Tasks work;
  if (p.rows <= FEW) {
    const int64_t rows = STRIP * std::clamp<int64_t>(p.outputs / (4 * threads * STRIP), 1, MOST);
    const int64_t strips = (p.outputs + rows - 1) / rows;
    auto body = [&](Team) {
      for (int64_t t; work.take(strips, t);)
        for (int64_t m = 0; m < p.rows; m += GROUP)
          strip<GROUP>(p, m, t * rows, std::min(rows, p.outputs - t * rows));
    };
    return parallel(threads, body);
  }
  const int64_t across = (p.outputs + BLOCK - 1) / BLOCK, tall = (p.rows + ROWS - 1) / ROWS;
  auto body = [&](Team) {
    std::vector<float> room(BLOCK * NEAR + BLOCK * ROWS);
    for (int64_t t; work.take(across * tall, t);) {
      const int64_t n = t % across * BLOCK, m = t / across * ROWS;
      float* panels = room.data();
      block(p, m, std::min(ROWS, p.rows - m), n, std::min(BLOCK, p.outputs - n), panels, panels + BLOCK * NEAR);
    }
  };
  parallel(threads, body);
}

}  // namespace
}  // namespace k3

// x, w, y, then rows, outputs, columns, strides of the rows of x and w, threads. y is dense.
K3_EXPORT int64_t k3_linear_bf16(const char* packed) {
  k3::Arguments of{packed};
  const float* x = of;
  const uint16_t* w = of;
  float* y = of;
  const int64_t rows = of, outputs = of, columns = of, x_stride = of, w_stride = of, threads = of;
  if (columns == 0) std::fill(y, y + rows * outputs, 0.0f);
  if (rows && outputs && columns) k3::run({x, x_stride, rows, columns, w, w_stride, outputs, y}, threads);
  return 0;
}
