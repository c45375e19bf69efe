// The grouped MoE kernel's host interface. No torch here: plain pointers, so that the kernels can be
// compiled, run and disassembled by themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace exl3 {

enum class Codebook : int { kThreeInst = 0, kMcg = 1, kMul1 = 2 };
enum class Element : int { kHalf = 0, kBfloat16 = 1, kFloat = 2 };

// One projection of all local experts, in the checkpoint's own layout: expert e starts at e * stride
// elements. Gate and up are interleaved in one tensor, so their strides are twice the size of a matrix.
struct Projection {
  const int16_t* trellis;  // [in/16, out/16, 16*K] per expert
  const void* suh;         // fp16 [in] per expert
  const void* svh;         // fp16 [out] per expert
  int64_t trellis_stride, suh_stride, svh_stride;
};

struct Problem {
  int tokens, top_k;
  int experts;  // local ones
  int hidden, width;
  int bits_x2;  // twice the bits per weight: half-integer rates exist
  Codebook codebook;
  bool shared_suh;  // gate and up of an expert have the same suh
  float limit;      // of SwiGLU; infinity for none
  // Experts with fewer rows belong to another kernel: their slots are neither computed nor summed.
  int min_rows;
  int multiprocessors;

  const void* x;  // [tokens, hidden]
  Element x_type;
  const int32_t* topk_ids;      // [tokens, top_k]; negative ids are skipped
  const float* topk_weights;    // [tokens, top_k]
  const int32_t* expert_map;    // [global experts] -> local expert or -1; null if ids are local
  int global_experts;           // length of expert_map, or `experts`; larger ids are skipped
  Projection gate, up, down;
  void* out;  // [tokens, hidden], every element written
  Element out_type;
  const float* addend;  // fp32 [tokens, hidden] added to the sum, or null
  void* workspace;      // workspace_bytes() bytes, 256-byte aligned; contents do not matter
};

// Bytes of scratch for at most this many tokens. The sum of its terms is documented in docs/kernel.md.
int64_t workspace_bytes(int tokens, int top_k, int experts, int hidden, int width);

// Null if the kernels can take it, else what is wrong in a few words.
const char* refuse(const Problem& problem);

// Runs on `stream`: no allocation, no synchronisation, no host read, so that it can be captured in a graph
// and replayed with other routing. Returns the first CUDA error.
cudaError_t fat_moe(const Problem& problem, cudaStream_t stream);

// The decoded inner matrices (before the outer transforms) of one tensor as fp16 [in, out].
cudaError_t decode_inner(
    const int16_t* trellis, int in, int out, int bits_x2, Codebook codebook, void* inner, cudaStream_t stream);

}  // namespace exl3
