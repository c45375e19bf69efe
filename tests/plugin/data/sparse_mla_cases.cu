// The kernels of FlashInfer that GLM-5.3-Flash calls on a DGX Spark, and that what they share fits there.
//
// Heads of a rank: 32 on two nodes and, padded from 22, on three; 16 on four. Up to 64 tokens the decode kernel runs,
// above it the prefill kernels: SG for 16 heads, MG for 32.
#include <flashinfer/attention/sparse_mla_sm120/execution/merge.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv32_fp8/decode.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv41_fp8/prefill_schedule.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/fp8_prefill/prefill_mg.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/fp8_prefill/prefill_sg.cuh>

using namespace flashinfer::sparse_mla_sm120;

constexpr size_t kSharedBytes = 101376;  // of a block on SM121
constexpr size_t kStaticBytes = 2048;    // of the decode kernel, beside what it asks for at its launch

template <ModelType Model>
struct Needed {
  static_assert(Dsv32DecodeSmem<Model>::LAUNCH_BYTES + kStaticBytes <= kSharedBytes, "decode does not fit");
  static_assert(Fp8PrefillResources<Model, QkComputeMode::FP8, void>::SHARED_BYTES <= kSharedBytes, "SG does not fit");
  static_assert(SmemLayoutMG<Model, QkComputeMode::FP8>::TOTAL <= kSharedBytes, "MG does not fit");
  static_assert(KVCacheTraits<Model>::KV_SMEM_COPY_BYTES == 528 && KVCacheTraits<Model>::QUANT_TILE == 128,
                "another row");

  static const void* const kernels[];
};

template <ModelType Model>
const void* const Needed<Model>::kernels[] = {
    (const void*)&sparse_mla_decode_dsv3_2_kernel<Model, 16>,
    (const void*)&sparse_mla_decode_dsv3_2_kernel<Model, 32>,
    (const void*)&sparse_mla_prefill_kernel<Model, QkComputeMode::FP8, 16, 64, Dsv41PrefillGatherSchedule>,
    (const void*)&sparse_mla_prefill_mg_kernel<Model, QkComputeMode::FP8, 32, 64>,
    (const void*)&sparse_mla_decode_dsv4_merge_kernel<32, KVCacheTraits<Model>::D_V, 64, 8>,
};

static_assert(KVCacheTraits<ModelType::GLM53_NOPE>::D_QK == 512 && KVCacheTraits<ModelType::GLM_NSA>::D_QK == 576);
static_assert(KVCacheTraits<ModelType::GLM_NSA>::KV_ROPE_GMEM_OFFSET == 528);

const void* needed(int row) {
  return row < 5 ? Needed<ModelType::GLM53_NOPE>::kernels[row] : Needed<ModelType::GLM_NSA>::kernels[row - 5];
}
