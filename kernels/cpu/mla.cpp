// Latent attention of few queries a row over pages, read where they lie and once for all heads and queries.
//
//   q --kv_b's keys--> query [tokens, H, L+r]      a head at a time; or q comes so already
//   (row, part of its context)  blocks of tokens: scores, online softmax, weighted latents    -> top, total, mixed
//   parts merged --kv_b's values--> o              a head and a few tokens at a time; or o stays latent
//
// A context is cut into parts by its length and the row's queries, whatever the threads, so a row's bits depend on
// nothing but the row.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "kda.h"
#include "latents.h"
#include "threads.h"
#include "tiles.h"

namespace k3 {
namespace {

constexpr int64_t BLOCK = 32;          // tokens of a context that meet the queries together
constexpr int64_t WIDE_BLOCK = 64;     // the same where they are turned for it, whole panels
constexpr int64_t TURN = 32;           // queries, of all heads, from which on that pays
constexpr int64_t PANEL = WIDE * W;    // tokens side by side
constexpr int64_t PART = 512;          // tokens of a context that one thread goes through, at least
constexpr int64_t MEETINGS = 1 << 14;  // queries times parts of a row, about at most: longer contexts have longer parts
constexpr int64_t HELD = 1 << 24;      // floats that the parts of the rows of one pass have, one row at least
constexpr int64_t GROUP = 4 * TILE;    // tokens whose means are expanded together
constexpr int64_t STRIP = 16;          // of a head's values, those expanded together

struct Part {
  int64_t row, first, last, at;  // of its numbers, see Pass::parts
};

struct Call {
  Strided q, out;    // [T, H, n+r] -> [T, H, v]; without kv_b [T, H, L+r] -> [T, H, L]
  const void* kv_b;  // float or, where ``half``, bfloat16
  bool half;
  float* lse;  // [H, lse_head], or null
  Latents context;
  const Row* rows;
  const int64_t* limits;  // of each token of each row, one after the other: the tokens that it sees
  int64_t num_rows, heads, nope, rope, latent, value, kv_row, lse_head;
  float scale;
};

// Some of the rows.
struct Pass {
  const Call& call;
  const int64_t padded = (call.context.width + W - 1) / W * W;
  const Row* rows{};
  std::vector<int64_t> token{}, limit{}, row_of{};  // of each query token
  std::vector<int64_t> first_token{}, first_part{};  // of each row
  std::vector<Part> cut{};
  std::unique_ptr<float[]> asked{}, query{}, parts{};  // [tokens, H, n], [tokens, H, padded], queries x (L + 2) a part

  // Rows from ``first`` on, and their first limit; returns how many there are.
  int64_t plan(int64_t first, const int64_t* limits) {
    int64_t floats = 0, i = first;
    rows = call.rows + first;
    for (; i < call.num_rows && floats < HELD; i++) {
      const Row& row = call.rows[i];
      const int64_t context = limits[row.count - 1], count = row.count * call.heads;
      const int64_t step = PART * std::max<int64_t>(1, (context * count + PART * MEETINGS - 1) / (PART * MEETINGS));
      first_part.push_back(cut.size()), first_token.push_back(token.size());
      for (int64_t t = 0; t < row.count; t++) {
        token.push_back(row.begin + t), limit.push_back(*limits++), row_of.push_back(i - first);
      }
      for (int64_t at = 0; at < context; at += step, floats += count * (call.latent + 2))
        cut.push_back({i - first, at, std::min(at + step, context), floats});
    }
    first_part.push_back(cut.size()), first_token.push_back(token.size());
    parts.reset(new float[floats]);
    asked.reset(new float[token.size() * call.heads * call.nope]);
    query.reset(new float[token.size() * call.heads * padded]);
    return i - first;
  }

  void scaled(int64_t t) const {
    const int64_t taken = call.kv_b ? call.latent : 0;  // channels of a query that kv_b makes
    const int64_t rest = call.context.width - taken, nope = call.nope;
    for (int64_t h = 0; h < call.heads; h++) {
      const float* from = call.q.at(token[t], h);
      float *to = asked.get() + (t * call.heads + h) * nope, *pe = query.get() + (t * call.heads + h) * padded + taken;
      for (int64_t c = 0; c < nope; c++) to[c] = from[c] * call.scale;
      for (int64_t c = 0; c < padded - taken; c++) pe[c] = c < rest ? from[nope + c] * call.scale : 0.0f;
    }
  }

  template <class B>
  void absorb(int64_t h) const {
    const B* keys = static_cast<const B*>(call.kv_b) + h * (call.nope + call.value) * call.kv_row;
    product({asked.get() + h * call.nope, call.heads * call.nope, 1}, token.size(), keys, call.kv_row, call.nope,
            query.get() + h * padded, call.heads * padded, call.latent / W, Into::set);
  }

  struct Room {
    std::vector<float> known, turned, scores, fade;
    std::vector<const float*> asks;
  };

  // Scores [count, block] of the ``tokens`` rows of room.known.
  void score(const float* ask, int64_t count, int64_t tokens, int64_t block, Room& room) const {
    float* scores = room.scores.data();
    if (count < TURN) {
      std::fill(scores, scores + count * block, 0.0f);
      for (int64_t i = 0; i < count; i++) room.asks[i] = ask + i * padded;
      for (int64_t i = 0; i < count; i += TILE)
        tiles(&room.asks[i], count - i, 0, room.known.data(), block, padded, padded, scores + i * block);
      return;
    }
    for (int64_t t = 0; t < tokens; t += PANEL) {
      transpose(&room.known[t * padded], padded, std::min(PANEL, tokens - t), padded, room.turned.data(), PANEL, PANEL);
      deep_panel<WIDE>({ask, padded, 1}, count, room.turned.data(), PANEL, call.context.width, scores + t, block,
                       Into::set);
    }
  }

  void attend(const Part& part, Room& room) const {
    const Row& row = rows[part.row];
    const int64_t count = row.count * call.heads, latent = call.latent, begin = first_token[part.row];
    float *mixed = parts.get() + part.at, *top = mixed + count * latent, *total = top + count;
    const int64_t block = count < TURN ? BLOCK : WIDE_BLOCK;
    const float* ask = query.get() + begin * call.heads * padded;
    room.known.assign(block * padded, 0.0f);
    room.turned.resize(PANEL * padded);
    room.scores.resize(count * block);
    room.fade.resize(count);
    room.asks.resize(count);
    std::fill(mixed, mixed + count * latent, 0.0f);
    std::fill(top, total, -INFINITY);
    std::fill(total, total + count, 0.0f);
    for (int64_t first = part.first; first < part.last; first += block) {
      const int64_t tokens = std::min(block, part.last - first);
      for (int64_t t = 0; t < tokens; t++)
        std::memcpy(&room.known[t * padded], call.context.at(row, first + t), sizeof(float) * call.context.width);
      score(ask, count, tokens, block, room);
      for (int64_t i = 0; i < count; i++)
        weigh(&room.scores[i * block], std::min(tokens, limit[begin + i / call.heads] - first), block, top[i], total[i],
              room.fade[i]);
      product({room.scores.data(), block, 1}, count, room.known.data(), padded, tokens, mixed, latent, latent / W,
              Into::fade, room.fade.data());
    }
  }

  // The mean of token t for head h, over all parts -> z [L], and the logarithm of its sum. Of nothing: 0, -inf.
  float merge(int64_t t, int64_t h, float* z) const {
    const int64_t r = row_of[t], latent = call.latent, count = (first_token[r + 1] - first_token[r]) * call.heads;
    const int64_t i = (t - first_token[r]) * call.heads + h;
    float peak = -INFINITY, sum = 0.0f;
    for (int64_t p = first_part[r]; p < first_part[r + 1]; p++)
      peak = std::max(peak, parts[cut[p].at + count * latent + i]);
    const float base = peak == -INFINITY ? 0.0f : peak;
    std::fill(z, z + latent, 0.0f);
    for (int64_t p = first_part[r]; p < first_part[r + 1]; p++) {
      const float* part = parts.get() + cut[p].at;
      const float share = std::exp(part[count * latent + i] - base);
      sum += share * part[count * (latent + 1) + i];
      for (int64_t c = 0; c < latent; c += W) store(z + c, load(z + c) + share * load(part + i * latent + c));
    }
    if (sum == 0.0f) return -INFINITY;
    for (int64_t c = 0; c < latent; c += W) store(z + c, load(z + c) / sum);
    return peak + std::log(sum);
  }

  void leave(int64_t h, int64_t first) const {  // latent as it is
    for (int64_t t = first; t < std::min<int64_t>(first + GROUP, token.size()); t++)
      call.lse[h * call.lse_head + token[t]] = merge(t, h, call.out.at(token[t], h));
  }

  template <class B>
  void expand(int64_t h, int64_t first, std::vector<float>& room) const {
    const int64_t count = std::min<int64_t>(GROUP, token.size() - first), latent = call.latent;
    room.resize(GROUP * latent + STRIP * latent + TILE * STRIP);
    float *wide = &room[GROUP * latent], *sums = wide + STRIP * latent;
    const float* z[GROUP];
    for (int64_t i = 0; i < count; i++) {
      merge(first + i, h, &room[i * latent]);
      z[i] = &room[i * latent];
    }
    for (int64_t v = 0; v < call.value; v += STRIP) {
      const int64_t some = std::min(STRIP, call.value - v);
      const B* values = static_cast<const B*>(call.kv_b) + (h * (call.nope + call.value) + call.nope + v) * call.kv_row;
      const float* at = wide;
      int64_t pitch = latent;
      if constexpr (std::is_same_v<B, float>)
        if (some == STRIP) at = values, pitch = call.kv_row;
      if (at == wide)
        for (int64_t n = 0; n < STRIP; n++)
          for (int64_t c = 0; c < latent; c += W)
            store(wide + n * latent + c, n < some ? load(values + n * call.kv_row + c) : vf{});
      for (int64_t i = 0; i < count; i += TILE) {
        std::fill(sums, sums + TILE * STRIP, 0.0f);
        tiles(z + i, count - i, 0, at, STRIP, pitch, latent, sums);
        for (int64_t j = i; j < std::min<int64_t>(i + TILE, count); j++)
          std::memcpy(call.out.at(token[first + j], h) + v, sums + (j - i) * STRIP, sizeof(float) * some);
      }
    }
  }

  void run(int64_t threads) {
    Tasks scales, absorbs, attends, ends;
    const int64_t tokens = token.size(), groups = (tokens + GROUP - 1) / GROUP;
    auto body = [&](Team team) {
      for (int64_t t; scales.take(tokens, t);) scaled(t);
      team.barrier();
      if (call.kv_b)
        for (int64_t t; absorbs.take(call.heads, t);) call.half ? absorb<uint16_t>(t) : absorb<float>(t);
      team.barrier();
      Room room;
      for (int64_t t; attends.take(cut.size(), t);) attend(cut[t], room);
      team.barrier();
      for (int64_t t; ends.take(call.heads * groups, t);) {
        const int64_t h = t / groups, first = t % groups * GROUP;
        if (!call.kv_b) leave(h, first);
        else call.half ? expand<uint16_t>(h, first, room.known) : expand<float>(h, first, room.known);
      }
    };
    parallel(threads, body);
  }
};

}  // namespace
}  // namespace k3

// tensors: q, out, kv_b, pages, own rows, lse; without kv_b queries and results are latent, and lse is written too.
// sizes: rows, H, n, r, L, v, then strides: q and out (token, head), kv_b's row, pages' (page, row), then tokens of a
// page, pages of a table's row, whether kv_b is kept in bfloat16, strides of lse's head and of own rows. rows [R, 5] as
// in latents.h; limits of each of their tokens, never less than the one before. L is a multiple of a vector.
K3_EXPORT void k3_mla_attend(void* const* tensors, const int64_t* sizes, const int64_t* table, const int64_t* rows,
                             const int64_t* limits, float scale, int64_t threads) {
  k3::Call p{};
  p.num_rows = sizes[0], p.heads = sizes[1], p.nope = sizes[2], p.rope = sizes[3], p.latent = sizes[4];
  p.value = sizes[5], p.kv_row = sizes[10], p.lse_head = sizes[16], p.scale = scale;
  p.q = {static_cast<float*>(tensors[0]), sizes[6], sizes[7]};
  p.out = {static_cast<float*>(tensors[1]), sizes[8], sizes[9]};
  p.kv_b = tensors[2], p.half = sizes[15], p.lse = static_cast<float*>(tensors[5]);
  p.rows = reinterpret_cast<const k3::Row*>(rows), p.limits = limits;
  const float *pages = static_cast<const float*>(tensors[3]), *own = static_cast<const float*>(tensors[4]);
  p.context = {pages, own, table, p.latent + p.rope, sizes[11], sizes[12], sizes[13], sizes[14], sizes[17]};
  for (int64_t i = 0; i < p.num_rows;) {
    k3::Pass pass{p};
    const int64_t end = i + pass.plan(i, limits);
    pass.run(threads);
    for (; i < end; i++) limits += p.rows[i].count;
  }
}
