#include <cstdlib>
#include <vector>

#include "core/check.h"
#include "kernels/cpu/register_cpu.h"
#include "kernels/cpu_facts.h"
#include "kernels/cpu_head.h"
#include "kernels/forced_kernel.h"
#include "kernels/reference/register_reference.h"

namespace logitless {
namespace {

std::vector<HeadKernel> all_kernels(bool dot_product_is_fast) {
  std::vector<HeadKernel> rows = cpu::simd_kernels(dot_product_is_fast);
  rows.push_back(cpu::emulated_amx_kernel());
  rows.push_back(reference::reference_kernel());
  return rows;
}

}  // namespace

std::span<const HeadKernel> head_kernels() {
  static const std::vector<HeadKernel> slow = all_kernels(false), fast = all_kernels(true);
  return cpu_facts().dot_product_is_fast ? fast : slow;
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

std::string forced_kernel() {
  const char* name = std::getenv("LOGITLESS_CPU");
  if (name == nullptr || *name == '\0') return {};
  require_head_kernel("LOGITLESS_CPU", name);
  return name;
}

void require_head_kernel(std::string_view source, std::string_view name) {
  std::string names;
  const HeadKernel* found = nullptr;
  for (const HeadKernel& kernel : head_kernels()) {
    names += concat(names.empty() ? "" : ", ", kernel.name);
    if (kernel.name == name) found = &kernel;
  }
  require(found != nullptr, source, ": '", name, "' is unknown; expected one of ", names);
  const std::string reason = found->runnable();
  require(reason.empty(), source, ": ", name, " cannot run here: ", reason);
}

const HeadKernel& choose_head_kernel(std::string_view wanted, const HeadShape& shape,
                                     const HeadFeatures& features, std::string* reasons) {
  if (!wanted.empty()) {
    const HeadKernel& kernel = find_head_kernel(wanted);
    // Does not check that it runs here: the plan may be for another machine. The engine checks
    // that.
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
