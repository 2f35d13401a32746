// Reshapes tensors in memory without copies.
#pragma once

#include <optional>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::ir {

View transposed(const View& view, const std::vector<int>& dims);
View sliced(const View& view, const std::vector<std::int64_t>& begin,
            const std::vector<std::int64_t>& shape);
View broadcasted(const View& view, const std::vector<std::int64_t>& shape,
                 const std::vector<int>& dims);
// Returns whether two views of equal shape have the same elements at all indices.
bool same_elements(const View& a, const View& b);
// Returns whether two views have the same buffer, offset, dtype and strides, whatever their shapes.
bool same_memory(const View& a, const View& b);
// Returns nothing if strides cannot express the result.
std::optional<View> reshaped(const View& view, const std::vector<std::int64_t>& shape);

// Merges dimensions of an index space if all `strides` allow it; strides[i] has an entry for each
// dimension of shape. Dimensions of size 1 are removed, `fixed` dimensions stay. Returns the new
// dimension of each old one, or -1.
std::vector<int> merge_dims(std::vector<std::int64_t>& shape,
                            const std::vector<std::vector<std::int64_t>*>& strides,
                            const std::vector<bool>& fixed);

}  // namespace logitless::ir
