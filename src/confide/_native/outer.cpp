// Sums of outer products, each times a factor: the clipped sum of a linear layer, added onto what is there.
//
//     weight[o][i] += sum_r factors[r] left[r][o] right[r][i],      bias[o] += sum_r factors[r] left[r][o]
//
// This is a product of matrices that keeps two promises which a library's does not. Every entry adds up `block` records
// one after the other, and then the sums of the blocks, whatever the sizes, the processor and the number of threads:
// that is the order whose error `rounding.py` bounds. And what is there (noise) is met once, by the whole sum. Neither
// takes a pass over memory, for a tile of entries stays in registers until all its records are added up. As usual (Goto
// and van de Geijn 2008, ACM TOMS 34) both sides are copied into panels first, in which a tile reads one number after
// the other; a group of right panels and some left ones stay in the caches.

#include <algorithm>

#include "tiles.h"

namespace {

// Numbers of right panels that are used for all outputs before the next, and of left panels for all of those.
constexpr std::int64_t RIGHT_ROOM = 1 << 20, LEFT_ROOM = 1 << 17;

template <int BYTES, int ROWS>
struct Tiles : Tile<BYTES, ROWS> {
  using this_tile = Tile<BYTES, ROWS>;
  using this_tile::COLUMNS;

  static std::int64_t columns_at_once(const OuterTask& task) {
    const std::int64_t some = RIGHT_ROOM / task.records / COLUMNS, all = (task.inputs + COLUMNS - 1) / COLUMNS;
    return COLUMNS * std::min(all, std::max<std::int64_t>(1, some));
  }

  static std::int64_t rows_at_once(const OuterTask& task) {
    const std::int64_t some = LEFT_ROOM / task.records / ROWS, all = (task.outputs + ROWS - 1) / ROWS;
    return ROWS * std::min(all, std::max<std::int64_t>(1, some));
  }

  static std::int64_t room(const OuterTask& task) {
    return task.records * (columns_at_once(task) + rows_at_once(task));
  }

  CONFIDE_VECTOR static inline __attribute__((always_inline)) void pack_right(const OuterTask& task, std::int64_t start,
                                                                              std::int64_t stop, float* into) {
    for (std::int64_t record = 0; record < task.records; ++record) {
      const float* from = task.right + record * task.right_stride;
      float* place = into + record * COLUMNS;
      for (std::int64_t column = start; column < stop; column += COLUMNS, place += task.records * COLUMNS) {
        if (column + COLUMNS <= task.inputs) {
          std::memcpy(place, from + column, COLUMNS * sizeof(float));
        } else {
          for (std::int64_t i = 0; i < COLUMNS; ++i) place[i] = column + i < task.inputs ? from[column + i] : 0.0f;
        }
      }
    }
  }

  // Left panels times their factors.
  CONFIDE_VECTOR static inline __attribute__((always_inline)) void pack_left(const OuterTask& task, std::int64_t start,
                                                                             std::int64_t stop, float* into) {
    for (std::int64_t row = start; row < stop; row += ROWS) {
      const std::int64_t some = std::min<std::int64_t>(ROWS, task.outputs - row);
      const float* from = task.left + row;
      for (std::int64_t record = 0; record < task.records; ++record, into += ROWS, from += task.left_stride) {
        const float factor = task.factors[record];
        if (some == ROWS) {
          for (int i = 0; i < ROWS; ++i) into[i] = factor * from[i];
        } else {
          for (int i = 0; i < ROWS; ++i) into[i] = i < some ? factor * from[i] : 0.0f;
        }
      }
    }
  }

  // The bias of the outputs in a left panel, in the order of the tiles.
  CONFIDE_VECTOR static inline __attribute__((always_inline)) void add_bias(const OuterTask& task, const float* left,
                                                                            std::int64_t row) {
    float before[ROWS] = {};
    for (std::int64_t start = 0; start < task.records; start += task.block) {
      const std::int64_t stop = std::min(task.records, start + task.block);
      float sums[ROWS] = {};
      for (std::int64_t record = start; record < stop; ++record) {
        for (int i = 0; i < ROWS; ++i) sums[i] += left[record * ROWS + i];
      }
      for (int i = 0; i < ROWS; ++i) before[i] += sums[i];
    }
    for (std::int64_t i = 0; i < std::min<std::int64_t>(ROWS, task.outputs - row); ++i) task.bias[row + i] += before[i];
  }

  CONFIDE_VECTOR static inline __attribute__((always_inline)) void add_tile(const OuterTask& task, const float* left,
                                                                            const float* right, std::int64_t row,
                                                                            std::int64_t column) {
    float* into = task.weight + row * task.weight_stride + column;
    if (row + ROWS <= task.outputs && column + COLUMNS <= task.inputs) {
      for (int i = 0; i < ROWS; ++i) {  // they are there when the sum is
        for (int j = 0; j < COLUMNS; j += 16) __builtin_prefetch(into + i * task.weight_stride + j, 1);
      }
      this_tile::add(task.records, task.block, left, right, into, task.weight_stride);
      return;
    }
    float found[ROWS * COLUMNS] = {};  // a tile at the edge
    this_tile::add(task.records, task.block, left, right, found, COLUMNS);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(ROWS, task.outputs - row); ++i) {
      for (std::int64_t j = 0; j < std::min<std::int64_t>(COLUMNS, task.inputs - column); ++j) {
        into[i * task.weight_stride + j] += found[i * COLUMNS + j];
      }
    }
  }

  CONFIDE_VECTOR static inline __attribute__((always_inline)) void all(const OuterTask& task) {
    const std::int64_t columns = columns_at_once(task), rows = rows_at_once(task);
    float *rights = task.room, *lefts = task.room + columns * task.records;
    for (std::int64_t column = 0; column < task.inputs; column += columns) {
      const std::int64_t last_column = std::min(task.inputs, column + columns);
      pack_right(task, column, last_column, rights);
      for (std::int64_t row = 0; row < task.outputs; row += rows) {
        const std::int64_t last_row = std::min(task.outputs, row + rows);
        pack_left(task, row, last_row, lefts);
        if (column == 0 && task.bias != nullptr) {
          for (std::int64_t i = row; i < last_row; i += ROWS) add_bias(task, lefts + (i - row) * task.records, i);
        }
        for (std::int64_t j = column; j < last_column; j += COLUMNS) {
          for (std::int64_t i = row; i < last_row; i += ROWS) {
            add_tile(task, lefts + (i - row) * task.records, rights + (j - column) * task.records, i, j);
          }
        }
      }
    }
  }
};

using Usual = Tiles<32, 6>;  // 12 of 16 registers hold sums

#if defined(__x86_64__)
using Long = Tiles<64, 12>;  // 24 of 32

__attribute__((target("avx512f,avx2,fma"))) void add_long(const OuterTask& task) { Long::all(task); }
#endif

}  // namespace

extern "C" {

// How many numbers of room a task needs.
std::int64_t confide_outer_room(const OuterTask* task) {
#if defined(__x86_64__)
  return std::max(Usual::room(*task), Long::room(*task));
#else
  return Usual::room(*task);
#endif
}

CONFIDE_VECTOR void confide_outer(const OuterTask* task) {
#if defined(__x86_64__)
  if (is_long()) return add_long(*task);
#endif
  Usual::all(*task);
}

}  // extern "C"
