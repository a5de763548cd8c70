// Latent attention of many queries a row over pages: keys and values of a stretch of the context made once for all.
//
//   latents of a stretch --turned--> [panels of tokens, L+r]                                 some tokens at a time
//   (head, KEYS tokens)    kv_b --> keys [panels of tokens, n+r] and values [panels of channels]
//   (head, QUERIES)        over blocks of KEYS: scores, online softmax, weighted values    kept until the last stretch
//
// Queries and keys are cut into blocks that start at the row's first, so its bits depend on nothing but the row: how
// far a stretch goes is a matter of memory alone.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "arguments.h"
#include "kda.h"
#include "latents.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int64_t QUERIES = 16 * TALL;       // of a block
constexpr int64_t KEYS = 128;                // tokens of a block, whole panels
constexpr int64_t PANEL = WIDE * W;          // tokens or channels of a panel
constexpr int64_t SCORES = KEYS + W;         // floats between the scores of two queries: off the powers of two
constexpr int64_t STRETCH = int64_t(1) << 22;  // floats of the keys and values of a stretch, at least one block of each

int64_t blocks(int64_t n, int64_t of) { return (n + of - 1) / of; }

// f(number of vectors, first channel) for panels of WIDE vectors, and one of the rest.
template <class F, int N = WIDE>
void panels(int64_t vectors, const F& f, int64_t column = 0) {
  for (; vectors >= N; vectors -= N, column += N * W) f(std::integral_constant<int, N>{}, column);
  if constexpr (N > 1) {
    if (vectors) panels<F, N - 1>(vectors, f, column);
  }
}

struct Call {
  Strided q, out;
  const void* kv_b;  // float or, where ``half``, bfloat16
  Latents context;
  Requests requests;
  int64_t heads, nope, rope, latent, value, kv_row;
  bool half, divided;  // divided: without the requests that are cpu/mla.cpp's
  float scale;

  std::vector<Row> rows;
  int64_t vectors, depth, stretch;  // of a value; of a key; tokens
  std::unique_ptr<float[]> keys_of, values_of;  // kv_b of each head: [n, L], and panels of [L, v]
  std::unique_ptr<float[]> turned, keys, values;  // of a stretch: panels [L+r, tokens]; of each head and block
  std::unique_ptr<float[]> mixed, sums;           // of each head and block of queries: [QUERIES, v], top and total

  int64_t high() const { return vectors * W; }
  float* keys_at(int64_t h, int64_t block) const { return &keys[(h * (stretch / KEYS) + block) * KEYS * depth]; }
  float* values_at(int64_t h, int64_t block) const { return &values[(h * (stretch / KEYS) + block) * KEYS * high()]; }

  void choose() {
    for (int64_t r = 0; r < requests.num; r++)
      if (divided ? requests.pays(r, latent, nope + value) : requests.count(r) > 0) rows.push_back(requests.row(r));
  }

  void plan() {
    int64_t longest = 0, most = 0;
    for (const Row& row : rows) {
      longest = std::max(longest, row.paged);
      most = std::max(most, blocks(row.count, QUERIES));
    }
    vectors = blocks(value, W), depth = nope + rope;
    stretch = std::max(KEYS, STRETCH / (heads * (depth + high())) / KEYS * KEYS);
    stretch = std::min(stretch, blocks(longest, KEYS) * KEYS);
    keys_of.reset(new float[heads * nope * latent]);
    values_of.reset(new float[heads * latent * high()]);
    turned.reset(new float[stretch * context.width]);
    keys.reset(new float[heads * stretch * depth]);
    values.reset(new float[heads * stretch * high()]);
    mixed.reset(new float[heads * most * QUERIES * high()]);
    sums.reset(new float[heads * most * QUERIES * 2]);
  }

  // kv_b of a head: its keys as rows, its values turned.
  template <class B>
  void unpack(int64_t h) const {
    const B* from = static_cast<const B*>(kv_b) + h * (nope + value) * kv_row;
    for (int64_t n = 0; n < nope; n++)
      for (int64_t c = 0; c < latent; c++) keys_of[(h * nope + n) * latent + c] = load_one(from + n * kv_row + c);
    from += nope * kv_row;
    panels(vectors, [&](auto n, int64_t column) {
      float* to = &values_of[h * latent * high() + column * latent];
      for (int64_t v = 0; v < n * W; v += W)
        for (int64_t c = 0; c < latent; c += W) {
          vf r[W];
          for (int64_t i = 0; i < W; i++)
            r[i] = column + v + i < value ? partial(from + (column + v + i) * kv_row + c, latent - c) : vf{};
          transpose(r);
          for (int64_t i = 0; i < W && c + i < latent; i++) store(to + (c + i) * n * W + v, r[i]);
        }
    });
  }

  // A panel of tokens of the stretch that starts at ``first``; tokens past the context count as zero.
  void turn(const Row& row, int64_t first, int64_t panel) const {
    float* to = &turned[panel * PANEL * context.width];
    for (int64_t t = 0; t < PANEL; t += W) {
      const float* from[W];
      for (int64_t i = 0; i < W; i++) {
        const int64_t token = first + panel * PANEL + t + i;
        from[i] = token < row.paged ? context.at(row, token) : nullptr;
      }
      for (int64_t c = 0; c < context.width; c += W) {
        vf r[W];
        for (int64_t i = 0; i < W; i++) r[i] = from[i] ? partial(from[i] + c, context.width - c) : vf{};
        transpose(r);
        for (int64_t i = 0; i < W && c + i < context.width; i++) store(to + (c + i) * PANEL + t, r[i]);
      }
    }
  }

  void expand(int64_t h, int64_t block, int64_t tokens) const {
    for (int64_t p = 0; p < blocks(tokens, PANEL); p++) {
      const float* from = &turned[(block * KEYS / PANEL + p) * PANEL * context.width];
      float* key = keys_at(h, block) + p * PANEL * depth;
      deep_panel<WIDE>({&keys_of[h * nope * latent], latent, 1}, nope, from, PANEL, latent, key, PANEL, Into::set);
      std::copy(from + latent * PANEL, from + context.width * PANEL, key + nope * PANEL);
      panels(vectors, [&](auto n, int64_t column) {
        deep_panel<n>({from, 1, PANEL}, PANEL, &values_of[h * latent * high() + column * latent], n * W, latent,
                      values_at(h, block) + column * KEYS + p * PANEL * n * W, n * W, Into::set);
      });
    }
  }

  struct Room {
    std::vector<float> asked, scores, fade;
  };

  // Queries from ``begin`` on, of one head, over the keys of the stretch [first, last).
  void attend(const Row& row, int64_t h, int64_t block, int64_t first, int64_t last, Room& room) const {
    const int64_t begin = block * QUERIES, count = std::min(QUERIES, row.count - begin);
    const int64_t at = h * blocks(row.count, QUERIES) + block, seen = row.paged - row.count + begin;
    float *to = &mixed[at * QUERIES * high()], *top = &sums[at * QUERIES * 2], *total = top + QUERIES;
    if (first >= seen + count) return;
    if (first == 0) {
      std::fill(to, to + count * high(), 0.0f);
      std::fill(top, top + count, -INFINITY);
      std::fill(total, total + count, 0.0f);
    }
    room.asked.resize(QUERIES * depth), room.scores.resize(QUERIES * SCORES), room.fade.resize(QUERIES);
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < depth; c++) room.asked[i * depth + c] = q.at(row.begin + begin + i, h)[c] * scale;
    last = std::min(last, seen + count);
    for (int64_t key = first; key < last; key += KEYS)
      meet(keys_at(h, (key - first) / KEYS), values_at(h, (key - first) / KEYS), seen - key, count,
           std::min(KEYS, last - key), to, top, total, room);
    if (last < seen + count) return;
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < value; c += W)
        store_partial(out.at(row.begin + begin + i, h) + c, load(to + i * high() + c) / total[i], value - c);
  }

  // ``count`` queries meet ``tokens`` keys, of which query i sees the first ``seen + i + 1``.
  void meet(const float* key, const float* values, int64_t seen, int64_t count, int64_t tokens, float* to, float* top,
            float* total, Room& room) const {
    float *scores = room.scores.data(), *fade = room.fade.data();
    for (int64_t t = 0; t < tokens; t += PANEL, key += PANEL * depth) {
      const int64_t i = std::max<int64_t>(0, t - seen);  // the first query that sees any of the panel
      deep_panel<WIDE>({&room.asked[i * depth], depth, 1}, count - i, key, PANEL, depth, scores + i * SCORES + t,
                       SCORES, Into::set);
    }
    const int64_t from = std::max<int64_t>(0, -seen);
    for (int64_t i = from; i < count; i++)
      weigh(scores + i * SCORES, std::min(tokens, seen + i + 1), blocks(tokens, W) * W, top[i], total[i], fade[i]);
    panels(vectors, [&](auto n, int64_t column) {
      for (int64_t i = from; i < count; i += TALL)
        tall<TALL, n>({scores + i * SCORES, SCORES, 1}, count - i, values + column * KEYS, n * W,
                      std::min(tokens, seen + std::min<int64_t>(i + TALL, count)), to + i * high() + column, high(),
                      Into::fade, fade + i);
    });
  }

  void run(int64_t threads) {
    plan();
    int64_t stretches = 0;
    for (const Row& row : rows) stretches += blocks(row.paged, stretch);
    Tasks unpacks;
    std::unique_ptr<Tasks[]> work(new Tasks[3 * stretches]);
    auto body = [&](Team team) {
      Room room;
      for (int64_t t; unpacks.take(heads, t);) half ? unpack<uint16_t>(t) : unpack<float>(t);
      Tasks* next = work.get();
      for (const Row& row : rows)
        for (int64_t first = 0; first < row.paged; first += stretch, next += 3) {
          const int64_t last = std::min(first + stretch, row.paged), made = blocks(last - first, KEYS);
          const int64_t asked = blocks(row.count, QUERIES);
          for (int64_t t; next[0].take(blocks(last - first, PANEL), t);) turn(row, first, t);
          team.barrier();
          for (int64_t t; next[1].take(heads * made, t);)
            expand(t / made, t % made, std::min(KEYS, last - first - t % made * KEYS));
          team.barrier();
          for (int64_t t; next[2].take(heads * asked, t);)  // the last block sees most and comes first
            attend(row, t % heads, asked - 1 - t / heads, first, last, room);
          team.barrier();
        }
    };
    parallel(threads, body);
  }
};

}  // namespace
}  // namespace k3

// q, out, kv_b, pages, page table, seen, cu. Then R, T, H, n, r, L, v, strides: of q and out (token, head), kv_b's row,
// pages' (page, row); then tokens of a page, pages of a table's row, whether kv_b is kept in bfloat16, whether some
// requests are left to cpu/mla.cpp; scale, threads. Returns one more than the first request that needs more pages than
// it has, or 0.
K3_EXPORT int64_t k3_mla_prefill(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  Call p{};
  p.q.data = of, p.out.data = of, p.kv_b = of.take<const void*>(), p.context.pages = of, p.context.table = of;
  p.requests.seen = of, p.requests.cu = of, p.requests.num = of, p.requests.tokens = of;
  p.heads = of, p.nope = of, p.rope = of, p.latent = of, p.value = of;
  p.q.token = of, p.q.head = of, p.out.token = of, p.out.head = of, p.kv_row = of;
  p.context.width = p.latent + p.rope;
  p.context.page = of, p.context.page_row = of, p.context.size = of, p.context.table_row = of;
  p.half = of.take<int64_t>(), p.divided = of.take<int64_t>(), p.scale = float(of.take<double>());
  const int64_t threads = of;
  if (const int64_t wrong = p.requests.too_long(p.context.table_row * p.context.size)) return wrong;
  p.choose();
  if (!p.rows.empty()) p.run(threads);
  return 0;
}
