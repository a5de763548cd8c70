// One step of KDA for rows of one token, where their states lie: each state is read once and written once.
//
//   a = S (k d)   o = S (q d) + u (k q)   u = beta (v - a)   S <- S diag(d) + u k^T      d = exp g
//
// A row of S [V, K] needs nothing of the others, so it goes through once, while it is in the nearest cache.
// Rows and heads are handed out to threads. K is padded with zeros in buffers; rows of S are never overrun.
#include <vector>

#include "arguments.h"
#include "kda.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

struct Step {
  Strided q, k, v, g, beta, out;  // out.data null: only the states matter
  float* state;
  int64_t slot_stride, head_stride, row_stride;
  const int64_t *slots, *tokens;  // [rows]
  int64_t rows, heads, keys, values, start;
};

constexpr int64_t SMALL = 1 << 15;  // state elements of a call that one thread does alone

void one_head(const Step& p, int64_t row, int64_t head, float* room, int64_t padded) {
  const int64_t token = p.tokens[row], full = p.keys / W * W, rest = p.keys - full;
  float *decay = room, *key = decay + padded, *key_read = key + padded, *query_read = key_read + padded;
  vf product = {};
  for (int64_t c = 0; c < p.keys; c += W) {
    const int64_t n = c < full ? W : rest;
    const vf d = exp(partial(p.g.at(token, head) + c, n));
    const vf k = partial(p.k.at(token, head) + c, n), q = partial(p.q.at(token, head) + c, n);
    store(decay + c, d);
    store(key + c, k);
    store(key_read + c, k * d);
    store(query_read + c, q * d);
    product += k * q;
  }
  const float score = lane_sum(product), beta = *p.beta.at(token, head);
  const float* v = p.v.at(token, head);
  float* out = p.out.data ? p.out.at(token + p.start, head) : nullptr;
  float* s = p.state + p.slots[row] * p.slot_stride + head * p.head_stride;
  for (int64_t i = 0; i < p.values; i++, s += p.row_stride) {
    vf seen = {}, asked = {};
    for (int64_t c = 0; c < full; c += W) {
      seen += load(s + c) * load(key_read + c);
      asked += load(s + c) * load(query_read + c);
    }
    if (rest) {
      seen += partial(s + full, rest) * load(key_read + full);
      asked += partial(s + full, rest) * load(query_read + full);
    }
    const float u = (v[i] - lane_sum(seen)) * beta;
    if (out) out[i] = lane_sum(asked) + u * score;
    for (int64_t c = 0; c < full; c += W) store(s + c, load(s + c) * load(decay + c) + u * load(key + c));
    if (rest) {
      const vf moved = partial(s + full, rest) * load(decay + full) + u * load(key + full);
      std::memcpy(s + full, &moved, sizeof(float) * rest);
    }
  }
}

}  // namespace
}  // namespace k3

// q, k, v, g, beta, out, each with the strides of its tokens and heads, state with those of its slots, heads and rows,
// then slots [rows], tokens [rows], rows, heads, K, V, start, threads. No slot twice.
K3_EXPORT int64_t k3_kda_step(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  Strided part[6];
  for (Strided& x : part) x = {of.take<float*>(), of.take<int64_t>(), of.take<int64_t>()};
  float* state = of;
  const int64_t slot = of, head = of, line = of;
  const int64_t *slots = of, *of_row = of;
  const int64_t rows = of, heads = of, keys = of, values = of, start = of, threads = of;
  const Step p{part[0], part[1], part[2], part[3], part[4], part[5], state, slot,   head,
               line,    slots,   of_row,  rows,    heads,   keys,    values, start};
  const int64_t tasks = rows * heads, padded = (keys + W - 1) / W * W;
  Tasks work;
  auto body = [&](Team) {
    std::vector<float> room(4 * padded);
    for (int64_t t; work.take(tasks, t);) one_head(p, t / heads, t % heads, room.data(), padded);
  };
  parallel(tasks * keys * values > SMALL ? threads : 1, body);
  return 0;
}
