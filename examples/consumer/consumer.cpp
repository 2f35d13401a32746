// The loss of three tokens over a vocabulary of five and its gradient, computed by logitless and
// directly.
#include <logitless/logitless.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace {

constexpr int kTokens = 3;
constexpr int kDim = 2;
constexpr int kVocab = 5;

constexpr std::array<float, kTokens* kDim> kHidden = {0.5f, -1.0f, 2.0f, 0.25f, -0.75f, 1.5f};
constexpr std::array<float, kVocab* kDim> kWeight = {1.0f, 0.5f,  -0.5f, 2.0f,  0.25f,
                                                     0.0f, -1.0f, -1.0f, 0.75f, -0.25f};
constexpr std::array<std::int64_t, kTokens> kTargets = {3, 0, 1};

struct Result {
  double loss = 0.0;
  std::array<double, kTokens * kDim> d_hidden{};
};

Result by_logitless() {
  using logitless::DType;
  float loss = 0.0f;
  std::array<float, kTokens * kDim> d_hidden{};

  logitless::CrossEntropyInputs inputs;
  inputs.hidden = {kHidden.data(), DType::f32, {kTokens, kDim}};
  inputs.weight = {kWeight.data(), DType::f32, {kVocab, kDim}};
  inputs.targets = {kTargets.data(), DType::i64, {kTokens}};
  logitless::CrossEntropyOutputs outputs;
  outputs.loss = {&loss, DType::f32, {}};
  outputs.d_hidden = {d_hidden.data(), DType::f32, {kTokens, kDim}};
  const logitless::Context context;
  logitless::cross_entropy(context, {}, inputs, outputs);

  Result result;
  result.loss = loss;
  for (int i = 0; i < kTokens * kDim; ++i) result.d_hidden[i] = d_hidden[i];
  return result;
}

// Computes the mean over tokens of log(sum_j exp z_j) - z_target from all logits z.
Result by_hand() {
  Result result;
  for (int token = 0; token < kTokens; ++token) {
    const float* x = &kHidden[token * kDim];
    std::array<double, kVocab> logits{};
    double sum = 0.0;
    for (int vocab_id = 0; vocab_id < kVocab; ++vocab_id) {
      for (int d = 0; d < kDim; ++d)
        logits[vocab_id] += double{x[d]} * kWeight[vocab_id * kDim + d];
      sum += std::exp(logits[vocab_id]);
    }
    result.loss += (std::log(sum) - logits[kTargets[token]]) / kTokens;
    for (int vocab_id = 0; vocab_id < kVocab; ++vocab_id) {
      const double p = std::exp(logits[vocab_id]) / sum;
      const double dz = (p - (vocab_id == kTargets[token] ? 1.0 : 0.0)) / kTokens;
      for (int d = 0; d < kDim; ++d)
        result.d_hidden[token * kDim + d] += dz * kWeight[vocab_id * kDim + d];
    }
  }
  return result;
}

bool close(const char* what, double got, double expected) {
  const bool good = std::abs(got - expected) <= 1e-5 * (1.0 + std::abs(expected));
  std::printf("%-12s logitless %.7f   by hand %.7f%s\n", what, got, expected,
              good ? "" : "   DIFFERS");
  return good;
}

}  // namespace

int main() {
  try {
    std::printf("logitless %s\n", logitless::version());
    const Result got = by_logitless();
    const Result expected = by_hand();
    bool good = close("loss", got.loss, expected.loss);
    for (int i = 0; i < kTokens * kDim; ++i) {
      good = close("d_hidden", got.d_hidden[i], expected.d_hidden[i]) && good;
    }
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "consumer: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
