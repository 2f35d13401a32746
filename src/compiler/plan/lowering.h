// The state of lowering one graph, and what the operations' rules ask of it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compiler/plan/lowered_bodies.h"
#include "compiler/plan/program.h"
#include "compiler/plan/views.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// Where a result must go: the caller's memory, or a loop's.
struct Destination {
  View view;
  enum class Kind : std::uint8_t {
    write,
    sum,
    max,
    lse
  } kind = Kind::write;   // all but write: merged
  bool added_to = false;  // something else is added there later

  // The same of a value that is this one reshaped, moved, or a part of it.
  Destination with(View other) const { return {std::move(other), kind, added_to}; }
};

class Lowering {
 public:
  // Without `parts_in_place`, parts of a concat or a pad that others are waited for are copied.
  // `again`: elementwise values that each of their readers computes.
  Lowering(const Graph& graph, const Target& target, LoweredBodies& bodies,
           bool parts_in_place = true, const std::vector<int>& again = {});

  // --- before run()
  int add_buffer(Place place, std::int64_t bytes, const std::string& name,
                 std::int64_t value_bytes = -1);
  // Memory given by the caller, or by the loop around: the `slot`-th.
  int add_external(std::int64_t bytes, const std::string& name, int slot);
  // The memory of parameter `id`, and of a result.
  void set_parameter(int id, View view) { memory({id, 0}) = std::move(view); }
  void set_destination(std::size_t output, Destination destination);
  // Parameter `id` is the number of the chunk's first element.
  void set_first(int id);
  // Without offsets in the arena (give_offsets).
  Program run();
  bool parts_in_place() const { return parts_in_place_; }
  // Instructions stay in the order of their nodes.
  void keep_order() { keeps_order_ = true; }
  bool keeps_order() const { return keeps_order_; }
  // After run(): whether memory of the arena holds a part while it waits for the others.
  bool parts_wait() const { return parts_wait_; }

  // --- the graph
  const Graph& graph() const { return g_; }
  const Node& node(int id) const { return g_.node(id); }
  const Type& type(Value v) const { return g_.type(v); }
  const Target& target() const { return target_; }
  LoweredBodies& bodies() const { return bodies_; }
  std::string name_of_node(int id) const;
  const std::string& name_of_buffer(int buffer) const;
  bool is_inlined(int id) const { return inlined_[static_cast<std::size_t>(id)]; }
  bool is_first(Value v) const { return v.node == first_; }

  // --- memory
  // Of any value; views are made, elementwise values computed.
  const View& memory_of(Value v);
  // Whether that is known already.
  bool has_memory(Value v) const { return memory_[number(v)].buffer >= 0; }
  View result_of(Value v);  // new memory, or its destination's
  bool accumulates(Value v) const;
  View contiguous(Value v);
  View copied(const View& view, const std::string& name);
  View new_view(const Type& type, const std::string& name, int node = -1);
  // Of a value: with rows apart as the target wants them of products.
  View new_view_of(Value v);
  // Whether the instruction that makes the value can write it where it must go; then it will.
  bool place(Value v, const Destination& to);
  // Where a value goes, which is new memory if nothing was said before.
  Destination destination_of(Value v);
  // The parts of node `id` are written into its result, from `begins` on, where their instructions
  // can do that.
  void place_parts(int id, const std::vector<std::vector<std::int64_t>>& begins);
  // The operand's value at `begin` of `out`, if it is not there already.
  void move_part(int id, Value part, const View& out, const std::vector<std::int64_t>& begin);
  // New memory for a value that is `made`'s in another order, written there if that can be.
  void place_view(Value v, Value made);
  // The end of an operation's rule for it: the instruction writes there.
  bool write_there(Value v, const Destination& to);
  // a + b, where b is a sum that can be added to what is there: a is written, then b added; or both
  // are added.
  bool place_sum(Value v, const Destination& to);
  // The same in new memory, where b is a put and nothing else was said of a + b.
  void arrange_put(Value v);

  // --- instructions. `what` makes the value of node `id`, or something on the way to it. Throws
  // Unsupported where the target refuses it.
  template <typename What>
  void push(int id, What what) {
    Instruction instruction{name_of_node(id), std::move(what)};
    require_supported(instruction);
    if constexpr (requires(What & w) { target_.scratch_bytes(w); }) {
      What& made = std::get<What>(instruction.what);
      made.scratch = add_scratch(target_.scratch_bytes(made), id);
    }
    p_.instructions.push_back(std::move(instruction));
  }
  void fill(const View& view, double number);
  // A loop around parts did what parts_wait() tells.
  void note_waiting(bool parts_wait) { parts_wait_ = parts_wait_ || parts_wait; }
  // An elementwise value, or any other through memory, in one loop.
  void compute(Value v, const Destination& to);
  // The same of a node, unless its readers compute it.
  void emit_elementwise(int id);
  void count_work(double multiply_adds) { p_.multiply_adds += multiply_adds; }
  void count_merged(std::int64_t bytes) { p_.merged_bytes += static_cast<double>(bytes); }

 private:
  const Graph& g_;
  const Target& target_;
  LoweredBodies& bodies_;
  Program p_;
  std::vector<bool> inlined_;
  std::vector<std::size_t> first_value_;  // of each node, among all values
  std::vector<int> uses_;                 // of each value: readers and outputs
  std::vector<View> memory_;              // of each value; no buffer: not yet
  std::vector<bool> absorbed_;            // sums whose second operand adds itself to the first
  std::map<int, Value> rests_;  // of absorbed ones, the operand that has to be added by a copy
  std::map<Value, Destination> destinations_;  // of values whose instruction writes them in place
  std::vector<std::pair<std::size_t, Destination>> copies_;  // results that are copied at the end
  int first_ = -1;
  bool parts_in_place_, parts_wait_ = false, keeps_order_ = false;
  std::vector<Value> aligned_;  // values whose rows are to be aligned, in order

  std::size_t number(Value v) const {
    return first_value_[static_cast<std::size_t>(v.node)] + static_cast<std::size_t>(v.index);
  }
  int& uses(Value v) { return uses_[number(v)]; }
  View& memory(Value v) { return memory_[number(v)]; }
  int maker_of(Value v) const;  // the node whose result is moved about to be this value
  void copy_to(Value v, const Destination& to);
  void require_supported(const Instruction& instruction) const;
  int add_scratch(std::int64_t bytes, int id);  // -1 of none
};

// Strided copy or conversion of one view to another of equal shape.
Pointwise copy_loop(const View& from, const View& to, bool accumulate);

}  // namespace logitless::ir
