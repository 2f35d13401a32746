// Memory operands of the stages of a row group, and texts that kernels of row groups share.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/exec/cuda/step_text.h"
#include "compiler/plan/group_rows.h"

namespace logitless::ir {

class StageReads {
 public:
  explicit StageReads(const RowGroup& group);

  enum class Read { element, row, column, one };
  Read read_of(std::size_t stage, const View& v) const;

  // The views that are loaded: one for each address and dtype, parameters a0, a1, ...
  const std::vector<View>& sources() const { return sources_; }
  // Those with elements [rows, columns], and those with rows [rows], each loaded once.
  const std::vector<View>& elements() const { return elements_; }
  const std::vector<View>& rows() const { return rows_; }
  std::size_t source_of(const View& v) const;
  std::size_t element_of(const View& v) const;
  std::size_t row_of(const View& v) const;

  bool is_forwarded(std::size_t stage) const { return forwarded_.contains(stage); }
  bool takes_first() const { return takes_first_; }
  // Returns whether indices of elements do not fit into 32 bits.
  bool wide_index() const { return wide_index_; }

  // Appends the parameters of the loads, `const bf16* __restrict__ a0`, and of "first".
  void add_parameters(std::string& parameters, std::vector<KernelArgument>& arguments) const;

 private:
  const RowGroup& g_;
  std::vector<View> sources_, elements_, rows_;
  std::set<std::size_t> forwarded_;  // stages whose values later stages read
  bool wide_index_ = false, takes_first_ = false;
};

// Appends one parameter.
void add_parameter(std::string& parameters, std::vector<KernelArgument>& arguments,
                   const std::string& text, const KernelArgument& argument);

// Returns the value converted to a dtype.
std::string converted_to(DType dtype, const std::string& value);
// Returns the value as it would be read back from its buffer, rounded to its dtype.
std::string read_back(DType dtype, const std::string& value);
// Returns the offset of a view's row `row`, "row * 768u".
std::string row_offset(const View& v, const std::string& row, bool wide_index);

}  // namespace logitless::ir
