// A tile of a sum of outer products, which stays in registers until all its terms are added up.

#pragma once

#include <algorithm>

#include "kernels.h"

namespace {

template <int BYTES>
struct Lanes {
  typedef float Value __attribute__((vector_size(BYTES)));
  typedef float Unaligned __attribute__((vector_size(BYTES), aligned(sizeof(float)), may_alias));
  static constexpr int WIDTH = BYTES / sizeof(float);
};

// It has ROWS outputs and COLUMNS inputs, two vectors of them.
template <int BYTES, int ROWS>
struct Tile {
  using Value = typename Lanes<BYTES>::Value;
  using Unaligned = typename Lanes<BYTES>::Unaligned;
  static constexpr int WIDTH = Lanes<BYTES>::WIDTH, COLUMNS = 2 * WIDTH;

  // sums += left right^T, over the terms from `start` to `stop`, one after the other; panels have a term's numbers
  // side by side
  CONFIDE_VECTOR static inline __attribute__((always_inline)) void add_terms(std::int64_t start, std::int64_t stop,
                                                                             const float*& left, const float*& right,
                                                                             Value (&sums)[ROWS][2]) {
    for (std::int64_t term = start; term < stop; ++term, left += ROWS, right += COLUMNS) {
      const Value first = *reinterpret_cast<const Unaligned*>(right);
      const Value second = *reinterpret_cast<const Unaligned*>(right + WIDTH);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) {
        const Value scale = left[row] - Value{};
        sums[row][0] += scale * first;
        sums[row][1] += scale * second;
      }
    }
  }

  // The sum of one tile, in blocks of terms, added onto `into`, where rows begin `stride` numbers apart.
  CONFIDE_VECTOR static inline __attribute__((always_inline)) void add(std::int64_t terms, std::int64_t block,
                                                                       const float* left, const float* right,
                                                                       float* into, std::int64_t stride) {
    Value before[ROWS][2] = {};
    for (std::int64_t start = 0; start < terms; start += block) {
      Value sums[ROWS][2] = {};
      add_terms(start, std::min(terms, start + block), left, right, sums);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) {
        before[row][0] += sums[row][0];
        before[row][1] += sums[row][1];
      }
    }
    for (int row = 0; row < ROWS; ++row) {
      Unaligned* place = reinterpret_cast<Unaligned*>(into + row * stride);
      place[0] += before[row][0];
      place[1] += before[row][1];
    }
  }

  // The same in one block, written where nothing is yet.
  CONFIDE_VECTOR static inline __attribute__((always_inline)) void write(std::int64_t terms, const float* left,
                                                                         const float* right, float* into,
                                                                         std::int64_t stride) {
    Value sums[ROWS][2] = {};
    add_terms(0, terms, left, right, sums);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      Unaligned* place = reinterpret_cast<Unaligned*>(into + row * stride);
      place[0] = sums[row][0];
      place[1] = sums[row][1];
    }
  }
};

#if defined(__x86_64__)
// Zen 3 and 4 take two turns for a vector of 64 bytes and are quicker with 32.
inline bool is_long() { return __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("amdfam19h"); }
#endif

}  // namespace
