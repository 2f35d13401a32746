// Splits text at the matches of a regular expression, as the pre-tokenizers of tokenizer.json do.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

// A pattern with the semantics of Hugging Face's tokenizers (Oniguruma's syntax), matched by PCRE2;
// both use Unicode 14. Thread-safe.
class SplitPattern {
 public:
  // Throws InvalidArgument on an invalid pattern, on one that Oniguruma and PCRE2 read differently,
  // and on one that matches the empty text.
  explicit SplitPattern(const std::string& pattern);

  // Appends the matches and the texts between them, in order; their concatenation is `text`, UTF-8.
  // Throws std::runtime_error where PCRE2 gives up.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace logitless::train
