// The page of `logitless bench --report`: one device, its rates, and the standard heads on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "logitless/dtype.h"

namespace logitless::cli {

struct ReportRequest {
  std::string path;     // file to write
  std::string command;  // the command line, for the page
  bool on_gpu = false;
  int threads = 0;                // of the CPU; 0: the default
  std::optional<DType> dtype;     // default: bf16, or f16 on a GPU that lacks it
  std::int64_t repeat = 3;        // runs after the first
  std::size_t memory_budget = 0;  // most bytes for a head; 0: nine tenths of what is free
  std::function<void(std::string_view)> trace = {};
};

// Throws UsageError where `path` cannot be written, or is a file that is no such page.
void check_report_file(const std::string& path);

// Times the heads and writes the page. Stores no rates. Throws Unsupported without the device.
void write_bench_report(const ReportRequest& request);

}  // namespace logitless::cli
