#include "experts.cuh"

namespace exl3 {
EXL3_INSTANTIATE(Decoder<2 * 3, Codebook::kMul1>)
EXL3_INSTANTIATE(Decoder<2 * 4, Codebook::kMul1>)
EXL3_INSTANTIATE(Decoder<2 * 5, Codebook::kMul1>)
EXL3_INSTANTIATE(Decoder<2 * 6, Codebook::kMul1>)
}  // namespace exl3
