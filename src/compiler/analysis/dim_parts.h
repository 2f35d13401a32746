// Dimensions as products of parts, each with a size and a stride. Reshapes and transposes can make
// dimensions that have no single stride.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace logitless::ir {

struct DimPart {
  std::int64_t size = 1, stride = 0;
};
// The parts of one dimension, outermost first, without parts of size 1.
using DimParts = std::vector<DimPart>;

std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape,
                               const std::vector<std::int64_t>& strides);
// Returns the parts of contiguous memory.
std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape);
std::vector<DimParts> transposed_parts(const std::vector<DimParts>& dims,
                                       const std::vector<int>& order);
// Returns the parts after a reshape to `shape`. Returns nothing if a part would be cut unevenly, or
// if there are no elements.
std::optional<std::vector<DimParts>> reshaped_parts(const std::vector<DimParts>& dims,
                                                    const std::vector<std::int64_t>& shape);
// Merges adjacent parts that have one common stride.
DimParts joined_parts(const DimParts& parts);
// Returns the stride of the dimension, 0 if its size is 1; nothing if it has several parts.
std::optional<std::int64_t> stride_of(const DimParts& parts);

}  // namespace logitless::ir
