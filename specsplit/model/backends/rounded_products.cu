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
__device__ __forceinline__ void multiply(
    float (&sums)[4], const word (&weights)[4], word low_inputs, word high_inputs) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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

// What a warp reads of some units before it computes with them: loads that wait for nothing hide how long each takes.
template <int BITS, int GROUP, int TILES, int BLOCKS, int DEPTH>
struct Ahead {
  static const int INPUTS = BITS == 4 ? 64 : 32, GROUPS = BITS == 4 ? 64 / GROUP : 1, PARTS = INPUTS / 32;

  uint4 codes[DEPTH][BLOCKS];
  word scales[DEPTH][BLOCKS][GROUPS][2];
  uint4 inputs[DEPTH][PARTS][TILES];

  // codes [N / 16, units, lanes] of 16 bytes; scales [N / 16, groups, 16] of two bf16: a scale, the value of code 8.
  __device__ __forceinline__ void load(
      const bf16* x, const uint4* all_codes, const word* all_scales, int start, int num_rows, int num_blocks,
      int num_inputs) {
    const int lane = threadIdx.x % LANES, quad = lane / 4, num_units = (num_inputs + INPUTS - 1) / INPUTS;
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
      const int unit = min(start + ahead * WARPS, num_units - 1);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int place = min((int)blockIdx.x * BLOCKS + block, num_blocks - 1);
        codes[ahead][block] = __ldg(all_codes + ((long long)place * num_units + unit) * LANES + lane);
        if (BITS == 8) continue;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          const word* own = all_scales + (((long long)place * num_units + unit) * GROUPS + group) * 16 + quad;
          scales[ahead][block][group][0] = __ldg(own);
          scales[ahead][block][group][1] = __ldg(own + 8);
        }
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          // Inputs beyond the last unit are zeros.
          const int input = (start + ahead * WARPS) * INPUTS + part * 32 + lane % 4 * 8;
          inputs[ahead][part][tile] = inputs_at(x, (blockIdx.y * TILES + tile) * 8 + quad, num_rows, input, num_inputs);
        }
  }

  __device__ __forceinline__ void add_to(float (&sums)[BLOCKS][TILES][4]) const {
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
      if (BITS == 4)
        add_4_bits(sums, ahead);
      else
        add_8_bits(sums, ahead);
    }
  }

 private:
  __device__ __forceinline__ void add_4_bits(float (&sums)[BLOCKS][TILES][4], int ahead) const {
    const word ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
    float products[BLOCKS][TILES][4] = {}, totals[TILES][4] = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 own = inputs[ahead][part][tile];
        multiply(totals[tile], ones, own.x, own.y);
        multiply(totals[tile], ones, own.z, own.w);
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const uint4 own = codes[ahead][block];
        word first[4], second[4];
        spread(part ? own.z : own.x, first);
        spread(part ? own.w : own.y, second);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          multiply(products[block][tile], first, inputs[ahead][part][tile].x, inputs[ahead][part][tile].y);
          multiply(products[block][tile], second, inputs[ahead][part][tile].z, inputs[ahead][part][tile].w);
        }
      }
      if (GROUP == 64 && part == 0) continue;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const word pair = scales[ahead][block][GROUP == 64 ? 0 : part][second];
          const float step = low_half(pair), middle = fmaf(-136.0f, step, high_half(pair));
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int item = second * 2; item < second * 2 + 2; ++item) {
              float& sum = sums[block][tile][item];
              sum = fmaf(totals[tile][item], middle, fmaf(products[block][tile][item], step, sum));
              products[block][tile][item] = 0;
            }
        }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int item = 0; item < 4; ++item) totals[tile][item] = 0;
    }
  }

  __device__ __forceinline__ void add_8_bits(float (&sums)[BLOCKS][TILES][4], int ahead) const {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const uint4 own = codes[ahead][block];
      const word first[4] = {pair_of(own.x, 0, 1), pair_of(own.y, 0, 1), pair_of(own.x, 2, 3), pair_of(own.y, 2, 3)};
      const word second[4] = {pair_of(own.z, 0, 1), pair_of(own.w, 0, 1), pair_of(own.z, 2, 3), pair_of(own.w, 2, 3)};
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        multiply(sums[block][tile], first, inputs[ahead][0][tile].x, inputs[ahead][0][tile].y);
        multiply(sums[block][tile], second, inputs[ahead][0][tile].z, inputs[ahead][0][tile].w);
      }
    }
  }
};

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

// Compute results [R, N] for x [R, K], whose rows begin at multiples of 16 bytes; scales are [N] float32 in 8 bits.
template <int BITS, int GROUP, int TILES, int BLOCKS, int DEPTH, bool IS_AHEAD>
__device__ __forceinline__ void product(
    const bf16* x, const uint4* codes, const word* scales, bf16* y, int num_rows, int num_outputs, int num_inputs) {
  typedef Ahead<BITS, GROUP, TILES, BLOCKS, DEPTH> Units;
  const int num_units = (num_inputs + Units::INPUTS - 1) / Units::INPUTS, num_blocks = (num_outputs + 15) / 16;
  float sums[BLOCKS][TILES][4] = {};
  int start = threadIdx.x / LANES;
  if (IS_AHEAD) {
    Units now, next;
    if (start < num_units) now.load(x, codes, scales, start, num_rows, num_blocks, num_inputs);
    while (start < num_units) {
      start += WARPS * DEPTH;
      if (start < num_units) next.load(x, codes, scales, start, num_rows, num_blocks, num_inputs);
      now.add_to(sums);
      now = next;
    }
  } else {
    for (; start < num_units; start += WARPS * DEPTH) {
      Units now;
      now.load(x, codes, scales, start, num_rows, num_blocks, num_inputs);
      now.add_to(sums);
    }
  }
  deliver<TILES, BLOCKS>(sums, BITS == 8 ? reinterpret_cast<const float*>(scales) : nullptr, y, num_rows, num_outputs);
}

#define PRODUCT(NAME, BITS, GROUP, TILES, BLOCKS, DEPTH, IS_AHEAD)                                                     \
  extern "C" __global__ void __launch_bounds__(WARPS* LANES) NAME(                                                    \
      const bf16* x, const uint4* codes, const word* scales, bf16* y, int num_rows, int num_outputs, int num_inputs) { \
    product<BITS, GROUP, TILES, BLOCKS, DEPTH, IS_AHEAD>(x, codes, scales, y, num_rows, num_outputs, num_inputs);      \
  }

// What is fastest was measured on an H100 (docs/log.md). The order of a sum is the same in all: of units and warps.
PRODUCT(product_4_64_1, 4, 64, 1, 2, 2, true)
PRODUCT(product_4_64_2, 4, 64, 2, 2, 2, false)
PRODUCT(product_4_64_4, 4, 64, 4, 2, 1, false)
PRODUCT(product_4_32_1, 4, 32, 1, 2, 2, true)
PRODUCT(product_4_32_2, 4, 32, 2, 2, 2, false)
PRODUCT(product_4_32_4, 4, 32, 4, 2, 1, false)
PRODUCT(product_8_1, 8, 32, 1, 1, 4, true)
PRODUCT(product_8_2, 8, 32, 2, 1, 4, true)
PRODUCT(product_8_4, 8, 32, 4, 2, 2, true)

// Write the weights [N, K] in bf16, one unit of a block of outputs by each warp: for many rows, whose product is a
// library's. K is a multiple of 8; `group` is 0 for 8 bits.
extern "C" __global__ void __launch_bounds__(WARPS* LANES) dequantize(
    const uint4* codes, const word* scales, bf16* weights, int group, int num_outputs, int num_inputs) {
  const int lane = threadIdx.x % LANES, width = group ? 64 : 32, num_units = (num_inputs + width - 1) / width;
  const int unit = blockIdx.y * WARPS + threadIdx.x / LANES;
  if (unit >= num_units) return;
  const long long place = (long long)blockIdx.x * num_units + unit;
  const uint4 own = __ldg(codes + place * LANES + lane);
  const word words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int output = blockIdx.x * 16 + lane / 4 + second * 8, input = unit * width + part * 32 + lane % 4 * 8;
      if (output >= num_outputs || input >= num_inputs || (!group && part)) continue;
      bf16 values[8];
      if (group) {
        const word pair = __ldg(scales + (place * (64 / group) + part * 32 / group) * 16 + output % 16);
#pragma unroll
        for (int item = 0; item < 8; ++item) {
          // A word's codes are, from its last bits: inputs 0 of both outputs, inputs 2, inputs 1, inputs 3.
          const word code = words[part * 2 + item / 4] >> (4 * (item / 2 % 2 * 2 + second + item % 2 * 4)) & 15u;
          values[item] = rounded(fmaf((float)code - 8.0f, low_half(pair), high_half(pair)));
        }
      } else {
        const float step = __uint_as_float(__ldg(scales + output));
#pragma unroll
        for (int item = 0; item < 8; ++item)
          values[item] = rounded(((float)(words[item / 4 * 2 + second] >> (8 * (item % 4)) & 255u) - 128.0f) * step);
      }
      uint4 packed;
      packed.x = values[0] | (word)values[1] << 16, packed.y = values[2] | (word)values[3] << 16;
      packed.z = values[4] | (word)values[5] << 16, packed.w = values[6] | (word)values[7] << 16;
      *reinterpret_cast<uint4*>(weights + (long long)output * num_inputs + input) = packed;
    }
}
