// The short convolution of KDA with its windows: a row and a block of channels at a time, token by token.
//
//   strip    w w w x0 x1 x2 ..      y_t = silu(sum_j taps[j] strip[t + j])      window <- the last three of it
//
// A task owns its channels of its row's window, so it may write that when it has read all it needs.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "panels.h"
#include "threads.h"

namespace k3 {
namespace {

constexpr int TAPS = 4, KEPT = TAPS - 1;
constexpr int BLOCK = 256;          // channels of a task
constexpr int64_t SMALL = 1 << 15;  // numbers of a call that one thread does alone

struct Row {
  int64_t slot, begin, count, offset, into;  // after ``offset`` tokens, if any, the window goes to slot ``into``
};

struct Conv {
  const float *x, *weight;
  float *y, *window, *records;  // records null: the windows move; otherwise they are read, and raw rows go there
  int64_t x_row, weight_row, y_row, slot, slot_row, record, record_row;
  const Row* rows;
  int64_t num_rows, channels;
  bool moves;

  void run(const Row& row, int64_t first, const float (&taps)[TAPS][BLOCK]) const {
    const int64_t width = std::min<int64_t>(BLOCK, channels - first);
    const size_t bytes = sizeof(float) * width;
    float old[KEPT][BLOCK];
    for (int i = 0; i < KEPT; i++) std::memcpy(old[i], window + row.slot * slot + i * slot_row + first, bytes);
    // row ``t`` of the strip, from -3 on
    auto strip = [&](int64_t t) { return t < 0 ? old[t + KEPT] : x + (row.begin + t) * x_row + first; };
    for (int64_t t = 0; t < row.count; t++) {
      const float* from[TAPS];
      for (int j = 0; j < TAPS; j++) from[j] = strip(t - KEPT + j);
      float* to = y + (row.begin + t) * y_row + first;
      for (int64_t c = 0; c < width; c += W) {
        vf sum = {};
        for (int j = 0; j < TAPS; j++) sum += partial(from[j] + c, width - c) * load(taps[j] + c);
        store_partial(to + c, sum / (1.0f + exp(-sum)), width - c);
      }
      if (records) std::memcpy(records + row.slot * record + t * record_row + first, from[KEPT], bytes);
    }
    auto leave = [&](int64_t to, int64_t tokens) {
      for (int64_t i = 0; i < KEPT; i++)
        std::memcpy(window + to * slot + i * slot_row + first, strip(tokens - KEPT + i), bytes);
    };
    if (row.offset) leave(row.into, row.offset);
    if (moves && row.count) leave(row.slot, row.count);
  }
};

}  // namespace
}  // namespace k3

// x, weight, y, window, records or null, slots [R], cu [R + 1], exports [R, 2] or null (a checkpoint's offset, 0 for
// none, and its slot), rows R, C, rows of y, whether windows move, then strides: rows of x, weight and y, the window's
// (slot, row), the records' (slot, row), threads. Rows of y past cu[R] become zero. No slot twice.
K3_EXPORT int64_t k3_conv(const char* packed) {
  using namespace k3;
  Arguments of{packed};
  const float *x = of, *weight = of;
  float *y = of, *window = of, *records = of;
  const int64_t *slots = of, *cu = of, *exports = of, num_rows = of, channels = of, height = of, moves = of;
  const int64_t x_row = of, weight_row = of, y_row = of, slot = of, slot_row = of, record = of, record_row = of;
  const int64_t threads = of, tokens = cu[num_rows];
  std::vector<Row> rows;
  for (int64_t r = 0; r < num_rows; r++)
    rows.push_back({slots[r], cu[r], cu[r + 1] - cu[r], exports ? exports[2 * r] : 0, exports ? exports[2 * r + 1] : 0});
  for (int64_t t = tokens; t < height; t++) std::memset(y + t * y_row, 0, sizeof(float) * channels);
  const Conv p{x, weight, y, window, records, x_row, weight_row, y_row, slot, slot_row, record, record_row,
               rows.data(), num_rows, channels, moves != 0};
  const int64_t blocks = (p.channels + BLOCK - 1) / BLOCK;
  Tasks work;
  auto body = [&](Team) {
    float taps[TAPS][BLOCK] = {};
    int64_t of = -1;
    for (int64_t t; work.take(blocks * p.num_rows, t);) {
      const int64_t block = t / p.num_rows, first = block * BLOCK;
      if (block != of)
        for (int64_t c = 0; c < std::min<int64_t>(BLOCK, p.channels - first); c++)
          for (int j = 0; j < TAPS; j++) taps[j][c] = p.weight[(first + c) * p.weight_row + j];
      of = block;
      p.run(p.rows[t % p.num_rows], first, taps);
    }
  };
  parallel(tokens * p.channels > SMALL ? threads : 1, body);
  return 0;
}
