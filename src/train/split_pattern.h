// Text cut where a regular expression says, as the pre-tokenizers of tokenizer.json do.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

// A pattern as Hugging Face's tokenizers read it (Oniguruma's syntax, in which the published ones
// are written), matched by PCRE2: Unicode 14 in both. Any number of threads may split at a time.
class SplitPattern {
 public:
  // Throws InvalidArgument on a pattern that is not one, that the two would read differently, or
  // that matches nothing at all.
  explicit SplitPattern(const std::string& pattern);

  // Appends the matches and what lies between them, in order: together they are `text`, UTF-8.
  // Throws std::runtime_error where PCRE2 gives up.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace logitless::train
