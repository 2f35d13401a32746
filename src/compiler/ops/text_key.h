// Makes keys of the text form from the attributes that they hold.
#pragma once

#include <charconv>
#include <string>

#include "compiler/ir/text_reader.h"
#include "compiler/ops/op.h"

namespace logitless::ir {

inline void read_text(TextReader& in, int& to) { to = in.dimension(); }
inline void read_text(TextReader& in, bool& to) { to = in.integer() != 0; }
inline void read_text(TextReader& in, double& to) { to = in.real(); }
inline void read_text(TextReader& in, std::int64_t& to) { to = in.integer(); }
inline void read_text(TextReader& in, std::vector<int>& to) { to = in.dimensions(); }
inline void read_text(TextReader& in, Shape& to) { to = in.sizes(); }

inline std::string written(int value) { return std::to_string(value); }
inline std::string written(bool value) { return value ? "1" : "0"; }
inline std::string written(std::int64_t value) { return std::to_string(value); }
// Returns the shortest text that reads back as the same double.
inline std::string written(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}
inline std::string written(const std::vector<int>& numbers) {
  std::string out;
  for (const int n : numbers) out += (out.empty() ? "" : ", ") + std::to_string(n);
  return out;
}
inline std::string written(const Shape& shape) {
  const std::string text = logitless::text_of(shape);
  return text.substr(1, text.size() - 2);
}

// Makes the key "NAME(value)" of one attribute.
template <auto kMember>
constexpr TextKey key(std::string_view name, bool required = true) {
  return {name, [](TextReader& in, Attributes& a) { read_text(in, a.*kMember); },
          [](const Attributes& a) { return written(a.*kMember); }, required};
}
// Makes the key of a member of Attributes::head.
template <auto kMember>
constexpr TextKey head_key(std::string_view name) {
  return {name, [](TextReader& in, Attributes& a) { read_text(in, a.head.*kMember); },
          [](const Attributes& a) { return written(a.head.*kMember); }};
}
// Makes the key of a member of Attributes::scores; an optional key is omitted if it is 0.
template <auto kMember, bool kRequired = false>
constexpr TextKey scores_key(std::string_view name) {
  return {name, [](TextReader& in, Attributes& a) { read_text(in, a.scores.*kMember); },
          [](const Attributes& a) {
            const bool empty = !kRequired && a.scores.*kMember == Scores{}.*kMember;
            return empty ? std::string() : written(a.scores.*kMember);
          },
          kRequired};
}
// Makes the key "NAME(list; list)".
template <auto kFirst, auto kSecond>
constexpr TextKey pair_key(std::string_view name) {
  return {name,
          [](TextReader& in, Attributes& a) {
            read_text(in, a.*kFirst);
            in.symbol(";");
            read_text(in, a.*kSecond);
          },
          [](const Attributes& a) { return written(a.*kFirst) + "; " + written(a.*kSecond); }};
}
// Like pair_key(), but omitted if the first list is empty.
template <auto kFirst, auto kSecond>
constexpr TextKey optional_pair_key(std::string_view name) {
  TextKey pair = pair_key<kFirst, kSecond>(name);
  pair.write = [](const Attributes& a) {
    return (a.*kFirst).empty() ? std::string() : written(a.*kFirst) + "; " + written(a.*kSecond);
  };
  pair.required = false;
  return pair;
}

}  // namespace logitless::ir
