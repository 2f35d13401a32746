// Programs of a matrix product and the loops that read it: those that its generated epilogue takes,
// with every function and every dtype and layout of operands, and those that it does not take.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/ir/interpreter.h"
#include "compiler/product_programs.h"

namespace logitless::test {

// Tiles, steps and accesses of 16 bytes have rests: two tiles of rows and of columns.
inline constexpr ProductSizes kEpilogueSizes = {130, 136, 40};

// Returns options of a GPU whose memory is so slow that every epilogue of few elements pays.
inline CompileOptions every_epilogue(DeviceLimits device) {
  CompileOptions options = slow_memory(kEpilogueSizes, device);
  options.device.card.copy_bytes_per_second /= 1000.0;
  return options;
}

struct EpilogueCase {
  std::string name;
  std::string text;  // of the sizes N, V, D
  Pair pair = Pair::none;
  bool rounds = false;  // functions of numbers that were rounded to 16 bits
};

// Returns the cases for a product of 16-bit matrices. All their loops are one epilogue.
std::vector<EpilogueCase> epilogue_cases(DType dtype);

// A program without a generated epilogue, and its neighbour that has one: what the first has in
// addition is the reason.
struct EpilogueRefusal {
  std::string name;
  std::string refused, taken;  // of the sizes N, V, D
};
std::vector<EpilogueRefusal> epilogue_refusals();

// Returns multiples of 1/8 between -1 and 1, so that each order of a product's sum gives the same
// f32. Integers are 0 to 6; those named which... are (index / 8) mod 8.
ir::Tensors exact_inputs(const ir::Graph& graph, std::uint64_t seed);

// Expects the results of a case near those of the interpreter. Infinities must be equal.
void expect_near(const EpilogueCase& c, const ir::Graph& graph, const ir::Tensors& got,
                 const ir::Tensors& want);

}  // namespace logitless::test
