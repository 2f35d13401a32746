// Orders where a GPU's kernels read them.
#pragma once

#include "kernels/device_far.h"
#include "logitless/vocab_order.h"

namespace logitless::cuda {

// On the thread's device: copied there by the first call, which waits; it stays as long as the
// order. Throws DeviceError when memory is short.
DeviceOrder device_order(const VocabOrder& order);
// Of an order with moments, likewise.
DeviceMoments device_moments(const VocabOrder& order);

}  // namespace logitless::cuda
