// MXFP4 experts in float32: w2 situ(w1 z, w3 z) for each row and chosen expert, rows grouped by expert.
//
//   z --deal, form--> dealt, formed --w1, w3, situ--> inner --w2--> rows        a barrier at each arrow's end
//
// Work is cut into segments (rows of one expert, at most ROWS) times blocks of 32 weight rows, handed out one
// by one. Few rows: weights are decoded in registers as they stream by (mxfp4_int.h), and while a block is computed
// the next one is fetched, of whatever expert or matrix. Many: a block is unpacked once and multiplied in tiles.
// Every sum is over lanes first, so rows do not depend on the thread that made them.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "mxfp4_int.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int BLOCK = 32;               // weight rows of a task: inner columns, a group of w2
constexpr int ROWS = 256;               // token rows of a segment
constexpr int FEW = 8;                  // up to here decoding again for each row group is cheaper
constexpr int DEPTH = 64 * W;           // columns unpacked at once
constexpr int QUAD = 4;                 // weight rows that stream by together
constexpr int64_t DEALT_ALONE = 1 << 14;  // numbers that are not worth a barrier

struct Segment {
  int64_t expert, begin, count;
};

struct Experts {
  const float* z;
  int64_t z_stride, tokens, top_k, experts, latent, inner;
  const int64_t* ids;
  const uint8_t *w1, *w1_scale, *w3, *w3_scale, *w2, *w2_scale;
  float beta, linear_beta;
  float* rows;
  int32_t* idx;
  float *dealt, *formed, *hidden, *scratch;  // [T, L], the same formed, [N, I], padded, and what each thread wants

  static Mxfp4 matrix(const uint8_t* codes, const uint8_t* scales, int64_t e, int64_t outputs, int64_t inputs) {
    return {codes + e * outputs * (inputs / 2), scales + e * outputs * (inputs / GROUP), inputs};
  }
  Mxfp4 gate(int64_t e) const { return matrix(w1, w1_scale, e, inner, latent); }
  Mxfp4 up(int64_t e) const { return matrix(w3, w3_scale, e, inner, latent); }
  Mxfp4 down(int64_t e) const { return matrix(w2, w2_scale, e, latent, inner); }
};

constexpr int64_t UNPACKED = int64_t(2) * BLOCK * DEPTH, SUMS = int64_t(ROWS) * 2 * BLOCK;

// Floats that a thread wants: unpacked weights, their sums, and the inner rows of a small segment.
int64_t scratch_of(int64_t inner) { return UNPACKED + SUMS + FEW * formed_room(inner); }

// Rows grouped by expert, in the order of tokens: fills idx, the token of each row, and the segments. False: an
// id names no expert, and nothing was written.
bool group(const Experts& p, std::vector<int64_t>& token, std::vector<Segment>& segments) {
  std::vector<int64_t> at(p.experts + 1, 0);
  const int64_t count = p.tokens * p.top_k;
  for (int64_t i = 0; i < count; i++) {
    if (p.ids[i] >= p.experts) return false;
    if (p.ids[i] >= 0) at[p.ids[i] + 1]++;
  }
  for (int64_t e = 0; e < p.experts; e++) {
    at[e + 1] += at[e];
    for (int64_t b = at[e]; b < at[e + 1]; b += ROWS)
      segments.push_back({e, b, std::min<int64_t>(ROWS, at[e + 1] - b)});
  }
  const int64_t here = at[p.experts];
  token.resize(here);
  for (int64_t i = 0; i < count; i++) {
    p.idx[i] = p.ids[i] < 0 ? -1 : int32_t(at[p.ids[i]]++);
    if (p.ids[i] >= 0) token[p.idx[i]] = i / p.top_k;
  }
  std::memset(p.rows + here * p.latent, 0, sizeof(float) * (count - here) * p.latent);
  return true;
}

// What is read after a block: rows of up to two matrices, as many bytes from each as the block reads.
struct Ahead {
  const uint8_t *a, *b, *a_scale, *b_scale;
};

inline void fetch(const uint8_t* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// The formed rows of a small segment: first those that have digits, each with its place.
struct Rows {
  const float* x[FEW];
  int place[FEW], with_digits = 0, count = 0;
  template <class At>
  Rows(int64_t rows, At at) {
    for (const bool digits : {true, false}) {
      for (int m = 0; m < rows; m++)
        if (has_digits(at(m)) == digits) x[count] = at(m), place[count++] = m;
      if (digits) with_digits = count;
    }
  }
};

// out[i / step][m, 4] of the rows x against two rows each, from ``i`` on, of the blocks a and b; i = 0, step, ...
template <int M>
void few(const Rows& x, const Mxfp4& a, const Mxfp4& b, int step, const Ahead& ahead, float (*out)[FEW][QUAD]) {
  if constexpr (M > 0) {
    if (x.with_digits < M) return few<M - 1>(x, a, b, step, ahead, out);
  }
  const int64_t columns = a.columns, pitch = columns / 2;
  fetch(ahead.a_scale, BLOCK * columns / GROUP), fetch(ahead.b_scale, BLOCK * columns / GROUP);
  for (int i = 0; i < BLOCK; i += step, out++) {
    const uint8_t* codes[QUAD] = {a.row(i), a.row(i + 1), b.row(i), b.row(i + 1)};
    const uint8_t* scales[QUAD] = {a.scale(i), a.scale(i + 1), b.scale(i), b.scale(i + 1)};
    const uint8_t *next_a = ahead.a + i * pitch, *next_b = ahead.b + i * pitch;
    const uint8_t* next[QUAD] = {next_a, next_a + pitch, next_b, next_b + pitch};
    if constexpr (M > 0) dot_formed<M>(x.x, codes, scales, next, columns, *out);
    for (int m = M; m < x.count; m++) {
      const float* dealt = in_floats(x.x[m]);
      dot_packed<1>(&dealt, codes, scales, next, columns, *out + m);
    }
  }
}

// sums [rows, 32 * parts] of the dealt rows x against BLOCK rows, from ``row`` on, of each matrix.
void many(const float* const* x, int64_t rows, const Mxfp4* parts, int count, int64_t row, float* unpacked,
          float* sums) {
  const int weight_rows = count * BLOCK;
  const int64_t columns = parts[0].columns;
  std::fill(sums, sums + rows * weight_rows, 0.0f);
  for (int64_t first = 0; first < columns; first += DEPTH) {
    const int64_t depth = std::min<int64_t>(DEPTH, columns - first);
    const int64_t pitch = padded(depth);
    for (int n = 0; n < weight_rows; n++)
      unpack(parts[n / BLOCK], row + n % BLOCK, first, depth, unpacked + n * pitch);
    for (int64_t m = 0; m < rows; m += TILE)
      tiles(x + m, rows - m, first, unpacked, weight_rows, pitch, pitch, sums + m * weight_rows);
  }
}

// 32 columns of situ(gate, up).
void situ(const Experts& p, const float* gate, const float* up, float* out) {
  for (int i = 0; i < BLOCK; i += W) {
    const vf g = load(gate + i), u = load(up + i);
    const vf capped = p.beta == 0.0f ? g : p.beta * tanh(g / p.beta);
    const vf linear = p.beta == 0.0f ? u : p.linear_beta * tanh(u / p.linear_beta);
    store(out + i, capped * sigmoid(g) * linear);
  }
}

// Columns [row, row + 32) of the inner rows of a small segment: side by side.
void gate_up_few(const Experts& p, const Segment& s, int64_t row, const int64_t* token, float* sums,
                 const Ahead& ahead) {
  const Mxfp4 gate = p.gate(s.expert).from(row), up = p.up(s.expert).from(row);
  const Rows x(s.count, [&](int m) { return p.formed + token[s.begin + m] * formed_room(p.latent); });
  float out[BLOCK / 2][FEW][QUAD];
  few<FEW>(x, gate, up, 2, ahead, out);
  for (int m = 0; m < x.count; m++)
    for (int i = 0; i < BLOCK; i += 2) {
      float* sum = sums + x.place[m] * 2 * BLOCK + i;
      std::memcpy(sum, out[i / 2][m], 2 * sizeof(float));
      std::memcpy(sum + BLOCK, out[i / 2][m] + 2, 2 * sizeof(float));
    }
  for (int64_t m = 0; m < s.count; m++)
    situ(p, sums + m * 2 * BLOCK, sums + m * 2 * BLOCK + BLOCK, p.hidden + (s.begin + m) * padded(p.inner) + row);
}

// The same of a large segment, dealt as decode has them.
void gate_up_many(const Experts& p, const Segment& s, int64_t row, const int64_t* token, float* scratch) {
  const float* x[ROWS];
  const int64_t pitch = padded(p.inner);
  for (int64_t m = 0; m < s.count; m++) x[m] = p.dealt + token[s.begin + m] * padded(p.latent);
  const Mxfp4 parts[2] = {p.gate(s.expert), p.up(s.expert)};
  float* sums = scratch + UNPACKED;  // [rows, gate | up]
  many(x, s.count, parts, 2, row, scratch, sums);
  for (int64_t m = 0; m < s.count; m++) {
    float act[BLOCK], *hidden = p.hidden + (s.begin + m) * pitch;
    situ(p, sums + m * 2 * BLOCK, sums + m * 2 * BLOCK + BLOCK, act);
    for (int i = 0; i < BLOCK; i++) hidden[dealt_at(row + i)] = act[i];
    if (row + BLOCK == p.inner)
      for (int64_t c = p.inner; c < pitch; c++) hidden[dealt_at(c)] = 0.0f;
  }
}

// A thread's own copy of the inner rows of the small segment it works on, formed.
struct Own {
  float* room;
  const Segment* of = nullptr;
  const float* rows(const Experts& p, const Segment& s) {
    for (int64_t m = 0; of != &s && m < s.count; m++)
      form(p.hidden + (s.begin + m) * padded(p.inner), p.inner, room + m * formed_room(p.inner));
    of = &s;
    return room;
  }
};

void down_few(const Experts& p, const Segment& s, int64_t row, Own& own, const Ahead& ahead) {
  const float* first = own.rows(p, s);
  const Mxfp4 w = p.down(s.expert).from(row);
  const Rows x(s.count, [&](int m) { return first + m * formed_room(p.inner); });
  float out[BLOCK / QUAD][FEW][QUAD];
  few<FEW>(x, w, w.from(2), QUAD, ahead, out);
  for (int m = 0; m < x.count; m++) {
    float* result = p.rows + (s.begin + x.place[m]) * p.latent + row;
    for (int i = 0; i < BLOCK; i += QUAD) std::memcpy(result + i, out[i / QUAD][m], sizeof out[0][0]);
  }
}

void down_many(const Experts& p, const Segment& s, int64_t row, float* scratch) {
  const float* x[ROWS];
  for (int64_t m = 0; m < s.count; m++) x[m] = p.hidden + (s.begin + m) * padded(p.inner);
  const Mxfp4 w = p.down(s.expert);
  float* sums = scratch + UNPACKED;
  many(x, s.count, &w, 1, row, scratch, sums);
  for (int64_t m = 0; m < s.count; m++)
    std::memcpy(p.rows + (s.begin + m) * p.latent + row, sums + m * BLOCK, sizeof(float) * BLOCK);
}

// The blocks of a call in order: those of w1 and w3, then, behind a barrier, those of w2.
struct Blocks {
  const Experts& p;
  const std::vector<Segment>& segments;
  int64_t inner = p.inner / BLOCK, latent = p.latent / BLOCK;
  int64_t firsts = segments.size() * inner, all = firsts + segments.size() * latent;

  const Segment& segment(int64_t t) const { return segments[t < firsts ? t / inner : (t - firsts) / latent]; }
  int64_t row(int64_t t) const { return BLOCK * (t < firsts ? t % inner : (t - firsts) % latent); }
  Ahead ahead(int64_t t) const {  // behind the last block there is nothing: the last one is named again
    t = std::min(t, all - 1);
    const int64_t e = segment(t).expert;
    const Mxfp4 a = t < firsts ? p.gate(e) : p.down(e), b = t < firsts ? p.up(e) : a;
    const int64_t r = row(t), of_b = t < firsts ? r : r + 2;
    return {a.row(r), b.row(of_b), a.scale(r), b.scale(of_b)};
  }
};

// The rows of z as small segments and as large ones read them, where there are such.
struct Inputs {
  const Experts& p;
  bool few = false, many = false;
  Inputs(const Experts& p, const std::vector<Segment>& segments) : p(p) {
    for (const Segment& s : segments) (s.count <= FEW ? few : many) = true;
  }
  void make(int64_t t) const {
    const float* x = p.z + t * p.z_stride;
    if (few) form(x, p.latent, p.formed + t * formed_room(p.latent));
    if (many) deal(x, p.latent, p.dealt + t * padded(p.latent));
  }
};

bool run(const Experts& p, int64_t threads) {
  std::vector<int64_t> token;
  std::vector<Segment> segments;
  if (!group(p, token, segments)) return false;
  const Blocks blocks{p, segments};
  const Inputs inputs(p, segments);
  const bool alone = p.tokens * p.latent <= DEALT_ALONE;
  Tasks making, work;
  for (int64_t t = 0; alone && t < p.tokens; t++) inputs.make(t);
  auto body = [&](Team team) {
    float* scratch = p.scratch + team.rank * scratch_of(p.inner);
    Own own{scratch + UNPACKED + SUMS};
    if (!alone) {
      for (int64_t t; making.take(p.tokens, t);) inputs.make(t);
      team.barrier();
    }
    int64_t t, next;
    work.take(blocks.all, t);
    for (; t < blocks.firsts; t = next) {
      work.take(blocks.all, next);
      const Segment& s = blocks.segment(t);
      if (s.count <= FEW)
        gate_up_few(p, s, blocks.row(t), token.data(), scratch + UNPACKED, blocks.ahead(next));
      else
        gate_up_many(p, s, blocks.row(t), token.data(), scratch);
    }
    team.barrier();
    for (; t < blocks.all; t = next) {
      work.take(blocks.all, next);
      const Segment& s = blocks.segment(t);
      if (s.count <= FEW)
        down_few(p, s, blocks.row(t), own, blocks.ahead(next));
      else
        down_many(p, s, blocks.row(t), scratch);
    }
  };
  parallel(threads, body);
  return true;
}

}  // namespace
}  // namespace k3

// Floats of the scratch memory that k3_experts wants.
K3_EXPORT int64_t k3_experts_scratch(int64_t tokens, int64_t top_k, int64_t latent, int64_t inner, int64_t threads) {
  const int64_t rows = k3::padded(latent) + k3::formed_room(latent) + top_k * k3::padded(inner);
  return tokens * rows + threads * k3::scratch_of(inner);
}

// z, ids, z's row stride, T, k, E, L, I, then w1, w3 and w2 with their scales, beta, linear_beta, rows, idx, scratch,
// threads. The weights are dense. 1: an id names no expert.
K3_EXPORT int64_t k3_experts(const char* packed) {
  k3::Arguments of{packed};
  k3::Experts p{};
  p.z = of, p.ids = of, p.z_stride = of, p.tokens = of, p.top_k = of, p.experts = of, p.latent = of, p.inner = of;
  p.w1 = of, p.w1_scale = of, p.w3 = of, p.w3_scale = of, p.w2 = of, p.w2_scale = of;
  p.beta = float(of.take<double>()), p.linear_beta = float(of.take<double>());
  p.rows = of, p.idx = of, p.dealt = of;
  p.formed = p.dealt + p.tokens * k3::padded(p.latent);
  p.hidden = p.formed + p.tokens * k3::formed_room(p.latent);
  p.scratch = p.hidden + p.tokens * p.top_k * k3::padded(p.inner);
  return k3::run(p, of) ? 0 : 1;
}
