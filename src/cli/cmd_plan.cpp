// logitless plan: shows the plan that a head would get, the costs of the others, and why they were
// not chosen.
#include <fmt/core.h>

#include <memory>

#include "cli/commands.h"
#include "cli/output.h"

namespace logitless::cli {
namespace {

struct PlanCommand {
  HeadShape shape{.dtype = DType::bf16};
  HeadFeatures features;
  GradientArgs gradients;
  PlanArgs plan;
  DeviceArgs device;
  GpuArgs gpu{.what = "that it is planned for", .group = "Machine"};
  double label_smoothing = 0.0;
  std::int64_t targets_per_token = 1;
  bool no_d_hidden = false;
  bool no_d_weight = false;
  bool json = false;

  DeviceLimits limits() const;
  void run(const std::set<std::string>& given);
};

DeviceLimits PlanCommand::limits() const {
  if (!gpu.on_gpu) return device.context().device();
  DeviceLimits limits = gpu.limits();
  limits.kernel = device.kernel;
  return limits;
}

Json to_json(const LossPlan& plan) {
  Json candidates = Json::array();
  for (const PlanCandidate& c : plan.candidates) {
    candidates.push_back({{"plan", name_of(c.kind)},
                          {"possible", c.possible},
                          {"chosen", c.kind == plan.kind},
                          {"reason", in_options(c.reason)},
                          {"keeps", in_options(c.keeps)},
                          {"passes", c.passes},
                          {"workspace_bytes", c.workspace_bytes},
                          {"predicted_seconds", c.predicted_seconds}});
  }
  return {{"plan", name_of(plan.kind)},
          {"kernel", plan.kernel},
          {"threads", plan.threads},
          {"tokens", plan.shape.tokens},
          {"dim", plan.shape.dim},
          {"vocab", plan.shape.vocab},
          {"dtype", name_of(plan.shape.dtype)},
          {"precision", name_of(plan.features.precision)},
          {"passes", plan.passes},
          {"workspace_bytes", plan.workspace_bytes()},
          {"logits_bytes", plan.logits_bytes()},
          {"memory_budget", plan.memory_budget},
          {"expected_ignored", plan.expected_ignored},
          {"predicted_seconds", plan.predicted_seconds},
          {"chunk_tokens", plan.chunk_tokens},
          {"block_vocab", plan.block_vocab},
          {"stored_vocab", plan.stored_vocab},
          {"weight_ranges", plan.weight_ranges},
          {"first_tokens", plan.first_tokens},
          {"candidates", candidates},
          {"explain", in_options(plan.explain())}};
}

void PlanCommand::run(const std::set<std::string>& given) {
  if (features.softcap < 0.0f) {
    throw UsageError(
        fmt::format("--softcap: expected a number > 0, or 0 for none, got {}", features.softcap));
  }
  if (label_smoothing < 0.0 || label_smoothing > 1.0) {
    throw UsageError(
        fmt::format("--label-smoothing: expected a number in [0, 1], got {}", label_smoothing));
  }
  features.targets_per_token = static_cast<int>(targets_per_token);
  features.label_smoothing = label_smoothing != 0.0;
  features.vocab_weight = features.vocab_weight && features.label_smoothing;
  features.d_hidden = !no_d_hidden;
  features.d_weight = !no_d_weight;
  features.d_bias = features.bias && features.d_weight;
  if (features.d_hidden) features.d_hidden_dtype = gradients.of(shape.dtype);
  if (features.d_weight) features.d_weight_dtype = gradients.of(shape.dtype);
  // The plan forward, requested by name, has no gradients.
  if (!plan.automatic && plan.kind == PlanKind::forward) {
    refuse_given(given,
                 {"grad-dtype", "no-d-hidden", "no-d-weight", "entropy-gradient", "accumulate"},
                 "is of gradients, and --plan forward makes none");
    features.d_hidden = features.d_weight = features.d_bias = false;
    features.d_hidden_dtype = features.d_weight_dtype = DType::f32;
  }
  if (no_d_hidden && no_d_weight) {
    refuse_given(given, {"grad-dtype", "entropy-gradient", "accumulate"},
                 "is of gradients, and --no-d-hidden and --no-d-weight leave none");
  }
  gpu.check(given);
  if (!gpu.on_gpu) refuse_given(given, {"expected-ignored"}, "is of --device cuda");
  const LossPlan made = plan_head(shape, features, plan.request(limits()));
  if (device.verbose) print_note(in_options(made.explain()) + "\n");
  if (json) {
    print_json(to_json(made));
    return;
  }
  Table table({"plan", "passes", "workspace", "predicted", "verdict"}, "<>>><");
  for (const PlanCandidate& c : made.candidates) {
    const bool sized = c.workspace_bytes > 0;
    table.add({std::string(name_of(c.kind)), sized ? format_passes(c.passes) : "-",
               sized ? format_bytes(c.workspace_bytes) : "-",
               sized ? format_seconds(c.predicted_seconds) : "-", in_options(c.reason)});
  }
  print(table.text() + "\n" + in_options(made.explain()));
}

}  // namespace

Command add_plan(CommandLine& program) {
  Options sub =
      program.add_command("plan", "Choose the plan of a head from its sizes, without running it");
  auto args = std::make_shared<PlanCommand>();
  constexpr std::int64_t kMost = INT64_MAX;
  sub.add_integer("--tokens", args->shape.tokens, 1, kMost, "rows of hidden")
      .required()
      .group("Head");
  sub.add_integer("--dim", args->shape.dim, 1, kMost, "columns of hidden and weight")
      .required()
      .group("Head");
  sub.add_integer("--vocab", args->shape.vocab, 1, kMost, "rows of weight")
      .required()
      .group("Head");
  sub.add_parsed(
         "--dtype", "f32|bf16|f16",
         [args = args.get()](const std::string& text) {
           args->shape.dtype = parse_head_dtype(text);
         },
         "of hidden and weight (default bf16)")
      .group("Head");
  sub.add_parsed(
         "--precision", "ieee|tf32|bf16x3",
         [args = args.get()](const std::string& text) {
           args->features.precision = parse_precision(text);
         },
         "of products of f32 tensors on a GPU (default ieee)")
      .group("Head");
  sub.add_flag("--bias", args->features.bias, "there is a bias, trained if the weight is")
      .group("Head");
  sub.add_number("--softcap", args->features.softcap, "logits are X tanh(u / X)").group("Head");
  sub.add_number("--label-smoothing", args->label_smoothing, "in [0, 1]").group("Head");
  sub.add_flag("--class-weight", args->features.vocab_weight,
               "classes have weights (matters beside label smoothing)")
      .group("Head");
  sub.add_integer("--targets-per-token", args->targets_per_token, 1, 65536,
                  "weighted targets of a token (default 1)")
      .group("Head");
  args->gradients.add(sub);
  sub.add_flag("--no-d-hidden", args->no_d_hidden, "without the gradient of hidden")
      .group("Gradients");
  sub.add_flag("--no-d-weight", args->no_d_weight, "without those of weight and bias")
      .group("Gradients");
  sub.add_flag("--entropy-gradient", args->features.entropy_gradient,
               "the loss depends on the entropy (policies)")
      .group("Gradients");
  sub.add_flag("--accumulate", args->features.accumulate, "gradients are added to what is there")
      .group("Gradients");
  args->plan.add(sub);
  sub.add_number("--expected-ignored", args->plan.expected_ignored,
                 "with --device cuda: the share of the tokens that is expected to be ignored")
      .group("Plan");
  args->device.add(sub);
  args->gpu.add(sub);
  sub.add_flag("--json", args->json, "print one JSON object");
  sub.footer(
      "The table has every plan: passes over tokens x vocab x dim, the least memory beyond inputs "
      "and outputs with which\n"
      "it is about as fast as the budget lets it be (stored fills the budget), predicted time at "
      "the kernel's nominal rate\n"
      "(of a GPU, its card's, see --card), and why it was not chosen.\n\n"
      "Example:\n"
      "  logitless plan --tokens 16384 --dim 4096 --vocab 128256 --budget 2GiB --threads 32");
  return {sub, [args, sub] { args->run(sub.given()); }};
}

}  // namespace logitless::cli
