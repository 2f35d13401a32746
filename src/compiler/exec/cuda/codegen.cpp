#include "compiler/exec/cuda/codegen.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/memory_order.h"
#include "compiler/exec/cuda/prelude.h"
#include "compiler/plan/integers.h"
#include "kernels/device/tile_engine.h"

namespace logitless::ir {
namespace {

// Adds 0 to the result: a sum starts from 0, so that one of a single -0 is 0.
void add_zero(Pointwise& loop) {
  const int leaves = static_cast<int>(loop.leaves.size());
  const auto move = [&](int& reg) { reg += reg >= leaves ? 1 : 0; };
  for (Pointwise::Step& step : loop.steps) {
    for (int* reg : {&step.a, &step.b, &step.c}) move(*reg);
  }
  move(loop.store.source);
  Pointwise::Leaf zero;
  zero.kind = Pointwise::Leaf::Kind::constant;
  loop.leaves.push_back(zero);
  Pointwise::Step sum;
  sum.function = Function::add;
  sum.a = loop.store.source;
  sum.b = leaves;
  loop.steps.push_back(sum);
  loop.store.source = static_cast<int>(loop.leaves.size() + loop.steps.size()) - 1;
}

// Removes the reduced dimensions, for reductions of one element or of none.
Pointwise without_reduced(Pointwise loop) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced);
  const std::size_t begin = loop.columns ? 0 : rank - reduced;
  const auto erase = [&](std::vector<std::int64_t>& list) {
    const auto at = list.begin() + static_cast<std::ptrdiff_t>(begin);
    list.erase(at, at + static_cast<std::ptrdiff_t>(reduced));
  };
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) {
      erase(leaf.view.strides);
    } else if (leaf.kind == Pointwise::Leaf::Kind::iota) {
      const auto dim = static_cast<std::size_t>(leaf.dim);
      if (dim >= begin + reduced) {
        leaf.dim -= loop.reduced;
      } else if (dim >= begin) {
        leaf = {};
        leaf.kind = Pointwise::Leaf::Kind::constant;
      }
    }
  }
  erase(loop.store.view.strides);
  erase(loop.shape);
  loop.reduction = false;
  loop.reduced = 0;
  return loop;
}

Pointwise of_nothing(const Pointwise& loop) {
  Pointwise out = without_reduced(loop);
  Pointwise::Leaf leaf;
  leaf.kind = Pointwise::Leaf::Kind::constant;
  const DType dtype = loop.store.view.dtype;
  leaf.number = loop.reduce == Reduce::sum       ? 0.0
                : loop.reduce == Reduce::product ? 1.0
                : is_index(dtype)                ? -most_of(dtype)
                                                 : -std::numeric_limits<double>::infinity();
  out.leaves = {leaf};
  out.steps.clear();
  out.store.source = 0;
  return out;
}

// Simplifies a loop for the kernels: their reductions have at least two elements, their column
// reductions have columns, and neighbouring threads read neighbouring elements.
Pointwise simplified(const Pointwise& loop) {
  if (!loop.reduction) return loop;
  Pointwise out = loop;
  if (out.reduced == static_cast<int>(out.shape.size())) out.columns = false;
  const std::size_t rank = out.shape.size(), reduced = static_cast<std::size_t>(out.reduced);
  const std::int64_t count =
      out.columns ? count_of(out.shape, 0, reduced) : count_of(out.shape, rank - reduced, rank);
  if (count == 0) return of_nothing(out);
  if (count == 1) {
    if (out.reduce == Reduce::sum && !holds_integers(out, out.store.source)) add_zero(out);
    return without_reduced(std::move(out));
  }
  return reduction_in_memory_order(out);
}

bool is_empty(const Pointwise& loop) { return count_of(loop.shape, 0, loop.shape.size()) == 0; }

}  // namespace

KernelArgument stored_argument(const Pointwise& loop) {
  const View& view = loop.store.view;
  return {KernelArgument::Kind::address, view.buffer,
          view.offset * static_cast<std::int64_t>(size_of(view.dtype))};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string out;
  for (const std::int64_t n : shape) out += concat(out.empty() ? "" : ", ", n);
  return concat("[", out, "]");
}

std::vector<GeneratedKernel> generate(const Pointwise& given,
                                      std::span<const std::int64_t> alignments) {
  const Pointwise loop = simplified(given);
  if (is_empty(loop)) return {};
  if (!loop.reduction) {
    std::optional<GeneratedKernel> tiles = tile_kernel(loop, alignments);
    return {tiles ? std::move(*tiles) : map_kernel(loop, alignments)};
  }
  return loop.columns ? column_kernels(loop, alignments) : row_kernels(loop, alignments);
}

std::int64_t pointwise_scratch_bytes(const Pointwise& given) {
  const Pointwise loop = simplified(given);
  if (!loop.reduction || is_empty(loop)) return 0;
  const Parts parts = loop.columns ? column_parts(loop) : row_parts(loop);
  if (parts.count == 1) return 0;
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced);
  const std::int64_t kept =
      loop.columns ? count_of(loop.shape, reduced, rank) : count_of(loop.shape, 0, rank - reduced);
  return parts.count * kept * state_bytes(loop);
}

std::string module_source(std::span<const GeneratedKernel> kernels) {
  std::map<std::string, const GeneratedKernel*> distinct;
  std::string out = concat(prelude_machine(), prelude());
  const bool clusters = std::any_of(kernels.begin(), kernels.end(), [](const GeneratedKernel& k) {
    return k.source.find("cluster") != std::string::npos;
  });
  if (clusters) out += concat(prelude_cluster_machine(), prelude_cluster());
  const auto engine = std::find_if(kernels.begin(), kernels.end(), [](const GeneratedKernel& k) {
    return k.product_engine.has_value();
  });
  if (engine != kernels.end())  // a program has one: that of its target
    out += engine->product_engine == ProductEngine::sm90 ? cuda::sm90_engine_text()
                                                         : cuda::sm80_engine_text();
  for (const GeneratedKernel& kernel : kernels) {
    const auto [at, added] = distinct.emplace(kernel.entry, &kernel);
    check(at->second->source == kernel.source, "two kernels are called ", kernel.entry);
    if (added) out += concat("\n", kernel.source);
  }
  return out;
}

std::vector<std::int64_t> buffer_alignments(const Program& program) {
  constexpr std::int64_t kExternal = 16;
  std::vector<std::int64_t> out;
  for (const Buffer& buffer : program.buffers)
    out.push_back(buffer.place == Place::external ? kExternal : program.alignment);
  return out;
}

std::vector<std::int64_t> buffer_alignments(const LoopRun& loop, const Program& body,
                                            std::span<const std::int64_t> outer) {
  const auto outside = [&](int buffer) { return outer[static_cast<std::size_t>(buffer)]; };
  std::vector<std::int64_t> out;
  for (const Buffer& buffer : body.buffers) {
    if (buffer.place != Place::external) {
      out.push_back(loop.arena < 0 ? body.alignment
                                   : std::gcd(body.alignment, outside(loop.arena)));
      continue;
    }
    const LoopRun::Slice& slice = loop.slices[static_cast<std::size_t>(buffer.slot)];
    out.push_back(std::gcd(std::gcd(outside(slice.outer), slice.offset), slice.step * loop.chunk));
  }
  return out;
}

}  // namespace logitless::ir
