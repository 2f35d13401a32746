// Compares the head's plans with the peak of the tile unit and oneDNN's GEMM, in one process.
//
//   bench_head [--tokens N] [--dim D] [--vocab V] [--dtype bf16] [--threads T] [--repeat R]
//   [--kernel NAME] [--json]
//   bench_head --device cuda [--only HEAD] [--row PLAN] [--real-head FILE...] [--repeat R] [--json]
//
// Prints medians of R interleaved runs, after a warm-up, and rates in TFLOP/s of 2 N V D per GEMM
// of the head. Data is random and fresh.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "amx_peak.h"
#include "device/bench_device.h"
#include "gemm_onednn.h"
#include "logitless/logitless.h"

namespace {

using logitless::Buffer;
using logitless::ConstTensorView;
using logitless::DType;
using logitless::PlanKind;
using logitless::TensorView;
using logitless::operator""_MiB;

struct Options {
  std::int64_t tokens = 2048;
  std::int64_t dim = 2048;
  std::int64_t vocab = 65536;
  std::string dtype = "bf16";
  int threads = 2;
  int repeat = 5;
  std::string kernel;
  bool json = false;
};

// Returns roughly normal numbers (sums of four uniform ones) of a given deviation, as `dtype`.
Buffer random_tensor(DType dtype, std::int64_t count, float deviation, std::uint64_t seed) {
  Buffer out(static_cast<std::size_t>(count) * size_of(dtype));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const float sum = static_cast<float>((state & 0xffff) + (state >> 16 & 0xffff) +
                                         (state >> 32 & 0xffff) + (state >> 48));
    const float value = (sum / 65536.0f - 2.0f) * 1.7320508f * deviation;
    if (dtype == DType::f32) {
      out.as<float>()[i] = value;
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      out.as<std::uint16_t>()[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    }
  }
  return out;
}

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Row {
  std::string name;
  double passes = 0;
  std::size_t workspace = 0;
  std::function<void()> run;
  std::vector<double> seconds;
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

int run(const Options& o) {
  const DType dtype = logitless::parse_dtype(o.dtype);
  if (dtype != DType::f32 && dtype != DType::bf16)
    throw logitless::InvalidArgument("--dtype: expected bf16 or f32");
  const Buffer hidden = random_tensor(dtype, o.tokens * o.dim, 1.0f, 1);
  const Buffer weight =
      random_tensor(dtype, o.vocab * o.dim, 2.0f / std::sqrt(static_cast<float>(o.dim)), 2);
  std::vector<std::int32_t> targets(static_cast<std::size_t>(o.tokens));
  for (std::int64_t i = 0; i < o.tokens; ++i)
    targets[i] = static_cast<std::int32_t>(i * 7919 % o.vocab);
  Buffer d_hidden(static_cast<std::size_t>(o.tokens * o.dim) * size_of(dtype));
  Buffer d_weight(static_cast<std::size_t>(o.vocab * o.dim) * size_of(dtype));
  float loss = 0.0f;

  logitless::ContextOptions context_options;
  context_options.threads = o.threads;
  context_options.kernel = o.kernel;
  const logitless::Context context(context_options);
  const logitless::CrossEntropyOptions options;
  logitless::CrossEntropyInputs in;
  in.hidden = ConstTensorView(hidden.data(), dtype, {o.tokens, o.dim});
  in.weight = ConstTensorView(weight.data(), dtype, {o.vocab, o.dim});
  in.targets = ConstTensorView(targets.data(), DType::i32, {o.tokens});

  struct Case {
    std::string name;
    PlanKind kind;
    std::size_t budget;
    double stored;
  };
  std::vector<Row> rows;
  std::vector<logitless::LossPlan> plans;
  std::vector<logitless::Workspace> workspaces;
  const std::vector<Case> cases = {{"forward", PlanKind::forward, 0, 0.0},
                                   {"dense", PlanKind::dense, 4096_MiB, 0.0},
                                   {"dense, 512 MiB", PlanKind::dense, 512_MiB, 0.0},
                                   {"recompute", PlanKind::recompute, 64_MiB, 0.0},
                                   {"stored 0.5", PlanKind::stored, 4096_MiB, 0.5}};
  plans.reserve(cases.size());
  workspaces.reserve(cases.size());
  for (const Case& c : cases) {
    logitless::CrossEntropyOutputs out;
    out.loss = TensorView(&loss, DType::f32, {});
    if (c.kind != PlanKind::forward) {
      out.d_hidden = TensorView(d_hidden.data(), dtype, {o.tokens, o.dim});
      out.d_weight = TensorView(d_weight.data(), dtype, {o.vocab, o.dim});
    }
    try {
      plans.push_back(
          plan_cross_entropy(options, in, out, {context.device(), c.budget, c.kind, c.stored}));
    } catch (const logitless::Error& error) {
      std::cerr << c.name << ": " << error.what() << "\n";
      continue;
    }
    workspaces.emplace_back(context, plans.back());
    const std::size_t at = plans.size() - 1;
    rows.push_back(
        {c.name,
         plans.back().passes,
         plans.back().workspace_bytes(),
         [&, at, out] { cross_entropy(context, plans[at], options, in, out, workspaces[at]); },
         {}});
  }
  if (dtype == DType::bf16) {
    const auto gemm =
        bench::onednn_gemm(hidden.data(), weight.data(), o.tokens, o.dim, o.vocab, o.threads);
    if (gemm)
      rows.push_back({"oneDNN bf16 GEMM alone",
                      1.0,
                      static_cast<std::size_t>(o.tokens * o.vocab) * 2,
                      gemm,
                      {}});
  }

  std::vector<double> peaks;
  for (int r = -1; r < o.repeat; ++r) {
    const double peak = bench::amx_peak_flops(o.threads);
    if (r >= 0) peaks.push_back(peak);
    for (Row& row : rows) {
      const double seconds = seconds_of(row.run);
      if (r >= 0) row.seconds.push_back(seconds);
    }
  }
  std::sort(peaks.begin(), peaks.end());
  const double peak = peaks[peaks.size() / 2];

  const double pass = 2.0 * static_cast<double>(o.tokens) * static_cast<double>(o.vocab) *
                      static_cast<double>(o.dim);
  nlohmann::json json = {{"tokens", o.tokens},
                         {"dim", o.dim},
                         {"vocab", o.vocab},
                         {"dtype", o.dtype},
                         {"threads", o.threads},
                         {"kernel", plans.empty() ? "" : plans[0].kernel},
                         {"amx_peak_tflops", peak * 1e-12},
                         {"loss", loss}};
  for (Row& row : rows) {
    const double seconds = row.median();
    const double rate = row.passes * pass / seconds;
    json["rows"].push_back({{"name", row.name},
                            {"seconds", seconds},
                            {"passes", row.passes},
                            {"tflops", rate * 1e-12},
                            {"of_peak", peak > 0 ? rate / peak : 0.0},
                            {"workspace_bytes", row.workspace}});
  }
  if (o.json) {
    std::cout << json.dump(2) << "\n";
    return 0;
  }
  std::printf(
      "%lld tokens x vocabulary %lld x %lld, %s, kernel %s, %d threads; AMX peak %.2f TFLOP/s\n",
      static_cast<long long>(o.tokens), static_cast<long long>(o.vocab),
      static_cast<long long>(o.dim), o.dtype.c_str(),
      plans.empty() ? "none" : plans[0].kernel.c_str(), o.threads, peak * 1e-12);
  std::printf("%-24s %10s %7s %9s %8s %12s\n", "", "seconds", "passes", "TFLOP/s", "of peak",
              "workspace");
  for (const auto& row : json["rows"]) {
    std::printf("%-24s %10.4f %7.2f %9.3f %7.1f%% %12s\n", row["name"].get<std::string>().c_str(),
                row["seconds"].get<double>(), row["passes"].get<double>(),
                row["tflops"].get<double>(), 100.0 * row["of_peak"].get<double>(),
                logitless::format_bytes(row["workspace_bytes"].get<std::size_t>()).c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times every plan of the head against the AMX peak and oneDNN");
  app.add_option("--tokens", o.tokens)->check(CLI::PositiveNumber);
  app.add_option("--dim", o.dim)->check(CLI::PositiveNumber);
  app.add_option("--vocab", o.vocab)->check(CLI::PositiveNumber);
  app.add_option("--dtype", o.dtype, "bf16 or f32");
  app.add_option("--threads", o.threads)->check(CLI::PositiveNumber);
  app.add_option("--repeat", o.repeat)->check(CLI::PositiveNumber);
  app.add_option("--kernel", o.kernel, "one of `logitless kernels`");
  app.add_flag("--json", o.json);
  std::string device = "cpu";
  logitless::bench::DeviceBenchOptions of_device;
  app.add_option("--device", device, "cpu, or cuda: the shapes of benchmarks.md on a GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--only", of_device.only,
                 "with --device cuda: this head, or file of --real-head, alone");
  app.add_option("--row", of_device.row, "with --device cuda: plans with this in their name alone");
  app.add_option(
         "--real-head", of_device.real_heads,
         "with --device cuda: safetensors of a head; bench/heads/README.md says how one is made")
      ->check([](const std::string& path) {
        return std::filesystem::is_regular_file(path)
                   ? std::string()
                   : path + " is not there; bench/heads/README.md says how a head is made";
      });
  CLI11_PARSE(app, argc, argv);
  try {
    if (device == "cuda") {
      of_device.json = o.json;
      if (app.count("--repeat") > 0) of_device.repeat = o.repeat;
      return logitless::bench::bench_device(of_device);
    }
    return run(o);
  } catch (const std::exception& error) {
    std::cerr << "bench_head: " << error.what() << "\n";
    return 1;
  }
}
