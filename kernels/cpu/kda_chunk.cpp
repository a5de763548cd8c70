// KDA over whole rows, 64 tokens at a time: kda_chunk.py has the formulas. A task is one head of one row.
//
//   chunk    q, k, g --decays--> rows (decayed from the chunk's start), ends^T (to its end), P, L
//   panel    R = beta (v - k S^T)   U = (I + L)^-1 R   O = q S^T + P U   S^T <- exp(G) S^T + ends^T U
//
// The state is held transposed, [K, columns of a panel], from a row's first chunk to its last, so that in every
// product what meets a vector is a scalar. A row's bits depend on nothing but its own tokens.
#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <utility>

#include "kda.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int CHUNK = 64, SUB = 16;
constexpr int LINE = 16;             // numbers of a cache line
constexpr int PANEL = WIDE * W;      // columns of a state that are worked on together
constexpr float STEEP = -80.0f;      // a sub-chunk that decays by more is not factorised
constexpr float FLOOR = -104.0f;     // exp is 0 from there on

struct Row {
  int64_t slot, begin, count;
  int64_t offset, into;  // after ``offset`` tokens, if any, the state goes to slot ``into``; or the records' slot
};

struct Call {
  Strided q, k, v, g, beta, out;  // out.data null: only the states matter
  Pool state, rec_u, rec_k, rec_g;  // rec_u.data null: the state moves; otherwise it is read, and these are written
  int64_t rows, heads, keys, values, start;
};

// What a thread works in. Kp is K, Vp is V, rounded up to what vectors need.
struct Room {
  float *queries, *keys;               // [CHUNK, Kp] decayed from the start of the chunk
  float *ends;                         // [Kp, CHUNK] keys decayed to the end of what has been seen, transposed
  float *weights, *lower;              // [CHUNK, CHUNK] P, L
  float *state, *branch;               // [Kp, Vp] by panels; branch: of a checkpoint off the grid
  float *u, *o;                        // [CHUNK, PANEL]
  float *decay, *step, *beta;          // [Kp], [Kp], [CHUNK]
  float *raw, *part, *near, *about;    // [SUB, Kp], [SUB, Kp], [2 SUB, Kp], [Kp, SUB]
  int64_t next, end;                   // token rows to fetch before they are wanted
  std::unique_ptr<float[]> memory;

  Room(int64_t wide, int64_t high) {
    const int64_t sizes[] = {CHUNK * wide, CHUNK * wide, wide * CHUNK, CHUNK * CHUNK, CHUNK * CHUNK, wide * high,
                             wide * high,  CHUNK * PANEL, CHUNK * PANEL, wide, wide, CHUNK,
                             SUB * wide, SUB * wide, 2 * SUB * wide, wide * SUB};
    float** const parts[] = {&queries, &keys, &ends, &weights, &lower, &state, &branch, &u,
                             &o, &decay, &step, &beta, &raw, &part, &near, &about};
    int64_t total = 0;
    for (int64_t n : sizes) total += n;
    memory.reset(new float[total]);
    float* at = memory.get();
    for (size_t i = 0; i < std::size(parts); i++) *parts[i] = at, at += sizes[i];
  }
};

struct Head {  // of one row
  const Call& p;
  Room& r;
  int64_t head, wide;

  void load_rows(const Strided& from, int64_t token, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < wide; c += W) store(to + i * wide + c, partial(from.at(token + i, head) + c, p.keys - c));
  }

  // A head's part of a token row is short and far from the next, so no hardware guesses it: one of the next chunk at
  // a time, between products. (Inlined, or GCC takes the function for one without effect.)
  __attribute__((always_inline)) void fetch_ahead() const {
    if (r.next >= r.end) return;
    for (const Strided* from : {&p.q, &p.k, &p.g})
      for (int64_t c = 0; c < p.keys; c += LINE) __builtin_prefetch(from->at(r.next, head) + c);
    for (int64_t c = 0; c < p.values; c += LINE) __builtin_prefetch(p.v.at(r.next, head) + c);
    r.next++;
  }

  // One sub-chunk's sums of log decays, exponentiated: rows from its start, part to its end, near about its
  // middle, step over all of it. True: too steep for near.
  bool decays(int64_t count, float* from_start, float* to_end, float* middle) const {
    vf lowest = {};
    for (int64_t c = 0; c < wide; c += W) {
      vf g[SUB], sum = {};
      for (int i = 0; i < SUB; i++) {
        g[i] = i < count ? load(r.raw + i * wide + c) : vf{};
        g[i] = g[i] < FLOOR ? splat(FLOOR) : g[i];
      }
      for (int i = 0; i < SUB; i++) {
        sum += g[i];
        store(from_start + i * wide + c, exp(sum));
      }
      store(r.step + c, exp(sum));
      lowest = sum < lowest ? sum : lowest;
      sum = vf{};
      for (int i = SUB - 1; i >= 0; sum += g[i--]) store(to_end + i * wide + c, exp(sum));
      sum = vf{};
      for (int i = SUB / 2 - 1; i >= 0; sum -= g[i--]) store(middle + i * wide + c, exp(sum));
      sum = vf{};
      for (int i = SUB / 2; i < SUB; i++) {
        sum += g[i];
        store(middle + i * wide + c, exp(sum));
      }
    }
    bool steep = false;
    for (int i = 0; i < W; i++) steep |= lowest[i] < STEEP;
    return steep;
  }

  // The sub-chunk against itself where nothing may be factorised: G_i - G_j is summed for every pair.
  void steep_scores(int64_t token, int64_t count, int64_t at) const {
    for (int64_t j = 0; j < count; j++) {
      float* sum = r.about;  // [Kp]
      std::fill(sum, sum + wide, 0.0f);
      for (int64_t i = j; i < count; i++) {
        vf asked = {}, seen = {};
        for (int64_t c = 0; c < wide; c += W) {
          vf g = load(r.raw + i * wide + c);
          g = g < FLOOR ? splat(FLOOR) : g;
          const vf total = i == j ? vf{} : load(sum + c) + g;
          store(sum + c, total);
          const vf key = partial(p.k.at(token + j, head) + c, p.keys - c) * exp(total);
          asked += key * partial(p.q.at(token + i, head) + c, p.keys - c);
          seen += key * partial(p.k.at(token + i, head) + c, p.keys - c);
        }
        r.weights[(at + i) * CHUNK + at + j] = lane_sum(asked);
        r.lower[(at + i) * CHUNK + at + j] = lane_sum(seen);
      }
    }
  }

  // Queries, keys and scores of the sub-chunk at ``at`` of a chunk; ends and decay move on to its end.
  void sub_chunk(int64_t token, int64_t count, int64_t at) const {
    float *queries = r.queries + at * wide, *keys = r.keys + at * wide, *middle = r.near + SUB * wide;
    load_rows(p.g, token, count, r.raw);
    const bool steep = decays(count, queries, r.part, middle);
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < wide; c += W) {
        const int64_t x = i * wide + c;
        const vf q = partial(p.q.at(token + i, head) + c, p.keys - c);
        const vf k = partial(p.k.at(token + i, head) + c, p.keys - c);
        const vf inner = load(queries + x), about = load(middle + x);
        store(queries + x, q * inner);
        store(keys + x, k * inner);
        store(r.part + x, k * load(r.part + x));
        store(r.near + x, q * about);
        store(middle + x, k * about);
        if (!steep) store(r.raw + x, k / about);
      }
    float *weights = r.weights + at * CHUNK, *lower = r.lower + at * CHUNK;
    product({queries, wide, 1}, count, r.ends, CHUNK, p.keys, weights, CHUNK, at / W, Into::set);
    product({keys, wide, 1}, count, r.ends, CHUNK, p.keys, lower, CHUNK, at / W, Into::set);
    if (steep) {
      steep_scores(token, count, at);
    } else {
      transpose(r.raw, wide, count, wide, r.about, SUB, SUB);
      product({r.near, wide, 1}, count, r.about, SUB, p.keys, weights + at, CHUNK, SUB / W, Into::set);
      product({middle, wide, 1}, count, r.about, SUB, p.keys, lower + at, CHUNK, SUB / W, Into::set);
    }
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = at + i + 1; j < at + SUB; j++) weights[i * CHUNK + j] = 0.0f;
    for (int64_t c = 0; c < p.keys; c++)
      for (int64_t j = 0; j < at; j += W) store(r.ends + c * CHUNK + j, load(r.ends + c * CHUNK + j) * r.step[c]);
    transpose(r.part, wide, count, wide, r.ends + at, CHUNK, SUB);
    for (int64_t c = 0; c < wide; c += W) {
      const vf before = at ? load(r.decay + c) : splat(1.0f);
      if (at)
        for (int64_t i = 0; i < count; i++) {
          store(queries + i * wide + c, load(queries + i * wide + c) * before);
          store(keys + i * wide + c, load(keys + i * wide + c) * before);
        }
      store(r.decay + c, before * load(r.step + c));
    }
  }

  // u = beta (v - seen - lower u), in the place of seen: a sum is complete before it meets v, which it may be far
  // below, and rounding is of the small number.
  template <int N>
  void solve(int64_t token, int64_t count, int64_t column) const {
    const int64_t left = p.values - column;
    for (int64_t at = 0; at < count; at += SUB) {
      const int64_t rows = std::min<int64_t>(SUB, count - at);
      float* u = r.u + at * N * W;
      if (at) panel<N>({r.lower + at * CHUNK, CHUNK, 1}, rows, r.u, N * W, at, u, N * W, Into::add);
      for (int64_t i = 0; i < rows; i++) {
        const float* lower = r.lower + (at + i) * CHUNK + at;
        const float* v = p.v.at(token + at + i, head) + column;
        vf seen[N];
        for (int n = 0; n < N; n++) seen[n] = load(u + (i * N + n) * W);
        for (int64_t j = 0; j < i; j++)
          for (int n = 0; n < N; n++) seen[n] += lower[j] * load(u + (j * N + n) * W);
        for (int n = 0; n < N; n++) {
          const vf value = n * W < left ? partial(v + n * W, left - n * W) : vf{};
          store(u + (i * N + n) * W, (value - seen[n]) * r.beta[at + i]);
        }
      }
    }
  }

  // N vectors of the state's columns, from ``column`` on, through one chunk.
  template <int N>
  void apply(float* state, const Row& row, int64_t done, int64_t count, int64_t column, bool outputs) const {
    const int64_t token = row.begin + done, left = p.values - column;
    constexpr int64_t width = N * W;
    const auto ahead = [this]() __attribute__((always_inline)) { fetch_ahead(); };
    panel<N>({r.keys, wide, 1}, count, state, width, p.keys, r.u, width, Into::set, nullptr, ahead);
    solve<N>(token, count, column);
    if (outputs) {
      panel<N>({r.queries, wide, 1}, count, state, width, p.keys, r.o, width, Into::set, nullptr, ahead);
      for (int64_t at = 0; at < count; at += SUB) {
        const int64_t rows = std::min<int64_t>(SUB, count - at);
        panel<N>({r.weights + at * CHUNK, CHUNK, 1}, rows, r.u, width, at + rows, r.o + at * width, width, Into::add);
      }
      for (int64_t i = 0; i < count; i++)
        for (int n = 0; n < N && n * W < left; n++)
          store_partial(p.out.at(token + i + p.start, head) + column + n * W, load(r.o + i * width + n * W), left - n * W);
    }
    if (outputs && p.rec_u.data)
      for (int64_t i = 0; i < count; i++)
        for (int n = 0; n < N && n * W < left; n++)
          store_partial(p.rec_u.at(row.into, done + i, head) + column + n * W, load(r.u + i * width + n * W), left - n * W);
    if (!p.rec_u.data || done + count < row.count)
      panel<N>({r.ends, CHUNK, 1}, p.keys, r.u, width, count, state, width, Into::fade, r.decay, ahead);
  }

  template <int N = WIDE>
  void panels(float* state, const Row& row, int64_t done, int64_t count, int64_t column, bool outputs) const {
    for (; p.values - column > (N - 1) * W; column += N * W, state += N * W * wide)
      apply<N>(state, row, done, count, column, outputs);
    if constexpr (N > 1) {
      if (column < p.values) panels<N - 1>(state, row, done, count, column, outputs);
    }
  }

  void chunk(float* state, const Row& row, int64_t done, int64_t count, bool outputs) const {
    for (int64_t i = 0; i < count; i++) r.beta[i] = *p.beta.at(row.begin + done + i, head);
    for (int64_t at = 0; at < count; at += SUB)
      sub_chunk(row.begin + done + at, std::min<int64_t>(SUB, count - at), at);
    r.next = row.begin + done + count;
    r.end = row.begin + std::min(row.count, done + count + CHUNK);
    panels(state, row, done, count, 0, outputs);
  }

  // Between the slot's [V, K] and the panels of [K, columns].
  void move(float* slot, float* panels, bool out) const {
    for (int64_t column = 0; column < p.values;) {
      const int64_t vectors = std::min<int64_t>(WIDE, (p.values - column + W - 1) / W), width = vectors * W;
      const int64_t rows = std::min(width, p.values - column);
      float* values = slot + column * p.state.b;
      if (!out) {
        transpose(values, p.state.b, rows, p.keys, panels, width, width);
      } else {
        for (int64_t v = 0; v < rows; v += W)
          for (int64_t k = 0; k < p.keys; k += W) {
            vf x[W];
            for (int64_t i = 0; i < W; i++) x[i] = k + i < p.keys ? load(panels + (k + i) * width + v) : vf{};
            transpose(x);
            for (int64_t i = 0; i < W && v + i < rows; i++)
              store_partial(values + (v + i) * p.state.b + k, x[i], p.keys - k);
          }
      }
      column += width;
      panels += width * wide;
    }
  }

  void records(const Row& row) const {
    if (!p.rec_k.data) return;
    for (int64_t i = 0; i < row.count; i++) {
      std::memcpy(p.rec_k.at(row.into, i, head), p.k.at(row.begin + i, head), sizeof(float) * p.keys);
      std::memcpy(p.rec_g.at(row.into, i, head), p.g.at(row.begin + i, head), sizeof(float) * p.keys);
    }
  }

  void run(const Row& row, int64_t high) const {
    move(p.state.at(row.slot, head, 0), r.state, false);
    for (int64_t done = 0; done < row.count; done += CHUNK) {
      if (row.offset && row.offset / CHUNK == done / CHUNK) checkpoint(row, done, high);
      chunk(r.state, row, done, std::min<int64_t>(CHUNK, row.count - done), p.out.data);
    }
    if (p.rec_u.data) return records(row);
    move(p.state.at(row.slot, head, 0), r.state, true);
    if (row.offset == row.count) move(p.state.at(row.into, head, 0), r.state, true);
  }

  void checkpoint(const Row& row, int64_t done, int64_t high) const {
    if (row.offset == row.count) return;
    std::copy(r.state, r.state + wide * high, r.branch);
    if (row.offset > done) chunk(r.branch, row, done, row.offset - done, false);
    move(p.state.at(row.into, head, 0), r.branch, true);
  }
};

}  // namespace
}  // namespace k3

// tensors: q, k, v, g, beta, out, state, rec_u, rec_k, rec_g. strides: (token, head) of the first six, then (slot,
// head, row) of the state, then (slot, row, head) of each record, which may be null. sizes: rows, heads, K, V, start.
// rows [R, 5]: slot, first token, tokens, offset of a checkpoint or 0, its slot or that of the records. No slot twice.
K3_EXPORT void k3_kda_rows(float* const* tensors, const int64_t* strides, const int64_t* sizes, const int64_t* rows,
                           int64_t threads) {
  using namespace k3;
  Strided part[6];
  for (int i = 0; i < 6; i++) part[i] = {tensors[i], strides[2 * i], strides[2 * i + 1]};
  Pool pool[4];
  for (int i = 0; i < 4; i++) pool[i] = {tensors[6 + i], strides[12 + 3 * i], strides[13 + 3 * i], strides[14 + 3 * i]};
  const Call p{part[0], part[1], part[2], part[3], part[4], part[5], pool[0], pool[1], pool[2],
               pool[3], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  const int64_t wide = (p.keys + W - 1) / W * W, high = (p.values + W - 1) / W * W;
  const Row* const each = reinterpret_cast<const Row*>(rows);
  Tasks work;
  auto body = [&](Team) {
    Room room(wide, high);
    for (int64_t t; work.take(p.rows * p.heads, t);) Head{p, room, t % p.heads, wide}.run(each[t / p.heads], high);
  };
  parallel(p.rows * p.heads > 1 ? threads : 1, body);
}
