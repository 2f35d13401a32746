#include "kernels/device/gpu_kernels.h"

#include <algorithm>
#include <cstdlib>

#include "core/check.h"
#include "kernels/device/kernel.h"

namespace logitless::cuda {
namespace {

constexpr const char* kVariable = "LOGITLESS_GPU_KERNELS";

std::string_view wanted_list() {
  const char* const list = std::getenv(kVariable);
  return list == nullptr ? std::string_view() : std::string_view(list);
}

std::string all_names() {
  std::string names;
  for (const DeviceKernel& kernel : device_kernels())
    names += concat(names.empty() ? "" : ", ", kernel.name);
  return names;
}

bool has(const std::vector<const DeviceKernel*>& kernels, const DeviceKernel& kernel) {
  return std::find(kernels.begin(), kernels.end(), &kernel) != kernels.end();
}

}  // namespace

std::vector<const DeviceKernel*> parse_gpu_kernels(std::string_view source, std::string_view list) {
  std::vector<const DeviceKernel*> kernels;
  const auto table = device_kernels();
  if (list.empty()) {
    for (const DeviceKernel& kernel : table) kernels.push_back(&kernel);
    return kernels;
  }
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view name = list.substr(begin, end - begin);
    const auto found = std::find_if(table.begin(), table.end(),
                                    [&](const DeviceKernel& k) { return name == k.name; });
    require(found != table.end(), source, ": '", name,
            "' is unknown; expected a comma-separated list of ", all_names());
    require(!has(kernels, *found), source, ": ", name, " is named twice in '", list, "'");
    kernels.push_back(&*found);
    begin = end + 1;
  }
  return kernels;
}

std::vector<const DeviceKernel*> gpu_kernels() {
  return parse_gpu_kernels(kVariable, wanted_list());
}

std::vector<const DeviceKernel*> wanted_gpu_kernels(std::string_view wanted) {
  if (!wanted.empty()) return {&find_device_kernel(wanted)};
  return gpu_kernels();
}

std::string gpu_kernel_refusal(const DeviceKernel& kernel) {
  if (has(gpu_kernels(), kernel)) return {};
  return concat("is not in ", kVariable, "=", wanted_list());
}

int instruction_capability(const std::vector<const DeviceKernel*>& kernels,
                           int compute_capability) {
  constexpr int kGeneral = 80;
  const auto table = device_kernels();
  const auto specific = [&](const DeviceKernel& kernel) {
    return kernel.least_capability == compute_capability &&
           kernel.most_capability == compute_capability;
  };
  const bool exists = std::any_of(table.begin(), table.end(), specific);
  const bool allowed = std::any_of(kernels.begin(), kernels.end(),
                                   [&](const DeviceKernel* kernel) { return specific(*kernel); });
  return exists && !allowed ? kGeneral : compute_capability;
}

int instruction_capability(int compute_capability) {
  static const std::vector<const DeviceKernel*> kernels = gpu_kernels();
  return instruction_capability(kernels, compute_capability);
}

const DeviceKernel& find_far_kernel(int compute_capability, std::string_view wanted,
                                    const ForwardShape& shape) {
  std::string refusals;
  const auto refuse = [&](const DeviceKernel& kernel, std::string_view reason) {
    refusals += concat(refusals.empty() ? "" : "; ", "kernel ", kernel.name, " ", reason);
  };
  if (wanted.empty()) {
    for (const DeviceKernel& kernel : device_kernels()) {
      const std::string reason = gpu_kernel_refusal(kernel);
      if (kernel.far != nullptr && !reason.empty()) refuse(kernel, reason);
    }
  }
  for (const DeviceKernel* kernel : wanted_gpu_kernels(wanted)) {
    std::string reason = capability_refusal(*kernel, compute_capability);
    if (reason.empty() && kernel->far == nullptr) reason = "does not have the far field";
    if (reason.empty()) reason = kernel->far->head_unsupported(shape);
    if (reason.empty()) return *kernel;
    if (kernel->far != nullptr || !wanted.empty()) refuse(*kernel, reason);
  }
  throw Unsupported(refusals);
}

}  // namespace logitless::cuda
