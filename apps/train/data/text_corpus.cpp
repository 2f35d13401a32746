#include "train/data/text_corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <unordered_set>

#include "train/hash.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

struct Candidate {
  std::string name;
  fs::path path;
  std::uint64_t hash = 0;
  std::uintmax_t bytes = 0;
};

std::string to_utf8(std::string text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const std::size_t length = utf8_length(text, i);
    if (length == 0) break;
    i += length;
  }
  if (i == text.size()) return text;
  std::string result = text.substr(0, i);
  while (i < text.size()) {
    const std::size_t length = utf8_length(text, i);
    if (length > 0) {
      result.append(text, i, length);
      i += length;
    } else {
      const auto byte = static_cast<unsigned char>(text[i++]);
      result.push_back(static_cast<char>(0xc0u | byte >> 6));
      result.push_back(static_cast<char>(0x80u | (byte & 0x3fu)));
    }
  }
  return result;
}

std::string read_file(const fs::path& path, std::uintmax_t bytes) {
  std::ifstream stream(path, std::ios::binary);
  std::string text(bytes, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(bytes));
  if (!stream) throw std::runtime_error(fmt::format("cannot read '{}'", path.string()));
  return text;
}

// Lists regular files below a directory. Links are not followed, so that no file appears twice.
void list_directory(const fs::path& root, std::vector<Candidate>& found) {
  const auto options = fs::directory_options::skip_permission_denied;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root, options)) {
    if (entry.is_symlink() || !entry.is_regular_file()) continue;
    Candidate candidate;
    candidate.path = entry.path();
    candidate.name = entry.path().lexically_relative(root).generic_string();
    candidate.bytes = entry.file_size();
    found.push_back(std::move(candidate));
  }
}

std::vector<Candidate> list_files(const CorpusOptions& options, Corpus& corpus) {
  std::vector<std::string> roots = options.paths;
  if (roots.empty()) roots = system_include_directories();
  std::vector<Candidate> found;
  for (const std::string& root : roots) {
    std::error_code error;
    const fs::file_status status = fs::status(root, error);
    if (!fs::exists(status)) {
      throw std::runtime_error(fmt::format("--text: '{}' does not exist", root));
    }
    if (fs::is_directory(status)) {
      const std::size_t first = found.size();
      list_directory(root, found);
      const auto large = std::remove_if(
          found.begin() + static_cast<std::ptrdiff_t>(first), found.end(),
          [&](const Candidate& file) { return file.bytes > options.max_file_bytes; });
      corpus.too_large += static_cast<std::size_t>(found.end() - large);
      found.erase(large, found.end());
    } else if (fs::is_regular_file(status)) {
      found.push_back({fs::path(root).filename().string(), root, 0, fs::file_size(root)});
    } else {
      throw std::runtime_error(fmt::format("--text: '{}' is neither a file nor a directory", root));
    }
  }
  for (Candidate& file : found) file.hash = hash_bytes(file.name);
  return found;
}

// Returns the offset of the line that starts at or before the last `fraction` of the text; without
// a newline before it, the offset of that fraction.
std::size_t tail_start(const std::string& text, double fraction) {
  const auto wanted = static_cast<std::size_t>(static_cast<double>(text.size()) * (1 - fraction));
  const std::size_t newline = text.rfind('\n', wanted);
  return newline == std::string::npos ? wanted : newline + 1;
}

void hold_out_tails(Corpus& corpus, double fraction) {
  corpus.split_files = true;
  std::vector<TextFile> tails;
  for (TextFile& file : corpus.files) {
    file.held_out = false;
    const std::size_t start = tail_start(file.text, fraction);
    if (start == 0 || start >= file.text.size()) continue;
    tails.push_back({file.name + " (end)", file.text.substr(start), true});
    file.text.resize(start);
  }
  for (TextFile& tail : tails) corpus.files.push_back(std::move(tail));
}

}  // namespace

std::size_t Corpus::bytes(bool held_out) const {
  std::size_t total = 0;
  for (const TextFile& file : files) total += file.held_out == held_out ? file.text.size() : 0;
  return total;
}

std::size_t Corpus::count(bool held_out) const {
  return static_cast<std::size_t>(std::count_if(
      files.begin(), files.end(), [&](const TextFile& file) { return file.held_out == held_out; }));
}

std::uint64_t Corpus::key() const {
  std::uint64_t key = 0;
  for (const TextFile& file : files) {
    key = mix(hash_bytes(file.name, key), file.held_out ? 1 : 0);
    key = hash_bytes(file.text, key);
  }
  return key;
}

std::vector<std::string> system_include_directories() {
  // The compiler's list comes from the build; on another machine at least /usr/include exists.
  std::vector<fs::path> wanted = {"/usr/include"};
  std::string_view rest = LOGITLESS_TRAIN_INCLUDE_DIRECTORIES;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    wanted.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  std::vector<std::string> result;
  for (const fs::path& path : wanted) {
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    if (error || !fs::is_directory(real)) continue;
    const std::string text = real.generic_string();
    const bool inside = std::any_of(result.begin(), result.end(), [&](const std::string& root) {
      return text == root || text.starts_with(root + "/");
    });
    if (!inside) result.push_back(text);
  }
  return result;
}

Corpus read_corpus(const CorpusOptions& options) {
  Corpus corpus;
  std::vector<Candidate> candidates = list_files(options, corpus);
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.path < b.path;
  });

  std::unordered_set<std::uint64_t> seen;
  std::size_t bytes = 0, empty = 0;
  for (const Candidate& candidate : candidates) {
    if (bytes + candidate.bytes > options.max_bytes && bytes > 0) {
      ++corpus.left_out;
      continue;
    }
    // A first file above the limit is cut, so that there is always some text.
    const std::uintmax_t wanted = std::min<std::uintmax_t>(candidate.bytes, options.max_bytes);
    corpus.cut += wanted < candidate.bytes ? 1 : 0;
    TextFile file{candidate.name, read_file(candidate.path, wanted), false};
    if (file.text.empty()) {
      ++empty;
      continue;
    }
    if (file.text.find('\0') != std::string::npos) {
      ++corpus.binary;
      continue;
    }
    if (!seen.insert(hash_bytes(file.text)).second) {
      ++corpus.duplicates;
      continue;
    }
    bytes += file.text.size();
    file.text = to_utf8(std::move(file.text));
    file.held_out = uniform(candidate.hash, 0) < options.held_out_fraction;
    corpus.files.push_back(std::move(file));
  }
  std::stable_sort(corpus.files.begin(), corpus.files.end(),
                   [](const TextFile& a, const TextFile& b) { return a.name < b.name; });
  const double held_out = static_cast<double>(corpus.bytes(true)) / static_cast<double>(bytes + 1);
  if (corpus.bytes(false) == 0 || held_out < options.held_out_fraction / 4) {
    hold_out_tails(corpus, options.held_out_fraction);
  }
  if (corpus.bytes(false) == 0 || corpus.bytes(true) == 0) {
    throw std::runtime_error(fmt::format(
        "no text to train on: {} files found, {} empty, {} binary, {} over {} bytes, {} repeated, "
        "{} bytes of text; give files or folders of text with --text",
        candidates.size(), empty, corpus.binary, corpus.too_large, options.max_file_bytes,
        corpus.duplicates, bytes));
  }
  return corpus;
}

}  // namespace logitless::train
