// Generated kernels of loops for a GPU: their text, and their results when the host's compiler
// compiles it.
#include "compiler/exec/cuda/codegen.h"

#include <gtest/gtest.h>

#include <cstring>

#include "compiler/host_kernels.h"
#include "compiler/integer_loops.h"
#include "compiler/loop_grid.h"
#include "compiler/loops.h"
#include "compiler/row_groups.h"

namespace logitless::test {
namespace {

// Runs kernels on a copy of the arena with the alignment of device memory.
KernelRunner on(const HostKernels& host) {
  return [&host](const LoopCase& c, std::span<const ir::GeneratedKernel> kernels,
                 std::int64_t scratch_bytes, std::vector<std::byte>& arena) {
    const auto block = [](std::size_t bytes) {
      return std::unique_ptr<std::byte, decltype(&std::free)>(
          static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)), &std::free);
    };
    const auto memory = block(arena.size());
    std::memcpy(memory.get(), arena.data(), arena.size());
    const auto scratch = block(static_cast<std::size_t>(scratch_bytes) + 1);
    std::memset(scratch.get(), 0xff, static_cast<std::size_t>(scratch_bytes));
    for (const ir::GeneratedKernel& kernel : kernels) {
      std::vector<void*> values;
      std::int64_t first = c.first;
      values.reserve(kernel.arguments.size());
      std::vector<void*> arguments;
      for (const ir::KernelArgument& a : kernel.arguments) {
        if (a.kind == ir::KernelArgument::Kind::first) {
          arguments.push_back(&first);
          continue;
        }
        std::byte* const begin =
            a.kind == ir::KernelArgument::Kind::scratch
                ? scratch.get()
                : memory.get() + c.program.buffers[static_cast<std::size_t>(a.buffer)].offset;
        values.push_back(begin + a.offset);
        arguments.push_back(&values.back());
      }
      host.run(kernel, arguments);
    }
    std::memcpy(arena.data(), memory.get(), arena.size());
  };
}

using Check = void (*)(const LoopCase& c, std::uint64_t seed, const KernelRunner& run);

void check_on_host(std::span<const LoopCase> cases, Check check = check_case) {
  std::vector<ir::GeneratedKernel> kernels;
  for (const LoopCase& c : cases) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  }
  const HostKernels host(kernels);
  const KernelRunner run = on(host);
  std::uint64_t seed = 1;
  for (const LoopCase& c : cases) check(c, seed++, run);
}

TEST(Codegen, LoopsOfAllProgramsOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  constexpr DType kDtypes[] = {DType::f32, DType::bf16};
  check_on_host(program_cases(kDtypes));
}

TEST(Codegen, FunctionsOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_on_host(function_cases());
}

TEST(Codegen, LayoutsOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_on_host(layout_cases());
}

TEST(Codegen, ReductionsOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_on_host(reduction_cases(false));
}

TEST(Codegen, IntegersOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_on_host(integer_cases(), check_integer_case);
}

void check_groups_on_host(const std::vector<GroupCase>& groups) {
  std::vector<ir::GeneratedKernel> kernels;
  for (const GroupCase& c : groups) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.group, c.memory.alignments))
      kernels.push_back(std::move(kernel));
  }
  const HostKernels host(kernels);
  std::uint64_t seed = 1;
  for (const GroupCase& c : groups) check_group(c, seed++, on(host));
}

TEST(Codegen, LongRowsOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_groups_on_host(long_row_groups());
}

TEST(Codegen, RepeatedValuesOfARowGroupOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  check_groups_on_host({repeated_group("bf16"), repeated_group("f16")});
}

// Products by mma.sync, one and two, with rests of tiles, steps and chunks of 16 bytes.
TEST(Codegen, ProductsWithEpiloguesOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  std::vector<GroupCase> groups;
  for (const ProductProgram& p : product_programs(DType::bf16))
    groups.push_back(product_group(p, {200, 264, 40}));
  groups.push_back(product_group(product_programs(DType::f16)[0], {130, 136, 72}));
  for (GroupCase& c : groups) {
    c.group.product->k -= 3;
    if (c.group.other) c.group.other->k -= 3;
  }
  check_groups_on_host(groups);
}

TEST(Codegen, IntegersOfARowGroupOnTheHost) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  const GroupCase c = integer_group();
  const HostKernels host(ir::generate(c.group, c.memory.alignments));
  check_integer_group(c, 1, on(host));
}

}  // namespace
}  // namespace logitless::test
