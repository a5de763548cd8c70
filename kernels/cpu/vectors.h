// Vectors of W floats in whatever the compiler was told to use: 16 (AVX-512), 8 (AVX2), 4 (anything).
// Plain operators on them compile everywhere; only the sum over lanes is spelled per instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define K3_EXPORT extern "C" __attribute__((visibility("default")))

namespace k3 {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf splat(float x) { return x - vf{}; }

inline float lane_sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// e^x as 2^n times a polynomial in the rest, |rest| <= ln(2) / 2; the Taylor remainder is under 1e-8.
// expm1 keeps the 1 apart, so that it stays exact in proportion near 0. |x| is cut to 87; NaN passes.
struct Split {
  vf power;  // 2^n
  vf rest;   // e^rest - 1
};

inline Split split_exp(vf x) {
  x = x > 87.0f ? splat(87.0f) : x;
  x = x < -87.0f ? splat(-87.0f) : x;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const vf shifted = x * 1.44269504f + magic;
  const vf n = shifted - magic;
  vf r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  vf p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  const vi bits = ((vi)shifted - (vi)magic + 127) << 23;
  return {(vf)bits, (r * r) * p + r};  // the largest term is added last, with one rounding
}

inline vf exp(vf x) {
  const Split s = split_exp(x);
  return s.power * s.rest + s.power;
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf tanh(vf x) {  // through e^2x - 1; from |x| = 10 on it is 1 in float32
  vf y = x > 10.0f ? splat(10.0f) : x;
  y = y < -10.0f ? splat(-10.0f) : y;
  const Split s = split_exp(y + y);
  const vf m = s.power * s.rest + (s.power - 1.0f);
  return m / (m + 2.0f);
}

}  // namespace k3
