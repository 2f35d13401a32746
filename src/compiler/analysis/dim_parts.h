// Dimensions as what reshapes and transposes made them of: sizes and strides that one dimension
// need not have a single one of.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace logitless::ir {

struct DimPart {
  std::int64_t size = 1, stride = 0;
};
// Of one dimension, outermost first; none of size 1.
using DimParts = std::vector<DimPart>;

std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape,
                               const std::vector<std::int64_t>& strides);
// Of memory in the order of the dimensions.
std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape);
std::vector<DimParts> transposed_parts(const std::vector<DimParts>& dims,
                                       const std::vector<int>& order);
// The same elements in order as dimensions of these sizes; none where a part would be cut unevenly,
// or where there are no elements.
std::optional<std::vector<DimParts>> reshaped_parts(const std::vector<DimParts>& dims,
                                                    const std::vector<std::int64_t>& shape);
// As few parts as there are strides.
DimParts joined_parts(const DimParts& parts);
// Of the dimension, 0 of one of size 1; none of several parts.
std::optional<std::int64_t> stride_of(const DimParts& parts);

}  // namespace logitless::ir
