// Values of a row group's stages: equal ones are computed once where they are close, and read again
// where a stage has kept them.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/exec/cuda/loop_text.h"

namespace logitless::ir {

class GroupValues {
 public:
  // Returns the number of a value by its type and expression, whose operands are other values by
  // their names. costly: it takes as long as an exponential, or an operand does.
  int number_of(std::string_view type, const std::string& text, const std::vector<int>& operands,
                bool costly);
  static std::string name(int value);
  const std::string& type(int value) const { return at(value).type; }
  bool is_costly(int value) const { return at(value).costly; }

  // Names what has the value in the next scopes of elements.
  void hold(int value, const std::string& held) { at(value).held = held; }

  // Opens the body of a loop, where nothing is declared: over elements, or over rows, which cannot
  // read what elements hold.
  void open_scope(bool elements) {
    declared_.clear();
    of_elements_ = elements;
  }
  // Declares a value, and what it is made of, unless the scope has it.
  void declare(Lines& lines, int value);

 private:
  struct Value {
    std::string type, text, held;
    std::vector<int> operands;
    bool costly = false;
  };
  std::vector<Value> values_;
  std::map<std::string, int> numbers_;  // by type and expression
  std::set<int> declared_;
  bool of_elements_ = true;

  const Value& at(int value) const { return values_[static_cast<std::size_t>(value)]; }
  Value& at(int value) { return values_[static_cast<std::size_t>(value)]; }
};

}  // namespace logitless::ir
