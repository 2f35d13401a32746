#include "device/bench_device.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "core/half.h"
#include "device/cublas_gemm.h"
#include "kernels/device/head.h"
#include "logitless/logitless.h"
#include "logitless/tensor_file.h"

namespace logitless::bench {
namespace {

using cuda::DeviceMemory;

struct Shape {
  std::string name;
  std::int64_t tokens, dim, vocab;
};

// Hidden states, weights and targets on the device.
struct Head {
  Shape shape;
  DeviceMemory hidden, weight, targets;
  VocabOrder order;  // of real heads only
  nlohmann::json order_ms;
};

// Returns normal random numbers: a block of 4 Mi of them, repeated.
DeviceMemory normal_matrix(std::int64_t rows, std::int64_t columns, float deviation,
                           unsigned seed) {
  const auto count = static_cast<std::size_t>(rows * columns);
  DeviceMemory memory(count * 2);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<std::uint16_t> block(std::min<std::size_t>(count, (std::size_t{1} << 22) + 12345));
  for (std::uint16_t& value : block) value = float_to_bf16(normal(random));
  for (std::size_t at = 0; at < count; at += block.size()) {
    cuda::copy_to_device(static_cast<std::uint16_t*>(memory.data()) + at, block.data(),
                         std::min(block.size(), count - at) * 2, nullptr);
  }
  return memory;
}

template <typename T>
DeviceMemory on_device(const std::vector<T>& values) {
  DeviceMemory memory(values.size() * sizeof(T));
  cuda::copy_to_device(memory.data(), values.data(), values.size() * sizeof(T), nullptr);
  return memory;
}

Head random_head(const Shape& s) {
  std::mt19937 random(3);
  std::vector<std::int32_t> vocab_ids(static_cast<std::size_t>(s.tokens));
  for (std::int32_t& vocab_id : vocab_ids)
    vocab_id = static_cast<std::int32_t>(random() % static_cast<unsigned>(s.vocab));
  return {s,
          normal_matrix(s.tokens, s.dim, 1.0f, 1),
          normal_matrix(s.vocab, s.dim, 2.0f / std::sqrt(static_cast<float>(s.dim)), 2),
          on_device(vocab_ids),
          {},
          {}};
}

// Makes a head's order from its first 1536 tokens, which are not measured, and records its cost.
void make_order(Head& head, const Context& context) {
  const Shape& s = head.shape;
  const std::int64_t sizes[] = {std::min<std::int64_t>(1536, s.tokens), s.dim};
  const ConstTensorView sample(head.hidden.data(), DType::bf16, sizes);
  const ConstTensorView weight(head.weight.data(), DType::bf16, {s.vocab, s.dim});
  for (int round = 0; round < 2; ++round) {  // the first round loads kernels
    auto from = std::chrono::steady_clock::now();
    const auto lap = [&](const char* what) {
      const auto now = std::chrono::steady_clock::now();
      head.order_ms[what] = std::chrono::duration<double, std::milli>(now - from).count();
      from = now;
    };
    const std::vector<float> average = average_probability(context, sample, weight);
    lap("average_probability");
    head.order = make_vocab_order(context, weight, average);
    lap("make_vocab_order");
    head.order = measure_tiles(context, head.order, sample, weight);
    lap("measure_tiles");
  }
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Reads a real head and widens it: hidden and weight are multiplied by the same matrix with
// orthonormal rows, which preserves the logits.
Head rotated_head(const std::string& path, std::int64_t dim, const CublasGemm& cublas,
                  const Context& context) {
  const TensorFile file(path);
  const ConstTensorView hidden = file.tensor("hidden");
  const ConstTensorView quantised = file.tensor("weight_q");
  const std::int64_t tokens = hidden.size(0);
  const std::int64_t rank = hidden.size(1);
  const std::int64_t vocab = quantised.size(0);
  const auto* const q = static_cast<const std::int8_t*>(quantised.data());
  const auto* const scale = static_cast<const float*>(file.tensor("weight_scale").data());
  std::vector<std::uint16_t> weight(static_cast<std::size_t>(vocab * rank));
  for (std::int64_t j = 0; j < vocab; ++j) {
    for (std::int64_t k = 0; k < rank; ++k) {
      weight[static_cast<std::size_t>(j * rank + k)] =
          float_to_bf16(static_cast<float>(q[j * rank + k]) * scale[j]);
    }
  }
  // Gram-Schmidt on normal rows, stored by columns for the GEMM.
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> rows(static_cast<std::size_t>(rank));
  for (auto& row : rows) {
    row.resize(static_cast<std::size_t>(dim));
    for (double& value : row) value = normal(random);
    const auto against = [&](const std::vector<double>& other) {
      double dot = 0.0;
      for (std::size_t i = 0; i < row.size(); ++i) dot += row[i] * other[i];
      return dot;
    };
    for (auto& other : rows) {
      if (&other == &row) break;
      const double dot = against(other);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] -= dot * other[i];
    }
    const double length = std::sqrt(against(row));
    for (double& value : row) value /= length;
  }
  std::vector<std::uint16_t> rotation(static_cast<std::size_t>(rank * dim));
  for (std::int64_t k = 0; k < rank; ++k) {
    for (std::int64_t c = 0; c < dim; ++c)
      rotation[static_cast<std::size_t>(c * rank + k)] = float_to_bf16(
          static_cast<float>(rows[static_cast<std::size_t>(k)][static_cast<std::size_t>(c)]));
  }
  const DeviceMemory r = on_device(rotation);
  const DeviceMemory w = on_device(weight);
  DeviceMemory x(static_cast<std::size_t>(tokens * rank) * 2);
  cuda::copy_to_device(x.data(), hidden.data(), x.bytes(), nullptr);
  Head head{{file_name(path), tokens, dim, vocab},
            DeviceMemory(static_cast<std::size_t>(tokens * dim) * 2),
            DeviceMemory(static_cast<std::size_t>(vocab * dim) * 2),
            DeviceMemory(static_cast<std::size_t>(tokens) * 4),
            {},
            {}};
  cublas.multiply(x.data(), r.data(), head.hidden.data(), tokens, dim, rank);
  cublas.multiply(w.data(), r.data(), head.weight.data(), vocab, dim, rank);
  cuda::copy_to_device(head.targets.data(), file.tensor("targets").data(), head.targets.bytes(),
                       nullptr);
  make_order(head, context);
  return head;
}

struct Row {
  Row(std::string what, std::function<void()> how) : name(std::move(what)), run(std::move(how)) {}
  std::string name;
  std::function<void()> run;
  std::size_t workspace = 0;
  double predicted_ms = 0.0;
  double passes = 1.0;
  std::vector<float> times;
  double median() const {
    std::vector<float> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

// A plan with its tensors.
struct PlanRun {
  LossPlan plan;
  std::unique_ptr<Workspace> workspace;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
};

struct PlanCase {
  const char* name;
  PlanKind kind;
  DType weight_dtype;
  std::size_t budget;
  const char* kernel;
  std::int64_t sample_every = 0;
};

// Returns |a - b| / |b|.
double relative(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += off * off;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / size);
}

// Compares gradients of the far field with the dense plan's, in fp32.
nlohmann::json far_errors(const Head& head, PlanKind kind, const Context& context) {
  const Shape& s = head.shape;
  const CrossEntropyOptions options;
  std::vector<float> d_hidden[2], d_weight[2], lse[2];
  nlohmann::json out;
  for (const bool far : {false, true}) {
    const DeviceMemory hidden(static_cast<std::size_t>(s.tokens * s.dim) * 4);
    const DeviceMemory weight(static_cast<std::size_t>(s.vocab * s.dim) * 4);
    CrossEntropyInputs in;
    in.hidden = ConstTensorView(head.hidden.data(), DType::bf16, {s.tokens, s.dim});
    in.weight = ConstTensorView(head.weight.data(), DType::bf16, {s.vocab, s.dim});
    in.targets = ConstTensorView(head.targets.data(), DType::i32, {s.tokens});
    in.order = head.order;
    const DeviceMemory lse_memory(static_cast<std::size_t>(s.tokens) * 4);
    CrossEntropyOutputs to;
    to.lse = TensorView(lse_memory.data(), DType::f32, {s.tokens});
    to.d_hidden = TensorView(hidden.data(), DType::f32, {s.tokens, s.dim});
    to.d_weight = TensorView(weight.data(), DType::f32, {s.vocab, s.dim});
    const LossPlan plan = plan_cross_entropy(
        options, in, to, {context.device(), 1024_MiB, far ? kind : PlanKind::recompute, 0.0});
    const Workspace workspace(context, plan);
    cross_entropy(context, plan, options, in, to, workspace);
    const LossStatistics statistics = device_statistics(context, plan, workspace);
    d_hidden[far].resize(hidden.bytes() / 4);
    d_weight[far].resize(weight.bytes() / 4);
    cuda::copy_to_host(d_hidden[far].data(), hidden.data(), hidden.bytes(), nullptr);
    cuda::copy_to_host(d_weight[far].data(), weight.data(), weight.bytes(), nullptr);
    lse[far].resize(static_cast<std::size_t>(s.tokens));
    cuda::copy_to_host(lse[far].data(), lse_memory.data(), lse_memory.bytes(), nullptr);
    if (far) out = {{"selected", statistics.far.selected}, {"bound", statistics.far.bound}};
  }
  out["d_hidden_error"] = relative(d_hidden[1], d_hidden[0]);
  out["d_weight_error"] = relative(d_weight[1], d_weight[0]);
  double squares = 0.0, most = 0.0;
  for (std::size_t i = 0; i < lse[0].size(); ++i) {
    const double off = std::fabs(static_cast<double>(lse[1][i]) - static_cast<double>(lse[0][i]));
    squares += off * off;
    most = std::max(most, off);
  }
  out["lse_rms"] = std::sqrt(squares / static_cast<double>(lse[0].size()));
  out["lse_max"] = most;
  return out;
}

nlohmann::json measure(const Head& head, const DeviceBenchOptions& o, const CublasGemm& cublas,
                       const Context& context) {
  const Shape& s = head.shape;
  const DeviceMemory block = normal_matrix(s.tokens, s.vocab, 1.0f, 5);
  const auto weights = static_cast<std::size_t>(s.vocab * s.dim);
  const DeviceMemory d_hidden(static_cast<std::size_t>(s.tokens * s.dim) * 2);
  const DeviceMemory d_weight(weights * 4);
  const DeviceMemory loss(4);
  const CrossEntropyOptions options;

  std::vector<Row> rows;
  if (cublas.missing().empty() && o.row.empty()) {
    rows.emplace_back("cuBLAS logits", [&] {
      cublas.multiply(head.hidden.data(), head.weight.data(), block.data(), s.tokens, s.vocab,
                      s.dim);
    });
    rows.emplace_back("cuBLAS d_hidden", [&] {
      cublas.multiply_plain(block.data(), head.weight.data(), d_hidden.data(), s.tokens, s.dim,
                            s.vocab);
    });
    rows.emplace_back("cuBLAS d_weight", [&] {
      cublas.multiply_transposed(block.data(), head.hidden.data(), d_weight.data(), s.vocab, s.dim,
                                 s.tokens);
    });
  }
  const PlanCase cases[] = {
      {"forward", PlanKind::forward, DType::f32, 64_MiB, ""},
      {"dense, fp32 d_weight", PlanKind::dense, DType::f32, 512_MiB, ""},
      {"dense, bf16 d_weight", PlanKind::dense, DType::bf16, 512_MiB + weights * 4, ""},
      {"dense, bf16, all memory", PlanKind::dense, DType::bf16, 8192_MiB, ""},
      {"dense, bf16, no budget", PlanKind::dense, DType::bf16, 0, ""},
      {"stored, fp32 d_weight", PlanKind::stored, DType::f32, 512_MiB, ""},
      {"recompute, bf16 d_weight", PlanKind::recompute, DType::bf16, 256_MiB, ""},
      {"dense, fp32, 2 GiB", PlanKind::dense, DType::f32, 2048_MiB, ""},
      {"cublas kernel, fp32, 2 GiB", PlanKind::dense, DType::f32, 2048_MiB, "cublas"},
      {"far backward, fp32", PlanKind::far_backward, DType::f32, 512_MiB, ""},
      {"far backward, bf16", PlanKind::far_backward, DType::bf16, 512_MiB, ""},
      {"far backward, fp32, 256 MiB", PlanKind::far_backward, DType::f32, 256_MiB, ""},
      {"far backward, fp32, 2 GiB", PlanKind::far_backward, DType::f32, 2048_MiB, ""},
      {"far backward, fp32, sample", PlanKind::far_backward, DType::f32, 512_MiB, "", 16},
      {"far both, fp32, sample", PlanKind::far_both, DType::f32, 512_MiB, "", 16},
      {"far both, fp32", PlanKind::far_both, DType::f32, 512_MiB, ""},
      {"far both, bf16", PlanKind::far_both, DType::bf16, 512_MiB, ""},
      {"far both, fp32, 256 MiB", PlanKind::far_both, DType::f32, 256_MiB, ""},
      {"far both, fp32, 2 GiB", PlanKind::far_both, DType::f32, 2048_MiB, ""},
  };
  std::vector<std::unique_ptr<PlanRun>> runs;
  for (const PlanCase& c : cases) {
    if (c.kind >= PlanKind::far_backward && head.order.empty()) continue;
    if (std::string_view(c.name).find(o.row) == std::string_view::npos) continue;
    auto run = std::make_unique<PlanRun>();
    run->in.hidden = ConstTensorView(head.hidden.data(), DType::bf16, {s.tokens, s.dim});
    run->in.weight = ConstTensorView(head.weight.data(), DType::bf16, {s.vocab, s.dim});
    run->in.targets = ConstTensorView(head.targets.data(), DType::i32, {s.tokens});
    run->in.order = head.order;
    run->out.loss = TensorView(loss.data(), DType::f32, {});
    if (c.kind != PlanKind::forward) {
      run->out.d_hidden = TensorView(d_hidden.data(), DType::bf16, {s.tokens, s.dim});
      run->out.d_weight = TensorView(d_weight.data(), c.weight_dtype, {s.vocab, s.dim});
    }
    try {
      DeviceLimits limits = context.device();
      limits.kernel = c.kernel;
      PlanRequest request{limits, c.budget, c.kind, 0.0};
      request.sample_every = c.sample_every;
      run->plan = plan_cross_entropy(options, run->in, run->out, request);
    } catch (const Error& error) {
      std::fprintf(stderr, "%s: %s: %s\n", s.name.c_str(), c.name, error.what());
      continue;
    }
    run->workspace = std::make_unique<Workspace>(context, run->plan);
    PlanRun* const at = run.get();
    Row row(c.name, [&context, &options, at] {
      cross_entropy(context, at->plan, options, at->in, at->out, *at->workspace);
    });
    row.workspace = run->plan.workspace_bytes();
    row.predicted_ms = run->plan.predicted_seconds * 1e3;
    row.passes = run->plan.passes;
    rows.push_back(std::move(row));
    runs.push_back(std::move(run));
  }
  if (rows.empty()) {
    std::fprintf(stderr, "%s: no plan of its has '%s' in its name\n", s.name.c_str(),
                 o.row.c_str());
    return {};
  }

  const std::size_t used = cuda::memory_in_use();
  cuda::Timer timer;
  // A GPU at its power limit has a clock that depends on the last tenths of a second. Each row is
  // therefore timed after as long of itself, in rounds.
  constexpr int kRounds = 3;
  constexpr float kWarmMs = 150.0f;
  for (int round = 0; round < kRounds; ++round) {
    for (Row& row : rows) {
      for (float warm = 0.0f; warm < kWarmMs;) {
        timer.start(nullptr);
        row.run();
        warm += timer.stop(nullptr);
      }
      for (int r = 0; r < std::max(1, o.repeat / kRounds); ++r) {
        timer.start(nullptr);
        row.run();
        row.times.push_back(timer.stop(nullptr));
      }
    }
  }
  float value = 0.0f;
  cuda::copy_to_host(&value, loss.data(), 4, nullptr);
  nlohmann::json out = {{"name", s.name},
                        {"tokens", s.tokens},
                        {"dim", s.dim},
                        {"vocab", s.vocab},
                        {"loss", value},
                        {"workspace_by_meter", context.memory().peak_bytes()},
                        {"driver_growth_during_runs", cuda::memory_in_use() - used}};
  const double flops = 2.0 * static_cast<double>(s.tokens) * static_cast<double>(s.dim) *
                       static_cast<double>(s.vocab);
  double floor = 0.0;
  for (const Row& row : rows) {
    const bool gemm = row.name.starts_with("cuBLAS");
    if (gemm) floor += row.median();
    nlohmann::json entry = {{"name", row.name},
                            {"ms", row.median()},
                            {"tflops", row.passes * flops / row.median() * 1e-9}};
    if (!gemm) {
      entry["workspace_bytes"] = row.workspace;
      entry["passes"] = row.passes;
      entry["predicted_ms"] = row.predicted_ms;
      if (floor > 0.0)
        entry["ratio"] = row.median() / (row.name == "forward" ? rows[0].median() : floor);
    }
    out["rows"].push_back(entry);
  }
  out["roofline_ms"] = floor;
  if (!head.order.empty()) out["order_ms"] = head.order_ms;
  for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
    if (std::any_of(runs.begin(), runs.end(),
                    [&](const auto& run) { return run->plan.kind == kind; }))
      out["far"][std::string(name_of(kind))] = far_errors(head, kind, context);
  }
  for (const auto& run : runs) out["plans"].push_back(run->plan.explain());
  return out;
}

void print(const nlohmann::json& head) {
  std::printf("%s: N %lld, D %lld, V %lld, floor %.2f ms, loss %.4f\n",
              head["name"].get<std::string>().c_str(), head["tokens"].get<long long>(),
              head["dim"].get<long long>(), head["vocab"].get<long long>(),
              head["roofline_ms"].get<double>(), head["loss"].get<double>());
  for (const auto& row : head["rows"]) {
    std::printf("  %-28s %9.3f ms %8.1f TFLOP/s", row["name"].get<std::string>().c_str(),
                row["ms"].get<double>(), row["tflops"].get<double>());
    if (row.contains("workspace_bytes")) {
      std::printf("  ratio %.3f  predicted %8.3f ms  workspace %s", row.value("ratio", 0.0),
                  row["predicted_ms"].get<double>(),
                  format_bytes(row["workspace_bytes"].get<std::size_t>()).c_str());
    }
    std::printf("\n");
  }
  if (head.contains("order_ms"))
    std::printf("  an order, ms: %s\n", head["order_ms"].dump().c_str());
  if (head.contains("far")) std::printf("  errors: %s\n", head["far"].dump().c_str());
  std::fflush(stdout);
}

}  // namespace

int bench_device(const DeviceBenchOptions& o) {
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) {
    std::fprintf(stderr, "bench_head: %s\n", reason.c_str());
    return 1;
  }
  ContextOptions context_options;
  context_options.device = DeviceKind::cuda;
  const Context context(context_options);
  const CublasGemm cublas;
  if (!cublas.missing().empty())
    std::fprintf(stderr, "bench_head: without cuBLAS: %s\n", cublas.missing().c_str());
  nlohmann::json all = nlohmann::json::array();
  const auto add = [&](const Head& head) {
    nlohmann::json measured = measure(head, o, cublas, context);
    if (measured.is_null()) return;
    all.push_back(std::move(measured));
    if (!o.json) print(all.back());
  };
  for (const Shape& shape :
       {Shape{"Gemma-2-2B", 8192, 2304, 256000}, Shape{"Llama-3-8B", 8192, 4096, 128256},
        Shape{"GPT-2", 32768, 768, 50304}}) {
    if (o.only.empty() || o.only == shape.name) add(random_head(shape));
  }
  for (const std::string& path : o.real_heads) {
    if (!o.only.empty() && o.only != file_name(path)) continue;
    for (const std::int64_t dim : {4096, 768}) add(rotated_head(path, dim, cublas, context));
  }
  if (all.empty()) {
    std::fprintf(stderr, "bench_head: no head and plan of --only '%s' and --row '%s'\n",
                 o.only.c_str(), o.row.c_str());
    return 1;
  }
  if (o.json) std::printf("%s\n", all.dump(2).c_str());
  return 0;
}

}  // namespace logitless::bench
