#include "train/run/run.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>

#include "logitless/context.h"
#include "logitless/device.h"
#include "logitless/error.h"
#include "logitless/parallel.h"
#include "logitless/version.h"
#include "train/hash.h"
#include "train/model/hugging_face.h"
#include "train/ranks/process_rank.h"
#include "train/run/data.h"
#include "train/run/files.h"
#include "train/run/log.h"
#include "train/run/loop.h"
#include "train/run/ranks.h"
#include "train/run/stopwatch.h"

namespace logitless::train {
namespace {

std::string written(const std::optional<Tokenizer>& tokenizer,
                    const std::vector<std::int64_t>& vocab_ids) {
  if (!tokenizer) return fmt::format("{}", fmt::join(vocab_ids, " "));
  return tokenizer->decode({vocab_ids.begin(), vocab_ids.end()});
}

void write_sample(const RunOptions& o, const RunData& data, Trainer& trainer, RunReport& report) {
  constexpr std::ptrdiff_t kPrompt = 8;
  std::vector<std::int64_t> prompt;
  if (o.prompt.empty()) {
    const std::vector<std::int64_t> window = data.valid.sequential_batch(0, 1).tokens;
    prompt.assign(window.begin(),
                  window.begin() + std::min<std::ptrdiff_t>(kPrompt, std::ssize(window)));
  } else {
    std::vector<std::int32_t> vocab_ids = data.tokenizer->before_text();
    data.tokenizer->encode(o.prompt, vocab_ids);
    prompt.assign(vocab_ids.begin(), vocab_ids.end());
  }
  SampleOptions sample;
  sample.temperature = o.temperature;
  sample.top_k = o.top_k;
  sample.vocab_count = data.tokenizer ? data.tokenizer->vocab() : 0;
  sample.seed = o.seed;
  report.prompt = written(data.tokenizer, prompt);
  report.sample = written(data.tokenizer, trainer.generate(prompt, o.sample, sample));
}

// Returns the device of the run; throws InvalidArgument where that is not possible.
DeviceChoice device_of(const RunOptions& options, const ProcessRank* process) {
  const std::string missing =
      process != nullptr ? process->gpu_missing() : ranks_missing(static_cast<int>(options.ranks));
  // With a GPU present, a run on the CPU would surprise the user.
  if (options.device == DeviceWish::automatic && !missing.empty() && gpu_missing().empty())
    throw InvalidArgument(fmt::format("--ranks: {}", missing));
  const DeviceChoice choice = choose_device(options, missing);
  if (!options.epilogues && choice.kind == DeviceKind::cpu)
    throw InvalidArgument("--no-epilogues: is of a GPU; this run would be on the CPU");
  return choice;
}

void print_device(const DeviceChoice& choice, int gpu, const Print& print) {
  if (choice.kind == DeviceKind::cuda) {
    use_gpu(gpu);
    ContextOptions options;
    options.device = DeviceKind::cuda;
    options.device_index = gpu;
    const Context context(options);
    const DeviceStatus status = device_status(context);
    print(fmt::format("device: {}, {} free of {}", status.name, format_bytes(status.free_bytes),
                      format_bytes(status.total_bytes)));
  } else if (!choice.reason.empty()) {
    print(fmt::format("device: CPU: {}", choice.reason));
  }
}

std::string memory_line(const TrainMemory& memory) {
  std::string list;
  for (const MemoryItem& item : memory.device)
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", item.name, format_bytes(item.bytes));
  return fmt::format("GPU memory: {} in all: {}", format_bytes(total_bytes(memory.device)), list);
}

// The resources of one rank of a run.
struct Seat {
  std::shared_ptr<Communicator> ranks = {};  // null: a single rank
  int gpu = 0;
  bool own_process = true;  // it does not share the process's cores and signals with other ranks
  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
};

TrainOptions options_of(const RunOptions& options, const Seat& seat) {
  TrainOptions train = options.train_options();
  if (seat.ranks == nullptr) return train;
  train.ranks = seat.ranks;
  train.gpu = seat.gpu;
  if (seat.own_process) return train;
  // Ranks that are threads share the cores.
  const int threads = options.threads > 0 ? options.threads : default_threads();
  train.threads = std::max(1, threads / seat.ranks->size());
  return train;
}

// Makes the trainer. Falls back to the CPU where the GPU was chosen automatically and lacks a
// library or a kernel.
std::unique_ptr<Trainer> make_trainer(const RunOptions& options, const DeviceChoice& choice,
                                      const RunData& data, const Seat& seat, RunReport& report,
                                      const Print& print) {
  TrainOptions train = options_of(options, seat);
  report.cpu_reason = choice.reason;
  if (choice.kind == DeviceKind::cuda) {
    TrainOptions on_gpu = train;
    on_gpu.device = DeviceKind::cuda;
    on_gpu.threads = 0;
    try {
      auto trainer = std::make_unique<Trainer>(data.model, on_gpu, data.train, data.valid);
      report.device = DeviceKind::cuda;
      report.device_name = trainer->device_name();
      if (trainer->ranks() > 1)
        report.device_name = fmt::format("{} x {}", trainer->ranks(), report.device_name);
      return trainer;
    } catch (const Unsupported& error) {
      if (options.device == DeviceWish::cuda || seat.ranks != nullptr) throw;
      report.cpu_reason = error.what();
      print(fmt::format("device: CPU after all: {}", report.cpu_reason));
    }
  }
  return std::make_unique<Trainer>(data.model, train, data.train, data.valid);
}

// Returns the log that a resumed run continues: the one named in its options, or that of the
// checkpoint.
std::string log_before(const RunOptions& o) {
  if (o.resume.empty()) return {};
  std::error_code error;
  return !o.log.empty() && std::filesystem::exists(o.log, error) ? o.log : log_of(o.resume);
}

std::string threads_text(const RunReport& report) {
  const std::string threads =
      fmt::format("{} thread{}", report.threads, report.threads == 1 ? "" : "s");
  return report.ranks == 1 ? threads : fmt::format("{} ranks of {}", report.ranks, threads);
}

Json log_header(const RunOptions& o, const Trainer& trainer, const RunReport& report) {
  auto options = Json::parse(options_text(o.effective(report.model)));
  options.erase(kOptionsFolder);  // of no use on the page
  const auto program = Json::parse(trainer.program().report_json());
  const Json& after = program["after"];
  Json timeline = Json::array();
  for (const auto& at : after["timeline"]) timeline.push_back(at["bytes"]);
  const ModelSizes& model = report.model;
  return {
      {"kind", "run"},
      {"format", kLogFormat},
      {"logitless", version()},
      {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
      {"first_step", report.first_step},
      {"steps", o.steps},
      {"tokens_per_step", o.tokens_of_step()},
      {"ranks", o.ranks},
      {"model",
       {{"type", report.type},
        {"parameters", report.parameters},
        {"vocab", model.vocab},
        {"context", model.context},
        {"dim", model.dim},
        {"heads", model.heads},
        {"layers", model.layers},
        {"dtype", name_of(model.activations)}}},
      {"options", options},
      {"train_tokens", report.train_tokens},
      {"held_out_tokens", report.valid_tokens},
      {"device", report.device == DeviceKind::cuda ? report.device_name
                                                   : fmt::format("CPU, {}", threads_text(report))},
      {"far_refusal", trainer.far_refusal()},
      {"memory", to_json(report.memory)},
      {"program",
       {{"timeline", timeline},
        {"at_peak", after["at_peak"]},
        {"regions", program["regions"]},
        {"heads", program["heads"]}}}};
}

// Runs one rank. Rank 0 prints, logs and writes files; the others run the same steps.
RunReport run_rank(const RunOptions& options, const DeviceChoice& choice, const RunData& data,
                   const Seat& seat, const Print& print_of_first) {
  const bool first = seat.rank() == 0;
  const Print print = first ? print_of_first : [](std::string_view) {};
  RunReport report;
  report.type = data.model->type();
  report.model = data.model->sizes();
  report.train_tokens = data.train.tokens();
  report.valid_tokens = data.valid.tokens();
  Stopwatch compiling;
  const std::unique_ptr<Trainer> made = make_trainer(options, choice, data, seat, report, print);
  Trainer& trainer = *made;
  report.compile_seconds = compiling.seconds();
  report.parameters = trainer.parameter_count();
  report.threads = trainer.threads();
  report.ranks = trainer.ranks();
  report.memory = trainer.memory();
  report.explain = trainer.program().explain();
  print(fmt::format(
      "{} parameters, {} tokens to train on, {} held out; compiled in {:.2f} s for {}",
      report.parameters, report.train_tokens, report.valid_tokens, report.compile_seconds,
      report.device == DeviceKind::cuda ? report.device_name : threads_text(report)));
  print(fmt::format("arena {}, without chunks {}", format_bytes(report.memory.arena),
                    format_bytes(report.memory.unchunked_arena)));
  if (!report.memory.device.empty()) print(memory_line(report.memory));
  if (const FarFieldHead* far = trainer.far_field(); far != nullptr) {
    print(fmt::format(
        "far field: workspace {} beside the arena; orders take {}more while they are made",
        format_bytes(report.memory.far_workspace),
        report.memory.device.empty() ? "a copy of the head's weights and " : ""));
  } else if (!trainer.far_refusal().empty()) {
    print(fmt::format("far field: every step is dense: {}", trainer.far_refusal()));
  }
  if (options.budget > 0 && report.memory.arena > options.budget) {
    throw InvalidArgument(fmt::format("--budget: a step takes {} or more, got {}",
                                      format_bytes(report.memory.arena),
                                      format_bytes(options.budget)));
  }
  if (!options.init.empty()) trainer.import_weights(options.init);
  if (!options.resume.empty()) {
    trainer.resume(options.resume);
    print(fmt::format("going on from step {} of {}", trainer.steps_done(), options.steps));
    if (trainer.steps_done() > options.steps) {
      throw InvalidArgument(fmt::format("--steps: the checkpoint has done {}, got {}",
                                        trainer.steps_done(), options.steps));
    }
  }
  report.first_step = trainer.steps_done();
  RunLog log(first ? options.log_path() : "", first ? log_before(options) : "", print);
  if (log.wanted()) log.begin(report.first_step, log_header(options, trainer, report));
  run_steps(options, first || seat.own_process, trainer, report, log, print);
  report.memory = trainer.memory();
  report.far_refusal = trainer.far_refusal();
  if (const FarFieldHead* far = trainer.far_field(); far != nullptr)
    report.far_field = far->report();
  if (report.signal != 0) return report;
  if (!options.hugging_face.empty()) {
    const TensorSet& values = trainer.values();
    if (first) {
      export_model(options.hugging_face, *data.model, values, options.export_options,
                   data.tokenizer ? &*data.tokenizer : nullptr);
    }
  }
  if ((first || trainer.shards_head()) && options.sample > 0)
    write_sample(options, data, trainer, report);
  return report;
}

RunReport run_threads(const RunOptions& options, const DeviceChoice& choice, const RunData& data,
                      const Print& print) {
  RunReport report;
  run_on_ranks(static_cast<int>(options.ranks), choice.kind,
               [&](const std::shared_ptr<Communicator>& ranks) {
                 const Seat seat = {ranks, ranks->rank(), false};
                 RunReport own = run_rank(options, choice, data, seat, print);
                 if (ranks->rank() == 0) report = std::move(own);
               });
  return report;
}

RunReport run_process(const RunOptions& options, const Print& print, ProcessRank& process) {
  process.agree(shared_options(options));
  if (process.rank() == 0) check_files(options);
  const DeviceChoice choice = device_of(options, &process);
  process.agree({{"device", choice.kind == DeviceKind::cuda ? "cuda" : "cpu"}});
  print_device(choice, process.gpu(), print);
  std::optional<RunData> data;
  const auto read = [&] { data = read_data(options, print, process.rank() == 0); };
  if (options.has_shards()) {
    read();
  } else {
    process.first_on_rank_0(read);  // it caches the token ids of a text
  }
  process.agree({{"model", data->model->config_text()},
                 {"training data", hex(data->train.key())},
                 {"data held out", hex(data->valid.key())}});
  const Seat seat = {process.communicator(choice.kind), process.gpu(), true};
  return run_rank(options, choice, *data, seat, print);
}

}  // namespace

RunReport run_training(const RunOptions& options, const Print& print, ProcessRank* process) {
  if (process != nullptr)
    return run_process(options, process->rank() == 0 ? print : Print([](std::string_view) {}),
                       *process);
  check_files(options);
  const DeviceChoice choice = device_of(options, nullptr);
  print_device(choice, 0, print);
  const RunData data = read_data(options, print);
  return options.ranks == 1 ? run_rank(options, choice, data, {}, print)
                            : run_threads(options, choice, data, print);
}

}  // namespace logitless::train
