// Writes programs of one matrix product %z [N, V] and of loops that read it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "logitless/dtype.h"

namespace logitless::test {

class EpilogueProgram {
 public:
  // The layouts of the product's operands h and w.
  enum class Operands : std::uint8_t {
    rows,         // h [N, D], w [V, D]
    depth_first,  // w [D, V]
    slices,       // columns of a larger h, rows of a larger w
  };
  explicit EpilogueProgram(DType dtype, Operands operands = Operands::rows,
                           DType result = DType::f32) {
    const std::string d(name_of(dtype)), z(name_of(result));
    const bool slices = operands == Operands::slices, depth = operands == Operands::depth_first;
    parameters_ = "%h: " + d + (slices ? "[N, D + 16]" : "[N, D]") + ", %w: " + d +
                  (slices  ? "[V + 2, D]"
                   : depth ? "[D, V]"
                           : "[V, D]");
    if (slices)
      body_ =
          "  %hs = slice %h begin(0, 8) end(N, D + 8)\n  %ws = slice %w begin(2, 0) end(V + 2, "
          "D)\n";
    body_ += concat("  %z = dot ", slices ? "%hs, %ws" : "%h, %w",
                    depth ? " contract(1; 0) : " : " contract(1; 1) : ", z, "[N, V]\n");
  }

  std::string text() const {
    return concat("graph g(", parameters_, ") {\n", body_, "  return ", results_, "\n}\n");
  }

  // Adds a parameter and returns its name.
  std::string parameter(DType dtype, const std::string& shape, const std::string& name = "p") {
    const std::string made = concat("%", name, next_++);
    parameters_ += concat(", ", made, ": ", name_of(dtype), shape);
    return made;
  }
  // Adds a statement and returns the name of its value.
  std::string statement(const std::string& expression) {
    const std::string made = concat("%v", next_++);
    body_ += concat("  ", made, " = ", expression, "\n");
    return made;
  }
  void result(const std::string& value) {
    results_ += concat(results_.empty() ? "" : ", ", "r", results_count_++, ": ", value);
  }

  // Adds an operation on values, whose type the IR infers.
  std::string add(const std::string& operation, const std::vector<std::string>& operands) {
    std::string list;
    for (const std::string& v : operands) list += concat(list.empty() ? "" : ", ", v);
    return statement(concat(operation, " ", list));
  }
  std::string cast(const std::string& value, DType dtype, const std::string& shape = "[N, V]") {
    return statement(concat("cast ", value, " : ", name_of(dtype), shape));
  }
  std::string constant(double number, DType dtype = DType::f32) {
    return statement(concat("constant value(", number, ") : ", name_of(dtype), "[N, V]"));
  }
  std::string iota(int axis, DType dtype) {
    return statement(concat("iota axis(", axis, ") : ", name_of(dtype), "[N, V]"));
  }
  std::string along(const std::string& vector, int dim, DType dtype = DType::f32) {
    return statement(concat("broadcast ", vector, " dims(", dim, ") : ", name_of(dtype), "[N, V]"));
  }
  std::string reduced(const std::string& kind, const std::string& value) {
    return statement(concat("reduce_", kind, " ", value, " dims(1)"));
  }
  std::string wide_lse(const std::string& value) {
    return statement(concat("reduce_lse ", value, " dims(1) : f64[N]"));
  }
  std::string pick(DType index) {
    return statement(concat("pick %z, ", parameter(index, "[N]"), " axis(1)"));
  }

  // Operands [N, V]: a matrix, a number of each row, one of each column, one number.
  std::string element(DType dtype) { return parameter(dtype, "[N, V]"); }
  std::string row(DType dtype) { return along(parameter(dtype, "[N]"), 0, dtype); }
  std::string column(DType dtype, const std::string& name = "p") {
    return along(parameter(dtype, "[V]", name), 1, dtype);
  }
  std::string one(DType dtype) {
    return statement(
        concat("broadcast ", parameter(dtype, "[]"), " dims() : ", name_of(dtype), "[N, V]"));
  }
  // A part of a parameter.
  std::string slice(DType dtype, const std::string& shape, const std::string& begin,
                    const std::string& end) {
    return statement(
        concat("slice ", parameter(dtype, shape), " begin(", begin, ") end(", end, ")"));
  }

 private:
  std::string parameters_, body_, results_;
  int next_ = 0, results_count_ = 0;
};

}  // namespace logitless::test
