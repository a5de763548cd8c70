// What becomes of a state after rows that were only verified: one pass over it, whatever the number of rows.
//
//   states    S_i <- S_{i-1} diag(exp g_i) + u_i k_i^T                      each to a slot of its own
//   commit    S[into] <- S diag(exp(g_1 + .. + g_m)) + sum_i u_i (k_i exp(g_{i+1} + .. + g_m))^T
//
// A row of S [V, K] needs nothing of the others. K is padded with zeros in buffers; rows of S are never overrun.
#include <vector>

#include "kda.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

// Rows 0 .. count - 1 of k and g as [count, padded]: keys, and exp of g.
struct Tokens {
  int64_t padded;
  std::vector<float> keys, decays;
  Tokens(int64_t most, int64_t width) : padded((width + W - 1) / W * W), keys(most * padded), decays(most * padded) {}
};

struct States {
  Strided k, g;
  Pool state, u;  // u [rows, J, H, V]
  const int64_t *slots, *begins, *counts, *into;  // into [rows, J]
  int64_t rows, heads, keys, values, most;

  void run(int64_t row, int64_t head, Tokens& t) const {
    const int64_t count = counts[row];
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < t.padded; c += W) {
        store(&t.keys[i * t.padded + c], partial(k.at(begins[row] + i, head) + c, keys - c));
        store(&t.decays[i * t.padded + c], exp(partial(g.at(begins[row] + i, head) + c, keys - c)));
      }
    const int64_t* to = into + row * most;
    for (int64_t v = 0; v < values; v++)
      for (int64_t c = 0; c < keys; c += W) {  // the slot it lives in may be one of those written
        vf s = partial(state.at(slots[row], head, v) + c, keys - c);
        for (int64_t i = 0; i < count; i++) {
          s = s * load(&t.decays[i * t.padded + c]) + u.at(row, i, head)[v] * load(&t.keys[i * t.padded + c]);
          store_partial(state.at(to[i], head, v) + c, s, keys - c);
        }
      }
  }
};

struct Move {
  int64_t slot, count, into;
};

struct Commit {  // of pools with layers in front
  Pool state, rec_u, rec_k, rec_g;
  const int64_t* layer;  // strides of the four
  const Move* moves;
  int64_t layers, rows, heads, keys, values;

  static float* at(const Pool& p, int64_t stride, int64_t l, int64_t s, int64_t i, int64_t j) {
    return p.at(s, i, j) + l * stride;
  }

  void run(int64_t l, const Move& m, int64_t head, Tokens& t) const {
    for (int64_t c = 0; c < t.padded; c += W) {
      vf after = {};
      for (int64_t i = m.count - 1; i >= 0; i--) {
        store(&t.keys[i * t.padded + c], partial(at(rec_k, layer[2], l, m.slot, i, head) + c, keys - c) * exp(after));
        after += partial(at(rec_g, layer[3], l, m.slot, i, head) + c, keys - c);
      }
      store(&t.decays[c], exp(after));
    }
    for (int64_t v = 0; v < values; v++) {
      const float* from = at(state, layer[0], l, m.slot, head, v);
      float* to = at(state, layer[0], l, m.into, head, v);
      for (int64_t c = 0; c < keys; c += W) {
        vf sum = {};
        for (int64_t i = 0; i < m.count; i++)
          sum += at(rec_u, layer[1], l, m.slot, i, head)[v] * load(&t.keys[i * t.padded + c]);
        const vf s = partial(from + c, keys - c);
        store_partial(to + c, m.count ? s * load(&t.decays[c]) + sum : s, keys - c);
      }
    }
  }
};

}  // namespace
}  // namespace k3

// tensors: k, g, state, u. strides: (token, head) of k and g, (slot, head, row) of the state, (row, i, head) of u.
// sizes: rows, heads, K, V, J. lists: slots, begins, counts [rows] each, then into [rows, J]. No target twice.
K3_EXPORT void k3_kda_states(float* const* tensors, const int64_t* strides, const int64_t* sizes, const int64_t* lists,
                             int64_t threads) {
  using namespace k3;
  const int64_t rows = sizes[0], heads = sizes[1];
  const States p{{tensors[0], strides[0], strides[1]},
                 {tensors[1], strides[2], strides[3]},
                 {tensors[2], strides[4], strides[5], strides[6]},
                 {tensors[3], strides[7], strides[8], strides[9]},
                 lists, lists + rows, lists + 2 * rows, lists + 3 * rows, rows, heads, sizes[2], sizes[3], sizes[4]};
  Tasks work;
  auto body = [&](Team) {
    Tokens room(p.most, p.keys);
    for (int64_t t; work.take(rows * heads, t);) p.run(t / heads, t % heads, room);
  };
  parallel(rows * heads > 1 ? threads : 1, body);
}

// tensors: state, rec_u, rec_k, rec_g. strides: layer of each, then three more of each: (slot, head, row), (slot, row,
// head). sizes: layers, moves, of them first, heads, K, V, J. moves: slot, count, into. The first ones go elsewhere and
// are done before the others, which are in place.
K3_EXPORT void k3_kda_commit(float* const* tensors, const int64_t* strides, const int64_t* sizes, const int64_t* moves,
                             int64_t threads) {
  using namespace k3;
  Pool pool[4];
  for (int i = 0; i < 4; i++) pool[i] = {tensors[i], strides[4 + 3 * i], strides[5 + 3 * i], strides[6 + 3 * i]};
  const int64_t layers = sizes[0], rows = sizes[1], first = sizes[2], heads = sizes[3];
  const Commit p{pool[0], pool[1], pool[2], pool[3], strides, reinterpret_cast<const Move*>(moves),
                 layers, rows, heads, sizes[4], sizes[5]};
  Tasks elsewhere, in_place;
  auto body = [&](Team team) {
    Tokens room(sizes[6], p.keys);
    for (int64_t t; elsewhere.take(layers * first * heads, t);)
      p.run(t / (first * heads), p.moves[t / heads % first], t % heads, room);
    team.barrier();
    const int64_t rest = rows - first;
    for (int64_t t; in_place.take(layers * rest * heads, t);)
      p.run(t / (rest * heads), p.moves[first + t / heads % rest], t % heads, room);
  };
  parallel(layers * rows * heads > 1 ? threads : 1, body);
}
