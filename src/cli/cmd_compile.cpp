// logitless compile: compiles a tensor program and reports its memory.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/time_program.h"
#include "logitless/compiler.h"
#include "logitless/device.h"
#include "train/model/hugging_face.h"
#include "train/run/options.h"

namespace logitless::cli {
namespace {

struct CompileCommand {
  std::string file;
  std::string model;
  std::int64_t batch = 0;
  std::int64_t length = 0;
  DType dtype = DType::bf16;
  CompileOptions options;
  std::int64_t threads = 0;
  std::int64_t repeat = 0;
  GpuArgs gpu{.what = "that it is compiled for", .group = "Device"};
  bool profile = false;
  bool no_chunk = false;
  bool no_head_engine = false;
  bool no_epilogues = false;
  bool explain = false;
  bool json = false;
  bool text = false;
  std::string html;
  std::string command_line;

  train::ModelPtr train_model() const;
  Graph graph();
  void choose_device();
  void check(const std::set<std::string>& given) const;
  // Implements --dump-after, which replaces all other output.
  void dump(const Graph& program);
  // Returns the facts of the page: what was compiled, and by which command line.
  ReportFacts about(const CompiledProgram& compiled) const;
  void write_page(const CompiledProgram& compiled, const ProgramTimes& times) const;
  // Returns the memory of a training step of --model, including weights, gradients and moments.
  std::string training_text(const CompiledProgram& compiled) const;
  void run(const std::set<std::string>& given);
};

constexpr std::int64_t kMostDefaultLength = 2048;

std::string contents(const std::string& path) {
  if (path == "-") return {std::istreambuf_iterator<char>(std::cin), {}};
  check_exists("FILE", path);
  std::ifstream in(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (!in) throw DeviceError(fmt::format("{}: cannot be read", path));
  return text;
}

train::ModelPtr CompileCommand::train_model() const {
  train::RunOptions run;
  run.dtype = dtype;
  run.model = model;
  try {
    const train::ModelConfig found = train::find_model(model);
    if (const auto* llama = std::get_if<train::LlamaConfig>(&found)) run.llama = *llama;
    return run.make_model(0);
  } catch (const InvalidArgument& e) {
    throw UsageError(fmt::format("--model: {}", e.what()));
  }
}

Graph CompileCommand::graph() {
  if (model.empty() == file.empty()) throw UsageError("expected FILE or --model, one of them");
  if (model.empty()) {
    if (batch != 0 || length != 0)
      throw UsageError("--batch and --length go with --model; a program's sizes are --size NAME=N");
    return Graph::parse(contents(file), file == "-" ? "standard input" : file);
  }
  if (!options.sizes.empty())
    throw UsageError("--size goes with FILE; the sizes of --model are --batch and --length");
  const train::ModelPtr built = train_model();
  const std::int64_t most = std::min(built->sizes().context, kMostDefaultLength);
  if (batch == 0) batch = 4;
  if (length == 0) length = most;
  return train::build_step(*built, batch, length,
                           gpu.on_gpu ? train::Weights::rounded : train::Weights::masters);
}

// Checks that exactly the symbolic sizes of the program are given.
void check_sizes(const Graph& program, const Bindings& sizes) {
  const std::vector<std::string> wanted = program.symbols();
  std::vector<std::string> missing;
  for (const std::string& name : wanted) {
    if (sizes.find(name) == sizes.end()) missing.push_back(name);
  }
  if (!missing.empty()) {
    throw UsageError(fmt::format("--size: the program's {} {} no value; give --size {}=...",
                                 fmt::join(missing, ", "), missing.size() == 1 ? "has" : "have",
                                 fmt::join(missing, "=... --size ")));
  }
  for (const auto& [name, value] : sizes) {
    if (std::find(wanted.begin(), wanted.end(), name) != wanted.end()) continue;
    throw UsageError(fmt::format("--size: the program has no size {}; {}", name,
                                 wanted.empty()
                                     ? "all of its sizes are numbers"
                                     : fmt::format("it has {}", fmt::join(wanted, ", "))));
  }
}

void CompileCommand::choose_device() {
  if (!gpu.on_gpu) return;
  options.device = gpu.limits();
  if (repeat == 0) return;
  if (const std::string missing = gpu_missing(); !missing.empty())
    throw UsageError(fmt::format("--time: {}", missing));
  const std::int64_t here = capability_here();
  if (options.device.compute_capability != here)
    throw UsageError(
        fmt::format("--time: the GPU here has compute capability {}, got --capability {}", here,
                    gpu.capability));
}

Json profile_json(const std::vector<InstructionTime>& profile) {
  auto list = Json::array();
  for (const InstructionTime& i : profile) {
    list.push_back({{"instructions", i.what},
                    {"first", i.name},
                    {"count", i.count},
                    {"seconds", i.seconds},
                    {"bytes", i.bytes},
                    {"flops", i.flops}});
  }
  return list;
}

std::string profile_table(const std::vector<InstructionTime>& profile) {
  Table table({"instructions", "first", "count", "total ms", "each ms", "rate"}, "<<>>>>");
  InstructionTime all;
  const auto add = [&](const InstructionTime& i) {
    const double of_flops = i.flops / i.seconds / 1e12, of_bytes = i.bytes / i.seconds / 1e9;
    table.add({i.what, i.name, fmt::format("{}", i.count), fmt::format("{:.3f}", i.seconds * 1e3),
               fmt::format("{:.4f}", i.seconds * 1e3 / static_cast<double>(i.count)),
               i.flops > 0.0 ? fmt::format("{:.3g} TFLOP/s", of_flops)
                             : fmt::format("{:.4g} GB/s", of_bytes)});
  };
  for (const InstructionTime& i : profile) {
    add(i);
    all.count += i.count;
    all.seconds += i.seconds;
    all.bytes += i.bytes;
    all.flops += i.flops;
  }
  all.what = "all";
  if (!profile.empty()) add(all);
  return table.text();
}

void CompileCommand::check(const std::set<std::string>& given) const {
  gpu.check(given);
  if (model.empty())
    refuse_given(given, {"dtype"}, "goes with --model; a program has types of its own");
  if (no_chunk) {
    refuse_given(given, {"chunks"}, "cannot be given beside --no-chunk");
    if (options.memory_budget == 0)
      refuse_given(given, {"strict"}, "beside --no-chunk it is of --budget, which was not given");
  }
  if (json)
    refuse_given(given, {"text", "explain"}, "cannot be given beside --json, which is all of it");
  if (profile && repeat == 0) throw UsageError("--profile goes with --time");
  if (no_epilogues && !gpu.on_gpu) throw UsageError("--no-epilogues: is of --device cuda");
  if (!options.dump_after.empty())
    refuse_given(given, {"html", "json", "text", "time", "explain"},
                 "cannot be given beside --dump-after, which stops");
}

void CompileCommand::dump(const Graph& program) {
  bool dumped = false;
  options.dump = [&](std::string_view pass, std::string_view graph_text) {
    dumped = true;
    print(fmt::format("# after {}\n{}", pass, graph_text));
  };
  compile(program, options);
  if (!dumped)
    throw UsageError(
        fmt::format("--dump-after: there is no pass '{}'; `all` shows them", options.dump_after));
}

ReportFacts CompileCommand::about(const CompiledProgram& compiled) const {
  ReportFacts facts = {{"command", command_line}};
  if (!model.empty()) {
    facts.insert(facts.end(), {{"a training step of", model},
                               {"batch", fmt::format("{}", batch)},
                               {"length", fmt::format("{}", length)},
                               {"dtype of activations", std::string(name_of(dtype))}});
    return facts;
  }
  facts.emplace_back("program", file == "-" ? "standard input" : file);
  for (const auto& [name, size] : options.sizes)
    facts.emplace_back("size " + name, fmt::format("{}", size));
  std::set<std::string> dtypes;
  for (const CompiledProgram::Tensor& t : compiled.parameters())
    dtypes.insert(std::string(name_of(t.dtype)));
  facts.emplace_back("dtypes of parameters", fmt::format("{}", fmt::join(dtypes, ", ")));
  return facts;
}

void CompileCommand::write_page(const CompiledProgram& compiled, const ProgramTimes& times) const {
  write_file(html, compiled.report_html(times.profile, about(compiled)));
  const std::string line = fmt::format("wrote {}\n", html);
  if (json || text) {
    print_note(line);
  } else {
    print(line);
  }
}

std::string CompileCommand::training_text(const CompiledProgram& compiled) const {
  std::int64_t weights = 0, rounded = 0;
  for (const train::Parameter& p : train_model()->parameters())
    weights += p.numel() * static_cast<std::int64_t>(sizeof(float));
  for (const CompiledProgram::Tensor& t : compiled.parameters())
    rounded += t.dtype == DType::bf16 ? t.bytes() : 0;
  const auto total = [&](std::size_t arena) {
    return format_bytes(static_cast<std::size_t>(4 * weights + rounded) + arena);
  };
  return fmt::format(
      "training step with AdamW: {} of weights, {}as much of gradients and twice "
      "that of moments: {} in all, {} without loops\n",
      format_bytes(static_cast<std::size_t>(weights)),
      rounded > 0
          ? fmt::format("{} of them in bf16, ", format_bytes(static_cast<std::size_t>(rounded)))
          : std::string(),
      total(compiled.arena_bytes()), total(compiled.unchunked_arena_bytes()));
}

void CompileCommand::run(const std::set<std::string>& given) {
  check(given);
  check_other_file("--html", html, file, "the program");
  check_output("--html", html, train::FileKind::page);
  choose_device();
  const Graph program = graph();
  if (model.empty()) check_sizes(program, options.sizes);
  options.chunk = !no_chunk;
  options.explore = options.chunk && (explain || json || !html.empty());
  options.head_engine = !no_head_engine;
  options.epilogues = !no_epilogues;
  options.threads = static_cast<int>(threads);
  if (!options.dump_after.empty()) return dump(program);
  const CompiledProgram compiled = compile(program, options);
  if (text) print(compiled.text());
  ProgramTimes times;
  if (repeat > 0) {
    const auto time = gpu.on_gpu ? time_program_on_gpu : time_program;
    times = time(program, options, static_cast<int>(repeat), profile || !html.empty());
  }
  if (!html.empty()) write_page(compiled, times);
  if (json) {
    auto report = Json::parse(compiled.report_json());
    if (profile) report["profile"] = profile_json(times.profile);
    print_json(report);
    print_note(times.text);
  } else if (repeat > 0) {
    print(times.text + (profile ? profile_table(times.profile) : ""));
  }
  if (explain || (html.empty() && !text && !json && repeat == 0))
    print(compiled.explain() + (model.empty() ? "" : training_text(compiled)));
}

void parse_size(const std::string& text, Bindings& sizes) {
  const std::size_t at = text.find('=');
  std::size_t used = 0;
  std::int64_t value = -1;
  try {
    if (at != std::string::npos) value = std::stoll(text.substr(at + 1), &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (at == std::string::npos || at == 0 || used != text.size() - at - 1 || value < 0)
    throw UsageError(fmt::format("expected NAME=N, got '{}'", text));
  if (!sizes.emplace(text.substr(0, at), value).second)
    throw UsageError(fmt::format("{} is given twice", text.substr(0, at)));
}

}  // namespace

Command add_compile(CommandLine& program) {
  Options sub = program.add_command(
      "compile",
      "Compile a tensor program: loops over chunks instead of big values, and a memory plan");
  auto args = std::make_shared<CompileCommand>();
  CompileCommand* a = args.get();
  constexpr std::int64_t kMost = INT64_MAX;
  sub.add_text("FILE", args->file,
               "program in the text form of docs/reference/ir.md, or - for standard input")
      .group("Program");
  sub.add_text("--model", args->model,
               "a training step instead: gpt2, llama-3.2-1b, ..., a config.json or its folder")
      .group("Program");
  sub.add_integer("--batch", args->batch, 1, kMost, "of --model (default 4)").group("Program");
  sub.add_integer("--length", args->length, 1, kMost,
                  "of --model (default: its context, 2048 at most)")
      .group("Program");
  sub.add_parsed(
         "--dtype", "f32|bf16",
         [a](const std::string& text) {
           a->dtype = parse_dtype(text);
           if (a->dtype != DType::f32 && a->dtype != DType::bf16)
             throw UsageError(fmt::format("expected f32 or bf16, got '{}'", text));
         },
         "activations of --model (default bf16)")
      .group("Program");
  sub.add_parsed_list(
         "--size", [a](const std::string& text) { parse_size(text, a->options.sizes); },
         "NAME=N: what a size of the program is; one for each")
      .group("Program");
  sub.add_parsed(
         "--budget", "BYTES",
         [a](const std::string& text) { a->options.memory_budget = parse_budget(text); },
         "bytes that values may take beyond parameters and results; without it, loops wherever "
         "they "
         "cost nothing")
      .group("Loops");
  sub.add_integer("--chunks", args->options.chunks, 1, kMost, "of every loop (default: chosen)")
      .group("Loops");
  sub.add_flag("--no-chunk", args->no_chunk, "no loops").group("Loops");
  sub.add_flag("--no-head-engine", args->no_head_engine,
               "loops over the losses of a large vocabulary as well")
      .group("Loops");
  sub.add_flag("--strict", args->options.strict,
               "fail when the budget is not met or a big value could not be cut")
      .group("Loops");
  sub.add_integer("--threads", args->threads, 1, kMostThreads, "that run it (default: all cores)")
      .group("Loops");
  a->gpu.add(sub);
  sub.add_flag("--no-epilogues", args->no_epilogues,
               "products on a GPU that but multiply: loops do the rest")
      .group("Device");
  sub.add_flag(
         "--explain", args->explain,
         "print the decisions and the memory (the default), and what other budgets would take")
      .group("Output");
  sub.add_flag("--json", args->json, "print the same as JSON, with the memory over time")
      .group("Output");
  sub.add_text("--html", args->html,
               "write a page: memory over the instructions, loops, work by layer; with --time, "
               "measured times")
      .group("Output");
  sub.add_flag("--text", args->text, "print the compiled program").group("Output");
  sub.add_text("--dump-after", args->options.dump_after,
               "print the program after a pass, or `all`, and stop")
      .group("Output");
  sub.add_integer("--time", args->repeat, 1, 1000,
                  "run it so often on random numbers, and as often without loops; standard error "
                  "with --json")
      .group("Output");
  sub.add_flag("--profile", args->profile,
               "with --time: what each kind of instruction takes, a table, or a list in --json")
      .group("Output");
  sub.footer(
      "Examples:\n"
      "  logitless compile loss.ir --size N=4096 --budget 256MiB\n"
      "  logitless compile --model gpt2 --batch 32 --length 1024 --html memory.html");
  return {sub, [args, sub] {
            args->command_line = sub.command_line();
            args->run(sub.given());
          }};
}

}  // namespace logitless::cli
