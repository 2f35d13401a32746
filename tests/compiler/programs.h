// Programs that other chunkers give up on, and random ones, all with gradients.
#pragma once

#include <logitless/graph.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace logitless::test {

struct NamedProgram {
  std::string name;
  std::function<Graph(DType)> make;  // of this dtype
  Bindings sizes;                    // small sizes
  // Elements of the value that must vanish: no value of so many elements may be live in the chunked
  // program. 0: not checked.
  std::int64_t largest = 0;
};

inline void PrintTo(const NamedProgram& program, std::ostream* out) { *out << program.name; }
const std::vector<NamedProgram>& programs();

// Returns a random program with a big region: elementwise functions, reductions, matrix products,
// picks, views.
Graph random_program(std::uint64_t seed);

// Returns a loss over rows with several reductions, each of which needs the one before, with the
// gradient of its logits [rows, columns].
Graph long_rows(std::int64_t rows, std::int64_t columns, DType dtype);

}  // namespace logitless::test
