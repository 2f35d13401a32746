// Tests trainers with a vocabulary-parallel head.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "train/learnable_data.h"
#include "train/model/gpt.h"
#include "train/rank_runs.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

TrainOptions options(bool shard_head) {
  TrainOptions o;
  o.batch = 2;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.threads = 1;
  o.bucket = 65536;
  o.shard_head = shard_head;
  return o;
}

// The logits are large enough for the head engine; no number of ranks divides the vocabulary.
ModelPtr model(bool tied = false) {
  GptConfig config;
  config.vocab = 8219;
  config.context = kWindow;
  config.dim = 24;
  config.heads = 3;
  config.layers = 1;
  config.tied_head = tied;
  return make_gpt(config);
}

std::unique_ptr<Trainer> trainer_of(const TrainOptions& o) {
  return std::make_unique<Trainer>(model(), o, learnable_data(40, 1), learnable_data(5, 2));
}

using ShardedHeadTest = TestFolder;

TEST_F(ShardedHeadTest, LearnsWhatAWholeOneDoes) {
  for (const auto& [ranks, accumulate] : {std::pair(2, 1), std::pair(3, 2), std::pair(4, 1)}) {
    TrainOptions whole = options(false), sharded = options(true);
    whole.accumulate = sharded.accumulate = accumulate;
    const Left expected = left_by(ranks, whole, trainer_of, 3)[0];
    const std::vector<Left> left = left_by(ranks, sharded, trainer_of, 3);
    SCOPED_TRACE(ranks);
    expect_close(left[0], expected);  // with 5 windows some ranks have none in the last round
    for (const Left& other : left) EXPECT_EQ(other, left[0]);
  }
}

TEST_F(ShardedHeadTest, HasTheSameBitsEveryTimeAndForAnyThreads) {
  const std::vector<Left> first = left_by(2, options(true), trainer_of, 4);
  TrainOptions threads = options(true);
  threads.threads = 3;
  EXPECT_EQ(left_by(2, options(true), trainer_of, 4), first);
  EXPECT_EQ(left_by(2, threads, trainer_of, 4), first);
}

TEST_F(ShardedHeadTest, GoesOnFromACheckpointInAnyNumber) {
  const std::string file = path("run.safetensors");
  const Left whole = left_by(2, options(true), trainer_of, 6)[0];
  for (const Outcome& outcome : on_ranks(2, options(true), trainer_of, [&](Trainer& trainer) {
         run(trainer, 3);
         trainer.save(file, "{}");
       }))
    EXPECT_EQ(outcome.text, "");
  std::vector<Left> rest(2);
  for (const Outcome& outcome : on_ranks(2, options(true), trainer_of, [&](Trainer& trainer) {
         trainer.resume(file);
         rest[static_cast<std::size_t>(trainer.rank())] = run(trainer, 3);
       }))
    EXPECT_EQ(outcome.text, "");
  EXPECT_EQ(rest[0].values, whole.values);
  EXPECT_EQ(rest[1].values, whole.values);
  EXPECT_EQ(rest[0].validation, whole.validation);

  // One rank resumes with the batches of two, and two ranks with the full head each.
  TrainOptions one = options(true);
  one.accumulate = 2;
  const std::unique_ptr<Trainer> alone = trainer_of(one);
  EXPECT_FALSE(alone->shards_head());
  alone->resume(file);
  EXPECT_NEAR(run(*alone, 3).losses[2], rest[0].losses[2], 2e-5);
  std::vector<Left> dense(2);
  on_ranks(2, options(false), trainer_of, [&](Trainer& trainer) {
    trainer.resume(file);
    dense[static_cast<std::size_t>(trainer.rank())] = run(trainer, 3);
  });
  EXPECT_NEAR(dense[1].losses[2], rest[0].losses[2], 2e-5);
}

TEST_F(ShardedHeadTest, WritesTheSameTokensOnAllRanks) {
  const std::string file = path("run.safetensors");
  SampleOptions sample;
  sample.vocab_count = kVocabCount;
  std::vector<std::vector<std::int64_t>> vocab_ids(3);
  for (const Outcome& outcome : on_ranks(3, options(true), trainer_of, [&](Trainer& trainer) {
         run(trainer, 3);
         trainer.save(file, "{}");
         vocab_ids[static_cast<std::size_t>(trainer.rank())] = trainer.generate({3, 4}, 12, sample);
       }))
    EXPECT_EQ(outcome.text, "");
  const std::unique_ptr<Trainer> alone = trainer_of(options(false));
  alone->resume(file);
  const std::vector<std::int64_t> expected = alone->generate({3, 4}, 12, sample);
  for (const auto& of_rank : vocab_ids) EXPECT_EQ(of_rank, expected);
}

TEST_F(ShardedHeadTest, ExportsAllWords) {
  const std::string file = path("weights.safetensors"), run_file = path("run.safetensors");
  for (const Outcome& outcome : on_ranks(2, options(true), trainer_of, [&](Trainer& trainer) {
         run(trainer, 2);
         trainer.save(run_file, "{}");
         trainer.export_weights(file, {});
       }))
    EXPECT_EQ(outcome.text, "");
  const std::unique_ptr<Trainer> resumed = trainer_of(options(false));
  const std::unique_ptr<Trainer> imported = trainer_of(options(false));
  resumed->resume(run_file);
  imported->import_weights(file);
  for (std::size_t t = 0; t < resumed->values().size(); ++t)
    EXPECT_TRUE(std::ranges::equal(resumed->values()[t], imported->values()[t])) << t;
}

TEST_F(ShardedHeadTest, AllEndWhereOneFails) {
  const std::vector<Outcome> outcomes =
      on_ranks(3, options(true), trainer_of, [](Trainer& trainer) {
        trainer.step();
        if (trainer.rank() == 1) throw InvalidArgument("a bad day");
        for (int i = 0; i < 3; ++i) trainer.step();
      });
  EXPECT_EQ(outcomes[1].kind, "InvalidArgument");
  for (const std::size_t r : {0U, 2U}) {
    EXPECT_EQ(outcomes[r].kind, "DeviceError");
    EXPECT_NE(outcomes[r].text.find("a bad day"), std::string::npos) << outcomes[r].text;
  }
}

TEST_F(ShardedHeadTest, IsRefusedByName) {
  const auto refused = [](const TrainOptions& o, const MakeTrainer& make, const std::string& why) {
    for (const Outcome& outcome : on_ranks(2, o, make, [](Trainer&) {})) {
      EXPECT_EQ(outcome.kind, "InvalidArgument");
      EXPECT_NE(outcome.text.find(why), std::string::npos) << outcome.text;
    }
  };
  refused(
      options(true),
      [](const TrainOptions& o) {
        return std::make_unique<Trainer>(model(true), o, learnable_data(40, 1),
                                         learnable_data(5, 2));
      },
      "shard_head: expected a head with a weight of its own");
  TrainOptions far = options(true);
  far.far_field.emplace();
  refused(far, trainer_of, "shard_head: expected no far_field");
  TrainOptions small = options(true);
  small.memory_budget = 1000;
  refused(small, trainer_of, "leave too little of a budget of 1000 B");
  // Without a head operation in the program all ranks throw.
  TrainOptions loops = options(true);
  loops.head_engine = false;
  for (const Outcome& outcome : on_ranks(2, loops, trainer_of, [](Trainer&) {})) {
    EXPECT_EQ(outcome.kind, "InvalidArgument");
    EXPECT_EQ(outcome.text.find("shard_head: "), 0U);
    EXPECT_NE(outcome.text.find("the program has no head operation"), std::string::npos)
        << outcome.text;
  }
}

}  // namespace
}  // namespace logitless::train
