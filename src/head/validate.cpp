#include "head/validate.h"

#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/described.h"
#include "core/element.h"

namespace logitless {

namespace {

void require_f32_or(std::string_view name, DType dtype, DType other) {
  if (dtype == DType::f32 || dtype == other) return;
  throw InvalidArgument(concat(name, ": expected f32",
                               other == DType::f32 ? "" : concat(" or ", name_of(other)), ", got ",
                               name_of(dtype)));
}

}  // namespace

RowMatrix as_rows(std::string_view name, const ConstTensorView& view) {
  RowMatrix out;
  const int last = view.rank() - 1;
  out.columns = view.size(last);
  out.column_stride = view.size(last) == 1 ? 1 : view.stride(last);
  out.rows = 1;
  // row_stride is the stride of the innermost leading dimension that has more than one element.
  bool found = false;
  for (int d = last - 1; d >= 0; --d) {
    if (view.size(d) != 1) {
      if (!found) {
        out.row_stride = view.stride(d);
        found = true;
      } else {
        require(
            view.stride(d) == out.row_stride * out.rows, name, ": ", described(view),
            " has leading dimensions that do not collapse to one row stride; make it contiguous");
      }
    }
    out.rows *= view.size(d);
  }
  if (!found) out.row_stride = out.columns;
  return out;
}

FlatIndex::FlatIndex(const ConstTensorView& view)
    : contiguous_(view.contiguous()), rank_(view.rank()) {
  for (int d = 0; d < rank_; ++d) {
    shape_[d] = view.size(d);
    strides_[d] = view.stride(d);
  }
}

void TokenOutput::set(std::int64_t flat, double value) const {
  if (defined_) store_element(data_, dtype_, index_(flat), value);
}

void require_data(std::string_view name, const ConstTensorView& view) {
  require(!view.defined() || view.data() != nullptr || view.numel() == 0, name, ": ",
          described(view), " has no data");
}

void require_per_token(std::string_view name, const ConstTensorView& view,
                       const ConstTensorView& hidden, bool index_dtype, std::int64_t last) {
  if (!view.defined()) return;
  require_data(name, view);
  const int lead = hidden.rank() - 1;
  bool same = view.rank() == lead + (last >= 0 ? 1 : 0);
  for (int d = 0; same && d < lead; ++d) same = view.size(d) == hidden.size(d);
  if (same && last >= 0) same = view.size(lead) == last;
  if (!same) {
    std::string expected = "[";
    for (int d = 0; d < lead; ++d) expected += concat(d ? ", " : "", hidden.size(d));
    if (last >= 0) expected += concat(lead > 0 ? ", " : "", last);
    throw InvalidArgument(concat(name, ": expected shape ", expected, "] to go with hidden ",
                                 described(hidden), ", got ", described(view)));
  }
  if (index_dtype) {
    require(is_index(view.dtype()), name, ": expected i32 or i64, got ", name_of(view.dtype()));
  } else {
    require(view.dtype() == DType::f32, name, ": expected f32, got ", name_of(view.dtype()));
  }
}

void require_own_elements(std::string_view name, const ConstTensorView& view) {
  if (view.defined() && view.numel() == 0) return;
  for (int d = 0; d < view.rank(); ++d) {
    require(view.size(d) <= 1 || view.stride(d) != 0, name, ": ", described(view),
            " is broadcast (a stride of 0); an output needs memory of its own for each element");
  }
}

void require_per_token_output(std::string_view name, const ConstTensorView& view,
                              const ConstTensorView& hidden, bool index_dtype, std::int64_t last) {
  require_per_token(name, view, hidden, index_dtype, last);
  require_own_elements(name, view);
}

void require_vector(std::string_view name, const ConstTensorView& view, std::int64_t size,
                    DType other) {
  if (!view.defined()) return;
  require_data(name, view);
  require(view.rank() == 1 && view.size(0) == size, name, ": expected shape [", size, "], got ",
          described(view));
  require_f32_or(name, view.dtype(), other);
}

void require_gradient(std::string_view name, const ConstTensorView& view,
                      const ConstTensorView& like) {
  if (!view.defined()) return;
  require_data(name, view);
  bool same = view.rank() == like.rank();
  for (int d = 0; same && d < like.rank(); ++d) same = view.size(d) == like.size(d);
  require(same, name, ": expected the shape of ", described(like), ", got ", described(view));
  require_f32_or(name, view.dtype(), like.dtype());
  require_own_elements(name, view);
}

HeadShape require_head(const ConstTensorView& hidden, const ConstTensorView& weight,
                       const ConstTensorView& bias, std::int64_t least_rows, std::int64_t columns) {
  require(hidden.defined(), "hidden: expected a tensor [..., D], got none");
  require(weight.defined(), "weight: expected a tensor [V, D], got none");
  require(hidden.rank() >= 1, "hidden: expected [..., D], got a scalar");
  require(weight.rank() == 2, "weight: expected [V, D], got ", described(weight));
  require(is_head_float(hidden.dtype()), "hidden: expected f32, bf16 or f16, got ",
          name_of(hidden.dtype()));
  const DType dtype = weight.dtype() == hidden.dtype() ? hidden.dtype() : DType::f32;
  const bool wide = hidden.dtype() == DType::f32;
  require(weight.dtype() == hidden.dtype() || weight.dtype() == DType::f32 ||
              (wide && is_head_float(weight.dtype())),
          "weight: expected ", name_of(hidden.dtype()), " as hidden or ",
          wide ? "16 bits" : name_of(DType::f32), ", got ", name_of(weight.dtype()));
  const std::int64_t dim = hidden.size(hidden.rank() - 1);
  require(columns < 0 || weight.size(1) == columns, "weight: expected [V, ", columns,
          "], the sharding's columns, got ", described(weight));
  require(columns >= 0 || weight.size(1) == dim, "weight: ", described(weight),
          " does not go with hidden ", described(hidden), ": their last dimensions differ");
  require(dim >= 1, "hidden: ", described(hidden), " has no columns");
  require(weight.size(0) >= least_rows, "weight: ", described(weight), " has no rows");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - kVocabTile;
  require(weight.size(0) <= kMost, "weight: ", weight.size(0),
          " vocabulary entries are over the limit of ", kMost);
  require_data("hidden", hidden);
  require_data("weight", weight);
  require_vector("bias", bias, weight.size(0), weight.dtype());
  std::int64_t tokens = 1;
  for (int d = 0; d + 1 < hidden.rank(); ++d) tokens *= hidden.size(d);
  return {tokens, dim, weight.size(0), dtype};
}

void require_one_dtype(const ConstTensorView& hidden, const ConstTensorView& weight,
                       std::string_view where) {
  if (hidden.dtype() == weight.dtype()) return;
  throw Unsupported(concat("weight: expected ", name_of(hidden.dtype()), " as hidden ", where,
                           ", got ", name_of(weight.dtype())));
}

void set_operands(const ConstTensorView& hidden, const ConstTensorView& weight,
                  HeadFeatures& features) {
  if (hidden.dtype() == weight.dtype()) return;
  features.narrow_hidden = hidden.dtype();
  features.narrow_weight = weight.dtype();
}

void require_transform(float logit_scale, float softcap) {
  require(std::isfinite(logit_scale) && logit_scale != 0.0f,
          "logit_scale: expected a finite number other than 0, got ", logit_scale);
  require(std::isfinite(softcap) && softcap >= 0.0f,
          "softcap: expected a number > 0, or 0 for none, got ", softcap);
}

void require_in_range(std::string_view name, double value, double least, double most) {
  constexpr double kUnbounded = std::numeric_limits<float>::max();
  const bool inside = std::isfinite(value) && value >= least && value <= most;
  if (inside) return;
  throw InvalidArgument(concat(name, ": expected a ",
                               most < kUnbounded     ? concat("number in [", least, ", ", most, "]")
                               : least > -kUnbounded ? concat("number >= ", least)
                                                     : std::string("finite number"),
                               ", got ", value));
}

}  // namespace logitless
