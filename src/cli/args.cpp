#include "cli/args.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/output.h"
#include "logitless/device.h"

namespace logitless::cli {
void check_writable(const std::string& option, const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    throw UsageError(fmt::format("{}: there is no folder '{}'", option, folder.string()));
  }
  if (std::filesystem::is_directory(path, error)) {
    throw UsageError(fmt::format("{}: '{}' is a folder", option, path));
  }
  try {
    logitless::check_writable(path);
  } catch (const Error& e) {
    throw UsageError(fmt::format("{}: {}", option, e.what()));
  }
}

void check_output(const std::string& option, const std::string& path, train::FileKind kind) {
  check_writable(option, path);
  try {
    train::check_replaceable(path, kind);
  } catch (const Error& e) {
    throw UsageError(fmt::format("{}: {}", option, e.what()));
  }
}

void check_other_file(const std::string& option, const std::string& path, const std::string& other,
                      const std::string& is_what) {
  if (path.empty() || other.empty()) return;
  std::error_code error;
  const auto whole = [&](const std::string& name) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(name), error);
  };
  if (!std::filesystem::equivalent(path, other, error) && whole(path) != whole(other)) return;
  throw UsageError(fmt::format("{}: '{}' is {}, which it would replace", option, path, is_what));
}

void check_exists(const std::string& option, const std::string& path) {
  std::error_code error;
  if (!path.empty() && !std::filesystem::is_regular_file(path, error)) {
    throw UsageError(fmt::format("{}: there is no file '{}'", option, path));
  }
}

void refuse_given(const std::set<std::string>& given, std::initializer_list<const char*> names,
                  const std::string& why) {
  for (const char* name : names) {
    if (given.count(name) > 0) throw UsageError(fmt::format("--{}: {}", name, why));
  }
}

std::size_t parse_budget(const std::string& text) {
  const std::size_t bytes = parse_bytes(text);
  if (bytes > 0) return bytes;
  throw UsageError(fmt::format("expected at least one byte, got '{}'", text));
}

void DeviceArgs::add(Options& options) {
  options
      .add_integer("--threads", threads, 0, kMostThreads,
                   "threads; 0 (default): OMP_NUM_THREADS, or all cores")
      .group("Machine");
  options
      .add_parsed(
          "--kernel", "NAME", [this](const std::string& text) { kernel = text; },
          "the one kernel to use (see `logitless kernels`); default: the best")
      .group("Machine");
  options.add_flag("--verbose", verbose, "say on standard error what is decided").group("Machine");
}

namespace {

DeviceLimits gpu_here() {
  ContextOptions here;
  here.device = DeviceKind::cuda;
  return Context(here).device();
}

}  // namespace

std::int64_t capability_here() { return gpu_missing().empty() ? gpu_here().compute_capability : 0; }

DeviceLimits GpuArgs::limits() const {
  const bool any = card.name.empty() && capability == 0;
  if (any && gpu_missing().empty()) return gpu_here();
  DeviceLimits limits;
  limits.kind = DeviceKind::cuda;
  limits.card = card;
  if (!card.name.empty()) limits.compute_capability = card.compute_capability;
  if (capability != 0) limits.compute_capability = static_cast<int>(capability);
  return limits;
}

void GpuArgs::add(Options& options) {
  options
      .add_parsed(
          "--device", "cpu|cuda",
          [this](const std::string& text) {
            if (text != "cpu" && text != "cuda")
              throw UsageError(fmt::format("expected cpu or cuda, got '{}'", text));
            on_gpu = text == "cuda";
          },
          what + " (default cpu); a GPU need not be here")
      .group(group);
  options
      .add_integer("--capability", capability, 75, 999,
                   "of the GPU, 10 * major + minor (default: the GPU's that is here, else 90)")
      .group(group);
  options
      .add_parsed(
          "--card", "NAME",
          [this](const std::string& text) {
            const std::vector<std::string> names = gpu_card_names();
            if (std::find(names.begin(), names.end(), text) == names.end())
              throw UsageError(
                  fmt::format("expected one of {}, got '{}'", fmt::join(names, ", "), text));
            card = gpu_card(text);
          },
          "predict times at the rates of a card, A100 or others (default: this GPU's)")
      .group(group);
}

void GpuArgs::check(const std::set<std::string>& given) const {
  if (!on_gpu) return refuse_given(given, {"capability", "card"}, "is of --device cuda");
  refuse_given(given, {"threads"}, "cannot be given beside --device cuda");
  if (!card.name.empty() && capability != 0 && capability != card.compute_capability)
    throw UsageError(fmt::format("--capability: expected the {} of --card {}, got {}",
                                 card.compute_capability, card.name, capability));
}

Context DeviceArgs::context() const {
  ContextOptions options;
  options.threads = static_cast<int>(threads);
  options.kernel = kernel;
  if (verbose) {
    options.trace = [](std::string_view line) { print_note(fmt::format("{}\n", line)); };
  }
  return Context(std::move(options));
}

void PlanArgs::add(Options& options) {
  options
      .add_parsed(
          "--plan", "PLAN", [this](const std::string& text) { parse_plan(text, *this); },
          "auto (default), forward, dense, recompute, stored, stored:F, far-backward or far-both")
      .group("Plan");
  options
      .add_parsed(
          "--budget", "BYTES", [this](const std::string& text) { budget = parse_budget(text); },
          "memory beyond inputs and outputs, such as 512MiB (default: the least that costs no "
          "time)")
      .group("Plan");
}

PlanRequest PlanArgs::request(const DeviceLimits& device) const {
  PlanRequest request;
  request.device = device;
  request.memory_budget = budget;
  if (!automatic) request.kind = kind;
  request.stored_fraction = stored_fraction;
  request.expected_ignored = expected_ignored;
  return request;
}

void parse_plan(const std::string& text, PlanArgs& args) {
  args.automatic = text == "auto";
  args.kind = text == "far-backward" ? PlanKind::far_backward
              : text == "far-both"   ? PlanKind::far_both
                                     : PlanKind::forward;
  args.stored_fraction = 0.0;
  if (args.automatic || args.far()) return;
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  for (const PlanKind kind :
       {PlanKind::forward, PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
    if (name != name_of(kind)) continue;
    args.kind = kind;
    if (colon == std::string::npos) return;
    if (kind != PlanKind::stored)
      throw UsageError(fmt::format("'{}': only stored takes a fraction", text));
    args.stored_fraction = parse_number(text.substr(colon + 1));
    if (args.stored_fraction <= 0.0 || args.stored_fraction >= 1.0) {
      throw UsageError(fmt::format("'{}': expected a fraction between 0 and 1", text));
    }
    return;
  }
  throw UsageError(
      fmt::format("'{}' is unknown; expected auto, forward, dense, recompute, stored, stored:F, "
                  "far-backward or far-both",
                  text));
}

Precision parse_precision(const std::string& text) {
  for (const Precision known : {Precision::ieee, Precision::tf32, Precision::bf16x3}) {
    if (text == name_of(known)) return known;
  }
  throw UsageError(fmt::format("expected ieee, tf32 or bf16x3, got '{}'", text));
}

DType parse_head_dtype(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (text == name_of(dtype)) return dtype;
  }
  throw UsageError(fmt::format("expected f32, bf16 or f16, got '{}'", text));
}

void GradientArgs::add(Options& options) {
  options
      .add_parsed(
          "--grad-dtype", "same|f32",
          [this](const std::string& text) {
            if (text != "same" && text != "f32")
              throw UsageError(fmt::format("expected same or f32, got '{}'", text));
            same = text == "same";
          },
          "gradients in the dtype of their inputs (default) or in f32")
      .group("Gradients");
}

}  // namespace logitless::cli
