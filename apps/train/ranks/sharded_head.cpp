// A Trainer's vocabulary-parallel head.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "logitless/bytes.h"
#include "logitless/error.h"
#include "train/run/trainer.h"

namespace logitless::train {

void Trainer::check_sharded_head() const {
  if (model_->sizes().tied_head) {
    throw InvalidArgument(
        "shard_head: expected a head with a weight of its own; the model's is its token embedding, "
        "of which every rank reads all");
  }
  if (options_.far_field && ranks() > 1)
    throw InvalidArgument("shard_head: expected no far_field beside it");
}

std::size_t Trainer::head_parameter() const {
  const auto at = std::find_if(list_.begin(), list_.end(),
                               [&](const Parameter& p) { return p.name == model_->head(); });
  return static_cast<std::size_t>(at - list_.begin());
}

std::int64_t Trainer::vocab_of_logits() const {
  const ModelSizes sizes = model_->sizes();
  return shards_head() ? RankPartition::rows_of_each(sizes.vocab, sizes.dim, ranks()) : 0;
}

HeadOverRanks Trainer::head_over_ranks(const CompiledProgram& program, const Context& context,
                                       std::size_t taken) const {
  const LocalRows& rows = *partition_->local_rows();
  Sharding sharding;
  sharding.vocab_group = options_.ranks;
  sharding.vocab = model_->sizes().vocab;
  sharding.vocab_begin = rows.first;
  sharding.tokens = true;
  std::size_t budget = options_.memory_budget;
  if (budget > 0) budget = budget > taken ? budget - taken : 1;
  try {
    return {program, context, sharding, rows.count, budget};
  } catch (const Unsupported& error) {
    throw InvalidArgument(std::string("shard_head: ") + error.what());
  } catch (const InvalidArgument& error) {
    if (budget == 0) throw;
    throw InvalidArgument(fmt::format("shard_head: {} leave too little of a budget of {}: {}",
                                      format_bytes(taken), format_bytes(options_.memory_budget),
                                      error.what()));
  }
}

}  // namespace logitless::train
