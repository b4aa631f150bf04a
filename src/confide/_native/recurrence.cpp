// All steps of an LSTM in one call, forwards and backwards, for some of the records of a batch.
//
// A step is a small product and a dozen functions of single numbers; called one by one from outside, the calls and the
// numbers that come and go between them take as long as the products. Every record is computed by itself, each number
// as one sum in one order, whoever stands beside it. The caller asks `confide_supported` first.

#include <cmath>

#include "tiles.h"

namespace {

constexpr std::int64_t PANEL = 16;  // columns that are made side by side

// onto (rows, PANEL) += from (rows, depth) times panel (depth, PANEL); or = where it is `fresh`
template <int BYTES, int COUNT>
CONFIDE_INLINE void tile(const float* from, std::int64_t from_stride, const float* panel, std::int64_t depth,
                         float* onto, std::int64_t onto_stride, bool fresh) {
  using Vector = typename Lanes<BYTES>::Value;
  using Unaligned = typename Lanes<BYTES>::Unaligned;
  constexpr int WIDTH = Lanes<BYTES>::WIDTH, VECTORS = PANEL / WIDTH;
  Vector sums[COUNT][VECTORS] = {};
  if (!fresh) {
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
      for (int v = 0; v < VECTORS; ++v) {
        sums[r][v] = *reinterpret_cast<const Unaligned*>(onto + r * onto_stride + v * WIDTH);
      }
    }
  }
  for (std::int64_t k = 0; k < depth; ++k, panel += PANEL) {
    Vector row[VECTORS];
    for (int v = 0; v < VECTORS; ++v) row[v] = *reinterpret_cast<const Unaligned*>(panel + v * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
      const Vector value = from[r * from_stride + k] - Vector{};
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += value * row[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < COUNT; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      *reinterpret_cast<Unaligned*>(onto + r * onto_stride + v * WIDTH) = sums[r][v];
    }
  }
}

// The same for the last columns, of which there are fewer: by way of a tile of their own.
template <int BYTES, int COUNT>
CONFIDE_INLINE void narrow_tile(const float* from, std::int64_t from_stride, const float* panel, std::int64_t depth,
                                float* onto, std::int64_t onto_stride, std::int64_t width, bool fresh) {
  float room[COUNT * PANEL] = {};
  for (int r = 0; r < COUNT; ++r) {
    for (std::int64_t c = 0; c < width; ++c) room[r * PANEL + c] = onto[r * onto_stride + c];
  }
  tile<BYTES, COUNT>(from, from_stride, panel, depth, room, PANEL, fresh);
  for (int r = 0; r < COUNT; ++r) {
    for (std::int64_t c = 0; c < width; ++c) onto[r * onto_stride + c] = room[r * PANEL + c];
  }
}

struct Rows {
  const float* from;
  float* onto;
  std::int64_t from_stride, onto_stride;
};

// COUNT rows, or as many as are left
template <int BYTES, int COUNT>
CONFIDE_INLINE void some_rows(std::int64_t left, Rows at, const float* panel, std::int64_t depth, std::int64_t width,
                              bool fresh) {
  if constexpr (COUNT > 1) {
    if (left < COUNT) return some_rows<BYTES, COUNT - 1>(left, at, panel, depth, width, fresh);
  }
  if (width >= PANEL) {
    tile<BYTES, COUNT>(at.from, at.from_stride, panel, depth, at.onto, at.onto_stride, fresh);
  } else {
    narrow_tile<BYTES, COUNT>(at.from, at.from_stride, panel, depth, at.onto, at.onto_stride, width, fresh);
  }
}

// `packed` has PANEL columns after the other, each (depth, PANEL), the last filled up with zeros.
template <int BYTES, int ROWS>
CONFIDE_INLINE void add_by(std::int64_t rows, Rows at, const float* packed, std::int64_t depth, std::int64_t columns,
                           bool fresh) {
  for (std::int64_t column = 0; column < columns; column += PANEL, packed += depth * PANEL) {
    Rows here{at.from, at.onto + column, at.from_stride, at.onto_stride};
    for (std::int64_t row = 0; row < rows; row += ROWS) {
      some_rows<BYTES, ROWS>(rows - row, here, packed, depth, columns - column, fresh);
      here.from += ROWS * at.from_stride;
      here.onto += ROWS * at.onto_stride;
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx2,fma"), noinline)) void add_long(std::int64_t rows, Rows at, const float* packed,
                                                                    std::int64_t depth, std::int64_t columns,
                                                                    bool fresh) {
  add_by<64, 12>(rows, at, packed, depth, columns, fresh);
}
#endif

CONFIDE_VECTOR __attribute__((noinline)) void add_products(std::int64_t rows, Rows at, const float* packed,
                                                           std::int64_t depth, std::int64_t columns, bool fresh) {
#if defined(__x86_64__)
  if (is_long()) return add_long(rows, at, packed, depth, columns, fresh);
#endif
  add_by<32, 6>(rows, at, packed, depth, columns, fresh);
}

CONFIDE_INLINE float as_float(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// exp(-r) - 1 for 0 <= r, to its last digits for small r too; from r = 87 on it is -1.
CONFIDE_INLINE float decay_minus_one(float r) {
  const float x = -(r < 87.0f ? r : 87.0f);
  const float shifted = x * 1.44269504f + 12582912.0f;  // rounds to a whole number of octaves
  const float octaves = shifted - 12582912.0f;
  const float f = (x - octaves * 0.693359375f) + octaves * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * f + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  const float rest = (p * f) * f + f;  // exp(f) - 1
  const float scale = as_float((static_cast<std::int32_t>(octaves) + 127) << 23);
  return r < 87.0f ? rest * scale + (scale - 1.0f) : -1.0f;
}

CONFIDE_INLINE float sigmoid(float x) {
  const float t = decay_minus_one(std::fabs(x)) + 1.0f;
  const float share = 1.0f / (1.0f + t);
  const float found = x > 0.0f ? share : t * share;
  return x == x ? found : x;  // not a number stays one
}

CONFIDE_INLINE float hyperbolic(float x) {
  const float m = decay_minus_one(2.0f * std::fabs(x));
  return x == x ? std::copysign(m / (2.0f + m), x) : x;
}

// The gates, in place, and what follows from them; there is nothing to forget in the first step.
template <bool FIRST>
CONFIDE_VECTOR __attribute__((noinline)) void gates_of(std::int64_t size, float* __restrict__ gates,
                                                       const float* __restrict__ before, float* __restrict__ cell,
                                                       float* __restrict__ turned, float* __restrict__ output) {
  float *enters = gates, *forgets = gates + size, *candidates = gates + 2 * size, *leaves = gates + 3 * size;
#pragma GCC ivdep  // gate by gate they lie apart
  for (std::int64_t i = 0; i < size; ++i) {
    const float enter = sigmoid(enters[i]), forget = sigmoid(forgets[i]);
    const float candidate = hyperbolic(candidates[i]), leave = sigmoid(leaves[i]);
    const float here = (FIRST ? 0.0f : forget * before[i]) + enter * candidate;
    const float bent_here = hyperbolic(here);
    enters[i] = enter;
    forgets[i] = forget;
    candidates[i] = candidate;
    leaves[i] = leave;
    cell[i] = here;
    turned[i] = bent_here;
    output[i] = leave * bent_here;
  }
}

// The gradients at the gates, from that at the output; `cell` becomes the gradient at the cell before.
template <bool FIRST>
CONFIDE_VECTOR __attribute__((noinline)) void back_of(std::int64_t size, const float* __restrict__ gates,
                                                      const float* __restrict__ before,
                                                      const float* __restrict__ turned,
                                                      const float* __restrict__ at_output, float* __restrict__ cell,
                                                      float* __restrict__ found) {
  float *at_enter = found, *at_forget = found + size, *at_candidate = found + 2 * size, *at_leave = found + 3 * size;
#pragma GCC ivdep  // gate by gate they lie apart
  for (std::int64_t i = 0; i < size; ++i) {
    const float enter = gates[i], forget = gates[size + i];
    const float candidate = gates[2 * size + i], leave = gates[3 * size + i];
    const float here = at_output[i];
    const float at_cell = cell[i] + here * leave * (1.0f - turned[i] * turned[i]);
    at_enter[i] = at_cell * candidate * ((1.0f - enter) * enter);
    at_forget[i] = FIRST ? 0.0f : at_cell * before[i] * ((1.0f - forget) * forget);
    at_candidate[i] = at_cell * enter * (1.0f - candidate * candidate);
    at_leave[i] = here * turned[i] * ((1.0f - leave) * leave);
    cell[i] = at_cell * forget;
  }
}

CONFIDE_INLINE void add(std::int64_t count, const float* __restrict__ values, float* __restrict__ onto) {
  for (std::int64_t i = 0; i < count; ++i) onto[i] += values[i];
}

// Where a step of a record begins in a tensor (records, steps, size); backwards the last step comes first.
struct Order {
  std::int64_t steps, size, backwards;

  std::int64_t start(std::int64_t record, std::int64_t place) const {
    return (record * steps + (backwards != 0 ? steps - 1 - place : place)) * size;
  }
};

}  // namespace

extern "C" {

CONFIDE_VECTOR void confide_lstm(std::int64_t records, std::int64_t steps, std::int64_t size, std::int64_t backwards,
                                 const float* packed, const float* bias, float* gates, float* cells, float* bent,
                                 float* outputs) {
  const Order order{steps, size, backwards};
  const std::int64_t stride = steps * size;
  for (std::int64_t place = 0; place < steps; ++place) {
    float* here = gates + 4 * order.start(0, place);
    for (std::int64_t record = 0; record < records && bias != nullptr; ++record) {
      add(4 * size, bias, here + 4 * record * stride);
    }
    if (place > 0) {
      const Rows rows{outputs + order.start(0, place - 1), here, stride, 4 * stride};
      add_products(records, rows, packed, size, 4 * size, false);
    }
    for (std::int64_t record = 0; record < records; ++record) {
      const std::int64_t at = order.start(record, place);
      if (place > 0) {
        const float* before = cells + order.start(record, place - 1);
        gates_of<false>(size, gates + 4 * at, before, cells + at, bent + at, outputs + at);
      } else {
        gates_of<true>(size, gates + 4 * at, nullptr, cells + at, bent + at, outputs + at);
      }
    }
  }
}

CONFIDE_VECTOR void confide_lstm_back(std::int64_t records, std::int64_t steps, std::int64_t size,
                                      std::int64_t backwards, const float* packed, const float* gates,
                                      const float* cells, const float* bent, const float* of_outputs, float* state,
                                      float* cell, float* found) {
  const Order order{steps, size, backwards};
  for (std::int64_t place = steps - 1; place >= 0; --place) {
    for (std::int64_t record = 0; record < records; ++record) {
      const std::int64_t at = order.start(record, place);
      float *at_state = state + record * size, *at_cell = cell + record * size;
      if (of_outputs != nullptr) add(size, of_outputs + at, at_state);
      if (place > 0) {
        const float* before = cells + order.start(record, place - 1);
        back_of<false>(size, gates + 4 * at, before, bent + at, at_state, at_cell, found + 4 * at);
      } else {
        back_of<true>(size, gates + 4 * at, nullptr, bent + at, at_state, at_cell, found + 4 * at);
      }
    }
    if (place > 0) {
      const Rows rows{found + 4 * order.start(0, place), state, 4 * steps * size, size};
      add_products(records, rows, packed, 4 * size, size, true);
    }
  }
}

}  // extern "C"
