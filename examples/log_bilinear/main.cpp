// Trains a log-bilinear language model on the text of this machine, without its full logits.
#include <fmt/format.h>
#include <logitless/logitless.h>

#include <cstdio>
#include <exception>
#include <string>

#include "options.h"
#include "progress.h"
#include "train/text_corpus.h"
#include "train/tokenizer.h"
#include "trainer.h"

namespace log_bilinear {

using logitless::train::Corpus;
using logitless::train::CorpusOptions;
namespace {

constexpr int kExitError = 1;
constexpr int kExitInterrupted = 130;  // shells expect it of a program ended by Ctrl-C

std::string plural(std::size_t count, const char* noun) {
  return fmt::format("{} {}{}", format_count(static_cast<std::int64_t>(count)), noun,
                     count == 1 ? "" : "s");
}

TokenizedText prepare_text(const Options& options, int threads, const Progress& progress) {
  CorpusOptions corpus_options;
  corpus_options.paths = options.text;
  corpus_options.max_bytes = options.max_text;
  const Corpus corpus = read_corpus(corpus_options);
  progress.say(
      fmt::format("text: {}, {}; held out: {}, {}", plural(corpus.count(false), "file"),
                  logitless::format_bytes(corpus.bytes(false)),
                  corpus.split_files ? "the end of each" : plural(corpus.count(true), "file"),
                  logitless::format_bytes(corpus.bytes(true))));
  if (corpus.left_out + corpus.cut + corpus.binary + corpus.too_large + corpus.duplicates > 0) {
    progress.say(
        fmt::format("left out: {} beyond --max-text {}, {} repeated, {} binary, {} over {}",
                    plural(corpus.left_out + corpus.cut, "file"),
                    logitless::format_bytes(options.max_text), corpus.duplicates, corpus.binary,
                    corpus.too_large, logitless::format_bytes(corpus_options.max_file_bytes)));
  }
  TokenizedText text = tokenize(corpus, options.vocab, options.cache, threads,
                                [&](std::string_view line) { progress.say(line); });
  progress.say(fmt::format("{} tokens of {} to train on, {} held out",
                           format_count(static_cast<std::int64_t>(text.train.size())),
                           format_count(text.tokenizer.vocab()),
                           format_count(static_cast<std::int64_t>(text.held_out.size()))));
  return text;
}

void report(const Trainer& trainer, const Validation& validation, double unigram,
            const logitless::Context& context, const Progress& progress) {
  const logitless::LossPlan& plan = trainer.head().train_plan();
  const std::size_t logits = plan.logits_bytes();
  const auto row = [](std::string_view name, const std::string& value) {
    fmt::print("  {:<54}{:>16}\n", name, value);
  };
  const auto bytes = [](std::size_t count) { return logitless::format_bytes(count); };
  fmt::print("\nMemory of the softmax over a vocabulary of {}, batch {}\n",
             format_count(plan.shape.vocab), plan.shape.tokens);
  row("fp32 logits, never made", bytes(logits));
  row("and their gradient, never made", bytes(logits));
  if (trainer.head().far() == nullptr) {
    row("logitless workspace, training", bytes(plan.workspace_bytes()));
    row("logitless workspaces, training and validation", bytes(trainer.head().workspace_bytes()));
  }
  row("most that logitless held at a time (its meter)", bytes(context.memory().peak_bytes()));
  fmt::print("Model\n");
  row("parameters", format_count(trainer.model().parameter_count()));
  row("weights, gradients, optimiser, activations", bytes(trainer.memory().peak_bytes()));
  row("peak of the whole process", bytes(logitless::process_peak_bytes()));
  fmt::print("Result\n");
  row("validation perplexity of the unigram model", fmt::format("{:.2f}", unigram));
  row("validation perplexity", fmt::format("{:.2f}", validation.perplexity()));
  row("validation loss, nats a token", fmt::format("{:.4f}", validation.loss));
  row("validation tokens guessed right", fmt::format("{:.1f} %", 100.0 * validation.accuracy));
  row("tokens/s in training", format_count(std::llround(trainer.tokens_per_second())));
  row("time", format_duration(progress.seconds()));
  if (const logitless::FarFieldHead* far = trainer.head().far(); far != nullptr) {
    fmt::print("Far field\n{}", far->explain());
  } else {
    fmt::print("Plan\n{}\n", plan.explain());
  }
  fmt::print("Checkpoint {}\n", trainer.checkpoint());
}

int run(int argc, char** argv) {
  int exit_code = -1;
  const Options options = parse_options(argc, argv, exit_code);
  if (exit_code >= 0) return exit_code;

  const Progress progress;
  logitless::ContextOptions context_options;
  context_options.threads = options.threads;
  const logitless::Context context(context_options);
  const TokenizedText text = prepare_text(options, context.threads(), progress);

  Trainer trainer(options, text, context, progress);
  const double unigram = trainer.unigram_perplexity();
  progress.say(
      fmt::format("{} parameters, {} threads, kernel {}; unigram validation perplexity {:.2f}",
                  format_count(trainer.model().parameter_count()), context.threads(),
                  trainer.head().train_plan().kernel, unigram));
  if (!options.resume.empty()) {
    progress.say(fmt::format("going on from step {} of {}", trainer.step(), options.steps));
  }
  install_interrupt();
  const Outcome outcome = trainer.run();
  if (outcome == Outcome::interrupted) {
    progress.say(fmt::format("interrupted; go on with --resume {}", trainer.checkpoint()));
    return kExitInterrupted;
  }
  if (outcome == Outcome::stopped) {
    progress.say(fmt::format("stopped after step {}; go on with --resume {}", trainer.step(),
                             trainer.checkpoint()));
  }
  report(trainer, trainer.validate(), unigram, context, progress);
  if (options.generate > 0) {
    fmt::print("\nSample\n{}\n",
               trainer.generate(options.prompt, options.generate, options.temperature));
  }
  return 0;
}

}  // namespace
}  // namespace log_bilinear

int main(int argc, char** argv) {
  try {
    return log_bilinear::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "log_bilinear: {}\n", error.what());
    return log_bilinear::kExitError;
  }
}
