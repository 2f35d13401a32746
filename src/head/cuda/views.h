// Tensors and vocabulary orders in the form that the GPU kernels take.
#pragma once

#include <string_view>

#include "head/validate.h"
#include "kernels/device/far.h"
#include "logitless/vocab_order.h"

namespace logitless::cuda {

// Returns a device matrix, or a tensor as one. Throws unless its rows are contiguous.
RowMatrix rows_of(std::string_view name, const ConstTensorView& view);
// Returns an optional fp32 vector or output of the device. Throws unless it is contiguous.
const float* floats_of(std::string_view name, const ConstTensorView& view);
float* floats_of(std::string_view name, const TensorView& view);
// Throws unless the tensor is contiguous or undefined.
void require_contiguous(std::string_view name, const ConstTensorView& view);

// --- order.cpp: copies of vocabulary orders in GPU memory

// Returns the order on the thread's device. The first call copies it there and waits; the copy
// lives as long as the order. Throws DeviceError if memory is short.
DeviceOrder device_order(const VocabOrder& order);
// Returns the moments of an order that has them, likewise.
DeviceMoments device_moments(const VocabOrder& order);

}  // namespace logitless::cuda
