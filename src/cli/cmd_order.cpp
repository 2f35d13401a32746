// logitless order: makes a vocabulary order for the far field, and writes it to a file.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "cli/commands.h"
#include "cli/far_args.h"
#include "cli/output.h"
#include "cli/tensors.h"

namespace logitless::cli {
namespace {

struct OrderCommand {
  std::string hidden, weight, bias, out;
  std::optional<DType> dtype;
  std::int64_t rows = 1536;
  std::int64_t first = 0;
  double logit_scale = 1.0, softcap = 0.0, tau = 0.003;
  bool moments = false;
  DeviceArgs device;
  bool json = false;

  void run(const std::set<std::string>& given) const;
};

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A NaN or an infinity makes all averages NaN, or those of some entries.
void check_average(const std::vector<float>& average, bool with_bias) {
  const auto wrong =
      std::find_if(average.begin(), average.end(), [](float p) { return !std::isfinite(p); });
  if (wrong == average.end()) return;
  throw UsageError(fmt::format(
      "--hidden, --weight{}: expected finite numbers; the average probability of vocabulary entry "
      "{} is {}",
      with_bias ? ", --bias" : "", wrong - average.begin(), *wrong));
}

void OrderCommand::run(const std::set<std::string>& given) const {
  if (!moments) refuse_given(given, {"tau"}, "is of --moments, which was not given");
  check_output("--out", out, train::FileKind::tensors);
  if (moments && softcap != 0.0)
    throw UsageError("--moments: the moments of a tile do not pass through a --softcap");
  const Context context = device.context();
  TensorLoader loader;
  ConstTensorView x = loader.load("--hidden", hidden, dtype);
  const ConstTensorView w = loader.load("--weight", weight, dtype);
  const ConstTensorView b = loader.load_optional("--bias", bias, DType::f32);
  loader.check_not_loaded("--out", out);
  check_selection(x, 0, first);
  if (first > 0) x = first_of(x, first);
  const OwnedTensor sample = sample_rows(x, rows);
  const auto scale = static_cast<float>(logit_scale);
  std::vector<float> average;
  VocabOrder order;
  const double averaged = seconds_of([&] {
    average = average_probability(context, sample.view, w, b, scale, static_cast<float>(softcap));
  });
  check_average(average, b.defined());
  context.trace(fmt::format(
      "{} of {} tokens are sampled, {} vocabulary entries of dim {} in {} tiles, {} {}",
      sample.view.size(0), x.numel() / w.size(1), w.size(0), w.size(1), (w.size(0) + 127) / 128,
      context.threads(), context.threads() == 1 ? "thread" : "threads"));
  const double ordered = seconds_of([&] { order = make_vocab_order(context, w, average); });
  double measured = 0.0;
  if (moments) {
    measured = seconds_of([&] {
      order = measure_tiles(context, order, sample.view, w, b, scale, static_cast<float>(tau));
    });
  }
  order.save(out);
  const std::int64_t tiles = (order.vocab() + 127) / 128;
  if (json) {
    Json object = {{"vocab", order.vocab()},
                   {"dim", w.size(1)},
                   {"tiles", tiles},
                   {"rows", sample.view.size(0)},
                   {"threads", context.threads()},
                   {"average_seconds", averaged},
                   {"order_seconds", ordered}};
    if (moments) object["moments_seconds"] = measured;
    object["out"] = out;
    return print_json(object);
  }
  Facts facts;
  facts.add("order", fmt::format("{} vocabulary entries in {} tiles, from {} tokens", order.vocab(),
                                 tiles, sample.view.size(0)));
  facts.add("time", fmt::format("average probability {}, order {}{}", format_seconds(averaged),
                                format_seconds(ordered),
                                moments ? ", moments " + format_seconds(measured) : ""));
  facts.add("written", out);
  print(facts.text());
}

}  // namespace

Command add_order(CommandLine& program) {
  Options sub = program.add_command(
      "order", "Make an order of the vocabulary for the far field (loss --plan far-backward)");
  auto args = std::make_shared<OrderCommand>();
  OrderCommand* a = args.get();
  const auto tensor = [&](const char* name, std::string& value, const char* description) {
    return sub
        .add_parsed(
            name, "TENSOR", [&value](const std::string& text) { value = text; }, description)
        .group("Tensors");
  };
  tensor("--hidden", a->hidden, "[..., D] f32, bf16 or f16: tokens to sample").required();
  tensor("--weight", a->weight, "[V, D] in the dtype of hidden").required();
  tensor("--bias", a->bias, "[V]");
  sub.add_parsed(
         "--dtype", "f32|bf16|f16",
         [a](const std::string& text) { a->dtype = parse_head_dtype(text); },
         "convert hidden and weight on loading")
      .group("Tensors");
  sub.add_integer("--first", a->first, 1, INT64_MAX, "sample the first N tokens only")
      .group("Tensors");
  sub.add_integer("--rows", a->rows, 1, INT64_MAX, "tokens to sample, evenly (default 1536)");
  sub.add_number("--logit-scale", a->logit_scale, "logits are multiplied by it (default 1)");
  sub.add_number("--softcap", a->softcap, "logits are X tanh(u / X)");
  sub.add_flag("--moments", a->moments, "and what --plan far-both needs");
  sub.add_number("--tau", a->tau, "that they are measured for (default 0.003)");
  sub.add_parsed(
         "--out", "FILE", [a](const std::string& text) { a->out = text; },
         "where it goes, a safetensors file")
      .required();
  a->device.add(sub);
  sub.add_flag("--json", a->json, "print one JSON object");
  sub.footer(kTensorHelp);
  return {sub, [args, sub] { args->run(sub.given()); }};
}

}  // namespace logitless::cli
