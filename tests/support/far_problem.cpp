#include "support/far_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "kernels/cpu_head.h"
#include "kernels/device/far.h"
#include "kernels/device/kernel.h"
#include "support/mirror.h"

namespace logitless::test {

FarProblem::FarProblem(const HeadSpec& s, double span) : HeadProblem(s) {
  std::mt19937_64 random(s.seed * 77 + 5);
  std::normal_distribution<double> normal;
  std::vector<std::int64_t> vocab_ids(s.vocab);
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  std::shuffle(vocab_ids.begin(), vocab_ids.end(), random);
  std::vector<float> average;
  for (std::int64_t j = 0; j < s.vocab; ++j)
    average.push_back(static_cast<float>(std::exp(normal(random))));
  order = VocabOrder(vocab_ids, average);

  const std::int64_t tiles = (s.vocab + kVocabTile - 1) / kVocabTile;
  std::vector<double> level(tiles), side(tiles);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    level[tile] = -span * static_cast<double>(tile) /
                  static_cast<double>(std::max<std::int64_t>(1, tiles - 1));
    side[tile] = random() % 2 == 0 ? 1.0 : -1.0;
  }
  std::shuffle(level.begin(), level.end(), random);
  const double noise = 0.5 / std::sqrt(static_cast<double>(s.dim));
  for (std::int64_t i = 0; i < s.tokens; ++i) {
    for (std::int64_t k = 0; k < s.dim; ++k) {
      const double shift = k == 0   ? 1.5 - 0.6 * normal(random) * 0.2
                           : k == 1 ? 1.2 * static_cast<double>(i * 3 / s.tokens - 1)
                                    : 0.7 * normal(random);
      hidden.set(i * s.dim + k, shift);
    }
  }
  for (std::int64_t at = 0; at < s.vocab; ++at) {
    for (std::int64_t k = 0; k < s.dim; ++k) {
      const double shift = k == 0   ? level[at / kVocabTile] / 1.5
                           : k == 1 ? side[at / kVocabTile]
                                    : 0.0;
      weight.set(vocab_ids[at] * s.dim + k, shift + noise * normal(random));
    }
  }
  if (s.bias) {
    for (std::int64_t j = 0; j < s.vocab; ++j) bias.set(j, 0.3 * normal(random));
  }
  if (s.per_token > 1) {  // a repeated target in a token
    for (std::int64_t i = 0; i < s.tokens; i += 3)
      targets.set(i * s.per_token + 1, targets.get(i * s.per_token));
  }
  refresh_oracle();
}

void FarProblem::mask_vocab() {
  std::vector<bool> target(spec.vocab, false);
  for (const std::int64_t y : oracle.targets)
    if (y != oracle.ignore_index) target[y] = true;
  const std::int64_t tiles = spec.vocab / kVocabTile;
  for (std::int64_t at = 0; at < spec.vocab; ++at) {
    const std::int64_t vocab_id = order.vocab_ids()[at];
    if (target[vocab_id]) continue;
    if (vocab_id % 17 == 0 || (tiles > 3 && at / kVocabTile == 2)) bias.set(vocab_id, -INFINITY);
  }
  refresh_oracle();
}

std::vector<std::string> far_kernels() {
  std::vector<std::string> out;
  for (const std::string& name : tested_kernels()) {
    if (is_device_kernel(name) ? cuda::find_device_kernel(name).far != nullptr
                               : find_head_kernel(name).far_backward != nullptr)
      out.push_back(name);
  }
  return out;
}

bool accepts_far(const std::string& kernel, const HeadSpec& spec) {
  if (!is_device_kernel(kernel)) return accepts(kernel, spec);
  const cuda::FarForward* const far = cuda::find_device_kernel(kernel).far;
  return far->head_unsupported({spec.tokens, spec.dim, spec.vocab, spec.dtype, spec.per_token})
      .empty();
}

FarGrid far_grid(const HeadResult& result) {
  const LossPlan& plan = result.plan;
  FarGrid grid;
  grid.order_of_tokens = result.order_of_tokens;
  grid.chunk_tokens = plan.chunk_tokens;
  if (!is_device_kernel(plan.kernel)) {
    grid.row_block = find_head_kernel(plan.kernel).far_row_block;
    return grid;
  }
  grid.row_block = cuda::kFarBlock;
  grid.tiles = cuda::kFarGroup / cuda::kFarTile;
  grid.ignored_last = true;
  grid.only_likely_targets = true;
  grid.mass_error = 2.0e-3;  // bf16: 2^-9, rounded up
  return grid;
}

std::vector<double> upstream_of(const HeadProblem& problem, const RunSpec& run) {
  if (!run.grad_losses.empty()) return run.grad_losses;
  const double divisor =
      problem.spec.reduction == Reduction::mean ? oracle_normalizer(problem.oracle) : 1.0;
  return std::vector<double>(static_cast<std::size_t>(problem.oracle.tokens),
                             divisor == 0.0 ? 0.0 : run.grad_loss / divisor);
}

FarResult call_far(const FarProblem& problem, RunSpec run) {
  FarResult out;
  out.bound = Tensor(DType::f32, {problem.spec.tokens});
  const auto change = run.change;
  run.plan = PlanKind::far_backward;
  run.change = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& to) {
    in.order = problem.order;
    if (to.d_hidden.defined()) to.d_hidden_bound = out.bound.view();
    if (change) change(o, in, to);
  };
  static_cast<HeadResult&>(out) = run_head(problem, run);
  out.tau = static_cast<double>(run.tau);
  return out;
}

FarResult run_far(const FarProblem& problem, RunSpec run, double fraction) {
  const std::vector<double> upstream = upstream_of(problem, run);
  const auto result = [&] {
    FarResult out = call_far(problem, run);
    out.oracle = far_oracle(problem.oracle, upstream, problem.order, far_grid(out), out.tau);
    return out;
  };
  if (run.tau != 0.0f) return result();
  // The chunks depend on tau where two choices are about as fast, and on a GPU blocks do. Another
  // trial may then be needed.
  RunSpec trial = run;
  trial.tau = 0.02f;
  trial.audit_rows = 0;
  FarGrid grid = far_grid(call_far(problem, trial));
  for (int cuts = 0;;) {
    run.tau = far_tau(problem.oracle, upstream, problem.order, grid, fraction);
    FarResult out = result();
    const bool other_cut = out.plan.chunk_tokens != grid.chunk_tokens && ++cuts < 4;
    const bool settled =
        grid.order_of_tokens.empty() || out.oracle.nearest > 0.01 || fraction < 0.05;
    if (!other_cut && settled) {
      EXPECT_EQ(out.plan.chunk_tokens, grid.chunk_tokens);
      return out;
    }
    grid = far_grid(out);
    if (!other_cut) fraction *= 0.9;
  }
}

std::size_t least_far_budget(const FarProblem& problem, RunSpec run) {
  run.budget = 1;
  try {
    call_far(problem, run);
  } catch (const InvalidArgument& e) {
    const std::string text = e.what();
    return static_cast<std::size_t>(std::stoull(text.substr(text.rfind('(') + 1)));
  }
  ADD_FAILURE() << "a budget of one byte was enough";
  return 0;
}

double norm(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::isnan(sum) ? INFINITY : std::sqrt(sum);
}
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  std::vector<double> d(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) d[i] = a[i] - b[i];
  return norm(d);
}

void expect_far_field(const FarProblem& problem, const RunSpec& run, const FarResult& a) {
  const OracleProblem& p = problem.oracle;
  const FarOracle& far = a.oracle;
  const double contract = gradient_bound(problem.spec.dtype);
  EXPECT_EQ(a.plan.kind, PlanKind::far_backward);

  const OracleLogits logits = oracle_logits(p);
  std::vector<double> lse, losses;
  double total = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    losses.push_back(oracle_token_loss(p, i, logits.z.data() + i * p.vocab));
    lse.push_back(oracle_ignored(p, i) ? 0.0 : logits.lse[i]);
    total += losses.back();
  }
  EXPECT_LE(relative_error(a.lse.values(), lse), kLseBound);
  if (problem.spec.reduction == Reduction::none) {
    EXPECT_LE(relative_error(a.loss.values(), losses), 1e-5);
  } else {
    if (problem.spec.reduction == Reduction::mean) total /= oracle_normalizer(p);
    EXPECT_NEAR(a.loss.get(0), total, 2e-6 * (1 + std::abs(total)));
  }

  // The choice of tiles is the oracle's, with a margin.
  EXPECT_GT(far.nearest, 0.01) << "a mass is too near tau for this test: " << a.tau;
  EXPECT_DOUBLE_EQ(a.statistics.far.selected, far.selected);
  EXPECT_EQ(a.statistics.far.dense_fallback, far.selected == 1.0 || far.fallback);
  const auto compare = [&](const char* name, const Tensor& got, const std::vector<double>& want,
                           double slack) {
    if (!got.defined()) return;
    EXPECT_LE(distance(got.values(), want), slack + contract * norm(want)) << name;
  };
  compare("d_hidden", a.d_hidden, far.far.d_hidden, far.hidden_slack);
  compare("d_weight", a.d_weight, far.far.d_weight, far.weight_slack);
  compare("d_bias", a.d_bias, far.far.d_bias, far.bias_slack);

  if (!a.d_hidden.defined()) return;
  double squares = 0, norms = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const double bound = a.bound.get(i);
    squares += bound * bound;
    double error = 0;
    for (std::int64_t k = 0; k < p.dim; ++k) {
      const double got = a.d_hidden.get(i * p.dim + k);
      norms += got * got;
      error += std::pow(got - far.exact.d_hidden[i * p.dim + k], 2);
    }
    if (oracle_ignored(p, i)) {
      EXPECT_EQ(bound, 0.0) << i;
    }
    EXPECT_LE(std::sqrt(error), bound * (1 + 1e-5) + contract * far.row_size[i]) << "token " << i;
    // The bound is at least sum_J F_J r_J and not too large: the 16-bit part costs at most four
    // times itself. (A 16-bit centroid has an error of 2^-9 of its length, by which the radius
    // differs.)
    const double centroid = problem.spec.dtype == DType::f32 ? 0.0 : 2.0 / 0.75 * far.slack[i];
    EXPECT_GE(bound, (1 - 1e-4) * far.bound[i] - centroid - 1e-12) << "token " << i;
    EXPECT_LE(bound, 1.01 * far.bound[i] + 4.0 * far.slack[i] + centroid + 1e-12) << "token " << i;
  }
  const double norm_got = std::sqrt(norms);
  if (norm_got > 0.0 && !run.gradient_dtype.has_value()) {
    EXPECT_NEAR(a.statistics.far.bound, std::sqrt(squares) / norm_got,
                1e-5 * a.statistics.far.bound + 1e-12);
  }
}

}  // namespace logitless::test
