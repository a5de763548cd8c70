// Which experts a token goes to: scores in double, the choice in float, equal ones by the lower id (moe.py, route).
//
//   s = sigmoid(W x)    chosen: the largest s + bias    weight = s, by the sum of the chosen if wanted, times scale
//
// A row's sums run over its own columns alone, in one order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int H = W / 2;            // doubles of a vector
constexpr int TOGETHER = 4;         // tokens that share a read of the weights
constexpr int64_t EXPERTS = 32;     // of a task
constexpr int64_t SMALL = 1 << 17;  // multiply-adds of a call that one thread does alone

typedef double vd __attribute__((vector_size(H * 8)));
typedef float vh __attribute__((vector_size(H * 4)));

struct Route {
  const float *x, *gate, *bias;
  float* weights;  // [tokens, k]
  int64_t* ids;    // [tokens, k]
  int64_t x_row, gate_row, tokens, width, experts, top_k, renormalize;
  double scale;
  float* scores;  // [tokens, experts]

  // out[m] = <x[m], w>, for rows of x that are doubles already.
  template <int M>
  void dots(const double* rows, const float* w, double* out) const {
    vd sum[M][2] = {};
    int64_t c = 0;
    for (; c + W <= width; c += W)
      for (int i = 0; i < 2; i++) {
        vh half;
        std::memcpy(&half, w + c + i * H, sizeof half);
        const vd wide = __builtin_convertvector(half, vd);
        for (int m = 0; m < M; m++) {
          vd v;
          std::memcpy(&v, rows + m * width + c + i * H, sizeof v);
          sum[m][i] += v * wide;
        }
      }
    for (int m = 0; m < M; m++) {
      double total = 0.0;
      const vd both = sum[m][0] + sum[m][1];
      for (int i = 0; i < H; i++) total += both[i];
      for (int64_t k = c; k < width; k++) total += rows[m * width + k] * double(w[k]);
      out[m] = total;
    }
  }

  template <int M>
  void score(int64_t first, int64_t count, int64_t from, int64_t to, const double* rows) const {
    if constexpr (M > 1) {
      if (count < M) return score<M - 1>(first, count, from, to, rows);
    }
    for (int64_t e = from; e < to; e++) {
      double logit[M];
      dots<M>(rows, gate + e * gate_row, logit);
      for (int m = 0; m < M; m++) scores[(first + m) * experts + e] = float(1.0 / (1.0 + std::exp(-logit[m])));
    }
  }

  void choose(int64_t t) const {
    const float* s = scores + t * experts;
    int64_t* id = ids + t * top_k;
    auto before = [&](int64_t a, int64_t b) {  // NaN counts as the largest
      const float x = s[a] + bias[a], y = s[b] + bias[b];
      return x > y || (std::isnan(x) && !std::isnan(y));
    };
    int64_t known = 0;
    for (int64_t e = 0; e < experts; e++) {
      int64_t at = known;
      while (at > 0 && before(e, id[at - 1])) at--;
      if (at == top_k) continue;
      known = std::min(known + 1, top_k);
      for (int64_t i = known - 1; i > at; i--) id[i] = id[i - 1];
      id[at] = e;
    }
    float sum = 0.0f, *w = weights + t * top_k;
    for (int64_t i = 0; i < top_k; i++) sum += w[i] = s[id[i]];
    for (int64_t i = 0; i < top_k; i++) w[i] = (renormalize ? w[i] / (sum + 1e-20f) : w[i]) * float(scale);
  }

  void run(int64_t threads) const {
    const int64_t groups = (tokens + TOGETHER - 1) / TOGETHER, across = (experts + EXPERTS - 1) / EXPERTS;
    Tasks scoring, choosing;
    auto body = [&](Team team) {
      std::vector<double> rows(TOGETHER * width);
      int64_t of = -1;
      for (int64_t t; scoring.take(groups * across, t);) {
        const int64_t first = t / across * TOGETHER, count = std::min<int64_t>(TOGETHER, tokens - first);
        for (int64_t m = 0; of != first && m < count; m++)
          for (int64_t c = 0; c < width; c++) rows[m * width + c] = x[(first + m) * x_row + c];
        of = first;
        const int64_t from = t % across * EXPERTS;
        score<TOGETHER>(first, count, from, std::min(from + EXPERTS, experts), rows.data());
      }
      team.barrier();
      for (int64_t t; choosing.take(tokens, t);) choose(t);
    };
    parallel(tokens * experts * width > SMALL ? threads : 1, body);
  }
};

}  // namespace
}  // namespace k3

// x, gate, bias, weights, ids, scores (scratch, T E floats), strides of the rows of x and gate, T, D, E, k, whether
// weights are divided by their sum, scale, threads. k is at most E.
K3_EXPORT int64_t k3_route(const char* packed) {
  k3::Arguments of{packed};
  k3::Route p{};
  p.x = of, p.gate = of, p.bias = of, p.weights = of, p.ids = of, p.scores = of, p.x_row = of, p.gate_row = of;
  p.tokens = of, p.width = of, p.experts = of, p.top_k = of, p.renormalize = of, p.scale = of;
  p.run(of);
  return 0;
}
