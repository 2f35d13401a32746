// The state of lowering one graph, and the interface for the operations' rules.
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

// The destination of a result: memory of the caller or of a loop.
struct Destination {
  View view;
  enum class Kind : std::uint8_t {
    write,
    sum,
    max,
    lse
  } kind = Kind::write;   // all but write merge
  bool added_to = false;  // a later instruction adds to the result

  // Returns the destination of a value that is a reshape, move or part of this one.
  Destination with(View other) const { return {std::move(other), kind, added_to}; }
};

class Lowering {
 public:
  // parts_in_place: parts of a concat or pad are written in place even if they wait for others;
  // else they are copied. again: elementwise values that each reader computes.
  Lowering(const Graph& graph, const Target& target, LoweredBodies& bodies,
           bool parts_in_place = true, const std::vector<int>& again = {});

  // --- before run()
  int add_buffer(Place place, std::int64_t bytes, const std::string& name,
                 std::int64_t value_bytes = -1);
  // Adds memory that the caller or the enclosing loop gives: number `slot`.
  // unaligned: may begin between multiples of 16 bytes.
  int add_external(std::int64_t bytes, const std::string& name, int slot, bool unaligned = false);
  // A result whose memory holds nothing of the caller's.
  void overwrites(int buffer) {
    p_.buffers[static_cast<std::size_t>(buffer)].overwritten = target_.uses_results();
  }
  // Sets the memory of parameter `id`, and of a result.
  void set_parameter(int id, View view) { memory({id, 0}) = std::move(view); }
  void set_destination(std::size_t output, Destination destination);
  // Parameter `id` is the index of the chunk's first element, `last` at most.
  void set_first(int id, std::int64_t last);
  // Returns the program without offsets in the arena (give_offsets()).
  Program run();
  bool parts_in_place() const { return parts_in_place_; }
  // Keeps instructions in the order of their nodes.
  void keep_order() { keeps_order_ = true; }
  bool keeps_order() const { return keeps_order_; }
  // After run(): returns whether arena memory holds a part while it waits for the others.
  bool parts_wait() const { return parts_wait_; }

  // --- the graph
  const Graph& graph() const { return g_; }
  const Node& node(int id) const { return g_.node(id); }
  const Type& type(Value v) const { return g_.type(v); }
  const Target& target() const { return target_; }
  LoweredBodies& bodies() const { return bodies_; }
  std::string name_of_node(int id) const;
  const std::string& name_of_buffer(int buffer) const;
  bool is_unaligned(int buffer) const {
    return p_.buffers[static_cast<std::size_t>(buffer)].unaligned;
  }
  bool is_inlined(int id) const { return inlined_[static_cast<std::size_t>(id)]; }
  bool is_first(Value v) const { return v.node == first_; }
  double last_first() const { return static_cast<double>(last_first_); }

  // --- memory
  // Returns the memory of any value; makes views and computes elementwise values.
  const View& memory_of(Value v);
  // Returns whether the value has memory already.
  bool has_memory(Value v) const { return memory_[number(v)].buffer >= 0; }
  View result_of(Value v);  // new memory, or the destination's
  bool accumulates(Value v) const;
  View contiguous(Value v);
  View copied(const View& view, const std::string& name);
  View new_view(const Type& type, const std::string& name, int node = -1);
  // Returns new memory for a value; rows are aligned if the target wants that for its matrix
  // products.
  View new_view_of(Value v);
  // Asks the instruction that makes the value to write it to the destination; returns whether it
  // can.
  bool place(Value v, const Destination& to);
  // Returns the destination of a value: new memory unless one is set.
  Destination destination_of(Value v);
  // Writes the parts of node `id` into its result at `begins` if their instructions can.
  void place_parts(int id, const std::vector<std::vector<std::int64_t>>& begins);
  // Copies the operand's value to `begin` of `out` unless it is there already.
  void move_part(int id, Value part, const View& out, const std::vector<std::int64_t>& begin);
  // Gives a value new memory in another order of dimensions, which `made`'s instruction writes if
  // it can.
  void place_view(Value v, Value made);
  // Ends the place rule of an operation: its instruction writes to the destination.
  bool write_there(Value v, const Destination& to);
  // Places a + b, where b is a sum that can be added to existing values. Either a is written and b
  // added, or both are added.
  bool place_sum(Value v, const Destination& to);
  // Does the same in new memory if b is a put and a + b has no destination.
  void arrange_put(Value v);

  // --- instructions. `what` makes the value of node `id`, or an intermediate one. Throws
  // Unsupported if the target refuses it.
  template <typename What>
  void push(int id, What what) {
    Instruction instruction{name_of_node(id), std::move(what)};
    require_supported(instruction);
    if constexpr (requires(What & w) { target_.scratch_bytes(w); }) {
      What& made = std::get<What>(instruction.what);
      made.scratch = add_scratch(target_.scratch_bytes(made), id);
      if constexpr (std::is_same_v<What, Gemm>)
        made.additional_bytes = target_.additional_bytes(made);
    }
    p_.instructions.push_back(std::move(instruction));
  }
  void fill(const View& view, double number);
  // Records that the body of a loop has waiting parts (parts_wait()).
  void note_waiting(bool parts_wait) { parts_wait_ = parts_wait_ || parts_wait; }
  // Computes a value in one loop: elementwise, or any other through memory.
  void compute(Value v, const Destination& to);
  // Computes an elementwise node unless its readers do.
  void emit_elementwise(int id);
  void count_work(double multiply_adds) { p_.multiply_adds += multiply_adds; }
  void count_merged(std::int64_t bytes) { p_.merged_bytes += static_cast<double>(bytes); }

 private:
  const Graph& g_;
  const Target& target_;
  LoweredBodies& bodies_;
  Program p_;
  std::vector<bool> inlined_;
  std::vector<std::size_t> first_value_;  // by node: index of its first value
  std::vector<int> uses_;                 // by value: readers and outputs
  std::vector<View> memory_;              // by value; no buffer: not yet
  // Sums whose second operand is added to the first in place.
  std::vector<bool> absorbed_;
  std::map<int, Value> rests_;                 // by absorbed sum: the operand that a copy must add
  std::map<Value, Destination> destinations_;  // by value whose instruction writes it in place
  std::vector<std::pair<std::size_t, Destination>> copies_;  // results that are copied at the end
  int first_ = -1;
  std::int64_t last_first_ = 0;
  bool parts_in_place_, parts_wait_ = false, keeps_order_ = false;
  std::vector<Value> aligned_;  // values with aligned rows, in order

  std::size_t number(Value v) const {
    return first_value_[static_cast<std::size_t>(v.node)] + static_cast<std::size_t>(v.index);
  }
  int& uses(Value v) { return uses_[number(v)]; }
  View& memory(Value v) { return memory_[number(v)]; }
  int maker_of(Value v) const;  // returns the node whose moved result is this value
  void copy_to(Value v, const Destination& to);
  void require_supported(const Instruction& instruction) const;
  int add_scratch(std::int64_t bytes, int id);  // returns -1 for no bytes
};

// Returns a strided copy or conversion of one view to another of equal shape.
Pointwise copy_loop(const View& from, const View& to, bool accumulate);

// Returns the value as a view of the value below its reshapes and transposes. Merged dimensions may
// be split again, as in [B, H, T] -> [H, B, T] -> [H, B T] -> [H, B, T]. Returns nothing if strides
// cannot express the value, or if all intermediate values have strides (a plain view).
std::optional<View> moved_view(Lowering& lowering, Value v);

}  // namespace logitless::ir
