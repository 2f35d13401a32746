// Training examples: a token of the stream and the tokens before it.
#pragma once

#include <cstdint>
#include <vector>

namespace log_bilinear {

// Example e is the token at position e + context of the stream. Ids and streams outlive the object.
class Examples {
 public:
  // Throws std::runtime_error when the stream is not longer than the context.
  Examples(const std::vector<std::int32_t>& stream, std::int64_t context);

  std::int64_t size() const { return size_; }

  // Takes examples: contexts [count, n], the nearest token first; targets [count].
  void take(const std::vector<std::int64_t>& examples, std::int32_t* contexts,
            std::int32_t* targets) const;

 private:
  const std::vector<std::int32_t>& stream_;
  std::int64_t context_;
  std::int64_t size_;
};

}  // namespace log_bilinear
