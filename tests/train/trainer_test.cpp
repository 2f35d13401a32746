// Tests training with compiled programs: it learns, and options that must not change the result do
// not.
#include "train/run/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "logitless/error.h"
#include "train/hash.h"
#include "train/learnable_data.h"
#include "train/model/gpt.h"
#include "train/plain_gpt.h"
#include "train/test_folder.h"
#include "train/training.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kVocab = kVocabCount, kLength = kWindow;

GptConfig small(bool tied = true) {
  GptConfig config;
  config.vocab = kVocab;
  config.context = 20;
  config.dim = 24;
  config.heads = 3;
  config.layers = 2;
  config.tied_head = tied;
  return config;
}

TrainOptions options() {
  TrainOptions o;
  o.batch = 4;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.threads = 1;  // results do not depend on it, and tests share the machine
  return o;
}

Dataset data(std::int64_t windows, std::uint64_t seed) { return learnable_data(windows, seed); }

Trainer trainer(const TrainOptions& o, const GptConfig& config = small()) {
  return Trainer(make_gpt(config), o, data(40, 1), data(5, 2));
}

NamedNumbers numbers(const Trainer& trainer, const GptConfig& config) {
  NamedNumbers result;
  const std::vector<Parameter> list = gpt_parameters(config);
  for (std::size_t i = 0; i < list.size(); ++i) {
    result[list[i].name] = Numbers(trainer.values()[i].begin(), trainer.values()[i].end());
  }
  return result;
}

void expect_diverged(const std::function<void()>& act, const std::string& text) {
  try {
    act();
    FAIL() << "nothing was thrown; expected: " << text;
  } catch (const Diverged& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

using TrainerTest = TestFolder;

TEST_F(TrainerTest, StartsAtLogVocabAndLearns) {
  Trainer t = trainer(options());
  const std::vector<double> l = losses(t, 20);
  EXPECT_NEAR(l.front(), std::log(static_cast<double>(kVocab)), 0.05);
  EXPECT_LT(l.back(), l.front() - 0.5);
  EXPECT_EQ(t.steps_done(), 20);
}

TEST_F(TrainerTest, ValidationAndTokensAreThoseOfPlainLoops) {
  for (const bool tied : {true, false}) {
    const GptConfig config = small(tied);
    Trainer t = trainer(options(), config);
    losses(t, 10);
    const NamedNumbers parameters = numbers(t, config);
    const PlainGpt plain(config, parameters);
    const Batch batch = data(5, 2).sequential_batch(0, 3);
    double expected = 0.0;
    for (std::int64_t row = 0; row < 3; ++row) {
      const auto begin = row * kLength, end = begin + kLength;
      expected += plain.loss({batch.tokens.begin() + begin, batch.tokens.begin() + end},
                             {batch.targets.begin() + begin, batch.targets.begin() + end});
    }
    EXPECT_NEAR(t.validate(3), expected / (3 * kLength), 2e-5);
    EXPECT_NE(t.validate(5), t.validate(3));
    EXPECT_EQ(t.validate(5), t.validate(99));  // there are five

    std::vector<std::int64_t> text = {5, 38};
    for (int i = 0; i < 18; ++i) {  // beyond kLength: the window moves
      const std::vector<std::int64_t> seen(
          text.end() - std::min<std::ptrdiff_t>(kLength, std::ssize(text)), text.end());
      const Numbers z = plain.logits(seen);
      const auto last = z.end() - kVocab;
      text.push_back(std::max_element(last, z.end()) - last);
    }
    const std::vector<std::int64_t> vocab_ids(text.begin() + 2, text.end());
    EXPECT_EQ(t.generate({5, 38}, 18, {.temperature = 0.0}), vocab_ids);
    EXPECT_EQ(t.generate({5, 38}, 18, {.temperature = 0.7, .top_k = 1}), vocab_ids);
  }
}

TEST_F(TrainerTest, SamplesStayAmongTheLikeliestTokens) {
  Trainer t = trainer(options());
  const SampleOptions all{.temperature = 1.0, .top_k = 0, .vocab_count = 30, .seed = 4};
  const std::vector<std::int64_t> vocab_ids = t.generate({1}, 40, all);
  EXPECT_EQ(vocab_ids, t.generate({1}, 40, all));
  for (const std::int64_t vocab_id : vocab_ids) EXPECT_LT(vocab_id, 30);
  SampleOptions other = all;
  other.seed = 5;
  EXPECT_NE(vocab_ids, t.generate({1}, 40, other));
  EXPECT_THROW(t.generate({}, 1, all), InvalidArgument);
}

TEST_F(TrainerTest, AResumedRunHasTheSameBits) {
  for (const std::int64_t accumulate : {1, 2}) {
    TrainOptions o = options();
    o.accumulate = accumulate;
    Trainer whole = trainer(o), first = trainer(o), second = trainer(o);
    const std::vector<double> expected = losses(whole, 6);
    std::vector<double> parts = losses(first, 3);
    first.validate(5);  // changes nothing
    first.save(path("half"), "{}");
    second.resume(path("half"));
    EXPECT_EQ(second.steps_done(), 3);
    for (const double loss : losses(second, 3)) parts.push_back(loss);
    EXPECT_EQ(parts, expected);
    EXPECT_TRUE(same_values(whole, second));
    whole.save(path("whole"), "{}");
    second.save(path("parts"), "{}");
    const auto bytes = [&](const std::string& name) {
      std::ifstream stream(path(name), std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(stream), {});
    };
    EXPECT_EQ(bytes("whole"), bytes("parts"));
  }
}

TEST_F(TrainerTest, RefusesACheckpointOfAnotherRun) {
  const auto refused = [&](Trainer& t, const std::string& text) {
    try {
      t.resume(path("a"));
      FAIL() << "nothing was thrown; expected: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  trainer(options()).save(path("a"), "{}");
  TrainOptions o = options();
  o.seed = 2;
  Trainer seed = trainer(o);
  refused(seed, "metadata 'seed': expected 2, found 1");
  Trainer other(make_gpt(small()), options(), data(41, 1), data(5, 2));
  refused(other, "metadata 'data': expected ");
  Trainer untied = trainer(options(), small(false));
  refused(untied, "metadata 'config': expected ");
}

TEST_F(TrainerTest, ThreadsDoNotMatter) {
  TrainOptions o = options();
  Trainer one = trainer(o);
  o.threads = 2;
  Trainer two = trainer(o);
  EXPECT_EQ(losses(one, 4), losses(two, 4));
  EXPECT_TRUE(same_values(one, two));
}

TEST_F(TrainerTest, ChunksDoNotMatter) {
  GptConfig config = small();
  config.vocab = 3000;
  TrainOptions o = options();
  o.batch = 16;
  Trainer chunked = trainer(o, config);
  o.chunk = false;
  Trainer plain = trainer(o, config);
  const auto logits = static_cast<std::size_t>(o.batch * kLength * config.vocab) * sizeof(float);
  EXPECT_LT(chunked.memory().arena + logits / 4, chunked.memory().unchunked_arena);
  EXPECT_EQ(plain.memory().arena, plain.memory().unchunked_arena);
  const std::vector<double> a = losses(chunked, 20), b = losses(plain, 20);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5) << i;
}

TEST_F(TrainerTest, AccumulatedBatchesAreOneLargeOne) {
  TrainOptions o = options();
  Trainer large = trainer(o);
  o.batch = 1;
  o.accumulate = 4;
  Trainer parts = trainer(o);
  for (int i = 0; i < 5; ++i) {
    const StepResult a = large.step(), b = parts.step();
    EXPECT_NEAR(a.loss, b.loss, 1e-5);
    EXPECT_NEAR(a.norm, b.norm, 1e-4 * a.norm);
    EXPECT_EQ(a.rate, b.rate);
  }
  EXPECT_EQ(parts.memory().gradients, large.memory().gradients);
}

TEST_F(TrainerTest, Bf16FollowsF32) {
  GptConfig config = small();
  Trainer exact = trainer(options(), config);
  config.activations = DType::bf16;
  Trainer rounded = trainer(options(), config);
  const std::vector<double> a = losses(exact, 10), b = losses(rounded, 10);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 0.02) << i;
  EXPECT_NE(a, b);
}

TEST_F(TrainerTest, ExportedWeightsComeBack) {
  Trainer t = trainer(options());
  losses(t, 2);
  t.export_weights(path("model.safetensors"), {});
  Trainer other = trainer(options());
  other.import_weights(path("model.safetensors"));
  EXPECT_TRUE(same_values(t, other));
  EXPECT_EQ(t.validate(5), other.validate(5));
}

// Logits are 0, so that the loss is log V, and the head's weights make gradients beyond fp32.
TEST_F(TrainerTest, StopsBeforeANormThatIsNoNumber) {
  const GptConfig config = small(/*tied=*/false);
  for (const std::int64_t accumulate : {1, 2}) {
    TrainOptions o = options();
    o.accumulate = accumulate;
    const Dataset same =
        Dataset::of_tokens(std::vector<std::int32_t>(20 * kLength + 1, 0), kLength, kVocab);
    Trainer t(make_gpt(config), o, same, same);
    const std::vector<Parameter> list = gpt_parameters(config);
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::span<float> values = t.values()[i];
      if (list[i].name == "ln_f.weight") std::ranges::fill(values, 0.0f);
      if (list[i].name != "lm_head.weight") continue;
      std::ranges::fill(values, 3e38f);
      std::fill_n(values.begin(), config.dim, -3e38f);
    }
    const NamedNumbers before = numbers(t, config);
    expect_diverged([&] { t.step(); }, "the gradients' norm of step 1 is inf");
    EXPECT_EQ(numbers(t, config), before);
    EXPECT_EQ(t.steps_done(), 0);
  }
}

TEST_F(TrainerTest, SavesFiniteNumbersAlone) {
  Trainer t = trainer(options());
  t.save(path("a"), "{}");
  const auto bytes = [&] {
    std::ifstream stream(path("a"), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  const std::string good = bytes();
  t.values()[3][1] = NAN;
  expect_diverged([&] { t.save(path("a"), "{}"); }, "holds what is no finite number");
  expect_diverged([&] { t.validate(2); }, "the validation loss of step 0 is");
  EXPECT_EQ(bytes(), good);
}

TEST_F(TrainerTest, SaysThatTheLossIsNoNumber) {
  TrainOptions o = options();
  o.schedule = {1e30, 1e30, 0, 20};
  Trainer t = trainer(o);
  try {
    losses(t, 5);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the learning rate may be too high"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace logitless::train
