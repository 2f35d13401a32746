#include "cli/far_args.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cli/output.h"
#include "cli/tensors.h"

namespace logitless::cli {

OwnedTensor sample_rows(const ConstTensorView& hidden, std::int64_t most) {
  const int last = hidden.rank() - 1;
  const std::int64_t dim = hidden.size(last);
  const std::int64_t rows = dim > 0 ? hidden.numel() / dim : 0;
  const std::int64_t count = std::min(rows, most);
  const std::int64_t shape[] = {count, dim};
  OwnedTensor out = make_tensor(hidden.dtype(), shape);
  const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(hidden.dtype());
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<std::byte*>(out.view.data()) + static_cast<std::size_t>(i) * bytes,
                static_cast<const std::byte*>(hidden.data()) +
                    static_cast<std::size_t>(i * rows / count) * bytes,
                bytes);
  }
  return out;
}

void FarArgs::add(Options& options) {
  const char* group = "Far field (--plan far-backward, far-both)";
  options
      .add_number(
          "--tau", tau,
          "tiles with more probability than X for a token are computed exactly (default 0.003)")
      .group(group);
  options
      .add_parsed(
          "--order", "FILE|fresh", [this](const std::string& text) { order = text; },
          "order of the vocabulary: of a file, or made from the tokens (default)")
      .group(group);
  options
      .add_integer("--order-rows", order_rows, 1, INT64_MAX,
                   "tokens a fresh order is made from, evenly spaced (default 1536)")
      .group(group);
  options
      .add_parsed(
          "--save-order", "FILE", [this](const std::string& text) { save_order = text; },
          "write the order, for --order of later calls")
      .group(group);
  options
      .add_integer("--sample-every", sample_every, 0, INT64_MAX,
                   "correct d_weight of far tiles from one block of tokens in N (default 0: none)")
      .group(group);
  options
      .add_integer("--sample-seed", sample_seed, 0, INT64_MAX, "which blocks those are (default 0)")
      .group(group);
  options
      .add_integer("--audit", audit, 0, INT64_MAX,
                   "compute d_hidden of N tokens exactly, too, and report the error")
      .group(group);
}

void FarArgs::add_to(PlanRequest& request, const std::set<std::string>& given) const {
  if (request.kind != PlanKind::far_backward && request.kind != PlanKind::far_both) {
    return refuse_given(
        given, {"tau", "order", "order-rows", "save-order", "sample-every", "sample-seed", "audit"},
        "only --plan far-backward and far-both have it");
  }
  if (order != "fresh")
    refuse_given(given, {"order-rows"}, "is of a fresh order, and --order names a file");
  if (sample_every == 0) refuse_given(given, {"sample-seed"}, "is of --sample-every, which is 0");
  if (given.count("tau") > 0 && !(tau > 0.0 && tau < 1.0))
    throw UsageError(fmt::format("--tau: expected a number in (0, 1), got {}", tau));
  if (order != "fresh") check_exists("--order", order);
  check_output("--save-order", save_order, train::FileKind::tensors);
  request.tau = static_cast<float>(tau);
  request.audit_rows = audit;
  request.sample_every = sample_every;
}

void FarArgs::check_files(const TensorLoader& loader, const std::string& out) const {
  loader.check_not_loaded("--out", out);
  loader.check_not_loaded("--save-order", save_order);
  check_other_file("--save-order", save_order, out, "the file of --out");
  if (order == "fresh") return;
  check_other_file("--out", out, order, "the file of --order");
}

namespace {

// Returns the memory of making an order that the meter does not count (vocab_order.h), including
// the rows and the order.
std::size_t unmetered_bytes(const Context& context, const LossPlan& plan, std::int64_t rows) {
  const std::int64_t vocab = plan.shape.vocab, dim = plan.shape.dim;
  const std::int64_t tiles = (vocab + 127) / 128;
  const auto element = static_cast<std::int64_t>(size_of(plan.shape.dtype));
  const std::int64_t order = 512 * dim * 4 * context.threads() + 16 * vocab;
  const std::int64_t moments = plan.kind != PlanKind::far_both
                                   ? 0
                                   : 4 * rows * (dim + 2 * tiles) + 8 * dim * dim +
                                         4 * tiles * dim + 512 * (dim + rows) * context.threads();
  // An order takes 20 bytes for each vocabulary entry.
  return static_cast<std::size_t>(rows * dim * element + 20 * vocab + std::max(order, moments));
}

}  // namespace

MadeOrder FarArgs::make(const Context& context, const CrossEntropyOptions& options,
                        const CrossEntropyInputs& in, const LossPlan& plan,
                        std::size_t budget) const {
  const auto measured = [&](const VocabOrder& made, const ConstTensorView& hidden) {
    if (plan.kind != PlanKind::far_both || made.dim() == in.weight.size(1)) return made;
    return measure_tiles(context, made, hidden, in.weight, in.bias, options.logit_scale, plan.tau);
  };
  MadeOrder made;
  VocabOrder& out = made.order;
  if (order != "fresh") {
    out = VocabOrder::load(order);
    if (out.vocab() != in.weight.size(0)) {
      throw UsageError(fmt::format("--order: {} is of {} vocabulary entries, --weight has {}",
                                   order, out.vocab(), in.weight.size(0)));
    }
    if (plan.kind == PlanKind::far_both && out.dim() != in.weight.size(1)) {
      throw UsageError(
          fmt::format("--order: {} has no moments of dim {}, which --plan far-both needs; make it "
                      "with --plan far-both --save-order",
                      order, in.weight.size(1)));
    }
  } else {
    const OwnedTensor rows = sample_rows(in.hidden, order_rows);
    // Memory besides the plan's, which gets the rest of the budget: these rows, the averages, and a
    // zero bias.
    const std::size_t held = rows.memory.bytes() + 8 * static_cast<std::size_t>(in.weight.size(0));
    const std::size_t left = budget > held ? budget - held : budget;
    context.memory().reset_peak();
    std::vector<float> average = average_probability(context, rows.view, in.weight, in.bias,
                                                     options.logit_scale, options.softcap, left);
    // The loss of a head with NaN is NaN, whatever the order.
    for (float& p : average) p = std::isfinite(p) ? p : 0.0f;
    out = make_vocab_order(context, in.weight, average);
    out = measured(out, rows.view);
    made.bytes = std::max(context.memory().peak_bytes() + held,
                          unmetered_bytes(context, plan, rows.view.size(0)));
  }
  if (!save_order.empty()) out.save(save_order);
  return made;
}

}  // namespace logitless::cli
