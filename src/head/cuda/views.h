// Tensors as a GPU's kernels take them.
#pragma once

#include <string_view>

#include "head/validate.h"

namespace logitless::cuda {

// A matrix of the device, or a tensor as one; throws unless its rows are contiguous.
RowMatrix rows_of(std::string_view name, const ConstTensorView& view);
// An optional fp32 vector or output of the device; throws unless contiguous.
const float* floats_of(std::string_view name, const ConstTensorView& view);
float* floats_of(std::string_view name, const TensorView& view);
// Throws unless contiguous or undefined.
void require_contiguous(std::string_view name, const ConstTensorView& view);

}  // namespace logitless::cuda
