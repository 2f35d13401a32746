// Rates of a GPU as the commands show them.
#pragma once

#include <string>
#include <vector>

#include "logitless/calibration.h"

namespace logitless::cli {

struct RateRow {
  const char* name;  // of GpuRates
  const char* what;  // in the user's terms
  bool flops;        // else bytes a second
  double nominal, measured, used;

  // Formats "251.3 TFLOP/s", "1702 GB/s"; "-" for 0.
  std::string text(double rate) const;
};

std::vector<RateRow> rate_rows(const GpuCalibration& c);

}  // namespace logitless::cli
