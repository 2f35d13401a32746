#include "compiler/report/page.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "compiler/compiled.h"
#include "compiler/plan/arena.h"
#include "compiler/report/facts.h"
#include "core/check.h"
#include "logitless/bytes.h"
#include "logitless/plan.h"
#include "logitless/version.h"
#include "page/chart.h"
#include "page/html.h"

namespace logitless {
namespace report {
namespace {

using State = CompiledProgram::State;
using page::text_of;
using page::Unit;

constexpr std::size_t kMostRows = 24;  // rows of a table that could have thousands

std::string section(const std::string& title) { return "<h2>" + page::escaped(title) + "</h2>\n"; }
std::string note(const std::string& text) {
  return "<p class=\"note\">" + page::escaped(text) + "</p>\n";
}

std::string giga(double multiply_adds) { return fixed(multiply_adds / 1e9, 3) + " G"; }

std::string summary(const State& s, const std::string& after, const ReportFacts& about) {
  page::Facts facts;
  for (const auto& [name, value] : about) facts.add(name, value);
  facts.add("logitless", version());
  std::int64_t parameters = 0, results = 0;
  for (const CompiledProgram::Tensor& t : s.parameters) parameters += t.bytes();
  for (const CompiledProgram::Tensor& t : s.results) results += t.bytes();
  facts.add("compiled for", machine(s));
  facts.add("parameters", bytes_text(parameters));
  facts.add("results", bytes_text(results));
  facts.add("arena without loops", bytes_text(s.unchunked.arena_bytes));
  if (!after.empty()) {
    const auto saved = static_cast<double>(s.unchunked.arena_bytes - s.program.arena_bytes);
    facts.add(
        "arena " + after,
        concat(bytes_text(s.program.arena_bytes), ", ",
               fixed(100.0 * saved /
                         static_cast<double>(std::max<std::int64_t>(s.unchunked.arena_bytes, 1)),
                     1),
               " % less"));
  }
  if (s.budget > 0)
    facts.add("budget", concat(bytes_text(s.budget),
                               s.bounded_bytes(s.program) <= s.budget ? ", met" : ", NOT met"));
  const double extra = s.unchunked.multiply_adds > 0.0
                           ? s.program.multiply_adds / s.unchunked.multiply_adds - 1.0
                           : 0.0;
  facts.add(
      "multiply-adds",
      giga(s.program.multiply_adds) +
          (extra > 1e-4 ? ", " + fixed(100.0 * extra, 1) + " % more than without loops" : ""));
  facts.add("predicted time", after.empty()
                                  ? seconds_text(s.predicted_seconds)
                                  : concat(seconds_text(s.predicted_seconds), ", ",
                                           seconds_text(s.unchunked_seconds), " without loops"));
  if (s.recomputed.values > 0)
    facts.add("computed again", concat(s.recomputed.values, " values, ",
                                       bytes_text(s.recomputed.given_up), " less kept"));
  facts.add("read and written", bytes_text(static_cast<std::int64_t>(ir::bytes_moved(s.program))));
  facts.add("compiled in", text_of(s.seconds, Unit::seconds));
  return facts.html();
}

// Returns the memory over the instructions of one stage, in percent of them, and its peak in the
// legend.
page::Curve memory_curve(const std::string& name, const Stage& stage, const Peak& peak,
                         int colour) {
  const std::vector<std::int64_t> bytes = ir::live_bytes(stage.program);
  page::Curve curve{concat(name, ": peak ", bytes_text(peak.bytes)), page::Curve::Shape::bars,
                    colour};
  if (peak.instruction >= 0) {
    const std::string& at =
        stage.program.instructions[static_cast<std::size_t>(peak.instruction)].name;
    if (!at.empty()) curve.name += " at " + at;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    curve.points.push_back({100.0 * static_cast<double>(i) / static_cast<double>(bytes.size()),
                            static_cast<double>(bytes[i]), 0.0,
                            concat(name, ", ", i, ". ", text_of_instruction(stage, i), "\n",
                                   bytes_text(bytes[i]), " live")});
  }
  return curve;
}

// The column of source locations appears only if the program has some.
std::string live_table(const Peak& peak) {
  const bool places = std::any_of(peak.live.begin(), peak.live.end(),
                                  [](const Live& l) { return !l.location.empty(); });
  std::vector<page::Row> all;
  for (const Live& live : peak.live) {
    all.push_back({bytes_text(live.bytes), live.name, live.operation});
    if (places) all.back().push_back(live.location);
  }
  const std::vector<page::MergedRow> rows = page::merge_layers(all, 1);
  page::Table table(places ? page::Row{"bytes", "value", "operation", "written at"}
                           : page::Row{"bytes", "value", "operation"},
                    "><<<");
  std::int64_t rest = 0;
  std::size_t left_out = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i < kMostRows) {
      table.add(rows[i].cells);
      continue;
    }
    left_out += rows[i].from.size();
    for (const std::size_t live : rows[i].from) rest += peak.live[live].bytes;
  }
  if (rest > 0) table.add({bytes_text(rest), concat(left_out, " smaller ones")});
  return table.html() + page::merged_note(rows);
}

// Lays the memory without and with loops over each other. `after`: what_was_done(); empty: the
// programs are one.
std::string memory_section(const State& s, const std::string& after) {
  const Stage before = before_loops(s);
  const Peak peak_before = peak_of(before);
  page::Chart chart{{"instructions that have run, of all of the program", Unit::percent},
                    {"bytes that live while one runs", Unit::bytes, /*from_zero=*/true}};
  chart.end = 100.0;
  chart.curves.push_back(memory_curve("without loops", before, peak_before, after.empty() ? 0 : 1));
  const std::string live = "<h3>What lives at the peak without loops</h3>\n";
  if (after.empty())
    return section("Memory: no loops") + page::svg(chart) + live + live_table(peak_before);
  chart.curves.back().faint = true;
  const Peak peak = peak_of(as_run(s));
  chart.curves.push_back(memory_curve(after, as_run(s), peak, 0));
  return section(concat("Memory: ", bytes_text(s.unchunked.arena_bytes), " without loops, ",
                        bytes_text(s.program.arena_bytes), " ", after)) +
         page::svg(chart) + "<h3>What lives at the peak " + page::escaped(after) + "</h3>\n" +
         live_table(peak) + live + live_table(peak_before);
}

std::string loops_section(const State& s) {
  if (s.regions.empty()) return {};
  std::vector<page::Row> all;
  std::string boundaries;
  for (const ir::ChunkedRegion& r : s.regions) {
    const std::int64_t rounds = (r.extent + r.chunk - 1) / r.chunk;
    all.push_back({r.seed, r.cut, concat(rounds, " of ", page::thousands(r.chunk)),
                   concat(r.phases), bytes_text(r.before), bytes_text(r.after),
                   bytes_text(r.before - r.after),
                   r.extra_work > 1e-4 ? fixed(100.0 * r.extra_work, 1) + " %" : "none"});
    for (const std::string& b : r.boundaries) boundaries += note("boundary of a loop: " + b);
  }
  page::Table table(
      {"around", "cut along", "chunks", "phases", "before", "after", "saved", "extra work"},
      "<<>>>>>>");
  const std::vector<page::MergedRow> rows = page::merge_layers(all, 0);
  for (const page::MergedRow& row : rows) table.add(row.cells);
  return section("What each loop saved") + table.html() + page::merged_note(rows) + boundaries;
}

std::string heads_section(const State& s) {
  page::Table table({"head", "plan", "kernel", "tokens x vocabulary", "chunk", "passes",
                     "workspace", "f32 logits that never were"},
                    "<<<>>>>>");
  for (const ir::Instruction& i : s.program.instructions) {
    const auto* head = std::get_if<ir::HeadRun>(&i.what);
    if (head == nullptr) continue;
    const LossPlan& plan = *head->plan;
    table.add({i.name, std::string(name_of(plan.kind)), std::string(plan.kernel),
               concat(page::thousands(plan.shape.tokens), " x ", page::thousands(plan.shape.vocab)),
               concat(page::thousands(plan.chunk_tokens), " tokens"), fixed(plan.passes, 1),
               bytes_text(head->scratch_bytes),
               bytes_text(plan.shape.tokens * plan.shape.vocab * 4)});
  }
  return table.empty() ? std::string() : section("Heads") + table.html();
}

page::Row work_row(const std::string& name, const Work& w) {
  return {name, w.forward > 0.0 ? giga(w.forward) : "", w.backward > 0.0 ? giga(w.backward) : "",
          bytes_text(static_cast<std::int64_t>(w.bytes))};
}

// Shows the layers with the most work, in the order of the program.
std::string work_section(const State& s) {
  const std::vector<Work> work = work_by_layer(s.program);
  std::vector<page::Row> all;
  for (const Work& w : work) all.push_back(work_row(w.layer.empty() ? "(no name)" : w.layer, w));
  const std::vector<page::MergedRow> rows = page::merge_layers(all, 0);
  const auto weight = [&](const page::MergedRow& row) {
    const Work& w = work[row.from.front()];
    return (w.forward + w.backward + w.bytes) * static_cast<double>(row.from.size());
  };
  std::vector<double> weights;
  for (const page::MergedRow& row : rows) weights.push_back(weight(row));
  std::sort(weights.rbegin(), weights.rend());
  const double least = weights.size() > 2 * kMostRows ? weights[2 * kMostRows - 1] : 0.0;
  page::Table table({"layer", "multiply-adds forward", "of gradients", "read and written"}, "<>>>");
  Work rest;
  std::size_t left_out = 0;
  for (const page::MergedRow& row : rows) {
    if (weight(row) >= least) {
      table.add(row.cells);
      continue;
    }
    left_out += row.from.size();
    for (const std::size_t i : row.from) {
      rest.forward += work[i].forward;
      rest.backward += work[i].backward;
      rest.bytes += work[i].bytes;
    }
  }
  if (left_out > 0) table.add(work_row(concat(left_out, " others"), rest));
  return section("Work by layer") +
         note(
             "Values are counted where their name begins alike, gradients (d_...) apart; "
             "multiply-adds "
             "are those of products, attention and heads.") +
         table.html() + page::merged_note(rows);
}

std::string times_section(const std::vector<InstructionTime>& times) {
  if (times.empty()) return {};
  page::Table table({"instructions", "first", "count", "seconds", "share", "rate"}, "<<>>>>");
  double all = 0.0;
  for (const InstructionTime& t : times) all += t.seconds;
  for (std::size_t i = 0; i < std::min(times.size(), 2 * kMostRows); ++i) {
    const InstructionTime& t = times[i];
    const double of_flops = t.flops / t.seconds / 1e9, of_bytes = t.bytes / t.seconds / 1e9;
    table.add({t.what, t.name, page::thousands(t.count), text_of(t.seconds, Unit::seconds),
               text_of(100.0 * t.seconds / all, Unit::percent),
               t.flops > 0.0 ? fixed(of_flops, 1) + " GFLOP/s" : fixed(of_bytes, 1) + " GB/s"});
  }
  return section("Measured time: " + text_of(all, Unit::seconds)) + table.html();
}

std::string passes_section(const State& s) {
  page::Table table({"pass", "seconds", "operations after it"}, "<>>");
  for (const State::PassTime& p : s.passes)
    table.add({p.name, text_of(p.seconds, Unit::seconds), page::thousands(p.nodes)});
  return section("Passes") + table.html();
}

}  // namespace

std::string trade_off(std::vector<PlanPoint> points) {
  if (points.empty()) return {};
  std::sort(points.begin(), points.end(),
            [](const PlanPoint& a, const PlanPoint& b) { return a.arena_bytes < b.arena_bytes; });
  const bool timed =
      std::all_of(points.begin(), points.end(), [](const PlanPoint& p) { return p.seconds > 0.0; });
  page::Curve all{"programs that no other beats in both", page::Curve::Shape::line_and_dots, 0};
  page::Curve taken{"this one", page::Curve::Shape::dots, 1};
  page::Table table({"arena", "predicted time", "more multiply-adds", "program"}, ">>><");
  for (const PlanPoint& p : points) {
    const std::string bytes = format_bytes(p.arena_bytes),
                      more = fixed(100.0 * p.extra_work, 1) + " %",
                      time = p.seconds > 0.0 ? text_of(p.seconds, Unit::seconds) : "";
    const page::Point at{
        static_cast<double>(p.arena_bytes), timed ? p.seconds : 100.0 * p.extra_work, 0.0,
        concat(bytes, ", ", time, time.empty() ? "" : ", ", more, " more multiply-adds\n", p.what)};
    all.points.push_back(at);
    if (p.chosen) taken.points.push_back(at);
    table.add({bytes, time, more, p.what + (p.chosen ? " (this one)" : "")});
  }
  page::Chart chart;
  chart.x = {"arena", Unit::bytes, /*from_zero=*/true};
  chart.y = {"more multiply-adds", Unit::percent, /*from_zero=*/true};
  if (timed) chart.y = {"predicted time of a run", Unit::seconds};
  chart.curves = {std::move(all), std::move(taken)};
  return section("Memory against time") + page::svg(chart) + table.html();
}

}  // namespace report

std::string CompiledProgram::report_html(const std::vector<InstructionTime>& times,
                                         const ReportFacts& about) const {
  using namespace report;
  const State& s = *state_;
  const std::string after = what_was_done(s);
  std::string body = "<h1>" + page::escaped(s.graph.name) + "</h1>\n" + summary(s, after, about);
  body += memory_section(s, after) + loops_section(s) + heads_section(s);
  body += trade_off(s.plans);
  body += times_section(times) + work_section(s) + passes_section(s);
  body += section("Decisions") + "<pre>" + page::escaped(explain()) + "</pre>\n";
  return page::document(s.graph.name + ": memory and work", body);
}

}  // namespace logitless
