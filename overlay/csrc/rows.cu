// Rows in, and sums out.
#include <cuda_bf16.h>

#include <type_traits>

#include "kernels.h"
#include "trellis.h"

namespace exl3 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Eight neighbouring columns as fp16.
template <class T>
__device__ __forceinline__ void to_half(half2 (&values)[4], const uint4& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t word = (&words.x)[i];
    if constexpr (std::is_same_v<T, half>) {
      values[i] = halves_of(word);
    } else {
      values[i] = __floats2half2_rn(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    }
  }
}

__device__ __forceinline__ uint32_t pack(float a, float b) { return bits_of(__floats2half2_rn(a, b)); }

// The sign of entry (k, n) of the 16 x 16 Hadamard matrix is the parity of k & n, whichever column bits its four
// bits stand for. Here the low bit of k and n and the two bits that choose a lane in the operands of the tensor
// cores stand for column bits 0, 3 and 4, and the last one for column bit 1.
__device__ __forceinline__ uint32_t hadamard_pair(int lane) {
  int n = lane / 4, flip = __popc(lane % 4 & n >> 1) & 1;
  return 0x3c003c00u | flip << 15 | (flip ^ (n & 1)) << 31;
}

// One warp takes 16 stored rows of one tile at a time, 128 columns each: products with the 16 x 16 matrix for four
// of a column's bits on the tensor cores, exact since its entries are +-1, and butterflies for bits 2, 5 and 6. So a
// lane loads and stores eight neighbouring columns at a time, and nothing moves between lanes.
template <class T>
__global__ void __launch_bounds__(kThreads) gather_kernel(Problem p, Layout l, Tables t, char* gathered, int chunk) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int first_tile = t.header->chunk_tiles[chunk], end_tile = t.header->chunk_tiles[chunk + 1];
  if (first_tile == end_tile) return;
  const int first_stored = t.tiles[first_tile].storage, columns = p.hidden / kBlock;
  const Tile& last = t.tiles[end_tile - 1];
  const int blocks = (last.storage - first_stored + padded_rows(last.rows)) / kRowBlock;
  const uint32_t plus = hadamard_pair(lane), minus = plus ^ 0x80008000u;

  for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < blocks * columns; unit += gridDim.x * kWarps) {
    const int block = first_stored / kRowBlock + unit / columns, column = unit % columns * kBlock;
    const Tile tile = t.tiles[t.block_tile[block]];
    const int stored = padded_rows(tile.rows), local = block * kRowBlock - tile.storage + lane / 4;
    int64_t token[2];
    bool live[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      live[i] = local + 8 * i < tile.rows;
      token[i] = live[i] ? t.row_slot[tile.row + local + 8 * i] / p.top_k : 0;
    }
    for (int side = 0; side < (p.shared_suh ? 1 : 2); ++side) {
      const Projection& projection = side ? p.up : p.gate;
      const half* suh = static_cast<const half*>(projection.suh) + tile.expert * projection.suh_stride;
      float sums[16][4] = {};  // index: column bits 1, 2, 5, 6
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = column + j * 32 + quad * 8;
        half2 scale[4], values[2][4];
        *reinterpret_cast<uint4*>(scale) = *reinterpret_cast<const uint4*>(suh + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint4 words = live[i] ? *reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + token[i] * p.hidden + at)
                                : make_uint4(0, 0, 0, 0);
          to_half<T>(values[i], words);
#pragma unroll
          for (int w = 0; w < 4; ++w) values[i][w] = __hmul2_rn(values[i][w], scale[w]);
        }
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          uint32_t a[4] = {bits_of(values[0][2 * high]), bits_of(values[1][2 * high]), bits_of(values[0][2 * high + 1]),
                           bits_of(values[1][2 * high + 1])};
          ptx::multiply_add(sums[j * 4 + high * 2], a, plus, plus);
          ptx::multiply_add(sums[j * 4 + high * 2 + 1], a, plus, minus);
        }
      }
      char* target = gathered + side * (int64_t{l.chunk_rows} + kTileRows) * p.hidden * 2 +
                     int64_t{tile.storage - first_stored} * p.hidden * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float even[16], odd[16];
#pragma unroll
        for (int n = 0; n < 16; ++n) even[n] = sums[n][2 * i], odd[n] = sums[n][2 * i + 1];
        butterfly<1>(even), butterfly<2>(even), butterfly<3>(even);
        butterfly<1>(odd), butterfly<2>(odd), butterfly<3>(odd);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t words[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) words[w] = pack(even[j * 4 + w] * kHadamardScale, odd[j * 4 + w] * kHadamardScale);
          char* step = target + int64_t{column / kStep + j} * stored * kStepBytes;
          *reinterpret_cast<uint4*>(step + swizzled(local + 8 * i, quad)) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_eight(void* out, int64_t index, const float (&sum)[8]) {
  if constexpr (std::is_same_v<T, float>) {
    auto* target = reinterpret_cast<float4*>(static_cast<float*>(out) + index);
    target[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    target[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, half>) {
        words[i] = pack(sum[2 * i], sum[2 * i + 1]);
      } else {
        __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
        words[i] = *reinterpret_cast<uint32_t*>(&pair);
      }
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(out) + index) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Eight columns a thread; slots are added in the order of k, so that every run gives the same bits.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Problem p, Tables t, const half* outputs, int slice, int first_column, int columns) {
  int groups = columns / 8;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < int64_t{p.tokens} * groups;
       i += int64_t{gridDim.x} * kThreads) {
    int token = static_cast<int>(i / groups), column = static_cast<int>(i % groups) * 8;
    int64_t target = int64_t{token} * p.hidden + first_column + column;
    float sum[8] = {};
    if (p.addend) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = p.addend[target + j];
    }
#pragma unroll 8
    for (int k = 0; k < p.top_k; ++k) {
      int row = t.slot_row[int64_t{token} * p.top_k + k];
      if (row < 0) continue;
      uint4 words = *reinterpret_cast<const uint4*>(outputs + int64_t{row} * slice + column);
      const half2* pairs = reinterpret_cast<const half2*>(&words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] += __low2float(pairs[j]);
        sum[2 * j + 1] += __high2float(pairs[j]);
      }
    }
    store_eight<T>(p.out, target, sum);
  }
}

}  // namespace

cudaError_t gather(const Problem& p, const Layout& l, const Tables& t, int chunk, cudaStream_t stream) {
  char* gathered = static_cast<char*>(p.workspace) + l.gathered;
  int64_t units = int64_t{l.chunk_rows + kTileRows} / kRowBlock * (p.hidden / kBlock);
  int blocks = min(ceil_div(units, kWarps), p.multiprocessors * 8);
  auto* kernel = p.x_type == Element::kHalf ? gather_kernel<half> : gather_kernel<__nv_bfloat16>;
  kernel<<<blocks, kThreads, 0, stream>>>(p, l, t, gathered, chunk);
  return cudaGetLastError();
}

cudaError_t sum_slots(
    const Problem& p, const Layout& l, const Tables& t, int first_column, int columns, cudaStream_t stream) {
  const half* outputs = reinterpret_cast<const half*>(static_cast<char*>(p.workspace) + l.outputs);
  int blocks = min(ceil_div(int64_t{p.tokens} * columns / 8, kThreads), p.multiprocessors * 8);
  auto* kernel = p.out_type == Element::kHalf       ? sum_kernel<half>
                 : p.out_type == Element::kBfloat16 ? sum_kernel<__nv_bfloat16>
                                                    : sum_kernel<float>;
  kernel<<<blocks, kThreads, 0, stream>>>(p, t, outputs, l.slice, first_column, columns);
  return cudaGetLastError();
}

}  // namespace exl3
