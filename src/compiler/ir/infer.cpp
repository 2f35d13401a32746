// Infers the types of results from operands and attributes: dispatches to the operations' rules and
// checks common conditions.
#include <set>

#include "compiler/ir/typing.h"
#include "compiler/ops/op.h"

namespace logitless::ir {

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

void Typing::count(std::size_t wanted) const {
  expect(operands.size() == wanted, "expected ", wanted, " operands, got ", operands.size());
}
void Typing::index(int i) const {
  expect(is_index(in(i).dtype), "operand ", i, " is ", in(i), ", expected i32 or i64");
}
void Typing::floating(int i) const {
  expect(is_float(in(i).dtype), "operand ", i, " is ", in(i), ", expected floats");
}
void Typing::dimensions(const std::vector<int>& dims, int rank, const char* name) const {
  std::set<int> seen;
  for (const int d : dims) {
    expect(d >= 0 && d < rank, name, " names dimension ", d, " of ", rank);
    expect(seen.insert(d).second, name, " names dimension ", d, " twice");
  }
}
void Typing::axis(int rank) const {
  expect(a.axis >= 0 && a.axis < rank, "axis is ", a.axis, ", expected 0 to ", rank - 1);
}
DType Typing::wider(DType natural) const {
  const DType wanted = a.type.dtype;
  if (wanted == natural) return natural;
  const bool ok = is_float(natural) && natural != DType::f64 &&
                  (wanted == DType::f64 || (wanted == DType::f32 && size_of(natural) == 2));
  expect(ok, "result of ", name_of(natural), " operands cannot be ", name_of(wanted));
  return wanted;
}

std::vector<Type> infer_types(Op op, const std::vector<const Type*>& operands,
                              const Attributes& attributes) {
  const std::string what = spelling_of(op, attributes);
  return row_of(op).infer({what, operands, attributes});
}

}  // namespace logitless::ir
