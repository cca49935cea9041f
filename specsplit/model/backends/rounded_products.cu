// Products of a few rows with weights rounded to 4 or 8 bits, on tensor cores; what a GPU reads is the rounded weights.
//
// A block computes 16 * BLOCKS outputs of 8 * TILES rows. Its warps take units of the inputs in turn, whose weights lie
// as the lanes of a warp need them: 16 bytes each, in the order of mma's fragments. No weight passes shared memory.
// An output's sum has one order whatever the number of rows is, so a row has the same bits among any others.
//
// A unit is 64 inputs in 4 bits or 32 in 8. Lane l has the outputs l / 4 and l / 4 + 8 of a block of 16, and of each 32
// inputs those from (l % 4) * 8 to (l % 4) * 8 + 7, in two steps of four. Legend: R rows, N outputs, K inputs.

typedef unsigned short bf16;
typedef unsigned int word;

const int WARPS = 8;
const int LANES = 32;

__device__ __forceinline__ float low_half(word pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(word pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ bf16 rounded(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

// Add to sums [16 outputs, 8 rows] the product of weights [16, 16 inputs] and rows [16 inputs, 8].
__device__ __forceinline__ void multiply(float (&sums)[4], const word (&weights)[4], word low_inputs, word high_inputs) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(low_inputs), "r"(high_inputs));
}

// Spread eight codes of 4 bits as bf16 numbers of 128 + code: the bits of 128 and, as its last ones, those of the code.
__device__ __forceinline__ void spread(word codes, word (&weights)[4]) {
#pragma unroll
  for (int place = 0; place < 4; ++place) weights[place] = ((codes >> (4 * place)) & 0x000F000Fu) | 0x43004300u;
}

// Turn two bytes of 128 + code into bf16, through the last bits of the float32 2^23.
__device__ __forceinline__ word pair_of(word bytes, word first, word second) {
  const float offset = 8388608.0f + 128.0f;
  float low = __uint_as_float(__byte_perm(bytes, 0x4B000000u, 0x7440u + first)) - offset;
  float high = __uint_as_float(__byte_perm(bytes, 0x4B000000u, 0x7440u + second)) - offset;
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// Return eight inputs of a row; zeros beyond the rows and the inputs, without a branch that loads would wait behind.
__device__ __forceinline__ uint4 inputs_at(const bf16* x, int row, int num_rows, int input, int num_inputs) {
  const bool is_there = row < num_rows && input < num_inputs;
  const long long place = (long long)min(row, num_rows - 1) * num_inputs + min(input, num_inputs - 8);
  const uint4 found = __ldg(reinterpret_cast<const uint4*>(x + place));
  return is_there ? found : make_uint4(0, 0, 0, 0);
}

// codes [N / 16, units, lanes] of 16 bytes; scales [groups, N / 16 * 16] of two bf16: a scale, and the value of code 8.
template <int TILES, int BLOCKS, int DEPTH, int GROUP>
__device__ __forceinline__ void sums_of_4_bits(
    float (&sums)[BLOCKS][TILES][4], const bf16* x, const uint4* codes, const word* scales, int num_rows, int num_blocks,
    int num_inputs) {
  const int lane = threadIdx.x % LANES, quad = lane / 4, part = lane % 4;
  const int num_units = (num_inputs + 63) / 64, first_row = blockIdx.y * 8 * TILES + quad;
  const word ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  for (int start = threadIdx.x / LANES; start < num_units; start += WARPS * DEPTH) {
    uint4 codes_of[DEPTH][BLOCKS];
    word scale_of[DEPTH][BLOCKS][64 / GROUP][2];
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
      const int unit = min(start + ahead * WARPS, num_units - 1);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int place = min((int)blockIdx.x * BLOCKS + block, num_blocks - 1);
        codes_of[ahead][block] = __ldg(codes + ((long long)place * num_units + unit) * LANES + lane);
#pragma unroll
        for (int group = 0; group < 64 / GROUP; ++group) {
          const word* of_group = scales + ((long long)(unit * (64 / GROUP) + group) * num_blocks + place) * 16 + quad;
          scale_of[ahead][block][group][0] = __ldg(of_group);
          scale_of[ahead][block][group][1] = __ldg(of_group + 8);
        }
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
      const int unit = start + ahead * WARPS;  // beyond the last one its inputs are zeros
      const uint4(&own)[BLOCKS] = codes_of[ahead];
      const word(&scale)[BLOCKS][64 / GROUP][2] = scale_of[ahead];
      float products[BLOCKS][TILES][4] = {}, totals[TILES][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 inputs[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          inputs[tile] = inputs_at(x, first_row + tile * 8, num_rows, unit * 64 + half * 32 + part * 8, num_inputs);
          multiply(totals[tile], ones, inputs[tile].x, inputs[tile].y);
          multiply(totals[tile], ones, inputs[tile].z, inputs[tile].w);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          word weights[4];
          spread(half ? own[block].z : own[block].x, weights);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) multiply(products[block][tile], weights, inputs[tile].x, inputs[tile].y);
          spread(half ? own[block].w : own[block].y, weights);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) multiply(products[block][tile], weights, inputs[tile].z, inputs[tile].w);
        }
        if (GROUP == 64 && half == 0) continue;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int item = 0; item < 4; ++item) {
              const word pair = scale[block][GROUP == 64 ? 0 : half][item / 2];
              const float step = low_half(pair), middle = fmaf(-136.0f, step, high_half(pair));
              float& sum = sums[block][tile][item];
              sum = fmaf(totals[tile][item], middle, fmaf(products[block][tile][item], step, sum));
              products[block][tile][item] = 0;
            }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
          for (int item = 0; item < 4; ++item) totals[tile][item] = 0;
      }
    }
  }
}

// codes [N / 16, units, lanes] of 16 bytes.
template <int TILES, int BLOCKS, int DEPTH>
__device__ __forceinline__ void sums_of_8_bits(
    float (&sums)[BLOCKS][TILES][4], const bf16* x, const uint4* codes, int num_rows, int num_blocks, int num_inputs) {
  const int lane = threadIdx.x % LANES, quad = lane / 4, part = lane % 4;
  const int num_units = (num_inputs + 31) / 32, first_row = blockIdx.y * 8 * TILES + quad;
  for (int start = threadIdx.x / LANES; start < num_units; start += WARPS * DEPTH) {
    uint4 codes_of[DEPTH][BLOCKS], inputs[DEPTH][TILES];
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
      const int unit = min(start + ahead * WARPS, num_units - 1);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int place = min((int)blockIdx.x * BLOCKS + block, num_blocks - 1);
        codes_of[ahead][block] = __ldg(codes + ((long long)place * num_units + unit) * LANES + lane);
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int input = (start + ahead * WARPS) * 32 + part * 8;  // beyond the last unit they are zeros
        inputs[ahead][tile] = inputs_at(x, first_row + tile * 8, num_rows, input, num_inputs);
      }
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead)
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const uint4 bytes = codes_of[ahead][block];
        const word first[4] = {
            pair_of(bytes.x, 0, 1), pair_of(bytes.y, 0, 1), pair_of(bytes.x, 2, 3), pair_of(bytes.y, 2, 3)};
        const word second[4] = {
            pair_of(bytes.z, 0, 1), pair_of(bytes.w, 0, 1), pair_of(bytes.z, 2, 3), pair_of(bytes.w, 2, 3)};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          multiply(sums[block][tile], first, inputs[ahead][tile].x, inputs[ahead][tile].y);
          multiply(sums[block][tile], second, inputs[ahead][tile].z, inputs[ahead][tile].w);
        }
      }
  }
}

// Add up what the warps have, in their order, and write results [R, N].
template <int TILES, int BLOCKS>
__device__ __forceinline__ void deliver(
    const float (&sums)[BLOCKS][TILES][4], const float* scales, bf16* y, int num_rows, int num_outputs) {
  const int outputs = 16 * BLOCKS, rows = 8 * TILES;
  __shared__ float parts[WARPS][rows][outputs];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int item = 0; item < 4; ++item)
        parts[warp][tile * 8 + lane % 4 * 2 + item % 2][block * 16 + item / 2 * 8 + lane / 4] = sums[block][tile][item];
  __syncthreads();
  for (int place = threadIdx.x; place < rows * outputs; place += WARPS * LANES) {
    const int own_row = place / outputs, own_output = place % outputs;
    const int row = blockIdx.y * rows + own_row, output = blockIdx.x * outputs + own_output;
    if (row >= num_rows || output >= num_outputs) continue;
    float total = 0;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) total += parts[part][own_row][own_output];
    y[(long long)row * num_outputs + output] = rounded(scales == nullptr ? total : total * scales[output]);
  }
}

#define PRODUCT_4(GROUP, TILES, BLOCKS, DEPTH)                                                                         \
  extern "C" __global__ void __launch_bounds__(WARPS* LANES) product_4_##GROUP##_##TILES(                             \
      const bf16* x, const uint4* codes, const word* scales, bf16* y, int num_rows, int num_outputs, int num_inputs) { \
    float sums[BLOCKS][TILES][4] = {};                                                                                 \
    sums_of_4_bits<TILES, BLOCKS, DEPTH, GROUP>(sums, x, codes, scales, num_rows, (num_outputs + 15) / 16, num_inputs); \
    deliver<TILES, BLOCKS>(sums, nullptr, y, num_rows, num_outputs);                                                   \
  }
#define PRODUCT_8(TILES, BLOCKS, DEPTH)                                                                                 \
  extern "C" __global__ void __launch_bounds__(WARPS* LANES) product_8_##TILES(                                        \
      const bf16* x, const uint4* codes, const float* scales, bf16* y, int num_rows, int num_outputs, int num_inputs) { \
    float sums[BLOCKS][TILES][4] = {};                                                                                  \
    sums_of_8_bits<TILES, BLOCKS, DEPTH>(sums, x, codes, num_rows, (num_outputs + 15) / 16, num_inputs);                \
    deliver<TILES, BLOCKS>(sums, scales, y, num_rows, num_outputs);                                                     \
  }

PRODUCT_4(64, 1, 1, 4)
PRODUCT_4(64, 2, 2, 2)
PRODUCT_4(64, 4, 2, 1)
PRODUCT_4(32, 1, 1, 4)
PRODUCT_4(32, 2, 2, 2)
PRODUCT_4(32, 4, 2, 1)
PRODUCT_8(1, 1, 6)
PRODUCT_8(2, 2, 4)
PRODUCT_8(4, 2, 2)

// Write the weights [N, K] in bf16, one unit of a block of outputs by each warp: for many rows, whose product is a
// library's. Scales as above; `group` is 0 for 8 bits.
extern "C" __global__ void __launch_bounds__(WARPS* LANES) dequantize(
    const uint4* codes, const word* scales, bf16* weights, int group, int num_outputs, int num_inputs) {
  const int lane = threadIdx.x % LANES, width = group ? 64 : 32, num_units = (num_inputs + width - 1) / width;
  const int unit = blockIdx.y * WARPS + threadIdx.x / LANES, num_blocks = (num_outputs + 15) / 16;
  if (unit >= num_units) return;
  const uint4 own = codes[((long long)blockIdx.x * num_units + unit) * LANES + lane];
  const word words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
  for (int place = 0; place < 4; ++place) {
    // Four inputs of both outputs in 4 bits, of one output in 8.
    const int step = group ? place % 2 : place / 2, half = group ? place / 2 : 0;
    const int input = unit * width + half * 32 + lane % 4 * 8 + step * 4;
    for (int second = group ? 0 : place % 2; second < (group ? 2 : place % 2 + 1); ++second) {
      const int output = blockIdx.x * 16 + lane / 4 + second * 8;
      if (output >= num_outputs) continue;
#pragma unroll
      for (int item = 0; item < 4; ++item) {
        if (input + item >= num_inputs) continue;
        float value;
        if (group) {
          // A word's codes are, from its last bits: inputs 0 of both outputs, inputs 2, inputs 1, inputs 3.
          const word code = words[place] >> (4 * (item / 2 * 2 + second + item % 2 * 4)) & 15u;
          const word pair = scales[((long long)((input + item) / group) * num_blocks + blockIdx.x) * 16 + output % 16];
          value = fmaf((float)code - 8.0f, low_half(pair), high_half(pair));
        } else {
          value = ((float)(words[place] >> (8 * item) & 255u) - 128.0f) * __uint_as_float(scales[output]);
        }
        weights[(long long)output * num_inputs + input + item] = rounded(value);
      }
    }
  }
}
