// Moments of the tiles of a vocabulary order, for the far field's forward.
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "head/far/device_order.h"
#include "head/far/shared_order.h"
#include "head/shard_plan.h"
#include "head/validate.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"
#include "logitless/vocab_order.h"

namespace logitless {
namespace {

// Least residuals per dimension from which the principal axes are computed.
constexpr std::int64_t kResiduals = 24;
// Ridge added to the tokens' second moment, as a fraction of its mean eigenvalue: with fewer tokens
// than dim it is singular.
constexpr float kRidge = 1e-2f;

using Matrix = Eigen::MatrixXf;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Computes c [m, n] = a [m, k] . b [n, k]^T with contiguous floats.
void multiply(const float* a, std::int64_t m, const float* b, std::int64_t n, std::int64_t k,
              float* c, int threads, std::vector<std::byte>& scratch) {
  GemmProblem p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = {a, DType::f32, 0, k, 1};
  p.b = {b, DType::f32, 0, 1, k};
  p.c = {c, DType::f32, 0, n, 1};
  p.threads = threads;
  const std::size_t bytes = gemm_scratch_bytes(p) + 64;
  if (scratch.size() < bytes) scratch.resize(bytes);
  auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
  gemm(p, scratch.data() + (64 - address % 64) % 64);
}

class TileMoments {
 public:
  TileMoments(const Context& context, const VocabOrder& order, const ConstTensorView& hidden,
              const ConstTensorView& weight, const ConstTensorView& bias, float scale, float tau,
              const Sharding& sharding)
      : order_(order),
        sharding_(sharding),
        weight_(weight),
        bias_(bias),
        scale_(scale),
        tau_(tau),
        threads_(context.threads()),
        dim_(weight.size(1)),
        vocab_(weight.size(0)),
        tiles_(ceil_div(vocab_, kVocabTile)),
        workers_(static_cast<std::size_t>(threads_)) {
    const RowMatrix m = as_rows("hidden", hidden);
    rows_ = m.rows;
    const std::int64_t sizes[] = {m.rows, m.columns};
    const std::int64_t strides[] = {m.row_stride, m.column_stride};
    const ConstTensorView flat(hidden.data(), hidden.dtype(), sizes, strides);
    hidden_.resize(static_cast<std::size_t>(rows_ * dim_));
    for (std::int64_t i = 0; i < rows_; ++i) load_row(flat, i, hidden_.data() + i * dim_);
  }

  VocabOrder measure() {
    measure_local();
    find_caution();
    return order_.with_moments(dim_, axes_, variance_, caution_);
  }
  // Measures collectively on all ranks of the vocabulary.
  VocabOrder measure_shared() {
    together(sharding_, [&] { tiles_ > 0 ? measure_local() : no_tiles(); });
    sum_log2(sharding_, exact_total_.data(), rows_);
    sum_log2(sharding_, estimated_total_.data(), rows_);
    VocabOrder out = order_;
    together(sharding_, [&] {
      if (tiles_ == 0) return;
      find_caution();
      out = order_.with_moments(dim_, axes_, variance_, caution_);
    });
    return out;
  }

 private:
  struct Worker {
    std::vector<float> rows, other;
    std::vector<std::byte> scratch;
  };

  // Computes the moments of the local tiles, and the masses of the rows of hidden in them.
  void measure_local() {
    log2_base_.resize(static_cast<std::size_t>(tiles_));
    means_.resize(static_cast<std::size_t>(tiles_ * dim_));
    find_axes();
    variance_.resize(static_cast<std::size_t>(tiles_ * dim_));
    parallel_for(threads_, tiles_, [&](std::int64_t tile, int t) { find_variance(tile, t); });
    find_masses();
  }
  void no_tiles() {
    for (auto* totals : {&exact_total_, &estimated_total_})
      totals->assign(static_cast<std::size_t>(rows_), -INFINITY);
  }

  std::int64_t vocab_of(std::int64_t tile) const {
    return std::min(kVocabTile, vocab_ - tile * kVocabTile);
  }
  double bias_of(std::int64_t vocab_id) const {
    if (!bias_.defined()) return 0.0;
    return static_cast<double>(scale_) *
           static_cast<double>(
               load_element(bias_.data(), bias_.dtype(), vocab_id * bias_.stride(0)));
  }

  // Computes into worker.rows the residuals of a tile's rows from their mean, weighted by exp(s
  // bias). Returns the weights.
  std::vector<float> residuals(std::int64_t tile, Worker& worker) {
    const std::int64_t count = vocab_of(tile);
    worker.rows.resize(static_cast<std::size_t>(kVocabTile * dim_));
    std::vector<float> share(static_cast<std::size_t>(count));
    double top = -INFINITY;
    for (std::int64_t r = 0; r < count; ++r)
      top = std::max(top, bias_of(order_.vocab_ids()[tile * kVocabTile + r]));
    double total = 0.0;
    for (std::int64_t r = 0; r < count; ++r) {
      const double b = bias_of(order_.vocab_ids()[tile * kVocabTile + r]);
      share[r] = top > -INFINITY ? static_cast<float>(std::exp(b - top)) : 0.0f;
      total += static_cast<double>(share[r]);
    }
    log2_base_[tile] =
        total > 0.0 ? static_cast<float>(top * kLog2E + std::log2(total)) : -INFINITY;
    float* mean = means_.data() + tile * dim_;
    std::fill_n(mean, dim_, 0.0f);
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = worker.rows.data() + r * dim_;
      load_row(weight_, order_.vocab_ids()[tile * kVocabTile + r], row);
      if (total > 0.0) share[r] = static_cast<float>(share[r] / total);
      add_scaled(row, share[r], mean, dim_);
    }
    for (std::int64_t r = 0; r < count; ++r)
      add_scaled(mean, -1.0f, worker.rows.data() + r * dim_, dim_);
    return share;
  }

  // Computes the principal axes of residuals sampled evenly from all tiles.
  void find_axes() {
    const std::int64_t each =
        std::clamp<std::int64_t>(ceil_div(kResiduals * dim_, tiles_), 1, kVocabTile);
    std::vector<float> sample(static_cast<std::size_t>(tiles_ * each * dim_), 0.0f);
    parallel_for(threads_, tiles_, [&](std::int64_t tile, int t) {
      Worker& worker = workers_[static_cast<std::size_t>(t)];
      residuals(tile, worker);
      const std::int64_t count = vocab_of(tile);
      for (std::int64_t i = 0; i < std::min(each, count); ++i) {
        const float* row = worker.rows.data() + i * count / std::min(each, count) * dim_;
        std::copy_n(row, dim_, sample.data() + (tile * each + i) * dim_);
      }
    });
    // A diagonal form is best if the tokens are isotropic. The axes are therefore those of the
    // residuals in coordinates that whiten the tokens' second moment.
    const Matrix tokens = second_moment(hidden_.data(), rows_);
    const float ridge =
        kRidge * tokens.trace() / static_cast<float>(dim_) + std::numeric_limits<float>::min();
    const Eigen::SelfAdjointEigenSolver<Matrix> scaled(tokens +
                                                       ridge * Matrix::Identity(dim_, dim_));
    const Matrix root = scaled.eigenvectors() * scaled.eigenvalues().cwiseSqrt().asDiagonal();
    const Matrix inverse =
        scaled.eigenvectors() * scaled.eigenvalues().cwiseSqrt().cwiseInverse().asDiagonal();
    const Matrix residual = second_moment(sample.data(), tiles_ * each);
    const Eigen::SelfAdjointEigenSolver<Matrix> solver(root.transpose() * residual * root);
    RowMajor axes = (inverse * solver.eigenvectors()).transpose();
    RowMajor along = (root * solver.eigenvectors()).transpose();
    // Weights or tokens with NaN or infinities have no axes; the estimates will be NaN anyway.
    if (!axes.allFinite() || !along.allFinite()) axes = along = RowMajor::Identity(dim_, dim_);
    axes_.assign(axes.data(), axes.data() + axes.size());
    along_.assign(along.data(), along.data() + along.size());
  }

  // Returns rows^T rows / count of [count, dim] floats.
  Matrix second_moment(const float* rows, std::int64_t count) const {
    Matrix out(dim_, dim_);
    GemmProblem p;
    p.m = p.n = dim_;
    p.k = count;
    p.a = {rows, DType::f32, 0, 1, dim_};
    p.b = {rows, DType::f32, 0, dim_, 1};
    p.c = {out.data(), DType::f32, 0, dim_, 1};
    p.threads = threads_;
    std::vector<std::byte> scratch(gemm_scratch_bytes(p) + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
    gemm(p, scratch.data() + (64 - address % 64) % 64);
    return out / static_cast<float>(count);
  }

  void find_variance(std::int64_t tile, int thread) {
    Worker& worker = workers_[static_cast<std::size_t>(thread)];
    const std::vector<float> share = residuals(tile, worker);
    const std::int64_t count = vocab_of(tile);
    worker.other.resize(static_cast<std::size_t>(kVocabTile * dim_));
    multiply(worker.rows.data(), count, along_.data(), dim_, dim_, worker.other.data(), 1,
             worker.scratch);
    float* to = variance_.data() + tile * dim_;
    for (std::int64_t r = 0; r < count; ++r) {
      const float* along = worker.other.data() + r * dim_;
      for (std::int64_t a = 0; a < dim_; ++a) to[a] += share[r] * along[a] * along[a];
    }
    for (std::int64_t a = 0; a < dim_; ++a) {
      if (!std::isfinite(to[a])) to[a] = 0.0f;
    }
  }

  // Computes log2 of the exact and estimated masses of all tiles for the rows of hidden, and their
  // totals.
  void find_masses() {
    const std::size_t size = static_cast<std::size_t>(rows_ * tiles_);
    std::vector<float> forms(size);
    std::vector<float>&exact = exact_, &estimate = estimate_;
    exact.resize(size);
    estimate.resize(size);
    parallel_for(threads_, tiles_, [&](std::int64_t tile, int t) {
      Worker& worker = workers_[static_cast<std::size_t>(t)];
      const std::int64_t count = vocab_of(tile);
      worker.rows.resize(static_cast<std::size_t>(kVocabTile * dim_));
      std::vector<float> bias(static_cast<std::size_t>(count));
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t vocab_id = order_.vocab_ids()[tile * kVocabTile + r];
        load_row(weight_, vocab_id, worker.rows.data() + r * dim_);
        bias[r] = static_cast<float>(bias_of(vocab_id));
      }
      worker.other.resize(static_cast<std::size_t>(rows_ * kVocabTile));
      multiply(hidden_.data(), rows_, worker.rows.data(), count, dim_, worker.other.data(), 1,
               worker.scratch);
      for (std::int64_t i = 0; i < rows_; ++i) {
        float* z = worker.other.data() + i * count;
        for (std::int64_t r = 0; r < count; ++r) z[r] = z[r] * scale_ + bias[r];
        const LseState state = row_lse(z, count);
        exact[i * tiles_ + tile] =
            state.sum > 0.0f ? state.exponent + std::log2(state.sum) : -INFINITY;
      }
    });
    std::vector<std::byte> scratch;
    multiply(hidden_.data(), rows_, means_.data(), tiles_, dim_, estimate.data(), threads_,
             scratch);
    std::vector<float> squares(static_cast<std::size_t>(rows_ * dim_));
    multiply(hidden_.data(), rows_, axes_.data(), dim_, dim_, squares.data(), threads_, scratch);
    for (float& v : squares) v *= v;
    multiply(squares.data(), rows_, variance_.data(), tiles_, dim_, forms.data(), threads_,
             scratch);
    const float log2e = static_cast<float>(kLog2E);
    const auto total_of = [&](const float* values) {
      float top = -INFINITY;
      for (std::int64_t j = 0; j < tiles_; ++j) top = std::max(top, values[j]);
      double sum = 0.0;
      for (std::int64_t j = 0; j < tiles_ && top > -INFINITY; ++j)
        sum += std::exp2(static_cast<double>(values[j] - top));
      return top + static_cast<float>(std::log2(sum));
    };
    exact_total_.resize(static_cast<std::size_t>(rows_));
    estimated_total_.resize(static_cast<std::size_t>(rows_));
    for (std::int64_t i = 0; i < rows_; ++i) {
      float* e = estimate.data() + i * tiles_;
      for (std::int64_t j = 0; j < tiles_; ++j)
        e[j] = log2_base_[j] +
               log2e * (scale_ * e[j] + 0.5f * scale_ * scale_ * forms[i * tiles_ + j]);
      exact_total_[i] = total_of(exact.data() + i * tiles_);
      estimated_total_[i] = total_of(e);
    }
  }

  // Computes cautions from the totals of all tiles, including those of other ranks.
  void find_caution() {
    caution_.assign(static_cast<std::size_t>(tiles_), 0.0f);
    const float log2_floor = std::log2(tau_ / 3.0f);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const float* e = estimate_.data() + i * tiles_;
      const float* m = exact_.data() + i * tiles_;
      const float total = exact_total_[i];
      const float estimated = estimated_total_[i];
      for (std::int64_t j = 0; j < tiles_; ++j) {
        if (!(m[j] - total > log2_floor)) continue;
        const float short_by = (m[j] - total) - (e[j] - estimated);
        if (std::isfinite(short_by)) caution_[j] = std::max(caution_[j], short_by);
      }
    }
  }

  const VocabOrder& order_;
  const Sharding& sharding_;
  const ConstTensorView& weight_;
  const ConstTensorView& bias_;
  float scale_;
  float tau_;
  int threads_;
  std::int64_t dim_, vocab_, tiles_, rows_ = 0;
  std::vector<Worker> workers_;
  std::vector<float> hidden_, log2_base_, means_, axes_, along_, variance_, caution_;
  std::vector<float> exact_, estimate_;               // [rows, tiles] log2 masses
  std::vector<float> exact_total_, estimated_total_;  // [rows]
};

}  // namespace

VocabOrder measure_tiles(const Context& context, const VocabOrder& order,
                         const ConstTensorView& hidden, const ConstTensorView& weight,
                         const ConstTensorView& bias, float logit_scale, float tau,
                         const Sharding& sharding) {
  const HeadShape shape = require_order_source(context, hidden, weight, bias, sharding);
  const auto check = [&] {
    require(shape.tokens > 0, "hidden: expected tokens to measure with, got ", describe(hidden));
    require(order.vocab() == shape.vocab, "order: made for ", order.vocab(),
            " vocabulary entries, the weights have ", shape.vocab);
    require_transform(logit_scale, 0.0f);
    require(tau > 0.0f && tau < 1.0f, "tau: expected a number in (0, 1), got ", tau);
  };
  const bool on_gpu = context.device().kind == DeviceKind::cuda;
  if (is_sharded(sharding)) {
    std::unique_ptr<TileMoments> moments;
    together(sharding, [&] {
      check();
      if (sharding.tokens)
        throw Unsupported(
            "sharding: tiles are measured with tokens that are the same on all ranks; gather some");
      if (on_gpu) return;
      moments = std::make_unique<TileMoments>(context, order, hidden, weight, bias, logit_scale,
                                              tau, sharding);
    });
    if (moments != nullptr) return moments->measure_shared();
  } else {
    check();
  }
  if (on_gpu)
    return device_measure_tiles(context, order, hidden, weight, bias, logit_scale, tau, sharding);
  return TileMoments(context, order, hidden, weight, bias, logit_scale, tau, sharding).measure();
}

}  // namespace logitless
