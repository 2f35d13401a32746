// Forward kernel on a GPU against float64: shapes, options, masks, guarded memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

using cuda::DeviceMemory;

// Returns the kernels whose forward has tiles of its own, and so needs no library.
std::vector<std::string> kernels_of_tiles() {
  std::vector<std::string> kernels = tested_kernels();
  std::erase_if(kernels, [](const std::string& kernel) {
    return cuda::find_device_kernel(kernel).target_logits == nullptr;
  });
  return kernels;
}
const std::string& tested() { return testing::WithParamInterface<std::string>::GetParam(); }

// Device memory with a guard pattern on both sides.
class Guarded {
 public:
  Guarded() = default;
  explicit Guarded(std::size_t bytes) : bytes_(bytes), memory_(2 * kGuard + bytes) {
    cuda::fill_device(memory_.data(), kPattern, memory_.bytes(), nullptr);
  }
  explicit Guarded(const Tensor& t) : Guarded(t.bytes().size()) {
    if (bytes_ > 0) cuda::copy_to_device(data(), t.bytes().data(), bytes_, nullptr);
  }
  template <typename T = void>
  T* data() const {
    return bytes_ == 0 ? nullptr
                       : reinterpret_cast<T*>(static_cast<std::byte*>(memory_.data()) + kGuard);
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> out(bytes_ / sizeof(T));
    if (bytes_ > 0) cuda::copy_to_host(out.data(), data(), bytes_, nullptr);
    return out;
  }
  void expect_guards() const {
    if (bytes_ == 0) return;
    std::vector<unsigned char> all(memory_.bytes());
    cuda::copy_to_host(all.data(), memory_.data(), all.size(), nullptr);
    for (std::size_t at = 0; at < kGuard; ++at) {
      ASSERT_EQ(all[at], kPattern) << "written before it";
      ASSERT_EQ(all[kGuard + bytes_ + at], kPattern) << "written after it";
    }
  }

 private:
  static constexpr std::size_t kGuard = 1024;
  static constexpr unsigned char kPattern = 0xa5;
  std::size_t bytes_ = 0;
  DeviceMemory memory_;
};

// One problem on the device with all outputs.
struct DeviceRun {
  DeviceRun(const HeadProblem& p, bool extras, const std::string& name = tested())
      : kernel(cuda::find_device_kernel(name)),
        hidden(p.hidden),
        weight(p.weight),
        targets(p.targets),
        bias(p.bias),
        logit_weights(p.class_weight) {
    const HeadSpec& s = p.spec;
    cuda::ForwardShape& shape = call.shape;
    shape = {s.tokens, s.dim, s.vocab, s.dtype, s.per_token, extras, extras, extras};
    const auto rows = static_cast<std::size_t>(s.tokens);
    const auto slots = rows * static_cast<std::size_t>(s.per_token);
    lse = Guarded(rows * 4);
    target_logit = Guarded(slots * 4);
    log_prob = Guarded(slots * 4);
    if (extras) {
      entropy = Guarded(rows * 4);
      weighted = Guarded(rows * 4);
      argmax = Guarded(rows * 4);
    }
    bad = Guarded(8);
    workspace = Guarded(kernel.workspace_bytes(shape));
    call.hidden = hidden.data();
    call.hidden_stride = s.dim;
    call.weight = weight.data();
    call.weight_stride = s.dim;
    call.bias = bias.data<float>();
    call.logit_weights = logit_weights.data<float>();
    call.targets = targets.data();
    call.int64_targets = p.targets.view().dtype() == DType::i64;
    call.logit_scale = s.logit_scale;
    call.softcap = s.softcap;
    call.lse = lse.data<float>();
    call.target_logit = target_logit.data<float>();
    call.log_prob = log_prob.data<float>();
    call.entropy = entropy.data<float>();
    call.weighted_sum = weighted.data<float>();
    call.argmax = argmax.data<std::int32_t>();
    call.bad_target = bad.data<std::uint64_t>();
    call.workspace = workspace.data();
  }
  void run() {
    kernel.forward(call);
    cuda::synchronize(nullptr);
  }
  void expect_guards() const {
    for (const Guarded* g : {&hidden, &weight, &targets, &bias, &logit_weights, &lse, &target_logit,
                             &log_prob, &entropy, &weighted, &argmax, &bad, &workspace})
      g->expect_guards();
  }

  const cuda::DeviceKernel& kernel;
  Guarded hidden, weight, targets, bias, logit_weights;
  Guarded lse, target_logit, log_prob, entropy, weighted, argmax, bad, workspace;
  cuda::ForwardCall call;
};

void expect_close(const HeadProblem& problem, bool extras) {
  const OracleProblem& p = problem.oracle;
  DeviceRun device(problem, extras);
  device.run();
  device.expect_guards();
  EXPECT_EQ(device.bad.read<std::uint64_t>()[0], cuda::kNoBadTarget);
  const std::vector<float> lse = device.lse.read<float>();
  const std::vector<float> target_logit = device.target_logit.read<float>();
  const std::vector<float> log_prob = device.log_prob.read<float>();
  const std::vector<float> entropy = device.entropy.read<float>();
  const std::vector<float> weighted = device.weighted.read<float>();
  const std::vector<std::int32_t> argmax = device.argmax.read<std::int32_t>();

  const OracleLogits logits = oracle_logits(p);
  std::vector<double> exact_lse, got_lse;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const double* z = logits.z.data() + i * p.vocab;
    const bool ignored = oracle_ignored(p, i);
    exact_lse.push_back(ignored ? 0.0 : logits.lse[i]);
    got_lse.push_back(lse[i]);
    double size = 1;
    for (int k = 0; k < p.per_token; ++k) {
      const std::int64_t slot = i * p.per_token + k;
      const std::int64_t y = p.targets[slot];
      const double zy = y == p.ignore_index ? 0.0 : z[y];
      size = std::max(size, std::abs(zy));
      ASSERT_NEAR(target_logit[slot], zy, 2e-6 * size) << i;
      const double exact = y == p.ignore_index ? 0.0 : zy - logits.lse[i];
      ASSERT_NEAR(log_prob[slot], exact, 4e-6 * (size + std::abs(exact))) << i;
    }
    if (!extras) continue;
    double exact_entropy = 0, exact_weighted = 0, scale = 1;
    std::int64_t best = 0;
    for (std::int64_t j = 0; j < p.vocab; ++j) {
      const double log_p = z[j] - logits.lse[i];
      if (log_p > -700) exact_entropy -= std::exp(log_p) * log_p;
      exact_weighted += (p.class_weight.empty() ? 1.0 : p.class_weight[j]) * z[j];
      scale += std::abs(z[j]);
      if (z[j] > z[best]) best = j;
    }
    ASSERT_NEAR(entropy[i], ignored ? 0.0 : exact_entropy, 2e-5 * (1 + std::abs(logits.lse[i])));
    ASSERT_NEAR(weighted[i], ignored ? 0.0 : exact_weighted, 1e-6 * scale);
    if (ignored) {
      ASSERT_EQ(argmax[i], -1);
    } else {
      ASSERT_NEAR(z[argmax[i]], z[best], 1e-5 * (1 + std::abs(z[best])));
    }
  }
  EXPECT_LE(relative_error(got_lse, exact_lse), kLseBound);
}

HeadSpec spec_of(std::int64_t tokens, std::int64_t dim, std::int64_t vocab,
                 const std::string& kernel = tested()) {
  HeadSpec s;
  s.tokens = tokens;
  s.dim = dim;
  s.vocab = vocab;
  s.dtype = narrow_dtype(kernel);
  s.weight_scale = 3.0;
  s.seed = static_cast<std::uint64_t>(tokens * 7 + dim * 3 + vocab);
  return s;
}

class CudaForward : public testing::TestWithParam<std::string> {};

TEST_P(CudaForward, Shapes) {
  const std::int64_t shapes[][3] = {{1, 8, 1},        {1, 8, 2},       {7, 16, 255},
                                    {128, 64, 256},   {129, 72, 257},  {255, 64, 512},
                                    {256, 40, 300},   {257, 128, 511}, {300, 200, 1000},
                                    {1000, 64, 3000}, {513, 264, 70},  {20, 1024, 700}};
  for (const auto& s : shapes) {
    const HeadSpec spec = spec_of(s[0], s[1], s[2]);
    SCOPED_TRACE(describe(spec));
    const HeadProblem problem(spec);
    expect_close(problem, false);
    expect_close(problem, true);
  }
}

TEST_P(CudaForward, OptionsAndPairsOfOptions) {
  const std::vector<void (*)(HeadSpec&)> changes = {
      [](HeadSpec&) {},
      [](HeadSpec& s) { s.bias = true; },
      [](HeadSpec& s) { s.softcap = 3.0f; },
      [](HeadSpec& s) { s.logit_scale = -1.7f; },
      [](HeadSpec& s) { s.class_weight = true; },
      [](HeadSpec& s) { s.ignored = 0.4; },
      [](HeadSpec& s) { s.per_token = 3; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    for (std::size_t j = i; j < changes.size(); ++j) {
      HeadSpec spec = spec_of(300, 40, 700);
      changes[i](spec);
      changes[j](spec);
      spec.seed = 10 * i + j;
      SCOPED_TRACE(describe(spec));
      const HeadProblem problem(spec);
      expect_close(problem, false);
      expect_close(problem, true);
    }
  }
}

// At most 192 tokens have kernels of their own, and so have those after the last 256 of a head with
// many entries. A token's bits are the same.
TEST_P(CudaForward, BitsDoNotDependOnTheNumberOfTokens) {
  struct Case {
    std::int64_t tokens, dim, vocab;
    std::vector<std::int64_t> fewer;
  };
  const Case cases[] = {{256, 136, 700, {1, 64, 65, 128, 129, 192}},
                        {512, 8, 33792, {257, 384, 448}}};
  for (const Case& of : cases) {
    for (const int change : {0, 1, 2}) {
      HeadSpec spec = spec_of(of.tokens, of.dim, of.vocab);
      if (change == 1) spec.softcap = 3.0f;
      if (change == 2) spec.weight_scale = 300.0;  // sums leave the range
      const HeadProblem problem(spec);
      for (const bool extras : {false, true}) {
        DeviceRun whole(problem, extras);
        whole.run();
        for (const std::int64_t tokens : of.fewer) {
          SCOPED_TRACE(concat(describe(spec), ", ", tokens, " of them"));
          DeviceRun some(problem, extras);
          some.call.shape.tokens = tokens;
          some.run();
          some.expect_guards();
          const auto expect_same = [&](const Guarded& got, const Guarded& expected) {
            const auto bits = got.read<std::uint32_t>(), all = expected.read<std::uint32_t>();
            if (all.empty()) return;
            EXPECT_TRUE(std::equal(bits.begin(), bits.begin() + tokens, all.begin()));
          };
          expect_same(some.lse, whole.lse);
          expect_same(some.log_prob, whole.log_prob);
          expect_same(some.entropy, whole.entropy);
          expect_same(some.weighted, whole.weighted);
          expect_same(some.argmax, whole.argmax);
        }
      }
    }
  }
}

// References come from the target logits; where other logits are hundreds of nats above them, the
// sums overflow and are recomputed.
TEST_P(CudaForward, LogitsFarAboveTheReference) {
  for (const bool extras : {false, true}) {
    HeadSpec spec = spec_of(600, 16, 1000);
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i) problem.hidden.set(i * spec.dim, 16.0);
    for (std::int64_t j = 0; j < spec.vocab; ++j) {
      problem.weight.set(j * spec.dim, j < 256 ? -20.0 : j % 2 == 0 ? 20.0 : 0.0);
    }
    for (std::int64_t i = 300; i < 310; ++i) problem.hidden.set(i * spec.dim, 0.0);
    problem.refresh_oracle();
    expect_close(problem, extras);
  }
}

TEST_P(CudaForward, EqualLogitsCostLogV) {
  for (const std::int64_t vocab : {2, 255, 256, 257, 5000}) {
    HeadProblem problem(spec_of(130, 16, vocab));
    problem.weight.fill(0.0);
    problem.refresh_oracle();
    DeviceRun device(problem, true);
    device.run();
    for (const float lse : device.lse.read<float>())
      EXPECT_NEAR(lse, std::log(static_cast<double>(vocab)), 1e-6 * std::log(vocab));
    for (const std::int32_t vocab_id : device.argmax.read<std::int32_t>()) EXPECT_EQ(vocab_id, 0);
  }
}

TEST_P(CudaForward, MaskedVocabAndNanRows) {
  HeadSpec spec = spec_of(300, 32, 900);
  spec.bias = true;
  HeadProblem problem(spec);
  for (std::int64_t j = 0; j < spec.vocab; ++j) {
    if (j < 300 || j % 3 == 0) problem.bias.set(j, -std::numeric_limits<double>::infinity());
  }
  for (std::int64_t i = 0; i < spec.tokens; ++i) problem.targets.set(i, 301);
  problem.refresh_oracle();
  DeviceRun clean(problem, true);
  clean.run();
  const OracleLogits logits = oracle_logits(problem.oracle);
  EXPECT_LE(relative_error(
                [&] {
                  const std::vector<float> got = clean.lse.read<float>();
                  return std::vector<double>(got.begin(), got.end());
                }(),
                logits.lse),
            kLseBound);
  for (const float h : clean.entropy.read<float>()) EXPECT_TRUE(std::isfinite(h) && h > 0);
  for (const std::int32_t vocab_id : clean.argmax.read<std::int32_t>())
    EXPECT_TRUE(vocab_id >= 300 && vocab_id % 3 != 0);

  problem.hidden.set(70 * spec.dim + 3, NAN);
  DeviceRun device(problem, true);
  device.run();
  const std::vector<float> before = clean.lse.read<float>();
  const std::vector<float> after = device.lse.read<float>();
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    if (i == 70) {
      EXPECT_TRUE(std::isnan(after[i]));
    } else {
      EXPECT_EQ(after[i], before[i]);
    }
  }
}

TEST_P(CudaForward, BadTargetIsReportedByItsPosition) {
  HeadProblem problem(spec_of(300, 16, 100));
  problem.targets.set(200, 100);
  problem.targets.set(120, -1);
  DeviceRun device(problem, false);
  device.run();
  EXPECT_EQ(device.bad.read<std::uint64_t>()[0], 120u);
  device.expect_guards();
}

// The vocabulary in ranges, one call each, with the logits of all targets given. Sums relative to
// one reference merge to those of the full vocabulary.
TEST_P(CudaForward, RangesOfVocabAddUp) {
  struct Case {
    bool peaked;  // the ranges' sums leave fp32's range, above and below
    int per_token;
  };
  for (const Case& option : {Case{false, 1}, Case{false, 3}, Case{true, 1}}) {
    HeadSpec spec = spec_of(300, 40, 1000);
    spec.per_token = option.per_token;
    spec.ignored = 0.2;
    spec.bias = true;
    HeadProblem problem(spec);
    if (option.peaked) {
      for (std::int64_t i = 0; i < spec.tokens; ++i) problem.hidden.set(i * spec.dim, 16.0);
      for (std::int64_t j = 0; j < spec.vocab; ++j)
        problem.weight.set(j * spec.dim, j < 256 ? -20.0 : j < 700 ? 0.0 : 20.0);
      problem.refresh_oracle();
    }
    DeviceRun whole(problem, true);
    const auto rows = static_cast<std::size_t>(spec.tokens);
    const auto slots = rows * static_cast<std::size_t>(spec.per_token);
    const std::int64_t borders[] = {0, 256, 257, 700, 1000};
    constexpr int kRanges = 4;
    const auto range = [&](DeviceRun& run, int r) {
      run.call.vocab_begin = borders[r];
      run.call.global_vocab = spec.vocab;
      run.call.shape.vocab = borders[r + 1] - borders[r];
      run.call.weight = static_cast<const std::byte*>(run.call.weight) + borders[r] * spec.dim * 2;
      run.call.bias += borders[r];
      if (run.call.logit_weights != nullptr) run.call.logit_weights += borders[r];
    };
    std::vector<float> given(slots, 0.0f);
    for (int r = 0; r < kRanges; ++r) {
      DeviceRun part(problem, true);
      range(part, r);
      const Guarded logits(slots * 4);
      part.kernel.target_logits(part.call, logits.data<float>());
      const std::vector<float> own = logits.read<float>();
      for (std::size_t s = 0; s < slots; ++s) {
        const std::int64_t vocab_id = problem.oracle.targets[s];
        const bool here = vocab_id >= borders[r] && vocab_id < borders[r + 1];
        if (here) given[s] = own[s];
        EXPECT_TRUE(here || own[s] == 0.0f) << "slot " << s;
      }
      logits.expect_guards();
    }
    whole.run();
    EXPECT_EQ(std::memcmp(given.data(), whole.target_logit.read<float>().data(), slots * 4), 0);

    std::vector<double> sums(rows, 0.0), weighted(rows, 0.0);
    std::vector<double> entropy(rows, 0.0);
    const std::vector<float> lse = whole.lse.read<float>();
    const std::vector<std::int32_t> argmax = whole.argmax.read<std::int32_t>();
    std::vector<bool> found(rows, false);
    for (int r = 0; r < kRanges; ++r) {
      DeviceRun part(problem, true);
      range(part, r);
      const Guarded logits(slots * 4);
      cuda::copy_to_device(logits.data(), given.data(), slots * 4, nullptr);
      part.call.given_logits = logits.data<float>();
      part.run();
      part.expect_guards();
      EXPECT_EQ(part.bad.read<std::uint64_t>()[0], cuda::kNoBadTarget);
      const std::vector<float> part_lse = part.lse.read<float>();
      const std::vector<float> part_entropy = part.entropy.read<float>();
      const std::vector<float> part_weighted = part.weighted.read<float>();
      const std::vector<std::int32_t> best = part.argmax.read<std::int32_t>();
      EXPECT_EQ(std::memcmp(given.data(), part.target_logit.read<float>().data(), slots * 4), 0);
      for (std::size_t i = 0; i < rows; ++i) {
        weighted[i] += part_weighted[i];
        found[i] = found[i] || best[i] == argmax[i];
        if (oracle_ignored(problem.oracle, static_cast<std::int64_t>(i))) {
          EXPECT_EQ(best[i], -1);
          continue;
        }
        EXPECT_TRUE(best[i] >= borders[r] && best[i] < borders[r + 1]) << best[i];
        const double share = std::exp(static_cast<double>(part_lse[i]) - lse[i]);
        sums[i] += share;
        // H = lse - sum p z; the range's H is that of its own p.
        if (share > 0.0) entropy[i] += share * (part_lse[i] - part_entropy[i]);
      }
    }
    const OracleLogits exact = oracle_logits(problem.oracle);
    for (std::size_t i = 0; i < rows; ++i) {
      EXPECT_TRUE(found[i]) << "argmax of token " << i;
      if (oracle_ignored(problem.oracle, static_cast<std::int64_t>(i))) continue;
      const double size = 1.0 + std::abs(exact.lse[i]);
      EXPECT_NEAR(std::log(sums[i]) + lse[i], exact.lse[i], 2e-6 * size) << i;
      EXPECT_NEAR(lse[i] - entropy[i], whole.entropy.read<float>()[i], 4e-5 * size) << i;
      EXPECT_NEAR(weighted[i], whole.weighted.read<float>()[i], 1e-5 * size * spec.vocab) << i;
    }
  }
}

TEST_P(CudaForward, ATargetElsewhereIsNoBadOne) {
  HeadProblem problem(spec_of(300, 16, 100));
  problem.targets.set(120, 200);
  problem.targets.set(200, 300);
  DeviceRun device(problem, false);
  device.call.global_vocab = 300;
  device.call.vocab_begin = 50;
  device.run();
  EXPECT_EQ(device.bad.read<std::uint64_t>()[0], 200u);
  EXPECT_TRUE(std::isfinite(device.lse.read<float>()[120]));
  EXPECT_EQ(device.target_logit.read<float>()[120], 0.0f);
  device.expect_guards();
}

TEST_P(CudaForward, SameBitsEveryTime) {
  HeadSpec spec = spec_of(1000, 72, 5000);
  const HeadProblem problem(spec);
  for (const bool extras : {false, true}) {
    std::vector<float> lse, log_prob, entropy;
    for (int run = 0; run < 20; ++run) {
      DeviceRun device(problem, extras);
      device.run();
      if (run == 0) {
        lse = device.lse.read<float>();
        log_prob = device.log_prob.read<float>();
        entropy = device.entropy.read<float>();
      }
      EXPECT_EQ(std::memcmp(lse.data(), device.lse.read<float>().data(), lse.size() * 4), 0);
      EXPECT_EQ(
          std::memcmp(log_prob.data(), device.log_prob.read<float>().data(), log_prob.size() * 4),
          0);
      EXPECT_EQ(
          std::memcmp(entropy.data(), device.entropy.read<float>().data(), entropy.size() * 4), 0);
    }
  }
}

TEST_P(CudaForward, MoreThan32BitsOfLogits) {
  // Four columns with one of 8 values in each row: the log-sum-exp in closed form.
  const std::int64_t tokens = 70001, vocab = 32768;
  HeadSpec spec = spec_of(1, 8, 1);
  HeadProblem problem(spec);
  problem.spec.tokens = tokens;
  problem.spec.vocab = vocab;
  problem.hidden = Tensor(spec.dtype, {tokens, 8});
  problem.weight = Tensor(spec.dtype, {vocab, 8});
  problem.targets = Tensor(DType::i32, {tokens});
  problem.hidden.fill(0.0);
  problem.weight.fill(0.0);
  const auto x = [](std::int64_t i) { return 0.5 * static_cast<double>(i % 8) - 1.5; };
  for (std::int64_t i = 0; i < tokens; ++i) {
    problem.hidden.set(i * 8, x(i));
    problem.targets.set(i, static_cast<double>(i * 40503 % vocab));
  }
  for (std::int64_t j = 0; j < vocab; ++j) problem.weight.set(j * 8, x(j + 3));
  DeviceRun device(problem, false);
  device.run();
  const std::vector<float> lse = device.lse.read<float>();
  const std::vector<float> target_logit = device.target_logit.read<float>();
  for (std::int64_t i = 0; i < tokens; ++i) {
    double sum = 0;
    for (std::int64_t b = 0; b < 8; ++b)
      sum += std::exp(x(i) * x(b)) * static_cast<double>(vocab) / 8;
    ASSERT_NEAR(lse[i], std::log(sum), 1e-6 * std::log(sum)) << i;
    ASSERT_NEAR(target_logit[i], x(i) * x(i * 40503 % vocab + 3), 1e-6);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaForward);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, CudaForward, testing::ValuesIn(kernels_of_tiles()),
                         [](const auto& kernel) { return kernel.param; });

TEST(CudaForwardOfHopper, RefusesWhatItCannotRead) {
  const cuda::DeviceKernel& hopper = cuda::find_device_kernel("hopper");
  if (std::ranges::count(kernels_of_tiles(), "hopper") == 0) GTEST_SKIP() << "no GPU of Hopper";
  const HeadProblem problem(spec_of(10, 16, 20, "hopper"));
  DeviceRun device(problem, false, "hopper");
  EXPECT_EQ(hopper.far->unsupported(device.call), "");
  cuda::ForwardCall call = device.call;
  call.shape.dtype = DType::f32;
  EXPECT_EQ(hopper.far->unsupported(call), "multiplies bf16, hidden and weight are f32");
  call = device.call;
  call.shape.dim = 12;
  EXPECT_EQ(hopper.far->unsupported(call), "dim: expected a multiple of 8, got 12");
  call = device.call;
  call.weight_stride = 18;
  EXPECT_EQ(hopper.far->unsupported(call),
            "weight: expected rows a multiple of 8 elements apart, at least 16, got 18");
  EXPECT_THROW(hopper.forward(call), Unsupported);
  call = device.call;
  call.hidden = static_cast<const std::byte*>(call.hidden) + 2;
  EXPECT_EQ(hopper.far->unsupported(call), "hidden: expected an address that is a multiple of 16");
}

}  // namespace
}  // namespace logitless::test
