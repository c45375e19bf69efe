// The launches of one step, in their order.
#pragma once

#include "tables.h"

namespace exl3 {

cudaError_t route(const Problem&, const Layout&, const Tables&, cudaStream_t);

// Rows of one chunk, multiplied by suh of gate and up and transformed, into the workspace.
cudaError_t gather(const Problem&, const Layout&, const Tables&, int chunk, cudaStream_t);

// Sums each token's outputs of `columns` columns from `first_column` on.
cudaError_t sum_slots(const Problem&, const Layout&, const Tables&, int first_column, int columns, cudaStream_t);

// Gate, up and the activation for one chunk of tiles; down for one slice of columns.
template <class Decoder>
cudaError_t gate_up(const Problem&, const Layout&, const Tables&, int chunk, cudaStream_t);
template <class Decoder>
cudaError_t down(const Problem&, const Layout&, const Tables&, int slice, cudaStream_t);

}  // namespace exl3
