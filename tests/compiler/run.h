// Helpers to run programs in tests: random inputs, the interpreter, the executor, and their
// differences.
#pragma once

#include <logitless/compiler.h>
#include <logitless/far_field.h>

#include <map>
#include <string>
#include <vector>

#include "compiler/ir/interpreter.h"

namespace logitless::test {

// Returns normal numbers for floats, 0 to 6 for indices; rounded to the dtype.
ir::Tensors random_inputs(const ir::Graph& graph, std::uint64_t seed);

// Returns the compiled program's results as doubles. The arena is filled with NaN before, and its
// ends must stay. Fails if inputs lack a parameter. With `far` the head runs under it. before:
// contents of the results' memory, else NaN.
ir::Tensors execute(const CompiledProgram& program, const ir::Tensors& inputs,
                    FarFieldHead* far = nullptr, const ir::Tensors& before = {});

// Returns normal numbers for every result that can be added to (CompileOptions::added); then their
// names.
ir::Tensors random_sums(const CompiledProgram& program, std::uint64_t seed);
std::vector<std::string> names_of(const ir::Tensors& tensors);
// Returns the sums by name, of the tensors in b.
ir::Tensors sum(ir::Tensors a, const ir::Tensors& b);

// Returns the largest |a - b| / (scale + |b|) over all results; scale is the root mean square of b.
double difference(const ir::Tensors& a, const ir::Tensors& b);

}  // namespace logitless::test
