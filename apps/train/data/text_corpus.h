// Collects text files of the machine: selects and orders them, and holds some out for validation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace logitless::train {

struct CorpusOptions {
  std::vector<std::string> paths;  // files and directories; empty: system_include_directories()
  // files beyond it are left out, chosen by the hash of their name
  std::size_t max_bytes = 24u << 20;
  // larger files of a directory are taken for generated tables and skipped
  std::size_t max_file_bytes = 1u << 20;
  double held_out_fraction = 0.02;  // of the files, chosen by the hash of their name
};

// A text in UTF-8; bytes that are not UTF-8 are read as Latin-1.
struct TextFile {
  std::string name;  // below the directory it was found in
  std::string text;
  bool held_out = false;
};

struct Corpus {
  std::vector<TextFile> files;  // sorted by name; no two of the same content
  // too few files to hold out whole ones: the end of each is held out instead
  bool split_files = false;
  std::size_t binary = 0;      // files skipped: they hold a zero byte
  std::size_t too_large = 0;   // files skipped: over max_file_bytes
  std::size_t duplicates = 0;  // files skipped: same content as another
  std::size_t left_out = 0;    // files beyond max_bytes
  std::size_t cut = 0;         // 1 when the only file was longer than max_bytes

  std::size_t bytes(bool held_out) const;
  std::size_t count(bool held_out) const;
  // Changes with any name, content or choice of the held-out files.
  std::uint64_t key() const;
};

// Returns the directories of C and C++ headers: /usr/include, and those of the compiler that built
// this program.
std::vector<std::string> system_include_directories();

// Reads a corpus. The same files give the same text in any order of the file system. Throws
// std::runtime_error on a path that is missing or unreadable, and when there is no text.
Corpus read_corpus(const CorpusOptions& options);

}  // namespace logitless::train
