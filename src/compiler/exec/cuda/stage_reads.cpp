#include "compiler/exec/cuda/stage_reads.h"

#include <algorithm>

#include "compiler/exec/cuda/loop_text.h"
#include "compiler/plan/group_rows.h"

namespace logitless::ir {
namespace {

bool same(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.dtype == b.dtype;
}

std::size_t place_in(const std::vector<View>& list, const View& view, bool strides) {
  const auto at = std::find_if(list.begin(), list.end(), [&](const View& v) {
    return same(v, view) && (!strides || v.strides == view.strides);
  });
  return static_cast<std::size_t>(at - list.begin());
}
void put_in(std::vector<View>& list, const View& view, bool strides) {
  if (place_in(list, view, strides) == list.size()) list.push_back(view);
}

// Keeps the stride of the rows alone, whatever the view's shape.
View row_view(View v) {
  v.strides = {v.strides[0]};
  return v;
}

}  // namespace

StageReads::StageReads(const RowGroup& group) : g_(group) {
  std::int64_t most = g_.rows * g_.columns;
  const auto reach = [&](const View& v) {
    most = std::max(most, g_.rows * std::abs(v.strides[0]) + g_.columns);
  };
  for (std::size_t s = 0; s < g_.stages.size(); ++s) {
    const Pointwise& loop = g_.stages[s].loop;
    reach(loop.store.view);
    for (const Pointwise::Leaf& leaf : loop.leaves) {
      takes_first_ = takes_first_ || leaf.kind == Pointwise::Leaf::Kind::first;
      if (leaf.kind != Pointwise::Leaf::Kind::memory || product_of(g_, leaf) != nullptr) continue;
      reach(leaf.view);
      if (const int maker = maker_of(g_, s, leaf); maker >= 0) {
        forwarded_.insert(static_cast<std::size_t>(maker));
        continue;
      }
      put_in(sources_, leaf.view, false);
      const Read how = read_of(s, leaf.view);
      if (how == Read::element) put_in(elements_, leaf.view, true);
      if (how == Read::row) put_in(rows_, row_view(leaf.view), true);
    }
  }
  wide_index_ = most >= std::int64_t{1} << 31;
}

StageReads::Read StageReads::read_of(std::size_t stage, const View& v) const {
  if (kind_of(g_.stages[stage].loop) == StageKind::rows)
    return v.strides[0] == 0 ? Read::one : Read::row;
  if (v.strides[1] == 0) return v.strides[0] == 0 ? Read::one : Read::row;
  return v.strides[0] == 0 ? Read::column : Read::element;
}

std::size_t StageReads::source_of(const View& v) const { return place_in(sources_, v, false); }
std::size_t StageReads::element_of(const View& v) const { return place_in(elements_, v, true); }
std::size_t StageReads::row_of(const View& v) const { return place_in(rows_, row_view(v), true); }

void StageReads::add_parameters(std::string& parameters,
                                std::vector<KernelArgument>& arguments) const {
  for (std::size_t a = 0; a < sources_.size(); ++a) {
    const View& v = sources_[a];
    add_parameter(parameters, arguments,
                  concat("const ", cuda_type(v.dtype), "* __restrict__ a", a),
                  {KernelArgument::Kind::address, v.buffer,
                   v.offset * static_cast<std::int64_t>(size_of(v.dtype))});
  }
  if (takes_first_)
    add_parameter(parameters, arguments, "long long first", {KernelArgument::Kind::first, -1, 0});
}

void add_parameter(std::string& parameters, std::vector<KernelArgument>& arguments,
                   const std::string& text, const KernelArgument& argument) {
  parameters += concat(parameters.empty() ? "" : ", ", text);
  arguments.push_back(argument);
}

std::string converted_to(DType dtype, const std::string& value) {
  if (dtype == DType::bf16) return concat("to_bf16(", value, ")");
  if (dtype == DType::f16) return concat("to_f16(", value, ")");
  return concat("(", cuda_type(dtype), ")(", value, ")");
}
std::string read_back(DType dtype, const std::string& value) {
  if (dtype == DType::f32 || dtype == DType::f64) return value;
  return concat("(float)number(", converted_to(dtype, value), ")");
}
std::string row_offset(const View& v, const std::string& row, bool wide_index) {
  if (v.strides[0] == 0) return "0";
  return concat(row, " * ", v.strides[0], wide_index ? "ll" : "u");
}

}  // namespace logitless::ir
