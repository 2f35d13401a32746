// The choice of the device that `logitless train` runs on.
#pragma once

#include <cstdint>
#include <string>

#include "logitless/context.h"

namespace logitless::train {

struct RunOptions;

enum class DeviceWish : std::uint8_t { automatic, cpu, cuda };
// Parses "cpu" or "cuda". Throws InvalidArgument on other names.
DeviceWish parse_device(const std::string& text);

struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;
  std::string reason;  // why an existing GPU is not used; else empty
};

// Returns the given options that a run on a GPU does not support, "--far-field without --dtype
// bf16, --threads"; empty: none.
std::string unserved_on_gpu(const RunOptions& options);

// Chooses the device of a run whose options check_options() has passed. `gpu_missing` is that of
// logitless/device.h. DeviceWish::automatic takes a GPU if there is one that supports all options.
// Throws InvalidArgument when DeviceWish::cuda is given and the GPU is missing.
DeviceChoice choose_device(const RunOptions& options, const std::string& gpu_missing);

}  // namespace logitless::train
