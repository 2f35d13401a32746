// Programs that chunkers give up on, one each, and random ones. All with gradients.
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
  Bindings sizes;                    // small ones
  // Dimensions of the value that must vanish: no value of so many elements may live in the chunked
  // program. 0: nothing is asked.
  std::int64_t largest = 0;
};

inline void PrintTo(const NamedProgram& program, std::ostream* out) { *out << program.name; }
const std::vector<NamedProgram>& programs();

// A random program with a big region: elementwise functions, reductions, products, picks, views.
Graph random_program(std::uint64_t seed);

}  // namespace logitless::test
