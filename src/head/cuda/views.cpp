#include "head/cuda/views.h"

#include "core/check.h"
#include "core/described.h"

namespace logitless::cuda {

void require_contiguous(std::string_view name, const ConstTensorView& view) {
  // Strides of an empty view do not matter: PyTorch's may be 0.
  require(!view.defined() || view.numel() == 0 || view.contiguous(), name, ": ", described(view),
          " is not contiguous; on a GPU it must be");
}

RowMatrix rows_of(std::string_view name, const ConstTensorView& view) {
  RowMatrix m = as_rows(name, view);
  require(m.column_stride == 1 || m.columns == 1, name,
          ": expected contiguous rows on a GPU, got a stride of ", m.column_stride,
          " between columns");
  if (m.rows <= 1) m.row_stride = m.columns;
  return m;
}

const float* floats_of(std::string_view name, const ConstTensorView& view) {
  if (!view.defined()) return nullptr;
  require(view.dtype() == DType::f32, name, ": expected f32 on a GPU, got ", name_of(view.dtype()));
  require_contiguous(name, view);
  return static_cast<const float*>(view.data());
}
float* floats_of(std::string_view name, const TensorView& view) {
  floats_of(name, ConstTensorView(view));
  return view.defined() ? static_cast<float*>(view.data()) : nullptr;
}

}  // namespace logitless::cuda
