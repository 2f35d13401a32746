#include "support/dots.h"

// Templates of the standard library stay out of this file. The linker could take its copies of
// them, which are not instrumented, for the library's.
namespace logitless::test {

double add_dot(double start, const double* a, const double* b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) start += a[i] * b[i];
  return start;
}

void add_scaled(double* y, double scale, const double* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += scale * x[i];
}

void add_products(const double* a, std::int64_t a_stride, const double* b, std::int64_t b_stride,
                  std::int64_t n, double& sum, double& size) {
  double added = sum, absolute = size;
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = a[i * a_stride] * b[i * b_stride];
    added += x;
    absolute += x < 0.0 ? -x : x;
  }
  sum = added;
  size = absolute;
}

}  // namespace logitless::test
