// The Hadamard transform of 128 values spread over registers and lanes.
//
// A column 0..127 has seven bits; a value's column is told by some bits of its register index and some of its
// lane. The transform is one butterfly for each bit, in any order. A butterfly between lanes would send all
// values both ways; instead `exchange` swaps a register bit with a lane bit, which sends half of them once.
#pragma once

#include <cuda_fp16.h>

namespace exl3 {

constexpr int kBlock = 128;
constexpr float kHadamardScale = 0.088388347648318447f;  // 1 / sqrt(128)
constexpr uint32_t kAllLanes = 0xffffffffu;

// Butterfly over bit `kBit` of the register index.
template <int kBit, int kSize>
__device__ __forceinline__ void butterfly(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i >> kBit & 1) continue;
    float a = values[i], b = values[i | 1 << kBit];
    values[i] = a + b;
    values[i | 1 << kBit] = a - b;
  }
}

// Afterwards bit `kBit` of the register index means what bit `lane_bit` of the lane meant, and vice versa.
template <int kBit, int kSize>
__device__ __forceinline__ void exchange(float (&values)[kSize], int lane_bit) {
  bool upper = threadIdx.x >> lane_bit & 1;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i >> kBit & 1) continue;
    float& low = values[i];
    float& high = values[i | 1 << kBit];
    float received = __shfl_xor_sync(kAllLanes, upper ? low : high, 1 << lane_bit);
    (upper ? low : high) = received;
  }
}

}  // namespace exl3
