// Box-Muller on blocks of keystream, written as plain loops that the compiler turns into vector instructions.
//
// A block of 2 * pairs 32-bit words holds `pairs` words for the radii, then `pairs` for the angles; it becomes
// `pairs` values std * R cos, then `pairs` values std * R sin. The cipher is not here: the words come from the
// caller. The library itself is built for the oldest machine of its kind, and the loop for AVX2 besides, so the
// caller asks `confide_supported` first.

#include "kernels.h"

#include <cmath>

CONFIDE_INLINE float as_float(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

CONFIDE_INLINE std::int32_t as_bits(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// sqrt(-2 log U) for U = odd / 2^31 with 0 < odd < 2^31, to about two units in the last place at both ends.
//
// U = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), and log U = e log 2 + f - f^2/2 + f^3 P(f), P fitted to a
// relative error of 6e-9. Near U = 1 a float U has lost the last digits of 1 - U; there f = -(1 - U) is
// taken from the integer 2^31 - odd instead.
CONFIDE_INLINE float radius(std::int32_t odd) {
  const std::int32_t complement = static_cast<std::int32_t>(0x80000000u - static_cast<std::uint32_t>(odd));
  const float uniform = static_cast<float>(odd) * 0x1p-31f;
  const float below_one = static_cast<float>(complement) * 0x1p-31f;

  const std::int32_t bits = as_bits(uniform);
  const std::int32_t root_half = 0x3f3504f3;
  const std::int32_t exponent = (bits - root_half) >> 23;
  const float mantissa = as_float(bits - exponent * (1 << 23));
  const float f = bits >= root_half ? -below_one : mantissa - 1.0f;

  float p = -0.0763442963f;
  p = p * f + 0.127615497f;
  p = p * f - 0.131601945f;
  p = p * f + 0.142017618f;
  p = p * f - 0.166233569f;
  p = p * f + 0.200012267f;
  p = p * f - 0.250008225f;
  p = p * f + 0.333333313f;
  const float square = f * f;
  const float log_mantissa = f + square * (p * f - 0.5f);
  const float log_uniform = static_cast<float>(exponent) * 0.693147181f + log_mantissa;
  return std::sqrt(-2.0f * log_uniform);
}

struct Wave {
  float cosine, sine;
};

// Cosine and sine of 2 pi word / 2^32. The nearest quarter turn comes off in integers, without rounding, so that the
// remainder, within an eighth of a turn either way, keeps its relative accuracy.
CONFIDE_INLINE Wave wave(std::int32_t word) {
  const std::uint32_t turned = static_cast<std::uint32_t>(word) + 0x20000000u;
  const std::int32_t rest = static_cast<std::int32_t>(turned & 0x3fffffffu) - 0x20000000;
  const std::uint32_t quarter = turned >> 30;

  const float t = static_cast<float>(rest) * 1.46291808e-9f;  // 2 pi / 2^32
  const float square = t * t;
  const float sine =
      t + t * square * (-0.166666552f + square * (8.332178e-3f - square * 1.95172979e-4f));
  const float cosine =
      1.0f + square * (-0.5f + square * (4.16666456e-2f + square * (-1.38873677e-3f + square * 2.443845e-5f)));

  const bool swapped = (quarter & 1u) != 0;
  const std::uint32_t cosine_sign = ((quarter + 1u) & 2u) << 30;
  const std::uint32_t sine_sign = (quarter & 2u) << 30;
  const float plain_cosine = swapped ? sine : cosine;
  const float plain_sine = swapped ? cosine : sine;
  return {as_float(as_bits(plain_cosine) ^ static_cast<std::int32_t>(cosine_sign)),
          as_float(as_bits(plain_sine) ^ static_cast<std::int32_t>(sine_sign))};
}

CONFIDE_VECTOR static std::int32_t transform_block(const std::int32_t* __restrict__ radii,
                                                   const std::int32_t* __restrict__ angles,
                                                   float* __restrict__ cosines, float* __restrict__ sines,
                                                   std::int64_t pairs, float std) {
  std::int32_t least = INT32_MAX;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int32_t odd = (radii[i] & 0x7fffffff) | 1;
    least = odd < least ? odd : least;
    const float r = radius(odd);
    const Wave w = wave(angles[i]);
    // R cos is rounded before it is scaled, as it is where a value waits in a reservoir for its std.
    const float first = r * w.cosine, second = r * w.sine;
    cosines[i] = first * std;
    sines[i] = second * std;
  }
  return least;
}

extern "C" {

// With the words before it, so that it can be read from the file without running anything in it.
static const char sources[] = "confide sources " CONFIDE_SOURCES;

const char* confide_sources() { return sources; }

int confide_supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}

// The least odd radius word: the caller refines the radii of tiny ones with further bits.
std::int32_t confide_box_muller(const std::int32_t* words, float* out, std::int64_t blocks, std::int64_t pairs,
                                float std) {
  std::int32_t least = INT32_MAX;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t start = 2 * pairs * block;
    const std::int32_t here =
        transform_block(words + start, words + start + pairs, out + start, out + start + pairs, pairs, std);
    least = here < least ? here : least;
  }
  return least;
}

}  // extern "C"
