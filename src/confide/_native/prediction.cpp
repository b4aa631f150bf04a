// Predictions of many draws of a small fully connected network, without a pass over memory between the layers.
//
// Inputs stand in panels of 32 records, one row of 32 numbers per feature. A few panels at a time meet draw after draw:
// a panel goes through all layers of a draw while it is in the first cache, and the weights, read where they stand in
// the draw, are used by one panel after the other. What comes out is written, or only added up. Products are made in
// registers, six rows of weights by two vectors of records; everything else is plain loops that the compiler turns into
// vector instructions. As in gaussian.cpp the caller asks `confide_supported` first.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#define UNROLLED _Pragma("GCC unroll 8")  // early, so that small arrays become registers

namespace {

using Count = std::int64_t;

constexpr Count LANES = 8, PANEL = 32;
constexpr Count ROWS = 6;              // of weights at once: with two vectors of records, 12 of 16 registers are sums
constexpr Count DEPTH = 128;           // of a product at once: so many rows of a panel take half the first cache
constexpr Count TILE_NUMBERS = 1 << 15;  // numbers of the panels that meet a draw together: 128 kB

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Bits __attribute__((vector_size(4 * LANES)));  // a cast to and fro keeps the bits

// A row of a panel. Vectors that cross a line of the cache would cost twice as much.
struct alignas(128) Row {
  float numbers[PANEL];
};

enum Activation : Count { NONE, RELU, TANH, SIGMOID, SILU };
enum Kind : Count { OUTPUTS, CLASSES, TWO_CLASSES, REALS };  // two classes come from one output, the logit of the second

using Layer = PredictionLayer;
using Task = PredictionTask;

CONFIDE_INLINE Vector load(const float* place) {
  Vector value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

CONFIDE_INLINE void store(float* place, Vector value) { std::memcpy(place, &value, sizeof value); }

CONFIDE_INLINE Vector splat(float v) { return Vector{v, v, v, v, v, v, v, v}; }

// In this order what is not a number stays so.
CONFIDE_INLINE Vector at_least(Vector x, float least) { return x < least ? splat(least) : x; }

// exp(x) = (1 + rest) scale with scale a power of two and |log(1 + rest)| <= log(2) / 2. It is 0 below exp(-87.7), and
// stays at exp(88) above.
struct Exponential {
  Vector rest, scale;
};

constexpr float LEAST = -88.0f, MOST = 88.0f;

CONFIDE_INLINE Exponential exponential(Vector x) {
  x = at_least(x, LEAST);
  x = x > MOST ? splat(MOST) : x;
  const Vector shifted = x * 1.44269504f + 12582912.0f;  // 1.5 2^23: rounds to a whole number, in the last bits
  const Vector octaves = shifted - 12582912.0f;
  const Vector f = (x - octaves * 0.693359375f) + octaves * 2.12194440e-4f;
  Vector p = f * (1.0f / 5040) + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  return {p * f, (Vector)(((Bits)shifted + 127) << 23)};
}

CONFIDE_INLINE Vector exp_of(Vector x) {
  const Exponential found = exponential(x);
  return found.rest * found.scale + found.scale;
}

// log(x) for positive ordinary numbers: the octaves, and 2 artanh((m - 1) / (m + 1)) for the mantissa m.
CONFIDE_INLINE Vector log_of(Vector x) {
  const Bits octaves = ((Bits)x - 0x3f3504f3) >> 23;
  const Vector m = (Vector)((Bits)x - (octaves << 23));
  const Vector s = (m - 1.0f) / (m + 1.0f), q = s * s;
  Vector p = q * (1.0f / 11) + 1.0f / 9;
  p = p * q + 1.0f / 7;
  p = p * q + 1.0f / 5;
  p = p * q + 1.0f / 3;
  return __builtin_convertvector(octaves, Vector) * 0.693147181f + (s + s + (s + s) * q * p);
}

template <Activation activation>
CONFIDE_INLINE Vector activated(Vector x) {
  if (activation == TANH) {  // (exp(2 x) - 1) / (exp(2 x) + 1), without cancellation for small x
    const Exponential found = exponential(x + x);
    const Vector minus_one = found.rest * found.scale + (found.scale - 1.0f);
    return minus_one / (minus_one + 2.0f);
  }
  const Vector share = 1.0f / (1.0f + exp_of(-x));
  return activation == SILU ? x * share : share;
}

template <Activation activation>
CONFIDE_VECTOR void activate(float* values, Count count) {
  for (Count i = 0; i < count; i += LANES) store(values + i, activated<activation>(load(values + i)));
}

// `rows` rows of weights times a panel, `wide` vectors of records at once, added to `bias` or else to what stands in
// `out`; no result is below `least`.
template <int rows, int wide>
CONFIDE_VECTOR void multiply(const float* weight, Count stride, const float* bias, const float* in, float* out,
                             Count depth, float least) {
  for (const float* end = in + PANEL; in < end; in += wide * LANES, out += wide * LANES) {
    Vector sums[rows][wide];
    UNROLLED for (int row = 0; row < rows; ++row) {
      UNROLLED for (int v = 0; v < wide; ++v) {
        sums[row][v] = bias ? splat(bias[row]) : load(out + row * PANEL + v * LANES);
      }
    }
    for (Count k = 0; k < depth; ++k) {
      Vector x[wide];
      UNROLLED for (int v = 0; v < wide; ++v) x[v] = load(in + k * PANEL + v * LANES);
      UNROLLED for (int row = 0; row < rows; ++row) {
        const Vector w = splat(weight[row * stride + k]);
        UNROLLED for (int v = 0; v < wide; ++v) sums[row][v] += w * x[v];
      }
    }
    UNROLLED for (int row = 0; row < rows; ++row) {
      UNROLLED for (int v = 0; v < wide; ++v) {
        store(out + row * PANEL + v * LANES, at_least(sums[row][v], least));
      }
    }
  }
}

using Multiply = void (*)(const float*, Count, const float*, const float*, float*, Count, float);

// Few rows take the whole panel at once, so that there are sums enough to hide the latency of each.
constexpr Multiply PRODUCTS[ROWS + 1] = {nullptr,        multiply<1, 4>, multiply<2, 4>, multiply<3, 4>,
                                         multiply<4, 2>, multiply<5, 2>, multiply<6, 2>};

const float NO_BIAS[ROWS] = {};

CONFIDE_VECTOR void through(const Layer& layer, const float* draw, const float* in, float* out) {
  const Count groups = (layer.outputs + ROWS - 1) / ROWS, size = layer.outputs / groups;
  const Count larger = layer.outputs - size * groups;  // so many groups have one row more
  for (Count k = 0; k < layer.inputs; k += DEPTH) {
    const Count depth = std::min(DEPTH, layer.inputs - k);
    const bool last = k + depth == layer.inputs;
    const float least = last && layer.activation == RELU ? 0.0f : -std::numeric_limits<float>::infinity();
    for (Count group = 0, row = 0; group < groups; ++group) {
      const Count rows = size + (group < larger ? 1 : 0);
      const float* weight = draw + layer.weight + row * layer.inputs + k;
      const float* bias = k > 0 ? nullptr : layer.bias < 0 ? NO_BIAS : draw + layer.bias + row;
      PRODUCTS[rows](weight, layer.inputs, bias, in + k * PANEL, out + row * PANEL, depth, least);
      row += rows;
    }
  }
  const Count count = layer.outputs * PANEL;
  if (layer.activation == TANH) activate<TANH>(out, count);
  if (layer.activation == SIGMOID) activate<SIGMOID>(out, count);
  if (layer.activation == SILU) activate<SILU>(out, count);
}

// z (classes, PANEL) become probabilities; their entropies are log sum exp(z) - sum p z, with z below their maximum.
CONFIDE_INLINE void softmax(float* z, Count classes, float* entropies) {
  for (Count lane = 0; lane < PANEL; lane += LANES) {
    float* column = z + lane;
    Vector most = load(column), total = {}, product = {};
    for (Count c = 1; c < classes; ++c) {
      const Vector next = load(column + c * PANEL);
      most = next > most ? next : most;
    }
    for (Count c = 0; c < classes; ++c) {
      const Vector below = load(column + c * PANEL) - most, e = exp_of(below);
      store(column + c * PANEL, e);
      total += e;
      product += e * at_least(below, LEAST);  // no product of zero and infinity
    }
    const Vector share = 1.0f / total;
    for (Count c = 0; c < classes; ++c) store(column + c * PANEL, load(column + c * PANEL) * share);
    store(entropies + lane, log_of(total) - product * share);
  }
}

CONFIDE_INLINE void add(double* __restrict__ sums, const float* __restrict__ values, double weight, Count count) {
  for (Count i = 0; i < count; ++i) sums[i] += weight * static_cast<double>(values[i]);
}

CONFIDE_INLINE void finish(const Task& task, Count draw, Count start, Count count, Count outputs, float* values) {
  alignas(sizeof(Vector)) float entropies[PANEL];
  if (task.kind == TWO_CLASSES) {
    std::copy(values, values + PANEL, values + PANEL);
    std::fill(values, values + PANEL, 0.0f);
    outputs = 2;
  }
  const bool classes = task.kind == CLASSES || task.kind == TWO_CLASSES;
  if (classes) softmax(values, outputs, entropies);
  if (task.out != nullptr) {
    float* out = task.out + (draw * task.stride + start) * outputs;
    for (Count i = 0; i < count; ++i) {
      for (Count o = 0; o < outputs; ++o) out[i * outputs + o] = values[o * PANEL + i];
    }
  }
  if (task.sums == nullptr) return;
  const double weight = task.weights[draw];
  double* sums = task.sums + start;
  if (classes) {
    for (Count o = 0; o < outputs; ++o) add(sums + o * task.stride, values + o * PANEL, weight, count);
    add(sums + outputs * task.stride, entropies, weight, count);
    return;
  }
  if (task.first + draw == 0) std::copy(values, values + count, sums);
  for (Count i = 0; i < count; ++i) {
    const double difference = values[i] - sums[i];
    sums[task.stride + i] += weight * difference;
    sums[2 * task.stride + i] += weight * difference * difference;
  }
}

}  // namespace

extern "C" CONFIDE_VECTOR void confide_predict(const Task* given) {
  const Task& task = *given;
  const Layer* layers = task.layers;
  const Count features = layers[0].inputs;
  Count widest = 2;  // rows, for two classes
  for (Count k = 0; k < task.layer_count; ++k) widest = std::max(widest, layers[k].outputs);
  const Count panels = std::min<Count>(std::max<Count>(TILE_NUMBERS / (features * PANEL), 2), 64);
  std::vector<Row> inputs(panels * features), values(2 * widest);
  for (Count tile = 0; tile < task.records; tile += panels * PANEL) {
    const Count records = std::min(panels * PANEL, task.records - tile);
    for (Count i = 0; i < records; ++i) {  // places past the last record keep older numbers, which go nowhere
      Row* panel = &inputs[i / PANEL * features];
      for (Count k = 0; k < features; ++k) panel[k].numbers[i % PANEL] = task.x[(tile + i) * features + k];
    }
    for (Count draw = 0; draw < task.draw_count; ++draw) {
      for (Count start = 0; start < records; start += PANEL) {
        float* in = inputs[start / PANEL * features].numbers;
        for (Count k = 0; k < task.layer_count; ++k) {
          float* out = values[k % 2 * widest].numbers;
          through(layers[k], task.draws + draw * task.parameters, in, out);
          in = out;
        }
        const Count count = std::min(PANEL, records - start);
        finish(task, draw, tile + start, count, layers[task.layer_count - 1].outputs, in);
      }
    }
  }
}
