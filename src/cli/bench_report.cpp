#include "cli/bench_report.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <new>
#include <vector>

#include "cli/args.h"
#include "cli/bench_machine.h"
#include "cli/convert.h"
#include "cli/output.h"
#include "cli/rates.h"

namespace logitless::cli {
namespace {

constexpr const char* kTitle = "# logitless bench";
constexpr std::size_t kSmallBudget = std::size_t{256} << 20;
// Heads are halved for memory until they are this small.
constexpr std::int64_t kLeastTokens = 64, kLeastVocab = 1024;

// The heads of docs/develop/benchmarks.md; a CPU's are an eighth in each dimension.
std::vector<HeadShape> standard_heads(bool on_gpu, DType dtype) {
  const std::int64_t part = on_gpu ? 1 : 8;
  std::vector<HeadShape> heads = {{.tokens = 8192, .dim = 4096, .vocab = 128256},
                                  {.tokens = 8192, .dim = 2304, .vocab = 256000},
                                  {.tokens = 32768, .dim = 768, .vocab = 50304}};
  for (HeadShape& head : heads) {
    head.tokens /= part;
    head.dim /= part;
    head.vocab /= part;
    head.dtype = dtype;
  }
  return heads;
}

std::size_t bytes_of(DType dtype, std::int64_t rows, std::int64_t columns = 1) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * size_of(dtype);
}

std::string text_of(const HeadShape& head) {
  return fmt::format("{} tokens x {} x {} vocabulary entries", head.tokens, head.dim, head.vocab);
}

double gemm_flops(const HeadShape& head) {
  return 3.0 * 2.0 * static_cast<double>(head.tokens) * static_cast<double>(head.dim) *
         static_cast<double>(head.vocab);
}

std::string budget_text(std::size_t budget) {
  return budget == 0 ? "default" : fmt::format("{} MiB", budget >> 20);
}

std::string row_text(const std::vector<std::string>& cells) {
  std::string text = "|";
  for (const std::string& cell : cells) text += fmt::format(" {} |", cell);
  return text + "\n";
}

// Messages become one line of a list.
std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos;)
    text.replace(at, 1, "; ");
  return text;
}

class BenchPage {
 public:
  explicit BenchPage(const ReportRequest& request)
      : request_(request),
        machine_(request.on_gpu, request.threads, request.trace),
        dtype_(request.dtype ? *request.dtype : usual_dtype()) {
    if (machine_.on_gpu()) rates_ = measure_gpu(machine_.context());
  }

  std::string text() {
    std::string page = about();
    if (machine_.on_gpu()) page += rates();
    page += fmt::format(
        "\n## Heads\n{}, loss and both gradients, medians of {} after a first run. ratio: to the "
        "three matrix products\n(logits, d_hidden, d_weight) of the library's own path in this "
        "run. workspace: beyond inputs and gradients;\npeak: beyond inputs. predicted: by the "
        "rates that plans used.\n",
        name_of(dtype_), request_.repeat);
    for (const HeadShape& head : standard_heads(machine_.on_gpu(), dtype_)) page += section(head);
    return page;
  }

 private:
  struct Inputs {
    DeviceMemory hidden, weight, targets;
    CrossEntropyInputs views = {};
  };

  DType usual_dtype() const {
    return machine_.on_gpu() && machine_.context().device().compute_capability < 80 ? DType::f16
                                                                                    : DType::bf16;
  }

  std::string about() const;
  std::string rates() const;
  std::string section(const HeadShape& standard) const;
  std::optional<HeadShape> fitting(HeadShape head) const;
  Inputs make_inputs(const HeadShape& head) const;
  double gemm_seconds(const HeadShape& head, const Inputs& in) const;
  std::vector<std::string> other_kernels(const std::string& chosen) const;
  // Returns the cells of a row; the kernel is `kernel`, or the plan's choice if it is empty.
  std::vector<std::string> time(const HeadShape& head, const Inputs& in, const std::string& kernel,
                                std::size_t budget, double gemms) const;
  double median_seconds(const std::function<void()>& run) const;

  const ReportRequest& request_;
  const Machine machine_;
  const DType dtype_;
  GpuCalibration rates_;  // of a GPU
};

// Returns the text after `name` of the first line of a file that begins with it.
std::string line_of(const char* path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const std::size_t begin = line.find_first_not_of(": \t", name.size());
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "unknown";
}

std::string BenchPage::about() const {
  const DeviceLimits& device = machine_.context().device();
  std::string page;
  const auto add = [&](const char* name, const std::string& value) {
    page += row_text({name, value});
  };
  if (machine_.on_gpu()) {
    const DeviceStatus status = device_status(machine_.context());
    page = fmt::format("{}: {}\n\n| | |\n|---|---|\n", kTitle, status.name);
    add("card", fmt::format("{}, compute capability {}.{}, {} SMs", status.name,
                            device.compute_capability / 10, device.compute_capability % 10,
                            device.card.sms));
    add("memory", fmt::format("{}, {} free", format_bytes(status.total_bytes),
                              format_bytes(status.free_bytes)));
    add("driver", line_of("/proc/driver/nvidia/version", "NVRM version"));
    add("CUDA of the driver", rates_.driver);
    const char* const kernels = std::getenv("LOGITLESS_GPU_KERNELS");
    add("LOGITLESS_GPU_KERNELS", kernels == nullptr ? "unset" : kernels);
  } else {
    const std::string name = line_of("/proc/cpuinfo", "model name");
    page = fmt::format("{}: {}\n\n| | |\n|---|---|\n", kTitle, name);
    add("processor", name);
    add("threads", fmt::format("{}", machine_.context().threads()));
    add("memory", fmt::format("{} available", format_bytes(machine_.free_bytes())));
  }
  add("library", fmt::format("logitless {} ({})", version(), LOGITLESS_BUILD));
  add("command", fmt::format("`{}`", request_.command));
  add("date", fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(std::time(nullptr))));
  return page;
}

std::string BenchPage::rates() const {
  std::string page =
      "\n## Rates\nMeasured now, and stored nowhere; `logitless calibrate` stores them for "
      "plans.\n\n| rate | nominal | measured | plans used |\n|---|---|---|---|\n";
  for (const RateRow& row : rate_rows(rates_))
    page += row_text({row.what, row.text(row.nominal), row.text(row.measured), row.text(row.used)});
  return page;
}

double BenchPage::median_seconds(const std::function<void()>& run) const {
  std::vector<double> times;
  machine_.seconds(run);
  for (std::int64_t i = 0; i < request_.repeat; ++i) times.push_back(machine_.seconds(run));
  return median(std::move(times));
}

BenchPage::Inputs BenchPage::make_inputs(const HeadShape& head) const {
  const Context& context = machine_.context();
  Inputs in{machine_.allocate(context, bytes_of(dtype_, head.tokens, head.dim)),
            machine_.allocate(context, bytes_of(dtype_, head.vocab, head.dim)),
            machine_.allocate(context, bytes_of(DType::i32, head.tokens)),
            {}};
  machine_.fill_normal(in.hidden, dtype_, 1.0, 1);
  machine_.fill_normal(in.weight, dtype_, 3.0 / std::sqrt(static_cast<double>(head.dim)), 2);
  const OwnedTensor ids = random_targets(head.tokens, head.vocab, 3);
  machine_.upload(in.targets, ids.view.data(), in.targets.bytes);
  in.views.hidden = ConstTensorView(in.hidden.data(), dtype_, {head.tokens, head.dim});
  in.views.weight = ConstTensorView(in.weight.data(), dtype_, {head.vocab, head.dim});
  in.views.targets = ConstTensorView(in.targets.data(), DType::i32, {head.tokens});
  return in;
}

// Times the three GEMMs; the logits are the block of the other two.
double BenchPage::gemm_seconds(const HeadShape& head, const Inputs& in) const {
  const Context& context = machine_.context();
  const DeviceMemory block = machine_.allocate(context, bytes_of(dtype_, head.tokens, head.vocab));
  const DeviceMemory out =
      machine_.allocate(context, bytes_of(dtype_, std::max(head.tokens, head.vocab), head.dim));
  const auto program = [&](const char* a, const char* b, const char* contract) {
    const auto tensor = [&](const char* name) {
      const std::string_view of = name;
      return fmt::format("%{}: {}[{}, {}]", name, name_of(dtype_),
                         of == "w" ? head.vocab : head.tokens, of == "g" ? head.vocab : head.dim);
    };
    return MachineProgram(machine_,
                          fmt::format("graph product({}, {}) {{\n  %y = dot %{}, %{} contract({})\n"
                                      "  return y: %y\n}}\n",
                                      tensor(a), tensor(b), a, b, contract));
  };
  const MachineProgram logits = program("h", "w", "1; 1");
  const MachineProgram d_hidden = program("g", "w", "1; 0");
  const MachineProgram d_weight = program("g", "h", "0; 0");
  const void* const hw[] = {in.hidden.data(), in.weight.data()};
  const void* const gw[] = {block.data(), in.weight.data()};
  const void* const gh[] = {block.data(), in.hidden.data()};
  return median_seconds([&] {
    logits.run(hw, block.data());
    d_hidden.run(gw, out.data());
    d_weight.run(gh, out.data());
  });
}

std::vector<std::string> BenchPage::time(const HeadShape& head, const Inputs& in,
                                         const std::string& kernel, std::size_t budget,
                                         double gemms) const {
  const Context context = machine_.make_context(kernel);
  const DeviceMemory d_hidden = machine_.allocate(context, bytes_of(dtype_, head.tokens, head.dim));
  const DeviceMemory d_weight = machine_.allocate(context, bytes_of(dtype_, head.vocab, head.dim));
  const DeviceMemory loss = machine_.allocate(context, sizeof(float));
  CrossEntropyOutputs out;
  out.loss = TensorView(loss.data(), DType::f32, {});
  out.d_hidden = TensorView(d_hidden.data(), dtype_, {head.tokens, head.dim});
  out.d_weight = TensorView(d_weight.data(), dtype_, {head.vocab, head.dim});
  PlanRequest request;
  request.memory_budget = budget;
  const LossPlan plan = plan_cross_entropy(context, {}, in.views, out, request);
  const Workspace workspace(context, plan);
  const double seconds =
      median_seconds([&] { cross_entropy(context, plan, {}, in.views, out, workspace); });
  return {plan.kernel,
          budget_text(budget),
          std::string(name_of(plan.kind)),
          format_seconds(seconds),
          fmt::format("{:.2f}", seconds / gemms),
          format_seconds(plan.predicted_seconds),
          format_bytes(plan.workspace_bytes()),
          format_bytes(context.memory().peak_bytes())};
}

std::vector<std::string> BenchPage::other_kernels(const std::string& chosen) const {
  std::vector<std::string> names =
      machine_.on_gpu() ? gpu_kernel_names() : kernel_names(/*runnable=*/true);
  // The plain kernels of a CPU are for tests and take minutes.
  std::erase_if(names, [&](const std::string& name) {
    return name == chosen || name == "reference" || name == "scalar" || name.ends_with("_emulated");
  });
  return names;
}

// Returns the head with tokens, then vocabulary, halved until it fits.
std::optional<HeadShape> BenchPage::fitting(HeadShape head) const {
  const std::size_t free = machine_.free_bytes();
  const std::size_t most = request_.memory_budget > 0 ? request_.memory_budget
                           : free > 0                 ? free / 10 * 9
                                                      : SIZE_MAX;
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  features.d_hidden_dtype = features.d_weight_dtype = dtype_;
  while (true) {
    const std::size_t tensors =
        2 * (bytes_of(dtype_, head.tokens, head.dim) + bytes_of(dtype_, head.vocab, head.dim));
    const std::size_t beside =
        std::max(bytes_of(dtype_, head.tokens, head.vocab),
                 plan_head(machine_.context(), head, features).workspace_bytes());
    if (tensors + beside <= most) return head;
    if (head.tokens >= 2 * kLeastTokens) {
      head.tokens /= 2;
    } else if (head.vocab >= 2 * kLeastVocab) {
      head.vocab /= 2;
    } else {
      return std::nullopt;
    }
  }
}

std::string BenchPage::section(const HeadShape& standard) const {
  std::string page = fmt::format("\n### {}\n", text_of(standard));
  const std::optional<HeadShape> head = fitting(standard);
  if (!head) return page + "Not run: even its smallest part does not fit the memory.\n";
  if (*head != standard) page += fmt::format("Reduced to {}, for memory.\n", text_of(*head));
  const Inputs in = make_inputs(*head);
  const double gemms = gemm_seconds(*head, in);
  page += fmt::format("Three matrix products: {}, {:.4g} TFLOP/s.\n\n", format_seconds(gemms),
                      gemm_flops(*head) / gemms * 1e-12);
  page +=
      "| kernel | budget | plan | time | ratio | predicted | workspace | peak |\n"
      "|---|---|---|---|---|---|---|---|\n";
  std::string refusals;
  const auto add = [&](const std::string& kernel, std::size_t budget) -> std::string {
    const std::string shown = kernel.empty() ? "the planner's kernel" : kernel;
    try {
      const std::vector<std::string> cells = time(*head, in, kernel, budget, gemms);
      page += row_text(cells);
      return cells[0];
    } catch (const Unsupported& e) {
      refusals += fmt::format("- {}: {}\n", shown, one_line(e.what()));
      return {};
    } catch (const InvalidArgument& e) {
      if (budget == 0) throw;
      refusals += fmt::format("- {}, {}: {}\n", shown, budget_text(budget), one_line(e.what()));
    } catch (const DeviceError& e) {
      refusals += fmt::format("- {}, {}: {}\n", shown, budget_text(budget), one_line(e.what()));
    } catch (const std::bad_alloc&) {
      refusals += fmt::format("- {}, {}: out of memory\n", shown, budget_text(budget));
    }
    return shown;
  };
  const std::string chosen = add({}, 0);
  if (!chosen.empty()) add({}, kSmallBudget);
  for (const std::string& kernel : other_kernels(chosen)) {
    if (!add(kernel, 0).empty()) add(kernel, kSmallBudget);
  }
  if (!refusals.empty()) page += "\nNot run:\n" + refusals;
  return page;
}

}  // namespace

void check_report_file(const std::string& path) {
  check_writable("--report", path);
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line) || line.starts_with(kTitle)) return;
  throw UsageError(fmt::format(
      "--report: '{}' is no page of this command, and would be lost: expected a new name", path));
}

void write_bench_report(const ReportRequest& request) {
  write_file(request.path, BenchPage(request).text());
  print(fmt::format("wrote {}\n", request.path));
}

}  // namespace logitless::cli
