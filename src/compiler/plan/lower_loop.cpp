// A loop: its body lowered for a whole chunk and for the last, shorter one.
#include <limits>

#include "compiler/analysis/split.h"
#include "compiler/plan/lowering.h"
#include "core/check.h"

namespace logitless::ir {

namespace {

// The maximum of nothing.
double lowest(DType dtype) {
  if (dtype == DType::i32) return static_cast<double>(std::numeric_limits<std::int32_t>::min());
  if (dtype == DType::i64) return static_cast<double>(std::numeric_limits<std::int64_t>::min());
  return -std::numeric_limits<double>::infinity();
}

}  // namespace

void Lowering::emit_loop(int id) {
  const Node& n = g_.node(id);
  const Loop& loop = *n.attributes.loop;
  LoopRun run;
  run.extent = loop.extent;
  run.chunk = loop.chunk;
  std::vector<View> operands, results;
  for (const Value v : n.operands) operands.push_back(memory_of(v));
  for (std::size_t i = 0; i < n.results.size(); ++i) {
    const Value v{id, static_cast<std::int32_t>(i)};
    results.push_back(result_of(v));
    const Loop::Out kind = loop.outputs[i].kind;
    if (kind != Loop::Out::stack)
      emit_fill(results.back(), kind == Loop::Out::sum ? 0.0 : lowest(results.back().dtype));
  }
  const auto slice = [&](const View& outer, bool cut, int axis, std::int64_t factor, int inner) {
    const auto size = static_cast<std::int64_t>(size_of(outer.dtype));
    LoopRun::Slice s;
    s.inner = inner;
    s.outer = outer.buffer;
    s.offset = outer.offset * size;
    s.step = cut ? outer.strides[static_cast<std::size_t>(axis)] * factor * size : 0;
    return s;
  };
  const auto lowered = [&](std::int64_t chunk, std::vector<LoopRun::Slice>& slices) {
    const Graph body = bind(loop.body, {{loop.symbol, chunk}});
    Lowering inner(body, threads_);
    const std::vector<int> parameters = body.parameters();
    View first;
    first.dtype = DType::i64;
    first.buffer = inner.add_buffer(Place::external, 8, "first");
    inner.set_parameter(parameters[0], first);
    for (std::size_t i = 0; i < operands.size(); ++i) {
      View view = operands[i];
      const Loop::Input& how = loop.inputs[i];
      const int buffer = inner.add_buffer(Place::external, 0,
                                          p_.buffers[static_cast<std::size_t>(view.buffer)].name);
      slices.push_back(slice(view, how.kind == Loop::In::slice, how.axis, how.factor, buffer));
      view.buffer = buffer;
      view.offset = 0;
      view.shape = sizes_of(body.node(parameters[i + 1]).results[0]);
      inner.set_parameter(parameters[i + 1], view);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      View view = results[i];
      const Loop::Result& how = loop.outputs[i];
      const bool stack = how.kind == Loop::Out::stack;
      const int buffer = inner.add_buffer(Place::external, 0,
                                          p_.buffers[static_cast<std::size_t>(view.buffer)].name);
      slices.push_back(slice(view, stack, how.axis, how.factor, buffer));
      view.buffer = buffer;
      view.offset = 0;
      view.shape = sizes_of(body.type(body.outputs()[i].value));
      constexpr Target::Kind kKinds[] = {Target::Kind::write, Target::Kind::sum, Target::Kind::max,
                                         Target::Kind::lse};
      inner.set_target(i, {view, kKinds[static_cast<int>(how.kind)]});
    }
    return std::make_shared<const Program>(inner.run());
  };
  run.first = 0;  // the first buffer of the body
  run.body = lowered(loop.chunk, run.slices);
  const std::int64_t rest = loop.extent % loop.chunk;
  if (rest != 0) {
    std::vector<LoopRun::Slice> same;
    run.tail = lowered(rest, same);
    check(same.size() == run.slices.size(), "lower: the tail of a loop has other operands");
  }
  const double whole = static_cast<double>(loop.extent / loop.chunk);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (loop.outputs[i].kind != Loop::Out::stack)
      p_.merged_bytes += static_cast<double>(loop.rounds() * bytes_of(n.results[i]));
  }
  p_.multiply_adds += whole * run.body->multiply_adds + (run.tail ? run.tail->multiply_adds : 0.0);
  const std::int64_t arena = std::max(run.body->arena_bytes, run.tail ? run.tail->arena_bytes : 0);
  if (arena > 0)
    run.arena = add_buffer(Place::arena, arena, name_of_node(id) + " chunk",
                           std::max(run.body->value_bytes, run.tail ? run.tail->value_bytes : 0));
  push(id, std::move(run));
}

}  // namespace logitless::ir
