// Normals rounded to whole numbers, for noise on a lattice (`mechanism/secure.py` says what is proven of them).
//
// `pairs` words of 64 bits for the radii and `pairs` for the angles become `pairs` values round(sigma R cos) and
// `pairs` values round(sigma R sin), in double precision. Where rounding errors, or bits that were not drawn, could
// change the whole number, its place is reported and the caller works it out exactly.

#include "kernels.h"

#include <cmath>

namespace {

constexpr std::int64_t BLOCK = 512;  // pairs at a time: the scratch stays in the first cache

CONFIDE_INLINE double as_double(std::uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

CONFIDE_INLINE std::uint64_t as_bits(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A whole number below 2^52 as a double, without the conversion that AVX2 lacks.
CONFIDE_INLINE double small_to_double(std::uint64_t number) {
  return as_double(number | 0x4330000000000000u) - 0x1p52;
}

// A whole number below 2^64, less `offset` (a multiple of 2^32), rounded once.
CONFIDE_INLINE double to_double(std::uint64_t number, double offset = 0.0) {
  const double high = small_to_double(number >> 32) - offset * 0x1p-32;
  return high * 0x1p32 + small_to_double(number & 0xffffffffu);
}

// sqrt(-2 log U) for U = odd / 2^63. U = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), and with s = f / (2 + f)
// log(1 + f) = 2 artanh(s) = 2 (s + s^3 P(s^2)), P fitted to 5e-18 of the whole. Where e = 0, f comes from 2^63 - odd.
CONFIDE_INLINE double radius(double odd, double complement) {
  const double uniform = odd * 0x1p-63;
  const std::uint64_t bits = as_bits(uniform);
  const std::uint64_t root_half = 0x3fe6a09e667f3bcdu;
  const std::uint64_t raised = bits - root_half + 0x3ff0000000000000u;
  const double exponent = small_to_double(raised >> 52) - 1023.0;
  const double mantissa = as_double(bits - (raised & 0xfff0000000000000u) + 0x3ff0000000000000u);
  const double f = uniform >= 0x1.6a09e667f3bcdp-1 ? complement * -0x1p-63 : mantissa - 1.0;

  const double s = f / (2.0 + f);
  const double square = s * s;
  double p = 0.073082248425444525271;
  p = p * square + 0.076658608002758452747;
  p = p * square + 0.090914445626309410366;
  p = p * square + 0.11111105567397538516;
  p = p * square + 0.14285714312987742473;
  p = p * square + 0.19999999999949752245;
  p = p * square + 0.33333333333333348431;
  const double log_mantissa = 2.0 * (s + s * square * p);
  return std::sqrt(-2.0 * (exponent * 0.69314718055994530942 + log_mantissa));
}

struct Wave {
  double cosine, sine;
};

// Cosine and sine of 2 pi word / 2^64; the nearest quarter turn comes off in whole numbers.
CONFIDE_INLINE Wave wave(std::uint64_t word) {
  const std::uint64_t turned = word + 0x2000000000000000u;
  const std::uint64_t quarter = turned >> 62;
  const double rest = to_double(turned & 0x3fffffffffffffffu, 0x1p61);

  const double t = rest * 0x1.921fb54442d18p-62;  // 2 pi / 2^64
  const double square = t * t;
  double a = 1.5918129067136504939e-10;
  a = a * square - 2.5051131841140349754e-8;
  a = a * square + 2.7557316102528607939e-6;
  a = a * square - 0.00019841269836758510001;
  a = a * square + 0.0083333333333309484147;
  a = a * square - 0.16666666666666664623;
  const double sine = t + t * square * a;
  double b = -1.1382632283073740031e-11;
  b = b * square + 2.0876146265986685987e-9;
  b = b * square - 2.7557317271714885753e-7;
  b = b * square + 0.000024801587298765647694;
  b = b * square - 0.0013888888888887397192;
  b = b * square + 0.041666666666666665389;
  const double cosine = 1.0 + square * (square * b - 0.5);

  const bool swapped = (quarter & 1u) != 0;
  const std::uint64_t cosine_sign = ((quarter + 1u) & 2u) << 62;
  const std::uint64_t sine_sign = (quarter & 2u) << 62;
  const double plain_cosine = swapped ? sine : cosine;
  const double plain_sine = swapped ? cosine : sine;
  return {as_double(as_bits(plain_cosine) ^ cosine_sign), as_double(as_bits(plain_sine) ^ sine_sign)};
}

// sigma R cos and sigma R sin, not yet rounded; 1/2, which nothing can round with certainty, at both ends of U.
CONFIDE_VECTOR void transform(const std::uint64_t* __restrict__ radii, const std::uint64_t* __restrict__ angles,
                              double* __restrict__ cosines, double* __restrict__ sines, std::int64_t pairs,
                              double sigma) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::uint64_t whole = (radii[i] & 0x7fffffffffffffffu) | 1u;
    const double odd = to_double(whole);
    const double complement = to_double(0x8000000000000000u - whole);
    const bool central = odd >= 0x1p48 && complement >= 0x1p43;
    const double r = radius(odd, complement) * sigma;
    const Wave w = wave(angles[i]);
    cosines[i] = central ? r * w.cosine : 0.5;
    sines[i] = central ? r * w.sine : 0.5;
  }
}

// Rounds, and says whether a value lies within `margin` of half way between two whole numbers.
CONFIDE_VECTOR bool round_all(const double* __restrict__ values, double* __restrict__ out, std::int64_t count,
                              double margin) {
  std::uint64_t doubt = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double rounded = __builtin_rint(values[i]);
    const double distance = 0.5 - __builtin_fabs(values[i] - rounded);
    doubt |= distance > margin ? 0u : 1u;
    out[i] = rounded;
  }
  return doubt != 0;
}

template <typename Real>
CONFIDE_VECTOR void add(const double* __restrict__ noise, Real* __restrict__ sum, std::int64_t count, double spacing,
                        double largest) {
  const double inverse = 1.0 / spacing;  // a power of two: exact
  for (std::int64_t i = 0; i < count; ++i) {
    double place = __builtin_rint(static_cast<double>(sum[i]) * inverse);
    place = place > largest ? largest : place;
    place = place < -largest ? -largest : place;
    sum[i] = static_cast<Real>((place + noise[i]) * spacing);
  }
}

}  // namespace

extern "C" {

// Returns how many places are in doubt; the first `room` of them are written to `doubtful`.
std::int64_t confide_rounded_normals(const std::uint64_t* words, double* out, std::int64_t pairs, double sigma,
                                     double margin, std::int64_t* doubtful, std::int64_t room) {
  double values[2 * BLOCK];
  std::int64_t found = 0;
  for (std::int64_t start = 0; start < pairs; start += BLOCK) {
    const std::int64_t size = pairs - start < BLOCK ? pairs - start : BLOCK;
    transform(words + start, words + pairs + start, values, values + BLOCK, size, sigma);
    for (int half = 0; half < 2; ++half) {
      const double* from = values + half * BLOCK;
      double* to = out + half * pairs + start;
      if (!round_all(from, to, size, margin)) continue;
      for (std::int64_t i = 0; i < size; ++i) {
        if (0.5 - std::fabs(from[i] - to[i]) > margin) continue;
        if (found < room) doubtful[found] = half * pairs + start + i;
        ++found;
      }
    }
  }
  return found;
}

void confide_add_float(const double* noise, float* sum, std::int64_t count, double spacing, double largest) {
  add(noise, sum, count, spacing, largest);
}

void confide_add_double(const double* noise, double* sum, std::int64_t count, double spacing, double largest) {
  add(noise, sum, count, spacing, largest);
}

}  // extern "C"
