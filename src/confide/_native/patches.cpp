// The gradient of a convolution's weight for one record after the other, and its squared norm.
//
//     weight[o][c, k] = sum over positions t of  left[o][t]  image[c][place(t) + offset(k)]
//
// This is a sum of outer products over the positions. A library makes the patches of all records first, which takes as
// long as the products, or a convolution for every record, which small ones do not fill. Here the padded image of one
// record and as many of its patches as a tile has columns stay in the nearest caches. Every entry adds up the positions
// one after the other, whoever else is in the batch.

#include "tiles.h"

namespace {

constexpr std::int64_t SPARE = 16;  // numbers behind a buffer, which copies of whole vectors touch

struct Run {  // columns of the weight that lie side by side in the image too
  std::int64_t column, count, offset;
};

typedef float Four __attribute__((vector_size(16), aligned(sizeof(float)), may_alias));

template <int BYTES, int ROWS>
struct Patches : Tile<BYTES, ROWS> {
  using Base = Tile<BYTES, ROWS>;
  static constexpr int COLUMNS = Base::COLUMNS;

  const PatchTask& task;
  std::int64_t positions, padded_height, padded_width, width;
  float *image, *lefts, *rights;

  explicit Patches(const PatchTask& given)
      : task(given),
        positions(given.rows * given.columns),
        padded_height(given.height + 2 * given.padding[0]),
        padded_width(given.width + 2 * given.padding[1]),
        width(given.channels * given.kernel[0] * given.kernel[1]),
        image(given.room),
        lefts(image + given.channels * padded_height * padded_width + SPARE),
        rights(lefts + positions * ((given.outputs + ROWS - 1) / ROWS * ROWS)) {}

  std::int64_t room() const { return rights - image + positions * COLUMNS + SPARE; }

  // The margins of the room are zero from the beginning.
  CONFIDE_VECTOR inline __attribute__((always_inline)) void pad(const float* from) const {
    for (std::int64_t c = 0; c < task.channels; ++c) {
      float* into = image + (c * padded_height + task.padding[0]) * padded_width + task.padding[1];
      for (std::int64_t y = 0; y < task.height; ++y, into += padded_width) {
        const float* row = from + c * task.image_channel + y * task.image_row;
        for (std::int64_t x = 0; x < task.width; ++x) into[x] = row[x * task.image_column];
      }
    }
  }

  CONFIDE_VECTOR inline __attribute__((always_inline)) void pack_left(const float* from) const {
    float* into = lefts;
    for (std::int64_t first = 0; first < task.outputs; first += ROWS) {
      const std::int64_t some = std::min<std::int64_t>(ROWS, task.outputs - first);
      const float* row = from + first * task.left_channel;
      for (std::int64_t t = 0; t < positions; ++t, into += ROWS) {
        for (std::int64_t i = 0; i < some; ++i) into[i] = row[i * task.left_channel + t * task.left_position];
        for (std::int64_t i = some; i < ROWS; ++i) into[i] = 0.0f;
      }
    }
  }

  // The runs of a panel's columns, and how many there are: a channel's row of the kernel, as far as it goes.
  std::int64_t runs_of(std::int64_t first, Run* runs) const {
    const std::int64_t stop = std::min<std::int64_t>(width, first + COLUMNS);
    std::int64_t count = 0;
    for (std::int64_t column = first; column < stop;) {
      const std::int64_t k = column % task.kernel[1], row = column / task.kernel[1];
      const std::int64_t y = row % task.kernel[0], c = row / task.kernel[0];
      const std::int64_t some = task.dilation[1] == 1 ? std::min(task.kernel[1] - k, stop - column) : 1;
      const std::int64_t offset =
          (c * padded_height + y * task.dilation[0]) * padded_width + k * task.dilation[1];
      runs[count++] = {column - first, some, offset};
      column += some;
    }
    return count;
  }

  // A run is copied by whole vectors; what they write beyond it is overwritten by the next, or by the next position.
  CONFIDE_VECTOR inline __attribute__((always_inline)) void pack_right(const Run* runs, std::int64_t count) const {
    float* into = rights;
    for (std::int64_t y = 0; y < task.rows; ++y) {
      const float* place = image + y * task.stride[0] * padded_width;
      for (std::int64_t x = 0; x < task.columns; ++x, place += task.stride[1], into += COLUMNS) {
        for (std::int64_t i = 0; i < count; ++i) {
          const float* from = place + runs[i].offset;
          float* to = into + runs[i].column;
          for (std::int64_t k = 0; k < runs[i].count; k += 4) {
            *reinterpret_cast<Four*>(to + k) = *reinterpret_cast<const Four*>(from + k);
          }
        }
      }
    }
  }

  CONFIDE_VECTOR inline __attribute__((always_inline)) void products(std::int64_t first, float* into) const {
    const std::int64_t columns = std::min<std::int64_t>(COLUMNS, width - first);
    for (std::int64_t row = 0; row < task.outputs; row += ROWS) {
      const float* left = lefts + row * positions;
      float* place = into + row * width + first;
      if (row + ROWS <= task.outputs && columns == COLUMNS) {
        Base::write(positions, left, rights, place, width);
        continue;
      }
      float found[ROWS * COLUMNS];  // a tile at the edge
      Base::write(positions, left, rights, found, COLUMNS);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(ROWS, task.outputs - row); ++i) {
        std::memcpy(place + i * width, found + i * COLUMNS, columns * sizeof(float));
      }
    }
  }

  CONFIDE_VECTOR inline __attribute__((always_inline)) void all() const {
    const std::int64_t entries = task.groups * task.outputs * width;
    std::memset(image, 0, room() * sizeof(float));
    Run runs[COLUMNS];
    for (std::int64_t record = 0; record < task.records; ++record) {
      float* out = task.out + record * task.out_stride;
      for (std::int64_t group = 0; group < task.groups; ++group) {
        pad(task.images + record * task.image_record + group * task.channels * task.image_channel);
        pack_left(task.left + record * task.left_record + group * task.outputs * task.left_channel);
        for (std::int64_t first = 0; first < width; first += COLUMNS) {
          pack_right(runs, runs_of(first, runs));
          products(first, out + group * task.outputs * width);
        }
      }
      confide_squares_float(1, entries, entries, out, task.norms + record);
    }
  }
};

using Usual = Patches<32, 6>;

#if defined(__x86_64__)
using Long = Patches<64, 8>;

__attribute__((target("avx512f,avx2,fma"))) void all_long(const PatchTask& task) { Long(task).all(); }
#endif

}  // namespace

extern "C" {

// How many numbers of room a task needs.
std::int64_t confide_patches_room(const PatchTask* task) {
#if defined(__x86_64__)
  return std::max(Usual(*task).room(), Long(*task).room());
#else
  return Usual(*task).room();
#endif
}

CONFIDE_VECTOR void confide_patches(const PatchTask* task) {
#if defined(__x86_64__)
  if (is_long()) return all_long(*task);
#endif
  Usual(*task).all();
}

}  // extern "C"
