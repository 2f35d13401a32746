#include "logitless/dtype.h"

#include "core/check.h"

namespace logitless {

DType parse_dtype(std::string_view text) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name_of(static_cast<DType>(i)) == text) return static_cast<DType>(i);
  }
  throw InvalidArgument(
      concat("dtype '", text, "' is unknown; expected f32, bf16, f16, i32, i64, i8 or f64"));
}

}  // namespace logitless
