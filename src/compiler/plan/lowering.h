// The state of lowering one graph: shared by lower.cpp (operations), lower_pointwise.cpp,
// lower_loop.cpp and lower_head.cpp.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "compiler/plan/program.h"
#include "compiler/plan/views.h"

namespace logitless::ir {

// Where a result must go: the caller's memory, or a loop's.
struct Target {
  View view;
  enum class Kind : std::uint8_t {
    write,
    sum,
    max,
    lse
  } kind = Kind::write;  // all but write: merged
};

class Lowering {
 public:
  Lowering(const Graph& graph, int threads);

  int add_buffer(Place place, std::int64_t bytes, const std::string& name,
                 std::int64_t value_bytes = -1);
  // The memory of parameter `id`, and of a result: given before run().
  void set_parameter(int id, View view);
  void set_target(std::size_t output, Target target);
  Program run();

 private:
  const Graph& g_;
  const int threads_;
  Program p_;
  std::vector<bool> inlined_;
  std::map<Value, int> uses_;  // readers and outputs
  std::map<Value, View> memory_;
  std::vector<bool> absorbed_;       // sums whose second operand adds itself to the first
  std::map<Value, Target> targets_;  // of values whose instruction writes them in place
  std::vector<std::pair<std::size_t, Target>> copies_;  // results that are copied at the end

  // lower.cpp
  void place_results();
  bool place_result(Value v, const Target& target);
  bool place_sum(Value v, const Target& target);
  void emit(int id);
  View memory_of(Value v);  // of any value; views are made, elementwise values computed
  View result_of(Value v);  // new memory, or its target's
  bool accumulates(Value v) const;
  View contiguous(Value v);
  View copied(const View& view, const std::string& name);
  void copy_to(Value v, const Target& target);
  // `what` makes the value of node `id`, or something on the way to it.
  template <typename What>
  void push(int id, What what) {
    p_.instructions.push_back({name_of_node(id), std::move(what)});
  }
  std::string name_of_node(int id) const;
  void emit_dot(int id);
  void emit_scatter(int id);
  void emit_attention(int id);
  void emit_parts(int id);  // concat, pad
  void emit_pick(int id);
  View new_view(const Type& type, const std::string& name, int node = -1);

  // lower_pointwise.cpp
  friend class PointwiseBuilder;
  void emit_pointwise(Value v, const Target& to);
  void emit_reduce(int id);
  void emit_reduction(int id, const std::vector<int>& dims, Value operand, const View& out,
                      bool accumulate);
  void emit_fill(const View& view, double number);

  // lower_loop.cpp
  void emit_loop(int id);

  // lower_head.cpp
  void emit_head(int id);
};

// Strided copy or conversion of one view to another of equal shape.
Pointwise copy_loop(const View& from, const View& to, bool accumulate);
void finish_pointwise(Pointwise& loop);  // merges dimensions, decides the width of registers

}  // namespace logitless::ir
