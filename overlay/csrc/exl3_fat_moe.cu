// The grouped MoE over EXL3 experts: tables, then gate and up chunk by chunk, then down slice by slice.
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "trellis.h"

namespace exl3 {
namespace {

template <class D>
cudaError_t run(const Problem& p, const Layout& l, const Tables& t, cudaStream_t stream) {
  cudaError_t error = route(p, l, t, stream);
  for (int chunk = 0; chunk < l.chunks && error == cudaSuccess; ++chunk) {
    error = gather(p, l, t, chunk, stream);
    if (error == cudaSuccess) error = gate_up<D>(p, l, t, chunk, stream);
  }
  for (int slice = 0; slice < l.slices && error == cudaSuccess; ++slice) {
    error = down<D>(p, l, t, slice, stream);
    int first = slice * l.slice, columns = std::min(l.slice, p.hidden - first);
    if (error == cudaSuccess) error = sum_slots(p, l, t, first, columns, stream);
  }
  return error;
}

// One warp a tile.
__global__ void decode_inner_kernel(
    const int16_t* trellis, int in, int out, int bits_x2, Codebook codebook, half* inner) {
  __shared__ uint32_t words[8][tile_bytes(2 * 8) / 4];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t tile = int64_t{blockIdx.x} * 8 + warp, columns = out / kTile;
  if (tile >= in / kTile * columns) return;
  const uint32_t* source = reinterpret_cast<const uint32_t*>(trellis) + tile * tile_bytes(bits_x2) / 4;
  for (int i = lane; i < tile_bytes(bits_x2) / 4; i += 32) words[warp][i] = source[i];
  __syncwarp();
  const GenericDecoder decoder(lane, bits_x2, codebook);
  const auto loaded = decoder.load(ptx::shared_address(words[warp]));
  half* target = inner + (tile / columns * kTile) * out + tile % columns * kTile;
  for (int i = 0; i < 8; ++i) {
    int row = lane % 4 * 2 + i % 2 + i / 2 % 2 * 8, column = lane / 4 + i / 4 * 8;
    half2 pair = halves_of(decoder.pair(loaded, i / 2));
    target[int64_t{row} * out + column] = i % 2 ? __high2half(pair) : __low2half(pair);
  }
}

bool legal_rate(int bits_x2, Codebook codebook) {
  if (bits_x2 % 2 == 0) return bits_x2 >= 2 && bits_x2 <= 16;
  return codebook == Codebook::kMul1 && bits_x2 >= 3 && bits_x2 <= 7;
}

}  // namespace

int64_t workspace_bytes(int tokens, int top_k, int experts, int hidden, int width) {
  return std::max(layout_of(tokens, top_k, experts, hidden, width, true).bytes,
                  layout_of(tokens, top_k, experts, hidden, width, false).bytes);
}

const char* refuse(const Problem& p) {
  if (p.hidden <= 0 || p.hidden % kBlock || p.width <= 0 || p.width % kBlock) {
    return "hidden and width must be multiples of 128";
  }
  if (p.experts < 1 || p.experts > kMaxExperts) return "more than 512 local experts";
  if (!legal_rate(p.bits_x2, p.codebook)) return "no such rate for this codebook";
  if (p.tokens < 0 || p.top_k < 1 || int64_t{p.tokens} * p.top_k > 1 << 24) return "too many rows at once";
  if (p.x_type == Element::kFloat) return "the input must be fp16 or bf16";
  if (!(p.limit > 0)) return "the limit of SwiGLU must be positive (infinity for none)";
  return nullptr;
}

cudaError_t fat_moe(const Problem& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  Layout l = layout_of(p.tokens, p.top_k, p.experts, p.hidden, p.width, p.shared_suh);
  Tables t = tables_of(l, p.workspace);
#define EXL3_DISPATCH(bits, codebook_) \
  if (p.bits_x2 == 2 * bits && p.codebook == codebook_) return run<Decoder<2 * bits, codebook_>>(p, l, t, stream);
  EXL3_DISPATCH(3, Codebook::kMcg)
  EXL3_DISPATCH(4, Codebook::kMcg)
  EXL3_DISPATCH(5, Codebook::kMcg)
  EXL3_DISPATCH(6, Codebook::kMcg)
  EXL3_DISPATCH(3, Codebook::kMul1)
  EXL3_DISPATCH(4, Codebook::kMul1)
  EXL3_DISPATCH(5, Codebook::kMul1)
  EXL3_DISPATCH(6, Codebook::kMul1)
#undef EXL3_DISPATCH
  return run<GenericDecoder>(p, l, t, stream);
}

cudaError_t decode_inner(
    const int16_t* trellis, int in, int out, int bits_x2, Codebook codebook, void* inner, cudaStream_t stream) {
  int64_t tiles = int64_t{in / kTile} * (out / kTile);
  decode_inner_kernel<<<ceil_div(tiles, 8), 256, 0, stream>>>(
      trellis, in, out, bits_x2, codebook, static_cast<half*>(inner));
  return cudaGetLastError();
}

}  // namespace exl3
