// Kernels generated for loops, compiled by NVRTC and run twice each: every function, dtype, layout,
// reduction and kind of size against float64. Skips without a GPU or without NVRTC.
#include <gtest/gtest.h>

#include <memory>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/integer_loops.h"
#include "compiler/loop_grid.h"
#include "compiler/loops.h"
#include "core/check.h"
#include "kernels/device/head.h"
#include "kernels/device/module.h"

namespace logitless::test {
namespace {

// Returns why nothing runs here, or empty.
std::string missing() {
  if (cuda::device_count() == 0) return cuda::device_missing(0);
  try {
    cuda::cached_cubin("", cuda::compute_capability(0));
  } catch (const Unsupported& error) {
    return error.what();
  }
  return {};
}

// All cases in one module.
class DeviceKernels {
 public:
  explicit DeviceKernels(std::span<const LoopCase> cases) : DeviceKernels(kernels_of(cases)) {}
  explicit DeviceKernels(const std::vector<ir::GeneratedKernel>& kernels) {
    module_ =
        cuda::Module(cuda::cached_cubin(ir::module_source(kernels), cuda::compute_capability(0)));
  }

  void run(const LoopCase& c, std::span<const ir::GeneratedKernel> kernels,
           std::int64_t scratch_bytes, std::vector<std::byte>& arena) {
    std::byte* const memory = grown(memory_, arena.size());
    std::byte* const scratch = grown(scratch_, static_cast<std::size_t>(scratch_bytes));
    cuda::copy_to_device(memory, arena.data(), arena.size(), nullptr);
    if (scratch_bytes > 0)
      cuda::fill_device(scratch, 0xff, static_cast<std::size_t>(scratch_bytes), nullptr);
    for (const ir::GeneratedKernel& kernel : kernels) {
      std::vector<void*> addresses, arguments;
      addresses.reserve(kernel.arguments.size());
      std::int64_t first = c.first;
      for (const ir::KernelArgument& a : kernel.arguments) {
        if (a.kind == ir::KernelArgument::Kind::first) {
          arguments.push_back(&first);
          continue;
        }
        addresses.push_back(
            a.kind == ir::KernelArgument::Kind::scratch
                ? scratch
                : memory + c.program.buffers[static_cast<std::size_t>(a.buffer)].offset + a.offset);
        arguments.push_back(&addresses.back());
      }
      cuda::launch(module_.kernel(kernel.entry), kernel.shape, arguments, nullptr);
    }
    cuda::copy_to_host(arena.data(), memory, arena.size(), nullptr);
  }

 private:
  cuda::Module module_;
  cuda::DeviceMemory memory_, scratch_;

  static std::vector<ir::GeneratedKernel> kernels_of(std::span<const LoopCase> cases) {
    std::vector<ir::GeneratedKernel> kernels;
    for (const LoopCase& c : cases) {
      for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
        kernels.push_back(std::move(kernel));
    }
    return kernels;
  }
  static std::byte* grown(cuda::DeviceMemory& memory, std::size_t bytes) {
    if (memory.bytes() < bytes) memory = cuda::DeviceMemory(bytes);
    return static_cast<std::byte*>(memory.data());
  }
};

KernelRunner on(DeviceKernels& device) {
  return [&device](const LoopCase& c, std::span<const ir::GeneratedKernel> kernels,
                   std::int64_t scratch_bytes,
                   std::vector<std::byte>& arena) { device.run(c, kernels, scratch_bytes, arena); };
}

using Check = void (*)(const LoopCase& c, std::uint64_t seed, const KernelRunner& run);

void check_on_device(std::span<const LoopCase> cases, Check check = check_case) {
  const std::string reason = missing();
  if (!reason.empty()) GTEST_SKIP() << reason;
  DeviceKernels device(cases);
  std::uint64_t seed = 1;
  for (const LoopCase& c : cases) check(c, seed++, on(device));
}

TEST(Generated, Functions) { check_on_device(function_cases()); }
TEST(Generated, Layouts) { check_on_device(layout_cases()); }
TEST(Generated, Reductions) { check_on_device(reduction_cases(true)); }
TEST(Generated, Integers) { check_on_device(integer_cases(), check_integer_case); }
TEST(Generated, IntegersOfARowGroup) {
  const std::string reason = missing();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const GroupCase c = integer_group();
  DeviceKernels device(ir::generate(c.group, c.memory.alignments));
  check_integer_group(c, 1, on(device));
}
TEST(Generated, LoopsOfAllPrograms) {
  constexpr DType kDtypes[] = {DType::f32, DType::bf16};
  check_on_device(program_cases(kDtypes));
}

}  // namespace
}  // namespace logitless::test
