#include "experts.cuh"

namespace exl3 {
EXL3_INSTANTIATE(Decoder<2 * 3, Codebook::kMcg>)
EXL3_INSTANTIATE(Decoder<2 * 4, Codebook::kMcg>)
EXL3_INSTANTIATE(Decoder<2 * 5, Codebook::kMcg>)
EXL3_INSTANTIATE(Decoder<2 * 6, Codebook::kMcg>)
}  // namespace exl3
