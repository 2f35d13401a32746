// The context of a typing rule, and checks of its operands.
#pragma once

#include <string_view>
#include <vector>

#include "compiler/ir/graph.h"
#include "core/check.h"

namespace logitless::ir {

// Formats parts of messages.
inline std::string shown(const Type& type) { return text_of(type); }
inline std::string shown(const Shape& shape) { return text_of(shape); }
template <typename T>
const T& shown(const T& part) {
  return part;
}

bool is_float(DType dtype);

struct Typing {
  std::string_view what;  // prefix of errors
  const std::vector<const Type*>& operands;
  const Attributes& a;

  const Type& in(int i) const { return *operands[static_cast<std::size_t>(i)]; }
  // Parts are texts, numbers, types and shapes, which are formatted only when the error is thrown.
  template <typename... Parts>
  void expect(bool ok, const Parts&... parts) const {
    if (!ok) throw InvalidArgument(concat(what, ": ", shown(parts)...));
  }
  void count(std::size_t wanted) const;
  void index(int i) const;
  void floating(int i) const;
  // Checks that all entries are in [0, rank) and distinct.
  void dimensions(const std::vector<int>& dims, int rank, const char* name) const;
  void axis(int rank) const;
  // Returns the requested dtype, or `natural`; only wider sums are allowed.
  DType wider(DType natural) const;
};

}  // namespace logitless::ir
