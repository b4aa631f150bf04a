// Small clipped sums in one call, and the elementwise part of mean-field weights.
//
// For a small fully connected network the arithmetic of a clipped sum takes microseconds and the calls that ask for it
// take longer; `confide_clip_*` does all of it for all layers at once. `confide_mean_field` makes a weight draw and
// its derivative in one pass over memory. As in gaussian.cpp the loops are plain ones that the compiler turns into
// vector instructions, and the caller asks `confide_supported` first.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define CONFIDE_VECTOR __attribute__((target("avx2,fma")))
#else
#define CONFIDE_VECTOR
#endif
#define CONFIDE_INLINE CONFIDE_VECTOR static inline __attribute__((always_inline))

namespace {

constexpr std::int64_t LANES = 32;

// Cascaded: lanes side by side, their sums over short stretches added up in double.
template <typename T>
CONFIDE_INLINE T sum_of_squares(const T* __restrict__ values, std::int64_t count) {
  double total = 0;
  std::int64_t start = 0;
  while (start + LANES <= count) {
    T lanes[LANES] = {};
    const std::int64_t stop = std::min(count - LANES + 1, start + 8 * LANES);
    for (; start < stop; start += LANES) {
      for (std::int64_t lane = 0; lane < LANES; ++lane) {
        const T value = values[start + lane];
        lanes[lane] += value * value;
      }
    }
    for (std::int64_t half = LANES / 2; half > 0; half /= 2) {
      for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    total += lanes[0];
  }
  T rest = 0;
  for (; start < count; ++start) rest += values[start] * values[start];
  return static_cast<T>(total + rest);
}

template <typename T>
CONFIDE_INLINE void add_scaled(T* __restrict__ into, const T* __restrict__ values, T scale, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) into[i] += scale * values[i];
}

// One layer: output gradients `left` (records, outputs), inputs `right` (records, inputs), and where its sums go.
template <typename T>
struct Layer {
  std::int64_t outputs, inputs;
  const T* left;
  const T* right;
  T* weight;
  T* bias;  // null without one
};

template <typename T>
CONFIDE_INLINE bool clipped_sum(std::int64_t records, std::int64_t count, const Layer<T>* layers, T* norms, T bound,
                                T gamma, T tiny) {
  T check = 0;
  for (std::int64_t record = 0; record < records; ++record) {
    T total = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      const Layer<T>& layer = layers[k];
      // as for every layer: what underflow may have hidden is added, so that the product stays an upper bound
      const T extra = layer.bias != nullptr ? T(1) : tiny * static_cast<T>(layer.inputs);
      const T right = sum_of_squares(layer.right + record * layer.inputs, layer.inputs) + extra;
      const T left = sum_of_squares(layer.left + record * layer.outputs, layer.outputs);
      total += right * (left + tiny * static_cast<T>(layer.outputs));
    }
    norms[record] = std::sqrt(total);
    check += total * T(0);  // not a number as soon as one total is not finite
  }
  if (!(check == T(0))) return false;
  for (std::int64_t record = 0; record < records; ++record) {
    const T norm = norms[record];
    const T factor = gamma > T(0) ? (T(1) / (norm + gamma)) * bound : std::min((T(1) / norm) * bound, T(1));
    for (std::int64_t k = 0; k < count; ++k) {
      const Layer<T>& layer = layers[k];
      const T* right = layer.right + record * layer.inputs;
      for (std::int64_t output = 0; output < layer.outputs; ++output) {
        const T scale = factor * layer.left[record * layer.outputs + output];
        add_scaled(layer.weight + output * layer.inputs, right, scale, layer.inputs);
        if (layer.bias != nullptr) layer.bias[output] += scale;
      }
    }
  }
  return true;
}

CONFIDE_INLINE float as_float(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// exp(-r) for 0 <= r; below exp(-87) it stays there.
CONFIDE_INLINE float decay(float r) {
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
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  return p * as_float((static_cast<std::int32_t>(octaves) + 127) << 23);
}

// log(1 + t) for 0 <= t <= 1, as 2 artanh(t / (2 + t)): small t keep their relative accuracy.
CONFIDE_INLINE float log_one_plus(float t) {
  const float s = t / (2.0f + t), q = s * s;
  float p = 1.0f / 15;
  p = p * q + 1.0f / 13;
  p = p * q + 1.0f / 11;
  p = p * q + 1.0f / 9;
  p = p * q + 1.0f / 7;
  p = p * q + 1.0f / 5;
  p = p * q + 1.0f / 3;
  p = p * q + 1.0f;
  return 2.0f * s * p;
}

}  // namespace

extern "C" {

CONFIDE_VECTOR int confide_clip_float(std::int64_t records, std::int64_t count, const Layer<float>* layers,
                                      float* norms, double bound, double gamma, double tiny) {
  return clipped_sum<float>(records, count, layers, norms, static_cast<float>(bound), static_cast<float>(gamma),
                            static_cast<float>(tiny));
}

CONFIDE_VECTOR int confide_clip_double(std::int64_t records, std::int64_t count, const Layer<double>* layers,
                                       double* norms, double bound, double gamma, double tiny) {
  return clipped_sum<double>(records, count, layers, norms, bound, gamma, tiny);
}

// weight = mean + softplus(rho) noise,  jacobian = sigmoid(rho) noise
CONFIDE_VECTOR void confide_mean_field(const float* __restrict__ mean, const float* __restrict__ rho,
                                       const float* __restrict__ noise, float* __restrict__ weight,
                                       float* __restrict__ jacobian, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float r = rho[i];
    const float t = decay(std::fabs(r));
    const float share = 1.0f / (1.0f + t);
    const float deviation = (r > 0.0f ? r : 0.0f) + log_one_plus(t);
    const float slope = r > 0.0f ? share : t * share;
    weight[i] = mean[i] + deviation * noise[i];
    jacobian[i] = slope * noise[i];
  }
}

}  // extern "C"
