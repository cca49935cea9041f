// Vectors of 16 numbers for any processor, and the three formats that models compute in.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Each file has its own copy: they are compiled with different options.
namespace {
namespace specsplit {

constexpr int LANES = 16;  // floats of a vector
constexpr int WORDS = 8;   // 64-bit integers of a vector

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef uint16_t ShortPairs __attribute__((vector_size(64)));

struct BFloat16 { uint16_t bits; };
struct Half { _Float16 value; };

template <typename Vector, typename Item>
inline Vector load(const Item* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <typename Vector, typename Item>
inline void store(Item* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

inline void add_to(float* sums, Floats more) { store(sums, load<Floats>(sums) + more); }

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const Half* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#else
  const __m256 parts[] = {_mm256_cvtph_ps(load<__m128i>(from)), _mm256_cvtph_ps(load<__m128i>(from + LANES / 2))};
  return load<Floats>(parts);
#endif
}
inline Floats floats(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<Shorts>(from), Words) << 16);
}

inline float number(float item) { return item; }
inline float number(Half item) { return item.value; }
inline float number(BFloat16 item) {
  const uint32_t word = uint32_t(item.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

inline void put(float* to, float value) { *to = value; }
inline void put(Half* to, float value) { to->value = _Float16(value); }
inline void put(BFloat16* to, float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  to->bits = std::isnan(value) ? 0x7FC0 : (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
}

// Return e^x for x <= 0, within 1e-7 of its value; 0 below -87, and no number where there is none.
inline Floats exponential(Floats x) {
  const Floats shift = Floats{} + 12582912.0f;  // 1.5 * 2^23: the last bits of a sum with it are the nearest integer
  const Floats shifted = x * 1.44269504f + shift;
  const Ints power = (Ints)shifted - (Ints)shift;
  const Floats whole = shifted - shift;
  Floats rest = x - whole * 0.693359375f;
  rest = rest + whole * 2.12194440e-4f;
  Floats value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  const Ints result = ((Ints)value + (power << 23)) & (x > -87.0f), is_none = x != x;
  return (Floats)((result & ~is_none) | ((Ints)x & is_none));
}

inline Floats hyperbolic_tangent(Floats x) {
  const Ints sign = (Ints)x & (int32_t)0x80000000;
  const Floats small = exponential((Floats)((Ints)(x * 2.0f) | (int32_t)0x80000000));  // e^(-2 |x|)
  return (Floats)((Ints)((1.0f - small) / (1.0f + small)) | sign);
}

inline float sum(Floats vector) {
  float items[LANES];
  store(items, vector);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) items[i] += items[i + width];
  return items[0];
}

}  // namespace specsplit
}  // namespace
