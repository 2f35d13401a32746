// Running programs in tests: random inputs, the interpreter, the executor, and what they differ by.
#pragma once

#include <logitless/compiler.h>
#include <logitless/far_field.h>

#include <map>
#include <string>
#include <vector>

#include "compiler/ir/interpreter.h"

namespace logitless::test {

// Normal numbers for floats, 0 to 6 for indices; rounded to the dtype.
ir::Tensors random_inputs(const ir::Graph& graph, std::uint64_t seed);

// The compiled program's results as doubles. The arena is filled with NaN beforehand and must not
// be left at its ends. Inputs missing a parameter fail. With `far` the head is under it.
// before: what memory of results holds, where that is no NaN.
ir::Tensors execute(const CompiledProgram& program, const ir::Tensors& inputs,
                    FarFieldHead* far = nullptr, const ir::Tensors& before = {});

// Normal numbers for every result that can be added to (CompileOptions::added), and their names.
ir::Tensors random_sums(const CompiledProgram& program, std::uint64_t seed);
std::vector<std::string> names_of(const ir::Tensors& tensors);
// By name, of those in b.
ir::Tensors sum(ir::Tensors a, const ir::Tensors& b);

// The largest |a - b| / (scale + |b|) over all results, scale being the root mean square of b.
double difference(const ir::Tensors& a, const ir::Tensors& b);

}  // namespace logitless::test
