// The table of operations, collected from the families.
#include <initializer_list>

#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ops/families.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

std::vector<const Operation*> table() {
  const std::initializer_list<std::span<const Operation>> families = {
      pointwise_operations(), shape_operations(),     reduce_operations(),    contract_operations(),
      index_operations(),     attention_operations(), scan_operations(),      sort_operations(),
      loop_operations(),      head_operations(),      fused_dot_operations(), extern_operations()};
  std::size_t count = 0;
  for (const auto& family : families) count += family.size();
  std::vector<const Operation*> rows(count, nullptr);
  for (const auto& family : families) {
    for (const Operation& row : family) {
      const auto at = static_cast<std::size_t>(row.op);
      check(at < count && rows[at] == nullptr, "operations: an Op without a row, or two rows of ",
            row.name);
      rows[at] = &row;
    }
  }
  return rows;
}

const std::vector<const Operation*>& rows() {
  static const std::vector<const Operation*> all = table();
  return all;
}

}  // namespace

const Operation& row_of(Op op) { return *rows()[static_cast<std::size_t>(op)]; }

std::span<const Operation* const> operations() { return rows(); }

std::string spelling_of(Op op, const Attributes& attributes) {
  const Operation& row = row_of(op);
  return row.spelling != nullptr ? row.spelling(attributes) : std::string(row.name);
}

std::vector<Value> compiled_gradient(Derivation& derivation) {
  throw InvalidArgument(concat("differentiate: ", name_of(derivation.n.op),
                               " has no gradient rule; differentiate before compiling"));
}

std::optional<Chunked> cut_as_result(const CutNode& c, const Split& result) {
  return cut(result, c.each(part(result)));
}
Lead cut_as_operand(const CutNode&, std::size_t, const Split& operand) { return {operand}; }

int linear(const Linearity&) { return 1; }

std::string_view name_of(Op op) { return row_of(op).name; }

}  // namespace logitless::ir
