#include "examples.h"

#include <fmt/format.h>

#include <stdexcept>

namespace log_bilinear {

Examples::Examples(const std::vector<std::int32_t>& stream, std::int64_t context)
    : stream_(stream),
      context_(context),
      size_(static_cast<std::int64_t>(stream.size()) - context) {
  if (size_ < 1) {
    throw std::runtime_error(fmt::format(
        "--context {} leaves nothing to predict in a text of {} tokens", context, stream.size()));
  }
}

void Examples::take(const std::vector<std::int64_t>& examples, std::int32_t* contexts,
                    std::int32_t* targets) const {
  for (const std::int64_t example : examples) {
    const std::int64_t at = example + context_;
    *targets++ = stream_[at];
    for (std::int64_t k = 1; k <= context_; ++k) *contexts++ = stream_[at - k];
  }
}

}  // namespace log_bilinear
