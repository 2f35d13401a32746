// bench_head --device cuda: the plans of the head against cuBLAS's three products, on a GPU.
#pragma once

#include <string>
#include <vector>

namespace logitless::bench {

struct DeviceBenchOptions {
  int repeat = 9;
  bool json = false;
  std::string only;  // a head's name, or all
  std::string row;   // plans with this in their name alone, without cuBLAS; or all
  std::vector<std::string> real_heads;  // safetensors files, rotated to 4096 and 768 columns
};
int bench_device(const DeviceBenchOptions& options);

}  // namespace logitless::bench
