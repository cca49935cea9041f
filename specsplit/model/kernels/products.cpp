// Products with weights in bfloat16, for processors that multiply pairs of them: as fast as memory for a few rows.
//
// Weights lie in blocks of 64 outputs, as they are read: all pairs of inputs of a block one behind the other, and of each
// pair those of the 64 outputs. An output is one sum in float32, over the inputs in order, so a row has the same bits
// among any number of rows, and whatever the threads.

#include "tensors.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

using namespace specsplit;

constexpr int OUTPUTS = 64;  // of a block
constexpr int PARTS = OUTPUTS / LANES;
constexpr int ROWS = 6;         // that are multiplied together: their sums fill the registers
constexpr int64_t PAIRS = 1024;  // of inputs that are multiplied with all rows before the next ones: the caches hold them

inline __m512bh pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Add to sums [N, OUTPUTS] the products of N rows with `count` pairs of a block.
template <int N>
void multiply(const uint32_t* rows, int64_t stride, const uint32_t* weights, int64_t count, float* sums) {
  __m512 held[N][PARTS];
  for (int row = 0; row < N; ++row)
    for (int part = 0; part < PARTS; ++part) held[row][part] = _mm512_loadu_ps(sums + row * OUTPUTS + part * LANES);
  for (int64_t pair = 0; pair < count; ++pair, weights += OUTPUTS) {
    __m512bh of_pair[PARTS];
    for (int part = 0; part < PARTS; ++part) of_pair[part] = pairs(weights + part * LANES);
    for (int row = 0; row < N; ++row) {
      const __m512bh inputs = (__m512bh)_mm512_set1_epi32(int(rows[row * stride + pair]));
      for (int part = 0; part < PARTS; ++part) held[row][part] = _mm512_dpbf16_ps(held[row][part], of_pair[part], inputs);
    }
  }
  for (int row = 0; row < N; ++row)
    for (int part = 0; part < PARTS; ++part) _mm512_storeu_ps(sums + row * OUTPUTS + part * LANES, held[row][part]);
}

// Return weights [N, K], K even, in blocks [N / 64, K / 2, 64, 2], with zeros behind the last output.
Tensor pack_pairs(Tensor weight) {
  const int64_t num_outputs = weight.size(0), num_pairs = weight.size(1) / 2, stride = weight.stride(0) / 2;
  const int64_t num_blocks = filled(num_outputs, OUTPUTS) / OUTPUTS;
  Tensor packed = empty(weight, {num_blocks, num_pairs, OUTPUTS, 2});
  const uint32_t* from = static_cast<const uint32_t*>(weight.const_data_ptr());
  uint32_t* to = static_cast<uint32_t*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t pair = 0; pair < num_pairs; ++pair)
        for (int64_t i = 0; i < OUTPUTS; ++i) {
          const int64_t output = block * OUTPUTS + i;
          to[(block * num_pairs + pair) * OUTPUTS + i] = output < num_outputs ? from[output * stride + pair] : 0;
        }
  });
  return packed;
}

// Return the product [.., N] of rows [.., K] and packed weights, with a bias [N] or an empty one.
Tensor product(Tensor x, Tensor packed, Tensor bias, int64_t num_outputs) {
  const int64_t num_pairs = packed.size(1), num_blocks = packed.size(0);
  STD_TORCH_CHECK(num_pairs > 0 && x.scalar_type() == ScalarType::BFloat16 && x.size(x.dim() - 1) == 2 * num_pairs, "other inputs");
  const int64_t num_rows = x.numel() / (2 * num_pairs);
  STD_TORCH_CHECK(!bias.numel() || bias.numel() == num_outputs, "a bias of another size");
  STD_TORCH_CHECK(bias.is_contiguous() && packed.is_contiguous(), "weights that lie apart");
  STD_TORCH_CHECK(!bias.numel() || bias.scalar_type() == ScalarType::BFloat16, "a bias in another format");
  Tensor out = empty_rows(x, num_outputs);
  const uint32_t *inputs = static_cast<const uint32_t*>(x.const_data_ptr());
  const uint32_t *weights = static_cast<const uint32_t*>(packed.const_data_ptr());
  const BFloat16* biases = bias.numel() ? static_cast<const BFloat16*>(bias.const_data_ptr()) : nullptr;
  BFloat16* to = static_cast<BFloat16*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(num_rows * OUTPUTS);
    for (int64_t block = begin; block < end; ++block) {
      const uint32_t* own = weights + block * num_pairs * OUTPUTS;
      std::fill(sums.begin(), sums.end(), 0.0f);
      const int64_t at_once = num_rows > ROWS ? PAIRS : num_pairs;
      for (int64_t pair = 0; pair < num_pairs; pair += at_once)
        in_turn<ROWS>(num_rows, [&](int64_t row, auto number) {
          const int64_t count = std::min(at_once, num_pairs - pair);
          multiply<number>(inputs + row * num_pairs + pair, num_pairs, own + pair * OUTPUTS, count, &sums[row * OUTPUTS]);
        });
      const int64_t first = block * OUTPUTS, count = std::min<int64_t>(OUTPUTS, num_outputs - first);
      for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < count; ++i)
          put(to + row * num_outputs + first + i, sums[row * OUTPUTS + i] + (biases ? number(biases[first + i]) : 0.0f));
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specsplit, CPU, library) {
  library.impl("pack_pairs", TORCH_BOX(&pack_pairs));
  library.impl("product", TORCH_BOX(&product));
}
#endif
