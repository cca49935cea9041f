// Operators that take a model's rows one by one, each in place of a dozen of torch's: what those round, these round.
//
// A row's bits follow from the row alone. Nothing here may be contracted to fused operations, which torch's have not.

#pragma GCC optimize("fp-contract=off")

#include "tensors.h"

namespace {

using namespace specsplit;

// The rows of a tensor, which are whole in memory; the other dimensions may lie in any way.
template <typename Item>
class RowsOf {
 public:
  explicit RowsOf(const Tensor& x) : first_(static_cast<const Item*>(x.const_data_ptr())), size(x.size(x.dim() - 1)) {
    STD_TORCH_CHECK(size > 0 && x.stride(x.dim() - 1) == 1, "rows that are not whole");
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
      if (x.size(dim) == 1) continue;
      sizes_.push_back(x.size(dim)), strides_.push_back(x.stride(dim)), count *= x.size(dim);
    }
  }

  const Item* operator[](int64_t row) const {
    int64_t place = 0;
    for (size_t dim = sizes_.size(); dim-- > 0; row /= sizes_[dim]) place += row % sizes_[dim] * strides_[dim];
    return first_ + place;
  }

 private:
  const Item* first_;
  std::vector<int64_t> sizes_, strides_;

 public:
  const int64_t size;
  int64_t count = 1;
};

inline float rounded(float value, const float*) { return value; }
template <typename Item>
inline float rounded(float value, const Item*) {
  Item item;
  put(&item, value);
  return number(item);
}

template <typename Item>
float mean_of_squares(const Item* row, int64_t size) {
  Floats sums[2] = {};
  int64_t d = 0;
  for (; d + 2 * LANES <= size; d += 2 * LANES)
    for (int part = 0; part < 2; ++part) {
      const Floats numbers = floats(row + d + part * LANES);
      sums[part] += numbers * numbers;
    }
  float rest = 0.0f;
  for (; d < size; ++d) rest += number(row[d]) * number(row[d]);
  return (sum(sums[0] + sums[1]) + rest) / float(size);
}

// Divide each row of x [.., D] by the root of its mean square and multiply with the weight [D]: "rounded" as Llama does
// it, which rounds before, "whole", or with one more than the weight ("offset"), as Gemma does.
enum Form : int64_t { ROUNDED, WHOLE, OFFSET };

Tensor rms_norm(Tensor x, Tensor weight, double epsilon, int64_t form) {
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.numel() == x.size(x.dim() - 1) && weight.stride(0) == 1,
                  "another weight");
  Tensor out = empty_rows(x, x.size(x.dim() - 1));
  by_type(x, [&](auto* none) {
    typedef std::remove_pointer_t<decltype(none)> Item;
    const RowsOf<Item> rows(x);
    const Item* factors = static_cast<const Item*>(weight.const_data_ptr());
    Item* to = static_cast<Item*>(out.mutable_data_ptr());
    for_rows(rows.count, rows.size, [&](int64_t row) {
      const Item* from = rows[row];
      const float scale = 1.0f / std::sqrt(mean_of_squares(from, rows.size) + float(epsilon));
      for (int64_t d = 0; d < rows.size; ++d) {
        const float value = number(from[d]) * scale, factor = number(factors[d]);
        const float normed = form == ROUNDED ? rounded(value, none) : value;
        put(to + row * rows.size + d, normed * (form == OFFSET ? 1.0f + factor : factor));
      }
    });
  });
  return out;
}

// Return x / (1 + e^-x) for x [.., D].
Tensor silu(Tensor x) {
  Tensor out = empty_rows(x, x.size(x.dim() - 1));
  by_type(x, [&](auto* none) {
    typedef std::remove_pointer_t<decltype(none)> Item;
    const RowsOf<Item> rows(x);
    Item* to = static_cast<Item*>(out.mutable_data_ptr());
    for_rows(rows.count, rows.size, [&](int64_t row) {
      const Item* from = rows[row];
      for (int64_t d = 0; d < rows.size; d += LANES) {
        const int count = std::min<int64_t>(LANES, rows.size - d);
        float numbers[LANES] = {};
        for (int i = 0; i < count; ++i) numbers[i] = number(from[d + i]);
        const Floats value = load<Floats>(numbers);
        const Floats small = exponential((Floats)((Ints)value | (int32_t)0x80000000));  // e^-|x|
        store(numbers, value * (value > 0.0f ? Floats{} + 1.0f : small) / (1.0f + small));
        for (int i = 0; i < count; ++i) put(to + row * rows.size + d + i, numbers[i]);
      }
    });
  });
  return out;
}

// Return x cos + r sin for x [1, H, T, D] and cos, sin [1, 1, T, D], where r is x with its halves exchanged and the first
// one negated: rotary positions.
Tensor rotate(Tensor x, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(x.dim() == 4 && cos.dim() == 4 && cos.size(1) == 1 && cos.size(2) == x.size(2), "other shapes");
  STD_TORCH_CHECK(cos.size(3) == x.size(3) && x.size(3) % 2 == 0, "other sizes");
  STD_TORCH_CHECK(x.size(0) == 1 && cos.size(0) == 1 && sin.size(0) == 1, "several texts");
  STD_TORCH_CHECK(sin.dim() == 4 && sin.size(1) == 1 && sin.size(2) == x.size(2) && sin.size(3) == x.size(3), "other sizes");
  STD_TORCH_CHECK(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(), "other formats");
  Tensor out = empty_rows(x, x.size(x.dim() - 1));
  const int64_t num_tokens = x.size(2), half = x.size(3) / 2;
  by_type(x, [&](auto* none) {
    typedef std::remove_pointer_t<decltype(none)> Item;
    const RowsOf<Item> rows(x), cosines(cos), sines(sin);
    Item* to = static_cast<Item*>(out.mutable_data_ptr());
    for_rows(rows.count, rows.size, [&](int64_t row) {
      const Item *from = rows[row], *cosine = cosines[row % num_tokens], *sine = sines[row % num_tokens];
      for (int64_t d = 0; d < 2 * half; ++d) {
        const float other = d < half ? -number(from[d + half]) : number(from[d - half]);
        const float part = rounded(number(from[d]) * number(cosine[d]), none);
        put(to + row * rows.size + d, part + rounded(other * number(sine[d]), none));
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specsplit, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("silu", TORCH_BOX(&silu));
  library.impl("rotate", TORCH_BOX(&rotate));
}
