#include "head/sharding/far_shards.h"

#include <algorithm>

#include "kernels/cpu_head.h"

namespace logitless::test {
namespace {

// Returns the order of a rank's rows, from its token ids by position; `table` has them by row.
VocabOrder order_of_rows(const VocabOrder& whole, const std::vector<std::int32_t>& table,
                         const std::vector<std::int64_t>& vocab_ids) {
  if (vocab_ids.empty()) return {};
  std::vector<std::int64_t> rows;
  for (const std::int64_t vocab_id : vocab_ids)
    rows.push_back(std::lower_bound(table.begin(), table.end(), vocab_id) - table.begin());
  std::vector<float> average;
  for (const std::int32_t vocab_id : table)
    average.push_back(whole.average()[static_cast<std::size_t>(vocab_id)]);
  return VocabOrder(rows, average);
}

VocabOrder with_tiles(const VocabOrder& order, const VocabOrder& whole,
                      const std::vector<std::int64_t>& tiles) {
  if (!whole.has_moments() || order.empty()) return order;
  std::vector<float> variance, caution;
  const std::int64_t dim = whole.dim();
  for (const std::int64_t tile : tiles) {
    const float* row = whole.variance().data() + tile * dim;
    variance.insert(variance.end(), row, row + dim);
    caution.push_back(whole.log2_caution()[static_cast<std::size_t>(tile)]);
  }
  return order.with_moments(dim, whole.axes(), variance, caution);
}

}  // namespace

namespace {

const FarOption kPlain = {"plain", [](HeadSpec&) {}};
const FarOption kSmoothing = {"smoothing_of_classes", [](HeadSpec& s) {
                                s.label_smoothing = 0.2f;
                                s.class_weight = s.token_weight = s.bias = true;
                                s.ignored = 0.3;
                              }};

}  // namespace

std::vector<FarOption> far_backward_options() {
  return {kPlain,
          kSmoothing,
          {"softcap_scale_bias",
           [](HeadSpec& s) {
             s.softcap = 4.0f;
             s.logit_scale = 1.3f;
             s.bias = true;
             s.z_loss = 0.01f;
           }},
          {"several_targets",
           [](HeadSpec& s) {
             s.per_token = 3;
             s.ignored = 0.2;
           }},
          {"reduction_none", [](HeadSpec& s) { s.reduction = Reduction::none; }}};
}

std::vector<FarOption> far_both_options() {
  return {kPlain, kSmoothing, {"scale_z_loss", [](HeadSpec& s) {
                                 s.logit_scale = 0.8f;
                                 s.z_loss = 0.01f;
                               }}};
}

FarSplit interleave_tiles(const VocabOrder& order, int ranks) {
  const std::int64_t tiles = ceil_div(order.vocab(), kVocabTile);
  std::vector<std::vector<std::int64_t>> of_rank(static_cast<std::size_t>(ranks));
  for (std::int64_t t = 0; t + 1 < tiles; ++t)
    of_rank[static_cast<std::size_t>(t % ranks)].push_back(t);
  of_rank.back().push_back(tiles - 1);
  FarSplit out;
  out.vocab.name = "tiles";
  out.vocab.table = true;
  std::vector<std::int64_t> all_vocab, all_tiles;
  for (const auto& mine : of_rank) {
    std::vector<std::int64_t> vocab_ids;
    for (const std::int64_t tile : mine) {
      const std::int64_t end = std::min(order.vocab(), (tile + 1) * kVocabTile);
      for (std::int64_t at = tile * kVocabTile; at < end; ++at)
        vocab_ids.push_back(order.vocab_ids()[static_cast<std::size_t>(at)]);
    }
    std::vector<std::int32_t> table(vocab_ids.begin(), vocab_ids.end());
    std::sort(table.begin(), table.end());
    out.orders.push_back(with_tiles(order_of_rows(order, table, vocab_ids), order, mine));
    out.vocab.ranks.push_back(std::move(table));
    all_vocab.insert(all_vocab.end(), vocab_ids.begin(), vocab_ids.end());
    all_tiles.insert(all_tiles.end(), mine.begin(), mine.end());
  }
  out.whole = with_tiles(VocabOrder(all_vocab, order.average()), order, all_tiles);
  return out;
}

FarSplit split_order(const VocabOrder& order, const VocabSplit& split) {
  FarSplit out;
  out.vocab = split;
  for (const auto& table : split.ranks) {
    std::vector<std::int64_t> vocab_ids(table.begin(), table.end());
    std::sort(vocab_ids.begin(), vocab_ids.end(), [&](std::int64_t a, std::int64_t b) {
      return order.positions()[static_cast<std::size_t>(a)] <
             order.positions()[static_cast<std::size_t>(b)];
    });
    out.orders.push_back(order_of_rows(order, table, vocab_ids));
  }
  return out;
}

FarResult call_sharded_far(const FarProblem& problem, const FarSplit& split, RunSpec run,
                           const TokenSplit& tokens, unsigned delays,
                           std::atomic<std::int64_t>* sent) {
  FarResult out;
  const std::size_t ranks = split.orders.size();
  std::vector<Tensor> bounds(ranks);
  const auto change = run.change;
  if (!run.plan.has_value()) run.plan = PlanKind::far_backward;
  run.change = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& to) {
    const auto r = static_cast<std::size_t>(in.sharding.vocab_group->rank());
    in.order = share_order(split.orders[r], in.sharding);
    if (run.plan == PlanKind::far_backward) {
      bounds[r] = Tensor(DType::f32, {in.targets.size(0)});
      to.d_hidden_bound = bounds[r].view();
    }
    if (change) change(o, in, to);
  };
  static_cast<HeadResult&>(out) = run_sharded(
      problem,
      {.vocab = split.vocab, .tokens = tokens, .run = run, .delays = delays, .sent = sent});
  out.tau = static_cast<double>(run.tau);
  out.bound = Tensor(DType::f32, {problem.spec.tokens});
  std::int64_t at = 0;
  for (std::size_t r = 0; r < (tokens.sharded() ? ranks : 1); ++r) {
    for (std::int64_t i = 0; bounds[r].defined() && i < bounds[r].numel(); ++i)
      out.bound.set(at++, bounds[r].get(i));
  }
  return out;
}

}  // namespace logitless::test
