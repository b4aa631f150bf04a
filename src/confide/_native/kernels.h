// What the sources of the library share, and everything that it exports.
//
// CONFIDE_SOURCES is given by `build.py`: a hash of all sources, this header included, and of the compiler's flags. The
// loader compares it with the hash of the sources that lie beside the library, so code of another version is never run.
//
// The library itself is built for the oldest machine of its kind and its loops for AVX2 besides, so callers ask
// `confide_supported` first. AArch64 has the vectors the loops need in its base instruction set.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define CONFIDE_VECTOR __attribute__((target("avx2,fma")))
#else
#define CONFIDE_VECTOR
#endif
#define CONFIDE_INLINE CONFIDE_VECTOR static inline __attribute__((always_inline))

#ifndef CONFIDE_SOURCES
#error "CONFIDE_SOURCES is missing: build with build.py"
#endif

// One layer of a clipped sum: output gradients `left` (records, outputs), inputs `right` (records, inputs), and where
// its sums go.
template <typename T>
struct ClipLayer {
  std::int64_t outputs, inputs;
  const T* left;
  const T* right;
  T* weight;
  T* bias;  // null without one
};

// A sum of outer products, each times a factor, which is added onto weight and bias; `room` is for the kernel's own use.
struct OuterTask {
  std::int64_t records, outputs, inputs, block;
  const float* left;
  const float* right;
  const float* factors;
  std::int64_t left_stride, right_stride, weight_stride;  // from one row to the next
  float* weight;
  float* bias;  // null without one
  float* room;
};

// The gradients of a convolution's weight for every record, and their squared norms. `outputs` and `channels` are those
// of one group; pairs belong to the rows and the columns of images; `left` has an image's positions at even distances.
// Gradients lie `out_stride` numbers apart: none, where they are thrown away.
struct PatchTask {
  std::int64_t records, groups, outputs, channels;
  std::int64_t rows, columns, height, width;  // positions, and pixels
  std::int64_t kernel[2], stride[2], dilation[2], padding[2];
  const float* left;
  std::int64_t left_record, left_channel, left_position;
  const float* images;
  std::int64_t image_record, image_channel, image_row, image_column;
  float* out;
  std::int64_t out_stride;
  float* norms;
  float* room;
};

// Where a layer's numbers stand in a draw; no bias is a negative place.
struct PredictionLayer {
  std::int64_t outputs, inputs, weight, bias, activation;
};

// Results of every draw are written to `out` (draws, stride, outputs), and weighted sums added to `sums` (rows, stride),
// each where there is one. For classes the results are probabilities, and the sums a row per class and one of entropies.
// For reals the sums are a row of the first draw's values, and rows of differences from it and of their squares.
struct PredictionTask {
  const PredictionLayer* layers;
  std::int64_t layer_count;
  const float* draws;
  std::int64_t draw_count, parameters;
  const float* x;
  std::int64_t records, stride, kind;
  float* out;
  double* sums;
  const float* weights;
  std::int64_t first;  // the number of the first draw
};

extern "C" {

const char* confide_sources();
int confide_supported();

std::int32_t confide_box_muller(const std::int32_t* words, float* out, std::int64_t blocks, std::int64_t pairs,
                                float std);

std::int64_t confide_rounded_normals(const std::uint64_t* words, double* out, std::int64_t pairs, double sigma,
                                     double margin, std::int64_t* doubtful, std::int64_t room);
void confide_add_float(const double* noise, float* sum, std::int64_t count, double spacing, double largest);
void confide_add_double(const double* noise, double* sum, std::int64_t count, double spacing, double largest);

int confide_clip_float(std::int64_t records, std::int64_t count, const ClipLayer<float>* layers, float* norms,
                       double bound, double gamma, double tiny);
int confide_clip_double(std::int64_t records, std::int64_t count, const ClipLayer<double>* layers, double* norms,
                        double bound, double gamma, double tiny);
void confide_squares_float(std::int64_t rows, std::int64_t entries, std::int64_t stride, const float* values,
                           float* norms);
void confide_squares_double(std::int64_t rows, std::int64_t entries, std::int64_t stride, const double* values,
                            double* norms);
void confide_gram_float(std::int64_t records, std::int64_t positions, std::int64_t outputs, std::int64_t inputs,
                        const float* left, const float* right, float* norms, float* spreads, double slack, double tiny);
void confide_gram_double(std::int64_t records, std::int64_t positions, std::int64_t outputs, std::int64_t inputs,
                         const double* left, const double* right, double* norms, double* spreads, double slack,
                         double tiny);
void confide_mean_field(const float* mean, const float* rho, const float* noise, float* weight, float* jacobian,
                        std::int64_t count);
void confide_add_rows(const float* const* rows, std::int64_t row_count, const float* noise, float* out,
                      std::int64_t count);

std::int64_t confide_outer_room(const OuterTask* task);
void confide_outer(const OuterTask* task);

std::int64_t confide_patches_room(const PatchTask* task);
void confide_patches(const PatchTask* task);

void confide_predict(const PredictionTask* given);

std::uint64_t confide_digest(const void* from, std::int64_t bytes, std::int64_t real, const std::uint32_t* key);

// All steps of an LSTM: (records, steps, size) are cells, bent, outputs and of_outputs, (records, steps, 4 size) gates and
// found, (records, size) state and cell. `packed` is the weight over the states, columns in panels (see recurrence.cpp).
// Gates come in as maps of the inputs and go out as gates. For the way back of_outputs may be null, state and cell are
// the gradients at the last of each, and are overwritten.
void confide_lstm(std::int64_t records, std::int64_t steps, std::int64_t size, std::int64_t backwards,
                  const float* packed, const float* bias, float* gates, float* cells, float* bent, float* outputs);
void confide_lstm_back(std::int64_t records, std::int64_t steps, std::int64_t size, std::int64_t backwards,
                       const float* packed, const float* gates, const float* cells, const float* bent,
                       const float* of_outputs, float* state, float* cell, float* found);

}  // extern "C"
