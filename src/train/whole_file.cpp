#include "train/whole_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "logitless/error.h"

namespace logitless::train {

std::optional<std::string> file_contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void write_whole(const std::string& path, const std::string& text) {
  const std::string temporary = fmt::format("{}.{}-0.tmp", path, ::getpid());
  std::ofstream out(temporary, std::ios::binary);
  out << text;
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(temporary, path, error);
  if (!out || error) {
    std::error_code none;
    std::filesystem::remove(temporary, none);
    throw DeviceError(fmt::format("'{}': cannot be written", path));
  }
}

}  // namespace logitless::train
