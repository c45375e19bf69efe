// From packed trellis tiles in shared memory to fp16 operands of the tensor cores. Format: docs/kernel.md.
//
// A tile is a ring of 256 * K bits for 16 x 16 weights in the order in which the lanes of a warp hold the B
// operand of mma.m16n8k16: lane L owns elements 8L..8L+7, so a warp decodes a tile without any exchange.
// The state of an element is the 16 ring bits that end with its own K bits.
#pragma once

#include <cuda_fp16.h>

#include "fat_moe.h"
#include "ptx.h"

namespace exl3 {

constexpr int kTile = 16;
constexpr int kTileElements = kTile * kTile;

__host__ __device__ constexpr int tile_bytes(int bits_x2) { return kTileElements * bits_x2 / 16; }

__device__ __forceinline__ uint32_t bits_of(half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ half2 halves_of(uint32_t bits) { return *reinterpret_cast<half2*>(&bits); }

// Two states to two fp16 values, the first in the low half.
template <Codebook kCodebook>
__device__ __forceinline__ uint32_t lookup(uint32_t first, uint32_t second) {
  if constexpr (kCodebook == Codebook::kMul1) {
    constexpr uint32_t kMultiplier = 0x83DCD12Du, kOnes = 0x01010101u, k1024 = 0x6400u;
    uint32_t a = __dp4a(first * kMultiplier, kOnes, k1024), b = __dp4a(second * kMultiplier, kOnes, k1024);
    half2 scale = halves_of(0x1EEE1EEEu), shift = halves_of(0xC931C931u);
    return bits_of(__hfma2(halves_of(__byte_perm(a, b, 0x5410)), scale, shift));
  } else {
    constexpr bool kMcg = kCodebook == Codebook::kMcg;
    constexpr uint32_t kMultiplier = kMcg ? 0xCBAC1FEDu : 89226354u, kAddend = kMcg ? 0u : 64248484u;
    uint32_t a = ptx::and_xor(first * kMultiplier + kAddend, 0x8fff8fffu, 0x3b603b60u);
    uint32_t b = ptx::and_xor(second * kMultiplier + kAddend, 0x8fff8fffu, 0x3b603b60u);
    // Additions whose operands pick halves, then one byte permutation: that leaves more to the pipe of the
    // additions, which idles, than to the integers' pipe, which is the busiest. _rn: never contracted.
    half2 first_value = __hadd2_rn(__low2half2(halves_of(a)), __high2half2(halves_of(a)));
    half2 second_value = __hadd2_rn(__low2half2(halves_of(b)), __high2half2(halves_of(b)));
    return __byte_perm(bits_of(first_value), bits_of(second_value), 0x5410);
  }
}

// Decodes this lane's share of a tile, in two parts so that arithmetic can lie between them: `load` the words with
// the lane's bits, then the pairs 0..3 of fp16 values. Pairs 0 and 1 are the operand of the tile's columns 0-7, 2 and
// 3 of its columns 8-15.
template <int kBitsX2, Codebook kCodebook>
struct Decoder {
  static constexpr int kBits = kBitsX2 / 2, kWords = 8 * kBits;
  static_assert(kBitsX2 % 2 == 0 && kBits >= 1 && kBits <= 6, "the eight states must lie within 64 bits");
  static constexpr int kLoads = kBits == 4 ? 2 : 3;
  static constexpr int kStageTileBytes = tile_bytes(kBitsX2);

  struct Words {
    uint32_t word[4];
  };

  uint32_t offsets[kLoads];  // bytes, of the words with this lane's bits
  uint32_t shift;

  __device__ explicit Decoder(int lane, int /*bits_x2*/, Codebook /*codebook*/) {
    int first = (8 * lane * kBits - (16 - kBits) + 32 * kWords) % (32 * kWords);
    shift = first & 31;
    for (int i = 0; i < kLoads; ++i) offsets[i] = ((first >> 5) + i) % kWords * 4;
  }

  __device__ __forceinline__ int size() const { return tile_bytes(kBitsX2); }

  __device__ __forceinline__ Words load(uint32_t tile) const {
    uint32_t w0 = ptx::load_shared(tile + offsets[0]), w1 = ptx::load_shared(tile + offsets[1]);
    if constexpr (kBits == 4) {
      // Bytes line up in every second state; three shifts line up the others.
      return {{__funnelshift_r(w1, w0, 20), __funnelshift_r(w1, w0, 16), __funnelshift_r(w1, w0, 4), w1}};
    } else {
      uint32_t w2 = ptx::load_shared(tile + offsets[kLoads - 1]);
      return {{__funnelshift_l(w1, w0, shift), __funnelshift_l(w2, w1, shift)}};  // the eight states' 64 bits
    }
  }

  __device__ __forceinline__ uint32_t state(const Words& words, int i) const {
    if constexpr (kBits == 4) {
      return __byte_perm(words.word[i / 4 * 2 + i % 2], 0, i % 4 < 2 ? 0x4421 : 0x4410);
    } else {
      int right = 48 - i * kBits;
      uint32_t high = words.word[0], low = words.word[1];
      return (right >= 32 ? high >> (right - 32) : __funnelshift_r(low, high, right)) & 0xffffu;
    }
  }

  __device__ __forceinline__ uint32_t pair(const Words& words, int i) const {
    return lookup<kCodebook>(state(words, 2 * i), state(words, 2 * i + 1));
  }
};

// Every rate, half-integer ones included, and every codebook: two loads a weight, so it is slow.
template <>
struct Decoder<0, Codebook::kThreeInst> {
  static constexpr int kStageTileBytes = tile_bytes(2 * 8);

  struct Words {
    uint32_t tile;
  };

  int lane, bits_x2;
  Codebook codebook;

  __device__ explicit Decoder(int lane, int bits_x2, Codebook codebook)
      : lane(lane), bits_x2(bits_x2), codebook(codebook) {}

  __device__ __forceinline__ int size() const { return tile_bytes(bits_x2); }

  __device__ __forceinline__ Words load(uint32_t tile) const { return {tile}; }

  __device__ __forceinline__ uint32_t state(const Words& words, int i) const {
    int last = ((8 * lane + i + 1) * bits_x2 >> 1) - 1, word = last >> 5;
    uint32_t before = ptx::load_shared(words.tile + (word ? word - 1 : 4 * bits_x2 - 1) * 4);
    return __funnelshift_r(ptx::load_shared(words.tile + word * 4), before, 31 - (last & 31)) & 0xffffu;
  }

  __device__ __forceinline__ uint32_t pair(const Words& words, int i) const {
    uint32_t first = state(words, 2 * i), second = state(words, 2 * i + 1);
    return codebook == Codebook::kMcg    ? lookup<Codebook::kMcg>(first, second)
           : codebook == Codebook::kMul1 ? lookup<Codebook::kMul1>(first, second)
                                         : lookup<Codebook::kThreeInst>(first, second);
  }
};

using GenericDecoder = Decoder<0, Codebook::kThreeInst>;

}  // namespace exl3
