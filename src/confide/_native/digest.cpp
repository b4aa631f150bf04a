// A code of 64 bits for what lies in memory, by a key that nobody knows when the memory is written.
//
// Blocks of 1 kB are reduced twice by the sums of products NH (Black, Halevi, Krawczyk, Krovetz and Rogaway 1999,
// CRYPTO, "UMAC"): two blocks that differ have the same sum with a chance of at most 2^-32, and both sums, whose keys
// overlap but for two pairs (Toeplitz), with one of 2^-64. The sums of the blocks are the coefficients of a polynomial
// modulo the prime 2^61 - 1, at a secret point. The length comes first.

#include "kernels.h"

#include <algorithm>

namespace {

constexpr int WORDS = 256, SHIFT = 8;  // 32-bit words of a block, and between the keys of its two sums
constexpr std::uint64_t PRIME = (std::uint64_t{1} << 61) - 1;

inline std::uint64_t multiplied(std::uint64_t one, std::uint64_t other) {  // below 2^62 both, and so is what comes
  const unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
  const std::uint64_t found = (static_cast<std::uint64_t>(product) & PRIME) + static_cast<std::uint64_t>(product >> 61);
  return (found & PRIME) + (found >> 61);
}

inline std::uint64_t joined(std::uint64_t code, std::uint64_t point, std::uint64_t sum) {
  code = multiplied(code, point) + (sum & 0xffffffff);
  return multiplied(code, point) + (sum >> 32);
}

struct Sums {
  std::uint64_t one, other;
};

typedef std::uint32_t Eight __attribute__((vector_size(32)));
typedef std::uint32_t EightAnywhere __attribute__((vector_size(32), may_alias, aligned(1)));
typedef std::uint64_t Four __attribute__((vector_size(32)));

// Of every two neighbours, each with its key added: their product.
CONFIDE_INLINE Four products(Eight words) {
#if defined(__x86_64__)
  typedef int Ints __attribute__((vector_size(32)));
  return (Four)__builtin_ia32_pmuludq256((Ints)words, (Ints)((Four)words >> 32));
#else
  const Four pairs = (Four)words;
  return (pairs & 0xffffffff) * (pairs >> 32);
#endif
}

CONFIDE_INLINE Sums sums_of(const char* words, const std::uint32_t* key) {
  Four one = {}, other = {};
  Eight keys = *reinterpret_cast<const EightAnywhere*>(key);
#pragma GCC unroll 4
  for (int at = 0; at < WORDS; at += SHIFT) {
    const Eight here = *reinterpret_cast<const EightAnywhere*>(words + 4 * at);
    one += products(here + keys);
    keys = *reinterpret_cast<const EightAnywhere*>(key + at + SHIFT);
    other += products(here + keys);
  }
  return {one[0] + one[1] + one[2] + one[3], other[0] + other[1] + other[2] + other[3]};
}

// Zeros without their sign, and one way to write what is no number.
template <typename Real, typename Bits>
CONFIDE_INLINE void plain(std::uint32_t* block, Bits none) {
  constexpr int COUNT = WORDS * 4 / sizeof(Real);
  Real values[COUNT];
  Bits bits[COUNT];
  std::memcpy(values, block, sizeof(values));
  for (int at = 0; at < COUNT; ++at) values[at] += Real{0};
  std::memcpy(bits, values, sizeof(values));
  for (int at = 0; at < COUNT; ++at) bits[at] = values[at] != values[at] ? none : bits[at];
  std::memcpy(block, bits, sizeof(bits));
}

}  // namespace

// `real` is the size of the numbers whose zeros and not-a-numbers count as equal, or 0; `key` has WORDS + SHIFT words
// and, behind them, the point.
CONFIDE_VECTOR std::uint64_t confide_digest(const void* from, std::int64_t bytes, std::int64_t real,
                                            const std::uint32_t* key) {
  std::uint64_t point;
  std::memcpy(&point, key + WORDS + SHIFT, sizeof(point));
  point &= PRIME >> 1;
  std::uint64_t code = static_cast<std::uint64_t>(bytes) + 1;
  const char* place = static_cast<const char*>(from);
  for (std::int64_t left = bytes; left > 0; left -= WORDS * 4, place += WORDS * 4) {
    std::uint32_t block[WORDS];
    const char* words = place;
    if (real || left < WORDS * 4) {
      const std::size_t some = static_cast<std::size_t>(std::min<std::int64_t>(left, WORDS * 4));
      std::memset(reinterpret_cast<char*>(block) + some, 0, WORDS * 4 - some);
      std::memcpy(block, place, some);
      if (real == 4) plain<float, std::uint32_t>(block, 0x7fc00000u);
      if (real == 8) plain<double, std::uint64_t>(block, 0x7ff8000000000000u);
      words = reinterpret_cast<const char*>(block);
    }
    const Sums sums = sums_of(words, key);
    code = joined(joined(code, point, sums.one), point, sums.other);
  }
  return code % PRIME;
}
