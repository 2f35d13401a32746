#include "fuzz/mutate.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace logitless::fuzz {
namespace {

// SplitMix64: a mixed counter; good enough for choices and the same on all machines.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t number) : state_(mix(seed) ^ number) {}

  std::uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15u); }
  // Returns a number below `count`, or 0 if count is 0.
  std::size_t below(std::size_t count) {
    return count == 0 ? 0 : static_cast<std::size_t>(bits() % count);
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

// Numbers at which arithmetic on sizes goes wrong.
constexpr std::uint64_t kEdges[] = {0,
                                    1,
                                    2,
                                    7,
                                    8,
                                    127,
                                    128,
                                    255,
                                    256,
                                    65535,
                                    65536,
                                    0x7fffffffu,
                                    0x80000000u,
                                    0xffffffffu,
                                    0x100000000u,
                                    0x0fffffffffffffffu,
                                    0x1000000000000000u,
                                    0x7fffffffffffffffu,
                                    0x8000000000000000u,
                                    0xffffffffffffffffu};

std::uint64_t edited(std::uint64_t value, Random& random) {
  switch (random.below(5)) {
    case 0:
      return value + 1;
    case 1:
      return value - 1;
    case 2:
      return value * 2;
    case 3:
      return value + random.below(64);
    default:
      return kEdges[random.below(std::size(kEdges))];
  }
}

void edit_binary_number(std::string& bytes, Random& random) {
  const std::size_t width = std::size_t{1} << random.below(4);
  if (bytes.size() < width) return;
  // Half of the changes are at the start, where lengths are stored.
  const std::size_t last = bytes.size() - width;
  const std::size_t at =
      random.below((random.below(2) == 0 ? std::min<std::size_t>(last, 12) : last) + 1);
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, width);
  value = edited(value, random);
  std::memcpy(bytes.data() + at, &value, width);
}

// Changes one of the decimal numbers in the text.
void edit_text_number(std::string& bytes, Random& random) {
  const auto digit = [&](std::size_t i) {
    return std::isdigit(static_cast<unsigned char>(bytes[i])) != 0;
  };
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (digit(i) && (i == 0 || !digit(i - 1))) starts.push_back(i);
  if (starts.empty()) return;
  const std::size_t begin = starts[random.below(starts.size())];
  std::size_t end = begin;
  std::uint64_t value = 0;
  for (; end < bytes.size() && digit(end); ++end)
    value = value * 10 + static_cast<std::uint64_t>(bytes[end] - '0');
  std::string text = std::to_string(edited(value, random));
  if (random.below(16) == 0) text.insert(0, 1, "-0+ "[random.below(4)]);
  bytes.replace(begin, end - begin, text);
}

struct Slice {
  std::size_t at;
  std::size_t size;
};

// Prefers short slices.
Slice slice_of(const std::string& bytes, Random& random) {
  const std::size_t at = random.below(bytes.size() + 1);
  const std::size_t longest = bytes.size() - at;
  const std::size_t size = random.below(4) == 0 ? longest : std::min<std::size_t>(longest, 16);
  return {at, random.below(size + 1)};
}

void change(std::string& bytes, const std::vector<std::string>& corpus,
            const std::vector<std::string>& tokens, Random& random) {
  constexpr int kKinds = 10;
  const std::size_t kind = random.below(kKinds);
  if (bytes.empty() && kind < 2) return;
  switch (kind) {
    case 0: {
      char& byte = bytes[random.below(bytes.size())];
      byte = static_cast<char>(byte ^ (1 << random.below(8)));
      break;
    }
    case 1:
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
      break;
    case 2:
      bytes.resize(random.below(bytes.size() + 1));
      break;
    case 3: {
      const Slice slice = slice_of(bytes, random);
      bytes.erase(slice.at, slice.size);
      break;
    }
    case 4: {
      const Slice slice = slice_of(bytes, random);
      bytes.insert(random.below(bytes.size() + 1), bytes.substr(slice.at, slice.size));
      break;
    }
    case 5: {
      const std::string& other = corpus[random.below(corpus.size())];
      const Slice from = slice_of(other, random);
      const Slice to = slice_of(bytes, random);
      bytes.replace(to.at, to.size, other.substr(from.at, from.size));
      break;
    }
    case 6:
      edit_binary_number(bytes, random);
      break;
    case 7:
    case 8:
      edit_text_number(bytes, random);
      break;
    default: {
      const Slice to = slice_of(bytes, random);
      const std::string byte(1, static_cast<char>(random.below(256)));
      const std::string& token = tokens.empty() ? byte : tokens[random.below(tokens.size())];
      bytes.replace(to.at, std::min(to.size, random.below(2) * token.size()), token);
      break;
    }
  }
}

int hex_value(char c) {
  const std::size_t at = std::string_view("0123456789abcdef")
                             .find(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  return at == std::string_view::npos ? 0 : static_cast<int>(at);
}

}  // namespace

std::vector<std::string> parse_dict(std::string_view text) {
  std::vector<std::string> tokens;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t begin = line.find('"');
    if (line.starts_with('#') || begin == std::string_view::npos) continue;
    std::string token;
    for (std::size_t i = begin + 1; i < line.size() && line[i] != '"'; ++i) {
      if (line[i] == '\\' && i + 3 < line.size() && line[i + 1] == 'x') {
        token += static_cast<char>(hex_value(line[i + 2]) * 16 + hex_value(line[i + 3]));
        i += 3;
      } else {
        if (line[i] == '\\' && i + 1 < line.size()) ++i;
        token += line[i];
      }
    }
    tokens.push_back(token);
  }
  return tokens;
}

std::string mutate(const std::vector<std::string>& corpus, const std::vector<std::string>& tokens,
                   std::uint64_t seed, std::uint64_t number) {
  Random random(seed, number);
  std::string bytes = corpus[random.below(corpus.size())];
  for (std::size_t changes = 1 + random.below(4); changes > 0; --changes)
    change(bytes, corpus, tokens, random);
  constexpr std::size_t kLongest = 1 << 16;
  bytes.resize(std::min(bytes.size(), kLongest));
  return bytes;
}

}  // namespace logitless::fuzz
