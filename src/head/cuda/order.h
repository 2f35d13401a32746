// Copies of vocabulary orders in GPU memory.
#pragma once

#include "kernels/device/far.h"
#include "logitless/vocab_order.h"

namespace logitless::cuda {

// Returns the order on the thread's device. The first call copies it there and waits; the copy
// lives as long as the order. Throws DeviceError if memory is short.
DeviceOrder device_order(const VocabOrder& order);
// Returns the moments of an order that has them, likewise.
DeviceMoments device_moments(const VocabOrder& order);

}  // namespace logitless::cuda
