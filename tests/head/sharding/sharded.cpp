#include "head/sharding/sharded.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "head/plan/choose.h"
#include "kernels/device/kernel.h"
#include "support/device_group.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

class Watched : public Communicator {
 public:
  Watched(std::shared_ptr<Communicator> real, unsigned delays, std::atomic<std::int64_t>* sent)
      : real_(std::move(real)), delays_(delays), sent_(sent), delay_(real_->rank(), delays) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  DeviceKind device() const override { return real_->device(); }
  bool capturable() const override { return real_->capturable(); }
  void all_gather(const void* mine, void* all, std::size_t bytes, void* stream) override {
    before(bytes);
    real_->all_gather(mine, all, bytes, stream);
  }
  void all_to_all(const void* slices, void* of_all, std::size_t bytes, void* stream) override {
    before(bytes);
    real_->all_to_all(slices, of_all, bytes, stream);
  }
  void all_gather_host(const void* mine, void* all, std::size_t bytes) override {
    real_->all_gather_host(mine, all, bytes);
  }
  void wait(void* stream, std::chrono::milliseconds limit) override { real_->wait(stream, limit); }
  void abort(std::string_view reason) noexcept override { real_->abort(reason); }

 private:
  void before(std::size_t bytes) {
    if (sent_ != nullptr) *sent_ += static_cast<std::int64_t>(bytes) * (size() - 1);
    if (delays_ != 0) delay_();
  }
  std::shared_ptr<Communicator> real_;
  unsigned delays_;
  std::atomic<std::int64_t>* sent_;
  RandomDelays delay_;
};

// Returns some rows of a tensor whose rows have `columns` elements.
Tensor rows_of(const Tensor& t, std::vector<std::int64_t> shape, std::int64_t columns,
               const std::vector<std::int64_t>& rows) {
  if (!t.defined()) return {};
  shape[0] = static_cast<std::int64_t>(rows.size());
  Tensor out(t.view().dtype(), shape);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::int64_t k = 0; k < columns; ++k)
      out.set(static_cast<std::int64_t>(i) * columns + k, t.get(rows[i] * columns + k));
  }
  return out;
}

HeadSpec spec_of_rank(const HeadSpec& whole, std::int64_t vocab_count, std::int64_t tokens) {
  HeadSpec s = whole;
  s.vocab = vocab_count;
  s.tokens = tokens;
  return s;
}

HeadProblem empty_problem() {
  HeadSpec tiny;
  tiny.tokens = tiny.dim = tiny.vocab = 1;
  return HeadProblem(tiny);
}

}  // namespace

VocabSplit vocab_at(std::string name, const std::vector<std::int64_t>& borders) {
  VocabSplit split{std::move(name), {}, false};
  for (std::size_t r = 0; r + 1 < borders.size(); ++r) {
    split.ranks.emplace_back(static_cast<std::size_t>(borders[r + 1] - borders[r]));
    std::iota(split.ranks.back().begin(), split.ranks.back().end(),
              static_cast<std::int32_t>(borders[r]));
  }
  return split;
}

VocabSplit even_vocab(int ranks, std::int64_t vocab) {
  std::vector<std::int64_t> borders;
  for (int r = 0; r <= ranks; ++r) borders.push_back(vocab * r / ranks);
  return vocab_at("even", borders);
}

VocabSplit interleaved_vocab(int ranks, std::int64_t vocab) {
  VocabSplit split{"table", std::vector<std::vector<std::int32_t>>(static_cast<std::size_t>(ranks)),
                   true};
  std::mt19937 random(3);
  for (std::int64_t j = 0; j < vocab; ++j)
    split.ranks[random() % static_cast<unsigned>(ranks)].push_back(static_cast<std::int32_t>(j));
  return split;
}

std::vector<VocabSplit> vocab_splits(int ranks, std::int64_t vocab) {
  if (ranks == 1) return {even_vocab(1, vocab)};
  std::vector<std::int64_t> uneven = {0}, one = {0}, empty = {0};
  for (int r = 1; r < ranks; ++r) {
    uneven.push_back(uneven.back() + 7 + 13 * (r % 3));
    one.push_back(r);
    empty.push_back(r % 2 == 0 ? 131 : 0);  // an empty rank at the start, and others
  }
  for (auto* borders : {&uneven, &one, &empty}) borders->push_back(vocab);
  std::sort(empty.begin(), empty.end());
  return {even_vocab(ranks, vocab), vocab_at("uneven", uneven),
          vocab_at("one vocabulary entry", one), vocab_at("empty", empty),
          interleaved_vocab(ranks, vocab)};
}

std::vector<TokenSplit> token_splits(int ranks, std::int64_t tokens, bool weights_move) {
  TokenSplit uneven{"uneven", std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 0)};
  TokenSplit one{"one rank", uneven.counts};
  for (int i = 0; i < tokens; ++i)
    ++uneven.counts[static_cast<std::size_t>(i * i % 7 % ranks)];  // none on some of 8
  one.counts.back() = tokens;
  if (!weights_move) return {{"replicated"}, uneven, one};
  return {{"replicated"},
          uneven,
          one,
          with_weights_moving(uneven),
          with_weights_moving(one),
          with_weights_moving(uneven, 37),
          with_columns(uneven, 37)};
}

TokenSplit with_columns(TokenSplit tokens, std::int64_t slice_rows) {
  tokens = with_weights_moving(std::move(tokens), slice_rows);
  tokens.name += ", by columns";
  tokens.columns = true;
  return tokens;
}

std::int64_t columns_before(int rank, int ranks, std::int64_t dim) {
  return dim * rank * rank / (ranks * ranks);
}

TokenSplit with_weights_moving(TokenSplit tokens, std::int64_t slice_rows) {
  tokens.name += ", weights move";
  tokens.exchange = ExchangeMode::weights;
  tokens.slice_rows = slice_rows;
  return tokens;
}

RankProblem::RankProblem(const HeadProblem& whole, const ShardedRun& run, int rank)
    : part(empty_problem()),
      vocab_ids(run.vocab.ranks[static_cast<std::size_t>(rank)]),
      vocab(whole.spec.vocab),
      spread_tokens(run.tokens.sharded()),
      exchange(run.tokens.sharded() ? run.tokens.exchange : ExchangeMode::planned),
      by_columns(run.tokens.columns) {
  const HeadSpec& s = whole.spec;
  std::int64_t count = s.tokens;
  if (spread_tokens) {
    const auto& counts = run.tokens.counts;
    first_token = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
    count = counts[static_cast<std::size_t>(rank)];
  }
  if (by_columns) {
    vocab_ids.resize(static_cast<std::size_t>(vocab));
    std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  }
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first_token);
  const std::vector<std::int64_t> rows(vocab_ids.begin(), vocab_ids.end());
  std::vector<std::int64_t> of_targets = {0};
  if (s.per_token > 1) of_targets.push_back(s.per_token);
  part.spec = spec_of_rank(s, static_cast<std::int64_t>(vocab_ids.size()), count);
  part.hidden = rows_of(whole.hidden, {0, s.dim}, s.dim, tokens);
  part.weight = rows_of(whole.weight, {0, s.dim}, s.dim, rows);
  part.bias = rows_of(whole.bias, {0}, 1, rows);
  part.class_weight = whole.class_weight;
  part.token_weight = rows_of(whole.token_weight, {0}, 1, tokens);
  part.targets = rows_of(whole.targets, of_targets, s.per_token, tokens);
  part.target_weight = rows_of(whole.target_weight, of_targets, s.per_token, tokens);
  if (by_columns) {
    const int ranks = static_cast<int>(run.vocab.ranks.size());
    const std::int64_t before = columns_before(rank, ranks, s.dim);
    columns = columns_before(rank + 1, ranks, s.dim) - before;
    part.weight = Tensor(whole.weight.view().dtype(), {vocab, columns});
    for (std::int64_t i = 0; i < vocab * columns; ++i)
      part.weight.set(i, whole.weight.get(i / columns * s.dim + before + i % columns));
    return;
  }
  if (!run.vocab.table) return;
  table = Tensor(DType::i32, {static_cast<std::int64_t>(vocab_ids.size())},
                 std::vector<double>(vocab_ids.begin(), vocab_ids.end()));
}

Sharding RankProblem::sharding(std::shared_ptr<Communicator> group) const {
  Sharding out;
  out.vocab_group = std::move(group);
  out.vocab = vocab;
  if (by_columns) {
    out.weight = WeightSharding::columns;
    out.columns = columns;
  } else if (table.defined()) {
    out.vocab_ids = table.view();
  } else {
    out.vocab_begin = vocab_ids.empty() ? 0 : vocab_ids.front();
  }
  out.tokens = spread_tokens;
  out.exchange = exchange;
  return out;
}

bool takes_shards(const std::string& kernel, const HeadSpec& spec, const VocabSplit& vocab,
                  ExchangeMode exchange) {
  if (kernel.empty()) return true;
  if (!accepts(kernel, spec)) return false;
  return !is_device_kernel(kernel) || (cuda::find_device_kernel(kernel).target_logits != nullptr &&
                                       !(vocab.table && exchange == ExchangeMode::weights));
}

Ranks make_group(const std::string& kernel, int size) {
  const std::chrono::seconds limit(30);
  return is_device_kernel(kernel) ? make_device_group(size, limit) : make_thread_group(size, limit);
}

std::shared_ptr<Communicator> watched(std::shared_ptr<Communicator> real, unsigned delays,
                                      std::atomic<std::int64_t>* sent) {
  return std::make_shared<Watched>(std::move(real), delays, sent);
}

namespace {

HeadResult run_rank(const RankProblem& rank, const ShardedRun& sharded,
                    const std::shared_ptr<Communicator>& group) {
  const HeadSpec& s = rank.part.spec;
  const RunSpec& run = sharded.run;
  HeadResult a;
  CrossEntropyOutputs out = make_outputs(s, run, a);
  if (rank.by_columns && a.d_weight.defined()) {
    a.d_weight = Tensor(a.d_weight.view().dtype(), {s.vocab, rank.columns});
    out.d_weight = a.d_weight.view();
  }
  CrossEntropyInputs in = rank.part.inputs();
  in.grad_loss = run.grad_loss;
  Tensor grad_losses;
  if (!run.grad_losses.empty()) {
    const auto first = run.grad_losses.begin() + rank.first_token;
    grad_losses = Tensor(DType::f32, {s.tokens}, std::vector<double>(first, first + s.tokens));
    in.grad_losses = std::as_const(grad_losses).view();
  }
  in.sharding = rank.sharding(watched(group, sharded.delays, sharded.sent));
  in.sharding.replicas = sharded.replicas;
  CrossEntropyOptions options = rank.part.options();
  if (run.change) run.change(options, in, out);
  const Context context = make_context(run.kernel, run.threads);
  PlanRequest request{context.device(), run.budget, run.plan,
                      run.plan == PlanKind::stored ? run.stored_fraction : 0.0};
  request.tau = run.tau;
  request.audit_rows = run.audit_rows;
  request.sample_every = run.sample_every;
  Mirror mirror(run.kernel);
  in = mirror.in(in);
  out = mirror.out(out);
  a.plan = plan_cross_entropy(options, in, out, request);
  const DeviceKind device = context.device().kind;
  // Weight-gathered plans of a GPU have all tokens in one chunk, and full vocabulary blocks.
  const bool gpu = device == DeviceKind::cuda;
  const bool moving = a.plan.slice_rows > 0;
  if (run.chunk_tokens > 0 && !(gpu && moving))
    a.plan = with_chunk(a.plan, run.chunk_tokens, device);
  if (moving && sharded.tokens.slice_rows > 0)
    a.plan = with_slice(a.plan, gpu ? 256 : sharded.tokens.slice_rows, device);
  {
    const Workspace workspace(context, a.plan);
    a.statistics = cross_entropy(context, a.plan, options, in, out, workspace);
    mirror.finish();
    if (device == DeviceKind::cuda) a.statistics = device_statistics(context, a.plan, workspace);
  }
  if (sharded.after) sharded.after(group->rank(), a.plan, context);
  return a;
}

using Field = Tensor HeadResult::*;

// Assembles a tensor whose rows have `columns` elements; each part goes to rows(rank).
template <typename Rows>
Tensor put_together(const std::vector<HeadResult>& ranks, Field field,
                    std::vector<std::int64_t> shape, const Rows& rows) {
  const Tensor& first = ranks.front().*field;
  if (!first.defined()) return {};
  std::int64_t columns = 1;
  for (std::size_t d = 1; d < shape.size(); ++d) columns *= shape[d];
  Tensor out(first.view().dtype(), shape);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::int64_t i = 0;
    for (const std::int64_t row : rows(r)) {
      for (std::int64_t k = 0; k < columns; ++k)
        out.set(row * columns + k, (ranks[r].*field).get(i * columns + k));
      ++i;
    }
  }
  return out;
}

// Assembles d_weight of ranks that each have some of its columns.
Tensor columns_together(const std::vector<RankProblem>& parts,
                        const std::vector<HeadResult>& results, const HeadSpec& s) {
  if (!results.front().d_weight.defined()) return {};
  Tensor out(results.front().d_weight.view().dtype(), {s.vocab, s.dim});
  std::int64_t before = 0;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    const std::int64_t columns = parts[r].columns;
    for (std::int64_t i = 0; i < s.vocab * columns; ++i)
      out.set(i / columns * s.dim + before + i % columns, results[r].d_weight.get(i));
    before += columns;
  }
  return out;
}

}  // namespace

void expect_same_far(const FarFieldStatistics& a, const FarFieldStatistics& b) {
  EXPECT_EQ(a.selected, b.selected);
  EXPECT_EQ(a.sampled, b.sampled);
  EXPECT_EQ(a.passes, b.passes);
  EXPECT_EQ(a.dense_fallback, b.dense_fallback);
  EXPECT_EQ(a.bound, b.bound);
  EXPECT_EQ(a.audited_error, b.audited_error);
  EXPECT_EQ(a.audited_tokens, b.audited_tokens);
  EXPECT_EQ(a.audited_lse_error, b.audited_lse_error);
  EXPECT_EQ(a.audited_lse_error_max, b.audited_lse_error_max);
  EXPECT_EQ(a.imbalance, b.imbalance);
  EXPECT_EQ(a.sampled_lse_error, b.sampled_lse_error);
  EXPECT_EQ(a.sampled_most, b.sampled_most);
}

HeadResult run_sharded(const HeadProblem& problem, const ShardedRun& run) {
  const HeadSpec& s = problem.spec;
  const int size = static_cast<int>(run.vocab.ranks.size());
  std::vector<RankProblem> parts;
  for (int r = 0; r < size; ++r) parts.emplace_back(problem, run, r);
  std::vector<HeadResult> results(static_cast<std::size_t>(size));
  const Ranks group = make_group(run.run.kernel, size);
  const std::vector<Outcome> outcomes = run_ranks(group, [&](Communicator& me) {
    const auto r = static_cast<std::size_t>(me.rank());
    results[r] = run_rank(parts[r], run, group[r]);
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
  if (testing::Test::HasFailure()) return {};

  const auto of_vocab = [&](std::size_t r) {
    return std::vector<std::int64_t>(parts[r].vocab_ids.begin(), parts[r].vocab_ids.end());
  };
  const auto of_tokens = [&](std::size_t r) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(parts[r].part.spec.tokens));
    std::iota(rows.begin(), rows.end(), parts[r].first_token);
    return rows;
  };
  const auto expect_same = [&](const char* name, Field field) {
    for (const HeadResult& a : results)
      EXPECT_EQ((a.*field).bytes(), (results.front().*field).bytes()) << name << " of the ranks";
  };
  HeadResult whole;
  whole.plan = results.front().plan;
  whole.statistics = results.front().statistics;
  if (run.tokens.columns) {
    whole.d_weight = columns_together(parts, results, s);
    expect_same("d_bias", &HeadResult::d_bias);
    whole.d_bias = results.front().d_bias;
  } else {
    whole.d_weight = put_together(results, &HeadResult::d_weight, {s.vocab, s.dim}, of_vocab);
    whole.d_bias = put_together(results, &HeadResult::d_bias, {s.vocab}, of_vocab);
  }
  const std::pair<const char*, Field> per_token[] = {{"lse", &HeadResult::lse},
                                                     {"log_prob", &HeadResult::log_prob},
                                                     {"target_logit", &HeadResult::target_logit},
                                                     {"entropy", &HeadResult::entropy},
                                                     {"argmax", &HeadResult::argmax}};
  for (const auto& [name, field] : per_token) {
    if (!run.tokens.sharded()) expect_same(name, field);
    whole.*field = put_together(results, field, {s.tokens}, of_tokens);
  }
  if (!run.tokens.sharded()) expect_same("d_hidden", &HeadResult::d_hidden);
  whole.d_hidden = put_together(results, &HeadResult::d_hidden, {s.tokens, s.dim}, of_tokens);
  const bool by_token = s.reduction == Reduction::none;
  if (!by_token || !run.tokens.sharded()) expect_same("loss", &HeadResult::loss);
  whole.loss = by_token ? put_together(results, &HeadResult::loss, {s.tokens}, of_tokens)
                        : results.front().loss;
  for (const HeadResult& a : results) {
    EXPECT_EQ(a.statistics.valid_tokens, whole.statistics.valid_tokens);
    EXPECT_EQ(a.statistics.normalizer, whole.statistics.normalizer);
    EXPECT_EQ(a.statistics.correct, whole.statistics.correct);
    expect_same_far(a.statistics.far, whole.statistics.far);
  }
  return whole;
}

}  // namespace logitless::test
