// Vectors of eight floats, and loads of the element types that K/V comes in.
//
// They are GCC's vector extension, so the compiler picks AVX2, AVX-512VL, NEON or SSE.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __clang__
#define EXEGPT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define EXEGPT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

namespace exegpt {

constexpr int64_t kLanes = 8;
constexpr int64_t kPair = 2 * kLanes;  // elements that one load of bfloat16 brings

typedef float Vector __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t Places __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

template <typename V, typename T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V, typename T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// Element types. `half` brings 8 of a pair's 16 elements, and not in memory order: a dot product
// does not care as long as the query uses the same order, and `lane_of` puts the output back.
// `single` brings 8 elements in memory order, for a head_dim of 8 modulo 16.
struct Float {
  typedef float Storage;
  static inline Vector half(const Storage* from, int which) {
    return load<Vector>(from + which * kLanes);
  }
  static inline Vector single(const Storage* from) { return load<Vector>(from); }
  static inline int64_t lane_of(int64_t element) { return element; }
  static inline float widen(Storage value) { return value; }
  static inline Storage narrow(float value) { return value; }
};

struct BFloat16 {
  typedef uint16_t Storage;
  // Elements 2i and 2i+1 share a 32-bit word: a shift widens the even ones, a mask the odd ones.
  // That is one cheap operation for 8 elements, without a shuffle.
  static inline Vector half(const Storage* from, int which) {
    const Words words = load<Words>(from);
    return which == 0 ? (Vector)(words << 16) : (Vector)(words & 0xffff0000u);
  }
  static inline Vector single(const Storage* from) {
    return (Vector)(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  static inline int64_t lane_of(int64_t element) { return element / 2 + (element % 2) * kLanes; }
  static inline float widen(Storage value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
  }
  static inline Storage narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (value != value) return 0x7fc0;
    return Storage((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // nearest, ties to even
  }
};

// Sums over the lanes of four vectors.
inline Quarter lane_sums(Vector a, Vector b, Vector c, Vector d) {
  const auto fold = [](Vector v) {
    Quarter halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return halves[0] + halves[1];
  };
  const Quarter w = fold(a), x = fold(b), y = fold(c), z = fold(d);
  const Quarter wx =
      EXEGPT_SHUFFLE(w, x, 0, 4, 1, 5) + EXEGPT_SHUFFLE(w, x, 2, 6, 3, 7);
  const Quarter yz =
      EXEGPT_SHUFFLE(y, z, 0, 4, 1, 5) + EXEGPT_SHUFFLE(y, z, 2, 6, 3, 7);
  return EXEGPT_SHUFFLE(wx, yz, 0, 1, 4, 5) + EXEGPT_SHUFFLE(wx, yz, 2, 3, 6, 7);
}

// exp(x) for x <= 0: 2^n by the exponent bits times the Taylor series of the rest, |rest| <=
// ln(2)/2, to the seventh power (relative error 5e-9, below float's). NaN stays NaN.
inline Vector exp_negative(Vector x) {
  constexpr float kLowest = -87.0f;           // below it the result would be subnormal
  constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding it rounds to an integer
  x = x < kLowest ? Vector{} + kLowest : x;
  const Vector shifted = x * 1.44269504088896341f + kRound;
  const Vector n = shifted - kRound;
  const Vector rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  Vector series = rest * (1.0f / 5040) + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const Words exponent = ((Words)shifted - 0x4b400000u) << 23;
  return (Vector)((Words)series + exponent);
}

}  // namespace exegpt
