// What the parser reads inside the parentheses of a key. Everything throws InvalidArgument with the
// place in the text.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

class TextReader {
 public:
  virtual int dimension() = 0;                // one of 0 to 1000
  virtual std::vector<int> dimensions() = 0;  // any number of them, with commas between
  virtual Shape sizes() = 0;                  // up to the closing parenthesis
  virtual double real() = 0;
  virtual std::int64_t integer() = 0;         // not negative
  virtual std::int64_t signed_integer() = 0;  // of 53 bits
  virtual DType gradient_dtype() = 0;         // f32, bf16, f16, or i8 of "none"
  virtual void symbol(std::string_view wanted) = 0;
  virtual bool accept(std::string_view wanted) = 0;  // reads it if it comes next

 protected:
  ~TextReader() = default;
};

}  // namespace logitless::ir
