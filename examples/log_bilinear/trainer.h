// A training run: steps, validation, checkpoints, and generated text.
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
  double loss = 0.0;      // nats a token
  double accuracy = 0.0;  // share of tokens that were the likeliest
  double perplexity() const;
};

enum class Outcome : std::uint8_t { finished, stopped, interrupted };

class Trainer {
 public:
  // All arguments must outlive the trainer. It resumes when the options say so.
  Trainer(const Options& options, const TokenizedText& text, const logitless::Context& context,
          const Progress& progress);

  // Trains until the last step, --stop-after, or an interrupt (see install_interrupt), and saves a
  // checkpoint.
  Outcome run();

  Validation validate();
  // Perplexity of the same tokens by their frequency in the training text alone.
  double unigram_perplexity() const;
  // Generates `count` tokens after the prompt, sampled at a temperature.
  std::string generate(const std::string& prompt, std::int64_t count, double temperature);

  std::int64_t step() const { return step_; }
  double tokens_per_second() const;  // of the steps of this process
  const Model& model() const { return model_; }
  const Head& head() const { return head_; }
  // Meter of weights, gradients, optimiser sums and activations, without the head's workspaces.
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

// Makes an interrupt (Ctrl-C) stop run() after its step; a second one ends the program.
void install_interrupt();

}  // namespace log_bilinear
