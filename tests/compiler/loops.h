// Loops by themselves: their memory filled at random, what they come to in double, and the kernels
// that are generated for them, run by whatever runs kernels.
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
  std::vector<std::int64_t> alignments;  // of the buffers: as much as is claimed, and not more
  std::int64_t first = 0;                // the argument of the loop's body
  bool rounds = false;                   // to 16 bits, somewhere
  // Operands hold NaN, infinities, zeros and other ends of functions, too, and errors are relative
  // to each result alone.
  bool special = false;
};

// The loop on buffers of its own. alignments[b]: of the loop's buffer b; 256 without them.
LoopCase make_case(const std::string& name, const ir::Pointwise& loop,
                   std::span<const std::int64_t> alignments = {});
// All loops of a program and of the bodies in it.
std::vector<LoopCase> cases_of(const std::string& name, const ir::Program& program);

struct Memory {
  std::vector<std::byte> arena;  // its first byte stands for an address that is a multiple of 256
};
Memory random_memory(const LoopCase& c, std::uint64_t seed);

// Runs kernels on the arena in place, whose scratch, if any, it fills with NaN before.
using KernelRunner =
    std::function<void(const LoopCase& c, std::span<const ir::GeneratedKernel> kernels,
                       std::int64_t scratch_bytes, std::vector<std::byte>& arena)>;

// Runs the case and compares: the results with float64 within `tolerance` of the size of their
// root mean square and of themselves, everything else with what was there, and two runs with each
// other. Fails as GoogleTest does.
void check_case(const LoopCase& c, std::uint64_t seed, const KernelRunner& run);

}  // namespace logitless::test
