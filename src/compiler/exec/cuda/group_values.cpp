#include "compiler/exec/cuda/group_values.h"

#include <algorithm>

#include "core/check.h"

namespace logitless::ir {

int GroupValues::number_of(std::string_view type, const std::string& text,
                           const std::vector<int>& operands, bool costly) {
  const auto [found, added] =
      numbers_.emplace(concat(type, " ", text), static_cast<int>(values_.size()));
  if (added) {
    const bool made_costly = std::any_of(operands.begin(), operands.end(),
                                         [&](int operand) { return is_costly(operand); });
    values_.push_back({std::string(type), text, "", operands, costly || made_costly});
  }
  return found->second;
}

std::string GroupValues::name(int value) { return concat("v", value); }

void GroupValues::declare(Lines& lines, int value) {
  if (!declared_.insert(value).second) return;
  const bool held = of_elements_ && !at(value).held.empty();
  if (!held) {
    for (const int operand : at(value).operands) declare(lines, operand);
  }
  lines.add("const ", at(value).type, " ", name(value), " = ",
            held ? at(value).held : at(value).text, ";");
}

}  // namespace logitless::ir
