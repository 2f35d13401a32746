#include "trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <stdexcept>

#include "checkpoint.h"
#include "logitless/parallel.h"
#include "train/hash.h"
#include "train/shuffle.h"

namespace log_bilinear {

using logitless::train::hex;
using logitless::train::mix;
using logitless::train::shuffled;
using logitless::train::uniform;
namespace {

volatile std::sig_atomic_t interrupted = 0;

// Computes log frequencies, with one occurrence added to each vocabulary entry.
std::vector<float> unigram_log_probability(const std::vector<std::int32_t>& words,
                                           std::int64_t vocab) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(vocab), 1);
  for (const std::int32_t word : words) ++counts[word];
  const double total = static_cast<double>(words.size()) + static_cast<double>(vocab);
  std::vector<float> result(counts.size());
  std::transform(counts.begin(), counts.end(), result.begin(), [&](std::int64_t count) {
    return static_cast<float>(std::log(static_cast<double>(count) / total));
  });
  return result;
}

// Returns examples spread evenly over the held-out text.
std::vector<std::int64_t> validation_examples(const Examples& held_out, std::int64_t wanted) {
  const std::int64_t count = std::min(wanted, held_out.size());
  std::vector<std::int64_t> examples(static_cast<std::size_t>(count));
  const double stride = static_cast<double>(held_out.size()) / static_cast<double>(count);
  for (std::int64_t i = 0; i < count; ++i) {
    examples[i] = static_cast<std::int64_t>(static_cast<double>(i) * stride);
  }
  return examples;
}

ModelShape model_shape(const Options& options, std::int64_t vocab) {
  return {vocab, options.dim, options.context, options.context_matrix == "full",
          options.word_vectors == "shared"};
}

OptimizerOptions optimizer_options(const Options& options) {
  OptimizerOptions result;
  result.kind = options.optimizer == "adamw" ? OptimizerKind::adamw : OptimizerKind::adagrad;
  result.weight_decay = static_cast<float>(options.weight_decay);
  return result;
}

// Returns the file of the far field's state, beside the checkpoint.
std::string far_state_of(const std::string& checkpoint) {
  return std::filesystem::path(checkpoint).replace_extension(".far.safetensors").string();
}

}  // namespace

double Validation::perplexity() const { return std::exp(loss); }

void install_interrupt() {
  std::signal(SIGINT, [](int signal) {
    interrupted = 1;
    std::signal(signal, SIG_DFL);
  });
}

Trainer::Trainer(const Options& options, const TokenizedText& text,
                 const logitless::Context& context, const Progress& progress)
    : options_(options),
      text_(text),
      context_(context),
      progress_(progress),
      metadata_(training_options(options)),
      unigram_(unigram_log_probability(text.train, text.tokenizer.vocab())),
      train_(text.train, options.context),
      held_out_(text.held_out, options.context),
      model_(model_shape(options, text.tokenizer.vocab()), options.batch, context.threads(),
             &memory_),
      optimizer_(optimizer_options(options), model_.parameters(), context.threads(), &memory_),
      head_(context,
            {text.tokenizer.vocab(), options.dim, options.batch,
             logitless::parse_dtype(options.dtype)},
            options.memory_budget, {options.far_field, options.far_both}, &memory_),
      drawn_(static_cast<std::size_t>(options.batch)),
      contexts_(static_cast<std::size_t>(options.batch * options.context)),
      targets_(static_cast<std::size_t>(options.batch)) {
  metadata_["format"] = "log_bilinear 1";
  metadata_["tokenizer hash"] = hex(text.tokenizer.hash());
  metadata_["text hash"] = hex(text.key);
  if (options.resume.empty()) {
    model_.initialise(options.seed, unigram_);
  } else {
    step_ = load_checkpoint(options.resume, model_, optimizer_, metadata_).step;
    if (step_ >= options.steps) {
      throw std::runtime_error(
          fmt::format("--resume: '{}' has done {} steps of {}; give a larger --steps to train on",
                      options.resume, step_, options.steps));
    }
  }
  first_step_ = step_;
  if (head_.far() != nullptr && !options.resume.empty())
    head_.far()->load(far_state_of(options.resume));
  head_.set_weight(model_.word_vectors().value());
}

double Trainer::train_step() {
  training_.start();
  for (std::int64_t i = 0; i < options_.batch; ++i) {
    drawn_[i] = shuffled(options_.seed, train_.size(), step_ * options_.batch + i);
  }
  train_.take(drawn_, contexts_.data(), targets_.data());

  const float* hidden = model_.forward(contexts_.data(), options_.batch);
  const HeadGradients gradients{model_.hidden_gradient(), model_.word_vectors().gradient(),
                                model_.biases().gradient()};
  const double loss =
      head_.train(hidden, targets_.data(), options_.batch, model_.biases().value(), gradients);
  model_.backward(contexts_.data(), options_.batch);

  ++step_;
  optimizer_.step(scheduled_rate(options_.learning_rate, step_, options_.warmup, options_.steps),
                  step_);
  head_.set_weight(model_.word_vectors().value());
  training_.stop();
  if (!std::isfinite(loss)) {
    throw std::runtime_error(fmt::format("the loss is {} at step {}: try a smaller --lr than {}",
                                         loss, step_, options_.learning_rate));
  }
  return loss;
}

Outcome Trainer::run() {
  const std::int64_t last =
      options_.stop_after > 0 ? std::min(options_.stop_after, options_.steps) : options_.steps;
  double loss_sum = 0.0;
  std::int64_t loss_count = 0;
  double last_line = progress_.seconds();
  while (step_ < last && interrupted == 0) {
    loss_sum += train_step();
    ++loss_count;
    const bool ends = step_ == last || interrupted != 0;
    const bool evaluates = step_ % options_.evaluate_every == 0 && !ends;
    if (evaluates || ends || progress_.seconds() - last_line >= options_.log_every) {
      report_step(loss_sum / static_cast<double>(loss_count));
      loss_sum = 0.0;
      loss_count = 0;
      last_line = progress_.seconds();
    }
    if (evaluates) {
      progress_.say(fmt::format("validation perplexity {:.2f}", validate().perplexity()));
      last_line = progress_.seconds();
    }
    if (options_.save_every > 0 && step_ % options_.save_every == 0 && !ends) save();
  }
  save();
  if (step_ == options_.steps) return Outcome::finished;
  return interrupted != 0 ? Outcome::interrupted : Outcome::stopped;
}

void Trainer::report_step(double loss) {
  const double left = training_.seconds() / static_cast<double>(step_ - first_step_) *
                      static_cast<double>(options_.steps - step_);
  progress_.say(fmt::format("step {:>{}}/{}  loss {:.4f}  {:>7} tokens/s  peak memory {}  left {}",
                            step_, std::to_string(options_.steps).size(), options_.steps, loss,
                            format_count(std::llround(tokens_per_second())),
                            logitless::format_bytes(logitless::process_peak_bytes()),
                            format_duration(left)));
}

void Trainer::save() {
  const std::string name = fmt::format("checkpoint-{:06}.safetensors", step_);
  checkpoint_ = (std::filesystem::path(options_.out) / name).string();
  save_checkpoint(checkpoint_, model_, optimizer_, {step_, options_.seed, step_ * options_.batch},
                  metadata_);
  if (head_.far() != nullptr) head_.far()->save(far_state_of(checkpoint_));
}

Validation Trainer::validate() {
  const std::vector<std::int64_t> all = validation_examples(held_out_, options_.valid_tokens);
  const auto total = static_cast<std::int64_t>(all.size());
  Validation sum;
  for (std::int64_t first = 0; first < total; first += options_.batch) {
    const std::int64_t count = std::min(options_.batch, total - first);
    held_out_.take({all.begin() + first, all.begin() + first + count}, contexts_.data(),
                   targets_.data());
    const float* hidden = model_.forward(contexts_.data(), count);
    const logitless::LossStatistics statistics =
        head_.evaluate(hidden, targets_.data(), count, model_.biases().value());
    sum.loss -= statistics.mean_log_prob * static_cast<double>(count);
    sum.accuracy += static_cast<double>(statistics.correct);
  }
  return {sum.loss / static_cast<double>(total), sum.accuracy / static_cast<double>(total)};
}

double Trainer::unigram_perplexity() const {
  double loss = 0.0;
  const std::vector<std::int64_t> all = validation_examples(held_out_, options_.valid_tokens);
  for (const std::int64_t example : all) {
    loss -= unigram_[text_.held_out[example + options_.context]];
  }
  return std::exp(loss / static_cast<double>(all.size()));
}

double Trainer::tokens_per_second() const {
  const auto words = static_cast<double>((step_ - first_step_) * options_.batch);
  return training_.seconds() > 0.0 ? words / training_.seconds() : 0.0;
}

// Computes logits directly: one row is small.
std::string Trainer::generate(const std::string& prompt, std::int64_t count, double temperature) {
  std::vector<std::int32_t> words;
  text_.tokenizer.encode(prompt, words);
  const std::int64_t dim = options_.dim;
  const std::int64_t vocab = model_.shape().vocab;
  const float* q = model_.word_vectors().value();
  const float* b = model_.biases().value();
  std::vector<float> logits(static_cast<std::size_t>(vocab));
  std::vector<std::int32_t> nearest(static_cast<std::size_t>(options_.context));
  const int threads = context_.threads();
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::size_t k = 0; k < nearest.size(); ++k) {
      nearest[k] = k < words.size() ? words[words.size() - 1 - k] : text_.tokenizer.end_of_text();
    }
    const float* h = model_.forward(nearest.data(), 1);
    constexpr std::int64_t kVocabCount = 256;  // entries of a task
    logitless::parallel_ranges(threads, vocab, kVocabCount, [&](std::int64_t v, std::int64_t last) {
      for (; v < last; ++v) {
        float sum = 0.0f;
        for (std::int64_t d = 0; d < dim; ++d) sum += h[d] * q[v * dim + d];
        logits[v] = sum + b[v];
      }
    });
    const double top = *std::max_element(logits.begin(), logits.end());
    double total = 0.0;
    for (const float logit : logits) total += std::exp((logit - top) / temperature);
    double left = uniform(mix(options_.seed, 3), static_cast<std::uint64_t>(i)) * total;
    std::int32_t word = 0;
    while (word + 1 < vocab && (left -= std::exp((logits[word] - top) / temperature)) > 0.0) ++word;
    words.push_back(word);
  }
  return text_.tokenizer.decode(words);
}

}  // namespace log_bilinear
