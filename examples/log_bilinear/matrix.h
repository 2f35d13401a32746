// Matrix products of the body in fp32: the same bits for any number of threads.
#pragma once

#include <cstdint>

namespace log_bilinear {

// Left factor of a product. `row` and `column` are strides in elements: element (i, k) is data[i *
// row + k * column].
struct LeftFactor {
  const float* data;
  std::int64_t row;
  std::int64_t column;
};

// Computes out [rows, columns] = left [rows, inner] times right [inner, columns]; right and out are
// contiguous. Each element is one sum over `inner` in order.
void multiply(int threads, std::int64_t rows, std::int64_t columns, std::int64_t inner,
              const LeftFactor& left, const float* right, float* out);

// Writes out [columns, rows] = in [rows, columns] transposed, both contiguous.
void transpose(int threads, std::int64_t rows, std::int64_t columns, const float* in, float* out);

}  // namespace log_bilinear
