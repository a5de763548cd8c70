// A matrix that may be kept in bfloat16: its vectors come as float32 either way.
#pragma once
#include "vectors.h"

namespace k3 {

inline vf load(const uint16_t* p) {  // a bfloat16 is the upper half of a float32
#if defined(__AVX512F__)  // spelled out: gcc takes a conversion of the whole vector apart
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  typedef uint16_t half __attribute__((vector_size(W * 2)));
  half h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vi) << 16);
#endif
}

inline float load_one(const float* p) { return *p; }

inline float load_one(const uint16_t* p) {
  const uint32_t bits = uint32_t(*p) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// The first ``count`` of W numbers, then zeros.
template <class T>
inline vf partial(const T* p, int64_t count) {
  if (count >= W) return load(p);
  T room[W] = {};
  std::memcpy(room, p, sizeof(T) * count);
  return load(room);
}

}  // namespace k3
