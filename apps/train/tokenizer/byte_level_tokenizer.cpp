#include "train/tokenizer/byte_level_tokenizer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "json/json.h"
#include "logitless/error.h"
#include "train/tokenizer/nfc.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

using Names = std::unordered_map<std::string, std::int32_t>;

constexpr std::uint64_t kMostWords = 1u << 24;
// The pattern of ByteLevel, which is GPT-2's.
constexpr const char* kBytePattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Returns the beginning of a JSON text, for messages.
std::string shown(const Json& json) {
  constexpr std::size_t kLength = 60;
  std::string text = json.dump();
  if (text.size() > kLength)
    text = replace_invalid_utf8(std::string_view(text).substr(0, kLength)) + "...";
  return text;
}

[[noreturn]] void refuse(const std::string& where, const std::string& expected, const Json& found) {
  throw InvalidArgument(fmt::format("{}: expected {}, found {}", where, expected, shown(found)));
}

// Returns a field of an object; null where there is none.
const Json& field(const Json& object, const char* name) {
  static const Json kNull;
  const Json* found = object.find(name);
  return found == nullptr ? kNull : *found;
}

bool is_word(const Json& json) {
  return json.is_number_unsigned() && json.get<std::uint64_t>() < kMostWords;
}
std::string word_bounds() { return fmt::format("the id of a token, below {}", kMostWords); }

// A value of a JSON file with its path, for messages.
struct Node {
  const Json& json;
  std::string where;

  Node operator[](const char* name) const {
    return {field(json, name), where.empty() ? name : where + "." + name};
  }
  bool none() const { return json.is_null(); }
  // Returns the items of an array.
  std::vector<Node> items() const {
    if (!json.is_array()) fail("an array");
    std::vector<Node> result;
    for (std::size_t i = 0; i < json.size(); ++i)
      result.push_back({json[i], fmt::format("{}[{}]", where, i)});
    return result;
  }
  [[noreturn]] void fail(const std::string& expected) const { refuse(where, expected, json); }
  const Node& object() const {
    if (!json.is_object()) fail("an object");
    return *this;
  }
  const std::string& text() const {
    if (!json.is_string()) fail("a text");
    return json.text();
  }
  std::int32_t word() const {
    expect(is_word(json), word_bounds());
    return json.get<std::int32_t>();
  }
  bool truth(bool otherwise) const {
    if (none()) return otherwise;
    if (!json.is_boolean()) fail("true or false");
    return json.get<bool>();
  }
  void expect(bool holds, const std::string& expected) const {
    if (!holds) fail(expected);
  }
  void expect_false() const { expect(!truth(false), "false"); }
  void expect_null() const { expect(none(), "null"); }
  std::string type() const { return object()["type"].text(); }
};

// The characters that stand for bytes in the names of words. Printable bytes stand for themselves;
// the others are U+0100 and following, in order.
struct ByteAlphabet {
  ByteAlphabet() {
    std::uint32_t next = 0x100;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
      append_utf8(characters[byte], printable ? byte : next++);
      bytes.emplace(characters[byte], static_cast<char>(byte));
    }
  }
  // Returns the bytes of a name; none where it has a character outside the alphabet.
  std::optional<std::string> read(std::string_view name) const {
    std::string result;
    while (!name.empty()) {
      const auto byte = bytes.find(std::string(name.substr(0, utf8_length(name, 0))));
      if (byte == bytes.end()) return std::nullopt;
      result += byte->second;
      name.remove_prefix(byte->first.size());
    }
    return result;
  }

  std::string characters[256];
  std::unordered_map<std::string, char> bytes;
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet kAlphabet;
  return kAlphabet;
}

Names vocabulary(const Node& model) {
  const Node vocab = model["vocab"].object();
  Names names;
  std::unordered_map<std::int32_t, const std::string*> owners;
  for (const auto& [name, number] : vocab.json.items()) {
    const auto where = [&, &name = name] {
      return fmt::format("{}[{}]", vocab.where, Json(name).dump());
    };
    if (!is_word(number)) refuse(where(), word_bounds(), number);
    const auto word = number.get<std::int32_t>();
    const auto [owner, is_new] = owners.emplace(word, &name);
    if (!is_new)
      refuse(where(),
             fmt::format("a number of its own, not that of {}", Json(*owner->second).dump()),
             number);
    names.emplace(name, word);
  }
  return names;
}

// Returns the two names of a merge: "left right" or ["left", "right"].
std::pair<std::string, std::string> merge_names(const Node& merge) {
  if (merge.json.is_string()) {
    const std::string& text = merge.text();
    const std::size_t blank = text.find(' ');
    merge.expect(blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos,
                 "two tokens with a blank between them");
    return {text.substr(0, blank), text.substr(blank + 1)};
  }
  merge.expect(merge.json.is_array() && merge.json.size() == 2, "two tokens");
  const std::vector<Node> words = merge.items();
  return {words[0].text(), words[1].text()};
}

BytePairs byte_pairs(const Node& model, const Names& names) {
  const std::string type = model.type();
  if (type != "BPE") model["type"].fail("\"BPE\"");
  const Json& dropout = model["dropout"].json;
  model["dropout"].expect(dropout.is_null() || dropout == 0.0, "null: tokens may not be random");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Node affix = model[name];
    affix.expect(affix.none() || affix.json == "", "null or an empty text");
  }
  // `unk_token` has no effect: every byte has a word.
  std::int32_t bytes[256];
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto word = names.find(alphabet().characters[byte]);
    if (word == names.end()) {
      throw InvalidArgument(fmt::format(
          "model.vocab: expected a token for every byte, as byte-level BPE has, found none for "
          "byte 0x{:02x}, \"{}\"",
          byte, alphabet().characters[byte]));
    }
    bytes[byte] = word->second;
  }

  const std::vector<Node> list = model["merges"].items();
  MergeTable merges(list.size());
  for (std::size_t rank = 0; rank < list.size(); ++rank) {
    if (list[rank].json.is_string() && list[rank].text().starts_with("#version")) continue;
    const auto [left, right] = merge_names(list[rank]);
    const auto number = [&](const std::string& name) {
      const auto word = names.find(name);
      if (word == names.end())
        list[rank].fail(fmt::format("tokens of model.vocab, which lacks {}", Json(name).dump()));
      return word->second;
    };
    const std::int32_t first = number(left), second = number(right);
    merges.add(first, second, {static_cast<std::uint32_t>(rank), number(left + right)});
  }

  std::unordered_map<std::string, std::int32_t> whole;
  if (model["ignore_merges"].truth(false)) {
    for (const auto& [name, word] : names) {
      if (std::optional<std::string> text = alphabet().read(name); text)
        whole.emplace(std::move(*text), word);
    }
  }
  return {bytes, std::move(merges), std::move(whole)};
}

// Appends the patterns of a pre-tokenizer. Returns whether it ends in ByteLevel.
bool read_pre_tokenizer(const Node& node, std::vector<SplitPattern>& patterns) {
  const auto add = [&](const Node& where, const std::string& pattern) {
    try {
      patterns.emplace_back(pattern);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("{}: {}", where.where, error.what()));
    }
  };
  const std::string type = node.type();
  if (type == "ByteLevel") {
    node["add_prefix_space"].expect_false();
    if (node["use_regex"].truth(true)) add(node, kBytePattern);
    return true;
  }
  if (type == "Split") {
    node["behavior"].expect(node["behavior"].json == "Isolated", "\"Isolated\"");
    node["invert"].expect_false();
    const Node pattern = node["pattern"].object()["Regex"];
    add(pattern, pattern.text());
    return false;
  }
  if (type != "Sequence") node["type"].fail("\"ByteLevel\", \"Split\" or \"Sequence\"");
  bool last = false;
  for (const Node& part : node["pretokenizers"].items()) {
    part.expect(!last, "nothing after ByteLevel");
    part.object()["type"].expect(part["type"].json != "Sequence", "no sequence in a sequence");
    last = read_pre_tokenizer(part, patterns);
  }
  return last;
}

// Appends the words that the post-processor puts before a text.
void read_post_processor(const Node& node, std::vector<std::int32_t>& before, int depth = 0) {
  if (node.none()) return;
  const std::string type = node.type();
  if (type == "ByteLevel") return;  // it sets offsets of words in the text, which are not used here
  if (type == "Sequence" && depth == 0) {
    for (const Node& part : node["processors"].items()) read_post_processor(part, before, 1);
    return;
  }
  if (type != "TemplateProcessing")
    node["type"].fail("\"TemplateProcessing\", \"ByteLevel\" or a \"Sequence\" of them");
  std::vector<std::int32_t> words;
  bool text = false;
  for (const Node& part : node["single"].items()) {
    if (part.object().json.contains("Sequence")) {
      part.expect(!text, "one text");
      text = true;
      continue;
    }
    part.expect(!text, "no token after the text");
    const std::string name = part["SpecialToken"].object()["id"].text();
    for (const Node& word : node["special_tokens"].object()[name.c_str()].object()["ids"].items())
      words.push_back(word.word());
  }
  node["single"].expect(text, "a text in it");
  before.insert(before.begin(), words.begin(), words.end());
}

}  // namespace

// The fields of the file that the members are made of.
struct ByteLevelTokenizer::File {
  static File parse(std::string_view text) {
    std::optional<Json> json = Json::try_parse(text);
    if (!json || !json->is_object())
      throw InvalidArgument(
          fmt::format("expected an object of JSON, found {}", json ? shown(*json) : "no JSON"));
    File file{std::move(*json), {}};
    const Node top{file.json, ""};
    top["model"].object();
    file.names = vocabulary(top["model"]);
    return file;
  }
  Json json;
  Names names;  // of the vocabulary
};

ByteLevelTokenizer::ByteLevelTokenizer(std::string_view json)
    : ByteLevelTokenizer(File::parse(json)) {}

ByteLevelTokenizer::ByteLevelTokenizer(const File& file)
    : names_(file.names), pairs_(byte_pairs(Node{file.json, ""}["model"], file.names)) {
  const Node top{file.json, ""};
  top["truncation"].expect_null();
  top["padding"].expect_null();
  if (const Node normalizer = top["normalizer"]; !normalizer.none()) {
    if (normalizer.type() != "NFC") normalizer["type"].fail("\"NFC\"");
    normalize_ = true;
  }
  const Node pre = top["pre_tokenizer"];
  if (!read_pre_tokenizer(pre, patterns_)) pre.fail("one that ends in ByteLevel");
  if (const Node decoder = top["decoder"]; decoder.type() != "ByteLevel")
    decoder["type"].fail("\"ByteLevel\"");

  const auto give = [&](std::int32_t word, std::string text) {
    const auto at = static_cast<std::size_t>(word);
    if (at >= texts_.size()) texts_.resize(at + 1);
    texts_[at] = std::move(text);
  };
  for (const auto& [name, word] : names_) give(word, alphabet().read(name).value_or(name));
  if (const Node added = top["added_tokens"]; !added.none()) {
    for (const Node& token : added.items()) {
      const std::string& name = token.object()["content"].text();
      const std::int32_t word = token["id"].word();
      token["content"].expect(!name.empty(), "a text that is not empty");
      for (const char* what : {"single_word", "lstrip", "rstrip"}) token[what].expect_false();
      const auto [entry, is_new] = names_.emplace(name, word);
      token["id"].expect(entry->second == word,
                         fmt::format("{}, as the vocabulary has it", entry->second));
      token["id"].expect(
          !is_new || word >= vocab() || texts_[static_cast<std::size_t>(word)].empty(),
          "an id that no other token has");
      const bool normalized = token["normalized"].truth(!token["special"].truth(false));
      std::string made;
      const std::string_view looked_for =
          normalized && normalize_ ? to_nfc(name, made) : std::string_view(name);
      (normalized ? added_normalized_ : added_).add(looked_for, word);
      give(word, token["special"].truth(false) ? "" : name);
    }
  }
  read_post_processor(top["post_processor"], before_);
  for (const std::int32_t word : before_) {
    if (word >= vocab())
      top["post_processor"].fail(fmt::format("tokens of the vocabulary of {}", vocab()));
  }
}

std::int32_t ByteLevelTokenizer::word(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? -1 : found->second;
}

void ByteLevelTokenizer::encode(std::string_view text, std::vector<std::int32_t>& words) const {
  for (const AddedWords::Part& part : added_.parts(text)) {
    if (part.word >= 0) {
      words.push_back(part.word);
      continue;
    }
    for (std::string_view rest = part.text; !rest.empty();) {
      const Utf8Run run = utf8_run(rest);
      const std::string_view bytes = rest.substr(0, run.bytes);
      if (run.valid) {
        encode_part(bytes, words);
      } else {
        pairs_.encode(bytes, words);
      }
      rest.remove_prefix(run.bytes);
    }
  }
}

void ByteLevelTokenizer::encode_part(std::string_view text,
                                     std::vector<std::int32_t>& words) const {
  std::string made;
  if (normalize_) text = to_nfc(text, made);
  for (const AddedWords::Part& part : added_normalized_.parts(text)) {
    if (part.word >= 0) {
      words.push_back(part.word);
    } else {
      encode_pieces(part.text, words);
    }
  }
}

void ByteLevelTokenizer::encode_pieces(std::string_view text,
                                       std::vector<std::int32_t>& words) const {
  std::vector<std::string_view> pieces{text}, finer;
  for (const SplitPattern& pattern : patterns_) {
    finer.clear();
    for (const std::string_view piece : pieces) pattern.split(piece, finer);
    std::swap(pieces, finer);
  }
  for (const std::string_view piece : pieces) pairs_.encode(piece, words);
}

std::string ByteLevelTokenizer::bytes(const std::vector<std::int32_t>& words) const {
  std::string result;
  for (const std::int32_t word : words) {
    if (word >= 0 && word < vocab()) result += texts_[static_cast<std::size_t>(word)];
  }
  return result;
}

}  // namespace logitless::train
