// Calibration: measures the sustained rates of the local GPU, and stores them for plans.
//
// Nothing is measured unless a caller asks. Other rates may choose another plan, whose sums round
// in another order (docs/use/exact.md), so the rates of a process never change while it runs. Its
// first Context of a GPU reads the stored file, and later contexts of this GPU have the same card.
#pragma once

#include <string>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/gpu_card.h"

namespace logitless {

// Sustained rates of a GPU, as in GpuCard.
struct GpuRates {
  double gemm_flops = 0.0;
  double tile_flops = 0.0;  // 0: the GPU has no such kernel
  double copy_bytes_per_second = 0.0;
  double row_bytes_per_second = 0.0;

  bool operator==(const GpuRates&) const = default;
};

struct GpuCalibration {
  GpuCard nominal = {};  // of the table or estimated
  GpuRates measured = {};
  // The card of plans. Of calibrate_gpu(): in processes that start from now on, nominal with each
  // measured rate that differs by more than 5 %. A rate beyond a factor of 20 is taken for a
  // disturbed measurement and stays nominal. All do if nothing could be stored, or with
  // LOGITLESS_CALIBRATION=off. Of measure_gpu(): the context's card.
  GpuCard used = {};
  std::string driver = {};      // the CUDA version of the driver, as "13.0"
  bool from_file = false;       // not measured now
  double seconds = 0.0;         // of the measurement; 0 from a file
  std::string file = {};        // the stored rates, in the folder of the kernel cache; may be empty
  std::string not_stored = {};  // why they could not be stored, or empty
};

// Measures the rates of the context's GPU in about 0.6 s, and waits. It runs three GEMMs of a head
// by the library's own path, and a copy. The forward of a wide head by mma.sync, and that of a
// narrow head by the kernel "cublas", come after them. Takes 0.6 GiB of device memory and stores
// nothing. Other work on the GPU lowers the rates; not while a stream is captured. Throws
// InvalidArgument for a CPU context, Unsupported naming a missing library, and DeviceError.
LOGITLESS_API GpuCalibration measure_gpu(const Context& context);

// Returns the stored rates of the context's GPU, or measures and stores them. `refresh` measures
// in any case. The file counts for the same card, SMs, driver and library version alone; another
// one, or a damaged one, is measured and written again, atomically. Throws as measure_gpu() does,
// and InvalidArgument for another value of LOGITLESS_CALIBRATION than on and off.
LOGITLESS_API GpuCalibration calibrate_gpu(const Context& context, bool refresh = false);

}  // namespace logitless
