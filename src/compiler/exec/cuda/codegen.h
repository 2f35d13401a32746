// CUDA C++ text of the loops of a program, for NVRTC: sizes, strides and types are constants in the
// text, addresses are arguments, so that layers of equal shapes share their kernels. Pure
// functions: the same loop gives the same text, and where a sum is cut depends on its shape alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compiler/plan/program.h"
#include "kernels/device_module.h"

namespace logitless::ir {

// What a kernel is given at a launch, in the order of its parameters.
struct KernelArgument {
  enum class Kind : std::uint8_t {
    address,  // of `buffer`, and `offset` bytes on
    scratch,  // of the loop's or the group's scratch, aligned to 16, and `offset` bytes on
    first,    // std::int64_t: the argument of the loop's body
  };
  Kind kind = Kind::address;
  int buffer = -1;
  std::int64_t offset = 0;
};

struct GeneratedKernel {
  std::string entry;   // made of a hash of the text: kernels of one name are one kernel
  std::string source;  // one extern "C" __global__ function, which needs the prelude
  cuda::LaunchShape shape;
  std::vector<KernelArgument> arguments;
};

// What runs the loop: kernels in order, none where nothing is to be done. alignments[b]: bytes that
// the address of buffer b is known to be a multiple of (buffer_alignments below).
std::vector<GeneratedKernel> generate(const Pointwise& loop,
                                      std::span<const std::int64_t> alignments);

// The same of a row group: its own kernel, then one for its column sums.
std::vector<GeneratedKernel> generate(const RowGroup& group,
                                      std::span<const std::int64_t> alignments);
std::int64_t row_group_scratch_bytes(const RowGroup& group);

// Partial results between the kernels of one reduction: a function of the loop's shape and kind.
// Pointwise::parts and scratch are the CPU's and not looked at.
std::int64_t pointwise_scratch_bytes(const Pointwise& loop);

// One text for NVRTC or nvcc, without includes: the prelude, then each distinct kernel once.
std::string module_source(std::span<const GeneratedKernel> kernels);

// Of a whole program, whose arena begins at a multiple of the program's alignment and whose
// parameters and results begin at multiples of 16.
std::vector<std::int64_t> buffer_alignments(const Program& program);
// Of a loop's body or tail, from those of the program around it.
std::vector<std::int64_t> buffer_alignments(const LoopRun& loop, const Program& body,
                                            std::span<const std::int64_t> outer);

}  // namespace logitless::ir
