// Reshaping tensors in memory without moving them.
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
// Views of equal shape: whether each element of one is that of the other.
bool same_elements(const View& a, const View& b);
// Nothing where strides cannot say it.
std::optional<View> reshaped(const View& view, const std::vector<std::int64_t>& shape);

// Index spaces of equal order become one dimension where every one of `strides` allows it:
// strides[i] has an entry for each dimension of shape. Dimensions of size 1 vanish. `fixed`
// dimensions stay themselves. Returns for each dimension the one it went to, or -1.
std::vector<int> merge_dims(std::vector<std::int64_t>& shape,
                            const std::vector<std::vector<std::int64_t>*>& strides,
                            const std::vector<bool>& fixed);

}  // namespace logitless::ir
