#include "train/tokenizer/split_pattern.h"

#include <fmt/format.h>

#include <stdexcept>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "logitless/error.h"

namespace logitless::train {
namespace {

std::string message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

[[noreturn]] void refuse(const std::string& pattern, const std::string& why) {
  throw InvalidArgument(fmt::format("the pattern \"{}\": {}", pattern, why));
}

// Translates a pattern for PCRE2, whose white space includes U+180E; Unicode's does not.
std::string translated(const std::string& pattern) {
  constexpr std::string_view kEscapes = "pPrntdDsS";  // escapes that are letters or digits
  constexpr std::string_view kGroups[] = {"?:", "?=", "?!", "?>", "?<=", "?<!", "?i:"};
  std::string result;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = std::string_view(pattern).substr(i + 1);
    const char c = pattern[i];
    const auto unknown = [&](std::size_t length) {
      refuse(pattern, fmt::format("\"{}\" at byte {} is not read", pattern.substr(i, length), i));
    };
    if (c == '\\') {
      if (rest.empty()) refuse(pattern, "it ends in a backslash");
      const char next = rest[0];
      const bool letter = (next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z') ||
                          (next >= '0' && next <= '9');
      if (letter && kEscapes.find(next) == std::string_view::npos) unknown(2);
      if (next == 's' || next == 'S') {
        result += next == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      } else {
        result += {c, next};
      }
      ++i;
      if (next == 'p' || next == 'P') {
        const std::size_t end = rest.find('}');
        if (!rest.substr(1).starts_with('{') || end == std::string_view::npos) unknown(2);
        result += rest.substr(1, end);
        i += end;
      }
      continue;
    }
    if (in_class) {
      if (c == '[' || (c == '&' && rest.starts_with('&'))) unknown(2);
      if (c == ']') in_class = false;
    } else if (c == '[') {
      in_class = true;
      if (rest.starts_with("]") || rest.starts_with("^]")) unknown(3);
      if (rest.starts_with('^')) {
        result += c;
        result += '^';
        ++i;
        continue;
      }
    } else if (c == '(' && (rest.starts_with('?') || rest.starts_with('*'))) {
      bool known = false;
      for (const std::string_view group : kGroups) known = known || rest.starts_with(group);
      if (!known) unknown(4);
    } else if (c == '^' || c == '$' || (c == '}' && rest.starts_with('+'))) {
      unknown(2);
    }
    result += c;
  }
  return result;
}

struct FreeMatch {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

}  // namespace

struct SplitPattern::Code {
  explicit Code(pcre2_code* made) : code(made) {}
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
  pcre2_code* code;
};

SplitPattern::SplitPattern(const std::string& pattern) {
  const std::string ours = translated(pattern);
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(ours.data()), ours.size(),
                                   PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
  if (code == nullptr) refuse(pattern, message(error));
  code_ = std::make_shared<const Code>(code);
  std::uint32_t empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty != 0) refuse(pattern, "expected one that matches no empty text");
  // Without a JIT compiler for this processor PCRE2 interprets the pattern: slower, with the same
  // matches.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

void SplitPattern::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  const std::unique_ptr<pcre2_match_data, FreeMatch> match(
      pcre2_match_data_create_from_pattern(code_->code, nullptr));
  if (match == nullptr) throw std::bad_alloc();
  const PCRE2_SIZE* found = pcre2_get_ovector_pointer(match.get());
  std::size_t done = 0;
  while (done < text.size()) {
    const int count = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), done, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (count == PCRE2_ERROR_NOMATCH) break;
    if (count < 0) throw std::runtime_error("splitting text: " + message(count));
    if (found[0] > done) pieces.push_back(text.substr(done, found[0] - done));
    pieces.push_back(text.substr(found[0], found[1] - found[0]));
    done = found[1];
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
}

}  // namespace logitless::train
