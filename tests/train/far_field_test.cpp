// Tests training with the far field: resumed runs, options without effect, and refusals.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "logitless/error.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/run/trainer.h"
#include "train/test_folder.h"
#include "train/training.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kLength = 16;

GptConfig small(std::int64_t vocab = 65536) {
  GptConfig config;
  config.vocab = vocab;
  config.context = kLength;
  config.dim = 8;
  config.heads = 1;
  config.layers = 1;
  return config;
}

TrainOptions options(Accuracy accuracy = Accuracy::far_backward) {
  TrainOptions o;
  o.batch = 2;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.threads = 1;
  o.far_field = quick_far_field(accuracy);
  return o;
}

Dataset data(std::int64_t windows, std::uint64_t seed) {
  std::vector<std::int32_t> vocab_ids = {0};
  while (std::ssize(vocab_ids) < windows * kLength + 1)
    vocab_ids.push_back(static_cast<std::int32_t>(mix(seed, vocab_ids.size()) % 50 * 77));
  return Dataset::of_tokens(vocab_ids, kLength, 4000);
}

Trainer trainer(const TrainOptions& o, const GptConfig& config = small()) {
  return Trainer(make_gpt(config), o, data(40, 1), data(5, 2));
}

class FarTrainer : public TestFolder, public testing::WithParamInterface<Accuracy> {};

TEST_P(FarTrainer, IsDenseThenFarAndValidatesExactly) {
  TrainOptions o = options(GetParam());
  Trainer far = trainer(o);
  ASSERT_NE(far.far_field(), nullptr) << far.far_refusal();
  EXPECT_EQ(far.far_refusal(), "");
  EXPECT_GT(far.memory().far_workspace, 0u);
  o.far_field.reset();
  Trainer dense = trainer(o);
  EXPECT_EQ(dense.far_field(), nullptr);
  EXPECT_EQ(dense.memory().far_workspace, 0u);
  EXPECT_EQ(losses(far, 4), losses(dense, 4));
  EXPECT_TRUE(same_values(far, dense)) << "dense steps are the same to the bit";
  EXPECT_EQ(far.validate(5), dense.validate(5));
  losses(far, 4);
  losses(dense, 4);
  const FarFieldReport& r = far.far_field()->report();
  EXPECT_EQ(r.steps, 8);
  EXPECT_TRUE(r.far) << far.far_field()->explain();
  EXPECT_EQ(r.dense_steps, 4);
  EXPECT_LE(r.worst_accepted_error, 0.3);
  EXPECT_FALSE(same_values(far, dense));
  EXPECT_NEAR(far.validate(5), dense.validate(5), 0.05);
  EXPECT_GE(far.memory().far_peak, far.memory().far_workspace);
}

TEST_P(FarTrainer, AResumedRunHasTheSameBits) {
  for (const std::int64_t accumulate : {1, 2}) {
    TrainOptions o = options(GetParam());
    o.accumulate = accumulate;
    o.far_field->refresh_every *= accumulate;
    Trainer whole = trainer(o);
    const std::vector<double> expected = losses(whole, 8);
    ASSERT_TRUE(whole.far_field()->report().far);
    // Stops while the order is made, and after.
    for (const int half : accumulate == 1 ? std::vector<int>{4, 7} : std::vector<int>{5}) {
      SCOPED_TRACE(half);
      Trainer first = trainer(o), second = trainer(o);
      std::vector<double> parts = losses(first, half);
      first.validate(5);  // changes nothing
      first.save(path("half.safetensors"), "{}");
      EXPECT_TRUE(std::filesystem::exists(path("half.far.safetensors")));
      EXPECT_FALSE(std::filesystem::exists(path("half.far.safetensors.new")));
      second.resume(path("half.safetensors"));
      for (const double loss : losses(second, 8 - half)) parts.push_back(loss);
      EXPECT_EQ(parts, expected);
      EXPECT_TRUE(same_values(whole, second));
      EXPECT_EQ(second.far_field()->report().steps, 8 * accumulate);
      EXPECT_EQ(second.far_field()->report().dense_steps, whole.far_field()->report().dense_steps);
    }
  }
}

// The results of one of two ranks; the run starts from a checkpoint if one is given.
struct OfRank {
  std::vector<double> losses;
  std::string said;
  std::vector<float> values;

  bool operator==(const OfRank&) const = default;
};
std::vector<OfRank> on_two_ranks(TrainOptions o, int steps, const std::string& from,
                                 const std::string& to) {
  std::vector<OfRank> left(2);
  const Ranks group = make_thread_group(2, std::chrono::seconds(60));
  const std::vector<Outcome> outcomes = run_ranks(group, [&](Communicator& self) {
    const auto rank = static_cast<std::size_t>(self.rank());
    TrainOptions own = o;
    own.ranks = group[rank];
    Trainer one = trainer(own);
    if (!from.empty()) one.resume(from);
    OfRank& mine = left[rank];
    mine.losses = losses(one, steps);
    mine.said = one.far_field()->explain();
    if (!to.empty()) one.save(to, "{}");
    for (std::size_t i = 0; i < one.values().size(); ++i)
      mine.values.insert(mine.values.end(), one.values()[i].begin(), one.values()[i].end());
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
  return left;
}

TEST_P(FarTrainer, RanksDecideAlikeAndGoOnFromACheckpoint) {
  const TrainOptions o = options(GetParam());
  const std::vector<OfRank> whole = on_two_ranks(o, 8, "", "");
  EXPECT_EQ(whole[1], whole[0]);
  EXPECT_NE(whole[0].said.find("next step: far"), std::string::npos) << whole[0].said;
  EXPECT_NE(whole[0].said.find("8 steps, 4 dense"), std::string::npos) << whole[0].said;
  for (const int half : {4, 6}) {
    on_two_ranks(o, half, "", path("half.safetensors"));
    const std::vector<OfRank> rest = on_two_ranks(o, 8 - half, path("half.safetensors"), "");
    EXPECT_EQ(rest[0].values, whole[0].values) << half;
    EXPECT_EQ(rest[1].said, whole[0].said) << half;
  }
}

INSTANTIATE_TEST_SUITE_P(Accuracies, FarTrainer,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

using FarTrainerTest = TestFolder;

TEST_F(FarTrainerTest, ThreadsDoNotMatter) {
  TrainOptions o = options();
  Trainer one = trainer(o);
  o.threads = 2;
  Trainer two = trainer(o);
  EXPECT_EQ(losses(one, 7), losses(two, 7));
  EXPECT_TRUE(same_values(one, two));
  EXPECT_LT(one.far_field()->report().dense_steps, 7);
}

// On the CPU a batch is recomputed before its gradients are added to those of the batch before.
TEST_F(FarTrainerTest, AccumulatedBatchesThatMissTheErrorAreDoneAgain) {
  TrainOptions o = options();
  o.accumulate = 2;
  o.far_field->error = 1e-9;
  GptConfig config = small();
  config.tied_head = false;
  Trainer far = trainer(o, config);
  const std::vector<double> found = losses(far, 4);
  const FarFieldReport& r = far.far_field()->report();
  EXPECT_GE(r.audits, 1);
  EXPECT_EQ(r.repeated_steps, r.audits);
  EXPECT_EQ(r.worst_accepted_error, 0.0);
  o.far_field.reset();
  Trainer dense = trainer(o, config);
  EXPECT_EQ(losses(dense, 4), found);
  EXPECT_TRUE(same_values(far, dense));
}

TEST_F(FarTrainerTest, CheckpointsWithAndWithoutAFarField) {
  TrainOptions none = options();
  none.far_field.reset();
  Trainer dense = trainer(none), far = trainer(options());
  losses(dense, 2);
  dense.save(path("dense.safetensors"), "{}");
  EXPECT_FALSE(std::filesystem::exists(path("dense.far.safetensors")));
  far.resume(path("dense.safetensors"));
  EXPECT_EQ(far.far_field()->report().steps, 0);
  losses(far, 1);
  far.save(path("far.safetensors"), "{}");
  dense.resume(path("far.safetensors"));
  EXPECT_EQ(dense.steps_done(), 3);
}

// The checkpoint is renamed first: a process killed after it leaves the far field's file under its
// temporary name.
TEST_F(FarTrainerTest, ResumesAPairWhoseWriterWasKilledBetweenTheRenames) {
  for (const bool first_save : {true, false}) {
    SCOPED_TRACE(first_save);
    Trainer whole = trainer(options()), half = trainer(options()), rest = trainer(options());
    const std::vector<double> expected = losses(whole, 7);
    losses(half, 3);
    half.save(path("a.safetensors"), "{}");
    const auto far = [&](const char* end) { return path("a.far.safetensors") + end; };
    if (first_save) {
      std::filesystem::rename(far(""), far(".new"));
    } else {
      std::filesystem::copy_file(far(""), path("old"),
                                 std::filesystem::copy_options::overwrite_existing);
      losses(half, 1);
      half.save(path("a.safetensors"), "{}");
      std::filesystem::rename(far(""), far(".new"));
      std::filesystem::rename(path("old"), far(""));
    }
    rest.resume(path("a.safetensors"));
    const int done = first_save ? 3 : 4;
    EXPECT_EQ(losses(rest, 7 - done), std::vector<double>(expected.begin() + done, expected.end()));
    EXPECT_TRUE(same_values(whole, rest));
    // A process killed before the checkpoint's rename leaves a state that belongs to no checkpoint.
    Trainer again = trainer(options());
    half.save(path("a.safetensors"), "{}");
    losses(half, 1);
    half.save(path("b.safetensors"), "{}");
    std::filesystem::rename(path("b.far.safetensors"), far(".new"));
    again.resume(path("a.safetensors"));
    EXPECT_EQ(again.far_field()->report().steps, done);
    std::ofstream(far(".new")) << "no state";
    again.resume(path("a.safetensors"));
    again.save(path("a.safetensors"), "{}");
    EXPECT_FALSE(std::filesystem::exists(far(".new")));
  }
}

TEST_F(FarTrainerTest, RefusesAFarFieldOfAnotherStep) {
  Trainer a = trainer(options()), b = trainer(options());
  losses(a, 2);
  a.save(path("a.safetensors"), "{}");
  losses(a, 1);
  a.save(path("b.safetensors"), "{}");
  std::filesystem::copy_file(path("a.far.safetensors"), path("b.far.safetensors"),
                             std::filesystem::copy_options::overwrite_existing);
  expect_message([&] { b.resume(path("b.safetensors")); },
                 "expected 3 steps of the head as in '" + path("b.safetensors") +
                     "', found 2: the two files were not saved together");
  Trainer both = trainer(options(Accuracy::far_both));
  expect_message([&] { both.resume(path("a.safetensors")); },
                 "saved with accuracy far_backward, this head has far_both");
  std::filesystem::remove(path("a.far.safetensors"));
  EXPECT_THROW(b.resume(path("a.safetensors")), Error);
}

TEST_F(FarTrainerTest, WhereNothingIsToBeGainedEveryStepIsDense) {
  TrainOptions o = options();
  TrainOptions none = o;
  none.far_field.reset();
  const auto refused = [&](const GptConfig& config, const std::string& why) {
    SCOPED_TRACE(why);
    Trainer far = trainer(o, config), dense = trainer(none, config);
    EXPECT_EQ(far.far_field(), nullptr);
    EXPECT_NE(far.far_refusal().find(why), std::string::npos) << far.far_refusal();
    EXPECT_EQ(losses(far, 2), losses(dense, 2));
    EXPECT_TRUE(same_values(far, dense));
    far.save(path("refused.safetensors"), "{}");
    EXPECT_FALSE(std::filesystem::exists(path("refused.far.safetensors")));
  };
  refused(small(12000),
          "far_backward: would keep about 100 % of the tiles of 12000 vocabulary entries");
  refused(small(4000), "the program has no head operation");  // logits of half a MiB
  o.memory_budget = none.memory_budget = 64_KiB;
  refused(small(), "leaves too little of the budget");
}

}  // namespace
}  // namespace logitless::train
