#include "core/check.h"

#include <algorithm>
#include <climits>

#include "head/plan/choose.h"
#include "head/validate.h"

namespace logitless {

bool allows(const PlanRequest& request, PlanKind kind) {
  if (request.kind.has_value()) return *request.kind == kind;
  return request.accuracy == Accuracy::far_both ||
         (request.accuracy == Accuracy::far_backward && kind == PlanKind::far_backward);
}

bool allows_far(const PlanRequest& request) {
  return allows(request, PlanKind::far_backward) || allows(request, PlanKind::far_both);
}

namespace {

// Checks the dtypes of operands that differ, and those of gradients.
void check_operands(const HeadShape& shape, const HeadFeatures& f) {
  struct Operand {
    std::string_view name, gradient;
    DType narrow, gradient_dtype;
  };
  for (const Operand& of :
       {Operand{"narrow_hidden", "d_hidden_dtype", f.narrow_hidden, f.d_hidden_dtype},
        Operand{"narrow_weight", "d_weight_dtype", f.narrow_weight, f.d_weight_dtype}}) {
    const bool narrow = of.narrow != DType::f32;
    require(is_head_float(of.narrow), of.name, ": expected bf16, f16, or f32 for none, got ",
            name_of(of.narrow));
    require(!narrow || shape.dtype == DType::f32, of.name, ": ", name_of(of.narrow),
            " is beside f32, dtype is ", name_of(shape.dtype));
    const DType own = narrow ? of.narrow : shape.dtype;
    const DType dtype = of.gradient_dtype;
    require(dtype == DType::f32 || dtype == own, of.gradient, ": expected f32",
            own == DType::f32 ? "" : concat(" or ", name_of(own)), ", got ", name_of(dtype));
  }
  const bool differ = f.narrow_hidden != DType::f32 || f.narrow_weight != DType::f32;
  require(f.narrow_hidden == DType::f32 || f.narrow_weight == DType::f32,
          "narrow_hidden: expected f32 for none beside narrow_weight ", name_of(f.narrow_weight),
          ", got ", name_of(f.narrow_hidden));
  if (differ && f.vocab_ranks > 0)
    throw Unsupported("narrow_hidden, narrow_weight: expected one dtype with a sharding");
}

}  // namespace

void check_request(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  require(shape.tokens >= 0, "tokens: expected 0 or more, got ", shape.tokens);
  require(shape.dim >= 1, "dim: expected 1 or more, got ", shape.dim);
  require(shape.vocab >= 1 && shape.vocab <= INT32_MAX - kVocabTile, "vocab: expected 1 to ",
          INT32_MAX - kVocabTile, ", got ", shape.vocab);
  require(is_head_float(shape.dtype), "dtype: expected f32, bf16 or f16, got ",
          name_of(shape.dtype));
  require(features.targets_per_token >= 1 && features.targets_per_token <= 65536,
          "targets_per_token: expected 1 to 65536, got ", features.targets_per_token);
  std::int64_t product = 0;
  const bool small =
      !__builtin_mul_overflow(std::max(shape.tokens, shape.vocab), shape.dim, &product) &&
      product < (INT64_MAX >> 8) && shape.tokens < (std::int64_t{1} << 31);
  require(small, "tokens, dim, vocab: ", shape.tokens, ", ", shape.dim, ", ", shape.vocab,
          " overflow the address space");
  require(!features.d_bias || features.bias, "d_bias: asked for without a bias");
  require_transform(features.logit_scale, features.softcap);
  require(features.precision <= Precision::bf16x3,
          "precision: ", static_cast<int>(features.precision), " is no Precision");
  if (features.precision != Precision::ieee) {
    const std::string_view name = name_of(features.precision);
    require(shape.dtype == DType::f32, "precision: ", name,
            " rounds f32 tensors, hidden and weight are ", name_of(shape.dtype));
    require(request.device.kind == DeviceKind::cuda, "precision: ", name,
            " is for a GPU, the device is a CPU");
  }
  check_operands(shape, features);
  require(!request.kind.has_value() || *request.kind <= PlanKind::far_both,
          "kind: ", static_cast<int>(request.kind.value_or(PlanKind::forward)), " is no PlanKind");
  require(request.stored_fraction >= 0.0 && request.stored_fraction <= 1.0,
          "stored_fraction: expected 0 to 1, got ", request.stored_fraction);
  require(request.stored_fraction == 0.0 || request.kind == PlanKind::stored,
          "stored_fraction: only PlanKind::stored takes one, got ", request.stored_fraction);
  require(request.accuracy <= Accuracy::far_both, "accuracy: ", static_cast<int>(request.accuracy),
          " is no Accuracy");
  require(request.tau == 0.0f || (request.tau > 0.0f && request.tau < 1.0f),
          "tau: expected a number in (0, 1), or 0 for the default, got ", request.tau);
  require(request.audit_rows >= 0, "audit_rows: expected 0 or more, got ", request.audit_rows);
  require(request.audit_rows == 0 || features.d_hidden,
          "audit_rows: an audit measures the error of d_hidden, which is not asked for");
  require(request.sample_every >= 0, "sample_every: expected 0 or more, got ",
          request.sample_every);
  require(allows_far(request) ||
              (request.tau == 0.0f && request.audit_rows == 0 && request.sample_every == 0),
          "tau, audit_rows, sample_every: only the far field has them; ask for it by accuracy or "
          "kind");
  const float ignored = request.expected_ignored;
  require(ignored >= 0.0f && ignored <= 1.0f, "expected_ignored: expected a number in [0, 1], got ",
          ignored);
  require(ignored == 0.0f || (features.vocab_ranks == 0 && !allows_far(request)),
          "expected_ignored: expected 0 with a sharding or the far field, got ", ignored);
  require(request.device.threads >= 0, "threads: expected 0 or more, got ", request.device.threads);
}

}  // namespace logitless
