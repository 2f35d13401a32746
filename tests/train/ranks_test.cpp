// Tests ranks that share the steps of a run, as threads on the CPU.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "train/learnable_data.h"
#include "train/model/gpt.h"
#include "train/rank_runs.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

TrainOptions options() {
  TrainOptions o;
  o.batch = 2;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.threads = 1;
  o.bucket = 4096;  // several buckets, some with several tensors
  return o;
}

GptConfig config() {
  GptConfig config;
  config.vocab = kVocabCount;
  config.context = 20;
  config.dim = 24;
  config.heads = 3;
  config.layers = 2;
  return config;
}

std::unique_ptr<Trainer> trainer_of(const TrainOptions& o) {
  return std::make_unique<Trainer>(make_gpt(config()), o, learnable_data(40, 1),
                                   learnable_data(5, 2));
}

using RanksTest = TestFolder;

TEST_F(RanksTest, LearnWhatOneRankLearnsOfAllTheirBatches) {
  for (const int accumulate : {1, 2}) {
    for (const int ranks : {2, 3, 4}) {
      TrainOptions alone = options();
      alone.accumulate = accumulate * ranks;
      const Left expected = run(*trainer_of(alone), 6);
      TrainOptions shared = options();
      shared.accumulate = accumulate;
      const std::vector<Left> left = left_by(ranks, shared, trainer_of, 6);
      SCOPED_TRACE(ranks);
      expect_close(left[0], expected);
    }
  }
}

TEST_F(RanksTest, HaveTheSameBitsEveryTimeAndOnAllOfThem) {
  for (const int ranks : {2, 3}) {
    const std::vector<Left> first = left_by(ranks, options(), trainer_of, 5);
    const std::vector<Left> again = left_by(ranks, options(), trainer_of, 5);
    for (const Left& left : first) EXPECT_EQ(left, first[0]);
    for (const Left& left : again) EXPECT_EQ(left, first[0]);
  }
  TrainOptions one_bucket = options();
  one_bucket.bucket = RankPartition::kBucket;
  const Left small = left_by(2, options(), trainer_of, 5)[0],
             large = left_by(2, one_bucket, trainer_of, 5)[0];
  EXPECT_EQ(small.losses[0], large.losses[0]);
  EXPECT_NEAR(small.losses[4], large.losses[4], 2e-5);
}

TEST_F(RanksTest, GoOnFromACheckpointAsOneRunInAnyNumber) {
  const std::string file = path("run.safetensors");
  TrainOptions two = options();
  const Left whole = left_by(2, two, trainer_of, 8)[0];
  std::vector<Left> rest(2);
  on_ranks(2, two, trainer_of, [&](Trainer& trainer) {
    run(trainer, 3);
    trainer.save(file, "{}");
  });
  on_ranks(2, two, trainer_of, [&](Trainer& trainer) {
    trainer.resume(file);
    EXPECT_EQ(trainer.steps_done(), 3);
    EXPECT_EQ(trainer.windows_read(), 3 * 2 * 2);
    rest[static_cast<std::size_t>(trainer.rank())] = run(trainer, 5);
  });
  EXPECT_EQ(rest[0].values, whole.values);
  EXPECT_EQ(rest[1].values, whole.values);

  // One rank resumes with the batches of two, and four ranks with half of them each.
  TrainOptions one = options();
  one.accumulate = 2;
  const std::unique_ptr<Trainer> alone = trainer_of(one);
  alone->resume(file);
  EXPECT_NEAR(run(*alone, 5).losses[4], rest[0].losses[4], 2e-5);
  TrainOptions four = options();
  four.batch = 1;
  std::vector<Left> fours(4);
  on_ranks(4, four, trainer_of, [&](Trainer& trainer) {
    trainer.resume(file);
    fours[static_cast<std::size_t>(trainer.rank())] = run(trainer, 5);
  });
  EXPECT_NEAR(fours[0].losses[4], rest[0].losses[4], 2e-5);
}

TEST_F(RanksTest, HandOnTheGreatestNote) {
  for (const Outcome& outcome : on_ranks(3, options(), trainer_of, [](Trainer& trainer) {
         EXPECT_EQ(trainer.step().note, 0);
         EXPECT_EQ(trainer.step(trainer.rank() == 1 ? 15 : 0).note, 15);
       }))
    EXPECT_EQ(outcome.text, "");
}

TEST_F(RanksTest, AllDivergeTogether) {
  TrainOptions o = options();
  o.schedule.peak = o.schedule.floor = 1e30;
  o.schedule.warmup = 0;
  for (const Outcome& outcome : on_ranks(2, o, trainer_of, [](Trainer& trainer) {
         for (int i = 0; i < 20; ++i) trainer.step();
       })) {
    EXPECT_EQ(outcome.kind, "exception");
    EXPECT_NE(outcome.text.find("the learning rate may be too high"), std::string::npos)
        << outcome.text;
  }
}

TEST_F(RanksTest, EndWhereOneOfThemFails) {
  const std::vector<Outcome> outcomes = on_ranks(3, options(), trainer_of, [](Trainer& trainer) {
    trainer.step();
    if (trainer.rank() == 1) throw InvalidArgument("a bad day");
    for (int i = 0; i < 3; ++i) trainer.step();
  });
  EXPECT_EQ(outcomes[1].kind, "InvalidArgument");
  for (const std::size_t r : {0U, 2U}) {
    EXPECT_EQ(outcomes[r].kind, "DeviceError");
    EXPECT_NE(outcomes[r].text.find("rank 1 gave up: a bad day"), std::string::npos)
        << outcomes[r].text;
  }
}

}  // namespace
}  // namespace logitless::train
