#include "train/run/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <span>
#include <utility>

#include "logitless/bytes.h"
#include "page/chart.h"
#include "page/html.h"

namespace logitless::train {
namespace {

using page::Chart;
using page::Curve;
using page::Unit;
using Step = RunRecord::Step;

std::string section(const std::string& title) { return "<h2>" + page::escaped(title) + "</h2>\n"; }
std::string note(const std::string& text) {
  return "<p class=\"note\">" + page::escaped(text) + "</p>\n";
}
using page::thousands;
std::string number_text(const Json& number) { return thousands(number.get<std::int64_t>()); }
std::string bytes_text(const Json& bytes) { return format_bytes(bytes.get<std::size_t>()); }

constexpr std::size_t kMostLive = 12;  // rows of the values at the peak

page::Axis step_axis() { return {"step", Unit::number}; }

// Returns the moving mean of `values` over `radius` neighbours on each side.
std::vector<double> smooth(std::span<const double> values, std::ptrdiff_t radius) {
  std::vector<double> sums(values.size() + 1, 0.0);
  std::partial_sum(values.begin(), values.end(), sums.begin() + 1);
  std::vector<double> means;
  const std::ptrdiff_t count = std::ssize(values);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const std::ptrdiff_t near = std::min({radius, i, count - 1 - i});
    const auto first = static_cast<std::size_t>(i - near),
               end = static_cast<std::size_t>(i + near + 1);
    means.push_back((sums[end] - sums[first]) / static_cast<double>(end - first));
  }
  return means;
}

// Adds a curve of the values and, where they are noisy, one of their moving mean.
template <typename Value>
void add_curves(Chart& chart, const std::vector<Step>& steps, const std::string& name, int colour,
                Value&& value) {
  constexpr std::size_t kNoisy = 40;
  std::vector<double> values;
  Curve raw{name, Curve::Shape::line, colour};
  for (const Step& s : steps) {
    values.push_back(value(s));
    raw.points.push_back({static_cast<double>(s.step), values.back()});
  }
  if (steps.size() < kNoisy) {
    raw.shape = Curve::Shape::line_and_dots;
    chart.curves.push_back(std::move(raw));
    return;
  }
  const std::ptrdiff_t radius = std::max<std::ptrdiff_t>(2, std::ssize(steps) / 100);
  const std::vector<double> means = smooth(values, radius);
  Curve mean{fmt::format("{}, mean of {} steps", name, 2 * radius + 1), Curve::Shape::line, colour};
  for (std::size_t i = 0; i < steps.size(); ++i)
    mean.points.push_back({static_cast<double>(steps[i].step), means[i]});
  raw.faint = true;
  chart.curves.push_back(std::move(raw));
  chart.curves.push_back(std::move(mean));
}

void mark_resumes(Chart& chart, const RunRecord& r) {
  for (const Json& header : r.headers) {
    const auto step = header["first_step"].get<std::int64_t>();
    if (step > 0) chart.marks.push_back({static_cast<double>(step), false, "resumed"});
  }
}

std::string option_text(const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_integer()) return number_text(value);
  if (value.is_number()) return fmt::format("{}", value.get<double>());
  if (!value.is_array()) return value.is_string() ? value.get<std::string>() : value.dump();
  std::string all;
  for (const Json& one : value) all += (all.empty() ? "" : ", ") + option_text(one);
  return all;
}

// Says which run it is: "gpt2 with 124,439,808 parameters, 800 steps of 4,096 tokens, bf16".
std::string title_of(const RunRecord& r) {
  const Json& last = r.headers.back();
  const Json& model = last["model"];
  return fmt::format("{} with {} parameters, {} steps of {} tokens, {}",
                     model["type"].get<std::string>(), number_text(model["parameters"]),
                     number_text(last["steps"]), number_text(last["tokens_per_step"]),
                     model.contains("dtype") ? option_text(model["dtype"]) : "f32");
}

std::string summary(const RunRecord& r) {
  const Json& last = r.headers.back();
  const Json& model = last["model"];
  page::Facts facts;
  facts.add("log", std::filesystem::path(r.path).filename().string());
  facts.add("model", fmt::format("{}: vocabulary {}, {} layers of {}, {} heads, {} positions",
                                 model["type"].get<std::string>(), number_text(model["vocab"]),
                                 number_text(model["layers"]), number_text(model["dim"]),
                                 number_text(model["heads"]), number_text(model["context"])));
  facts.add("device", last["device"].get<std::string>());
  const std::int64_t done =
      r.steps.empty() ? last["first_step"].get<std::int64_t>() : r.steps.back().step;
  facts.add("steps", fmt::format("{} of {}, {} tokens each", thousands(done),
                                 number_text(last["steps"]), number_text(last["tokens_per_step"])));
  if (!r.steps.empty()) {
    facts.add("tokens", thousands(r.steps.back().tokens));
    facts.add("loss of the last step", fmt::format("{:.4f} nats a token", r.steps.back().loss));
    double seconds = 0.0;
    for (const Step& s : r.steps) seconds += s.seconds;
    facts.add("time of the steps", page::text_of(seconds, Unit::seconds));
  }
  if (!r.validations.empty()) {
    const auto& best =
        *std::min_element(r.validations.begin(), r.validations.end(),
                          [](const auto& a, const auto& b) { return a.loss < b.loss; });
    facts.add("validation",
              fmt::format("{:.4f} at the end, perplexity {:.2f}; best {:.4f} at step {}",
                          r.validations.back().loss, std::exp(r.validations.back().loss), best.loss,
                          thousands(best.step)));
  }
  for (const Json& header : r.headers)
    facts.add(
        header["first_step"].get<std::int64_t>() == 0 && &header == &r.headers.front() ? "began"
                                                                                       : "resumed",
        fmt::format("{} at step {}, logitless {}", header["time"].get<std::string>(),
                    number_text(header["first_step"]), header["logitless"].get<std::string>()));
  for (const RunRecord::End& end : r.ends)
    facts.add("ended", fmt::format("at step {}: {}", thousands(end.step), end.reason));
  std::string html = facts.html();
  if (r.torn) html += note("The last line of the log is not whole: it is left out.");
  return html;
}

std::string loss_section(const RunRecord& r) {
  Chart chart{step_axis(), {"loss, nats a token", Unit::number}};
  chart.height = 300.0;
  add_curves(chart, r.steps, "training", 0, [](const Step& s) { return s.loss; });
  Curve validation{"validation", Curve::Shape::line_and_dots, 1};
  for (const RunRecord::Validation& v : r.validations) {
    validation.points.push_back({static_cast<double>(v.step), v.loss, 0.0,
                                 fmt::format("step {}: {:.4f}, perplexity {:.2f}",
                                             thousands(v.step), v.loss, std::exp(v.loss))});
  }
  if (!validation.points.empty()) chart.curves.push_back(std::move(validation));
  mark_resumes(chart, r);
  return section("Loss") + page::svg(chart);
}

std::string rates_section(const RunRecord& r) {
  Chart rate{step_axis(), {"learning rate", Unit::number, /*from_zero=*/true}};
  Curve line{{}, Curve::Shape::line, 2};
  for (const Step& s : r.steps) line.points.push_back({static_cast<double>(s.step), s.rate});
  rate.curves.push_back(std::move(line));
  rate.height = 160.0;
  Chart norm{step_axis(), {"norm of the gradients", Unit::number, /*from_zero=*/true}};
  add_curves(norm, r.steps, "before clipping", 3, [](const Step& s) { return s.norm; });
  norm.height = 160.0;
  return section("Learning rate and gradients") + page::svg(rate) + page::svg(norm);
}

std::string speed_section(const RunRecord& r) {
  Chart chart{step_axis(), {"tokens a second", Unit::number, /*from_zero=*/true}};
  add_curves(chart, r.steps, "tokens a second", 0,
             [](const Step& s) { return s.tokens_per_second; });
  mark_resumes(chart, r);
  return section("Speed") + page::svg(chart);
}

struct Kind {
  std::string name;
  std::size_t bytes;
};
// Returns the buffers other than the arena, which live for the whole step.
std::vector<Kind> kinds_of(const Json& memory) {
  std::vector<Kind> kinds;
  const std::pair<const char*, const char*> names[] = {{"parameter_bytes", "weights"},
                                                       {"moment_bytes", "moments"},
                                                       {"gradient_bytes", "gradients"},
                                                       {"table_bytes", "tables of positions"},
                                                       {"far_workspace_bytes", "far field"}};
  for (const auto& [key, name] : names) {
    if (const auto bytes = memory[key].get<std::size_t>(); bytes > 0)
      kinds.push_back({name, bytes});
  }
  return kinds;
}

std::string memory_section(const RunRecord& r) {
  const Json &header = r.headers.back(), &memory = header["memory"];
  const Json& timeline = header["program"]["timeline"];
  const auto count = static_cast<double>(timeline.size());
  Chart chart{{"instruction of a step, in the order that they run in"},
              {"bytes", Unit::bytes, /*from_zero=*/true}};
  chart.end = count;
  double base = 0.0;
  int colour = 0;
  page::Table table({"kind", "bytes"}, "<>");
  for (const Kind& kind : kinds_of(memory)) {
    const double top = base + static_cast<double>(kind.bytes);
    const std::string text = fmt::format("{}: {}", kind.name, format_bytes(kind.bytes));
    chart.curves.push_back({kind.name,
                            Curve::Shape::bars,
                            colour++ % page::kColours,
                            false,
                            {{0.0, top, base, text}}});
    table.add({kind.name, format_bytes(kind.bytes)});
    base = top;
  }
  Curve values{"values in the arena", Curve::Shape::bars, 5};
  double most = base;
  for (std::size_t i = 0; i < timeline.size(); ++i) {
    const auto bytes = timeline[i].get<std::int64_t>();
    values.points.push_back({static_cast<double>(i), base + static_cast<double>(bytes), base});
    most = std::max(most, values.points.back().y);
  }
  chart.curves.push_back(std::move(values));
  const auto arena = memory["arena_bytes"].get<double>();
  chart.marks.push_back(
      {base + arena, true, "with the arena of " + bytes_text(memory["arena_bytes"])});
  chart.most_y = std::max(most, base + arena);
  table.add({"arena of a step", bytes_text(memory["arena_bytes"])});
  table.add({"all", format_bytes(static_cast<std::size_t>(base + arena))});
  std::string device;
  if (memory.contains("device") && !memory["device"].empty()) {
    page::Table items({"on the GPU", "bytes"}, "<>");
    for (const auto& [name, bytes] : memory["device"].items()) items.add({name, bytes_text(bytes)});
    device = items.html();
  }
  page::Table peak({"bytes", "value at the arena's peak", "operation"}, "><<");
  std::vector<page::Row> live;
  for (const Json& l : header["program"]["at_peak"])
    live.push_back(
        {bytes_text(l["bytes"]), l["value"].get<std::string>(), l["operation"].get<std::string>()});
  std::vector<page::MergedRow> rows = page::merge_layers(live, 1);
  if (rows.size() > kMostLive) rows.resize(kMostLive);
  for (const page::MergedRow& row : rows) peak.add(row.cells);
  return section("Memory over a step") + page::svg(chart) + table.html() + device + peak.html() +
         page::merged_note(rows);
}

std::string saved_section(const RunRecord& r) {
  const Json &header = r.headers.back(), &memory = header["memory"], &program = header["program"];
  const auto whole = memory["unchunked_arena_bytes"].get<std::int64_t>(),
             arena = memory["arena_bytes"].get<std::int64_t>();
  std::string html = section("What the head and the loops saved");
  html += fmt::format(
      "<p>The arena of a step takes {}; without loops and the head engine it would take {}.</p>\n",
      format_bytes(static_cast<std::size_t>(arena)), format_bytes(static_cast<std::size_t>(whole)));
  page::Table heads({"head", "plan", "kernel", "tokens x vocabulary", "chunk", "workspace",
                     "f32 logits that never were"},
                    "<<<>>>>");
  for (const Json& h : program["heads"]) {
    const auto tokens = h["tokens"].get<std::int64_t>(), vocab = h["vocab"].get<std::int64_t>();
    heads.add({h["head"].get<std::string>(), h["plan"].get<std::string>(),
               h["kernel"].get<std::string>(), thousands(tokens) + " x " + thousands(vocab),
               number_text(h["chunk_tokens"]) + " tokens", bytes_text(h["workspace_bytes"]),
               format_bytes(static_cast<std::size_t>(tokens * vocab * 4))});
  }
  if (!heads.empty()) html += heads.html();
  std::vector<page::Row> all;
  for (const Json& l : program["regions"]) {
    const auto extent = l["extent"].get<std::int64_t>(), chunk = l["chunk"].get<std::int64_t>();
    all.push_back(
        {l["seed"].get<std::string>(), l["cut"].get<std::string>(),
         fmt::format("{} of {}", (extent + chunk - 1) / chunk, thousands(chunk)),
         bytes_text(l["arena_before"]), bytes_text(l["arena_after"]),
         page::text_of(100.0 * std::max(l["extra_work"].get<double>(), 0.0), Unit::percent)});
  }
  page::Table loops(
      {"loop around", "cut along", "chunks", "arena before", "after", "more multiply-adds"},
      "<<>>>>");
  const std::vector<page::MergedRow> rows = page::merge_layers(all, 0);
  for (const page::MergedRow& row : rows) loops.add(row.cells);
  return html + (loops.empty() ? note("No loops.") : loops.html() + page::merged_note(rows));
}

std::string far_section(const RunRecord& r) {
  const std::string refusal = r.headers.back()["far_refusal"].get<std::string>();
  const bool any =
      std::any_of(r.steps.begin(), r.steps.end(), [](const Step& s) { return s.far.has_value(); });
  if (!any && refusal.empty()) return {};
  std::string html = section("Far field");
  if (!refusal.empty()) html += note("Every step is dense: " + refusal);
  if (!any) return html;
  Curve selected{"tiles selected, mean since the head was made", Curve::Shape::line, 2};
  Curve error{"relative error of the last audit", Curve::Shape::line, 1};
  Curve dense{"dense steps of all", Curve::Shape::line, 0};
  const RunRecord::Far* last = nullptr;
  for (const Step& s : r.steps) {
    if (!s.far) continue;
    last = &*s.far;
    const auto at = static_cast<double>(s.step);
    if (last->steps > last->dense_steps)
      selected.points.push_back({at, 100.0 * last->mean_selected});
    if (last->steps > 0)
      dense.points.push_back(
          {at, 100.0 * static_cast<double>(last->dense_steps) / static_cast<double>(last->steps)});
    if (last->last_error) error.points.push_back({at, *last->last_error});
  }
  Chart parts{step_axis(), {"part", Unit::percent, /*from_zero=*/true}};
  parts.curves = {std::move(selected), std::move(dense)};
  Chart errors{step_axis(), {"relative error", Unit::number, /*from_zero=*/true}};
  errors.curves = {std::move(error)};
  const Json& options = r.headers.back()["options"];
  if (options.contains("far-field") && options["far-field"].is_number())
    errors.marks.push_back({options["far-field"].get<double>(), true, "wanted"});
  html += note(fmt::format(
      "{} steps of the head, {} of them dense, {} done again after an audit; {} orders.",
      thousands(last->steps), thousands(last->dense_steps), thousands(last->repeated_steps),
      thousands(last->orders)));
  return html + page::svg(parts) + page::svg(errors);
}

std::string options_section(const RunRecord& r) {
  page::Table table({"option", "value"}, "<<");
  for (const auto& [name, value] : r.headers.back()["options"].items()) {
    if (value == "" || value == Json::array()) continue;  // the option was not given
    const bool off = name == "far-field" && value == 0.0;
    table.add({"--" + name, off ? "no: every gradient is exact" : option_text(value)});
  }
  return section("Options") + note("The values in effect, given or not.") + table.html();
}

}  // namespace

std::string run_page(const RunRecord& r) {
  const std::string title = title_of(r);
  std::string body = "<h1>" + page::escaped(title) + "</h1>\n" + summary(r) + loss_section(r) +
                     speed_section(r) + memory_section(r) + saved_section(r) + far_section(r) +
                     rates_section(r) + options_section(r);
  return page::document(title + ": a training run", body);
}

}  // namespace logitless::train
