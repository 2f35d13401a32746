// bench_head --device cuda: compares the plans of the head with the roofline, the three GEMMs of
// cuBLAS.
#pragma once

#include <string>
#include <vector>

namespace logitless::bench {

struct DeviceBenchOptions {
  int repeat = 9;
  bool json = false;
  std::string only;  // a head's name; empty: all
  std::string row;   // only plans with this in their name, without cuBLAS; empty: all
  std::vector<std::string> real_heads;  // safetensors files, rotated to 4096 and 768 columns
};
int bench_device(const DeviceBenchOptions& options);

}  // namespace logitless::bench
