// Random heads as tensors and as oracle problems, and the library's results as doubles.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "support/oracle.h"

namespace logitless::test {

// A tensor that owns its elements.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<std::int64_t> shape);
  Tensor(DType dtype, std::vector<std::int64_t> shape, const std::vector<double>& values);
  bool defined() const { return defined_; }
  TensorView view();
  ConstTensorView view() const;
  // Returns an undefined view for an undefined tensor.
  double get(std::int64_t flat) const;
  void set(std::int64_t flat, double value);
  void fill(double value);
  std::vector<double> values() const;
  std::int64_t numel() const;
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  bool defined_ = false;
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::vector<std::byte> bytes_;
};

struct HeadSpec {
  std::int64_t tokens = 7, dim = 5, vocab = 11;
  DType dtype = DType::f32;                                   // of the products
  std::optional<DType> hidden_dtype = {}, weight_dtype = {};  // none: dtype
  int per_token = 1;
  bool bias = false, class_weight = false, token_weight = false;
  double ignored = 0.0;       // fraction of tokens ignored
  double hidden_scale = 1.0;  // standard deviations; weight is scaled by 1 / sqrt(dim) besides
  double weight_scale = 1.0;
  double hidden_shift = 0.0;  // added to hidden: makes logits one-sided with weight_shift
  double weight_shift = 0.0;
  float label_smoothing = 0, z_loss = 0, softcap = 0, logit_scale = 1;
  Reduction reduction = Reduction::mean;
  std::uint64_t seed = 1;
};
std::string describe(const HeadSpec& spec);

// Inputs in the library's dtypes, and the same rounded numbers for the oracle.
struct HeadProblem {
  explicit HeadProblem(const HeadSpec& spec);
  CrossEntropyInputs inputs() const;
  CrossEntropyOptions options() const;
  // Updates the oracle after a change of the tensors.
  void refresh_oracle();

  HeadSpec spec;
  Tensor hidden, weight, targets, bias, class_weight, token_weight, target_weight;
  OracleProblem oracle;
};

struct HeadResult {
  Tensor loss, d_hidden, d_weight, d_bias, lse, log_prob, target_logit, entropy, argmax;
  LossStatistics statistics;
  LossPlan plan;
  // Tokens of a far-field plan on a GPU in the order of their blocks, ignored ones last.
  std::vector<std::int64_t> order_of_tokens;
};

struct RunSpec {
  std::optional<PlanKind> plan;  // none: the planner's choice
  double stored_fraction = 0.5;
  float tau = 0.0f;  // of the far field, as in PlanRequest; `change` sets the order
  float expected_ignored = 0.0f;
  std::int64_t audit_rows = 0;
  std::int64_t sample_every = 0;
  std::size_t budget = 0;
  std::int64_t chunk_tokens = 0;  // of a CPU's plan; 0: the planner's
  std::string kernel;
  int threads = 2;
  bool gradients = true;
  bool d_hidden = true, d_weight = true, d_bias = true;  // requested gradients
  std::vector<double> grad_losses;  // upstream of each token with reduction none; empty: grad_loss
  bool extras = false;              // entropy and argmax
  std::optional<DType> gradient_dtype;  // none: f32; of a tensor beside another dtype: its own
  double grad_loss = 1.0;
  // Final change of the arguments.
  std::function<void(CrossEntropyOptions&, CrossEntropyInputs&, CrossEntropyOutputs&)> change;
};
// Makes the tensors that the run wants in `answer`, which must not move.
CrossEntropyOutputs make_outputs(const HeadSpec& spec, const RunSpec& run, HeadResult& result);
HeadResult run_head(const HeadProblem& problem, const RunSpec& run);

// Compares loss, lse and gradients of the call with float64, within the numerical contract:
// relative L2 error of gradients 4e-3 (16 bit) or 1e-5 (fp32), of lse 1e-6.
void expect_matches_oracle(const HeadProblem& problem, const RunSpec& run);
// The same for an existing answer.
void expect_matches_oracle(const HeadProblem& problem, const RunSpec& run,
                           const HeadResult& result);
double gradient_bound(DType dtype);
inline constexpr double kLseBound = 1e-6;

// Returns whether the kernel supports the problem; one that does not gives a reason.
bool accepts(const std::string& kernel, const HeadSpec& spec);
// Returns whether the kernel has plans of a kind with gradients.
bool offers(const std::string& kernel, PlanKind kind);

// Returns ||a - b|| / ||b||, or ||a|| where b is 0. NaN anywhere gives infinity.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace logitless::test
