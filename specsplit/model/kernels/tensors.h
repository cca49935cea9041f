// Tensors of the three formats that models compute in.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {
namespace specsplit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t MOST_ALONE = 1 << 15;  // numbers that one thread computes by itself

// Call `function(row)` for each of `count` rows of `size` numbers, by several threads if there is enough to do.
template <typename Function>
void for_rows(int64_t count, int64_t size, const Function& function) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, MOST_ALONE / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

// Call `function(row, count)` for the first of each MOST rows, and of what is left; their count is a constant.
template <int MOST, typename Function>
void in_turn(int64_t num_rows, const Function& function) {
  int64_t row = 0;
  for (; row + MOST <= num_rows; row += MOST) function(row, std::integral_constant<int, MOST>());
  if constexpr (MOST > 1)
    if (row < num_rows) in_turn<MOST - 1>(num_rows - row, [&](int64_t next, auto count) { function(row + next, count); });
}

inline int64_t filled(int64_t number, int64_t size) { return (number + size - 1) / size * size; }

// Call `function` with a null pointer to the kind of numbers that a tensor has.
template <typename Function>
void by_type(const Tensor& x, const Function& function) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: return function(static_cast<BFloat16*>(nullptr));
    case ScalarType::Half: return function(static_cast<Half*>(nullptr));
    case ScalarType::Float: return function(static_cast<float*>(nullptr));
    default: STD_TORCH_CHECK(false, "no format that models compute in");
  }
}

// Return an empty tensor of some sizes, like another one. Nothing but memory can be missing, and torch would not say so.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {
    throw std::bad_alloc();
  }
}

// Return an empty tensor for rows of `size` numbers in place of those of another tensor.
inline Tensor empty_rows(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes(x.dim());
  for (int64_t dim = 0; dim < x.dim(); ++dim) sizes[dim] = x.size(dim);
  sizes.back() = size;
  return empty(x, sizes);
}

}  // namespace specsplit
}  // namespace
