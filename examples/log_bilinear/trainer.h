// A training run: steps, validation, checkpoints, and words written by the model.
#pragma once

#include <logitless/logitless.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "examples.h"
#include "head.h"
#include "model.h"
#include "optimizer.h"
#include "options.h"
#include "progress.h"
#include "train/tokenizer.h"

namespace log_bilinear {

using logitless::train::TokenizedText;

struct Validation {
  double loss = 0.0;      // nats a word
  double accuracy = 0.0;  // share of words that were the likeliest
  double perplexity() const;
};

enum class Outcome : std::uint8_t { finished, stopped, interrupted };

class Trainer {
 public:
  // All must outlive the trainer. Resumes when the options say so.
  Trainer(const Options& options, const TokenizedText& text, const logitless::Context& context,
          const Progress& progress);

  // Trains until the last step, --stop-after, or an interrupt (see install_interrupt), and saves a
  // checkpoint.
  Outcome run();

  Validation validate();
  // Perplexity of the same words by their frequency in the training text alone.
  double unigram_perplexity() const;
  // `count` words after the prompt, drawn at a temperature.
  std::string generate(const std::string& prompt, std::int64_t count, double temperature);

  std::int64_t step() const { return step_; }
  double tokens_per_second() const;  // of the steps of this process
  const Model& model() const { return model_; }
  const Head& head() const { return head_; }
  // Weights, gradients, optimiser sums and activations: everything but the head's workspaces.
  const logitless::MemoryMeter& memory() const { return memory_; }
  const std::string& checkpoint() const { return checkpoint_; }

 private:
  double train_step();
  void report_step(double loss);
  void save();

  const Options& options_;
  const TokenizedText& text_;
  const logitless::Context& context_;
  const Progress& progress_;
  logitless::MemoryMeter memory_;
  std::map<std::string, std::string> metadata_;
  std::vector<float> unigram_;  // [V] log-probabilities
  Examples train_;
  Examples held_out_;
  Model model_;
  Optimizer optimizer_;
  Head head_;
  std::vector<std::int64_t> drawn_;     // [batch]
  std::vector<std::int32_t> contexts_;  // [batch, n]
  std::vector<std::int32_t> targets_;   // [batch]
  std::int64_t step_ = 0;               // steps done
  std::int64_t first_step_ = 0;         // done before this process
  Timer training_;
  std::string checkpoint_;  // the last one written
};

// From now on an interrupt (Ctrl-C) makes run() stop after its step; a second one ends the program.
void install_interrupt();

}  // namespace log_bilinear
