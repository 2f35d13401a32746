#include <string_view>
#include <tuple>

#include "core/check.h"
#include "core/described.h"
#include "core/element.h"
#include "core/parallel.h"
#include "head/overlap.h"
#include "head/validate.h"
#include "kernels/device/gradient.h"
#include "logitless/head.h"

namespace logitless {
namespace {

// Returns a gradient as rows. Throws unless it is a float tensor whose elements are distinct in
// memory.
RowMatrix gradient_rows(std::string_view name, const TensorView& view, bool vector) {
  require(is_head_float(view.dtype()), name, ": expected f32, bf16 or f16, got ",
          name_of(view.dtype()));
  require(vector ? view.rank() == 1 : view.rank() >= 2, name, ": expected ",
          vector ? "1 dimension" : "2 dimensions or more", ", got ", described(view));
  require_data(name, view);
  require_own_elements(name, view);
  if (vector) return {1, view.size(0), view.size(0), view.stride(0)};
  return as_rows(name, view);
}

void scale_on_cpu(const Context& context, double factor, const TensorView& view,
                  const RowMatrix& rows) {
  parallel_for(context.threads(), rows.rows, [&](std::int64_t row, int) {
    for (std::int64_t c = 0; c < rows.columns; ++c) {
      const std::int64_t at = row * rows.row_stride + c * rows.column_stride;
      store_element(view.data(), view.dtype(), at,
                    factor * load_element(view.data(), view.dtype(), at));
    }
  });
}

}  // namespace

void scale_gradients(const Context& context, const ConstTensorView& factor,
                     const HeadGradients& gradients) {
  require(factor.defined(), "factor: expected an f32 scalar, got none");
  require(factor.numel() == 1 && factor.dtype() == DType::f32,
          "factor: expected an f32 scalar, got ", described(factor));
  require_apart({{"d_hidden", gradients.d_hidden},
                 {"d_weight", gradients.d_weight},
                 {"d_bias", gradients.d_bias}},
                {{"factor", factor}});
  const std::tuple<std::string_view, const TensorView&, bool> all[] = {
      {"d_hidden", gradients.d_hidden, false},
      {"d_weight", gradients.d_weight, false},
      {"d_bias", gradients.d_bias, true}};
  const bool on_gpu = context.device().kind == DeviceKind::cuda;
  cuda::ScaleCall call;
  for (int i = 0; i < 3; ++i) {
    const auto& [name, view, vector] = all[i];
    if (!view.defined()) continue;
    const RowMatrix rows = gradient_rows(name, view, vector);
    if (on_gpu) {
      require(rows.column_stride == 1 || rows.columns == 1, name,
              ": expected contiguous rows on a GPU, got a stride of ", rows.column_stride,
              " between columns");
      call.gradients[i] = {
          {view.data(), rows.row_stride, view.dtype(), false}, rows.rows, rows.columns};
    }
  }
  if (on_gpu) {
    call.factor = static_cast<const float*>(factor.data());
    call.stream = context.stream();
    return cuda::scale_gradients(call);
  }
  const double by = load_element(factor.data(), DType::f32, 0);
  if (by == 1.0) return;
  for (const auto& [name, view, vector] : all) {
    if (view.defined()) scale_on_cpu(context, by, view, gradient_rows(name, view, vector));
  }
}

}  // namespace logitless
