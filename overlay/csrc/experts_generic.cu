#include "experts.cuh"

namespace exl3 {
EXL3_INSTANTIATE(GenericDecoder)
}  // namespace exl3
