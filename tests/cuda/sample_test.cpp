// Samples and best entries from stored logits on a GPU (src/sample/stored.h). The references are
// noise, scores and filters in float64, and the bits of the head's forward.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/device/kernel.h"
#include "logitless/logitless.h"
#include "sample/form.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Noise by Philox-4x32 with 10 rounds, written independently of the library's.
std::array<std::uint32_t, 4> philox(std::uint32_t key0, std::uint32_t key1, std::uint32_t block,
                                    std::uint32_t part) {
  std::uint32_t a = block, b = part, c = 0, d = 0;
  for (std::uint32_t round = 0; round < 10; ++round) {
    const std::uint64_t of_a = a * 0xD2511F53ull, of_c = c * 0xCD9E8D57ull;
    a = static_cast<std::uint32_t>(of_c >> 32) ^ b ^ (key0 + round * 0x9E3779B9u);
    b = static_cast<std::uint32_t>(of_c);
    c = static_cast<std::uint32_t>(of_a >> 32) ^ d ^ (key1 + round * 0xBB67AE85u);
    d = static_cast<std::uint32_t>(of_a);
  }
  return {a, b, c, d};
}
double noise_of(std::uint64_t seed, std::int64_t counter, std::int64_t vocab_id) {
  const auto key = noise_key(seed);
  const auto key0 = static_cast<std::uint32_t>(key[0] + counter);
  const auto key1 = static_cast<std::uint32_t>(key[1]), id = static_cast<std::uint32_t>(vocab_id);
  const std::uint32_t row = id / 8 % 4, odd = id % 2;  // in 32 entries of four blocks
  const std::uint32_t block = id / 32 * 4 + id % 8 / 2;
  const std::uint32_t upper = philox(key0, key1, block, 0)[row] >> 16 * odd & 0xFFFFu;
  const std::uint32_t lower = philox(key0, key1, block, 1 + row / 2)[row % 2 * 2 + odd] >> 9;
  const double v = std::min((upper + (lower + 0.5) * 0x1p-23) * 0x1p-16, 1.0 - 0x1p-24);
  return -std::log(-std::log1p(-v));
}

// A copy on the device.
class OnDevice {
 public:
  OnDevice() = default;
  OnDevice(const void* data, std::size_t bytes) : memory_(bytes) {
    cuda::copy_to_device(memory_.data(), data, bytes, nullptr);
  }
  explicit OnDevice(const Tensor& t) : OnDevice(t.bytes().data(), t.bytes().size()) {}
  template <typename T>
  explicit OnDevice(const std::vector<T>& values)
      : OnDevice(values.data(), values.size() * sizeof(T)) {}
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> values(memory_.bytes() / sizeof(T));
    cuda::copy_to_host(values.data(), memory_.data(), memory_.bytes(), nullptr);
    return values;
  }
  void* data() const { return memory_.data(); }

 private:
  cuda::DeviceMemory memory_;
};

struct Case {
  HeadSpec head;
  SampleOptions options;
  bool logit_bias = false;
  bool per_token = false;  // temperature, top_p and min_p
  std::int64_t first_counter = 0;
  std::string kernel = {};  // empty: the best
};

struct Samples {
  std::vector<std::int64_t> tokens;
  std::vector<float> log_prob;
  std::string plan;
};

// A case on the device.
struct Drawn {
  explicit Drawn(const Case& given) : of(given), problem(given.head) {
    const auto n = static_cast<std::size_t>(of.head.tokens);
    hidden = OnDevice(problem.hidden);
    weight = OnDevice(problem.weight);
    if (of.head.bias) {
      std::vector<float> bias;
      for (const double b : problem.oracle.bias) bias.push_back(static_cast<float>(b));
      bias_of_head = OnDevice(bias);
    }
    for (std::int64_t j = 0; j < of.head.vocab; ++j)
      logit_bias.push_back(j % 3 == 0 ? -std::numeric_limits<float>::infinity()
                                      : static_cast<float>(j % 7) * 0.25f);
    for (std::size_t i = 0; i < n; ++i) {
      counters.push_back(of.first_counter + static_cast<std::int64_t>(i) * 5);
      temperature.push_back(i % 5 == 0 ? 0.0f : 0.25f * static_cast<float>(i % 9));
      min_p.push_back(0.01f * static_cast<float>(i % 20));
      top_p.push_back(1.0f - 0.1f * static_cast<float>(i % 10));
    }
    device_logit_bias = OnDevice(logit_bias);
    device_temperature = OnDevice(temperature);
    device_min_p = OnDevice(min_p);
    device_top_p = OnDevice(top_p);
    device_counters = OnDevice(counters);
  }

  SampleInputs inputs(std::int64_t n) const {
    const HeadSpec& s = of.head;
    SampleInputs in;
    in.hidden = ConstTensorView(hidden.data(), s.dtype, {n, s.dim});
    in.weight = ConstTensorView(weight.data(), s.dtype, {s.vocab, s.dim});
    if (s.bias) in.bias = ConstTensorView(bias_of_head.data(), DType::f32, {s.vocab});
    if (of.logit_bias)
      in.logit_bias = ConstTensorView(device_logit_bias.data(), DType::f32, {s.vocab});
    if (of.per_token) {
      in.temperature = ConstTensorView(device_temperature.data(), DType::f32, {n});
      in.min_p = ConstTensorView(device_min_p.data(), DType::f32, {n});
      in.top_p = ConstTensorView(device_top_p.data(), DType::f32, {n});
    }
    in.counter = ConstTensorView(device_counters.data(), DType::i64, {n});
    return in;
  }

  // The first n tokens.
  Samples run(std::int64_t n, std::size_t budget = 0, const void* key = nullptr) const {
    const OnDevice tokens(std::vector<std::int64_t>(static_cast<std::size_t>(n), -7));
    const OnDevice log_prob(std::vector<float>(static_cast<std::size_t>(n), 7.0f));
    SampleInputs in = inputs(n);
    SampleOptions options = of.options;
    if (key != nullptr) {
      in.key = ConstTensorView(key, DType::i64, {2});
      options.seed += 1;
    }
    const SampleOutputs out{TensorView(tokens.data(), DType::i64, {n}),
                            TensorView(log_prob.data(), DType::f32, {n})};
    const SamplePlan plan = plan_sample(context, options, in, out, budget);
    const Workspace workspace(context, plan.workspace_bytes());
    sample(context, plan, options, in, out, workspace);
    cuda::synchronize(nullptr);
    if (budget > 0) {
      EXPECT_LE(plan.workspace_bytes(), budget);
    }
    return {tokens.read<std::int64_t>(), log_prob.read<float>(), plan.explain()};
  }

  std::vector<float> log_probs_of(const std::vector<std::int64_t>& tokens) const {
    const HeadSpec& s = of.head;
    const OnDevice targets(tokens);
    const OnDevice log_prob(std::vector<float>(tokens.size()));
    const SampleInputs in = inputs(s.tokens);
    const HeadInputs head{.hidden = in.hidden,
                          .weight = in.weight,
                          .targets = ConstTensorView(targets.data(), DType::i64, {s.tokens}),
                          .bias = in.bias};
    const HeadOutputs out{.log_prob = TensorView(log_prob.data(), DType::f32, {s.tokens})};
    const HeadOptions options{.softcap = of.options.softcap, .logit_scale = of.options.logit_scale};
    const LossPlan plan = plan_head_forward(context, options, head, out, {});
    const Workspace workspace(context, plan.workspace_bytes());
    head_forward(context, plan, options, head, out, workspace);
    cuda::synchronize(nullptr);
    return log_prob.read<float>();
  }

  // Returns the ids of the k best entries, [tokens, k].
  std::vector<std::int64_t> best(std::int64_t k) const {
    const std::int64_t n = of.head.tokens;
    const auto count = static_cast<std::size_t>(n * k);
    const OnDevice ids(std::vector<std::int64_t>(count, -1));
    const OnDevice log_probs(std::vector<float>(count, 0.0f));
    const SampleInputs in = inputs(n);
    TopLogProbsOutputs out;
    out.top_ids = TensorView(ids.data(), DType::i64, {n, k});
    out.top_log_probs = TensorView(log_probs.data(), DType::f32, {n, k});
    const TopLogProbsInputs head{.hidden = in.hidden, .weight = in.weight};
    const SamplePlan plan = plan_top_logprobs(context, {.k = k}, head, out);
    EXPECT_NE(plan.explain().find("one GEMM"), std::string::npos) << plan.explain();
    const Workspace workspace(context, plan.workspace_bytes());
    top_logprobs(context, plan, {.k = k}, head, out, workspace);
    cuda::synchronize(nullptr);
    return ids.read<std::int64_t>();
  }

  // Returns the least logit that top_k and top_p keep of a row, of which top_p keeps `part` more.
  double least_kept(std::vector<double> z, double t, double top_p_of_token, double part) const {
    std::sort(z.begin(), z.end(), std::greater<>());
    if (of.options.top_k > 0) z.resize(static_cast<std::size_t>(of.options.top_k));
    if (top_p_of_token >= 1) return z.back();
    std::vector<double> p(z.size());
    for (std::size_t i = 0; i < z.size(); ++i) p[i] = std::exp((z[i] - z[0]) / t);
    const double wanted = (top_p_of_token + part) * std::accumulate(p.begin(), p.end(), 0.0);
    double sum = 0;
    for (std::size_t i = 0; i < z.size(); ++i)
      if ((sum += p[i]) >= wanted) return z[i];
    return z.back();
  }

  // Expects each token to have the greatest score of the entries that are kept, but for rounding.
  void expect_best(const std::vector<std::int64_t>& tokens) const {
    const HeadSpec& s = of.head;
    const OracleLogits logits = oracle_logits(problem.oracle);
    for (std::int64_t i = 0; i < s.tokens; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double t = of.per_token ? temperature[at] : of.options.temperature;
      const double p = of.per_token ? min_p[at] : of.options.min_p;
      const double most = of.per_token ? top_p[at] : of.options.top_p;
      const bool filters = of.options.top_k > 0 || most < 1;
      std::vector<double> z(static_cast<std::size_t>(s.vocab));
      for (std::int64_t j = 0; j < s.vocab; ++j) {
        const auto id = static_cast<std::size_t>(j);
        z[id] = logits.z[static_cast<std::size_t>(i * s.vocab + j)];
        if (of.logit_bias) z[id] += logit_bias[id];
      }
      const double top = *std::max_element(z.begin(), z.end());
      double best = -kInfinity, found = -kInfinity;
      const double divisor = t > 0 ? t : 1;
      const double near = 2e-5 * (1 + std::abs(top)) / divisor;
      // Some entries may be kept, and these are.
      const double some = filters ? least_kept(z, divisor, most, 1e-5) : -kInfinity;
      const double all = filters ? least_kept(z, divisor, most, -1e-5) : -kInfinity;
      for (std::int64_t j = 0; j < s.vocab; ++j) {
        const double logit = z[static_cast<std::size_t>(j)];
        double score = (logit - top) / divisor;
        const double above = score - std::log(p);  // of the entries that min_p keeps
        if (t > 0) score += noise_of(of.options.seed, counters[at], j);
        if (j == tokens[at]) {
          found = score;
          ASSERT_GE(above, -near) << i;
          ASSERT_GE((logit - some) / divisor, -near) << i;
        }
        if ((above >= near || p == 0) &&
            (!filters || (logit - all) / divisor >= near || j == tokens[at]))
          best = std::max(best, score);
      }
      ASSERT_GE(found, best - near) << i << ": " << tokens[at];
    }
  }

  Case of;
  HeadProblem problem;
  Context context{ContextOptions{.kernel = of.kernel, .device = DeviceKind::cuda}};
  OnDevice hidden, weight, bias_of_head;
  OnDevice device_logit_bias, device_temperature, device_top_p, device_min_p, device_counters;
  std::vector<float> logit_bias, temperature, top_p, min_p;
  std::vector<std::int64_t> counters;
};

class CudaSample : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda::device_missing(0);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static Case of(std::int64_t tokens, std::int64_t dim, std::int64_t vocab) {
    Case c;
    c.head.tokens = tokens;
    c.head.dim = dim;
    c.head.vocab = vocab;
    c.head.dtype = DType::bf16;
    c.head.weight_scale = 3.0;
    c.head.seed = static_cast<std::uint64_t>(tokens + dim + vocab);
    c.options.seed = 11;
    c.first_counter = (std::int64_t{1} << 32) - 100;  // its low 32 bits wrap
    return c;
  }
  static void expect_exact(const Case& c) {
    SCOPED_TRACE(describe(c.head));
    const Drawn drawn(c);
    const Samples made = drawn.run(c.head.tokens);
    ASSERT_NE(made.plan.find("one GEMM"), std::string::npos) << made.plan;
    drawn.expect_best(made.tokens);
    EXPECT_EQ(drawn.log_probs_of(made.tokens), made.log_prob);
  }
};

TEST_F(CudaSample, Shapes) {
  const std::int64_t shapes[][3] = {{1, 8, 1},      {1, 8, 2},        {7, 16, 255},
                                    {128, 64, 256}, {129, 72, 257},   {256, 40, 300},
                                    {300, 64, 511}, {20, 1024, 5003}, {600, 64, 3001}};
  for (const auto& s : shapes) expect_exact(of(s[0], s[1], s[2]));
}

TEST_F(CudaSample, OptionsAndPairsOfOptions) {
  const std::vector<void (*)(Case&)> changes = {
      [](Case&) {},
      [](Case& c) { c.head.bias = true; },
      [](Case& c) { c.head.softcap = c.options.softcap = 3.0f; },
      [](Case& c) { c.head.logit_scale = c.options.logit_scale = -1.7f; },
      [](Case& c) { c.head.dtype = DType::f16; },
      [](Case& c) { c.options.temperature = 0.0f; },
      [](Case& c) { c.options.temperature = 7.0f; },
      [](Case& c) { c.options.min_p = 0.1f; },
      [](Case& c) { c.options.top_k = 7; },
      [](Case& c) { c.options.top_p = 0.8f; },
      [](Case& c) { c.logit_bias = true; },
      [](Case& c) {
        c.per_token = true;
        c.options.temperature = 1.0f;
        c.options.top_p = 1.0f;
        c.options.min_p = 0.0f;
      },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    for (std::size_t j = i; j < changes.size(); ++j) {
      Case c = of(140, 40, 700);
      changes[i](c);
      changes[j](c);
      SCOPED_TRACE(testing::Message() << i << ", " << j);
      expect_exact(c);
    }
  }
}

// Kernels of other GPUs, for any dim.
TEST_F(CudaSample, OtherKernels) {
  for (const char* const kernel : {"sm80", "cublas"}) {
    if (!cuda::capability_refusal(cuda::find_device_kernel(kernel), cuda::compute_capability(0))
             .empty())
      continue;
    SCOPED_TRACE(kernel);
    for (const std::int64_t dim : {40, 37}) {
      Case c = of(300, dim, 3001);
      c.kernel = kernel;
      expect_exact(c);
      c.options.top_k = 50;
      c.options.top_p = 0.9f;
      expect_exact(c);
      c.head.bias = true;
      c.head.softcap = c.options.softcap = 3.0f;
      c.head.dtype = DType::f16;
      c.logit_bias = true;
      expect_exact(c);
    }
  }
  Case c = of(70, 24, 9000);
  c.head.dtype = DType::f32;  // kernel cublas
  c.options.top_p = 0.9f;
  expect_exact(c);
}

// Rows of more entries than a thread block sorts, and more of a set than there are tiles.
TEST_F(CudaSample, LargeSets) {
  for (const std::int64_t top_k : {0, 100, 5000}) {
    for (const float top_p : {0.0001f, 0.5f, 0.999f}) {
      Case c = of(20, 24, 20000);
      c.options.top_k = top_k;
      c.options.top_p = top_p;
      expect_exact(c);
      c.options.temperature = 50.0f;
      expect_exact(c);
    }
  }
}

// Equal logits: the noise alone chooses, and without noise the first entry.
TEST_F(CudaSample, EqualLogits) {
  Case c = of(300, 16, 4000);
  c.head.weight_scale = 0.0;
  expect_exact(c);
  const Samples plain = Drawn(c).run(300);
  c.options.top_k = 5;  // all are equal to the last
  c.options.top_p = 0.3f;
  EXPECT_EQ(Drawn(c).run(300).tokens, plain.tokens);
  c.options.temperature = 0.0f;
  for (const std::int64_t token : Drawn(c).run(300).tokens) EXPECT_EQ(token, 0);
}

// At a high temperature tokens are far below the greatest logit, and sums overflow.
TEST_F(CudaSample, TokensFarBelowTheGreatestLogit) {
  Case c = of(300, 64, 2000);
  c.head.weight_scale = 60.0;
  c.options.temperature = 1e6f;
  expect_exact(c);
}

TEST_F(CudaSample, TokensDoNotDependOnChunksAndTheirBatch) {
  const Case c = of(700, 64, 9000);
  const Drawn drawn(c);
  const Samples all = drawn.run(700);
  const Samples chunks = drawn.run(700, std::size_t{12} << 20);
  EXPECT_NE(chunks.plan.find("256 of 700 tokens"), std::string::npos) << chunks.plan;
  EXPECT_EQ(all.tokens, chunks.tokens);
  EXPECT_EQ(all.log_prob, chunks.log_prob);
  for (const std::int64_t n : {1, 64, 128, 129}) {
    const Samples some = drawn.run(n);
    EXPECT_TRUE(std::equal(some.tokens.begin(), some.tokens.end(), all.tokens.begin())) << n;
    EXPECT_TRUE(std::equal(some.log_prob.begin(), some.log_prob.end(), all.log_prob.begin())) << n;
  }
}

TEST_F(CudaSample, AKeyReplacesTheSeed) {
  const Case c = of(100, 16, 1000);
  const Drawn drawn(c);
  const auto key = noise_key(c.options.seed);
  const OnDevice on_device(std::vector<std::int64_t>{key[0], key[1]});
  EXPECT_EQ(drawn.run(100, 0, on_device.data()).tokens, drawn.run(100).tokens);
}

TEST_F(CudaSample, BestEntries) {
  for (const char* const kernel : {"", "sm80", "cublas"}) {
    for (const std::int64_t k : {1, 30, 200, 2048}) {
      Case c = of(70, 40, 5003);
      c.kernel = kernel;
      SCOPED_TRACE(testing::Message() << kernel << ", k " << k);
      const Drawn drawn(c);
      const OracleLogits logits = oracle_logits(drawn.problem.oracle);
      const auto found = drawn.best(k);
      for (std::int64_t i = 0; i < 70; ++i) {
        const double* const z = logits.z.data() + i * 5003;
        std::vector<double> sorted(z, z + 5003);
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        for (std::int64_t j = 0; j < k; ++j)
          ASSERT_NEAR(z[found[static_cast<std::size_t>(i * k + j)]],
                      sorted[static_cast<std::size_t>(j)], 2e-5 * (1 + std::abs(sorted[0])))
              << i << ", " << j;
      }
      c.head.weight_scale = 0.0;  // all are equal: the first k, in order
      const auto equal = Drawn(c).best(k);
      for (std::size_t j = 0; j < equal.size(); ++j)
        ASSERT_EQ(equal[j], static_cast<std::int64_t>(j) % k) << j;
    }
  }
}

// Budgets below 256 tokens of logits take programs.
TEST_F(CudaSample, Programs) {
  const Case c = of(300, 16, 4000);
  EXPECT_EQ(Drawn(c).run(300, std::size_t{3} << 20).plan.find("one GEMM"), std::string::npos);
}

}  // namespace
}  // namespace logitless::test
