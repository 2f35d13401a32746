// The compilation report as JSON.

#include "json/json.h"

#include "compiler/compiled.h"
#include "compiler/plan/arena.h"
#include "compiler/report/facts.h"
#include "logitless/plan.h"

namespace logitless {
namespace report {
namespace {

using State = CompiledProgram::State;

Json timeline(const Stage& stage) {
  Json list = Json::array();
  const std::vector<std::int64_t> bytes = ir::live_bytes(stage.program);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const ir::Instruction& instruction = stage.program.instructions[i];
    Json entry = {{"instruction", instruction.name}, {"bytes", bytes[i]}};
    if (instruction.node >= 0) {
      const std::string& location = stage.graph.node(instruction.node).attributes->location;
      if (!location.empty()) entry["location"] = location;
    }
    list.push_back(std::move(entry));
  }
  return list;
}

Json memory(const Stage& stage, double seconds) {
  const Peak peak = peak_of(stage);
  Json live = Json::array();
  for (const Live& l : peak.live) {
    live.push_back({{"value", l.name},
                    {"operation", l.operation},
                    {"location", l.location},
                    {"bytes", l.bytes}});
  }
  Json inside = Json::array();
  for (const InResult& v : values_in_results(stage.program))
    inside.push_back({{"value", v.name}, {"result", v.result}, {"bytes", v.bytes}});
  return {{"arena_bytes", stage.program.arena_bytes},
          {"in_results", inside},
          {"live_bytes", peak.bytes},
          {"multiply_adds", stage.program.multiply_adds},
          {"predicted_seconds", seconds},
          {"bytes_moved", ir::bytes_moved(stage.program)},
          {"at_peak", live},
          {"timeline", timeline(stage)}};
}

Json heads(const ir::Program& program) {
  Json list = Json::array();
  for (const ir::Instruction& i : program.instructions) {
    const auto* head = std::get_if<ir::HeadRun>(&i.what);
    if (head == nullptr) continue;
    const LossPlan& plan = *head->plan;
    list.push_back({{"head", i.name},
                    {"plan", name_of(plan.kind)},
                    {"kernel", plan.kernel},
                    {"tokens", plan.shape.tokens},
                    {"vocab", plan.shape.vocab},
                    {"dim", plan.shape.dim},
                    {"chunk_tokens", plan.chunk_tokens},
                    {"passes", plan.passes},
                    {"workspace_bytes", head->scratch_bytes}});
  }
  return list;
}

Json epilogues_json(const ir::Program& program) {
  Json list = Json::array();
  for (const ProductEpilogue& e : epilogues(program))
    list.push_back({{"product", e.product}, {"size", e.size}, {"epilogue", e.epilogue}});
  return list;
}

Json work(const ir::Program& program) {
  Json list = Json::array();
  for (const Work& w : work_by_layer(program)) {
    list.push_back({{"layer", w.layer},
                    {"forward_multiply_adds", w.forward},
                    {"backward_multiply_adds", w.backward},
                    {"bytes_moved", w.bytes}});
  }
  return list;
}

Json regions(const State& s) {
  Json list = Json::array();
  for (const ir::ChunkedRegion& r : s.regions) {
    list.push_back({{"seed", r.seed},
                    {"count", r.count},
                    {"cut", r.cut},
                    {"extent", r.extent},
                    {"chunk", r.chunk},
                    {"phases", r.phases},
                    {"unit_cotangents", r.unit_cotangents},
                    {"arena_before", r.before},
                    {"arena_after", r.after},
                    {"extra_work", r.extra_work},
                    {"boundaries", r.boundaries}});
  }
  return list;
}

Json recomputed(const ir::RecomputedValues& r) {
  return {{"values", r.values},
          {"bytes_given_up", r.given_up},
          {"arena_before", r.before},
          {"arena_after", r.after},
          {"extra_work", r.extra_work}};
}

Json plans_json(const State& s) {
  Json list = Json::array();
  for (const PlanPoint& p : s.plans) {
    list.push_back({{"value_bytes", p.value_bytes},
                    {"arena_bytes", p.arena_bytes},
                    {"seconds", p.seconds},
                    {"extra_work", p.extra_work},
                    {"what", p.what},
                    {"chosen", p.chosen}});
  }
  return list;
}

}  // namespace
}  // namespace report

std::string CompiledProgram::report_json() const {
  using namespace report;
  const State& s = *state_;
  Json passes = Json::array();
  for (const State::PassTime& p : s.passes)
    passes.push_back({{"name", p.name}, {"seconds", p.seconds}, {"nodes", p.nodes}});
  return Json{{"program", s.graph.name},
              {"threads", s.threads},
              {"budget", s.budget},
              {"seconds", s.seconds},
              {"before", memory(before_loops(s), s.unchunked_seconds)},
              {"after", memory(as_run(s), s.predicted_seconds)},
              {"plans", plans_json(s)},
              {"search", s.search},
              {"regions", regions(s)},
              {"heads", heads(s.program)},
              {"recomputed", recomputed(s.recomputed)},
              {"not_chunked", s.refusals},
              {"passes", passes},
              {"epilogues", epilogues_json(s.program)},
              {"work", work(s.program)}}
      .dump(2);
}

}  // namespace logitless
