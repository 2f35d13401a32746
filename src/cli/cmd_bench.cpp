// logitless bench: time and memory of every plan of a head, compared with the unfused loss.
#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <memory>

#include "cli/bench_report.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/tensors.h"
#include "cli/unfused.h"

namespace logitless::cli {
namespace {

struct BenchCommand {
  std::int64_t tokens = 1024;
  std::int64_t dim = 768;
  std::int64_t vocab = 32000;
  DType dtype = DType::bf16;
  double spread = 3.0;
  std::int64_t seed = 1;
  std::string hidden, weight, targets;
  std::int64_t first = 0;
  GradientArgs gradients;
  DeviceArgs device;
  std::size_t budget = 0;
  std::int64_t repeat = 3;
  double unfused_limit = 60.0;
  bool json = false;
  bool on_gpu = false;
  std::string report;
  std::size_t memory = 0;

  void run(const Options& options);
  void write_report(const Options& options) const;
  CrossEntropyInputs load(TensorLoader& loader, const std::set<std::string>& given) const;
};

constexpr std::int64_t kIgnoreIndex = -100;

CrossEntropyInputs BenchCommand::load(TensorLoader& loader,
                                      const std::set<std::string>& given) const {
  CrossEntropyInputs in;
  if (hidden.empty() && weight.empty() && targets.empty()) {
    refuse_given(given, {"first"}, "is of --hidden; random data has --tokens");
    const std::int64_t hidden_shape[] = {tokens, dim};
    const std::int64_t weight_shape[] = {vocab, dim};
    const auto start = static_cast<std::uint64_t>(seed) * 3;
    in.hidden = loader.keep(random_normal(dtype, hidden_shape, 1.0, start));
    in.weight = loader.keep(random_normal(dtype, weight_shape,
                                          spread / std::sqrt(static_cast<double>(dim)), start + 1));
    in.targets = loader.keep(random_targets(tokens, vocab, start + 2));
    return in;
  }
  if (hidden.empty() || weight.empty() || targets.empty()) {
    throw UsageError("--hidden, --weight, --targets: give all three, or none for random data");
  }
  refuse_given(given, {"tokens", "dim", "vocab", "dtype"},
               "the tensors of files have sizes and types of their own");
  refuse_given(given, {"spread", "seed"}, "is of random data, and the tensors are of files");
  in.hidden = loader.load("--hidden", hidden);
  in.weight = loader.load("--weight", weight);
  in.targets = loader.load("--targets", targets);
  if (in.hidden.rank() != 2)
    throw UsageError(fmt::format("--hidden: expected [N, D], got {}", describe(in.hidden)));
  if (first > 0) {
    in.hidden = first_of(in.hidden, first);
    in.targets = first_of(in.targets, first);
  }
  return in;
}

// Relative differences to the unfused loss; NaN where it was not run.
struct Difference {
  double loss = NAN;
  double d_hidden = NAN;
  double d_weight = NAN;
};

// One row of the result: a plan with its own context, so that its memory is counted separately.
struct Contender {
  std::string name;
  std::string refusal;  // why it was not run; else empty
  Context context;
  LossPlan plan;
  CrossEntropyOutputs out;
  std::optional<Workspace> workspace;
  double loss = 0.0;
  std::vector<double> seconds;
  Difference difference;
};

// Returns |a - b| / |b| over all elements.
double relative_difference(const ConstTensorView& a, const float* b) {
  const OwnedTensor wide = convert(a, DType::f32);
  const auto* values = static_cast<const float*>(wide.view.data());
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double d = static_cast<double>(values[i]) - static_cast<double>(b[i]);
    error += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return norm > 0.0 ? std::sqrt(error / norm) : (error > 0.0 ? INFINITY : 0.0);
}

class Bench {
 public:
  Bench(const BenchCommand& args, TensorLoader& loader, const CrossEntropyInputs& in)
      : args_(args),
        loader_(loader),
        in_(in),
        shape_(shape_of(in)),
        threads_(args.device.context().threads()) {}

  void run() {
    prepare_plans();
    prepare_unfused();
    warm_up();
    // Runs are interleaved, so that other load disturbs all alike.
    for (std::int64_t i = 0; i < args_.repeat; ++i) {
      if (unfused_) {
        unfused_seconds_.push_back(timed([&] { unfused_->run(); }));
        unfused_loss_seconds_.push_back(timed([&] { unfused_->run_loss(); }));
      }
      for (Contender& c : contenders_) {
        if (c.refusal.empty()) c.seconds.push_back(timed([&] { run_once(c); }));
      }
    }
  }

  Json to_json() const;
  std::string to_text() const;

 private:
  template <typename F>
  static double timed(F function) {
    const auto start = std::chrono::steady_clock::now();
    function();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void prepare_plans() {
    const TensorView d_hidden = make(args_.gradients.of(in_.hidden.dtype()), sizes(in_.hidden));
    const TensorView d_weight = make(args_.gradients.of(in_.weight.dtype()), sizes(in_.weight));
    const TensorView loss = make(DType::f32, {});
    CrossEntropyOutputs forward;
    forward.loss = loss;
    plan_cross_entropy(
        {}, in_, forward,
        {});  // invalid tensors throw here, rather than appear as a plan's refusal below
    for (const char* name : {"forward", "dense", "recompute", "stored:0.5"}) {
      PlanArgs plan;
      parse_plan(name, plan);
      plan.budget = args_.budget;
      Contender c{name, "", args_.device.context(), {}, {}, {}, 0.0, {}, {}};
      c.out.loss = loss;
      if (plan.kind != PlanKind::forward) {
        c.out.d_hidden = d_hidden;
        c.out.d_weight = d_weight;
      }
      try {
        c.plan = plan_cross_entropy({}, in_, c.out, plan.request(c.context.device()));
        c.context.trace(c.plan.explain());
        c.workspace.emplace(c.context, c.plan);
      } catch (const Unsupported& e) {
        c.refusal = e.what();
      } catch (const InvalidArgument& e) {
        if (args_.budget == 0) throw;
        c.refusal = e.what();  // the budget is too small for this plan
      }
      contenders_.push_back(std::move(c));
    }
  }

  void prepare_unfused() {
    const UnfusedSizes sizes{shape_.tokens, shape_.dim, shape_.vocab};
    unfused_bytes_ = unfused_workspace_bytes(sizes, shape_.dtype != DType::f32);
    const std::size_t gradients =
        static_cast<std::size_t>((sizes.tokens + sizes.vocab) * sizes.dim) * sizeof(float);
    const std::size_t needed =
        unfused_bytes_ + 2 * gradients;  // and one gradient of a plan as f32, for comparison
    const std::size_t free = available_bytes();
    if (args_.unfused_limit <= 0.0) {
      unfused_refusal_ = "not asked for";
    } else if (free > 0 && needed > free / 10 * 9) {
      unfused_refusal_ =
          fmt::format("needs {} of memory, {} are free", format_bytes(needed), format_bytes(free));
    } else {
      // Every run computes gradients; all but the first also compute the loss alone, one GEMM of
      // three.
      const double runs =
          static_cast<double>(args_.repeat + 1) + static_cast<double>(args_.repeat) / 3.0;
      const double seconds = predict_unfused_seconds(sizes, threads_) * runs;
      if (seconds > args_.unfused_limit) {
        unfused_refusal_ = fmt::format("would take about {} for {} runs, over the limit of {}",
                                       format_seconds(seconds), args_.repeat + 1,
                                       format_seconds(args_.unfused_limit));
      }
    }
    if (unfused_refusal_.empty())
      unfused_.emplace(in_.hidden, in_.weight, in_.targets, kIgnoreIndex, threads_);
  }

  // Warm-up: touches all memory, and compares the results.
  void warm_up() {
    if (unfused_) unfused_loss_ = unfused_->run();
    for (Contender& c : contenders_) {
      if (!c.refusal.empty()) continue;
      run_once(c);
      c.loss = static_cast<double>(*static_cast<const float*>(c.out.loss.data()));
      if (!unfused_) continue;
      c.difference.loss = std::fabs(c.loss - unfused_loss_) / std::fabs(unfused_loss_);
      if (c.out.d_hidden.defined())
        c.difference.d_hidden = relative_difference(c.out.d_hidden, unfused_->d_hidden());
      if (c.out.d_weight.defined())
        c.difference.d_weight = relative_difference(c.out.d_weight, unfused_->d_weight());
    }
  }

  void run_once(Contender& c) { cross_entropy(c.context, c.plan, {}, in_, c.out, *c.workspace); }

  TensorView make(DType dtype, const std::vector<std::int64_t>& shape) {
    return loader_.keep(make_tensor(dtype, shape));
  }

  // Returns the time of the unfused loss for the same outputs: with gradients, or the loss alone.
  // NaN where it was not run.
  double baseline(const Contender& c) const {
    if (!unfused_) return NAN;
    return median(c.plan.kind == PlanKind::forward ? unfused_loss_seconds_ : unfused_seconds_);
  }

  double flops(double passes) const {
    return 2.0 * passes * static_cast<double>(shape_.tokens) * static_cast<double>(shape_.dim) *
           static_cast<double>(shape_.vocab);
  }

  const BenchCommand& args_;
  TensorLoader& loader_;
  const CrossEntropyInputs& in_;
  HeadShape shape_;
  int threads_;
  std::vector<Contender> contenders_;
  std::optional<Unfused> unfused_;
  std::string unfused_refusal_;
  std::size_t unfused_bytes_ = 0;
  double unfused_loss_ = 0.0;
  std::vector<double> unfused_seconds_, unfused_loss_seconds_;
};

// Returns a number; null for NaN.
Json number_or_null(double value) { return std::isnan(value) ? Json() : Json(value); }

Json Bench::to_json() const {
  Json rows = Json::array();
  for (const Contender& c : contenders_) {
    if (!c.refusal.empty()) {
      rows.push_back({{"plan", c.name}, {"skipped", c.refusal}});
      continue;
    }
    const double seconds = median(c.seconds);
    rows.push_back({{"plan", c.name},
                    {"kernel", c.plan.kernel},
                    {"passes", c.plan.passes},
                    {"seconds", seconds},
                    {"all_seconds", c.seconds},
                    {"predicted_seconds", c.plan.predicted_seconds},
                    {"of_unfused", number_or_null(seconds / baseline(c))},
                    {"flops_per_second", flops(c.plan.passes) / seconds},
                    {"workspace_bytes", c.plan.workspace_bytes()},
                    {"peak_bytes", c.context.memory().peak_bytes()},
                    {"loss", c.loss},
                    {"loss_difference", number_or_null(c.difference.loss)},
                    {"d_hidden_difference", number_or_null(c.difference.d_hidden)},
                    {"d_weight_difference", number_or_null(c.difference.d_weight)}});
  }
  Json unfused;
  if (unfused_) {
    const double seconds = median(unfused_seconds_);
    unfused = {{"seconds", seconds},
               {"all_seconds", unfused_seconds_},
               {"loss_seconds", median(unfused_loss_seconds_)},
               {"all_loss_seconds", unfused_loss_seconds_},
               {"flops_per_second", flops(3.0) / seconds},
               {"workspace_bytes", unfused_bytes_},
               {"loss", unfused_loss_}};
  } else {
    unfused = {{"skipped", unfused_refusal_}};
  }
  return {{"tokens", shape_.tokens},
          {"dim", shape_.dim},
          {"vocab", shape_.vocab},
          {"dtype", name_of(shape_.dtype)},
          {"grad_dtype", name_of(args_.gradients.of(shape_.dtype))},
          {"threads", threads_},
          {"repeat", args_.repeat},
          {"logits_bytes",
           static_cast<std::size_t>(shape_.tokens) * static_cast<std::size_t>(shape_.vocab) * 4},
          {"process_peak_bytes", process_peak_bytes()},
          {"plans", rows},
          {"unfused", unfused}};
}

std::string Bench::to_text() const {
  const auto difference = [](double value) {
    return std::isnan(value) ? std::string("-") : fmt::format("{:.1e}", value);
  };
  Table table({"plan", "kernel", "passes", "time", "of unfused", "GFLOP/s", "workspace", "peak",
               "loss diff", "d_hidden diff", "d_weight diff"},
              "<<>>>>>>>>>");
  std::string notes;
  for (const Contender& c : contenders_) {
    if (!c.refusal.empty()) {
      table.add({c.name, "skipped"});
      notes += fmt::format("{}: {}\n", c.name, c.refusal);
      continue;
    }
    const double seconds = median(c.seconds);
    table.add({c.name, c.plan.kernel, format_passes(c.plan.passes), format_seconds(seconds),
               unfused_ ? fmt::format("{:.2f}", seconds / baseline(c)) : "-",
               fmt::format("{:.1f}", flops(c.plan.passes) / seconds * 1e-9),
               format_bytes(c.plan.workspace_bytes()),
               format_bytes(c.context.memory().peak_bytes()), difference(c.difference.loss),
               difference(c.difference.d_hidden), difference(c.difference.d_weight)});
  }
  if (unfused_) {
    const auto add = [&](const char* name, const char* passes, double count,
                         const std::vector<double>& seconds) {
      table.add({name, "plain f32", passes, format_seconds(median(seconds)), "1.00",
                 fmt::format("{:.1f}", flops(count) / median(seconds) * 1e-9), "-",
                 format_bytes(unfused_bytes_), "-", "-", "-"});
    };
    add("unfused", "3", 3.0, unfused_seconds_);
    add("unfused loss", "1", 1.0, unfused_loss_seconds_);
  } else {
    table.add({"unfused", "skipped"});
    notes += fmt::format("unfused: {}\n", unfused_refusal_);
  }
  const std::string head = fmt::format(
      "{} tokens x {} vocabulary entries x {}, {}, gradients in {}, {} {}, median of {}\n\n",
      shape_.tokens, shape_.vocab, shape_.dim, name_of(shape_.dtype),
      name_of(args_.gradients.of(shape_.dtype)), threads_, threads_ == 1 ? "thread" : "threads",
      args_.repeat);
  return head + table.text() + (notes.empty() ? "" : "\n" + notes);
}

void BenchCommand::write_report(const Options& options) const {
  const std::set<std::string> given = options.given();
  refuse_given(given,
               {"tokens", "dim", "vocab", "spread", "seed", "hidden", "weight", "targets", "first",
                "grad-dtype", "budget", "kernel", "unfused-limit", "json"},
               "cannot be given beside --report, which has heads of its own");
  if (on_gpu) refuse_given(given, {"threads"}, "cannot be given beside --device cuda");
  check_report_file(report);
  if (const std::string missing = on_gpu ? gpu_missing() : ""; !missing.empty())
    throw Unsupported(fmt::format("--device cuda: {}", missing));
  ReportRequest request;
  request.path = report;
  request.command = options.command_line();
  request.on_gpu = on_gpu;
  request.threads = static_cast<int>(device.threads);
  if (given.count("dtype") > 0) request.dtype = dtype;
  request.repeat = repeat;
  request.memory_budget = memory;
  if (device.verbose)
    request.trace = [](std::string_view line) { print_note(fmt::format("{}\n", line)); };
  write_bench_report(request);
}

void BenchCommand::run(const Options& options) {
  if (!report.empty()) return write_report(options);
  const std::set<std::string> given = options.given();
  refuse_given(given, {"device", "memory"}, "is of --report");
  TensorLoader loader;
  const CrossEntropyInputs in = load(loader, given);
  Bench bench(*this, loader, in);
  bench.run();
  if (json) {
    print_json(bench.to_json());
  } else {
    print(bench.to_text());
  }
}

}  // namespace

Command add_bench(CommandLine& program) {
  Options sub =
      program.add_command("bench", "Time and measure every plan of a head beside the unfused loss");
  auto args = std::make_shared<BenchCommand>();
  BenchCommand* a = args.get();
  const auto size = [&](const char* name, std::int64_t& value, const char* description) {
    return sub.add_integer(name, value, 1, INT64_MAX, description).group("Random data");
  };
  size("--tokens", a->tokens, "rows of hidden (default 1024)");
  size("--dim", a->dim, "columns of hidden and weight (default 768)");
  size("--vocab", a->vocab, "rows of weight (default 32000)");
  sub.add_parsed(
         "--dtype", "f32|bf16|f16",
         [a](const std::string& text) { a->dtype = parse_head_dtype(text); },
         "of hidden and weight (default bf16)")
      .group("Random data");
  sub.add_parsed(
         "--spread", "X",
         [a](const std::string& text) {
           a->spread = parse_number(text);
           if (a->spread < 0.0)
             throw UsageError(fmt::format("expected a number of at least 0, got '{}'", text));
         },
         "standard deviation of the logits (default 3)")
      .group("Random data");
  sub.add_integer("--seed", a->seed, 0, 1 << 30, "of the random numbers (default 1)")
      .group("Random data");

  const auto tensor = [&](const char* name, std::string& value, const char* description) {
    sub.add_parsed(
           name, "TENSOR", [&value](const std::string& text) { value = text; }, description)
        .group("Data of files");
  };
  tensor("--hidden", a->hidden, "[N, D] f32, bf16 or f16");
  tensor("--weight", a->weight, "[V, D] in the dtype of hidden");
  tensor("--targets", a->targets, "[N] i32 or i64; -100 is ignored");
  sub.add_integer("--first", a->first, 1, INT64_MAX, "use the first N tokens only")
      .group("Data of files");

  a->gradients.add(sub);
  sub.add_parsed(
         "--budget", "BYTES", [a](const std::string& text) { a->budget = parse_budget(text); },
         "memory of each plan beyond inputs and outputs (default: the least that costs no time)")
      .group("Plan");
  a->device.add(sub);
  sub.add_integer("--repeat", a->repeat, 1, 100000, "turns after the first, of all (default 3)")
      .group("Machine");
  sub.add_number("--unfused-limit", a->unfused_limit,
                 "skip the unfused loss if its runs take more seconds (default 60)")
      .group("Machine");
  sub.add_flag("--json", a->json, "print one JSON object");

  sub.add_text("--report", a->report,
               "write a page (Markdown) about the device and the standard heads on it, to be sent")
      .placeholder("FILE")
      .group("Report");
  sub.add_parsed(
         "--device", "cpu|cuda",
         [a](const std::string& text) {
           if (text != "cpu" && text != "cuda")
             throw UsageError(fmt::format("expected cpu or cuda, got '{}'", text));
           a->on_gpu = text == "cuda";
         },
         "that runs the heads (default cpu, with heads of an eighth in each dimension)")
      .group("Report");
  sub.add_parsed(
         "--memory", "BYTES", [a](const std::string& text) { a->memory = parse_budget(text); },
         "most memory of a head, which is halved until it fits (default: 9/10 of what is free)")
      .group("Report");
  sub.footer(std::string(kTensorHelp) +
             "\nThe unfused loss keeps all logits in f32 and takes three plain blocked matrix "
             "products. Differences are relative\n"
             "to its numbers: of the loss, and of the gradients in L2. `of unfused` is time, of "
             "the unfused loss with its\n"
             "gradients, and of `unfused loss` alone for the forward plan: below 1 is faster.\n\n"
             "Examples:\n"
             "  logitless bench --tokens 4096 --dim 1024 --vocab 50257 --repeat 5\n"
             "  logitless bench --hidden head.safetensors:hidden --weight "
             "head.safetensors:weight_q*weight_scale \\\n"
             "                  --targets head.safetensors:targets --first 1024\n"
             "  logitless bench --device cuda --report my_card.md");
  return {sub, [args, sub] { args->run(sub); }};
}

}  // namespace logitless::cli
