// Small clipped sums in one call, norms of sums of outer products, and the elementwise part of mean-field weights.
//
// For a small fully connected network the arithmetic of a clipped sum takes microseconds and the calls that ask for it
// take longer; `confide_clip_*` does all of it for all layers at once. `confide_gram_*` takes the norm of a record's
// gradient from the Gram matrices of its positions, which are symmetric: half the products of a general routine do.
// `confide_mean_field` makes a weight draw and its derivative in one pass over memory. As in gaussian.cpp the loops are
// plain ones that the compiler turns into vector instructions, and the caller asks `confide_supported` first.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr std::int64_t LANES = 16;
constexpr std::int64_t TOGETHER = 4;  // records that are added up side by side; a block has a multiple of them
constexpr std::int64_t BLOCK = 32;  // records whose sum is taken in the type of the layers (KERNEL_BLOCK in chain.py)

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

// The same of TOGETHER successive rows, so that what is added to is read and written once for all of them.
template <typename T>
CONFIDE_INLINE void add_scaled_rows(T* __restrict__ into, const T* __restrict__ values, const T* __restrict__ scales,
                                    std::int64_t count) {
  const T first = scales[0], second = scales[1], third = scales[2], fourth = scales[3];
  for (std::int64_t i = 0; i < count; ++i) {
    const T* row = values + i;
    into[i] += (first * row[0] + second * row[count]) + (third * row[2 * count] + fourth * row[3 * count]);
  }
}

template <typename T>
CONFIDE_INLINE bool clipped_sum(std::int64_t records, std::int64_t count, const ClipLayer<T>* layers, T* norms, T bound,
                                T gamma, T tiny) {
  T check = 0;
  for (std::int64_t record = 0; record < records; ++record) {
    T total = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      const ClipLayer<T>& layer = layers[k];
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
  std::int64_t entries = 0;
  for (std::int64_t k = 0; k < count; ++k) entries += layers[k].outputs * (layers[k].inputs + 1);
  std::vector<T> block(entries);
  std::vector<double> sums(entries);
  for (std::int64_t record = 0; record < records;) {
    const std::int64_t some = record + TOGETHER <= records ? TOGETHER : 1;  // never beyond a block
    T factors[TOGETHER];
    for (std::int64_t one = 0; one < some; ++one) {
      const T norm = norms[record + one];
      factors[one] = gamma > T(0) ? (T(1) / (norm + gamma)) * bound : std::min((T(1) / norm) * bound, T(1));
    }
    T* place = block.data();
    for (std::int64_t k = 0; k < count; ++k) {
      const ClipLayer<T>& layer = layers[k];
      const T* right = layer.right + record * layer.inputs;
      for (std::int64_t output = 0; output < layer.outputs; ++output, place += layer.inputs + 1) {
        T scales[TOGETHER];
        for (std::int64_t one = 0; one < some; ++one) {
          scales[one] = factors[one] * layer.left[(record + one) * layer.outputs + output];
          place[layer.inputs] += scales[one];
        }
        if (some == TOGETHER) {
          add_scaled_rows(place, right, scales, layer.inputs);
        } else {
          add_scaled(place, right, scales[0], layer.inputs);
        }
      }
    }
    record += some;
    if (record % BLOCK == 0 || record == records) {
      for (std::int64_t i = 0; i < entries; ++i) {
        sums[i] += block[i];
        block[i] = 0;
      }
    }
  }
  const double* place = sums.data();  // the caller's numbers are touched once, by the whole sum
  for (std::int64_t k = 0; k < count; ++k) {
    const ClipLayer<T>& layer = layers[k];
    for (std::int64_t output = 0; output < layer.outputs; ++output, place += layer.inputs + 1) {
      T* weight = layer.weight + output * layer.inputs;
      for (std::int64_t i = 0; i < layer.inputs; ++i) weight[i] = static_cast<T>(weight[i] + place[i]);
      if (layer.bias != nullptr) layer.bias[output] = static_cast<T>(layer.bias[output] + place[layer.inputs]);
    }
  }
  return true;
}

// Vectors of 32 bytes, wherever they lie.
template <typename T>
struct Wide {
  typedef T Value __attribute__((vector_size(32)));
  typedef T Unaligned __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
  static constexpr std::int64_t WIDTH = 32 / sizeof(T);
};

template <typename T, int ROWS>
CONFIDE_INLINE void add_lanes(const typename Wide<T>::Value* sums, T* found) {
#if defined(__x86_64__)
  if constexpr (sizeof(T) == 4 && ROWS == 4) {
    const __m256 low = _mm256_hadd_ps((__m256)sums[0], (__m256)sums[1]);
    const __m256 all = _mm256_hadd_ps(low, _mm256_hadd_ps((__m256)sums[2], (__m256)sums[3]));
    _mm_storeu_ps(found, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    return;
  }
#endif
  for (int row = 0; row < ROWS; ++row) {
    T total = 0;
    for (std::int64_t lane = 0; lane < Wide<T>::WIDTH; ++lane) total += sums[row][lane];
    found[row] = total;
  }
}

// found[c][r] = first[r] . second[c] for ROWS and COLUMNS successive rows of `width` numbers
template <typename T, int ROWS, int COLUMNS>
CONFIDE_INLINE void products(const T* first, const T* second, std::int64_t width, T (&found)[COLUMNS][ROWS]) {
  using Value = typename Wide<T>::Value;
  using Unaligned = typename Wide<T>::Unaligned;
  Value sums[COLUMNS][ROWS] = {};
  std::int64_t k = 0;
  for (; k + Wide<T>::WIDTH <= width; k += Wide<T>::WIDTH) {
    Value right[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) right[c] = *reinterpret_cast<const Unaligned*>(second + c * width + k);
    for (int r = 0; r < ROWS; ++r) {
      Value left = *reinterpret_cast<const Unaligned*>(first + r * width + k);
#if defined(__x86_64__)
      asm("" : "+x"(left));  // loaded once: loads are what this loop waits for
#endif
      for (int c = 0; c < COLUMNS; ++c) sums[c][r] += left * right[c];
    }
  }
  for (int c = 0; c < COLUMNS; ++c) add_lanes<T, ROWS>(sums[c], found[c]);
  for (; k < width; ++k) {
    for (int c = 0; c < COLUMNS; ++c) {
      for (int r = 0; r < ROWS; ++r) found[c][r] += first[r * width + k] * second[c * width + k];
    }
  }
}

// One record: left (positions, outputs), right (positions, inputs).
template <typename T>
struct Positions {
  const T* left;
  const T* right;
  std::int64_t count, outputs, inputs;

  // the sum of (left_t . left_s) (right_t . right_s) over a tile of pairs
  template <int ROWS, int COLUMNS>
  CONFIDE_VECTOR __attribute__((noinline)) double tile(std::int64_t t, std::int64_t s) const {
    T of_left[COLUMNS][ROWS], of_right[COLUMNS][ROWS];
    products<T, ROWS, COLUMNS>(left + t * outputs, left + s * outputs, outputs, of_left);
    products<T, ROWS, COLUMNS>(right + t * inputs, right + s * inputs, inputs, of_right);
    double sums[ROWS] = {};
    for (int c = 0; c < COLUMNS; ++c) {
      for (int r = 0; r < ROWS; ++r) sums[r] += static_cast<double>(of_left[c][r]) * of_right[c][r];
    }
    double total = 0;
    for (int r = 0; r < ROWS; ++r) total += sums[r];
    return total;
  }

  // ROWS positions from t on, with those from s to `stop`
  template <int ROWS>
  CONFIDE_VECTOR inline __attribute__((always_inline)) double across(std::int64_t t, std::int64_t s,
                                                                     std::int64_t stop) const {
    double total = 0;
    for (; stop - s > 4 || stop - s == 3; s += 3) total += tile<ROWS, 3>(t, s);
    for (; stop - s > 1; s += 2) total += tile<ROWS, 2>(t, s);
    if (s < stop) total += tile<ROWS, 1>(t, s);
    return total;
  }

  // All pairs, those of different positions once for both orders, a panel that stays in cache at a time.
  CONFIDE_VECTOR inline __attribute__((always_inline)) double pairs() const {
    double once = 0, twice = 0;
    for (std::int64_t start = 0; start < count; start += PANEL) {
      const std::int64_t stop = std::min(start + PANEL, count);
      std::int64_t t = 0;
      for (; t < start; t += 4) twice += across<4>(t, start, stop);
      for (; t + 4 <= stop; t += 4) {
        once += across<4>(t, t, t + 4);
        twice += across<4>(t, t + 4, stop);
      }
      for (; t < stop; ++t) {
        once += across<1>(t, t, t + 1);
        twice += across<1>(t, t + 1, stop);
      }
    }
    return once + 2 * twice;
  }

  static constexpr std::int64_t PANEL = 12;  // a multiple of 3 and of 4
};

// |sum_t left_t right_t^T|^2 and |left| |right|, the first with what rounding (`slack` times the product of the norms) and underflow may have hidden
template <typename T>
CONFIDE_INLINE void gram_norms(std::int64_t records, Positions<T> record, T* norms, T* spreads, double slack,
                               double tiny) {
  const std::int64_t lefts = record.count * record.outputs, rights = record.count * record.inputs;
  for (std::int64_t i = 0; i < records; ++i, record.left += lefts, record.right += rights) {
    const double total = record.pairs();
    const double left = sum_of_squares(record.left, lefts), right = sum_of_squares(record.right, rights);
    const double lost_left = tiny * static_cast<double>(lefts), lost_right = tiny * static_cast<double>(rights);
    const double hidden = slack * left * right + lost_left * right + lost_right * left + lost_left * lost_right;
    norms[i] = static_cast<T>((total > 0 ? total : total * 0) + hidden);  // not a number stays one
    spreads[i] = static_cast<T>(std::sqrt((left + lost_left) * (right + lost_right)));
  }
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

CONFIDE_VECTOR int confide_clip_float(std::int64_t records, std::int64_t count, const ClipLayer<float>* layers,
                                      float* norms, double bound, double gamma, double tiny) {
  return clipped_sum<float>(records, count, layers, norms, static_cast<float>(bound), static_cast<float>(gamma),
                            static_cast<float>(tiny));
}

CONFIDE_VECTOR int confide_clip_double(std::int64_t records, std::int64_t count, const ClipLayer<double>* layers,
                                       double* norms, double bound, double gamma, double tiny) {
  return clipped_sum<double>(records, count, layers, norms, bound, gamma, tiny);
}

// norms[i] = |values_i|^2 for rows of `entries` numbers that begin `stride` numbers apart
CONFIDE_VECTOR void confide_squares_float(std::int64_t rows, std::int64_t entries, std::int64_t stride,
                                          const float* values, float* norms) {
  for (std::int64_t i = 0; i < rows; ++i) norms[i] = sum_of_squares(values + i * stride, entries);
}

CONFIDE_VECTOR void confide_squares_double(std::int64_t rows, std::int64_t entries, std::int64_t stride,
                                           const double* values, double* norms) {
  for (std::int64_t i = 0; i < rows; ++i) norms[i] = sum_of_squares(values + i * stride, entries);
}

CONFIDE_VECTOR void confide_gram_float(std::int64_t records, std::int64_t positions, std::int64_t outputs,
                                       std::int64_t inputs, const float* left, const float* right, float* norms,
                                       float* spreads, double slack, double tiny) {
  gram_norms<float>(records, {left, right, positions, outputs, inputs}, norms, spreads, slack, tiny);
}

CONFIDE_VECTOR void confide_gram_double(std::int64_t records, std::int64_t positions, std::int64_t outputs,
                                        std::int64_t inputs, const double* left, const double* right, double* norms,
                                        double* spreads, double slack, double tiny) {
  gram_norms<double>(records, {left, right, positions, outputs, inputs}, norms, spreads, slack, tiny);
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

// out = the sum of all rows, one after the other, and of the noise, in double precision, rounded once
CONFIDE_VECTOR void confide_add_rows(const float* const* rows, std::int64_t row_count, const float* noise, float* out,
                                     std::int64_t count) {
  constexpr std::int64_t BLOCK = 512;  // of 4 kB: it stays in the nearest cache
  double total[BLOCK];
  for (std::int64_t start = 0; start < count; start += BLOCK) {
    const std::int64_t length = count - start < BLOCK ? count - start : BLOCK;
    for (std::int64_t i = 0; i < length; ++i) total[i] = rows[0][start + i];
    for (std::int64_t row = 1; row < row_count; ++row) {
      const float* more = rows[row] + start;
      for (std::int64_t i = 0; i < length; ++i) total[i] += more[i];
    }
    for (std::int64_t i = 0; i < length; ++i) out[start + i] = static_cast<float>(total[i] + noise[start + i]);
  }
}

}  // extern "C"
