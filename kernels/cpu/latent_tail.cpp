// What enters the last matrix of a latent mixture of experts: weigh, sum and norm, a token at a time.
//
//   y = sum_j w[j] rows[idx[j]]      unit = y / rms(y) * norm_w      a negative idx is a hole: nothing of it is read
//
// and after that matrix the shared part is added.
#include <cmath>

#include "arguments.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int64_t SMALL = 1 << 15;  // numbers of a call that one thread does alone

struct Units {
  const float *rows, *w, *norm_w;
  const void* idx;
  float* unit;  // [tokens, latent]
  int64_t row, w_row, idx_row, narrow, tokens, top_k, latent;
  float eps;

  int64_t expert(int64_t t, int64_t j) const {
    const int64_t at = t * idx_row + j;
    return narrow ? static_cast<const int32_t*>(idx)[at] : static_cast<const int64_t*>(idx)[at];
  }

  void run(int64_t t) const {
    float* y = unit + t * latent;
    std::memset(y, 0, sizeof(float) * latent);
    for (int64_t j = 0; j < top_k; j++) {
      const int64_t from = expert(t, j);
      if (from < 0) continue;
      const float weight = w[t * w_row + j];
      const float* part = rows + from * row;
      for (int64_t c = 0; c < latent; c += W)
        store_partial(y + c, partial(y + c, latent - c) + weight * partial(part + c, latent - c), latent - c);
    }
    vf squares = {};
    for (int64_t c = 0; c < latent; c += W) {
      const vf v = partial(y + c, latent - c);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(lane_sum(squares) / float(latent) + eps);
    for (int64_t c = 0; c < latent; c += W) {
      const int64_t left = latent - c;
      store_partial(y + c, partial(y + c, left) * scale * partial(norm_w + c, left), left);
    }
  }
};

}  // namespace
}  // namespace k3

// rows, w, norm_w, idx, unit, then strides of the rows of the first, second and fourth, whether idx is int32, tokens, k,
// L, eps, threads.
K3_EXPORT int64_t k3_latent_units(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  Units p{};
  p.rows = of, p.w = of, p.norm_w = of, p.idx = of.take<const void*>(), p.unit = of;
  p.row = of, p.w_row = of, p.idx_row = of, p.narrow = of, p.tokens = of, p.top_k = of, p.latent = of;
  p.eps = float(of.take<double>());
  const int64_t threads = of;
  Tasks work;
  auto body = [&](Team) {
    for (int64_t t; work.take(p.tokens, t);) p.run(t);
  };
  parallel(p.tokens * p.top_k * p.latent > SMALL ? threads : 1, body);
  return 0;
}

// up [T, D], which shared [T, D] is added to, then T, D, the stride of shared's rows, threads.
K3_EXPORT int64_t k3_latent_join(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  float* up = of;
  const float* shared = of;
  const int64_t tokens = of, width = of, row = of, threads = of;
  Tasks work;
  auto body = [&](Team) {
    for (int64_t t; work.take(tokens, t);)
      for (int64_t c = 0; c < width; c++) up[t * width + c] += shared[t * row + c];
  };
  parallel(tokens * width > SMALL ? threads : 1, body);
  return 0;
}
