// logitless train: compiles and trains a GPT-2, Llama or Qwen of any size, on the CPU or a GPU.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>

#include "cli/commands.h"
#include "cli/output.h"
#include "train/model/hugging_face.h"
#include "train/ranks/launched_rank.h"
#include "train/ranks/process_rank.h"
#include "train/run/bounds.h"
#include "train/run/log.h"
#include "train/run/run.h"
#include "train/run/stop_signals.h"

namespace logitless::cli {
namespace {

constexpr std::int64_t kGpt2Vocab = 50257;  // vocabulary of llm.c's GPT-2 files

struct TrainCommand {
  train::RunOptions options;
  std::int64_t threads = 0;
  std::int64_t seed = 1;
  bool no_chunk = false;
  bool no_head_engine = false;
  bool no_epilogues = false;
  bool no_shard_head = false;
  bool json = false;

  void add(Options& command);
  void run(const std::set<std::string>& given);

 private:
  // `process`: the rank of a launched run; null: this process trains by itself. Returns the number
  // of the signal that stopped it, or 0.
  int train(std::set<std::string> given, train::ProcessRank* process);
  void add_model(Options& command);
  void add_data(Options& command);
  void add_training(Options& command);
  void add_machine(Options& command);
  void add_files(Options& command);
};

// Adds options with the names and bounds of train/bounds.h.
Option add_real(Options& command, const std::string& name, double& value,
                const std::string& description) {
  const train::RealBounds& bounds = train::real_bounds(name);
  return command.add_number("--" + name, value, description).check([&](const std::string& text) {
    return bounds.allow(std::strtod(text.c_str(), nullptr))
               ? ""
               : fmt::format("{}, got '{}'", bounds.expected(), text);
  });
}
Option add_whole(Options& command, const std::string& name, std::int64_t& value,
                 const std::string& description) {
  const train::WholeBounds& bounds = train::whole_bounds(name);
  return command.add_integer("--" + name, value, bounds.least, bounds.most, description);
}

// Returns the log's memory entry, with the peak of this process.
Json memory_json(const train::TrainMemory& memory) {
  Json json = train::to_json(memory);
  json["process_peak_bytes"] = process_peak_bytes();
  return json;
}

Json to_json(const train::RunReport& report) {
  Json steps = Json::array();
  for (std::size_t i = 0; i < report.steps.size(); ++i) {
    const train::StepResult& step = report.steps[i];
    steps.push_back({{"step", report.first_step + static_cast<std::int64_t>(i) + 1},
                     {"loss", step.loss},
                     {"lr", step.rate},
                     {"grad_norm", step.norm}});
  }
  Json validations = Json::array();
  for (const auto& v : report.validations) {
    validations.push_back({{"step", v.step}, {"loss", v.loss}, {"perplexity", std::exp(v.loss)}});
  }
  const train::ModelSizes& model = report.model;
  return {{"model",
           {{"type", report.type},
            {"vocab", model.vocab},
            {"context", model.context},
            {"dim", model.dim},
            {"heads", model.heads},
            {"layers", model.layers},
            {"untied", !model.tied_head},
            {"dtype", name_of(model.activations)},
            {"parameters", report.parameters}}},
          {"train_tokens", report.train_tokens},
          {"held_out_tokens", report.valid_tokens},
          {"device",
           {{"kind", report.device == DeviceKind::cuda ? "cuda" : "cpu"},
            {"name", report.device_name},
            {"cpu_reason", report.cpu_reason}}},
          {"threads", report.threads},
          {"ranks", report.ranks},
          {"steps", steps},
          {"step_seconds", report.seconds},
          {"validations", validations},
          {"tokens_per_second", report.tokens_per_second},
          {"compile_seconds", report.compile_seconds},
          {"memory", memory_json(report.memory)},
          {"far_field", report.far_field ? train::to_json(*report.far_field) : Json(nullptr)},
          {"far_refusal", report.far_refusal},
          {"stopped_by", report.signal != 0 ? Json(train::name_of_signal(report.signal)) : nullptr},
          {"prompt", report.prompt},
          {"sample", report.sample},
          {"explain", report.explain}};
}

std::string to_text(const train::RunReport& report) {
  Facts facts;
  const train::TrainMemory& memory = report.memory;
  facts.add("arena of a step", format_bytes(memory.arena));
  facts.add("  without chunks", format_bytes(memory.unchunked_arena));
  facts.add("parameters",
            fmt::format("{}, {}", report.parameters, format_bytes(memory.parameters)));
  facts.add("gradients", format_bytes(memory.gradients));
  facts.add("moments", format_bytes(memory.moments));
  if (memory.tables > 0) facts.add("tables of positions", format_bytes(memory.tables));
  if (report.far_field) {
    facts.add("far field's workspace", format_bytes(memory.far_workspace));
    facts.add("  at most, with copies for orders", format_bytes(memory.far_peak));
  }
  if (!memory.device.empty()) {
    facts.add("GPU memory, in all", format_bytes(train::total_bytes(memory.device)));
    facts.add("  by its driver",
              format_bytes(memory.device_taken -
                           std::min(memory.device_taken, memory.device_taken_before)));
  }
  facts.add("peak of the process", format_bytes(process_peak_bytes()));
  facts.add("speed", fmt::format("{:.0f} tokens/s", report.tokens_per_second));
  if (report.far_field) {
    const FarFieldReport& far = *report.far_field;
    facts.add("far field",
              fmt::format("{} of {} steps of the head dense, {} of them done again after an audit",
                          far.dense_steps, far.steps, far.repeated_steps));
    facts.add("  orders", fmt::format("{}", far.refreshes));
    facts.add("  tiles selected", fmt::format("{:.1f} %", 100.0 * far.mean_selected));
    facts.add("  last error", far.audits > 0 ? fmt::format("{:.2g}; worst accepted {:.2g}",
                                                           far.last_error, far.worst_accepted_error)
                                             : "not audited yet");
  } else if (!report.far_refusal.empty()) {
    facts.add("far field", "every step was dense");
  }
  if (!report.validations.empty()) {
    const double loss = report.validations.back().loss;
    facts.add("validation",
              fmt::format("loss {:.4f} nats a token, perplexity {:.2f}", loss, std::exp(loss)));
  }
  std::string text = "\n" + facts.text();
  if (!report.sample.empty())
    text += fmt::format("\nPrompt\n{}\n\nContinuation\n{}\n", report.prompt, report.sample);
  return text;
}

void TrainCommand::add_model(Options& command) {
  const auto sizes = [&](const std::string& name, std::int64_t& value, const std::string& text) {
    add_whole(command, name, value, text).group("Model");
  };
  command
      .add_parsed(
          "--model", "NAME|PATH",
          [this](const std::string& text) {
            const train::ModelConfig found = train::find_model(text);
            if (const auto* llama = std::get_if<train::LlamaConfig>(&found)) options.llama = *llama;
            options.model = text;
          },
          "gpt2, llama-tiny, llama-3.2-1b, ..., a config.json or its folder; default: the sizes "
          "below")
      .group("Model");
  sizes("vocab", options.vocab,
        fmt::format("size of the vocabulary (default {}; {} with --data)", options.vocab,
                    kGpt2Vocab));
  sizes("dim", options.dim, fmt::format("of the residual stream (default {})", options.dim));
  sizes("heads", options.heads,
        fmt::format("of attention, a divisor of dim (default {})", options.heads));
  sizes("layers", options.layers, fmt::format("blocks (default {})", options.layers));
  sizes("context", options.context, "positions there are (default: --length)");
  command.add_flag("--untied", options.untied, "the head has a matrix of its own").group("Model");
  command
      .add_parsed(
          "--dtype", "f32|bf16",
          [this](const std::string& text) {
            if (text != "f32" && text != "bf16") {
              throw UsageError(fmt::format("expected f32 or bf16, got '{}'", text));
            }
            options.dtype = parse_dtype(text);
          },
          "of products and activations; weights stay f32 (default f32)")
      .group("Model");
}

void TrainCommand::add_data(Options& command) {
  command
      .add_texts("--data", options.data, "token files of llm.c (.bin, of u16 or u32) to train on")
      .placeholder("FILE")
      .group("Data");
  command
      .add_texts("--val", options.val,
                 "token files to validate on (default: the last 2 % of --data)")
      .placeholder("FILE")
      .group("Data");
  command
      .add_texts("--text", options.text,
                 "files and folders, with a tokenizer trained on them (default: system headers)")
      .placeholder("PATH")
      .group("Data");
  command
      .add_parsed(
          "--cache", "FOLDER", [this](const std::string& text) { options.cache = text; },
          "of tokenizers and token ids (default: $XDG_CACHE_HOME/logitless or ~/.cache/logitless)")
      .group("Data");
}

void TrainCommand::add_training(Options& command) {
  constexpr const char* kGroup = "Training";
  const auto count = [&](const std::string& name, std::int64_t& value, const std::string& text) {
    add_whole(command, name, value, text).group(kGroup);
  };
  const auto number = [&](const std::string& name, double& value, const std::string& text) {
    add_real(command, name, value, text).group(kGroup);
  };
  count("batch", options.batch, fmt::format("rows of a step (default {})", options.batch));
  count("length", options.length, fmt::format("tokens of a row (default {})", options.length));
  count("steps", options.steps, fmt::format("steps (default {})", options.steps));
  count("accumulate", options.accumulate, "batches whose gradients make one step (default 1)");
  number("lr", options.rate, fmt::format("highest learning rate (default {})", options.rate));
  count("warmup", options.warmup, "steps until it is reached (default: a twentieth of all)");
  number("min-lr", options.floor, "that of the last step (default: a tenth of --lr)");
  number("weight-decay", options.weight_decay,
         fmt::format("of matrices (default {})", options.weight_decay));
  number("clip", options.clip,
         fmt::format("most norm of the gradients; 0: any (default {})", options.clip));
  count("seed", seed, "of starting values, order and sample (default 1)");
  count("eval-every", options.eval_every,
        "steps between validations, which also save (default: a quarter of all)");
  number("far-field", options.far_field,
         "gradients by the far field, where audits keep this relative error (0.01)");
  command.add_flag("--far-both", options.far_both, "with --far-field: the loss, too").group(kGroup);
}

void TrainCommand::add_machine(Options& command) {
  constexpr const char* kGroup = "Machine";
  add_whole(
      command, "ranks", options.ranks,
      "GPUs, or parts of the CPU, that share steps of --batch each (default 1, or torchrun's)")
      .group(kGroup);
  command
      .add_flag("--shard-head", options.shard_head,
                "each of --ranks has a shard of the vocabulary of an --untied head")
      .group(kGroup);
  command.add_flag("--no-shard-head", no_shard_head, "with --resume: none has, from here on")
      .group(kGroup);
  command
      .add_parsed(
          "--device", "cpu|cuda",
          [this](const std::string& text) { options.device = train::parse_device(text); },
          "where to train (default: the GPU, where there is one that serves the options given)")
      .group(kGroup);
  command
      .add_parsed(
          "--budget", "BYTES",
          [this](const std::string& text) { options.budget = parse_budget(text); },
          "memory beside parameters and gradients, such as 512MiB (default: what costs no time)")
      .group(kGroup);
  command.add_flag("--no-chunk", no_chunk, "run the program without loops over chunks")
      .group(kGroup);
  command
      .add_flag("--no-head-engine", no_head_engine,
                "a loop over the loss as well, instead of the head engine")
      .group(kGroup);
  command
      .add_flag("--no-epilogues", no_epilogues,
                "products on a GPU that but multiply: loops do the rest")
      .group(kGroup);
  command
      .add_integer("--threads", threads, 0, kMostThreads,
                   "threads; 0 (default): OMP_NUM_THREADS, or all cores")
      .group(kGroup);
}

void TrainCommand::add_files(Options& command) {
  const auto file = [&](const std::string& name, std::string& value, const std::string& text) {
    command
        .add_parsed(
            name, "FILE",
            [&value](const std::string& path) {
              if (path.empty()) throw UsageError("expected the name of a file, got ''");
              value = path;
            },
            text)
        .group("Files");
  };
  file("--resume", options.resume, "checkpoint to go on from; options not given are its own");
  file("--save", options.save,
       "checkpoint to write at validations and at the end; see --far-field");
  file("--log", options.log,
       "JSON lines of the steps, for `logitless report` (default: beside --save, run.log.jsonl)");
  command
      .add_parsed(
          "--init", "PATH",
          [this](const std::string& path) { options.init = train::weights_path(path); },
          "Hugging Face's folder, model.safetensors or its index to start from")
      .group("Files");
  command
      .add_parsed(
          "--export", "PATH",
          [this](const std::string& path) { options.hugging_face = train::export_path(path); },
          "folder, made if need be, or FILE.safetensors to write at the end, with config.json")
      .group("Files");
  command
      .add_parsed(
          "--export-dtype", "f32|bf16|f16",
          [this](const std::string& text) {
            const DType dtype = parse_dtype(text);
            if (!is_head_float(dtype))
              throw UsageError(fmt::format("expected f32, bf16 or f16, got '{}'", text));
            options.export_options.dtype = dtype;
          },
          "of the weights in it (default f32)")
      .group("Files");
  command
      .add_parsed(
          "--shard-size", "BYTES",
          [this](const std::string& text) {
            options.export_options.shard_bytes = parse_budget(text);
          },
          "of a file of --export; more make shards and an index (default 5 GB)")
      .group("Files");
  add_whole(command, "sample", options.sample,
            fmt::format("tokens to write at the end (default {})", options.sample))
      .group("Sample");
  command
      .add_parsed(
          "--prompt", "TEXT", [this](const std::string& text) { options.prompt = text; },
          "what they follow (default: the first held-out tokens)")
      .group("Sample");
  add_real(command, "temperature", options.temperature,
           fmt::format("0: the likeliest token (default {})", options.temperature))
      .group("Sample");
  add_whole(command, "top-k", options.top_k,
            fmt::format("tokens to choose from; 0: all (default {})", options.top_k))
      .group("Sample");
}

void TrainCommand::add(Options& command) {
  add_model(command);
  add_data(command);
  add_training(command);
  add_machine(command);
  add_files(command);
  command.add_flag("--json", json, "print one JSON object; progress goes to standard error");
}

train::CheckpointHeader checkpoint_header(const std::string& path) {
  try {
    return train::read_checkpoint_header(path);
  } catch (const InvalidArgument& e) {
    throw UsageError(fmt::format("--resume: {}", e.what()));
  }
}

void TrainCommand::run(const std::set<std::string>& given) {
  int signal = 0;
  if (const auto launched = train::launched_rank()) {
    train::ProcessRank process(*launched, [](std::string_view text) {
      print_note(fmt::format("logitless train: {}\n", text));
    });
    process.run([&] { signal = train(given, &process); });
  } else {
    signal = train(given, nullptr);
  }
  if (signal != 0) throw Stopped{signal};
}

int TrainCommand::train(std::set<std::string> given, train::ProcessRank* process) {
  const bool first = process == nullptr || process->rank() == 0;
  if (process != nullptr) {
    if (!given.insert("ranks").second && options.ranks != process->size())
      throw UsageError(fmt::format("--ranks: expected {}, as {} has it, or none, got {}",
                                   process->size(), process->launched().output_of, options.ranks));
    options.ranks = process->size();
  }
  options.threads = static_cast<int>(threads);
  options.seed = static_cast<std::uint64_t>(seed);
  options.chunk = !no_chunk;
  options.head_engine = !no_head_engine;
  options.epilogues = !no_epilogues;
  if (no_shard_head && !given.insert("shard-head").second)
    throw UsageError("--no-shard-head: cannot be given beside --shard-head");
  if (no_shard_head && options.resume.empty())
    throw UsageError("--no-shard-head: is of --resume, which was not given");
  if (options.has_shards() && given.count("vocab") == 0) options.vocab = kGpt2Vocab;
  train::check_given(options, given);
  for (const std::string& path : options.data) check_exists("--data", path);
  for (const std::string& path : options.val) check_exists("--val", path);
  check_exists("--resume", options.resume);
  check_exists("--init", options.init);
  if (first) {
    check_writable("--save", options.save);
    check_writable("--log", options.log);
  }
  for (const char* name : {"export-dtype", "shard-size"}) {
    if (given.count(name) > 0 && options.hugging_face.empty())
      throw UsageError(fmt::format("--{}: is of --export, which was not given", name));
  }
  if (!options.resume.empty()) {
    options = train::with_checkpoint(options, given, checkpoint_header(options.resume));
  }
  if (!options.init.empty() && options.model.empty())
    options = train::with_model_file(options, given);
  train::check_options(options);
  const auto print_line = [this](std::string_view line) {
    if (json) {
      print_note(fmt::format("{}\n", line));
    } else {
      print(fmt::format("{}\n", line));
    }
  };
  const train::RunReport report = train::run_training(options, print_line, process);
  if (first && json) {
    print_json(to_json(report));
  } else if (first) {
    print(to_text(report));
  }
  if (first && !report.save_failure.empty())
    throw DeviceError(fmt::format("--save: {}", report.save_failure));
  return report.signal;
}

}  // namespace

Command add_train(CommandLine& program) {
  Options sub =
      program.add_command("train", "Train a GPT-2, Llama or Qwen of any size, on the CPU or a GPU");
  auto args = std::make_shared<TrainCommand>();
  args->add(sub);
  sub.footer(
      "The whole step is one compiled program: the loss, and the memory of its logits, run in "
      "chunks. SIGINT or SIGTERM ends\n"
      "a run after the step it is at, with --save written and exit status 128 + the signal's "
      "number; a second one at once.\n\n"
      "Examples:\n"
      "  logitless train                                      # a small GPT on the system's "
      "headers\n"
      "  logitless train --vocab 65536 --far-field 0.01       # gradients of fewer entries, to an "
      "error\n"
      "  logitless train --text ~/notes --steps 1000 --save run.safetensors\n"
      "  logitless train --model gpt2 --init model.safetensors --data train.bin --lr 3e-5\n"
      "  logitless train --init Llama-3.2-1B --data train.bin --dtype bf16 --export out");
  return {sub, [args, sub] { args->run(sub.given()); }};
}

bool speaks_for_run(const std::string& command) {
  if (command != "train") return true;
  try {
    const auto launched = train::launched_rank();
    return !launched || launched->rank == 0;
  } catch (const InvalidArgument&) {
    return true;
  }
}

void fail_ranks(const std::string& command, const std::string& reason) {
  if (command == "train") train::fail_launched_rank(reason);
}

}  // namespace logitless::cli
