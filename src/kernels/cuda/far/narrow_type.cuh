// Dispatch by the dtype of a head with a far field.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "logitless/dtype.h"

namespace logitless::cuda {

// Calls f(T{}) with the type of a 16-bit dtype.
template <typename F>
void with_narrow_type(DType dtype, const F& f) {
  dtype == DType::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

}  // namespace logitless::cuda
