// Generates CUDA C++ text of a program's loops for NVRTC. Sizes, strides and types are constants in
// the text and addresses are arguments, so layers of equal shapes share kernels. Pure functions:
// equal loops give equal text, and the shape alone determines how a sum is split.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compiler/plan/program.h"
#include "kernels/device/module.h"

namespace logitless::ir {

// An argument of a kernel launch, in the order of the kernel's parameters.
struct KernelArgument {
  enum class Kind : std::uint8_t {
    address,  // address of `buffer` plus `offset` bytes
    scratch,  // scratch of the loop or group, aligned to 16 bytes, plus `offset` bytes
    first,    // std::int64_t: the argument of the loop's body
    matrix,   // CUtensorMap of matrices[matrix] at the address of `buffer` plus `offset` bytes
  };
  Kind kind = Kind::address;
  int buffer = -1;
  std::int64_t offset = 0;
  int matrix = -1;
};

inline constexpr std::size_t kMostMatrices = 8;  // of a kernel

struct GeneratedKernel {
  std::string entry;   // contains a hash of the text: equal names mean equal kernels
  std::string source;  // one extern "C" __global__ function, after the prelude
  cuda::LaunchShape shape;
  std::vector<KernelArgument> arguments;
  std::vector<cuda::MatrixShape> matrices;
  std::optional<ProductEngine>
      product_engine;  // whose text (kernels/device/tile_engine.h) it needs
};

// Generates the kernels of a loop in order; none if there is nothing to do. alignments[b]: bytes
// that divide the address of buffer b (buffer_alignments below).
std::vector<GeneratedKernel> generate(const Pointwise& loop,
                                      std::span<const std::int64_t> alignments);

// Generates the kernel of a row group, and a second one if it has column sums. With a product: its
// kernel, and one for each kind of sums of rows.
std::vector<GeneratedKernel> generate(const RowGroup& group,
                                      std::span<const std::int64_t> alignments);
std::int64_t row_group_scratch_bytes(const RowGroup& group);

// Returns the bytes of partial results between the kernels of a reduction, by its shape and kind.
// Pointwise::parts and scratch are for the CPU and are ignored.
std::int64_t pointwise_scratch_bytes(const Pointwise& loop);

// Returns one source for NVRTC or nvcc without includes: the prelude, then each distinct kernel
// once.
std::string module_source(std::span<const GeneratedKernel> kernels);

// Returns the alignments of a program's buffers. The arena has the program's alignment; parameters
// and results are aligned to 16 bytes.
std::vector<std::int64_t> buffer_alignments(const Program& program);
// Returns the alignments of a loop's body or tail from those of the surrounding program.
std::vector<std::int64_t> buffer_alignments(const LoopRun& loop, const Program& body,
                                            std::span<const std::int64_t> outer);

}  // namespace logitless::ir
