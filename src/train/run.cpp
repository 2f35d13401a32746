#include "train/run.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>

#include "logitless/context.h"
#include "logitless/device.h"
#include "logitless/error.h"
#include "logitless/memory.h"
#include "logitless/plan.h"
#include "logitless/tensor_file.h"
#include "logitless/version.h"
#include "train/hugging_face.h"
#include "train/run_log.h"
#include "train/stop_signals.h"
#include "train/text_corpus.h"
#include "train/tokenizer.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kValidationTokens = 16384;
constexpr double kSecondsBetweenLines = 2.0;

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Data {
  std::optional<Tokenizer> tokenizer;  // of text
  ModelPtr model;
  Dataset train, valid;
};

Data shards(const RunOptions& o) {
  const ModelPtr model = o.make_model(o.vocab);
  const auto read = [&](const char* option, const std::vector<std::string>& paths) {
    try {
      return Dataset::of_shards(paths, o.length, model->sizes().vocab);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("--{}: {}", option, error.what()));
    }
  };
  Dataset all = read("data", o.data);
  if (!o.val.empty()) return {{}, model, std::move(all), read("val", o.val)};
  if (all.windows() < 2) {
    throw InvalidArgument(fmt::format(
        "--data: expected two windows of --length {} or more, one of them to validate, found 1",
        o.length));
  }
  auto [train, valid] = all.split(std::max<std::int64_t>(1, all.windows() / 50));
  return {{}, model, std::move(train), std::move(valid)};
}

std::optional<TokenizerModel> tokenizer_of(const RunOptions& o) {
  if (o.tokenizer.empty()) return std::nullopt;
  try {
    return read_hugging_face_tokenizer(o.tokenizer);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("--text: {}", error.what()));
  }
}

Data text(const RunOptions& o, const Say& say) {
  CorpusOptions corpus_options;
  corpus_options.paths = o.text;
  const Corpus corpus = [&] {
    try {
      return read_corpus(corpus_options);
    } catch (const std::runtime_error& error) {
      throw InvalidArgument(error.what());
    }
  }();
  say(fmt::format("text: {} files, {}; held out: {}", corpus.count(false),
                  format_bytes(corpus.bytes(false)), format_bytes(corpus.bytes(true))));
  const std::int64_t wanted = o.make_model(o.vocab)->sizes().vocab;
  const std::string cache = o.cache.empty() ? default_cache_directory() : o.cache;
  ContextOptions context;
  context.threads = o.threads;
  const std::optional<TokenizerModel> tokenizer = tokenizer_of(o);
  TokenizedText words = [&] {
    try {
      return tokenize(corpus, static_cast<int>(wanted), cache, Context(context).threads(), say,
                      tokenizer ? &*tokenizer : nullptr);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(
          fmt::format("--text: the tokenizer of '{}': {}", o.tokenizer, error.what()));
    }
  }();
  // A model may have more words than its tokenizer: rows that were added to fill a tile.
  const ModelPtr model = o.make_model(tokenizer ? o.vocab : words.tokenizer.vocab());
  if (words.tokenizer.vocab() > model->sizes().vocab) {
    throw InvalidArgument(
        fmt::format("--text: expected a tokenizer of at most {} words, as the model "
                    "has, found {}",
                    model->sizes().vocab, words.tokenizer.vocab()));
  }
  const auto windows = [&](std::vector<std::int32_t> stream, const char* which) {
    try {
      return Dataset::of_words(std::move(stream), o.length, model->sizes().vocab);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("--length: {}: {}", which, error.what()));
    }
  };
  Dataset train = windows(std::move(words.train), "the text");
  Dataset valid = windows(std::move(words.held_out), "the text held out");
  return {std::move(words.tokenizer), model, std::move(train), std::move(valid)};
}

std::string written(const std::optional<Tokenizer>& tokenizer,
                    const std::vector<std::int64_t>& words) {
  if (!tokenizer) return fmt::format("{}", fmt::join(words, " "));
  return tokenizer->decode({words.begin(), words.end()});
}

void write_sample(const RunOptions& o, const Data& data, Trainer& trainer, RunReport& report) {
  constexpr std::ptrdiff_t kPrompt = 8;
  std::vector<std::int64_t> prompt;
  if (o.prompt.empty()) {
    const std::vector<std::int64_t> window = data.valid.sequential_batch(0, 1).tokens;
    prompt.assign(window.begin(),
                  window.begin() + std::min<std::ptrdiff_t>(kPrompt, std::ssize(window)));
  } else {
    std::vector<std::int32_t> words = data.tokenizer->before_text();
    data.tokenizer->encode(o.prompt, words);
    prompt.assign(words.begin(), words.end());
  }
  SampleOptions sample;
  sample.temperature = o.temperature;
  sample.top_k = o.top_k;
  sample.words = data.tokenizer ? data.tokenizer->vocab() : 0;
  sample.seed = o.seed;
  report.gap = data.tokenizer ? "" : " ";
  report.prompt = written(data.tokenizer, prompt);
  report.sample = written(data.tokenizer, trainer.generate(prompt, o.sample, sample));
}

// The end of a line.
std::string far_text(const FarFieldReport& r) {
  std::string text =
      fmt::format("  far field: dense {} of {}, orders {}", r.dense_steps, r.steps, r.refreshes);
  if (r.audits > 0)
    text += fmt::format(", kept {:.1f} %, error {:.2g}", 100.0 * r.mean_kept, r.last_error);
  return text;
}

std::filesystem::path whole_path(const std::string& path) {
  std::error_code error;
  return std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
}

// What is written into a folder of --text would replace a text, or be one when the run is resumed.
void refuse_among_texts(const RunOptions& o) {
  const auto refuse = [&](const char* option, const std::string& path) {
    if (path.empty()) return;
    const std::filesystem::path whole = whole_path(path);
    for (const std::string& folder : o.text) {
      std::error_code error;
      if (!std::filesystem::is_directory(folder, error)) continue;
      const std::filesystem::path below = whole.lexically_relative(whole_path(folder));
      if (below.empty() || *below.begin() == "..") continue;
      throw InvalidArgument(fmt::format("--{}: '{}' lies in '{}' of --text, whose files are read",
                                        option, path, folder));
    }
  };
  refuse("save", o.save);
  refuse("log", o.log);
  refuse("export", o.hugging_face);
}

// A checkpoint or model that would replace what the run reads, or the other.
void refuse_same_files(const RunOptions& o) {
  const auto refuse = [](const char* option, const std::string& path, const char* other,
                         const std::string& there) {
    if (path.empty() || there.empty()) return;
    if (whole_path(path) != whole_path(there)) return;
    throw InvalidArgument(
        fmt::format("--{}: '{}' is the file of --{}, which it would replace", option, path, other));
  };
  refuse("export", o.hugging_face, "save", o.save);
  refuse("export", o.hugging_face, "resume", o.resume);
  refuse("save", o.save, "init", o.init);
  refuse("log", o.log, "save", o.save);
  refuse("log", o.log, "resume", o.resume);
  refuse("log", o.log, "init", o.init);
  for (const auto& [name, paths] :
       {std::pair{"data", &o.data}, {"val", &o.val}, {"text", &o.text}}) {
    for (const std::string& path : *paths) {
      refuse("save", o.save, name, path);
      refuse("log", o.log, name, path);
      refuse("export", o.hugging_face, name, path);
    }
  }
  refuse_among_texts(o);
}

// What would go wrong after hours, before the first step: where --save, --export and --cache cannot
// be written, and options that a checkpoint cannot hold.
void check_files(const RunOptions& o) {
  refuse_same_files(o);
  const auto check = [](const char* option, const std::string& path) {
    try {
      check_writable(path);
    } catch (const Error& error) {
      throw InvalidArgument(fmt::format("--{}: {}", option, error.what()));
    }
  };
  if (!o.save.empty()) {
    options_text(o);
    check("save", o.save);
    if (o.far_field > 0.0) check("save", far_state_of(o.save));
  }
  if (!o.hugging_face.empty()) {
    check("export", o.hugging_face);
    try {
      check_hugging_face_folder(o.hugging_face, o.model_type());
    } catch (const Error& error) {
      throw InvalidArgument(fmt::format("--export: {}", error.what()));
    }
  }
  if (const std::string log = o.log_path(); !log.empty()) {
    options_text(o);  // its header has them
    check("log", log);
  }
  if (!o.cache.empty()) {
    std::error_code error;
    std::filesystem::create_directories(o.cache, error);
    if (error)
      throw InvalidArgument(
          fmt::format("--cache: cannot make the folder '{}': {}", o.cache, error.message()));
    check("cache", (std::filesystem::path(o.cache) / "words").string());
  }
}

// Steps, with a line now and then, until all are done.
class Loop {
 public:
  Loop(const RunOptions& options, Trainer& trainer, RunReport& report, RunLog& log, const Say& say)
      : o_(options),
        trainer_(trainer),
        report_(report),
        log_(log),
        say_(say),
        tokens_before_(trainer.windows_read() * options.length) {}

 private:
  // What `act` returns; where it finds that the run has diverged, with what is left of it.
  template <typename Act>
  auto checked(Act&& act) const {
    try {
      return act();
    } catch (const Diverged& error) {
      std::string kept;
      if (saved_ >= 0)
        kept = fmt::format("; '{}' has step {}", o_.save, saved_);
      else if (!o_.save.empty())
        kept = fmt::format("; '{}' was not written", o_.save);
      log_end(fmt::format("diverged: {}", error.what()));
      throw Error(error.what() + kept);
    }
  }

 public:
  void run() {
    const StopSignals stop;
    while (trainer_.steps_done() < o_.steps) {
      Stopwatch watch;
      take(checked([&] { return trainer_.start_step(); }));
      const std::int64_t step = trainer_.steps_done();
      const bool due = step == o_.steps || step % o_.steps_between_validations() == 0;
      // A GPU may be a step behind, but not where the run looks at what it has learnt.
      const bool look = due || stop.caught() != 0;
      if (look) take(checked([&] { return trainer_.finish_step(); }));
      report_.seconds.push_back(watch.seconds());
      seconds_ += report_.seconds.back();
      log_steps();
      const std::int64_t known = std::ssize(report_.steps);
      if (known > said_steps_ &&
          (known == 1 || step == o_.steps || since_line_.seconds() > kSecondsBetweenLines))
        say_step();
      if (due && stop.caught() == 0) pause(step);
      if (look && stop.caught() != 0) {
        end_early(step, stop.caught());
        break;
      }
    }
    // A checkpoint of a finished run: nothing is left to do but to look at it, and to keep it.
    if (report_.steps.empty()) pause(trainer_.steps_done());
    log_end(report_.signal != 0 ? name_of_signal(report_.signal) : "done");
    report_.tokens_per_second =
        seconds_ > 0.0 ? static_cast<double>(tokens(std::ssize(report_.steps))) / seconds_ : 0.0;
  }

 private:
  std::int64_t steps_known() const { return report_.first_step + std::ssize(report_.steps); }
  // Those whose results are known; a GPU's come a step late.
  void log_steps() {
    for (; logged_ < std::min(report_.steps.size(), report_.seconds.size()); ++logged_) {
      const StepResult& r = report_.steps[logged_];
      const auto done = static_cast<std::int64_t>(logged_) + 1;
      const double seconds = report_.seconds[logged_];
      Json line = {{"kind", "step"},
                   {"step", report_.first_step + done},
                   {"tokens", tokens_before_ + tokens(done)},
                   {"loss", r.loss},
                   {"lr", r.rate},
                   {"grad_norm", r.norm},
                   {"seconds", seconds},
                   {"tokens_per_second", static_cast<double>(tokens(1)) / std::max(seconds, 1e-9)}};
      if (const FarFieldHead* far = trainer_.far_field(); far != nullptr)
        line["far_field"] = to_json(far->report());
      log_.write(line);
    }
  }
  void log_validation(const RunReport::Validation& v, double seconds) {
    log_.write({{"kind", "validation"},
                {"step", v.step},
                {"loss", v.loss},
                {"perplexity", std::exp(v.loss)},
                {"seconds", seconds}});
  }
  // Of a run without a step as well, of which only a refusal is worth a line.
  void log_end(const std::string& reason) const {
    log_.write({{"kind", "end"},
                {"step", steps_known()},
                {"reason", reason},
                {"memory", to_json(trainer_.memory())},
                {"process_peak_bytes", process_peak_bytes()}});
  }

  std::int64_t tokens(std::int64_t steps) const {
    return steps * o_.batch * o_.accumulate * o_.length;
  }

  void take(const std::optional<StepResult>& result) {
    if (result) report_.steps.push_back(*result);
  }

  void say_step() {
    const std::int64_t step = report_.first_step + std::ssize(report_.steps);
    const StepResult& r = report_.steps.back();
    const std::int64_t done = std::ssize(report_.steps) - said_steps_;
    const FarFieldHead* far = trainer_.far_field();
    say_(fmt::format("step {:>{}}/{}  loss {:.4f}  lr {:.2e}  norm {:.3f}  {:.0f} tokens/s{}", step,
                     fmt::formatted_size("{}", o_.steps), o_.steps, r.loss, r.rate, r.norm,
                     static_cast<double>(tokens(done)) / std::max(seconds_ - said_seconds_, 1e-9),
                     far != nullptr ? far_text(far->report()) : ""));
    said_steps_ = std::ssize(report_.steps);
    said_seconds_ = seconds_;
    since_line_ = Stopwatch();
  }

  void pause(std::int64_t step) {
    const std::int64_t windows = std::max<std::int64_t>(1, kValidationTokens / o_.length);
    const Stopwatch watch;
    report_.validations.push_back({step, checked([&] { return trainer_.validate(windows); })});
    log_validation(report_.validations.back(), watch.seconds());
    const double loss = report_.validations.back().loss;
    say_(fmt::format("step {}: validation loss {:.4f}, perplexity {:.2f}", step, loss,
                     std::exp(loss)));
    save(step);
  }

  void save(std::int64_t step) {
    if (o_.save.empty() || step == saved_) return;
    checked([&] {
      trainer_.save(o_.save, options_text(o_));
      return 0;
    });
    saved_ = step;
  }

  void end_early(std::int64_t step, int signal) {
    report_.signal = signal;
    save(step);
    say_(fmt::format("stopped by {} after step {} of {}; {}", name_of_signal(signal), step,
                     o_.steps,
                     o_.save.empty() ? "nothing is kept without --save"
                                     : fmt::format("--resume '{}' goes on from there", o_.save)));
  }

  const RunOptions& o_;
  Trainer& trainer_;
  RunReport& report_;
  RunLog& log_;
  const Say& say_;
  const std::int64_t tokens_before_;
  std::size_t logged_ = 0;  // of the report's steps
  double seconds_ = 0.0;    // of steps
  Stopwatch since_line_;
  std::int64_t saved_ = -1;  // the step that --save has, written by this run
  std::int64_t said_steps_ = 0;
  double said_seconds_ = 0.0;
};

void say_device(const DeviceChoice& choice, const Say& say) {
  if (choice.kind == DeviceKind::cuda) {
    ContextOptions options;
    options.device = DeviceKind::cuda;
    const Context context(options);
    const DeviceStatus status = device_status(context);
    say(fmt::format("device: {}, {} free of {}", status.name, format_bytes(status.free_bytes),
                    format_bytes(status.total_bytes)));
  } else if (!choice.reason.empty()) {
    say(fmt::format("device: CPU: {}", choice.reason));
  }
}

std::string memory_line(const TrainMemory& memory) {
  std::string list;
  for (const MemoryItem& item : memory.device)
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", item.name, format_bytes(item.bytes));
  return fmt::format("GPU memory: {} in all: {}", format_bytes(total_bytes(memory.device)), list);
}

// On the CPU after all where nobody asked for the GPU and it lacks a library or a kernel.
std::unique_ptr<Trainer> make_trainer(const RunOptions& options, const DeviceChoice& choice,
                                      const Data& data, RunReport& report, const Say& say) {
  TrainOptions train = options.train_options();
  report.cpu_reason = choice.reason;
  if (choice.kind == DeviceKind::cuda) {
    train.device = DeviceKind::cuda;
    try {
      auto trainer = std::make_unique<Trainer>(data.model, train, data.train, data.valid);
      report.device = DeviceKind::cuda;
      report.device_name = trainer->device_name();
      return trainer;
    } catch (const Unsupported& error) {
      if (options.device == DeviceWish::cuda) throw;
      report.cpu_reason = error.what();
      say(fmt::format("device: CPU after all: {}", report.cpu_reason));
    }
    train.device = DeviceKind::cpu;
  }
  return std::make_unique<Trainer>(data.model, train, data.train, data.valid);
}

// The log that a resumed run goes on from: its own, if it has been told which, or that of the
// checkpoint.
std::string log_before(const RunOptions& o) {
  if (o.resume.empty()) return {};
  std::error_code error;
  return !o.log.empty() && std::filesystem::exists(o.log, error) ? o.log : log_of(o.resume);
}

Json log_header(const RunOptions& o, const Trainer& trainer, const RunReport& report) {
  const auto program = Json::parse(trainer.program().report_json());
  const Json& after = program["after"];
  Json timeline = Json::array();
  for (const auto& at : after["timeline"]) timeline.push_back(at["bytes"]);
  const ModelSizes& model = report.model;
  return {{"kind", "run"},
          {"format", kLogFormat},
          {"logitless", version()},
          {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"first_step", report.first_step},
          {"steps", o.steps},
          {"tokens_per_step", o.batch * o.accumulate * o.length},
          {"model",
           {{"type", report.type},
            {"parameters", report.parameters},
            {"vocab", model.vocab},
            {"context", model.context},
            {"dim", model.dim},
            {"heads", model.heads},
            {"layers", model.layers},
            {"dtype", name_of(model.activations)}}},
          {"options", Json::parse(options_text(o))},
          {"train_tokens", report.train_tokens},
          {"held_out_tokens", report.valid_tokens},
          {"device", report.device == DeviceKind::cuda
                         ? report.device_name
                         : fmt::format("CPU, {} threads", report.threads)},
          {"far_refusal", trainer.far_refusal()},
          {"memory", to_json(report.memory)},
          {"program",
           {{"timeline", timeline},
            {"at_peak", after["at_peak"]},
            {"regions", program["regions"]},
            {"heads", program["heads"]}}}};
}

}  // namespace

RunReport run_training(const RunOptions& options, const Say& say) {
  check_files(options);
  const DeviceChoice choice = choose_device(options, gpu_missing());
  if (!options.epilogues && choice.kind == DeviceKind::cpu)
    throw InvalidArgument("--no-epilogues: is of a GPU; this run would be on the CPU");
  say_device(choice, say);
  const Data data = options.has_shards() ? shards(options) : text(options, say);
  RunReport report;
  report.type = data.model->type();
  report.model = data.model->sizes();
  report.train_tokens = data.train.tokens();
  report.valid_tokens = data.valid.tokens();
  Stopwatch compiling;
  const std::unique_ptr<Trainer> made = make_trainer(options, choice, data, report, say);
  Trainer& trainer = *made;
  report.compile_seconds = compiling.seconds();
  report.parameters = trainer.parameter_count();
  report.threads = trainer.threads();
  report.memory = trainer.memory();
  report.explain = trainer.program().explain();
  say(fmt::format("{} parameters, {} tokens to train on, {} held out; compiled in {:.2f} s for {}",
                  report.parameters, report.train_tokens, report.valid_tokens,
                  report.compile_seconds,
                  report.device == DeviceKind::cuda ? report.device_name
                                                    : fmt::format("{} threads", report.threads)));
  say(fmt::format("arena {}, without chunks {}", format_bytes(report.memory.arena),
                  format_bytes(report.memory.unchunked_arena)));
  if (!report.memory.device.empty()) say(memory_line(report.memory));
  if (const FarFieldHead* far = trainer.far_field(); far != nullptr) {
    say(fmt::format(
        "far field: workspace {} beside the arena; orders take {}more while they are made",
        format_bytes(report.memory.far_workspace),
        report.memory.device.empty() ? "a copy of the head's weights and " : ""));
  } else if (!trainer.far_refusal().empty()) {
    say(fmt::format("far field: every step is dense: {}", trainer.far_refusal()));
  }
  if (options.budget > 0 && report.memory.arena > options.budget) {
    throw InvalidArgument(fmt::format("--budget: a step takes {} or more, got {}",
                                      format_bytes(report.memory.arena),
                                      format_bytes(options.budget)));
  }
  if (!options.init.empty()) trainer.import_weights(options.init);
  if (!options.resume.empty()) {
    trainer.resume(options.resume);
    say(fmt::format("going on from step {} of {}", trainer.steps_done(), options.steps));
    if (trainer.steps_done() > options.steps) {
      throw InvalidArgument(fmt::format("--steps: the checkpoint has done {}, got {}",
                                        trainer.steps_done(), options.steps));
    }
  }
  report.first_step = trainer.steps_done();
  RunLog log(options.log_path(), log_before(options), say);
  if (log.wanted()) log.begin(report.first_step, log_header(options, trainer, report));
  Loop(options, trainer, report, log, say).run();
  report.memory = trainer.memory();
  report.far_refusal = trainer.far_refusal();
  if (const FarFieldHead* far = trainer.far_field(); far != nullptr)
    report.far_field = far->report();
  if (report.signal != 0) return report;
  if (!options.hugging_face.empty()) {
    trainer.export_weights(options.hugging_face, options.export_options);
    const Tokenizer* words = data.tokenizer ? &*data.tokenizer : nullptr;
    save_hugging_face_folder(options.hugging_face, *data.model, options.export_options.dtype,
                             words);
  }
  if (options.sample > 0) write_sample(options, data, trainer, report);
  return report;
}

}  // namespace logitless::train
