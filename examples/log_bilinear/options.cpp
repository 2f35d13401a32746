#include "options.h"

#include <fmt/format.h>
#include <logitless/logitless.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <functional>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace log_bilinear {
namespace {

// Text form of a training option, for the checkpoint.
struct Field {
  std::string name;
  std::function<std::string()> get;
  std::function<void(const std::string&)> set;
};

template <typename T>
std::string to_text(const T& value) {
  return fmt::format("{}", value);
}
std::string to_text(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

void from_text(const std::string& text, std::string& value) { value = text; }
void from_text(const std::string& text, std::vector<std::string>& lines) {
  lines.clear();
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
}
void from_text(const std::string& text, bool& value) { value = text == "true"; }
template <typename T>
void from_text(const std::string& text, T& value) {
  std::istringstream stream(text);
  if (!(stream >> value)) throw std::runtime_error(fmt::format("'{}' is not a number", text));
}

template <typename T>
Field field(std::string name, T& value) {
  return {std::move(name), [&value] { return to_text(value); },
          [&value](const std::string& text) { from_text(text, value); }};
}

// Returns the options that change the numbers, under the names of the command line.
std::vector<Field> training_fields(Options& options) {
  return {
      field("text", options.text),
      field("max-text", options.max_text),
      field("vocab", options.vocab),
      field("dim", options.dim),
      field("context", options.context),
      field("context-matrix", options.context_matrix),
      field("word-vectors", options.word_vectors),
      field("optimizer", options.optimizer),
      field("lr", options.learning_rate),
      field("weight-decay", options.weight_decay),
      field("steps", options.steps),
      field("batch", options.batch),
      field("warmup", options.warmup),
      field("seed", options.seed),
      field("dtype", options.dtype),
      field("memory-budget", options.memory_budget),
      field("far-field", options.far_field),
      field("far-both", options.far_both),
  };
}

std::string default_cache_directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::string(cache) + "/logitless";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/logitless";
  }
  return ".cache/logitless";
}

void add_options(CLI::App& app, Options& o) {
  const CLI::Range any_count(std::int64_t{0}, std::numeric_limits<std::int64_t>::max(), "COUNT");
  const CLI::Range count(std::int64_t{1}, std::numeric_limits<std::int64_t>::max(), "COUNT >= 1");
  const auto bytes = [](std::size_t& value) {
    return [&value](const std::string& text) {
      try {
        value = logitless::parse_bytes(text);
      } catch (const logitless::Error& error) {
        throw CLI::ValidationError(error.what());
      }
    };
  };

  app.add_option("--text", o.text,
                 "Files and directories to learn from (default: the system's headers)")
      ->type_name("PATH...")
      ->check(CLI::ExistingPath);
  app.add_option_function<std::string>("--max-text", bytes(o.max_text), "Most text to take (24MiB)")
      ->type_name("BYTES");
  app.add_option("--vocab", o.vocab, "Tokens of the tokenizer")
      ->capture_default_str()
      ->check(CLI::Range(300, 1 << 20));
  app.add_option(
         "--cache", o.cache,
         "Where tokenizer and tokens are cached ($XDG_CACHE_HOME/logitless or ~/.cache/logitless)")
      ->type_name("DIR");

  app.add_option("--dim", o.dim, "Length of a word vector")
      ->capture_default_str()
      ->check(CLI::Range(1, 16384));
  app.add_option("--context", o.context, "Tokens seen")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  app.add_option("--context-matrix", o.context_matrix, "One for each position: full or diagonal")
      ->capture_default_str()
      ->check(CLI::IsMember({"full", "diagonal"}));
  app.add_option("--word-vectors", o.word_vectors,
                 "shared: context and output tokens have the same; separate: each its own")
      ->capture_default_str()
      ->check(CLI::IsMember({"shared", "separate"}));

  app.add_option("--optimizer", o.optimizer, "adamw or adagrad")
      ->capture_default_str()
      ->check(CLI::IsMember({"adamw", "adagrad"}));
  app.add_option("--lr", o.learning_rate, "Peak learning rate (adamw 0.004, adagrad 0.05)")
      ->check(CLI::PositiveNumber);
  app.add_option("--weight-decay", o.weight_decay, "Decoupled, times the learning rate")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--steps", o.steps, "Training steps")->capture_default_str()->check(count);
  app.add_option("--batch", o.batch, "Tokens predicted in a step")
      ->capture_default_str()
      ->check(count);
  app.add_option("--warmup", o.warmup, "Steps until the learning rate is full (a twentieth of all)")
      ->check(any_count);
  app.add_option("--seed", o.seed, "Of weights, order and samples")->capture_default_str();
  app.add_option("--dtype", o.dtype, "Of the head's products: bf16 or f32")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option_function<std::string>(
         "--memory-budget", bytes(o.memory_budget),
         "Most memory of the head's workspace (the library's default)")
      ->type_name("BYTES");

  app.add_option("--far-field", o.far_field,
                 "Gradients by the far field, as often as audits keep this relative error (0.01); "
                 "for large vocabularies")
      ->check(CLI::Range(0.0, 0.5));
  app.add_flag("--far-both", o.far_both, "With --far-field: the loss, too");

  app.add_option("--threads", o.threads, "CPU threads (all)")->check(CLI::Range(1, 4096));
  app.add_option("--stop-after", o.stop_after,
                 "End at this step with a checkpoint, as if interrupted; the schedule is still "
                 "that of --steps")
      ->check(count);
  app.add_option("--evaluate-every", o.evaluate_every, "Steps between validations (a sixth of all)")
      ->check(count);
  app.add_option("--valid-tokens", o.valid_tokens, "Tokens predicted in a validation")
      ->capture_default_str()
      ->check(count);
  app.add_option("--save-every", o.save_every, "Steps between checkpoints (the last alone)")
      ->check(count);
  app.add_option("--out", o.out, "Where checkpoints go")->capture_default_str()->type_name("DIR");
  app.add_option("--resume", o.resume, "Go on from a checkpoint, with its options")
      ->type_name("FILE")
      ->check(CLI::ExistingFile);
  app.add_option("--log-every", o.log_every, "Seconds between lines of progress")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--generate", o.generate, "Tokens to write at the end, 0 for none")
      ->capture_default_str()
      ->check(any_count);
  app.add_option("--temperature", o.temperature, "Of the tokens written")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--prompt", o.prompt, "What they follow")->capture_default_str();
}

// Takes options that were not given from the checkpoint. Given ones must agree, except --steps.
void take_options_of_checkpoint(const CLI::App& app, Options& options) {
  const logitless::TensorFile file(options.resume);
  const std::map<std::string, std::string>& stored = file.metadata();
  for (const Field& f : training_fields(options)) {
    const auto found = stored.find(f.name);
    if (found == stored.end()) {
      throw std::runtime_error(
          fmt::format("--resume: '{}' is not a checkpoint of this program: it has no '{}'",
                      options.resume, f.name));
    }
    const bool given = app.get_option("--" + f.name)->count() > 0;
    if (!given) {
      f.set(found->second);
    } else if (f.get() != found->second && f.name != "steps") {
      throw std::runtime_error(fmt::format(
          "--{}: '{}' was given, but the checkpoint was trained with '{}'; leave it out to go on",
          f.name, f.get(), found->second));
    }
  }
}

}  // namespace

std::map<std::string, std::string> training_options(const Options& options) {
  Options copy = options;
  std::map<std::string, std::string> result;
  for (const Field& f : training_fields(copy)) result[f.name] = f.get();
  return result;
}

Options parse_options(int argc, char** argv, int& exit_code) {
  Options options;
  CLI::App app(
      "Trains a log-bilinear language model on text found on this machine, with its softmax over "
      "the "
      "whole vocabulary\ncomputed by logitless, and reports what memory that took.");
  add_options(app, options);
  exit_code = -1;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error);
    return options;
  }
  if (!options.resume.empty()) take_options_of_checkpoint(app, options);
  if (options.cache.empty()) options.cache = default_cache_directory();
  if (options.learning_rate == 0.0) {
    options.learning_rate = options.optimizer == "adamw" ? 0.004 : 0.05;
  }
  if (options.warmup < 0) options.warmup = options.steps / 20;
  if (options.warmup >= options.steps) {
    throw std::runtime_error(fmt::format("--warmup: must be less than --steps {}, got {}",
                                         options.steps, options.warmup));
  }
  if (options.evaluate_every == 0) options.evaluate_every = (options.steps + 5) / 6;
  return options;
}

}  // namespace log_bilinear
