#include "compiler/analysis/dim_parts.h"

namespace logitless::ir {

std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape,
                               const std::vector<std::int64_t>& strides) {
  std::vector<DimParts> dims(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1) dims[d].push_back({shape[d], strides[d]});
  }
  return dims;
}

std::vector<DimParts> parts_of(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return parts_of(shape, strides);
}

std::vector<DimParts> transposed_parts(const std::vector<DimParts>& dims,
                                       const std::vector<int>& order) {
  std::vector<DimParts> to;
  for (const int d : order) to.push_back(dims[static_cast<std::size_t>(d)]);
  return to;
}

std::optional<std::vector<DimParts>> reshaped_parts(const std::vector<DimParts>& dims,
                                                    const std::vector<std::int64_t>& shape) {
  DimParts all;
  for (const DimParts& parts : dims) {
    for (const DimPart& part : parts) {
      if (part.size == 0) return std::nullopt;
      all.push_back(part);
    }
  }
  std::vector<DimParts> to(shape.size());
  std::size_t next = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    for (std::int64_t wanted = shape[d]; wanted > 1;) {
      if (next == all.size()) return std::nullopt;
      DimPart& part = all[next];
      if (wanted % part.size == 0) {
        to[d].push_back(part);
        wanted /= part.size;
        ++next;
      } else if (part.size % wanted == 0) {
        part.size /= wanted;
        to[d].push_back({wanted, part.stride * part.size});
        wanted = 1;
      } else {
        return std::nullopt;
      }
    }
  }
  return to;
}

DimParts joined_parts(const DimParts& parts) {
  DimParts to;
  for (const DimPart& part : parts) {
    if (!to.empty() && to.back().stride == part.stride * part.size) {
      to.back() = {to.back().size * part.size, part.stride};
    } else {
      to.push_back(part);
    }
  }
  return to;
}

std::optional<std::int64_t> stride_of(const DimParts& parts) {
  const DimParts joined = joined_parts(parts);
  if (joined.size() > 1) return std::nullopt;
  return joined.empty() ? 0 : joined.back().stride;
}

}  // namespace logitless::ir
