// Interleaved vocabularies: the permutation, its inverse and, on heads of a trained language model,
// the balance of selected tiles over the ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "head/sharding/far_shards.h"
#include "support/mirror.h"
#include "support/real_head.h"

namespace logitless::test {
namespace {

TEST(InterleaveVocab, IsAPermutationInStrata) {
  for (const std::int64_t vocab : {1, 2, 3, 100, 1001}) {
    for (const int ranks : {1, 2, 3, 8}) {
      SCOPED_TRACE(std::to_string(vocab) + " on " + std::to_string(ranks));
      const std::vector<std::int32_t> interleaved = interleave_vocab(vocab, ranks);
      const std::vector<std::int32_t> inverse = inverse_of_interleaved(interleaved);
      std::vector<int> rank_of(static_cast<std::size_t>(vocab));
      EXPECT_EQ(interleaved_begin(vocab, ranks, 0), 0);
      EXPECT_EQ(interleaved_begin(vocab, ranks, ranks), vocab);
      for (int r = 0; r < ranks; ++r) {
        const auto first = interleaved.begin() + interleaved_begin(vocab, ranks, r);
        const auto end = interleaved.begin() + interleaved_begin(vocab, ranks, r + 1);
        EXPECT_TRUE(std::is_sorted(first, end));
        EXPECT_EQ(end - first, vocab / ranks + (r < vocab % ranks ? 1 : 0));
        for (auto it = first; it != end; ++it) rank_of[static_cast<std::size_t>(*it)] = r;
      }
      for (std::size_t i = 0; i < interleaved.size(); ++i)
        EXPECT_EQ(inverse[static_cast<std::size_t>(interleaved[i])], static_cast<std::int32_t>(i));
      for (std::int64_t at = 0; at + ranks <= vocab; at += ranks) {  // each stratum is on all ranks
        std::vector<int> of(rank_of.begin() + at, rank_of.begin() + at + ranks);
        std::sort(of.begin(), of.end());
        for (int r = 0; r < ranks; ++r) EXPECT_EQ(of[static_cast<std::size_t>(r)], r);
      }
    }
  }
  EXPECT_EQ(interleave_vocab(1000, 4), interleave_vocab(1000, 4)) << "the same everywhere";
  EXPECT_NE(interleave_vocab(1000, 4), interleave_vocab(1000, 4, {}, 1));
  // Ordered by average: the most frequent entries form the first stratum; equal ones are ordered by
  // id.
  const std::vector<float> average = {0.0f, 3.0f, 1.0f, 2.0f};
  const std::vector<std::int32_t> interleaved = interleave_vocab(4, 2, average);
  const auto on_first = [&](std::int32_t vocab_id) {
    return interleaved[0] == vocab_id || interleaved[1] == vocab_id;
  };
  EXPECT_NE(on_first(1), on_first(3));
  EXPECT_NE(on_first(2), on_first(0));
}

TEST(InterleaveVocab, Errors) {
  EXPECT_THROW(interleave_vocab(0, 2), InvalidArgument);
  EXPECT_THROW(interleave_vocab(5, 0), InvalidArgument);
  EXPECT_THROW(interleave_vocab(2, 2, std::vector<float>{1.0f}), InvalidArgument);
  EXPECT_THROW(interleave_vocab(1, 1, std::vector<float>{NAN}), InvalidArgument);
  EXPECT_THROW(interleaved_begin(5, 2, 3), InvalidArgument);
  EXPECT_THROW(inverse_of_interleaved(std::vector<std::int32_t>{0, 2}), InvalidArgument);
  EXPECT_THROW(inverse_of_interleaved(std::vector<std::int32_t>{1, 1}), InvalidArgument);
}

// The last tokens of the file, with orders made from the first ones. Without interleaving, ranges
// of ids are far from balanced.
class InterleavedRealHead : public testing::TestWithParam<const char*> {};

TEST_P(InterleavedRealHead, KeepsTheSameOnAllRanks) {
  const std::string path = real_head_path(GetParam());
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
  constexpr std::int64_t kTokens = 512;
  const TensorFile file(path);
  const Tensor weight = dequantised_weight(file);
  const std::int64_t vocab = weight.view().size(0), dim = weight.view().size(1);
  const ConstTensorView hidden = file.tensor("hidden"), targets = file.tensor("targets");
  const auto rows = [&](const ConstTensorView& view, std::int64_t first) {
    const std::int64_t columns = view.rank() == 2 ? view.size(1) : 1;
    const auto* data = static_cast<const std::byte*>(view.data()) +
                       static_cast<std::size_t>(first * columns) * size_of(view.dtype());
    return view.rank() == 2 ? ConstTensorView(data, view.dtype(), {kTokens, columns})
                            : ConstTensorView(data, view.dtype(), {kTokens});
  };
  constexpr int ranks = 4;
  const std::int64_t last = hidden.size(0) - kTokens;
  const auto call = [&](const VocabSplit& vocab_shards, PlanKind kind) {
    const Ranks group = make_thread_group(ranks, std::chrono::minutes(2));
    LossStatistics statistics;
    const auto outcomes = run_ranks(group, [&](Communicator& me) {
      const auto r = static_cast<std::size_t>(me.rank());
      const auto& mine = vocab_shards.ranks[r];
      const auto count = static_cast<std::int64_t>(mine.size());
      std::vector<std::uint16_t> w(static_cast<std::size_t>(count * dim));
      const auto* from = static_cast<const std::uint16_t*>(weight.view().data());
      for (std::int64_t j = 0; j < count; ++j)
        std::copy_n(from + mine[static_cast<std::size_t>(j)] * dim, dim, w.begin() + j * dim);
      Tensor loss(DType::f32, {}), d_hidden(DType::f32, {kTokens, dim});
      CrossEntropyInputs in;
      in.hidden = rows(hidden, last);
      in.targets = rows(targets, last);
      in.weight = ConstTensorView(w.data(), DType::bf16, {count, dim});
      in.sharding.vocab_group = group[r];
      in.sharding.vocab = vocab;
      in.sharding.vocab_ids = ConstTensorView(mine.data(), DType::i32, {count});
      const Context context = make_context("", 1);
      const auto average =
          average_probability(context, rows(hidden, 0), in.weight, {}, 1.0f, 0.0f, 0, in.sharding);
      in.order = make_vocab_order(context, in.weight, average);
      if (kind == PlanKind::far_both) {
        in.order = measure_tiles(context, in.order, rows(hidden, 0), in.weight, {}, 1.0f, 0.003f,
                                 in.sharding);
      }
      in.order = share_order(in.order, in.sharding);
      CrossEntropyOutputs out;
      out.loss = loss.view();
      out.d_hidden = d_hidden.view();
      PlanRequest request;
      request.device = context.device();
      request.kind = kind;
      request.audit_rows = 128;
      const LossPlan plan = plan_cross_entropy({}, in, out, request);
      const LossStatistics s = cross_entropy(context, plan, {}, in, out, Workspace(context, plan));
      if (r == 0) statistics = s;
    });
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
    return statistics.far;
  };
  VocabSplit interleaved{"dealt", {}, true};
  const std::vector<std::int32_t> table = interleave_vocab(vocab, ranks);
  for (int r = 0; r < ranks; ++r)
    interleaved.ranks.emplace_back(table.begin() + interleaved_begin(vocab, ranks, r),
                                   table.begin() + interleaved_begin(vocab, ranks, r + 1));
  for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
    SCOPED_TRACE(name_of(kind));
    const FarFieldStatistics of_interleaved = call(interleaved, kind);
    const FarFieldStatistics of_ranges = call(even_vocab(ranks, vocab), kind);
    for (const auto& [name, s] :
         {std::pair{"dealt", of_interleaved}, std::pair{"ranges", of_ranges}}) {
      std::printf("%s, %s: %.2f %% kept, imbalance %.3f, d_hidden %.3f %% off, lse %.4f\n", name,
                  std::string(name_of(kind)).c_str(), 100 * s.selected, s.imbalance,
                  100 * s.audited_error, s.audited_lse_error);
      EXPECT_EQ(s.audited_tokens, 128);
      EXPECT_LE(s.audited_error, kind == PlanKind::far_both ? 0.0065 : 0.0045);
      EXPECT_LE(s.audited_lse_error, 0.005);
      EXPECT_LT(s.selected, 0.25);
    }
    EXPECT_LE(of_interleaved.imbalance, 1.2);
    EXPECT_GE(of_ranges.imbalance, 1.5);
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, InterleavedRealHead, testing::Values("early", "late"),
                         [](const auto& head) { return std::string(head.param); });

}  // namespace
}  // namespace logitless::test
