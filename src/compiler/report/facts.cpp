#include "compiler/report/facts.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <variant>

#include "compiler/ir/graph.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/cost.h"
#include "core/check.h"
#include "logitless/bytes.h"

namespace logitless::report {

using State = CompiledProgram::State;

std::string bytes_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}
std::string seconds_text(double seconds) {
  if (seconds >= 1.0) return fixed(seconds, 2) + " s";
  return seconds >= 1e-3 ? fixed(1e3 * seconds, 2) + " ms" : fixed(1e6 * seconds, 1) + " us";
}

Stage before_loops(const State& state) { return {state.unchunked, state.unchunked_graph}; }
Stage as_run(const State& state) { return {state.program, state.graph}; }

namespace {

// Returns the type of the node's result with so many bytes.
const ir::Type& type_of(const ir::Node& n, std::int64_t bytes) {
  for (const ir::Type& type : n.results) {
    if (ir::bytes_of(type) == bytes) return type;
  }
  return n.results[0];
}

}  // namespace

Peak peak_of(const Stage& stage) {
  const std::vector<std::int64_t> bytes = ir::live_bytes(stage.program);
  Peak peak;
  if (bytes.empty()) return peak;
  peak.instruction = static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
  peak.bytes = bytes[static_cast<std::size_t>(peak.instruction)];
  for (const int b : ir::live_at(stage.program, peak.instruction)) {
    const ir::Buffer& buffer = stage.program.buffers[static_cast<std::size_t>(b)];
    Live live{buffer.name, {}, {}, buffer.name, buffer.bytes};
    if (buffer.node >= 0) {
      const ir::Node& n = stage.graph.node(buffer.node);
      const std::string type = ir::text_of(type_of(n, buffer.bytes));
      live.operation = concat(ir::title_of(n), " ", type);
      live.location = n.attributes->location;
      // "tanh.17" says less than the operation.
      if (n.op != ir::Op::parameter && n.name.empty()) live.name.clear();
      live.text =
          live.name.empty() ? live.operation : concat(live.name, " (", ir::title_of(n), ") ", type);
      if (!live.location.empty()) live.text += ", " + live.location;
    }
    peak.live.push_back(std::move(live));
  }
  return peak;
}

std::vector<InResult> values_in_results(const ir::Program& program) {
  std::vector<InResult> list;
  for (const ir::Buffer& b : program.buffers) {
    if (b.inside >= 0 && b.shared_with < 0)
      list.push_back({b.name, program.buffers[static_cast<std::size_t>(b.inside)].name, b.bytes});
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const InResult& a, const InResult& b) { return a.bytes > b.bytes; });
  return list;
}

std::string text_of_instruction(const Stage& stage, std::size_t instruction) {
  const ir::Instruction& i = stage.program.instructions[instruction];
  std::string text = concat(i.name, i.name.empty() ? "" : ": ", ir::describe(i));
  if (i.node < 0) return text;
  const std::string& location = stage.graph.node(i.node).attributes->location;
  return location.empty() ? text : concat(text, ", ", location);
}

std::string what_was_done(const State& s) {
  const auto has_head = [](const ir::Program& program) {
    return std::any_of(
        program.instructions.begin(), program.instructions.end(),
        [](const ir::Instruction& i) { return std::holds_alternative<ir::HeadRun>(i.what); });
  };
  const bool head = has_head(s.program) && !has_head(s.unchunked);
  std::vector<std::string> parts;
  if (!s.regions.empty()) parts.emplace_back("loops");
  if (s.recomputed.values > 0) parts.emplace_back("recomputation");
  if (head) parts.emplace_back("the head engine");
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i)
    text += concat(i == 0 ? "with " : i + 1 < parts.size() ? ", " : " and ", parts[i]);
  return text;
}

std::string machine(const State& s) {
  if (s.device.kind == DeviceKind::cpu)
    return concat(s.threads, " thread", s.threads > 1 ? "s" : "");
  const int capability = s.device.compute_capability;
  return concat("a GPU of compute capability ", capability / 10, ".", capability % 10);
}

namespace {

const ir::Buffer& buffer_of(const ir::Program& program, const ir::View& view) {
  return program.buffers[static_cast<std::size_t>(view.buffer)];
}

std::string size_text(const ir::Gemm& g) { return concat(g.m, " x ", g.n, " x ", g.k); }

// Adds a text to a list, unless the list has it.
void add_once(std::vector<std::string>& list, std::string text) {
  if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
}

std::string joined(const std::vector<std::string>& list) {
  std::string text;
  for (const std::string& item : list) text += concat(text.empty() ? "" : ", ", item);
  return text;
}

// Returns "tanh, mul, exp; row sum to s; stores g".
std::string stages_text(const ir::Program& program, const ir::RowGroup& group) {
  std::vector<std::string> functions, parts, stores;
  std::vector<std::pair<std::string, std::vector<std::string>>> reductions;
  for (const ir::RowGroup::Stage& stage : group.stages) {
    for (const ir::Pointwise::Step& step : stage.loop.steps) {
      if (step.kind == ir::Pointwise::Step::Kind::function)
        add_once(functions, std::string(ir::info_of(step.function).name));
    }
    const std::string& name = buffer_of(program, stage.loop.store.view).name;
    if (!stage.loop.reduction) {
      if (stage.stored) add_once(stores, name);
      continue;
    }
    const std::string kind = concat("row ", ir::name_of(stage.loop.reduce), " to ");
    if (reductions.empty() || reductions.back().first != kind) reductions.push_back({kind, {}});
    add_once(reductions.back().second, name);
  }
  if (!functions.empty()) parts.push_back(joined(functions));
  for (const auto& [kind, names] : reductions) parts.push_back(kind + joined(names));
  parts.push_back(stores.empty() ? "stores no element" : "stores " + joined(stores));
  std::string text;
  for (const std::string& part : parts) text += concat(text.empty() ? "" : "; ", part);
  return text;
}

}  // namespace

std::vector<ProductEpilogue> epilogues(const ir::Program& program) {
  std::vector<ProductEpilogue> list;
  for (const ir::Instruction& i : program.instructions) {
    const auto* gemm = std::get_if<ir::Gemm>(&i.what);
    if (gemm != nullptr && gemm->epilogue.any())
      list.push_back({i.name, size_text(*gemm), ir::text_of(gemm->epilogue)});
    const auto* group = std::get_if<ir::RowGroup>(&i.what);
    if (group != nullptr && group->product) {
      std::string name = buffer_of(program, group->product->c).name;
      if (group->other)
        name += concat(group->difference ? " minus " : " and ",
                       buffer_of(program, group->other->c).name);
      list.push_back({std::move(name), size_text(*group->product), stages_text(program, *group)});
    }
    if (const auto* loop = std::get_if<ir::LoopRun>(&i.what)) {
      const auto inside = epilogues(*loop->body);
      list.insert(list.end(), inside.begin(), inside.end());
    }
  }
  return list;
}

namespace {

using Uses = std::unordered_map<const ir::Program*, int>;

void count_bodies(const ir::Program& program, Uses& uses) {
  for (const ir::Instruction& i : program.instructions) {
    const auto* loop = std::get_if<ir::LoopRun>(&i.what);
    if (loop == nullptr || ++uses[loop->body.get()] > 1) continue;
    count_bodies(*loop->body, uses);
    if (loop->tail != nullptr) count_bodies(*loop->tail, uses);
  }
}

// Adds work by layer. `of`: the layer of all of it; null: layers follow from the names. Loops that
// share a body have the names of one of them, so `of` names the loop's layer.
void add_work(const ir::Program& program, double times, const Uses& uses, const std::string* of,
              std::vector<Work>& list) {
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* loop = std::get_if<ir::LoopRun>(&i.what)) {
      const bool shared = of == nullptr && !i.name.empty() && uses.at(loop->body.get()) > 1;
      const std::string* whose = shared ? &i.name : of;
      const auto turns = static_cast<double>(loop->extent / loop->chunk);
      add_work(*loop->body, times * turns, uses, whose, list);
      if (loop->tail != nullptr) add_work(*loop->tail, times, uses, whose, list);
      continue;
    }
    const std::string& name = of == nullptr ? i.name : *of;
    const bool gradient = name.starts_with("d_");
    const std::string layer = name.substr(gradient ? 2 : 0, name.find('.') - (gradient ? 2 : 0));
    auto found = std::find_if(list.begin(), list.end(),
                              [&](const Work& work) { return work.layer == layer; });
    if (found == list.end()) found = list.insert(list.end(), Work{layer});
    (gradient ? found->backward : found->forward) += times * 0.5 * ir::flops_of(i);
    found->bytes += times * ir::bytes_moved(i);
  }
}

}  // namespace

std::vector<Work> work_by_layer(const ir::Program& program) {
  std::vector<Work> list;
  Uses uses;
  count_bodies(program, uses);
  add_work(program, 1.0, uses, nullptr, list);
  return list;
}

}  // namespace logitless::report
