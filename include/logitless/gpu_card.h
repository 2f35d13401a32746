// Rates of GPU cards, from which plans predict times.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/export.h"

namespace logitless {

// Rates and sizes of a card. A plain value, of the table by gpu_card(), or of the local GPU by
// Context::device(), with the rates that calibrate_gpu() stored.
struct GpuCard {
  // Name in the table, or the driver's for a local GPU. Empty: the usual card of the compute
  // capability, and all numbers are ignored.
  std::string name = {};
  int compute_capability = 0;  // 10 * major + minor
  // Peaks of the datasheet, operations a second. GEMMs are dense with fp32 sums.
  double tensor_flops = 0.0;  // bf16 and f16 GEMMs
  double tf32_flops = 0.0;    // 0: no such instructions
  double fp32_flops = 0.0;
  double bytes_per_second = 0.0;  // memory bandwidth
  std::int64_t l2_bytes = 0;
  int sms = 0;
  std::int64_t shared_bytes = 0;  // shared memory of an SM
  // Sustained rates, measured on some cards and estimated for the others, or measured on this card
  // (calibration.h).
  double gemm_flops = 0.0;             // large bf16 GEMMs
  double tile_flops = 0.0;             // forward of a wide head by mma.sync; 0: no such kernel
  double copy_bytes_per_second = 0.0;  // bytes that a copy reads and writes
  double row_bytes_per_second = 0.0;   // the same of a pass over rows of fp32 logits
  bool calibrated = false;             // true if a sustained rate was measured on this card

  bool operator==(const GpuCard&) const = default;
};

// Returns the names of the table, such as "A100" and "H100 PCIe".
LOGITLESS_API std::vector<std::string> gpu_card_names();
// Returns a card by its name in the table. Throws InvalidArgument that lists the names.
LOGITLESS_API GpuCard gpu_card(std::string_view name);

}  // namespace logitless
