// Tests of the computations of the log-bilinear example: matrix products, gradients of the model,
// optimisers, vocabulary order.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "examples.h"
#include "head.h"
#include "matrix.h"
#include "model.h"
#include "optimizer.h"
#include "train/hash.h"
#include "train/shuffle.h"

namespace log_bilinear {

using logitless::train::mix;
using logitless::train::normal;
using logitless::train::shuffled;
namespace {

std::vector<float> random_values(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = normal(seed, i);
  return values;
}

TEST(Multiply, EqualsTheSumsInDouble) {
  const std::int64_t shapes[][3] = {{1, 1, 1},    {6, 16, 5},  {7, 17, 3},
                                    {13, 40, 33}, {5, 15, 64}, {61, 100, 7}};
  for (const auto& [rows, columns, inner] : shapes) {
    const std::vector<float> left = random_values(rows * inner, 1);
    const std::vector<float> right = random_values(inner * columns, 2);
    for (const bool transposed : {false, true}) {
      const LeftFactor factor =
          transposed ? LeftFactor{left.data(), 1, rows} : LeftFactor{left.data(), inner, 1};
      std::vector<float> out(static_cast<std::size_t>(rows * columns), NAN);
      multiply(2, rows, columns, inner, factor, right.data(), out.data());
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          double sum = 0.0;
          for (std::int64_t k = 0; k < inner; ++k) {
            sum += static_cast<double>(left[i * factor.row + k * factor.column]) *
                   right[k * columns + j];
          }
          ASSERT_NEAR(out[i * columns + j], sum, 1e-4) << rows << 'x' << columns << 'x' << inner;
        }
      }
    }
  }
}

TEST(Transpose, SwapsRowsAndColumns) {
  const std::vector<float> in = random_values(35 * 67, 3);
  std::vector<float> out(in.size());
  transpose(2, 35, 67, in.data(), out.data());
  for (std::int64_t r = 0; r < 35; ++r) {
    for (std::int64_t c = 0; c < 67; ++c) ASSERT_EQ(out[c * 35 + r], in[r * 67 + c]);
  }
}

struct Variant {
  bool full_matrices;
  bool shared_vectors;
};

class WholeModel : public testing::TestWithParam<Variant> {};

// Central differences of the mean loss, with the head in fp32. They are taken along each
// parameter's gradient, where it is largest, so that a wrong factor shows. Single elements are
// checked as well.
TEST_P(WholeModel, GradientsAreThoseOfFiniteDifferences) {
  constexpr std::int64_t kVocab = 61;
  constexpr std::int64_t kDim = 20;
  constexpr std::int64_t kContext = 3;
  constexpr std::int64_t kBatch = 37;
  const logitless::Context context;
  logitless::MemoryMeter meter;
  Model model({kVocab, kDim, kContext, GetParam().full_matrices, GetParam().shared_vectors}, kBatch,
              context.threads(), &meter);
  Head head(context, {kVocab, kDim, kBatch, logitless::DType::f32}, 0, {}, &meter);
  model.initialise(5, random_values(kVocab, 6));
  for (Parameter& parameter :
       model.parameters()) {  // larger than initial values, so that every path counts
    for (std::int64_t i = 0; i < parameter.numel(); ++i) {
      parameter.value()[i] += 0.3f * normal(7, static_cast<std::uint64_t>(i));
    }
  }
  std::vector<std::int32_t> contexts(kBatch * kContext);
  std::vector<std::int32_t> targets(kBatch);
  for (std::size_t i = 0; i < contexts.size(); ++i)
    contexts[i] = static_cast<std::int32_t>(mix(8, i) % 31);
  for (std::size_t i = 0; i < targets.size(); ++i)
    targets[i] = static_cast<std::int32_t>(mix(9, i) % kVocab);

  const auto loss = [&] {
    head.set_weight(model.word_vectors().value());
    const float* hidden = model.forward(contexts.data(), kBatch);
    return -head.evaluate(hidden, targets.data(), kBatch, model.biases().value()).mean_log_prob;
  };
  std::vector<std::int32_t> earlier(
      contexts);  // a first step on other tokens must leave nothing behind
  for (std::int32_t& word : earlier) word += kVocab - 31;
  for (const std::vector<std::int32_t>& vocab_ids : {earlier, contexts}) {
    head.set_weight(model.word_vectors().value());
    const float* hidden = model.forward(vocab_ids.data(), kBatch);
    const double trained = head.train(
        hidden, targets.data(), kBatch, model.biases().value(),
        {model.hidden_gradient(), model.word_vectors().gradient(), model.biases().gradient()});
    model.backward(vocab_ids.data(), kBatch);
    if (vocab_ids == contexts) {
      ASSERT_NEAR(trained, loss(), 1e-5);
    }
  }
  if (!GetParam().shared_vectors) {
    std::vector<std::int32_t> touched = model.parameters().back().touched;
    std::sort(touched.begin(), touched.end());
    const std::set<std::int32_t> expected(contexts.begin(), contexts.end());
    EXPECT_TRUE(std::equal(touched.begin(), touched.end(), expected.begin(), expected.end()));
  }

  for (Parameter& parameter : model.parameters()) {
    const std::vector<float> value(parameter.value(), parameter.value() + parameter.numel());
    const std::vector<float> gradient(parameter.gradient(),
                                      parameter.gradient() + parameter.numel());
    const double norm =
        std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
    ASSERT_GT(norm, 1e-3) << parameter.name;
    const auto slope_along = [&](const std::vector<double>& direction) {
      constexpr double kStep = 4e-3;
      double ends[2];
      for (const int side : {0, 1}) {
        for (std::size_t i = 0; i < value.size(); ++i) {
          parameter.value()[i] =
              static_cast<float>(value[i] + (side == 0 ? -kStep : kStep) * direction[i]);
        }
        ends[side] = loss();
      }
      std::copy(value.begin(), value.end(), parameter.value());
      return (ends[1] - ends[0]) / (2 * kStep);
    };
    std::vector<double> direction(gradient.size());
    for (std::size_t i = 0; i < gradient.size(); ++i) direction[i] = gradient[i] / norm;
    EXPECT_NEAR(slope_along(direction), norm, 5e-3 * norm) << parameter.name;
    for (std::uint64_t pick = 0; pick < 12; ++pick) {
      const std::size_t at = mix(10, pick) % gradient.size();
      std::fill(direction.begin(), direction.end(), 0.0);
      direction[at] = 1.0;
      EXPECT_NEAR(slope_along(direction), gradient[at], 2e-4 + 1e-2 * std::abs(gradient[at]))
          << parameter.name << '[' << at << ']';
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, WholeModel,
                         testing::Values(Variant{true, true}, Variant{true, false},
                                         Variant{false, true}, Variant{false, false}),
                         [](const auto& given) {
                           return std::string(given.param.full_matrices ? "full" : "diagonal") +
                                  (given.param.shared_vectors ? "_shared" : "_separate");
                         });

// Makes one parameter [3, 2] with a gradient, for the optimisers.
std::vector<Parameter> one_parameter(bool row_sparse) {
  std::vector<Parameter> parameters;
  Parameter& parameter = parameters.emplace_back("weights", 3, 2, nullptr);
  for (int i = 0; i < 6; ++i) {
    parameter.value()[i] = 1.0f + static_cast<float>(i);
    parameter.gradient()[i] = i < 4 ? 0.5f - static_cast<float>(i) : 0.0f;
  }
  parameter.row_sparse = row_sparse;
  if (row_sparse) parameter.touched = {0, 1};
  return parameters;
}

TEST(AdamW, FollowsItsDefinition) {
  std::vector<Parameter> parameters = one_parameter(false);
  OptimizerOptions options;
  options.weight_decay = 0.1f;
  Optimizer optimizer(options, parameters, 2, nullptr);
  constexpr double kRate = 0.01;
  for (std::int64_t step = 1; step <= 3; ++step) optimizer.step(kRate, step);
  for (int i = 0; i < 6; ++i) {
    double value = 1.0 + i;
    const double gradient = parameters[0].gradient()[i];
    double mean = 0.0;
    double square = 0.0;
    for (int step = 1; step <= 3; ++step) {
      mean = options.beta1 * mean + (1.0 - options.beta1) * gradient;
      square = options.beta2 * square + (1.0 - options.beta2) * gradient * gradient;
      const double corrected = mean / (1.0 - std::pow(options.beta1, step));
      const double root = std::sqrt(square / (1.0 - std::pow(options.beta2, step)));
      value -= kRate * (corrected / (root + options.epsilon) + options.weight_decay * value);
    }
    EXPECT_NEAR(parameters[0].value()[i], value, 1e-5) << i;
  }
}

TEST(Adagrad, FollowsItsDefinition) {
  std::vector<Parameter> parameters = one_parameter(false);
  OptimizerOptions options;
  options.kind = OptimizerKind::adagrad;
  Optimizer optimizer(options, parameters, 2, nullptr);
  for (std::int64_t step = 1; step <= 2; ++step) optimizer.step(0.1, step);
  for (int i = 0; i < 6; ++i) {
    const double gradient = parameters[0].gradient()[i];
    const double sign = gradient > 0 ? 1.0 : gradient < 0 ? -1.0 : 0.0;
    EXPECT_NEAR(parameters[0].value()[i], 1.0 + i - 0.1 * sign * (1.0 + std::sqrt(0.5)), 1e-5) << i;
  }
}

TEST(Optimizer, LeavesUntouchedRowsOfASparseParameterAlone) {
  for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::adagrad}) {
    std::vector<Parameter> sparse = one_parameter(true);
    std::vector<Parameter> dense = one_parameter(false);
    OptimizerOptions options;
    options.kind = kind;
    options.weight_decay = 0.1f;
    Optimizer(options, sparse, 2, nullptr).step(0.1, 1);
    Optimizer(options, dense, 2, nullptr).step(0.1, 1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(sparse[0].value()[i], dense[0].value()[i]);
    for (int i = 4; i < 6; ++i) EXPECT_EQ(sparse[0].value()[i], 1.0f + static_cast<float>(i));
  }
}

TEST(Schedule, WarmsUpAndFallsToNothing) {
  EXPECT_DOUBLE_EQ(scheduled_rate(0.2, 1, 4, 100), 0.05);
  EXPECT_DOUBLE_EQ(scheduled_rate(0.2, 4, 4, 100), 0.2);
  EXPECT_DOUBLE_EQ(scheduled_rate(0.2, 5, 4, 100), 0.2);
  EXPECT_DOUBLE_EQ(scheduled_rate(0.2, 1, 0, 100), 0.2);
  for (std::int64_t step = 5; step < 100; ++step) {
    EXPECT_GT(scheduled_rate(0.2, step, 4, 100), scheduled_rate(0.2, step + 1, 4, 100));
  }
  EXPECT_GT(scheduled_rate(0.2, 100, 4, 100), 0.0);
  EXPECT_LT(scheduled_rate(0.2, 100, 4, 100), 1e-3);
}

TEST(Shuffled, VisitsEachExampleOnceInAnEpoch) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 16, 17, 1000}) {
    std::vector<std::vector<std::int64_t>> epochs;
    for (const std::int64_t epoch : {0, 1}) {
      std::vector<std::int64_t>& order = epochs.emplace_back();
      for (std::int64_t i = 0; i < size; ++i) order.push_back(shuffled(3, size, epoch * size + i));
      std::vector<std::int64_t> sorted = order;
      std::sort(sorted.begin(), sorted.end());
      for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(sorted[i], i) << size;
    }
    if (size >= 16) {
      EXPECT_NE(epochs[0], epochs[1]);
      EXPECT_FALSE(std::is_sorted(epochs[0].begin(), epochs[0].end()));
    }
  }
}

TEST(Examples, GiveTheNearestWordFirst) {
  const std::vector<std::int32_t> stream = {10, 11, 12, 13, 14};
  const Examples examples(stream, 2);
  ASSERT_EQ(examples.size(), 3);
  std::int32_t contexts[4];
  std::int32_t targets[2];
  examples.take({2, 0}, contexts, targets);
  EXPECT_EQ(std::vector<std::int32_t>(targets, targets + 2), (std::vector<std::int32_t>{14, 12}));
  EXPECT_EQ(std::vector<std::int32_t>(contexts, contexts + 4),
            (std::vector<std::int32_t>{13, 12, 11, 10}));
  EXPECT_THROW(Examples(stream, 5), std::runtime_error);
}

}  // namespace
}  // namespace log_bilinear
