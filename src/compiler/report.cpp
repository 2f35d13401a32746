// What was done and why: as text, JSON and a page.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "compiler/compiled.h"
#include "compiler/plan/arena.h"
#include "core/check.h"
#include "logitless/plan.h"

namespace logitless {
namespace {

using Json = nlohmann::ordered_json;
using State = CompiledProgram::State;

std::string bytes_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

// "12.3 ms"
std::string seconds_text(double seconds) {
  if (seconds >= 1.0) return fixed(seconds, 2) + " s";
  return seconds >= 1e-3 ? fixed(1e3 * seconds, 2) + " ms" : fixed(1e6 * seconds, 1) + " us";
}

// The most that lives at once, and what it is.
struct Peak {
  int instruction = -1;
  std::int64_t bytes = 0;
  std::vector<std::pair<std::string, std::int64_t>> live;  // biggest first
};
Peak peak_of(const ir::Program& program) {
  const std::vector<std::int64_t> bytes = ir::live_bytes(program);
  Peak peak;
  if (bytes.empty()) return peak;
  peak.instruction = static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
  peak.bytes = bytes[static_cast<std::size_t>(peak.instruction)];
  for (const int b : ir::live_at(program, peak.instruction)) {
    const ir::Buffer& buffer = program.buffers[static_cast<std::size_t>(b)];
    peak.live.emplace_back(buffer.name, buffer.bytes);
  }
  return peak;
}

std::string region_text(const ir::ChunkedRegion& r) {
  const std::int64_t rounds = (r.extent + r.chunk - 1) / r.chunk;
  std::string text =
      concat("  ", r.seed, r.count > 1 ? concat(" and ", r.count - 1, " alike") : std::string(),
             "\n    along ", r.cut, ": ", r.extent, " in ", rounds, " chunk", rounds > 1 ? "s" : "",
             " of ", r.chunk, ", ", r.phases, " phase", r.phases > 1 ? "s" : "", "; arena ",
             bytes_text(r.before), " -> ", bytes_text(r.after));
  if (r.extra_work > 1e-4)
    text += concat("; ", fixed(100.0 * r.extra_work, 1), " % more multiply-adds");
  if (r.unit_tangents)
    text += "\n    gradients are computed for a tangent of 1 and multiplied by it at the end";
  for (const std::string& b : r.boundaries) text += "\n    boundary: " + b;
  return text + "\n";
}

Json timeline(const ir::Program& program) {
  Json list = Json::array();
  const std::vector<std::int64_t> bytes = ir::live_bytes(program);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    list.push_back({{"instruction", program.instructions[i].name}, {"bytes", bytes[i]}});
  return list;
}
Json memory(const ir::Program& program, double seconds) {
  const Peak peak = peak_of(program);
  Json live = Json::array();
  for (const auto& [name, bytes] : peak.live) live.push_back({{"value", name}, {"bytes", bytes}});
  return {{"arena_bytes", program.arena_bytes},
          {"live_bytes", peak.bytes},
          {"multiply_adds", program.multiply_adds},
          {"predicted_seconds", seconds},
          {"bytes_moved", ir::bytes_moved(program)},
          {"at_peak", live},
          {"timeline", timeline(program)}};
}

std::string head_text(const std::string& name, const ir::HeadRun& head) {
  const LossPlan& plan = *head.plan;
  return concat("  ", name, ": on the head engine, ", name_of(plan.kind), " plan, kernel ",
                plan.kernel, ", chunks of ", plan.chunk_tokens, " tokens, ", fixed(plan.passes, 1),
                " passes, workspace ", bytes_text(head.scratch_bytes), "\n");
}

// "with loops", "with loops, recomputation and the head engine", or empty: what the program has
// that the one without loops has not.
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

std::string recomputed_text(const ir::RecomputedValues& r) {
  if (r.values == 0) return {};
  return concat("  ", r.values, " values computed again over the peak, ", bytes_text(r.given_up),
                " less kept; arena ", bytes_text(r.before), " -> ", bytes_text(r.after), "; ",
                fixed(100.0 * r.extra_work, 1), " % more multiply-adds\n");
}
Json recomputed_json(const ir::RecomputedValues& r) {
  return {{"values", r.values},
          {"bytes_given_up", r.given_up},
          {"arena_before", r.before},
          {"arena_after", r.after},
          {"extra_work", r.extra_work}};
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

// (name, what it does before it stores) of products that do something; loops' bodies once.
std::vector<std::pair<std::string, std::string>> epilogues(const ir::Program& program) {
  std::vector<std::pair<std::string, std::string>> list;
  for (const ir::Instruction& i : program.instructions) {
    const auto* gemm = std::get_if<ir::Gemm>(&i.what);
    if (gemm != nullptr && gemm->epilogue.any())
      list.emplace_back(i.name, ir::text_of(gemm->epilogue));
    if (const auto* loop = std::get_if<ir::LoopRun>(&i.what)) {
      const auto inside = epilogues(*loop->body);
      list.insert(list.end(), inside.begin(), inside.end());
    }
  }
  return list;
}
// "products with epilogues: 24 with bias; 12 with bias, residual"
std::string epilogues_text(const ir::Program& program) {
  std::vector<std::pair<std::string, int>> counts;
  for (const auto& [name, what] : epilogues(program)) {
    const auto seen = std::find_if(counts.begin(), counts.end(),
                                   [&what = what](const auto& c) { return c.first == what; });
    if (seen != counts.end())
      ++seen->second;
    else
      counts.emplace_back(what, 1);
  }
  std::string text;
  for (const auto& [what, count] : counts)
    text += concat(text.empty() ? "products with epilogues: " : "; ", count, " with ", what);
  return text.empty() ? text : text + "\n";
}
Json epilogues_json(const ir::Program& program) {
  Json list = Json::array();
  for (const auto& [name, what] : epilogues(program))
    list.push_back({{"product", name}, {"epilogue", what}});
  return list;
}

Json plans(const State& s) {
  Json list = Json::array();
  for (const PlanPoint& p : s.plans)
    list.push_back({{"value_bytes", p.value_bytes},
                    {"arena_bytes", p.arena_bytes},
                    {"seconds", p.seconds},
                    {"extra_work", p.extra_work},
                    {"what", p.what},
                    {"chosen", p.chosen}});
  return list;
}
// What other budgets would bring: at most `most` of the plans, the chosen one among them.
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

Json report(const State& s) {
  Json regions = Json::array();
  for (const ir::ChunkedRegion& r : s.regions) {
    regions.push_back({{"seed", r.seed},
                       {"count", r.count},
                       {"cut", r.cut},
                       {"extent", r.extent},
                       {"chunk", r.chunk},
                       {"phases", r.phases},
                       {"unit_tangents", r.unit_tangents},
                       {"arena_before", r.before},
                       {"arena_after", r.after},
                       {"extra_work", r.extra_work},
                       {"boundaries", r.boundaries}});
  }
  Json passes = Json::array();
  for (const State::PassTime& p : s.passes)
    passes.push_back({{"name", p.name}, {"seconds", p.seconds}, {"nodes", p.nodes}});
  return {{"program", s.graph.name},
          {"threads", s.threads},
          {"budget", s.budget},
          {"seconds", s.seconds},
          {"before", memory(s.unchunked, s.unchunked_seconds)},
          {"after", memory(s.program, s.predicted_seconds)},
          {"plans", plans(s)},
          {"search", s.search},
          {"regions", regions},
          {"heads", heads(s.program)},
          {"recomputed", recomputed_json(s.recomputed)},
          {"not_chunked", s.refusals},
          {"passes", passes},
          {"epilogues", epilogues_json(s.program)}};
}

// What it was compiled for.
std::string machine(const State& s) {
  if (s.device.kind == DeviceKind::cpu)
    return concat(s.threads, " thread", s.threads > 1 ? "s" : "");
  const int capability = s.device.compute_capability;
  return concat("a GPU of compute capability ", capability / 10, ".", capability % 10);
}

}  // namespace

std::string CompiledProgram::text() const { return ir::print(state_->graph); }

std::string CompiledProgram::report_json() const { return report(*state_).dump(2); }

std::string CompiledProgram::explain() const {
  const State& s = *state_;
  std::int64_t parameter_bytes = 0, result_bytes = 0;
  for (const Tensor& t : s.parameters) parameter_bytes += t.bytes();
  for (const Tensor& t : s.results) result_bytes += t.bytes();
  std::string text = concat(s.graph.name, ": parameters ", bytes_text(parameter_bytes),
                            ", results ", bytes_text(result_bytes), ", ", machine(s), "\n");
  const std::string after = what_was_done(s);
  text += after.empty() ? concat("arena: ", bytes_text(s.program.arena_bytes), ", no loops")
                        : concat("arena: ", bytes_text(s.unchunked.arena_bytes), " without loops, ",
                                 bytes_text(s.program.arena_bytes), " ", after);
  if (s.budget > 0)
    text += concat(" (budget ", bytes_text(s.budget),
                   s.bounded_bytes(s.program) <= s.budget ? ", met)" : ", NOT met)");
  text += concat(
      "\nwork: ", fixed(s.program.multiply_adds / 1e9, 3), " G multiply-adds",
      s.program.multiply_adds > s.unchunked.multiply_adds * 1.0001
          ? concat(", ",
                   fixed(100.0 * (s.program.multiply_adds / s.unchunked.multiply_adds - 1.0), 1),
                   " % more than without loops")
          : std::string(),
      ", predicted ", seconds_text(s.predicted_seconds),
      after.empty() ? "" : " (" + seconds_text(s.unchunked_seconds) + " without loops)", "; ",
      bytes_text(static_cast<std::int64_t>(ir::bytes_moved(s.program))), " read and written\n");
  for (const ir::Instruction& i : s.program.instructions) {
    if (const auto* head = std::get_if<ir::HeadRun>(&i.what)) text += head_text(i.name, *head);
  }
  text += epilogues_text(s.program);
  text += recomputed_text(s.recomputed);
  for (const ir::ChunkedRegion& r : s.regions) text += region_text(r);
  const auto show_peak = [&](const std::string& name, const ir::Program& program) {
    const Peak peak = peak_of(program);
    text += concat("peak", name, ", ", bytes_text(peak.bytes), ":\n");
    for (std::size_t i = 0; i < std::min<std::size_t>(peak.live.size(), 8); ++i)
      text += concat("    ", bytes_text(peak.live[i].second), "  ", peak.live[i].first, "\n");
  };
  show_peak(after.empty() ? "" : " without loops", s.unchunked);
  if (!after.empty()) show_peak(" " + after, s.program);
  for (const std::string& r : s.refusals) text += concat("not chunked: ", r, "\n");
  constexpr std::size_t kMostPlans = 12;
  text += plans_text(s, kMostPlans);
  if (!s.search.empty()) text += concat("search: ", s.search, "\n");
  text += concat("compiled in ", fixed(s.seconds * 1e3, 1), " ms:");
  for (const State::PassTime& p : s.passes)
    text += concat(" ", p.name, " ", fixed(p.seconds * 1e3, 1));
  return text + "\n";
}

namespace {

// Steps of memory over instructions as an SVG path in a box.
std::string curve(const std::vector<std::int64_t>& bytes, double top, double width, double height) {
  std::string d = concat("M0 ", fixed(height, 1));
  const double step = width / static_cast<double>(std::max<std::size_t>(bytes.size(), 1));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const double y = height - height * static_cast<double>(bytes[i]) / top;
    d += concat(" L", fixed(step * static_cast<double>(i), 1), " ", fixed(y, 1), " L",
                fixed(step * static_cast<double>(i + 1), 1), " ", fixed(y, 1));
  }
  return d + concat(" L", fixed(width, 1), " ", fixed(height, 1), " Z");
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string panel(const std::string& title, const ir::Program& program, double top) {
  constexpr double kWidth = 900.0, kHeight = 220.0;
  const std::vector<std::int64_t> bytes = ir::live_bytes(program);
  const Peak peak = peak_of(program);
  std::string html = concat(
      "<h2>", title, ": ", bytes_text(program.arena_bytes), "</h2>\n<svg viewBox=\"0 0 ", kWidth,
      " ", kHeight + 4, "\" width=\"100%\"><path d=\"", curve(bytes, top, kWidth, kHeight), "\"/>");
  if (peak.instruction >= 0) {
    const double x =
        kWidth * (static_cast<double>(peak.instruction) + 0.5) / static_cast<double>(bytes.size());
    html += concat("<line x1=\"", fixed(x, 1), "\" x2=\"", fixed(x, 1), "\" y1=\"0\" y2=\"",
                   kHeight, "\"/>");
  }
  html += "</svg>\n<table><tr><th>at the peak</th><th>bytes</th></tr>\n";
  for (std::size_t i = 0; i < std::min<std::size_t>(peak.live.size(), 24); ++i)
    html += concat("<tr><td>", escaped(peak.live[i].first), "</td><td>",
                   bytes_text(peak.live[i].second), "</td></tr>\n");
  return html + "</table>\n";
}

}  // namespace

std::string CompiledProgram::report_html() const {
  const State& s = *state_;
  const std::string after = what_was_done(s);
  const double top = static_cast<double>(
      std::max<std::int64_t>({peak_of(s.unchunked).bytes, peak_of(s.program).bytes, 1}));
  return concat("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>",
                escaped(s.graph.name),
                ": memory</title>\n<style>\n"
                "body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; "
                "padding: 0 1rem; color: #222; }\n"
                "svg { background: #f6f6f4; border: 1px solid #ddd; } path { fill: #4a7fb5; } line "
                "{ stroke: #c33; stroke-dasharray: 4 3; }\n"
                "table { border-collapse: collapse; } td, th { padding: .1rem 1.5rem .1rem 0; "
                "text-align: left; }\n"
                "pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; }\n"
                "@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } "
                "svg, pre { background: #262626; border-color: #444; } }\n"
                "</style></head><body>\n<h1>",
                escaped(s.graph.name),
                "</h1>\n<p>Bytes of the arena that live while each instruction runs, on one scale; "
                "the dashed line is the peak.</p>\n",
                panel(after.empty() ? "No loops" : "Without loops", s.unchunked, top),
                after.empty() ? "" : panel("W" + after.substr(1), s.program, top),
                "<h2>Decisions</h2>\n<pre>", escaped(explain()), "</pre>\n</body></html>\n");
}

}  // namespace logitless
