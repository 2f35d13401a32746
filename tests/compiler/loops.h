// Tests single loops: random memory, expected results in double, and runs of generated kernels.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/plan/program.h"

namespace logitless::test {

struct LoopCase {
  std::string name;
  ir::Pointwise loop;
  ir::Program program;                   // its buffers, all in one arena
  std::vector<std::int64_t> alignments;  // of the buffers: exactly as much as is claimed
  std::int64_t first = 0;                // the argument of the loop's body
  bool rounds = false;                   // rounds to 16 bits somewhere
  // Operands contain NaN, infinities, zeros and other special values, and errors are relative to
  // each result alone.
  bool special = false;
};

// Returns a case with separate buffers for the loop. alignments[b]: of buffer b; 256 if empty.
LoopCase make_case(const std::string& name, const ir::Pointwise& loop,
                   std::span<const std::int64_t> alignments = {});
// Returns all loops of a program and of its loops' bodies.
std::vector<LoopCase> cases_of(const std::string& name, const ir::Program& program);

struct Memory {
  std::vector<std::byte> arena;  // its first byte stands for an address that is a multiple of 256
};
Memory random_memory(const LoopCase& c, std::uint64_t seed);

// Runs kernels in place on the arena, after filling their scratch with NaN.
using KernelRunner =
    std::function<void(const LoopCase& c, std::span<const ir::GeneratedKernel> kernels,
                       std::int64_t scratch_bytes, std::vector<std::byte>& arena)>;

// Runs the case twice. Results must agree with float64 within `tolerance` of their root mean square
// and of themselves. All other memory must be unchanged, and both runs must agree. Fails as
// GoogleTest does.
void check_case(const LoopCase& c, std::uint64_t seed, const KernelRunner& run);

}  // namespace logitless::test
