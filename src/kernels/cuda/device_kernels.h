// The kernels that multiply: the table of device_gradient.h, and where its functions are.
#pragma once

#include "kernels/device_gradient.h"

namespace logitless::cuda {

// head_forward_sm90.cu, head_gradient_sm90.cu: with forward, of device_head.h.
void gradient_block(const BlockCall& call);
void gradient_products(const ProductsCall& call);

}  // namespace logitless::cuda
