// Where `logitless train` runs.
#pragma once

#include <cstdint>
#include <string>

#include "logitless/context.h"

namespace logitless::train {

struct RunOptions;

enum class DeviceWish : std::uint8_t { automatic, cpu, cuda };
// "cpu" or "cuda". Throws InvalidArgument on other names.
DeviceWish parse_device(const std::string& text);

struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;
  std::string reason;  // why not the GPU that is there; else empty
};

// Names of the options given that a run on a GPU does not serve, "--far-field without --dtype bf16,
// --threads"; empty: none.
std::string unserved_on_gpu(const RunOptions& options);

// Of options that check_options() has passed; gpu_missing: of logitless/device.h. Without a wish:
// the GPU, where there is one that serves them all. Throws InvalidArgument when a GPU is wished for
// that is missing.
DeviceChoice choose_device(const RunOptions& options, const std::string& gpu_missing);

}  // namespace logitless::train
