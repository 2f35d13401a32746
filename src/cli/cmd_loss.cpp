// logitless loss: cross entropy of tensors on disk, and its gradients.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "cli/commands.h"
#include "cli/far_args.h"
#include "cli/output.h"
#include "cli/tensors.h"

namespace logitless::cli {
namespace {

struct LossCommand {
  std::string hidden, weight, targets, bias;
  std::map<std::string, std::string> weights;  // by name
  std::string out;
  CrossEntropyOptions options;
  double grad_loss = 1.0;
  std::optional<DType> dtype;
  GradientArgs gradients;
  PlanArgs plan;
  FarArgs far;
  DeviceArgs device;
  std::int64_t repeat = 1;
  std::int64_t first = 0;
  std::int64_t skip = 0;
  bool entropy = false;
  bool argmax = false;
  bool json = false;

  void run(const std::set<std::string>& given);
  // Refuses options without effect.
  void check(const std::set<std::string>& given) const;
  CrossEntropyInputs load(TensorLoader& loader) const;
  bool wants_gradients() const {
    return plan.wants_gradients() || (plan.automatic && !out.empty());
  }
};

// The result of a run.
struct LossResult {
  LossStatistics statistics;
  double loss = 0.0;
  double seconds = 0.0;
  std::size_t peak_bytes = 0;
  std::size_t order_bytes = 0;  // peak memory while an order was made
};

constexpr const char* kReductionNames[] = {"none", "mean", "sum"};

Reduction parse_reduction(const std::string& text) {
  for (const Reduction r : {Reduction::none, Reduction::mean, Reduction::sum}) {
    if (text == kReductionNames[static_cast<int>(r)]) return r;
  }
  throw UsageError(fmt::format("expected mean, sum or none, got '{}'", text));
}

// Maps "label_smoothing" to "--label-smoothing".
std::string flag_of(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

CrossEntropyInputs LossCommand::load(TensorLoader& loader) const {
  CrossEntropyInputs in;
  in.hidden = loader.load("--hidden", hidden, dtype);
  in.weight = loader.load("--weight", weight, dtype);
  in.targets = loader.load("--targets", targets);
  if (!bias.empty()) {
    in.bias = loader.load("--bias", bias);
    if (in.bias.dtype() != in.weight.dtype()) in.bias = loader.load("--bias", bias, DType::f32);
  }
  std::vector<ConstTensorView*> per_token = {&in.hidden, &in.targets};
  each_loss_weight(
      [&](const char* name, WeightAxis axis, ConstTensorView& view) {
        view = loader.load_optional(flag_of(name), weights.at(name), DType::f32);
        if (axis != WeightAxis::vocab) per_token.push_back(&view);
      },
      in);
  in.grad_loss = grad_loss;
  check_selection(in.hidden, skip, first);
  for (ConstTensorView* view : per_token) {
    if (skip > 0) *view = without_first(*view, skip);
    if (first > 0) *view = first_of(*view, first);
  }
  return in;
}

// Outputs of a call, with their names in the file.
class Outputs {
 public:
  Outputs(TensorLoader& loader, const LossCommand& args, const CrossEntropyInputs& in)
      : loader_(loader) {
    const bool none = args.options.reduction == Reduction::none;
    const std::vector<std::int64_t> tokens = leading_sizes(in.hidden);
    views.loss = make(none ? "loss" : "", DType::f32, none ? tokens : std::vector<std::int64_t>());
    if (args.wants_gradients()) {
      views.d_hidden = make("d_hidden", args.gradients.of(in.hidden.dtype()), sizes(in.hidden));
      views.d_weight = make("d_weight", args.gradients.of(in.weight.dtype()), sizes(in.weight));
      if (in.bias.defined())
        views.d_bias = make("d_bias", args.gradients.of(in.bias.dtype()), sizes(in.bias));
    }
    if (!args.out.empty()) views.lse = make("lse", DType::f32, tokens);
    if (args.entropy) views.entropy = make("entropy", DType::f32, tokens);
    if (args.argmax) views.argmax = make("argmax", DType::i32, tokens);
  }

  CrossEntropyOutputs views;
  const std::vector<NamedTensor>& named() const { return named_; }

 private:
  // Allocates an output. One with an empty name is not written to the file.
  TensorView make(const char* name, DType dtype, const std::vector<std::int64_t>& shape) {
    const TensorView view = loader_.keep(make_tensor(dtype, shape));
    if (*name != '\0') named_.push_back({name, view});
    return view;
  }

  TensorLoader& loader_;
  std::vector<NamedTensor> named_;
};

LossResult measure(const Context& context, const LossPlan& plan, const CrossEntropyOptions& options,
                   const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                   std::int64_t repeat) {
  LossResult result;
  context.memory().reset_peak();
  const Workspace workspace(context, plan);
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < repeat; ++i) {
    const auto start = std::chrono::steady_clock::now();
    result.statistics = cross_entropy(context, plan, options, in, out, workspace);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  result.seconds = median(std::move(seconds));
  result.peak_bytes = context.memory().peak_bytes();
  const auto* losses = static_cast<const float*>(out.loss.data());
  for (std::int64_t i = 0; i < out.loss.numel(); ++i) result.loss += static_cast<double>(losses[i]);
  return result;
}

bool is_far(PlanKind kind) { return kind == PlanKind::far_backward || kind == PlanKind::far_both; }

Json to_json(const LossPlan& plan, const LossCommand& args, const LossResult& r) {
  Json object = {{"loss", r.loss},
                 {"reduction", kReductionNames[static_cast<int>(args.options.reduction)]},
                 {"tokens", r.statistics.tokens},
                 {"valid_tokens", r.statistics.valid_tokens},
                 {"normalizer", r.statistics.normalizer},
                 {"mean_lse", r.statistics.mean_lse},
                 {"mean_log_prob", r.statistics.mean_log_prob}};
  if (args.argmax) object["correct"] = r.statistics.correct;
  object.update({{"plan", name_of(plan.kind)},
                 {"kernel", plan.kernel},
                 {"threads", plan.threads},
                 {"dim", plan.shape.dim},
                 {"vocab", plan.shape.vocab},
                 {"dtype", name_of(plan.shape.dtype)},
                 {"precision", name_of(plan.features.precision)},
                 {"passes", plan.passes},
                 {"chunk_tokens", plan.chunk_tokens},
                 {"workspace_bytes", plan.workspace_bytes()},
                 {"peak_bytes", r.peak_bytes},
                 {"process_peak_bytes", process_peak_bytes()},
                 {"logits_bytes", plan.logits_bytes()},
                 {"seconds", r.seconds},
                 {"predicted_seconds", plan.predicted_seconds},
                 {"repeat", args.repeat}});
  if (is_far(plan.kind)) {
    const FarFieldStatistics& far = r.statistics.far;
    object.update(
        {{"tau", plan.tau}, {"selected", far.selected}, {"dense_fallback", far.dense_fallback}});
    if (far.bound >= 0.0) object["bound"] = far.bound;
    if (plan.sample_every > 0) object["sampled"] = far.sampled;
    if (plan.sample_every > 0 && plan.kind == PlanKind::far_both) {
      object["sampled_lse_error"] = far.sampled_lse_error;
      object["sampled_most"] = far.sampled_most;
    }
    object["passes"] = far.passes;
    object["order_bytes"] = r.order_bytes;
    if (far.audited_tokens > 0) {
      object["audited_error"] = far.audited_error;
      object["audited_tokens"] = far.audited_tokens;
      if (plan.kind == PlanKind::far_both) {
        object["audited_lse_error"] = far.audited_lse_error;
        object["audited_lse_error_max"] = far.audited_lse_error_max;
      }
    }
  }
  if (!args.out.empty()) object["out"] = args.out;
  return object;
}

std::string to_text(const LossPlan& plan, const LossCommand& args, const LossResult& r,
                    const Outputs& out) {
  const LossStatistics& s = r.statistics;
  Facts facts;
  const bool none = args.options.reduction == Reduction::none;
  facts.add("loss", fmt::format("{:.7g} ({})", r.loss,
                                none ? "sum of a loss per token"
                                     : kReductionNames[static_cast<int>(args.options.reduction)]));
  facts.add("tokens", fmt::format("{}, {} valid", s.tokens, s.valid_tokens));
  facts.add("normalizer", fmt::format("{:.7g}", s.normalizer));
  facts.add("mean lse", fmt::format("{:.7g}", s.mean_lse));
  facts.add("mean log prob", fmt::format("{:.7g}", s.mean_log_prob));
  if (s.correct >= 0 && s.valid_tokens > 0) {
    facts.add("correct", fmt::format("{} ({:.2f} %)", s.correct,
                                     100.0 * static_cast<double>(s.correct) /
                                         static_cast<double>(s.valid_tokens)));
  }
  facts.add("plan",
            fmt::format("{}, {} {}, kernel {}, {} {}", name_of(plan.kind),
                        format_passes(plan.passes), plan.passes == 1.0 ? "pass" : "passes",
                        plan.kernel, plan.threads, plan.threads == 1 ? "thread" : "threads"));
  if (is_far(plan.kind)) {
    const FarFieldStatistics& far = s.far;
    facts.add("far field",
              fmt::format("tau {:.4g}, {:.2f} % of the tiles selected, {} passes{}", plan.tau,
                          100.0 * far.selected, format_passes(far.passes),
                          far.dense_fallback ? "; all selected where over 2/3 would be" : ""));
    std::string error;
    if (far.audited_tokens > 0)
      error = fmt::format("{:.3g} measured on {} tokens", far.audited_error, far.audited_tokens);
    if (far.bound >= 0.0)
      error += fmt::format("{}at most {:.3g}", error.empty() ? "" : ", ", far.bound);
    facts.add("error of d_hidden", error.empty() ? "not measured: --audit N" : error);
    if (plan.kind == PlanKind::far_both && far.audited_tokens > 0) {
      facts.add("error of lse", fmt::format("rms {:.3g}, at most {:.3g} nats on those tokens",
                                            far.audited_lse_error, far.audited_lse_error_max));
    }
  }
  facts.add("workspace",
            fmt::format("{}, measured peak {}; the fp32 logits would take {}",
                        format_bytes(plan.workspace_bytes()), format_bytes(r.peak_bytes),
                        format_bytes(plan.logits_bytes())));
  if (r.order_bytes > 0) {
    const bool over = args.plan.budget > 0 && r.order_bytes > args.plan.budget;
    facts.add("fresh order",
              fmt::format("took {} before that{}; --save-order and --order spare it",
                          format_bytes(r.order_bytes), over ? ", over --budget" : ""));
  }
  facts.add("time", fmt::format("{}{}, predicted {}", format_seconds(r.seconds),
                                args.repeat > 1 ? fmt::format(" (median of {})", args.repeat) : "",
                                format_seconds(plan.predicted_seconds)));
  if (!args.out.empty()) {
    std::string names;
    for (const NamedTensor& tensor : out.named())
      names += (names.empty() ? "" : ", ") + tensor.name;
    facts.add("written", fmt::format("{}: {}", args.out, names));
  }
  return facts.text();
}

void LossCommand::check(const std::set<std::string>& given) const {
  check_output("--out", out, train::FileKind::tensors);
  if (entropy && out.empty()) {
    throw UsageError("--entropy: goes into the file of --out, which was not given");
  }
  if (!wants_gradients()) {
    refuse_given(given, {"grad-dtype", "grad-loss"},
                 plan.automatic
                     ? "no gradient is made without --out, or a --plan that makes gradients"
                     : "is of gradients, and --plan forward makes none");
  }
  if (options.reduction != Reduction::mean)
    refuse_given(given, {"nan-if-empty"}, "is of --reduction mean");
  if (options.normalizer.has_value())
    refuse_given(given, {"nan-if-empty"}, "a mean that --normalizer divides is 0 over no token");
}

void LossCommand::run(const std::set<std::string>& given) {
  check(given);
  const Context context = device.context();
  TensorLoader loader;
  CrossEntropyInputs in = load(loader);
  far.check_files(loader, out);
  shape_of(in);  // checks the sizes before outputs are allocated
  const Outputs outputs(loader, *this, in);
  PlanRequest request = plan.request(context.device());
  far.add_to(request, given);
  const LossPlan made = plan_cross_entropy(options, in, outputs.views, request);
  context.trace(made.explain());
  std::size_t order_bytes = 0;
  if (is_far(made.kind)) {
    MadeOrder order = far.make(context, options, in, made, plan.budget);
    in.order = std::move(order.order);
    order_bytes = order.bytes;
  }
  in.sample_seed = static_cast<std::uint64_t>(far.sample_seed);
  LossResult result = measure(context, made, options, in, outputs.views, repeat);
  result.order_bytes = order_bytes;
  if (!out.empty())
    write_safetensors(out, outputs.named(), {{"made_by", std::string("logitless ") + version()}});
  if (json) {
    print_json(to_json(made, *this, result));
  } else {
    print(to_text(made, *this, result, outputs));
  }
}

const char* help_of(WeightAxis axis) {
  if (axis == WeightAxis::vocab) return "[V]";
  return axis == WeightAxis::tokens ? "[...]"
                                    : "[..., K]: the loss against K weighted classes a token";
}

void add_tensor(Options& options, const std::string& name, std::string& value,
                const char* description, bool required = false) {
  options
      .add_parsed(
          name, "TENSOR", [&value](const std::string& text) { value = text; }, description)
      .required(required)
      .group("Tensors");
}

}  // namespace

Command add_loss(CommandLine& program) {
  Options sub = program.add_command("loss", "Cross entropy of tensors in files, and its gradients");
  auto args = std::make_shared<LossCommand>();
  LossCommand* a = args.get();
  add_tensor(sub, "--hidden", a->hidden, "[..., D] f32, bf16 or f16", true);
  add_tensor(sub, "--weight", a->weight, "[V, D] in the dtype of hidden", true);
  add_tensor(sub, "--targets", a->targets, "[...] i32 or i64; [..., K] with --target-weight", true);
  add_tensor(sub, "--bias", a->bias, "[V]");
  each_loss_weight([&](const char* name, WeightAxis axis) {
    add_tensor(sub, flag_of(name), a->weights[name], help_of(axis));
  });
  sub.add_parsed(
         "--dtype", "f32|bf16|f16",
         [a](const std::string& text) { a->dtype = parse_head_dtype(text); },
         "convert hidden and weight on loading")
      .group("Tensors");
  sub.add_integer("--first", a->first, 1, INT64_MAX,
                  "use the first N tokens only (sequences, if hidden is [B, T, D])")
      .group("Tensors");
  sub.add_integer("--skip", a->skip, 0, INT64_MAX, "leave out N tokens before those")
      .group("Tensors");

  CrossEntropyOptions& o = a->options;
  sub.add_parsed(
         "--reduction", "mean|sum|none",
         [&o](const std::string& text) { o.reduction = parse_reduction(text); },
         "of the loss (default mean); none prints the sum and writes each")
      .group("Loss");
  for (const LossNumber<float>& number : loss_numbers(o))
    sub.add_number(flag_of(number.name), *number.value, number.help).group("Loss");
  sub.add_number("--softcap", o.softcap, "logits are X tanh(u / X)").group("Loss");
  sub.add_number("--logit-scale", o.logit_scale, "logits are multiplied by it (default 1)")
      .group("Loss");
  sub.add_number("--normalizer", o.normalizer,
                 "mean divides by it, not by the weights of the valid tokens")
      .group("Loss");
  sub.add_parsed(
         "--precision", "ieee|tf32|bf16x3",
         [&o](const std::string& text) { o.precision = parse_precision(text); },
         "of products of f32 tensors on a GPU (default ieee)")
      .group("Loss");
  sub.add_flag("--next-token", o.next_token,
               "targets [B, T] are the tokens: position t predicts t + 1")
      .group("Loss");
  sub.add_integer("--ignore-index", o.ignore_index, INT64_MIN, INT64_MAX,
                  "tokens of this target count nothing (default -100)")
      .group("Loss");
  sub.add_flag("--nan-if-empty", o.nan_if_empty, "the mean over no token is NaN instead of 0")
      .group("Loss");

  sub.add_parsed(
         "--out", "FILE", [a](const std::string& text) { a->out = text; },
         "write d_hidden, d_weight, d_bias, lse (and loss, if none) as safetensors")
      .group("Gradients");
  a->gradients.add(sub);
  sub.add_number("--grad-loss", a->grad_loss, "upstream gradient (default 1)").group("Gradients");
  sub.add_flag("--entropy", a->entropy, "write the entropy of each token, too").group("Gradients");
  sub.add_flag("--argmax", a->argmax, "count right predictions, and write each token's argmax")
      .group("Gradients");

  a->plan.add(sub);
  a->far.add(sub);
  a->device.add(sub);
  sub.add_integer("--repeat", a->repeat, 1, 1000000,
                  "run N times (default 1), report the median time")
      .group("Machine");
  sub.add_flag("--json", a->json, "print one JSON object");
  sub.footer(
      std::string(kTensorHelp) +
      "\nGradients are computed when --out is given or --plan names a plan that makes them. "
      "Without --out, --plan auto is\n"
      "the forward pass alone; --plan forward is that even with --out.\n\n"
      "Examples:\n"
      "  logitless loss --hidden h.npy --weight w.npy --targets t.npy --label-smoothing 0.1\n"
      "  logitless loss --hidden head.safetensors:hidden --weight "
      "head.safetensors:weight_q*weight_scale \\\n"
      "                 --targets head.safetensors:targets --budget 256MiB --out grads.safetensors "
      "--json");
  return {sub, [args, sub] { args->run(sub.given()); }};
}

}  // namespace logitless::cli
