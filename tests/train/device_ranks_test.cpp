// Tests ranks that share the steps of a run on a GPU. They are threads on a single GPU. Skips
// without a GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "logitless/device.h"
#include "train/learnable_data.h"
#include "train/model/gpt.h"
#include "train/run/ranks.h"
#include "train/run/trainer.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

using std::chrono::seconds;

// Calls of the CUDA driver, as users' communicators make them.
class Driver {
 public:
  void synchronize(void* stream) const { check(synchronize_(stream)); }
  void copy(void* to, const void* from, std::size_t bytes, void* stream) const {
    check(copy_(reinterpret_cast<std::uint64_t>(to), reinterpret_cast<std::uint64_t>(from), bytes,
                stream));
  }

 private:
  template <typename F>
  static F found(const char* name) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<F>(driver == nullptr ? nullptr : dlsym(driver, name));
  }
  static void check(int result) {
    if (result != 0) throw DeviceError("the driver says " + std::to_string(result));
  }
  int (*synchronize_)(void*) = found<int (*)(void*)>("cuStreamSynchronize");
  int (*copy_)(std::uint64_t, std::uint64_t, std::size_t, void*) =
      found<int (*)(std::uint64_t, std::uint64_t, std::size_t, void*)>("cuMemcpyDtoDAsync_v2");
};

// Makes a communicator that copies from the other ranks' memory, between two barriers.
std::shared_ptr<Communicator> on_one_card(const std::shared_ptr<Communicator>& host) {
  const auto exchange = [host](const void* mine, void* to, std::size_t bytes, std::size_t offset,
                               void* stream) {
    const Driver driver;
    driver.synchronize(stream);
    std::vector<const std::byte*> theirs(static_cast<std::size_t>(host->size()));
    const auto* const address = static_cast<const std::byte*>(mine);
    host->all_gather(&address, theirs.data(), sizeof(address), nullptr);
    auto* out = static_cast<std::byte*>(to);
    for (const std::byte* const from : theirs) {
      if (from + offset != out) driver.copy(out, from + offset, bytes, stream);
      out += bytes;
    }
    driver.synchronize(stream);
    host->all_gather(nullptr, nullptr, 0, nullptr);
  };
  CommunicatorCallbacks c;
  c.rank = host->rank();
  c.size = host->size();
  c.device = DeviceKind::cuda;
  c.all_gather = [exchange](const void* mine, void* all, std::size_t bytes, void* stream) {
    exchange(mine, all, bytes, 0, stream);
  };
  c.all_to_all = [exchange, host](const void* slices, void* all, std::size_t bytes, void* stream) {
    exchange(slices, all, bytes, static_cast<std::size_t>(host->rank()) * bytes, stream);
  };
  c.all_gather_host = [host](const void* mine, void* all, std::size_t bytes) {
    host->all_gather(mine, all, bytes, nullptr);
  };
  c.wait = [host](void* stream, std::chrono::milliseconds limit) {
    host->wait(nullptr, limit);
    Driver().synchronize(stream);
  };
  c.abort = [host](std::string_view reason) { host->abort(reason); };
  return make_callbacks(c);
}

TrainOptions options() {
  TrainOptions o;
  o.batch = 2;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.device = DeviceKind::cuda;
  o.bucket = 8192;
  return o;
}

ModelPtr model_of(DType dtype, bool tied, std::int64_t vocab = kVocabCount) {
  GptConfig config;
  config.vocab = vocab;
  config.context = kWindow;
  config.dim = 64;
  config.heads = 2;
  config.layers = 2;
  config.tied_head = tied;
  config.activations = dtype;
  return make_gpt(config);
}

struct Left {
  std::vector<double> losses, norms;
  std::vector<float> values;
  double validation = 0.0;
  std::size_t moments = 0;

  bool operator==(const Left&) const = default;
};

// Runs steps as a training run does: the next step starts before the last result is requested.
Left run(Trainer& trainer, int steps) {
  Left left;
  const auto take = [&](const std::optional<StepResult>& result) {
    if (!result) return;
    left.losses.push_back(result->loss);
    left.norms.push_back(result->norm);
  };
  for (int i = 0; i < steps; ++i) take(trainer.start_step());
  take(trainer.finish_step());
  left.validation = trainer.validate(5);
  const TensorSet& values = trainer.values();
  for (std::size_t t = 0; t < values.size(); ++t)
    left.values.insert(left.values.end(), values[t].begin(), values[t].end());
  left.moments = trainer.memory().moments;
  return left;
}

std::unique_ptr<Trainer> trainer_of(const TrainOptions& o, const ModelPtr& model) {
  return std::make_unique<Trainer>(model, o, learnable_data(40, 1), learnable_data(5, 2));
}

template <typename Act>
std::vector<Outcome> on_ranks(int ranks, const TrainOptions& o, const ModelPtr& model,
                              const Act& act) {
  const Ranks hosts = make_thread_group(ranks, seconds(60));
  return run_ranks(hosts, [&](Communicator& self) {
    TrainOptions with = o;
    with.ranks = on_one_card(hosts[static_cast<std::size_t>(self.rank())]);
    try {
      const std::unique_ptr<Trainer> trainer = trainer_of(with, model);
      act(*trainer);
    } catch (const std::exception& error) {
      with.ranks->abort(error.what());
      throw;
    }
  });
}

std::vector<Left> left_by(int ranks, const TrainOptions& o, const ModelPtr& model, int steps) {
  std::vector<Left> left(static_cast<std::size_t>(ranks));
  for (const Outcome& outcome : on_ranks(ranks, o, model, [&](Trainer& trainer) {
         left[static_cast<std::size_t>(trainer.rank())] = run(trainer, steps);
       }))
    EXPECT_EQ(outcome.text, "");
  return left;
}

class DeviceRanksTest : public TestFolder {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(DeviceRanksTest, LearnWhatOneRankLearnsOfAllTheirBatches) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool tied : {true, false}) {
      const ModelPtr model = model_of(dtype, tied);
      for (const int ranks : {2, 3}) {
        TrainOptions alone = options();
        alone.accumulate = 2 * ranks;
        const Left expected = run(*trainer_of(alone, model), 6);
        TrainOptions shared = options();
        shared.accumulate = 2;
        const std::vector<Left> left = left_by(ranks, shared, model, 6);
        ASSERT_EQ(left[0].losses.size(), expected.losses.size());
        for (std::size_t step = 0; step < expected.losses.size(); ++step) {
          EXPECT_NEAR(left[0].losses[step], expected.losses[step], 2e-4);
          EXPECT_NEAR(left[0].norms[step] / expected.norms[step], 1.0, 1e-3);
        }
        EXPECT_NEAR(left[0].validation, expected.validation, 2e-4);
        for (const Left& other : left) EXPECT_EQ(other, left[0]);
        EXPECT_LT(left[0].moments, expected.moments / static_cast<std::size_t>(ranks) + 8192);
      }
    }
  }
}

TEST_F(DeviceRanksTest, HaveTheSameBitsEveryTime) {
  const ModelPtr model = model_of(DType::bf16, true);
  EXPECT_EQ(left_by(2, options(), model, 8), left_by(2, options(), model, 8));
}

TEST_F(DeviceRanksTest, GoOnFromACheckpointAsOneRun) {
  const std::string file = path("run.safetensors");
  const ModelPtr model = model_of(DType::bf16, false);
  const Left whole = left_by(2, options(), model, 8)[0];
  std::vector<Left> rest(2);
  for (const Outcome& outcome : on_ranks(2, options(), model, [&](Trainer& trainer) {
         run(trainer, 3);
         trainer.save(file, "{}");
       }))
    EXPECT_EQ(outcome.text, "");
  for (const Outcome& outcome : on_ranks(2, options(), model, [&](Trainer& trainer) {
         trainer.resume(file);
         rest[static_cast<std::size_t>(trainer.rank())] = run(trainer, 5);
       }))
    EXPECT_EQ(outcome.text, "");
  for (const Left& left : rest) EXPECT_EQ(left.values, whole.values);
  // One rank resumes with the batches of both.
  TrainOptions one = options();
  one.accumulate = 2;
  const std::unique_ptr<Trainer> alone = trainer_of(one, model);
  alone->resume(file);
  EXPECT_NEAR(run(*alone, 5).losses[4], rest[0].losses[4], 2e-4);
}

// Vocabulary-parallel heads are captured with their exchanges, which needs NCCL and a GPU for each
// rank.
class DeviceShardedHead : public TestFolder {
 protected:
  static constexpr int kRanks = 2;
  void SetUp() override {
    if (const std::string reason = ranks_missing(kRanks); !reason.empty()) GTEST_SKIP() << reason;
  }
};

template <typename Act>
void on_gpus(const TrainOptions& o, const ModelPtr& model, const Act& act) {
  run_on_ranks(2, DeviceKind::cuda, [&](const std::shared_ptr<Communicator>& ranks) {
    TrainOptions with = o;
    with.ranks = ranks;
    with.gpu = ranks->rank();
    const std::unique_ptr<Trainer> trainer = trainer_of(with, model);
    act(*trainer);
  });
}

std::vector<Left> left_on_gpus(const TrainOptions& o, const ModelPtr& model, int steps) {
  std::vector<Left> left(2);
  on_gpus(o, model, [&](Trainer& trainer) {
    left[static_cast<std::size_t>(trainer.rank())] = run(trainer, steps);
  });
  return left;
}

TrainOptions sharded(std::int64_t accumulate = 1) {
  TrainOptions o = options();
  o.batch = 8;
  o.accumulate = accumulate;
  o.shard_head = true;
  return o;
}

TEST_F(DeviceShardedHead, LearnsWhatAWholeOneDoes) {
  const ModelPtr model = model_of(DType::bf16, false, 8219);
  for (const std::int64_t accumulate : {1, 3}) {
    TrainOptions whole = sharded(accumulate);
    whole.shard_head = false;
    const Left expected = left_on_gpus(whole, model, 6)[0];
    const std::vector<Left> left = left_on_gpus(sharded(accumulate), model, 6);
    ASSERT_EQ(left[0].losses.size(), expected.losses.size());
    for (std::size_t step = 0; step < expected.losses.size(); ++step) {
      EXPECT_NEAR(left[0].losses[step], expected.losses[step], 1e-3);
      EXPECT_NEAR(left[0].norms[step] / expected.norms[step], 1.0, 1e-2);
    }
    EXPECT_NEAR(left[0].validation, expected.validation, 1e-3);
    EXPECT_EQ(left[1], left[0]);
  }
}

TEST_F(DeviceShardedHead, HasTheSameBitsEveryTimeAndResumed) {
  const std::string file = path("run.safetensors");
  const ModelPtr model = model_of(DType::bf16, false, 8219);
  const Left whole = left_on_gpus(sharded(2), model, 8)[0];
  EXPECT_EQ(left_on_gpus(sharded(2), model, 8)[1], whole);
  on_gpus(sharded(2), model, [&](Trainer& trainer) {
    run(trainer, 3);
    trainer.save(file, "{}");
  });
  std::vector<Left> rest(2);
  std::vector<std::vector<std::int64_t>> vocab_ids(2);
  on_gpus(sharded(2), model, [&](Trainer& trainer) {
    trainer.resume(file);
    const auto rank = static_cast<std::size_t>(trainer.rank());
    vocab_ids[rank] = trainer.generate({3, 4}, 12, {});
    rest[rank] = run(trainer, 5);
  });
  EXPECT_EQ(vocab_ids[0], vocab_ids[1]);
  for (const Left& left : rest) EXPECT_EQ(left.values, whole.values);
  TrainOptions one = options();
  one.batch = 8;
  one.accumulate = 4;
  const std::unique_ptr<Trainer> alone = trainer_of(one, model);
  alone->resume(file);
  EXPECT_EQ(alone->generate({3, 4}, 12, {}), vocab_ids[0]);
  EXPECT_NEAR(run(*alone, 5).losses[4], rest[0].losses[4], 1e-3);
}

TEST_F(DeviceShardedHead, TakesLessMemoryThanAWholeOne) {
  const ModelPtr model = model_of(DType::bf16, false, 65536);
  const auto taken = [&](const TrainOptions& o) {
    std::size_t bytes = 0;
    on_gpus(o, model, [&](Trainer& trainer) {
      if (trainer.rank() > 0) return;
      for (const MemoryItem& item : trainer.memory().device) {
        if (item.name == "bf16 copies" || item.name == "gradients") bytes += item.bytes;
      }
    });
    return static_cast<double>(bytes);
  };
  TrainOptions whole = sharded();
  whole.shard_head = false;
  // The difference is half of the head's f32 gradient and of its bf16 copy.
  EXPECT_NEAR(taken(whole) - taken(sharded()), 65536 / 2 * 64 * (4.0 + 2.0), 1e5);
}

TEST_F(DeviceRanksTest, HandOnTheGreatestNote) {
  for (const Outcome& outcome :
       on_ranks(2, options(), model_of(DType::bf16, true), [](Trainer& trainer) {
         EXPECT_EQ(trainer.step().note, 0);
         EXPECT_EQ(trainer.step(trainer.rank() == 1 ? 15 : 2).note, 15);
       }))
    EXPECT_EQ(outcome.text, "");
}

TEST_F(DeviceRanksTest, AllDivergeTogether) {
  TrainOptions o = options();
  o.schedule.peak = o.schedule.floor = 1e30;
  o.schedule.warmup = 0;
  for (const Outcome& outcome : on_ranks(2, o, model_of(DType::bf16, true), [](Trainer& trainer) {
         for (int i = 0; i < 20; ++i) trainer.step();
       })) {
    EXPECT_EQ(outcome.kind, "exception");
    EXPECT_NE(outcome.text.find("the learning rate may be too high"), std::string::npos)
        << outcome.text;
  }
}

TEST_F(DeviceRanksTest, EndWhereOneOfThemFails) {
  const std::vector<Outcome> outcomes =
      on_ranks(3, options(), model_of(DType::bf16, true), [](Trainer& trainer) {
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

}  // namespace
}  // namespace logitless::train
