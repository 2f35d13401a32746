#include "train/run/output_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <vector>

#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/run/checkpoint.h"

namespace logitless::train {
namespace {

// Returns the first bytes of a file, in lower case.
std::string start_of(const std::string& path, std::size_t bytes) {
  std::string start(bytes, '\0');
  std::ifstream in(path, std::ios::binary);
  in.read(start.data(), static_cast<std::streamsize>(bytes));
  start.resize(static_cast<std::size_t>(in.gcount()));
  std::transform(start.begin(), start.end(), start.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return start;
}

bool starts_with(const std::string& path, std::string_view text) {
  return start_of(path, text.size()) == text;
}

bool is_checkpoint(const TensorFile& file) {
  const auto found = file.metadata().find("format");
  return found != file.metadata().end() && found->second == kCheckpointFormat;
}

bool is_kind(const std::string& path, FileKind kind) {
  if (kind == FileKind::log) return starts_with(path, "{\"kind\":\"run\"");
  if (kind == FileKind::page) return starts_with(path, "<!doctype html");
  try {
    const TensorFile file(path);
    if (file.names() == std::vector<std::string>{""}) return false;  // npy
    return kind == FileKind::tensors || is_checkpoint(file) == (kind == FileKind::checkpoint);
  } catch (const InvalidArgument&) {
    return false;
  }
}

const char* name_of(FileKind kind) {
  switch (kind) {
    case FileKind::checkpoint:
      return "checkpoint of logitless train";
    case FileKind::weights:
      return "safetensors file of weights";
    case FileKind::tensors:
      return "safetensors file";
    case FileKind::log:
      return "log of logitless train";
    case FileKind::page:
      return "page of HTML";
  }
  return "";
}

}  // namespace

void check_replaceable(const std::string& path, FileKind kind) {
  std::error_code error;
  if (path.empty() || !std::filesystem::is_regular_file(path, error)) return;
  if (std::filesystem::file_size(path, error) == 0 || is_kind(path, kind)) return;
  throw InvalidArgument(fmt::format("'{}': expected no file, or a {} to replace, found another one",
                                    path, name_of(kind)));
}

}  // namespace logitless::train
