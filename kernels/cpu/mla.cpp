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

#include "arguments.h"
#include "kda.h"
#include "latents.h"
#include "scattered.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int64_t FEW = 16;            // queries of a piece: neighbours that meet the context together
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
  float* lse;        // [H, lse_head], or null
  Latents context;
  Requests requests;
  int64_t heads, nope, rope, latent, value, kv_row, lse_head;
  bool half, divided;  // divided: without the requests that are cpu/mla_prefill.cpp's
  float scale;
  std::vector<Row> rows{};        // pieces of the requests
  std::vector<int64_t> limits{};  // of each token of each row, one after the other: the tokens that it sees

  void cut() {
    for (int64_t r = 0; r < requests.num; r++) {
      if (divided && requests.pays(r, latent, nope + value)) continue;
      Row row = requests.row(r);
      for (int64_t left = row.count, first = row.begin; left > 0; left -= FEW, first += FEW) {
        rows.push_back({r, first, std::min(FEW, left), row.paged, row.own});
        for (int64_t t = first; t < first + rows.back().count; t++) limits.push_back(requests.limit(r, t - row.begin));
      }
    }
  }

  // What the token rows get that are nobody's.
  void clear() const {
    for (int64_t t = requests.end(); t < requests.tokens; t++)
      for (int64_t h = 0; h < heads; h++) {
        std::fill_n(out.at(t, h), kv_b ? value : latent, 0.0f);
        if (lse) lse[h * lse_head + t] = -INFINITY;
      }
  }
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
    rows = &call.rows[first];
    for (; i < int64_t(call.rows.size()) && floats < HELD; i++) {
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

  // The queries of head h, as they meet latents.
  template <class B>
  void absorb(int64_t h) const {
    const int64_t taken = call.kv_b ? call.latent : 0;  // channels of a query that kv_b makes
    const int64_t rest = call.context.width - taken, nope = call.nope, tokens = token.size();
    for (int64_t t = 0; t < tokens; t++) {
      const float* from = call.q.at(token[t], h);
      float *to = asked.get() + (t * call.heads + h) * nope, *pe = query.get() + (t * call.heads + h) * padded + taken;
      for (int64_t c = 0; c < nope; c++) to[c] = from[c] * call.scale;
      for (int64_t c = 0; c < padded - taken; c++) pe[c] = c < rest ? from[nope + c] * call.scale : 0.0f;
    }
    if (!taken) return;
    const B* keys = static_cast<const B*>(call.kv_b) + h * (nope + call.value) * call.kv_row;
    product({asked.get() + h * nope, call.heads * nope, 1}, tokens, keys, call.kv_row, nope, query.get() + h * padded,
            call.heads * padded, call.latent / W, Into::set);
  }

  struct Room {
    std::vector<float> known, turned, scores, fade;
    const float *now[WIDE_BLOCK], *next[WIDE_BLOCK];  // where the rows of a block and of the one after it lie
  };

  // Scores [count, BLOCK] of the ``tokens`` rows of room.now, while ``later`` rows of room.next come nearer.
  void score(const float* ask, int64_t count, int64_t tokens, int64_t later, Room& room) const {
    float* scores = room.scores.data();
    std::fill(scores, scores + count * BLOCK, 0.0f);
    for (int64_t t = 0; t < tokens; t += 4) {
      const float* four[4];
      for (int64_t i = 0; i < 4; i++) four[i] = room.now[std::min(t + i, tokens - 1)];
      for (int64_t i = t; i < std::min(t + 4, later); i++) fetch(room.next[i], sizeof(float) * call.context.width);
      for (int64_t i = 0; i < count; i += TILE)
        meet(ask + i * padded, padded, count - i, four, padded, scores + i * BLOCK + t, BLOCK);
    }
  }

  // The same, [count, WIDE_BLOCK], with the rows of room.known turned.
  void score_turned(const float* ask, int64_t count, int64_t tokens, int64_t later, Room& room) const {
    int64_t nearer = 0;
    const auto meanwhile = [&] {
      for (int64_t end = std::min(nearer + 2, later); nearer < end; nearer++)
        fetch(room.next[nearer], sizeof(float) * call.context.width);
    };
    for (int64_t t = 0; t < tokens; t += PANEL) {
      transpose(&room.known[t * padded], padded, std::min(PANEL, tokens - t), padded, room.turned.data(), PANEL, PANEL);
      for (int64_t c = 0; c < call.context.width; c += DEEP)  // as deep_panel
        panel<WIDE>({ask + c, padded, 1}, count, &room.turned[c * PANEL], PANEL, std::min(DEEP, call.context.width - c),
                    &room.scores[t], WIDE_BLOCK, c ? Into::add : Into::set, nullptr, meanwhile);
    }
  }

  void attend(const Part& part, Room& room) const {
    const Row& row = rows[part.row];
    const int64_t count = row.count * call.heads, latent = call.latent, begin = first_token[part.row];
    float *mixed = parts.get() + part.at, *top = mixed + count * latent, *total = top + count;
    const bool turns = count >= TURN, copies = turns || padded != call.context.width;
    const int64_t block = turns ? WIDE_BLOCK : BLOCK;
    const float* ask = query.get() + begin * call.heads * padded;
    if (copies) room.known.assign(block * padded, 0.0f);
    if (turns) room.turned.resize(PANEL * padded);
    room.scores.resize(count * block);
    room.fade.resize(count);
    std::fill(mixed, mixed + count * latent, 0.0f);
    std::fill(top, total, -INFINITY);
    std::fill(total, total + count, 0.0f);
    call.context.find(row, part.first, std::min(block, part.last - part.first), room.next);
    for (int64_t first = part.first; first < part.last; first += block) {
      const int64_t tokens = std::min(block, part.last - first), later = std::min(block, part.last - first - tokens);
      std::swap(room.now, room.next);
      call.context.find(row, first + tokens, later, room.next);
      if (copies)
        for (int64_t t = 0; t < tokens; t++) {
          std::memcpy(&room.known[t * padded], room.now[t], sizeof(float) * call.context.width);
          room.now[t] = &room.known[t * padded];
        }
      turns ? score_turned(ask, count, tokens, later, room) : score(ask, count, tokens, later, room);
      for (int64_t i = 0; i < count; i++)
        weigh(&room.scores[i * block], std::min(tokens, limit[begin + i / call.heads] - first), block, top[i], total[i],
              room.fade[i]);
      blend({room.scores.data(), block, 1}, count, room.now, tokens, mixed, latent, latent / W, room.fade.data());
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
    Tasks absorbs, attends, ends;
    const int64_t tokens = token.size(), groups = (tokens + GROUP - 1) / GROUP;
    auto body = [&](Team team) {
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

// q, out, kv_b, pages, own rows, lse, page table, seen, cu, place; without kv_b queries and results are latent, and lse
// is written too; with own rows the queries see all of their block. Then R, T, H, n, r, L, v, strides: of q and out
// (token, head), kv_b's row, pages' (page, row), own rows' and lse's head; then tokens of a page, pages of a row of the
// table, whether kv_b is kept in bfloat16, whether some requests are left to cpu/mla_prefill.cpp; scale, threads. L is
// a multiple of a vector. Returns one more than the first request that needs more pages than it has, or 0.
K3_EXPORT int64_t k3_mla_attend(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  Call p{};
  p.q.data = of, p.out.data = of, p.kv_b = of.take<const void*>();
  p.context.pages = of, p.context.own = of, p.lse = of, p.context.table = of;
  p.requests.seen = of, p.requests.cu = of, p.requests.place = of, p.requests.num = of, p.requests.tokens = of;
  p.requests.blocks = p.context.own;
  p.heads = of, p.nope = of, p.rope = of, p.latent = of, p.value = of;
  p.q.token = of, p.q.head = of, p.out.token = of, p.out.head = of, p.kv_row = of;
  p.context.width = p.latent + p.rope;
  p.context.page = of, p.context.page_row = of, p.context.own_row = of, p.lse_head = of;
  p.context.size = of, p.context.table_row = of, p.half = of.take<int64_t>(), p.divided = of.take<int64_t>();
  p.scale = float(of.take<double>());
  const int64_t threads = of;
  if (const int64_t wrong = p.requests.too_long(p.context.table_row * p.context.size)) return wrong;
  p.clear();
  p.cut();
  const int64_t* limits = p.limits.data();
  for (int64_t i = 0; i < int64_t(p.rows.size());) {
    Pass pass{p};
    const int64_t end = i + pass.plan(i, limits);
    pass.run(threads);
    for (; i < end; i++) limits += p.rows[i].count;
  }
  return 0;
}
