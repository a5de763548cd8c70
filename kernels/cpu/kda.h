// Where the numbers of KDA lie: token rows by head, and pools by slot.
#pragma once
#include <cstdint>

namespace k3 {

struct Strided {  // [tokens, heads, channels], channels side by side
  float* data;
  int64_t token, head;
  float* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

struct Pool {  // [slots, a, b, channels], channels side by side
  float* data;
  int64_t slot, a, b;
  float* at(int64_t s, int64_t i, int64_t j) const { return data + s * slot + i * a + j * b; }
};

}  // namespace k3
