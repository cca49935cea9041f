// Products with weights rounded to 8 or 4 bits, for processors that multiply bytes by fours (AVX512-VNNI).
//
// Weights lie in blocks of 32 outputs, as they are read: four inputs of each of the outputs side by side. A row's inputs
// become whole numbers as well. In 8 bits a row has one step for all of them, and 16 bits for each, whose two bytes are
// multiplied apart; sums are exact. In 4 bits each group of inputs has a step of its own, and 8 bits for each; the exact
// sums of the groups are added up in float32, in order. So a row has the same bits among any number of rows.

// A bias is added after a product is rounded, however many rows there are.
#pragma GCC optimize("fp-contract=off")

#include "tensors.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>

#include <algorithm>
#include <limits>

namespace {

using namespace specsplit;

constexpr int OUTPUTS = 32;  // of a block
constexpr int PARTS = OUTPUTS / LANES;
constexpr int FOUR = 4;                         // inputs that are multiplied together
constexpr int64_t MOST_INPUTS = 1 << 16;        // whose sums 32 bits hold
constexpr int CENTRE = 128;                     // what the bytes of 8-bit weights stand above
constexpr int NIBBLE_CENTRE = 8;                // the same in 4 bits
constexpr float MOST_16 = 32639, MOST_8 = 127;  // largest whole numbers of a row; the upper byte of the first is 127
constexpr float LEAST = 1e-30f;                 // largest input of a row that counts as zeros

// Return 16 numbers, with zeros behind the last of `count`.
template <typename Item>
inline __m512 some(const Item* from, int64_t count) {
  if (count >= LANES) return (__m512)floats(from);
  Item rest[LANES] = {};
  std::copy(from, from + count, rest);
  return (__m512)floats(rest);
}

// Return the length of a step of some inputs, of which the largest is `most` steps; no number if one of them is none.
template <typename Item>
float step_of(const Item* from, int64_t count, float most) {
  __m512i largest = (__m512i)_mm512_set1_ps(LEAST);  // bits of numbers that are not negative are in their order
  for (int64_t i = 0; i < count; i += LANES)
    largest = _mm512_max_epi32(largest, (__m512i)_mm512_abs_ps(some(from + i, count - i)));
  const int32_t bits = _mm512_reduce_max_epi32(largest);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value <= std::numeric_limits<float>::max() ? value / most : std::numeric_limits<float>::quiet_NaN();
}

// Call `take(place, whole)` with the inputs in steps, 16 at once.
template <typename Item, typename Take>
void in_steps(const Item* from, int64_t count, float step, const Take& take) {
  const __m512 in_one = _mm512_set1_ps(1.0f / step);
  for (int64_t i = 0; i < count; i += LANES)
    take(i, _mm512_cvtps_epi32(_mm512_mul_ps(some(from + i, count - i), in_one)));
}

// Rows in 16 bits.
struct WideRows {
  const int64_t size;  // inputs of a row, filled up
  std::vector<int8_t> upper, lower;
  std::vector<int64_t> totals;
  std::vector<float> steps;

  WideRows(int64_t count, int64_t num_inputs)
      : size(filled(num_inputs, LANES)), upper(count * size), lower(count * size), totals(count), steps(count) {}

  template <typename Item>
  void take(const Item* from, int64_t num_inputs, int64_t row) {
    steps[row] = step_of(from, num_inputs, MOST_16);
    __m512i total = _mm512_setzero_si512();
    in_steps(from, num_inputs, steps[row], [&](int64_t place, __m512i whole) {
      const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&upper[row * size + place]), _mm512_cvtepi32_epi8(above));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&lower[row * size + place]), _mm512_cvtepi32_epi8(whole));
      total = _mm512_add_epi32(total, whole);
    });
    int32_t of_lanes[LANES];
    _mm512_storeu_si512(of_lanes, total);
    for (int32_t of_lane : of_lanes) totals[row] += of_lane;
  }
};

// Return four inputs as one number.
inline int32_t word(const int8_t* inputs, int64_t place) {
  int32_t four;
  std::memcpy(&four, inputs + place * FOUR, sizeof four);
  return four;
}

// Return the exact sums [2, N, OUTPUTS] of N rows, upper and lower bytes, with `num_fours` times four inputs of a block.
template <int N>
void multiply_bytes(const WideRows& rows, int64_t first, const uint8_t* weights, int64_t num_fours, int32_t* sums) {
  __m512i held[2][N][PARTS] = {};
  const int8_t *upper = &rows.upper[first * rows.size], *lower = &rows.lower[first * rows.size];
  for (int64_t four = 0; four < num_fours; ++four, weights += OUTPUTS * FOUR) {
    __m512i own[PARTS];
    for (int part = 0; part < PARTS; ++part) own[part] = _mm512_loadu_si512(weights + part * LANES * FOUR);
    for (int row = 0; row < N; ++row) {
      const __m512i above = _mm512_set1_epi32(word(upper + row * rows.size, four));
      const __m512i below = _mm512_set1_epi32(word(lower + row * rows.size, four));
      for (int part = 0; part < PARTS; ++part) {
        held[0][row][part] = _mm512_dpbusd_epi32(held[0][row][part], own[part], above);
        held[1][row][part] = _mm512_dpbusd_epi32(held[1][row][part], own[part], below);
      }
    }
  }
  for (int half = 0; half < 2; ++half)
    for (int row = 0; row < N; ++row)
      for (int part = 0; part < PARTS; ++part)
        _mm512_storeu_si512(sums + ((half * N + row) * PARTS + part) * LANES, held[half][row][part]);
}

// Rows in 8 bits, by groups.
struct NarrowRows {
  const int64_t num_groups, group, size;
  std::vector<int8_t> inputs;
  std::vector<float> steps;  // [rows, groups]
  std::vector<int32_t> totals;

  NarrowRows(int64_t count, int64_t num_inputs, int64_t num_groups)
      : num_groups(num_groups), group(num_inputs / num_groups), size(num_inputs), inputs(count * size),
        steps(count * num_groups), totals(count * num_groups) {}

  template <typename Item>
  void take(const Item* from, int64_t row) {
    for (int64_t i = 0; i < num_groups; ++i) {
      const int64_t own = row * num_groups + i;
      const Item* of_group = from + i * group;
      steps[own] = step_of(of_group, group, MOST_8);
      __m512i total = _mm512_setzero_si512();
      in_steps(of_group, group, steps[own], [&](int64_t place, __m512i whole) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&inputs[row * size + i * group + place]), _mm512_cvtepi32_epi8(whole));
        total = _mm512_add_epi32(total, whole);
      });
      totals[own] = _mm512_reduce_add_epi32(total);
    }
  }
};

// Return the exact sums [N, OUTPUTS] of N rows with a group of a block. A byte has the codes of two inputs, four apart.
template <int N>
void multiply_group(const int8_t* inputs, int64_t stride, const uint8_t* codes, int64_t num_fours, int32_t* sums) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i held[N][PARTS] = {};
  for (int64_t four = 0; four < num_fours; four += 2, codes += OUTPUTS * FOUR) {
    __m512i even[PARTS], odd[PARTS];
    for (int part = 0; part < PARTS; ++part) {
      const __m512i both = _mm512_loadu_si512(codes + part * LANES * FOUR);
      even[part] = _mm512_and_si512(both, nibble);
      odd[part] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    for (int row = 0; row < N; ++row) {
      const __m512i before = _mm512_set1_epi32(word(inputs + row * stride, four));
      const __m512i behind = _mm512_set1_epi32(word(inputs + row * stride, four + 1));
      for (int part = 0; part < PARTS; ++part) {
        held[row][part] = _mm512_dpbusd_epi32(held[row][part], even[part], before);
        held[row][part] = _mm512_dpbusd_epi32(held[row][part], odd[part], behind);
      }
    }
  }
  for (int row = 0; row < N; ++row)
    for (int part = 0; part < PARTS; ++part) _mm512_storeu_si512(sums + (row * PARTS + part) * LANES, held[row][part]);
}

// Return the sums [N, OUTPUTS] of N rows with a block.
template <int N>
void multiply_nibbles(const NarrowRows& rows, int64_t first, const uint8_t* codes, const uint32_t* scales, float* sums) {
  const __m512i upper_half = _mm512_set1_epi32(int(0xFFFF0000));
  std::fill(sums, sums + N * OUTPUTS, 0.0f);
  for (int64_t i = 0; i < rows.num_groups; ++i, scales += OUTPUTS, codes += rows.group / 2 * OUTPUTS) {
    int32_t of_group[N * OUTPUTS];
    multiply_group<N>(&rows.inputs[first * rows.size + i * rows.group], rows.size, codes, rows.group / FOUR, of_group);
    for (int part = 0; part < PARTS; ++part) {
      const __m512i pairs = _mm512_loadu_si512(scales + part * LANES);
      const __m512 scale = (__m512)_mm512_slli_epi32(pairs, 16), middle = (__m512)_mm512_and_si512(pairs, upper_half);
      for (int row = 0; row < N; ++row) {
        const int64_t own = (first + row) * rows.num_groups + i, place = row * OUTPUTS + part * LANES;
        const __m512i centre = _mm512_set1_epi32(NIBBLE_CENTRE * rows.totals[own]);
        const __m512 step = _mm512_set1_ps(rows.steps[own]), total = _mm512_set1_ps(float(rows.totals[own]));
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(of_group + place), centre));
        __m512 sum = _mm512_loadu_ps(sums + place);
        sum = _mm512_fmadd_ps(_mm512_mul_ps(scale, step), whole, sum);
        _mm512_storeu_ps(sums + place, _mm512_fmadd_ps(_mm512_mul_ps(middle, step), total, sum));
      }
    }
  }
}

// Return codes [N, K] from -127 to 127 in blocks [N / 32, K / 4, 32, 4], with zeros behind the last output and input.
Tensor pack_bytes(Tensor codes) {
  const int64_t num_outputs = codes.size(0), num_inputs = codes.size(1), num_fours = filled(num_inputs, FOUR) / FOUR;
  const int64_t num_blocks = filled(num_outputs, OUTPUTS) / OUTPUTS;
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Char && codes.is_contiguous() && num_inputs > 0, "other codes");
  Tensor packed = empty(codes, {num_blocks, num_fours, OUTPUTS, FOUR});
  const int8_t* from = static_cast<const int8_t*>(codes.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for_rows(num_blocks, num_inputs * OUTPUTS, [&](int64_t block) {
    for (int64_t place = 0; place < num_fours * FOUR; ++place)
      for (int64_t i = 0; i < OUTPUTS; ++i) {
        const int64_t output = block * OUTPUTS + i;
        const int code = output < num_outputs && place < num_inputs ? from[output * num_inputs + place] : 0;
        to[((block * num_fours + place / FOUR) * OUTPUTS + i) * FOUR + place % FOUR] = uint8_t(code + CENTRE);
      }
  });
  return packed;
}

// Return codes [N, K] from 0 to 15, K a multiple of 8, in blocks [N / 32, K / 8, 32, 4]: inputs i and i + 4 share a byte.
Tensor pack_nibbles(Tensor codes) {
  const int64_t num_outputs = codes.size(0), num_inputs = codes.size(1);
  const int64_t num_blocks = filled(num_outputs, OUTPUTS) / OUTPUTS, num_eights = num_inputs / (2 * FOUR);
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.is_contiguous(), "other codes");
  STD_TORCH_CHECK(num_inputs > 0 && num_inputs % (2 * FOUR) == 0, "inputs that are no eights");
  Tensor packed = empty(codes, {num_blocks, num_eights, OUTPUTS, FOUR});
  const uint8_t* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for_rows(num_blocks, num_inputs * OUTPUTS, [&](int64_t block) {
    for (int64_t eight = 0; eight < num_eights; ++eight)
      for (int64_t i = 0; i < OUTPUTS; ++i)
        for (int64_t j = 0; j < FOUR; ++j) {
          const int64_t output = block * OUTPUTS + i, place = output * num_inputs + eight * 2 * FOUR + j;
          const int both = output < num_outputs ? from[place] | from[place + FOUR] << 4 : 0;
          to[((block * num_eights + eight) * OUTPUTS + i) * FOUR + j] = uint8_t(both);
        }
  });
  return packed;
}

// Check what both products take.
void check(const Tensor& x, const Tensor& packed, const Tensor& bias, int64_t num_outputs, int64_t num_inputs) {
  const int64_t num_blocks = filled(num_outputs, OUTPUTS) / OUTPUTS;
  STD_TORCH_CHECK(x.is_contiguous() && num_inputs > 0 && num_inputs <= MOST_INPUTS, "other inputs");
  STD_TORCH_CHECK(packed.is_contiguous() && packed.numel() == num_blocks * packed.size(1) * OUTPUTS * FOUR, "other weights");
  STD_TORCH_CHECK(!bias.numel() || bias.numel() == num_outputs, "another bias");
  STD_TORCH_CHECK(bias.is_contiguous() && bias.scalar_type() == ScalarType::Float, "a bias in another format");
}

// Return the product [.., N] of rows [.., K] with bytes, scales [N], and a bias [N] or an empty one.
Tensor product_bytes(Tensor x, Tensor packed, Tensor scales, Tensor bias) {
  const int64_t num_inputs = x.size(x.dim() - 1), num_outputs = scales.numel(), num_fours = packed.size(1);
  check(x, packed, bias, num_outputs, num_inputs);
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous(), "other scales");
  const int64_t num_rows = x.numel() / num_inputs;
  STD_TORCH_CHECK(num_inputs <= num_fours * FOUR && num_inputs > (num_fours - 1) * FOUR, "other inputs");
  Tensor out = empty_rows(x, num_outputs);
  const uint8_t* weights = static_cast<const uint8_t*>(packed.const_data_ptr());
  const float* of_outputs = static_cast<const float*>(scales.const_data_ptr());
  const float* biases = bias.numel() ? static_cast<const float*>(bias.const_data_ptr()) : nullptr;
  by_type(x, [&](auto* none) {
    using Item = std::remove_pointer_t<decltype(none)>;
    const Item* from = static_cast<const Item*>(x.const_data_ptr());
    Item* to = static_cast<Item*>(out.mutable_data_ptr());
    WideRows rows(num_rows, num_inputs);
    for_rows(num_rows, num_inputs, [&](int64_t row) { rows.take(from + row * num_inputs, num_inputs, row); });
    torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t start = block * OUTPUTS, count = std::min<int64_t>(OUTPUTS, num_outputs - start);
        in_turn<6>(num_rows, [&](int64_t first, auto number) {
          int32_t sums[2][number][OUTPUTS];
          multiply_bytes<number>(rows, first, weights + start * num_fours * FOUR, num_fours, &sums[0][0][0]);
          for (int64_t row = 0; row < number; ++row)
            for (int64_t i = 0; i < count; ++i) {
              const int64_t whole = sums[0][row][i] * int64_t(256) + sums[1][row][i] - CENTRE * rows.totals[first + row];
              const float sum = float(whole) * (rows.steps[first + row] * of_outputs[start + i]);
              put(to + (first + row) * num_outputs + start + i, biases ? sum + biases[start + i] : sum);
            }
        });
      }
    });
  });
  return out;
}

// Return the product [.., N] of rows [.., K] with codes of 4 bits, a bias [N] or an empty one, and for each group of inputs
// the scale and the middle of its codes, scales [N / 32, groups, 32, 2].
Tensor product_nibbles(Tensor x, Tensor packed, Tensor scales, Tensor bias, int64_t num_outputs) {
  const int64_t num_inputs = x.size(x.dim() - 1), num_groups = scales.size(1);
  check(x, packed, bias, num_outputs, num_inputs);
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::BFloat16 && scales.is_contiguous(), "other scales");
  STD_TORCH_CHECK(num_groups > 0 && scales.numel() == packed.size(0) * num_groups * OUTPUTS * 2, "other groups");
  STD_TORCH_CHECK(num_inputs == packed.size(1) * 2 * FOUR && num_inputs % (num_groups * LANES) == 0, "other inputs");
  const int64_t num_rows = x.numel() / num_inputs;
  Tensor out = empty_rows(x, num_outputs);
  const uint8_t* codes = static_cast<const uint8_t*>(packed.const_data_ptr());
  const uint32_t* of_groups = static_cast<const uint32_t*>(scales.const_data_ptr());
  const float* biases = bias.numel() ? static_cast<const float*>(bias.const_data_ptr()) : nullptr;
  by_type(x, [&](auto* none) {
    using Item = std::remove_pointer_t<decltype(none)>;
    const Item* from = static_cast<const Item*>(x.const_data_ptr());
    Item* to = static_cast<Item*>(out.mutable_data_ptr());
    NarrowRows rows(num_rows, num_inputs, num_groups);
    for_rows(num_rows, num_inputs, [&](int64_t row) { rows.take(from + row * num_inputs, row); });
    torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t start = block * OUTPUTS, count = std::min<int64_t>(OUTPUTS, num_outputs - start);
        in_turn<8>(num_rows, [&](int64_t first, auto number) {
          float sums[number][OUTPUTS];
          multiply_nibbles<number>(rows, first, codes + start * num_inputs / 2, of_groups + start * num_groups, &sums[0][0]);
          for (int64_t row = 0; row < number; ++row)
            for (int64_t i = 0; i < count; ++i)
              put(to + (first + row) * num_outputs + start + i, biases ? sums[row][i] + biases[start + i] : sums[row][i]);
        });
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specsplit, CPU, library) {
  library.impl("pack_bytes", TORCH_BOX(&pack_bytes));
  library.impl("pack_nibbles", TORCH_BOX(&pack_nibbles));
  library.impl("product_bytes", TORCH_BOX(&product_bytes));
  library.impl("product_nibbles", TORCH_BOX(&product_nibbles));
}
#endif
