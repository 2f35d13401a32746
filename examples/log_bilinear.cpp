// A log-bilinear language model (Mnih & Hinton 2007), trained with the head of logitless.
//
//   cat docs/*/*.md >text && build/examples/example_log_bilinear text [STEPS]
//
// The hidden state of a token is a weighted sum of the vectors of the words before it, and a
// softmax over all words of the text predicts the token:
//
//   hidden_i = sum_k c_k * r(w_(i-1-k))        logits_ij = hidden_i . r_j + bias_j
//
// Prints the loss of training batches, then that of the last tenth of the text.
#include <logitless/logitless.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using logitless::DType;
using Floats = std::vector<float>;

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kContext = 4;  // words that predict the next one
constexpr std::int64_t kBatch = 1024;
constexpr std::size_t kBudget = 4 << 20;  // bytes of a plan's workspace
constexpr std::int64_t kLeast = 100;      // words of a text
constexpr float kRate = 0.05f;

// A text, whose words are numbered in the order of their first occurrences.
struct Text {
  std::vector<std::int32_t> words;
  std::int64_t vocab = 0;
};

// Splits a file into words of letters and digits; every other character but a space is a word.
Text read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read '" + path + "'");
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto is_letter = [&](std::size_t at) {
    return std::isalnum(static_cast<unsigned char>(bytes[at])) != 0;
  };

  Text text;
  std::unordered_map<std::string, std::int32_t> numbers;
  for (std::size_t begin = 0, end = 0; begin < bytes.size(); begin = end) {
    end = begin + 1;
    while (is_letter(begin) && end < bytes.size() && is_letter(end)) ++end;
    if (bytes[begin] == ' ') continue;
    const auto number = static_cast<std::int32_t>(numbers.size());
    text.words.push_back(
        numbers.try_emplace(bytes.substr(begin, end - begin), number).first->second);
  }
  text.vocab = static_cast<std::int64_t>(numbers.size());
  if (text.words.size() < kLeast) {
    throw std::runtime_error("'" + path + "': expected at least " + std::to_string(kLeast) +
                             " words, found " + std::to_string(text.words.size()));
  }
  return text;
}

// Weights with their gradient, updated by Adagrad.
struct Parameter {
  explicit Parameter(std::int64_t count) : value(count), gradient(count), squares(count, 1e-8f) {}

  void update() {
    for (std::size_t i = 0; i < value.size(); ++i) {
      squares[i] += gradient[i] * gradient[i];
      value[i] -= kRate * gradient[i] / std::sqrt(squares[i]);
    }
  }

  Floats value, gradient, squares;
};

class Model {
 public:
  explicit Model(const Text& text)
      : text_(text),
        vectors_(text.vocab * kDim),
        bias_(text.vocab),
        scales_(kContext * kDim),
        hidden_(kBatch * kDim),
        d_hidden_(kBatch * kDim),
        targets_(kBatch),
        train_plan_(plan(gradients(kBatch))),
        loss_plan_(plan(loss_alone())),
        train_workspace_(context_, train_plan_),
        loss_workspace_(context_, loss_plan_) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (float& value : vectors_.value) value = normal(random);
    std::fill(scales_.value.begin(), scales_.value.end(), 1.0f / kContext);
  }

  const logitless::LossPlan& train_plan() const { return train_plan_; }

  // Takes a step on the words at these positions of the text, kBatch at most. Returns their loss.
  double train(const std::vector<std::int64_t>& positions) {
    const std::int64_t tokens = forward(positions);
    logitless::cross_entropy(context_, train_plan_, {}, inputs(tokens), gradients(tokens),
                             train_workspace_);
    backward(positions);
    for (Parameter* parameter : {&vectors_, &bias_, &scales_}) parameter->update();
    return loss_;
  }

  // Returns the mean loss of the words in [first, last), without gradients.
  double evaluate(std::int64_t first, std::int64_t last) {
    double sum = 0.0;
    for (std::int64_t begin = first; begin < last; begin += kBatch) {
      std::vector<std::int64_t> positions;
      for (std::int64_t at = begin; at < std::min(begin + kBatch, last); ++at)
        positions.push_back(at);
      const std::int64_t tokens = forward(positions);
      logitless::cross_entropy(context_, loss_plan_, {}, inputs(tokens), loss_alone(),
                               loss_workspace_);
      sum += loss_ * static_cast<double>(tokens);
    }
    return sum / static_cast<double>(last - first);
  }

 private:
  logitless::LossPlan plan(const logitless::CrossEntropyOutputs& out) {
    logitless::PlanRequest request;
    request.memory_budget = kBudget;
    return logitless::plan_cross_entropy(context_, {}, inputs(kBatch), out, request);
  }

  // Calls function(token, vector, scales) for the words before each position: offsets of a word's
  // vector and of the scales of its distance.
  template <typename Function>
  void each_context(const std::vector<std::int64_t>& positions, Function&& function) {
    for (std::size_t token = 0; token < positions.size(); ++token) {
      for (std::int64_t k = 0; k < kContext; ++k)
        function(token * kDim, text_.words[positions[token] - 1 - k] * kDim, k * kDim);
    }
  }

  // Computes hidden states and targets, and returns the number of tokens.
  std::int64_t forward(const std::vector<std::int64_t>& positions) {
    for (std::size_t i = 0; i < positions.size(); ++i) targets_[i] = text_.words[positions[i]];
    std::fill(hidden_.begin(), hidden_.end(), 0.0f);
    each_context(positions, [&](std::size_t h, std::int64_t r, std::int64_t c) {
      for (std::int64_t d = 0; d < kDim; ++d)
        hidden_[h + d] += scales_.value[c + d] * vectors_.value[r + d];
    });
    return static_cast<std::int64_t>(positions.size());
  }

  // Adds the gradients of context words to those that the head has written to the same vectors.
  void backward(const std::vector<std::int64_t>& positions) {
    std::fill(scales_.gradient.begin(), scales_.gradient.end(), 0.0f);
    each_context(positions, [&](std::size_t h, std::int64_t r, std::int64_t c) {
      for (std::int64_t d = 0; d < kDim; ++d) {
        vectors_.gradient[r + d] += scales_.value[c + d] * d_hidden_[h + d];
        scales_.gradient[c + d] += vectors_.value[r + d] * d_hidden_[h + d];
      }
    });
  }

  // The head's tensors are views of these vectors.
  logitless::CrossEntropyInputs inputs(std::int64_t tokens) const {
    logitless::CrossEntropyInputs in;
    in.hidden = {hidden_.data(), DType::f32, {tokens, kDim}};
    in.weight = {vectors_.value.data(), DType::f32, {text_.vocab, kDim}};
    in.targets = {targets_.data(), DType::i32, {tokens}};
    in.bias = {bias_.value.data(), DType::f32, {text_.vocab}};
    return in;
  }

  logitless::CrossEntropyOutputs loss_alone() {
    logitless::CrossEntropyOutputs out;
    out.loss = {&loss_, DType::f32, {}};
    return out;
  }

  logitless::CrossEntropyOutputs gradients(std::int64_t tokens) {
    logitless::CrossEntropyOutputs out = loss_alone();
    out.d_hidden = {d_hidden_.data(), DType::f32, {tokens, kDim}};
    out.d_weight = {vectors_.gradient.data(), DType::f32, {text_.vocab, kDim}};
    out.d_bias = {bias_.gradient.data(), DType::f32, {text_.vocab}};
    return out;
  }

  const Text& text_;
  Parameter vectors_;                  // [V, D]: r, of contexts and of predicted words
  Parameter bias_;                     // [V]
  Parameter scales_;                   // [kContext, D]: c
  Floats hidden_, d_hidden_;           // [kBatch, D]
  std::vector<std::int32_t> targets_;  // [kBatch]
  float loss_ = 0.0f;

  // Plans and workspaces are made once, for all calls of at most kBatch tokens.
  logitless::Context context_;
  logitless::LossPlan train_plan_, loss_plan_;
  logitless::Workspace train_workspace_, loss_workspace_;
};

void run(const std::string& path, std::int64_t steps) {
  const Text text = read_text(path);
  const auto words = static_cast<std::int64_t>(text.words.size());
  const std::int64_t held_out = words - words / 10;
  Model model(text);
  std::printf("%lld words, vocabulary %lld; plan %s: %s of workspace, fp32 logits would be %s\n",
              static_cast<long long>(words), static_cast<long long>(text.vocab),
              std::string(logitless::name_of(model.train_plan().kind)).c_str(),
              logitless::format_bytes(model.train_plan().workspace_bytes()).c_str(),
              logitless::format_bytes(sizeof(float) * kBatch * text.vocab).c_str());

  std::mt19937_64 random(2);
  std::uniform_int_distribution<std::int64_t> position(kContext, held_out - 1);
  const std::int64_t interval = std::max<std::int64_t>(1, steps / 10);
  double sum = 0.0;
  for (std::int64_t step = 1; step <= steps; ++step) {
    std::vector<std::int64_t> positions(kBatch);
    for (std::int64_t& at : positions) at = position(random);
    sum += model.train(positions);
    if (step % interval == 0) {
      std::printf("step %5lld  loss %.4f\n", static_cast<long long>(step),
                  sum / static_cast<double>(interval));
      sum = 0.0;
    }
  }
  std::printf("held out    loss %.4f\n", model.evaluate(held_out, words));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::int64_t steps = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 300;
    if (argc < 2 || argc > 3 || steps < 1) {
      std::fprintf(stderr, "usage: example_log_bilinear TEXT [STEPS]\n");
      return 2;
    }
    run(argv[1], steps);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example_log_bilinear: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
