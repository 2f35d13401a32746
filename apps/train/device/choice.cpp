#include "train/device/choice.h"

#include <fmt/format.h>

#include "logitless/error.h"
#include "train/run/options.h"

namespace logitless::train {

DeviceWish parse_device(const std::string& text) {
  if (text == "cpu") return DeviceWish::cpu;
  if (text == "cuda") return DeviceWish::cuda;
  throw InvalidArgument(fmt::format("expected cpu or cuda, got '{}'", text));
}

std::string unserved_on_gpu(const RunOptions& options) {
  std::string names;
  const auto add = [&](bool given, const char* name) {
    if (given) names += fmt::format("{}--{}", names.empty() ? "" : ", ", name);
  };
  add(options.far_field > 0.0 && options.dtype != DType::bf16, "far-field without --dtype bf16");
  add(options.shard_head && options.ranks > 1 && options.dtype != DType::bf16,
      "shard-head without --dtype bf16");
  add(options.threads > 0, "threads");
  return names;
}

DeviceChoice choose_device(const RunOptions& options, const std::string& gpu_missing) {
  if (options.device == DeviceWish::cuda) {
    if (!gpu_missing.empty()) throw InvalidArgument(fmt::format("--device: cuda: {}", gpu_missing));
    return {DeviceKind::cuda, {}};
  }
  if (options.device == DeviceWish::cpu || !gpu_missing.empty()) return {};
  const std::string unserved = unserved_on_gpu(options);
  if (!unserved.empty()) return {DeviceKind::cpu, fmt::format("a GPU does not serve {}", unserved)};
  return {DeviceKind::cuda, {}};
}

}  // namespace logitless::train
