// The context of a request: rows of latents in pages, and after them, where there are any, rows of its own.
//
//   token      0 .. paged - 1                          paged ..
//   lies in    page table[t / size], row t % size      own rows, one after the other
#pragma once
#include "panels.h"

namespace k3 {

struct Row {
  int64_t request, begin, count;  // token rows
  int64_t paged, own;             // tokens that are in pages; the own row of the first that is not
};

struct Latents {
  const float *pages, *own;
  const int64_t* table;
  int64_t width, page, page_row, size, table_row, own_row;  // channels; strides, but for size: tokens of a page

  const float* at(const Row& row, int64_t token) const {
    if (token >= row.paged) return own + (row.own + token - row.paged) * own_row;
    return pages + table[row.request * table_row + token / size] * page + token % size * page_row;
  }
};

// Scores of ``seen`` tokens (none where not positive) become weights below a new top; the others, up to ``padded``
// (a multiple of W), weigh nothing.
inline void weigh(float* scores, int64_t seen, int64_t padded, float& top, float& total, float& fade) {
  float peak = top;
  int64_t t = 0;
  if (seen >= W) {
    vf highest = load(scores);
    for (t = W; t + W <= seen; t += W) {
      const vf s = load(scores + t);
      highest = s > highest ? s : highest;
    }
    for (int i = 0; i < W; i++) peak = highest[i] > peak ? highest[i] : peak;
  }
  for (; t < seen; t++) peak = scores[t] > peak ? scores[t] : peak;
  vf sum = {};
  for (t = 0; t < padded; t += W) {
    vf w = {};
    if (t < seen) w = exp(load(scores + t) - peak);
    if (t < seen && t + W > seen)
      for (int64_t i = seen - t; i < W; i++) w[i] = 0.0f;
    store(scores + t, w);
    sum += w;
  }
  fade = top == peak ? 1.0f : std::exp(top - peak);
  total = total * fade + lane_sum(sum);
  top = peak;
}

}  // namespace k3
