// The parser's interface for the contents of a key's parentheses. All functions throw
// InvalidArgument with the position in the text.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

class TextReader {
 public:
  virtual int dimension() = 0;                // a number from 0 to 1000
  virtual std::vector<int> dimensions() = 0;  // any number of them, separated by commas
  virtual Shape sizes() = 0;                  // up to the closing parenthesis
  virtual double real() = 0;
  virtual std::int64_t integer() = 0;         // non-negative
  virtual std::int64_t signed_integer() = 0;  // within 53 bits
  virtual DType gradient_dtype() = 0;         // f32, bf16, f16, or i8 for "none"
  virtual void symbol(std::string_view wanted) = 0;
  virtual bool accept(std::string_view wanted) = 0;  // consumes it if it comes next

 protected:
  ~TextReader() = default;
};

}  // namespace logitless::ir
