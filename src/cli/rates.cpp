#include "cli/rates.h"

#include <fmt/core.h>

namespace logitless::cli {

std::string RateRow::text(double rate) const {
  if (!(rate > 0.0)) return "-";
  return flops ? fmt::format("{:.1f} TFLOP/s", rate * 1e-12)
               : fmt::format("{:.0f} GB/s", rate * 1e-9);
}

std::vector<RateRow> rate_rows(const GpuCalibration& c) {
  return {
      {"gemm_flops", "large 16-bit GEMMs", true, c.nominal.gemm_flops, c.measured.gemm_flops,
       c.used.gemm_flops},
      {"tile_flops", "forward by mma.sync", true, c.nominal.tile_flops, c.measured.tile_flops,
       c.used.tile_flops},
      {"copy_bytes_per_second", "copy, read and written", false, c.nominal.copy_bytes_per_second,
       c.measured.copy_bytes_per_second, c.used.copy_bytes_per_second},
      {"row_bytes_per_second", "pass over fp32 logits", false, c.nominal.row_bytes_per_second,
       c.measured.row_bytes_per_second, c.used.row_bytes_per_second}};
}

}  // namespace logitless::cli
