// The context of a request: rows of latents in pages, and after them, where there are any, rows of its own.
//
//   token      0 .. paged - 1                          paged ..
//   lies in    page table[t / size], row t % size      own rows, one after the other
//
// How long it is stands in tensors that only a kernel reads: its call can be made again for other lengths.
#pragma once
#include <algorithm>

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

  // Where ``count`` tokens lie.
  void find(const Row& row, int64_t token, int64_t count, const float** to) const {
    for (const float** end = to + count; to < end;) {
      const bool paged = token < row.paged;
      const int64_t together = paged ? std::min(size - token % size, row.paged - token) : end - to;
      const float* next = at(row, token);
      for (const float** last = std::min(end, to + together); to < last; token++, next += paged ? page_row : own_row)
        *to++ = next;
    }
  }
};

// What is asked of the contexts. A query sees itself and what is before it, or, in blocks, all that its request has.
struct Requests {
  const int64_t *seen, *cu, *place;  // [R], [R + 1]; [3] as context_place gives it, or null: all tokens are here
  int64_t num, tokens;               // R; token rows: a request whose own are past them waits
  bool blocks;

  int64_t count(int64_t r) const { return cu[r + 1] > tokens ? 0 : std::max<int64_t>(0, cu[r + 1] - cu[r]); }

  // Of the first ``length`` tokens of a text, those that are here.
  int64_t here(int64_t length) const {
    if (!place) return length;
    const int64_t together = place[2], turn = place[1] * together;
    const int64_t rest = std::max<int64_t>(0, length % turn - place[0] * together);
    return length / turn * together + std::min(rest, together);
  }

  // Tokens that the i-th query of a request sees; no less than the one before it.
  int64_t limit(int64_t r, int64_t i) const { return blocks ? seen[r] + count(r) : here(seen[r] + i + 1); }

  Row row(int64_t r) const {
    const int64_t n = count(r);
    if (blocks) return {r, cu[r], n, n ? seen[r] : 0, cu[r]};
    return {r, cu[r], n, n ? limit(r, n - 1) : 0, 0};
  }

  // The first token row that is nobody's.
  int64_t end() const {
    int64_t last = 0;
    for (int64_t r = 0; r <= num; r++)
      if (cu[r] <= tokens) last = std::max(last, cu[r]);
    return last;
  }

  // One more than the first request that has more tokens than ``most`` in pages, or 0.
  int64_t too_long(int64_t most) const {
    for (int64_t r = 0; r < num; r++)
      if (row(r).paged > most) return r + 1;
    return 0;
  }

  // Whether keys and values had better be made for all of a request's context than kv_b be taken into its queries
  // (mla_prefill_native.py). both: channels of a key without position and of a value.
  bool pays(int64_t r, int64_t latent, int64_t both) const {
    constexpr int64_t TURNING = 2;  // tokens of context that cost to expand what it costs to turn kv_b
    const int64_t n = count(r), met = n * seen[r] + n * (n + 1) / 2;
    return n && met * (2 * latent - both) > (seen[r] + TURNING) * latent * both;
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
