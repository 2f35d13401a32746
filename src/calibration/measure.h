// The measurement behind measure_gpu() and calibrate_gpu().
#pragma once

#include "logitless/calibration.h"

namespace logitless {

// Measures the sustained rates of a GPU context's device, and waits.
GpuRates measure_rates(const Context& context);

}  // namespace logitless
