#include "compiler/plan/lower.h"

#include <algorithm>

#include "compiler/analysis/split.h"
#include "compiler/ops/op.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/epilogues.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/group_rows.h"
#include "compiler/plan/lowering.h"
#include "compiler/plan/row_alignment.h"
#include "compiler/plan/schedule.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

#ifdef NDEBUG
constexpr bool kDebug = false;
#else
constexpr bool kDebug = true;
#endif

}  // namespace

Lowering::Lowering(const Graph& graph, const Target& target, LoweredBodies& bodies,
                   bool parts_in_place, const std::vector<int>& again)
    : g_(graph),
      target_(target),
      bodies_(bodies),
      inlined_(inlined_nodes(graph, again)),
      absorbed_(static_cast<std::size_t>(graph.size()), false),
      parts_in_place_(parts_in_place) {
  p_.alignment = target.alignment();
  for (const Node& n : g_.nodes()) {
    first_value_.push_back(uses_.size());
    uses_.resize(uses_.size() + n.results.size());
    for (const Value v : n.operands) ++uses(v);
  }
  for (const Output& o : g_.outputs()) ++uses(o.value);
  memory_.resize(uses_.size());
  if (target.row_alignment() > 1) aligned_ = values_of_products(graph, target.row_alignment());
}

int Lowering::add_buffer(Place place, std::int64_t bytes, const std::string& name,
                         std::int64_t value_bytes) {
  Buffer buffer;
  buffer.place = place;
  buffer.bytes = bytes;
  buffer.value_bytes = value_bytes < 0 ? bytes : value_bytes;
  buffer.name = name;
  p_.buffers.push_back(std::move(buffer));
  return static_cast<int>(p_.buffers.size()) - 1;
}

int Lowering::add_external(std::int64_t bytes, const std::string& name, int slot, bool unaligned) {
  const int buffer = add_buffer(Place::external, bytes, name);
  p_.buffers.back().slot = slot;
  p_.buffers.back().unaligned = unaligned;
  return buffer;
}

void Lowering::set_first(int id, std::int64_t last) {
  first_ = id;
  last_first_ = last;
  add_buffer(Place::first, bytes_of(g_.node(id).results[0]), "first");
}

std::string Lowering::name_of_node(int id) const {
  const Node& n = g_.node(id);
  if (!n.name.empty()) return n.name;
  if (n.op == Op::parameter) return n.attributes->name;
  return std::string(title_of(n)) + "." + std::to_string(id);
}

const std::string& Lowering::name_of_buffer(int buffer) const {
  return p_.buffers[static_cast<std::size_t>(buffer)].name;
}

View Lowering::new_view(const Type& type, const std::string& name, int node) {
  View view;
  view.dtype = type.dtype;
  view.shape = sizes_of(type);
  view.strides = contiguous_strides(view.shape);
  view.buffer = add_buffer(Place::arena, std::max<std::int64_t>(bytes_of(type), 1), name);
  p_.buffers.back().node = node;
  return view;
}

View Lowering::new_view_of(Value v) {
  View view = new_view(g_.type(v), name_of_node(v.node), v.node);
  if (!std::binary_search(aligned_.begin(), aligned_.end(), v)) return view;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t multiple = target_.row_alignment() / size;
  std::vector<std::int64_t> apart = view.shape;
  apart.back() = (apart.back() + multiple - 1) / multiple * multiple;
  view.strides = contiguous_strides(apart);
  Buffer& buffer = p_.buffers.back();
  buffer.bytes = buffer.value_bytes = view.strides[0] * apart[0] * size;
  return view;
}

void Lowering::set_destination(std::size_t output, Destination destination) {
  if (!place(g_.outputs()[output].value, destination))
    copies_.emplace_back(output, std::move(destination));
}

bool Lowering::place(Value v, const Destination& to) {
  if (destinations_.contains(v)) return false;
  // Other readers would see the sum instead of the value.
  if ((to.kind != Destination::Kind::write || to.added_to) && uses(v) > 1) return false;
  const auto rule = row_of(g_.node(v).op).place;
  return rule != nullptr && rule(*this, v, to);
}

bool Lowering::write_there(Value v, const Destination& to) {
  destinations_[v] = to;
  return true;
}

bool Lowering::place_sum(Value v, const Destination& to) {
  const Node& n = g_.node(v);
  const bool adds = to.kind == Destination::Kind::sum;
  if (n.attributes->function != Function::add || (!adds && to.kind != Destination::Kind::write))
    return false;
  if (to.view.dtype != DType::f32 && to.view.dtype != DType::f64) return false;
  const Value first = std::min(n.operands[0], n.operands[1]),
              second = std::max(n.operands[0], n.operands[1]);
  if (!row_of(g_.node(second).op).sums || first.node == second.node || uses(first) > 1)
    return false;
  if (!place(second, {to.view, Destination::Kind::sum})) return false;
  Destination before = to;
  before.added_to = true;
  if (!place(first, before)) {
    if (!adds) {
      destinations_.erase(second);
      return false;
    }
    rests_.emplace(v.node, first);
  }
  inlined_[static_cast<std::size_t>(first.node)] = false;
  absorbed_[static_cast<std::size_t>(v.node)] = true;
  memory(v) = to.view;
  return true;
}

void Lowering::arrange_put(Value v) {
  const auto at = static_cast<std::size_t>(v.node);
  const Node& n = g_.node(v);
  if (n.attributes->function != Function::add || inlined_[at] || absorbed_[at] ||
      destinations_.contains(v))
    return;
  const Value second = std::max(n.operands[0], n.operands[1]);
  if (g_.node(second).op != Op::put || uses(second) > 1) return;
  const Destination to = destination_of(v);
  if (place_sum(v, to)) destinations_.erase(v);
}

Destination Lowering::destination_of(Value v) {
  const auto found = destinations_.find(v);
  if (found != destinations_.end()) return found->second;
  return destinations_[v] = {new_view_of(v), Destination::Kind::write};
}

void Lowering::place_parts(int id, const std::vector<std::vector<std::int64_t>>& begins) {
  const Node& n = g_.node(id);
  const Destination to = destination_of({id, 0});
  std::vector<View> parts;
  std::int64_t missing = elements_of(to.view);
  bool one_maker = true;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    parts.push_back(sliced(to.view, begins[i], sizes_of(g_.type(n.operands[i]))));
    missing -= elements_of(parts.back());
    one_maker = one_maker && maker_of(n.operands[i]) == maker_of(n.operands[0]);
  }
  const bool in_arena = p_.buffers[static_cast<std::size_t>(to.view.buffer)].place == Place::arena;
  const bool waits = in_arena && (missing > 0 || !one_maker);
  if (waits && !parts_in_place_) return;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (place(n.operands[i], to.with(parts[i]))) parts_wait_ = parts_wait_ || waits;
  }
}

int Lowering::maker_of(Value v) const {
  while (row_of(g_.node(v).op).view != nullptr && row_of(g_.node(v).op).place != nullptr)
    v = g_.node(v).operands[0];
  return v.node;
}

void Lowering::move_part(int id, Value part, const View& out,
                         const std::vector<std::int64_t>& begin) {
  const View& from = memory_of(part);
  const View to = sliced(out, begin, from.shape);
  if (!same_elements(from, to)) push(id, copy_loop(from, to, false));
}

void Lowering::place_view(Value v, Value made) {
  if (destinations_.contains(made)) return;
  View view = new_view(g_.type(v), name_of_node(made.node), made.node);
  if (!place(v, {std::move(view), Destination::Kind::write})) p_.buffers.pop_back();
}

View Lowering::result_of(Value v) {
  const auto found = destinations_.find(v);
  View view = found != destinations_.end() ? found->second.view : new_view_of(v);
  memory(v) = view;
  return view;
}

bool Lowering::accumulates(Value v) const {
  const auto found = destinations_.find(v);
  return found != destinations_.end() && found->second.kind == Destination::Kind::sum;
}

void Lowering::require_supported(const Instruction& instruction) const {
  const std::string why = target_.refuse(instruction);
  if (!why.empty()) throw Unsupported(why);
}

int Lowering::add_scratch(std::int64_t bytes, int id) {
  return bytes > 0 ? add_buffer(Place::arena, bytes, name_of_node(id) + " scratch", 0) : -1;
}

View Lowering::copied(const View& view, const std::string& name) {
  View to = view;
  to.offset = 0;
  to.strides = contiguous_strides(view.shape);
  to.buffer = add_buffer(
      Place::arena,
      std::max<std::int64_t>(elements_of(view), 1) * static_cast<std::int64_t>(size_of(view.dtype)),
      name);
  p_.instructions.push_back({name, copy_loop(view, to, false)});
  return to;
}

View Lowering::contiguous(Value v) {
  const View& view = memory_of(v);
  return is_contiguous(view) ? view : copied(view, name_of_node(v.node) + " copy");
}

const View& Lowering::memory_of(Value v) {
  if (const View& known = memory(v); known.buffer >= 0) return known;
  const Node& n = g_.node(v);
  const Operation& row = row_of(n.op);
  if (row.view != nullptr) return memory(v) = row.view(*this, v);
  // Constants and elementwise values that were left to their readers, or the argument, in memory.
  check(row.registers != nullptr || is_first(v), "lower: ", row.name, " is read before it is made");
  const View view = new_view_of(v);
  compute(v, {view, Destination::Kind::write});
  return memory(v) = view;
}

void Lowering::copy_to(Value v, const Destination& to) {
  if (to.kind != Destination::Kind::write && to.kind != Destination::Kind::sum)
    return compute(v, to);
  const View& from = memory_of(v);
  p_.instructions.push_back({name_of_node(v.node) + " copy",
                             copy_loop(from, to.view, to.kind == Destination::Kind::sum)});
}

void Lowering::fill(const View& view, double number) {
  p_.instructions.push_back({{}, Fill{view, number}});
}

void Lowering::emit_elementwise(int id) {
  const Value v{id, 0};
  if (const auto rest = rests_.find(id); rest != rests_.end())
    push(id, copy_loop(memory_of(rest->second), memory(v), true));
  if (inlined_[static_cast<std::size_t>(id)] || absorbed_[static_cast<std::size_t>(id)]) return;
  const auto found = destinations_.find(v);
  const Destination to = found != destinations_.end()
                             ? found->second
                             : Destination{new_view_of(v), Destination::Kind::write};
  compute(v, to);
  memory(v) = to.view;
}

Program Lowering::run() {
  p_.instructions.reserve(static_cast<std::size_t>(g_.size()));
  for (int id = g_.size() - 1; id >= 0; --id) {
    if (const auto arrange = row_of(g_.node(id).op).arrange) arrange(*this, id);
  }
  for (int id = 0; id < g_.size(); ++id) {
    const std::size_t before = p_.instructions.size();
    // Without a rule its readers compute it.
    if (const auto emit = row_of(g_.node(id).op).emit) emit(*this, id);
    for (std::size_t i = before; i < p_.instructions.size(); ++i) p_.instructions[i].node = id;
  }
  for (const auto& [output, to] : copies_) copy_to(g_.outputs()[output].value, to);
  if (target_.most_group_columns() > 0) group_rows(p_, target_);
  fuse_products(p_, target_);
  keeps_order_ ? plan_memory(p_) : order_for_memory(p_);
  return std::move(p_);
}

namespace {

Program lowered(const Graph& graph, const std::vector<bool>& added, Lowering& lowering) {
  std::vector<int> parameters, results;
  int slot = 0;
  const auto external = [&](const Type& type, const std::string& name) {
    View view;
    view.dtype = type.dtype;
    view.shape = sizes_of(type);
    view.strides = contiguous_strides(view.shape);
    view.buffer = lowering.add_external(bytes_of(type), name, slot++);
    return view;
  };
  for (const int id : graph.parameters()) {
    const View view = external(graph.node(id).results[0], graph.node(id).attributes->name);
    parameters.push_back(view.buffer);
    lowering.set_parameter(id, view);
  }
  for (std::size_t i = 0; i < graph.outputs().size(); ++i) {
    const Output& output = graph.outputs()[i];
    const View view = external(graph.type(output.value), output.name);
    results.push_back(view.buffer);
    const bool adds = !added.empty() && added[i];
    if (!adds) lowering.overwrites(view.buffer);
    lowering.set_destination(i, {view, adds ? Destination::Kind::sum : Destination::Kind::write});
  }
  Program program = lowering.run();
  program.parameters = std::move(parameters);
  program.results = std::move(results);
  return program;
}

Program lower_as_it_is(const Graph& graph, const Target& target, const std::vector<bool>& added,
                       InstructionOrder order, LoweredBodies& bodies) {
  bool parts_wait = false;
  const auto with = [&](const std::vector<int>& again, bool parts_in_place) {
    Lowering lowering(graph, target, bodies, parts_in_place, again);
    if (order == InstructionOrder::given) lowering.keep_order();
    Program program = lowered(graph, added, lowering);
    parts_wait = lowering.parts_wait();
    return program;
  };
  const auto smaller = [&](const std::vector<int>& again) {
    Program program = with(again, /*parts_in_place=*/true);
    if (!parts_wait) return program;
    // Memory that waits for its last part may be live at the peak, where copies would not be.
    Program copies = with(again, /*parts_in_place=*/false);
    return copies.value_bytes < program.value_bytes ? copies : program;
  };
  return order == InstructionOrder::given ? smaller({}) : recomputing(graph, target, smaller);
}

}  // namespace

Program lower(const Graph& graph, const Target& target, const std::vector<bool>& added,
              InstructionOrder order, LoweredBodies* bodies) {
  Program program = lower_without_offsets(graph, target, added, order, bodies);
  give_offsets(program);
  return program;
}

Program lower_without_offsets(const Graph& graph, const Target& target,
                              const std::vector<bool>& added, InstructionOrder order,
                              LoweredBodies* bodies) {
  LoweredBodies own;
  LoweredBodies& kept = bodies != nullptr ? *bodies : own;
  if (!target.epilogues()) return lower_as_it_is(graph, target, added, order, kept);
  const WithEpilogues with = fuse_epilogues(graph, target.gelu_epilogues());
  if (kDebug) verify(with.graph);
  Program program = lower_as_it_is(with.graph, target, added, order, kept);
  for (Buffer& buffer : program.buffers) {
    if (buffer.node >= 0) buffer.node = with.origin[static_cast<std::size_t>(buffer.node)];
  }
  for (Instruction& i : program.instructions) {
    if (i.node >= 0) i.node = with.origin[static_cast<std::size_t>(i.node)];
  }
  return program;
}

}  // namespace logitless::ir
