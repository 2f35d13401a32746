// Inner loops of the float64 oracles. dots.cpp is optimised and never instrumented: under
// sanitizers these loops took longer than the kernels that they check. Callers see to the bounds.
#pragma once

#include <cstdint>

namespace logitless::test {

// start + sum_i a[i] * b[i], added in this order
double add_dot(double start, const double* a, const double* b, std::int64_t n);

// y[i] += scale * x[i]
void add_scaled(double* y, double scale, const double* x, std::int64_t n);

// sum += a[i * a_stride] * b[i * b_stride], and size += their absolute values
void add_products(const double* a, std::int64_t a_stride, const double* b, std::int64_t b_stride,
                  std::int64_t n, double& sum, double& size);

}  // namespace logitless::test
