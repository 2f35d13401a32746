#include "compiler/exec/cuda/loop_text.h"

#include <algorithm>

#include "core/hash.h"

namespace logitless::ir {
namespace {

// Indices below fit into 32 bits with a margin.
constexpr std::int64_t kNarrow = std::int64_t{1} << 31;

// Returns the number of elements from the view's first to its last, inclusive.
std::int64_t extent_of(const View& view, const std::vector<std::int64_t>& shape) {
  std::int64_t extent = 1;
  for (std::size_t d = 0; d < shape.size(); ++d)
    extent += (shape[d] - 1) * std::abs(view.strides[d]);
  return extent;
}

std::int64_t inner_stride(const View& view) {
  return view.strides.empty() ? 0 : view.strides.back();
}

constexpr std::int64_t kAccess = 16;  // bytes

// Returns whether items of `width` elements are aligned for accesses of up to 16 bytes.
bool is_aligned(const View& view, std::int64_t width, std::span<const std::int64_t> alignments) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t access = std::min(width * size, kAccess);
  return view.offset * size % access == 0 &&
         alignments[static_cast<std::size_t>(view.buffer)] % access == 0;
}

// Returns whether no stride is 0, so that the memory is as large as the index space.
bool is_whole(const View& view) {
  return std::find(view.strides.begin(), view.strides.end(), 0) == view.strides.end();
}

bool spans_all(const View& view, const std::vector<std::int64_t>& shape) {
  return view.strides == contiguous_strides(shape);
}

}  // namespace

void Lines::put(const std::string& line) {
  const bool directive = line.starts_with('#');
  if (line.starts_with('}')) --depth_;
  if (!directive) text_.append(static_cast<std::size_t>(2 * (depth_ + 1)), ' ');
  text_ += line;
  text_ += '\n';
  if (line.ends_with('{')) ++depth_;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t count_of(const std::vector<std::int64_t>& shape, std::size_t first, std::size_t last) {
  std::int64_t n = 1;
  for (std::size_t d = first; d < last; ++d) n *= shape[d];
  return n;
}

Vectors choose_vectors(const Pointwise& loop, std::span<const std::int64_t> alignments,
                       bool stores) {
  constexpr std::int64_t kMost = 8;  // elements
  const std::size_t rank = loop.shape.size();
  if (rank == 0) return {};
  std::vector<const View*> views;
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) views.push_back(&leaf.view);
  }
  if (stores) views.push_back(&loop.store.view);
  // Takes the largest element type among the views of full size: repeated elements come from
  // caches.
  std::int64_t largest = 0, whole = 0;
  for (const View* view : views) {
    if (inner_stride(*view) != 1) continue;
    const auto size = static_cast<std::int64_t>(size_of(view->dtype));
    largest = std::max(largest, size);
    if (is_whole(*view)) whole = std::max(whole, size);
  }
  if (largest == 0) return {};
  if (whole > 0) largest = whole;
  const std::int64_t all = count_of(loop.shape, 0, rank);
  for (std::int64_t width = std::min(kAccess / largest, kMost); width > 1; width /= 2) {
    const int n = static_cast<int>(width);
    const bool inner =
        loop.shape.back() % width == 0 &&
        std::all_of(views.begin(), views.end(), [&](const View* view) {
          return inner_stride(*view) != 1 ||
                 (is_aligned(*view, width, alignments) &&
                  std::all_of(view->strides.begin(), view->strides.end() - 1,
                              [&](std::int64_t stride) { return stride % width == 0; }));
        });
    if (inner) return {n, false};
    const bool flat =
        stores && all % width == 0 && spans_all(loop.store.view, loop.shape) &&
        std::all_of(views.begin(), views.end(), [&](const View* view) {
          return !spans_all(*view, loop.shape) || is_aligned(*view, width, alignments);
        });
    if (flat) return {n, true};
  }
  return {};
}

std::string_view cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float";
    case DType::f64:
      return "double";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "long long";
    case DType::i32:
      return "int";
    case DType::i8:
      return "signed char";
  }
  throw InternalError("a dtype without a type in CUDA");
}

LoopText::LoopText(const Pointwise& loop, Vectors vectors)
    : loop_(loop), registers_(loop), vectors_(vectors) {
  // Negative strides need signed indices, and only the wide ones are signed.
  const auto reaches = [&](const View& view) {
    return extent_of(view, loop.shape) >= kNarrow ||
           std::any_of(view.strides.begin(), view.strides.end(),
                       [](std::int64_t stride) { return stride < 0; });
  };
  wide_index_ = count_of(loop.shape, 0, loop.shape.size()) >= kNarrow || reaches(loop.store.view);
  mark_used();
  tiles_.resize(loop.leaves.size());
  parameter_of_.assign(loop.leaves.size(), -1);
  for (std::size_t i = 0; i < loop.leaves.size(); ++i) {
    const Pointwise::Leaf& leaf = loop.leaves[i];
    if (leaf.kind != Pointwise::Leaf::Kind::memory || !used_[i]) continue;
    wide_index_ = wide_index_ || reaches(leaf.view);
    const KernelArgument argument{
        KernelArgument::Kind::address, leaf.view.buffer,
        leaf.view.offset * static_cast<std::int64_t>(size_of(leaf.view.dtype))};
    const std::string_view type = cuda_type(leaf.view.dtype);
    const auto same = std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& p) {
      return p.type == type && p.argument.buffer == argument.buffer &&
             p.argument.offset == argument.offset;
    });
    parameter_of_[i] = static_cast<int>(same - parameters_.begin());
    if (same == parameters_.end()) parameters_.push_back({type, argument});
  }
}

void LoopText::mark_used() {
  const std::size_t leaves = loop_.leaves.size();
  used_.assign(leaves + loop_.steps.size(), false);
  used_[static_cast<std::size_t>(RegisterText(loop_).result())] = true;
  for (std::size_t s = loop_.steps.size(); s-- > 0;) {
    if (!used_[leaves + s]) continue;
    for (const int r : {loop_.steps[s].a, loop_.steps[s].b, loop_.steps[s].c}) {
      if (r >= 0) used_[static_cast<std::size_t>(r)] = true;
    }
  }
}

std::string LoopText::number(std::int64_t n) const { return concat(n, wide_index_ ? "ll" : "u"); }

std::string LoopText::parameters() const {
  std::string out;
  for (std::size_t p = 0; p < parameters_.size(); ++p)
    out += concat("const ", parameters_[p].type, "* a", p, ", ");
  for (std::size_t i = 0; i < loop_.leaves.size(); ++i) {
    if (used_[i] && loop_.leaves[i].kind == Pointwise::Leaf::Kind::first) {
      out += "long long first, ";
      break;
    }
  }
  return out;
}

std::vector<KernelArgument> LoopText::arguments() const {
  std::vector<KernelArgument> out;
  for (const Parameter& p : parameters_) out.push_back(p.argument);
  for (std::size_t i = 0; i < loop_.leaves.size(); ++i) {
    if (used_[i] && loop_.leaves[i].kind == Pointwise::Leaf::Kind::first) {
      out.push_back({KernelArgument::Kind::first, -1, 0});
      break;
    }
  }
  return out;
}

void LoopText::coordinates(Lines& lines, std::size_t first, std::size_t last,
                           const std::string& flat) const {
  std::int64_t below = 1;
  for (std::size_t d = last; d-- > first;) {
    std::string value = below == 1 ? flat : concat(flat, " / ", number(below));
    if (d > first) value = concat(value, " % ", number(loop_.shape[d]));
    lines.add("const ", index(), " i", d, " = ", value, ";");
    below *= loop_.shape[d];
  }
}

LoopText::Read LoopText::read_of(const View& view) const {
  if (vectors_.width == 1) return Read::one;
  if (vectors_.flat) {
    if (spans_all(view, loop_.shape)) return Read::vector;
    const bool same = std::all_of(view.strides.begin(), view.strides.end(),
                                  [](std::int64_t stride) { return stride == 0; });
    return same ? Read::one : Read::each;
  }
  const std::int64_t stride = inner_stride(view);
  return stride == 1 ? Read::vector : stride == 0 ? Read::one : Read::each;
}

// Returns "i0 * 768u + i1", with `element` times the innermost stride added.
std::string LoopText::offset(const View& view, std::size_t first, std::size_t last,
                             std::string_view element) const {
  std::string out;
  for (std::size_t d = first; d < last; ++d) {
    if (view.strides[d] == 0) continue;
    if (!out.empty()) out += " + ";
    const bool inner = d + 1 == loop_.shape.size() && !element.empty();
    const std::string at = inner ? concat("(i", d, " + ", element, ")") : concat("i", d);
    out += view.strides[d] == 1 ? at : concat(at, " * ", number(view.strides[d]));
  }
  return out.empty() ? "0" : out;
}

void LoopText::read_from_tile(std::size_t leaf, std::string tile) {
  tiles_[leaf] = std::move(tile);
}

std::string LoopText::address_of(std::size_t leaf) const {
  return concat("a", parameter_of_[leaf], " + (",
                offset(loop_.leaves[leaf].view, 0, loop_.shape.size(), {}), ")");
}

void LoopText::declare_loads(Lines& lines, int copies) const {
  const std::string copy = copies > 1 ? concat("[", copies, "]") : "";
  for (std::size_t i = 0; i < loop_.leaves.size(); ++i) {
    if (parameter_of_[i] < 0) continue;
    const View& view = loop_.leaves[i].view;
    const std::string width = read_of(view) == Read::one ? "" : concat("[", vectors_.width, "]");
    lines.add(cuda_type(view.dtype), " x", i, copy, width, ";");
  }
  if (loop_.store.accumulate && !loop_.reduction)
    lines.add(stored_type(), " old", copy, "[", vectors_.width, "];");
}

void LoopText::loads(Lines& lines, const std::string& copy, const std::string& flat) const {
  const std::size_t rank = loop_.shape.size();
  struct Each {
    std::string to, from;
    const View* view;
  };
  std::vector<Each> each;
  const auto read = [&](const std::string& to, const std::string& from, const View& view,
                        Read how) {
    if (how == Read::each) return each.push_back({to, from, &view});
    const std::string at = how == Read::vector && vectors_.flat ? flat : offset(view, 0, rank, {});
    if (how == Read::vector) {
      lines.add("load(", to, ", ", from, " + (", at, "));");
    } else {
      lines.add(to, " = ", from, "[", at, "];");
    }
  };
  for (std::size_t i = 0; i < loop_.leaves.size(); ++i) {
    if (parameter_of_[i] < 0) continue;
    if (!tiles_[i].empty()) {
      if (vectors_.width == 1) {
        lines.add("x", i, copy, " = ", tiles_[i], "[q][p];");
      } else {
        lines.add("#pragma unroll");
        lines.add("for (int j = 0; j < ", vectors_.width, "; ++j) x", i, copy, "[j] = ", tiles_[i],
                  "[q + j][p];");
      }
      continue;
    }
    const View& view = loop_.leaves[i].view;
    read(concat("x", i, copy), concat("a", parameter_of_[i]), view, read_of(view));
  }
  if (loop_.store.accumulate && !loop_.reduction) {
    const Read how = read_of(loop_.store.view);
    read(concat("old", copy, how == Read::one ? "[0]" : ""), "to", loop_.store.view, how);
  }
  if (each.empty()) return;
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", vectors_.width, "; ++j) {");
  if (vectors_.flat) coordinates(lines, 0, rank, concat("(", flat, " + j)"));
  for (const Each& e : each)
    lines.add(e.to, "[j] = ", e.from, "[",
              offset(*e.view, 0, rank, vectors_.flat ? std::string_view() : "j"), "];");
  lines.add("}");
}

std::string LoopText::steps(Lines& lines, const std::string& copy, const std::string& flat) const {
  const std::size_t rank = loop_.shape.size(), leaves = loop_.leaves.size();
  bool placed = !vectors_.flat;
  for (std::size_t i = 0; i < leaves; ++i) {
    const Pointwise::Leaf& leaf = loop_.leaves[i];
    if (!used_[i] || leaf.kind == Pointwise::Leaf::Kind::constant) continue;
    std::string value;
    if (leaf.kind == Pointwise::Leaf::Kind::first) {
      value = "first";
    } else if (leaf.kind == Pointwise::Leaf::Kind::iota) {
      if (!placed) coordinates(lines, 0, rank, concat("(", flat, " + j)"));
      placed = true;
      const bool inner =
          !vectors_.flat && vectors_.width > 1 && static_cast<std::size_t>(leaf.dim) + 1 == rank;
      value = concat("(i", leaf.dim, inner ? " + j)" : ")");
    } else {
      value = concat("number(x", i, copy, read_of(leaf.view) == Read::one ? ")" : "[j])");
    }
    const std::string_view type = registers_.type(static_cast<int>(i));
    lines.add("const ", type, " r", i, " = (", type, ")", value, ";");
  }
  for (std::size_t s = 0; s < loop_.steps.size(); ++s) {
    if (!used_[leaves + s]) continue;
    lines.add("const ", registers_.type(static_cast<int>(leaves + s)), " r", leaves + s, " = ",
              registers_.step(s), ";");
  }
  return registers_.name(registers_.result());
}

std::string_view LoopText::stored_type() const { return cuda_type(loop_.store.view.dtype); }

std::string LoopText::converted(const std::string& value) const {
  switch (loop_.store.view.dtype) {
    case DType::bf16:
      return concat("to_bf16((float)(", value, "))");
    case DType::f16:
      return concat("to_f16((float)(", value, "))");
    default:
      return concat("(", stored_type(), ")(", value, ")");
  }
}

std::string LoopText::stored(const std::string& old, const std::string& value) const {
  return converted(loop_.store.accumulate ? registers_.added(old, value) : value);
}

std::string LoopText::stored_offset(std::size_t first, std::size_t last) const {
  return offset(loop_.store.view, first, last, {});
}

void LoopText::store_one(Lines& lines, const std::string& at, const std::string& value) const {
  lines.add("to[", at, "] = ", stored(concat("to[", at, "]"), value), ";");
}

bool LoopText::stores_vectors() const { return read_of(loop_.store.view) == Read::vector; }

GeneratedKernel make_kernel(const std::string& kind, const std::string& comment,
                            const std::string& parameters, const Lines& body, unsigned block,
                            Blocks blocks) {
  std::string bounds = blocks.of_sm > 1 ? concat(block, ", ", blocks.of_sm) : concat(block);
  if (blocks.of_cluster > 1) bounds += concat(") __cluster_dims__(", blocks.of_cluster, ", 1, 1");
  const std::string signature = concat("(", parameters, ") {\n", body.text(), "}\n");
  GeneratedKernel kernel;
  kernel.entry =
      concat(kind, "_", content_name(concat(kind, bounds, comment, signature)).substr(0, 16));
  kernel.source = concat("// ", comment, "\nextern \"C\" __global__ void __launch_bounds__(",
                         bounds, ")\n", kernel.entry, signature);
  kernel.shape.block = block;
  return kernel;
}

}  // namespace logitless::ir
