#include "head/exchange_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "head/plan/choose.h"
#include "head/plan/text.h"

namespace logitless {
namespace {

// Returns the approximate bytes a second that a rank sends: between H200s of one host through
// NCCL's kernels (docs/use/groups.md), or between processes of one host through its memory.
double link_bytes(DeviceKind device) { return device == DeviceKind::cpu ? 2e9 : 225e9; }

constexpr std::int64_t kImpossible = -1;

std::string said_as(ExchangeMode exchange, std::string_view what) {
  return concat(what, " where ", name_of(exchange), " move");
}

std::string cost_text(double bytes, double seconds) {
  return concat(format_bytes(static_cast<std::size_t>(bytes)), " from each rank, predicted ",
                seconds_text(seconds), " with them");
}

}  // namespace

std::string_view name_of(ExchangeMode exchange) {
  switch (exchange) {
    case ExchangeMode::planned:
      return "planned";
    case ExchangeMode::tokens:
      return "tokens";
    case ExchangeMode::weights:
      return "weights";
  }
  return "?";
}

ExchangePlans::ExchangePlans(const Sharding& sharding, ExchangeProblem problem)
    : p_(std::move(problem)),
      spread_(sharding.tokens),
      planned_(sharding.tokens && sharding.exchange == ExchangeMode::planned) {
  // These conditions are equal on all ranks.
  const bool cannot = p_.device != DeviceKind::cpu && p_.vocab.tables;
  const bool by_columns = !p_.vocab.columns.empty();
  if (planned_ && cannot) weights_.refusal = "weights with vocab_ids move on the CPU alone";
  if (planned_ && p_.far) weights_.refusal = "the far field has no weight-gathered plan";
  if (planned_ && p_.ranks() == 1) weights_.refusal = "there is one rank";
  if (cannot && spread_ && sharding.exchange == ExchangeMode::weights)
    throw Unsupported("sharding.exchange: weights with vocab_ids move on the CPU alone");
  if (p_.far && spread_ && (by_columns || sharding.exchange == ExchangeMode::weights))
    throw Unsupported("sharding.exchange: the far field has no weight-gathered plan");
  planned_ = planned_ && !by_columns && !cannot && !p_.far && p_.ranks() > 1;
  tokens_.wanted = !by_columns && (planned_ || sharding.exchange != ExchangeMode::weights);
  weights_.wanted = by_columns || planned_ || sharding.exchange == ExchangeMode::weights;
  if (!spread_) weights_.wanted = false;
  if (by_columns) tokens_.refusal = "the weight is by columns, and logits would be sums over ranks";
}

void ExchangePlans::try_plan(Way& way, const Planner& planner) const {
  if (!way.wanted) return;
  way.plan.reset();
  HeadShape shape = p_.shape;
  HeadFeatures features = p_.features;
  if (way.exchange == ExchangeMode::weights) {
    shape.tokens = p_.tokens;
    shape.vocab = shape.global_vocab;
    features.gathered_rows = p_.vocab.most_rows();
    features.gathered_columns = p_.vocab.most_columns();
  } else {
    shape.tokens = spread_ ? p_.tokens * p_.ranks() : p_.tokens;
    if (!aliases_) features.d_weight_strided = features.d_weight;
  }
  if (!planned_) {
    way.plan = planner(shape, features);
    return;
  }
  const auto refuse = [&](const std::exception& error) {
    way.error = std::current_exception();
    way.refusal = error.what();
  };
  try {
    way.plan = planner(shape, features);
  } catch (const InvalidArgument& error) {
    refuse(error);
  } catch (const Unsupported& error) {
    refuse(error);
  }
}

void ExchangePlans::make(const Planner& planner, PlanDigest& digest) {
  try_plan(tokens_, planner);
  try_plan(weights_, planner);
  if (!tokens_.plan && !weights_.plan) std::rethrow_exception(tokens_.error);
  for (const Way* way : {&tokens_, &weights_}) {
    if (!way->wanted) continue;
    digest.own(said_as(way->exchange, "size"), !way->plan ? 0
                                               : way->exchange == ExchangeMode::weights
                                                   ? way->plan->slice_rows
                                                   : way->plan->chunk_tokens);
    digest.own(said_as(way->exchange, "nanoseconds"),
               way->plan ? std::llround(way->plan->predicted_seconds * 1e9) : kImpossible);
  }
  const LossPlan none;
  const LossPlan& plan = tokens_.plan ? *tokens_.plan : none;
  digest.own("weight ranges", plan.weight_ranges);
  digest.own("first tokens", plan.weight_ranges > 0 ? plan.first_tokens : plan.chunk_tokens);
}

bool ExchangePlans::agree_on_begin(const Agreement& said) {
  ranges_ = 0;
  first_ = 0;
  std::int64_t least_first = 0, least = 0, most = 0;
  bool any = false;
  for (int r = 0; r < p_.ranks(); ++r) {
    // A rank without vocabulary entries follows the chunks of the others.
    if (!tokens_.wanted || p_.vocab.ranks[static_cast<std::size_t>(r)].rows == 0) continue;
    const std::int64_t chunk = said.value_of(r, said_as(ExchangeMode::tokens, "size"));
    if (chunk == 0) continue;  // this rank has no plan, so none is chosen
    const std::int64_t first = said.value_of(r, "first tokens");
    least_first = any ? std::min(least_first, first) : first;
    least = any ? std::min(least, chunk) : chunk;
    most = std::max(most, chunk);
    first_ = std::max(first_, first);
    ranges_ = std::max(ranges_, static_cast<int>(said.value_of(r, "weight ranges")));
    any = true;
  }
  const std::int64_t tokens = spread_ ? p_.tokens * p_.ranks() : p_.tokens;
  const bool alike = least_first == first_ && (first_ >= tokens || least == most);
  if (ranges_ == 0 || alike) return true;
  aliases_ = false;
  ranges_ = 0;
  first_ = 0;
  return false;
}

// Returns the bytes that a rank sends in exchanges proportional to dim. `size` is the chunk or
// slice size that all ranks can use.
double ExchangePlans::bytes_of(ExchangeMode exchange, std::int64_t size) const {
  const HeadFeatures& f = p_.features;
  const std::int64_t columns = p_.vocab.columns.empty() ? p_.shape.dim : p_.vocab.most_columns();
  const double row = static_cast<double>(p_.ranks() - 1) * static_cast<double>(columns);
  const auto element = static_cast<double>(size_of(p_.shape.dtype));
  const double gradient = sizeof(float);
  if (exchange == ExchangeMode::tokens)
    return row * static_cast<double>(p_.tokens) * (element + (f.d_hidden ? gradient : 0.0));
  const bool again = f.d_hidden || f.d_weight || f.d_bias;
  const auto slices = static_cast<double>(slice_count(p_.vocab.most_rows(), size));
  // A GPU still holds the last two slices when the backward begins.
  const double kept = p_.device == DeviceKind::cpu ? 1.0 : std::min(slices, 2.0);
  const double gathered = again ? 2.0 * slices - kept : slices;
  return row * static_cast<double>(size) *
         (gathered * element + (f.d_weight ? slices * gradient : 0.0));
}

void ExchangePlans::agree(Way& way, const Agreement& said) const {
  if (!way.wanted) return;
  std::int64_t most = 0;
  way.size = INT64_MAX;
  for (int r = 0; r < p_.ranks(); ++r) {
    const std::int64_t nanoseconds = said.value_of(r, said_as(way.exchange, "nanoseconds"));
    if (nanoseconds == kImpossible) {
      if (way.refusal.empty()) way.refusal = concat("rank ", r, " has no plan");
      way.plan.reset();
    }
    most = std::max(most, nanoseconds);
    // A rank without vocabulary entries goes through the chunks of the others.
    if (way.exchange == ExchangeMode::tokens &&
        p_.vocab.ranks[static_cast<std::size_t>(r)].rows == 0)
      continue;
    way.size = std::min(way.size, said.value_of(r, said_as(way.exchange, "size")));
  }
  if (!way.plan) return;
  way.bytes = bytes_of(way.exchange, way.size);
  const double computes = static_cast<double>(most) * 1e-9;
  const double sends = way.bytes / link_bytes(p_.device);
  // A GPU overlaps the exchange of a slice with the GEMMs of another.
  const bool beside = p_.device != DeviceKind::cpu && way.exchange == ExchangeMode::weights;
  const auto slices = static_cast<double>(slice_count(p_.vocab.most_rows(), way.size));
  way.seconds =
      beside ? std::max(computes, sends) + std::min(computes, sends) / slices : computes + sends;
}

LossPlan ExchangePlans::agreed(const Agreement& said) {
  agree(tokens_, said);
  agree(weights_, said);
  require(tokens_.plan || weights_.plan, "sharding: tokens move: ", tokens_.refusal,
          "; weights move: ", weights_.refusal);
  const bool weights = weights_.plan && (!tokens_.plan || weights_.seconds < tokens_.seconds);
  Way& best = weights ? weights_ : tokens_;
  const std::string why = spread_ ? reasons(best, weights ? tokens_ : weights_) : "";
  LossPlan plan = taken(best);
  plan.exchange_choice = why;
  return plan;
}

// Returns the plan with the smallest chunk or slice of all ranks.
LossPlan ExchangePlans::taken(Way& way) const {
  if (way.exchange == ExchangeMode::weights)
    return with_slice(std::move(*way.plan), way.size, p_.device);
  const std::int64_t chunk = spread_ ? std::max<std::int64_t>(way.size, p_.ranks()) : way.size;
  return with_chunks(std::move(*way.plan), chunk);
}

LossPlan ExchangePlans::with_chunks(LossPlan plan, std::int64_t chunk) const {
  const auto rank = static_cast<std::size_t>(p_.rank);
  if (p_.vocab.ranks[rank].rows == 0 && ranges_ > 0) {
    plan.weight_ranges = ranges_;
    plan.first_tokens = first_;
  }
  return with_chunk(std::move(plan), chunk, p_.device);
}

std::string ExchangePlans::reasons(const Way& best, const Way& other) const {
  const std::string not_other = !other.refusal.empty() && !other.wanted ? other.refusal
                                : !other.wanted ? concat(name_of(best.exchange), " were asked for")
                                : !other.plan   ? other.refusal
                                                : cost_text(other.bytes, other.seconds);
  return concat(name_of(best.exchange), " move: ", cost_text(best.bytes, best.seconds), "\nnot ",
                name_of(other.exchange), ": ", not_other);
}

}  // namespace logitless
