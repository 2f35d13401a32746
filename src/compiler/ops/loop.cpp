// loop: a body that runs for each chunk of an axis. Made by passes. Its text contains statements,
// so ir/parse.cpp and ir/print.cpp handle it.
#include <algorithm>

#include "compiler/analysis/split.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/text.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/epilogues.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

using oracle::at;
using oracle::each;
using oracle::Index;

// Returns the size of a cut value along an axis of the full or the chunk's extent.
Dim extent_of(const Dim& axis, std::int64_t factor) { return axis * Dim(factor); }

void check_parameters(const Typing& r, const Loop& loop) {
  const std::vector<int> parameters = loop.body.parameters();
  r.expect(parameters.size() == r.operands.size() + 1 && loop.inputs.size() == r.operands.size(),
           "the body has ", parameters.size(), " parameters and the loop ", r.operands.size(),
           " operands; expected one more");
  r.expect(loop.outputs.size() == loop.body.outputs().size(), "the body has ",
           loop.body.outputs().size(), " results and the loop ", loop.outputs.size());
  const auto parameter = [&](std::size_t i) -> const Type& {
    return loop.body.node(parameters[i]).results[0];
  };
  r.expect(parameter(0) == Type{DType::i64, {}}, "the first parameter of the body is ",
           parameter(0), ", expected i64[]");
  for (std::size_t i = 0; i < r.operands.size(); ++i) {
    Type expected = *r.operands[i];
    const Loop::Input& how = loop.inputs[i];
    if (how.kind == Loop::In::slice) {
      const auto axis = static_cast<std::size_t>(how.axis);
      const Dim all = extent_of(Dim(loop.extent), how.factor);
      r.expect(axis < expected.shape.size(), "operand ", i, " is cut along dimension ", axis);
      if (expected.shape[axis] != all)  // formats only on failure
        r.expect(false, "operand ", i, " is ", expected, ", expected ", all.text(),
                 " along dimension ", axis);
      expected.shape[axis] = extent_of(Dim::symbol(loop.symbol), how.factor);
    }
    if (parameter(i + 1) != expected)
      r.expect(false, "parameter ", i + 1, " of the body is ", parameter(i + 1), ", expected ",
               expected);
  }
}

std::vector<Type> loop_types(const Typing& r) {
  r.expect(r.a.loop != nullptr, "no body");
  const Loop& loop = *r.a.loop;
  r.expect(loop.chunk >= 1 && loop.extent >= 0, "chunks of ", loop.chunk, " of ", loop.extent);
  check_parameters(r, loop);
  std::vector<Type> types;
  for (std::size_t i = 0; i < loop.outputs.size(); ++i) {
    Type type = loop.body.type(loop.body.outputs()[i].value);
    const Loop::Result& how = loop.outputs[i];
    if (how.kind == Loop::Out::stack) {
      const auto axis = static_cast<std::size_t>(how.axis);
      const Dim chunk = extent_of(Dim::symbol(loop.symbol), how.factor);
      if (axis >= type.shape.size() || type.shape[axis] != chunk)
        r.expect(false, "result ", i, " is ", type, ", expected ", chunk.text(),
                 " along dimension ", axis);
      type.shape[axis] = extent_of(Dim(loop.extent), how.factor);
    }
    for (const Dim& dim : type.shape) {
      const std::vector<std::string> names = dim.symbols();
      if (std::find(names.begin(), names.end(), loop.symbol) != names.end())
        r.expect(false, "result ", i, " has the size of a chunk in ", type);
    }
    types.push_back(type);
  }
  return types;
}

// --- float64

// Returns the part of an operand that the chunk from element `first` on reads.
Tensor chunk_of(const Tensor& whole, const Loop::Input& how, const Type& type, std::int64_t first) {
  if (how.kind == Loop::In::whole) return whole;
  Tensor part = oracle::tensor_of(type);
  std::size_t k = 0;
  each(part.shape, [&](Index index) {
    index[static_cast<std::size_t>(how.axis)] += first * how.factor;
    part.data[k++] = at(whole, index);
  });
  return part;
}

void merge_into(Tensor& result, const Tensor& part, const Loop::Result& how, std::int64_t first) {
  std::size_t k = 0;
  each(part.shape, [&](Index index) {
    const double x = part.data[k++];
    if (how.kind == Loop::Out::stack)
      index[static_cast<std::size_t>(how.axis)] += first * how.factor;
    double& to = at(result, index);
    to = how.kind == Loop::Out::stack ? x
         : how.kind == Loop::Out::sum ? to + x
         : how.kind == Loop::Out::max ? oracle::merged(Reduce::max, to, x)
                                      : oracle::merged(Reduce::lse, to, x);
  });
}

std::vector<Tensor> loop_value(const Evaluation& e) {
  const Loop& l = *e.node.attributes->loop;
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < e.node.results.size(); ++i) {
    constexpr Reduce kKinds[] = {Reduce::sum, Reduce::sum, Reduce::max, Reduce::lse};
    results.push_back(oracle::tensor_of(
        e.node.results[i], oracle::start(kKinds[static_cast<int>(l.outputs[i].kind)])));
  }
  for (std::int64_t first = 0; first < l.extent; first += l.chunk) {
    const Graph body = bind(l.body, {{l.symbol, std::min(l.chunk, l.extent - first)}});
    std::size_t next = 0;
    const auto part = [&](const Node& parameter) {
      if (next++ == 0) return Tensor{{}, {static_cast<double>(first)}};
      const std::size_t i = next - 2;
      return chunk_of(e.in(i), l.inputs[i], parameter.results[0], first);
    };
    const std::vector<Tensor> parts = evaluate_graph(body, part, e.externs);
    for (std::size_t i = 0; i < results.size(); ++i)
      merge_into(results[i], parts[i], l.outputs[i], first);
  }
  return results;
}

// --- instructions: the body is lowered for full chunks and for a shorter last one

bool loop_place(Lowering& l, Value v, const Destination& to) {
  const Loop& loop = *l.node(v.node).attributes->loop;
  const bool sum = loop.outputs[static_cast<std::size_t>(v.index)].kind == Loop::Out::sum;
  const bool can =
      to.kind == Destination::Kind::write || (sum && to.kind == Destination::Kind::sum);
  return can && l.write_there(v, to);
}

// Returns the maximum of no elements.
double lowest(DType dtype) {
  if (dtype == DType::i32) return static_cast<double>(std::numeric_limits<std::int32_t>::min());
  if (dtype == DType::i64) return static_cast<double>(std::numeric_limits<std::int64_t>::min());
  return -std::numeric_limits<double>::infinity();
}

// Returns the slice of an outer value that a round reads or writes.
LoopRun::Slice slice_of(const View& outer, bool cut, int axis, std::int64_t factor) {
  const auto size = static_cast<std::int64_t>(size_of(outer.dtype));
  LoopRun::Slice s;
  s.outer = outer.buffer;
  s.offset = outer.offset * size;
  s.step = cut ? outer.strides[static_cast<std::size_t>(axis)] * factor * size : 0;
  return s;
}

// Returns whether the memory of a slice may begin between multiples of 16 bytes.
bool is_unaligned(const Lowering& l, const LoopRun::Slice& slice, std::int64_t chunk) {
  constexpr std::int64_t kAccess = 16;
  return l.is_unaligned(slice.outer) || slice.offset % kAccess != 0 ||
         slice.step * chunk % kAccess != 0;
}

bool share_memory(const std::vector<View>& results) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (results[i].buffer == results[j].buffer && results[i].offset == results[j].offset)
        return true;
    }
  }
  return false;
}

// Binds a body's parameters and results to external memory; the i-th one is slice i.
void set_memory(Lowering& inner, const Graph& body, const Lowering& l, const Loop& loop,
                const std::vector<View>& operands, const std::vector<View>& results,
                const std::vector<LoopRun::Slice>& slices) {
  const std::vector<int> parameters = body.parameters();
  inner.set_first(parameters[0], loop.extent);
  int slot = 0;
  // Returns a view with the strides of the outer value and the sizes of a chunk.
  const auto part = [&](View view, const Type& type) {
    const LoopRun::Slice& own = slices[static_cast<std::size_t>(slot)];
    view.buffer = inner.add_external(0, l.name_of_buffer(view.buffer), slot++,
                                     is_unaligned(l, own, loop.chunk));
    view.offset = 0;
    view.shape = sizes_of(type);
    return view;
  };
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const int id = parameters[i + 1];
    inner.set_parameter(id, part(operands[i], body.node(id).results[0]));
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    constexpr Destination::Kind kKinds[] = {Destination::Kind::write, Destination::Kind::sum,
                                            Destination::Kind::max, Destination::Kind::lse};
    inner.set_destination(i, {part(results[i], body.type(body.outputs()[i].value)),
                              kKinds[static_cast<int>(loop.outputs[i].kind)]});
  }
}

// Lowers the body for chunks of `chunk` elements. Its parameters and results are external.
LoweredBodies::Body lowered_body(Lowering& l, const Loop& loop, const LoweredBodies::Key& key,
                                 const Graph& bound, const std::vector<View>& operands,
                                 const std::vector<View>& results,
                                 const std::vector<LoopRun::Slice>& slices) {
  const Graph body =
      l.target().epilogues() ? fuse_epilogues(bound, l.target().gelu_epilogues()).graph : bound;
  bool parts_wait = false;
  Program program = recomputing(body, l.target(), [&](const std::vector<int>& again) {
    Lowering inner(body, l.target(), l.bodies(), key.parts_in_place, again);
    set_memory(inner, body, l, loop, operands, results, slices);
    if (key.keeps_order) inner.keep_order();
    Program made = inner.run();
    parts_wait = parts_wait || inner.parts_wait();
    return made;
  });
  give_offsets(program);
  return {std::make_shared<const Program>(std::move(program)), parts_wait};
}

// Returns a text of everything that lowered_body() depends on.
std::string description_of(const Lowering& l, const Loop& loop, const LoweredBodies::Key& key,
                           const Graph& bound, const std::vector<View>& operands,
                           const std::vector<View>& results) {
  std::string text = concat(key.keeps_order, key.parts_in_place);
  for (const std::int64_t stride : key.strides) text += concat(" ", stride);
  for (const auto* views : {&operands, &results}) {
    for (const View& view : *views)
      text += concat("\n", l.name_of_buffer(view.buffer), " ", name_of(view.dtype));
  }
  for (const Loop::Result& result : loop.outputs)
    text += concat(" ", static_cast<int>(result.kind));
  return concat(text, "\n", print(bound));
}

std::shared_ptr<const Program> body_of(Lowering& l, const std::shared_ptr<const Loop>& loop,
                                       std::int64_t chunk, const std::vector<View>& operands,
                                       const std::vector<View>& results,
                                       const std::vector<LoopRun::Slice>& slices) {
  LoweredBodies::Key key{loop.get(), chunk, l.keeps_order(), l.parts_in_place(), {}};
  // Sums that share memory are added in the order of the nodes.
  key.keeps_order = key.keeps_order || share_memory(results);
  for (const auto* views : {&operands, &results}) {
    for (const View& view : *views)
      key.strides.insert(key.strides.end(), view.strides.begin(), view.strides.end());
  }
  for (const LoopRun::Slice& slice : slices)
    key.strides.push_back(is_unaligned(l, slice, loop->chunk) ? 1 : 0);
  const LoweredBodies::Body* body = l.bodies().find(key);
  if (body == nullptr) {
    Graph bound = bind(loop->body, {{loop->symbol, chunk}});
    bound.name = "body";
    const auto lowered = [&] {
      return lowered_body(l, *loop, key, bound, operands, results, slices);
    };
    body = &l.bodies().keep(
        loop, key,
        l.bodies().described(description_of(l, *loop, key, bound, operands, results), lowered));
  }
  l.note_waiting(body->parts_wait);
  return body->program;
}

void loop_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const Loop& loop = *n.attributes->loop;
  LoopRun run;
  run.symbol = loop.symbol;
  run.extent = loop.extent;
  run.chunk = loop.chunk;
  std::vector<View> operands, results;
  for (std::size_t i = 0; i < n.operands.size(); ++i) {
    operands.push_back(l.memory_of(n.operands[i]));
    const Loop::Input& how = loop.inputs[i];
    run.slices.push_back(
        slice_of(operands.back(), how.kind == Loop::In::slice, how.axis, how.factor));
  }
  for (std::size_t i = 0; i < n.results.size(); ++i) {
    results.push_back(l.result_of({id, static_cast<std::int32_t>(i)}));
    const Loop::Result& how = loop.outputs[i];
    const bool stack = how.kind == Loop::Out::stack;
    run.slices.push_back(slice_of(results.back(), stack, how.axis, how.factor));
    if (stack) continue;
    if (!l.accumulates({id, static_cast<std::int32_t>(i)}))
      l.fill(results.back(), how.kind == Loop::Out::sum ? 0.0 : lowest(results.back().dtype));
    l.count_merged(loop.rounds() * bytes_of(n.results[i]));
  }
  run.body = body_of(l, n.attributes->loop, loop.chunk, operands, results, run.slices);
  const std::int64_t rest = loop.extent % loop.chunk;
  if (rest != 0) run.tail = body_of(l, n.attributes->loop, rest, operands, results, run.slices);
  l.count_work(static_cast<double>(loop.extent / loop.chunk) * run.body->multiply_adds +
               (run.tail ? run.tail->multiply_adds : 0.0));
  const std::int64_t arena = std::max(run.body->arena_bytes, run.tail ? run.tail->arena_bytes : 0);
  if (arena > 0)
    run.arena = l.add_buffer(Place::arena, arena, l.name_of_node(id) + " chunk",
                             std::max(run.body->value_bytes, run.tail ? run.tail->value_bytes : 0));
  l.push(id, std::move(run));
}

constexpr Operation kOperations[] = {{
    .op = Op::loop,
    .name = "loop",
    .infer = loop_types,
    .statement = false,
    .evaluate = loop_value,
    .gradient = compiled_gradient,
    .place = loop_place,
    .emit = loop_emit,
}};

}  // namespace

std::span<const Operation> loop_operations() { return kOperations; }

}  // namespace logitless::ir
