// Checks of every device on each of programs(), against the float64 interpreter.
#pragma once

#include <logitless/compiler.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "compiler/ir/interpreter.h"
#include "compiler/programs.h"

namespace logitless::test {

struct ProgramDevice {
  CompileOptions options;  // device or threads
  // Returns the results as execute() of run.h; on a GPU of the last of `times` runs in one memory.
  std::function<ir::Tensors(const CompiledProgram&, const ir::Tensors& inputs, int times,
                            const ir::Tensors& before)>
      run;

  // Returns the options for a program; chunks 0: chosen.
  CompileOptions options_of(const NamedProgram& program, std::size_t budget,
                            std::int64_t chunks = 0) const;
};

// f64, in so many chunks: the chunked graph means the same, and is computed so.
void expect_float64(const ProgramDevice& device, const NamedProgram& program,
                    const std::vector<std::int64_t>& chunks);
// f32, with and without chunks, and the same bits in a second run.
void expect_float32(const ProgramDevice& device, const NamedProgram& program);
// bf16: chunks add no error beyond the order of sums, which are fp32.
void expect_bfloat16(const ProgramDevice& device, const NamedProgram& program);
// f32 and f64 results that are added to existing values.
void expect_added(const ProgramDevice& device, const NamedProgram& program);
// A program of random_program().
void expect_random(const ProgramDevice& device, std::uint64_t seed);

}  // namespace logitless::test
