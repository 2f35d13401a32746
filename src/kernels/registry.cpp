#include <vector>

#include "core/check.h"
#include "kernels/cpu/register_cpu.h"
#include "kernels/kernels.h"
#include "kernels/reference/register_reference.h"

namespace logitless {
namespace {

std::vector<HeadKernel> all_kernels() {
  std::vector<HeadKernel> rows = cpu::simd_kernels();
  rows.push_back(cpu::emulated_amx_kernel());
  rows.push_back(reference::reference_kernel());
  return rows;
}

}  // namespace

std::span<const HeadKernel> head_kernels() {
  static const std::vector<HeadKernel> rows = all_kernels();
  return rows;
}

const HeadKernel& find_head_kernel(std::string_view name) {
  for (const HeadKernel& kernel : head_kernels()) {
    if (kernel.name == name) return kernel;
  }
  std::string names;
  for (const HeadKernel& kernel : head_kernels())
    names += concat(names.empty() ? "" : ", ", kernel.name);
  throw InvalidArgument(concat("kernel '", name, "' is unknown; there are ", names));
}

const HeadKernel& choose_head_kernel(std::string_view wanted, const HeadShape& shape,
                                     const HeadFeatures& features, std::string* reasons) {
  if (!wanted.empty()) {
    const HeadKernel& kernel = find_head_kernel(wanted);
    // Not whether it runs here: the plan may be for another machine. The engine asks.
    const Support reason = kernel.supports(shape, features);
    if (!reason.empty()) throw Unsupported(concat("kernel ", wanted, ": ", reason));
    return kernel;
  }
  for (const HeadKernel& kernel : head_kernels()) {
    Support reason = kernel.runnable();
    if (reason.empty()) reason = kernel.supports(shape, features);
    if (reason.empty()) return kernel;
    if (reasons != nullptr) *reasons += concat(kernel.name, ": ", reason, "\n");
  }
  throw InternalError("no kernel accepts the problem, the reference included");
}

}  // namespace logitless
