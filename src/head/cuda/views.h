// Tensors in the form that the GPU kernels take.
#pragma once

#include <string_view>

#include "head/validate.h"

namespace logitless::cuda {

// Returns a device matrix, or a tensor as one. Throws unless its rows are contiguous.
RowMatrix rows_of(std::string_view name, const ConstTensorView& view);
// Returns an optional fp32 vector or output of the device. Throws unless it is contiguous.
const float* floats_of(std::string_view name, const ConstTensorView& view);
float* floats_of(std::string_view name, const TensorView& view);
// Throws unless the tensor is contiguous or undefined.
void require_contiguous(std::string_view name, const ConstTensorView& view);

}  // namespace logitless::cuda
