// The compilation report as text.
#include <algorithm>
#include <map>
#include <variant>

#include "compiler/compiled.h"
#include "compiler/report/facts.h"
#include "core/check.h"
#include "logitless/plan.h"

namespace logitless {
namespace report {
namespace {

using State = CompiledProgram::State;

std::string region_text(const ir::ChunkedRegion& r) {
  const std::int64_t rounds = (r.extent + r.chunk - 1) / r.chunk;
  std::string text =
      concat("  ", r.seed, r.count > 1 ? concat(" and ", r.count - 1, " alike") : std::string(),
             "\n    along ", r.cut, ": ", r.extent, " in ", rounds, " chunk", rounds > 1 ? "s" : "",
             " of ", r.chunk, ", ", r.phases, " phase", r.phases > 1 ? "s" : "", "; arena ",
             bytes_text(r.before), " -> ", bytes_text(r.after), ", ",
             bytes_text(r.before - r.after), " saved");
  if (r.extra_work > 1e-4)
    text += concat("; ", fixed(100.0 * r.extra_work, 1), " % more multiply-adds");
  if (r.unit_cotangents)
    text +=
        "\n    gradients are computed for an upstream gradient of 1 and multiplied by it at the "
        "end";
  for (const std::string& b : r.boundaries) text += "\n    boundary: " + b;
  return text + "\n";
}

std::string head_text(const std::string& name, const ir::HeadRun& head) {
  const LossPlan& plan = *head.plan;
  return concat("  ", name, ": on the head engine, ", name_of(plan.kind), " plan, kernel ",
                plan.kernel, ", chunks of ", plan.chunk_tokens, " tokens, ", fixed(plan.passes, 1),
                " passes, workspace ", bytes_text(head.scratch_bytes), "\n");
}

// Returns a line for each kind of product with an epilogue: "  h0 and 3 more, 4096 x 768 x 768:
// bias". Names of one kind differ by digits.
std::string epilogues_text(const ir::Program& program) {
  struct Kind {
    std::string key;
    ProductEpilogue first;
    int count = 0;
  };
  std::vector<Kind> kinds;
  for (ProductEpilogue& e : epilogues(program)) {
    std::string key = e.epilogue;
    std::erase_if(key, [](char c) { return '0' <= c && c <= '9'; });
    key += e.size;
    auto kind =
        std::find_if(kinds.begin(), kinds.end(), [&](const Kind& k) { return k.key == key; });
    if (kind == kinds.end()) kind = kinds.insert(kind, {std::move(key), std::move(e)});
    ++kind->count;
  }
  std::string text = kinds.empty() ? "" : "products with epilogues:\n";
  for (const auto& [key, e, count] : kinds)
    text += concat("  ", e.product, count > 1 ? concat(" and ", count - 1, " more") : "", ", ",
                   e.size, ": ", e.epilogue, "\n");
  return text;
}

std::string peak_text(const std::string& name, const Stage& stage) {
  constexpr std::size_t kMost = 8;
  const Peak peak = peak_of(stage);
  std::string text = concat("peak", name, ", ", bytes_text(peak.bytes));
  if (peak.instruction >= 0)
    text += ", at " + text_of_instruction(stage, static_cast<std::size_t>(peak.instruction));
  text += ":\n";
  for (std::size_t i = 0; i < std::min(peak.live.size(), kMost); ++i)
    text += concat("    ", bytes_text(peak.live[i].bytes), "  ", peak.live[i].text, "\n");
  constexpr std::int64_t kMatters = 64;  // part of the peak
  for (const InResult& v : values_in_results(stage.program)) {
    if (v.bytes < peak.bytes / kMatters) break;
    text += concat("    in the memory of ", v.result, " until that is made: ", bytes_text(v.bytes),
                   "  ", v.name, "\n");
  }
  return text;
}

std::string memory_text(const State& s, const std::string& after) {
  std::string text =
      after.empty() ? concat("arena: ", bytes_text(s.program.arena_bytes), ", no loops")
                    : concat("arena: ", bytes_text(s.unchunked.arena_bytes), " without loops, ",
                             bytes_text(s.program.arena_bytes), " ", after);
  if (s.budget > 0) {
    const std::int64_t bytes = s.bounded_bytes(s.program);
    text += concat(" (budget ", bytes_text(s.budget),
                   bytes <= s.budget
                       ? std::string(", met)")
                       : concat(", NOT met: the least that was found is ", bytes_text(bytes), ")"));
  }
  return text + "\n";
}

std::string recomputed_text(const ir::RecomputedValues& r) {
  if (r.values == 0) return {};
  return concat("  ", r.values, " values computed again over the peak, ", bytes_text(r.given_up),
                " less kept; arena ", bytes_text(r.before), " -> ", bytes_text(r.after), "; ",
                fixed(100.0 * r.extra_work, 1), " % more multiply-adds\n");
}

// Lists at most `most` of the plans for other budgets, with the chosen one among them.
std::string plans_text(const State& s, std::size_t most) {
  if (s.plans.size() < 2) return {};
  std::string text = "plans (bytes of values, predicted seconds, multiply-adds):\n";
  const std::size_t every = (s.plans.size() + most - 1) / most;
  for (std::size_t i = 0; i < s.plans.size(); ++i) {
    const PlanPoint& p = s.plans[i];
    if (!p.chosen && i % every != 0 && i + 1 != s.plans.size()) continue;
    text += concat(p.chosen ? "  > " : "    ", bytes_text(static_cast<std::int64_t>(p.value_bytes)),
                   ", ", seconds_text(p.seconds), ", ", p.extra_work < 0.0 ? "" : "+",
                   fixed(100.0 * p.extra_work, 1), " %: ", p.what, "\n");
  }
  return text;
}

std::string work_text(const State& s, const std::string& after) {
  std::string more;
  if (s.program.multiply_adds > s.unchunked.multiply_adds * 1.0001)
    more =
        concat(", ", fixed(100.0 * (s.program.multiply_adds / s.unchunked.multiply_adds - 1.0), 1),
               " % more than without loops");
  return concat("work: ", fixed(s.program.multiply_adds / 1e9, 3), " G multiply-adds", more,
                ", predicted ", seconds_text(s.predicted_seconds),
                after.empty() ? "" : " (" + seconds_text(s.unchunked_seconds) + " without loops)",
                "; ", bytes_text(static_cast<std::int64_t>(ir::bytes_moved(s.program))),
                " read and written\n");
}

// Returns "%layer0.mlp" for a node, with its source location if known.
std::string name_and_place(const ir::Node& n) {
  const std::string& place = n.attributes->location;
  return concat("%", n.name.empty() ? std::string(ir::title_of(n)) : n.name,
                place.empty() ? "" : ", " + place);
}

// Adds a comment for each body that several loops share: its names and locations are those of one
// loop.
std::string shared_bodies(const ir::Graph& graph) {
  std::vector<const ir::Loop*> order;
  std::map<const ir::Loop*, std::vector<const ir::Node*>> loops;
  for (const ir::Node& n : graph.nodes()) {
    if (n.op != ir::Op::loop) continue;
    std::vector<const ir::Node*>& list = loops[n.attributes->loop.get()];
    if (list.empty()) order.push_back(n.attributes->loop.get());
    list.push_back(&n);
  }
  std::string text;
  for (const ir::Loop* loop : order) {
    const std::vector<const ir::Node*>& list = loops.at(loop);
    const std::size_t others = list.size() - 1;
    if (others == 0) continue;
    text += concat("# ", loop->symbol, ": names and places of ", name_and_place(*list[0]), ", and ",
                   others, " like it: ", name_and_place(*list[1]));
    if (others > 1) text += concat(others > 2 ? " ... " : " and ", name_and_place(*list.back()));
    text += "\n";
  }
  return text;
}

}  // namespace
}  // namespace report

std::string CompiledProgram::text() const {
  return report::shared_bodies(state_->graph) + ir::print(state_->graph);
}

std::string CompiledProgram::explain() const {
  using namespace report;
  const State& s = *state_;
  std::int64_t parameter_bytes = 0, result_bytes = 0;
  for (const Tensor& t : s.parameters) parameter_bytes += t.bytes();
  for (const Tensor& t : s.results) result_bytes += t.bytes();
  std::string text = concat(s.graph.name, ": parameters ", bytes_text(parameter_bytes),
                            ", results ", bytes_text(result_bytes), ", ", machine(s), "\n");
  const std::string after = what_was_done(s);
  text += memory_text(s, after) + work_text(s, after);
  for (const ir::Instruction& i : s.program.instructions) {
    if (const auto* head = std::get_if<ir::HeadRun>(&i.what)) text += head_text(i.name, *head);
  }
  text += epilogues_text(s.program);
  text += recomputed_text(s.recomputed);
  for (const ir::ChunkedRegion& r : s.regions) text += region_text(r);
  text += peak_text(after.empty() ? "" : " without loops", before_loops(s));
  if (!after.empty()) text += peak_text(" " + after, as_run(s));
  for (const std::string& r : s.refusals) text += concat("not chunked: ", r, "\n");
  constexpr std::size_t kMostPlans = 12;
  text += plans_text(s, kMostPlans);
  if (!s.search.empty()) text += concat("search: ", s.search, "\n");
  text += concat("compiled in ", fixed(s.seconds * 1e3, 1), " ms:");
  for (const State::PassTime& p : s.passes)
    text += concat(" ", p.name, " ", fixed(p.seconds * 1e3, 1));
  return text + "\n";
}

}  // namespace logitless
