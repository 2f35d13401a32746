#include "kernels/cuda/cubin_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>

#include "core/check.h"
#include "core/file.h"
#include "core/hash.h"

namespace logitless::cuda {
namespace {

// A file: one line of title, name, bytes of code, name of the code; then the code.
std::string header_of(const std::string& name, std::string_view code) {
  return concat("logitless cubin 1 ", name, " ", code.size(), " ", content_name(code), "\n");
}

std::optional<std::string> read(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string whole((std::istreambuf_iterator<char>(file)), {});
  const std::size_t line = whole.find('\n');
  if (!file || line == std::string::npos) return std::nullopt;
  std::string code = whole.substr(line + 1);
  if (whole.compare(0, line + 1, header_of(name, code)) != 0) return std::nullopt;
  return code;
}

void write(const std::filesystem::path& path, const std::string& name, const std::string& code) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  if (failed) return;
  try {
    const std::string header = header_of(name, code);
    AtomicFile file(path.string());
    file.write(header.data(), header.size());
    file.write(code.data(), code.size());
    file.commit();
  } catch (const Error&) {
    return;  // the code is made again the next time
  }
}

}  // namespace

std::string cubin_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  };
  if (const auto own = variable("LOGITLESS_CACHE")) return *own;
  const auto below = [](const std::string& folder, const char* rest) {
    return (std::filesystem::path(folder) / rest).string();
  };
  const auto xdg = variable("XDG_CACHE_HOME");
  if (xdg && !xdg->empty()) return below(*xdg, "logitless/cubin");
  const auto home = variable("HOME");
  if (home && !home->empty()) return below(*home, ".cache/logitless/cubin");
  return {};
}

std::string cached(const std::string& folder, std::string_view content,
                   const std::function<std::string()>& make) {
  if (folder.empty()) return make();
  const std::string name = content_name(content);
  const std::filesystem::path path = std::filesystem::path(folder) / (name + ".cubin");
  if (auto found = read(path, name)) return *std::move(found);
  std::string code = make();
  write(path, name, code);
  return code;
}

}  // namespace logitless::cuda
