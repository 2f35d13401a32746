#include "train/whole_file.h"

#include <fstream>
#include <iterator>

namespace logitless::train {

std::optional<std::string> file_contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

}  // namespace logitless::train
