#include "kernels/cuda/cubin_cache.h"

#include <sys/random.h>

#include <filesystem>
#include <optional>
#include <system_error>

#include "core/check.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/own_files.h"
#include "core/siphash.h"

namespace logitless::cuda {
namespace {

void write_own(const std::string& path, std::string_view bytes) {
  try {
    write_file(path, bytes, FileUse::cache);
  } catch (const Error&) {
    return;  // the code is compiled again the next time
  }
}

// Returns the folder's key, drawing one where there is none; nothing where it cannot be stored.
std::optional<std::string> key_of(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "key").string();
  const auto found = [&]() -> std::optional<std::string> {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0 || (status.st_mode & 077) != 0) return std::nullopt;
    std::optional<std::string> key = read_own_file(path);
    return key && key->size() == kSipHashKey ? key : std::nullopt;
  };
  if (auto key = found()) return key;
  std::string drawn(kSipHashKey, '\0');
  if (::getrandom(drawn.data(), drawn.size(), 0) != static_cast<ssize_t>(drawn.size()))
    return std::nullopt;
  write_own(path, drawn);
  return found();  // of several processes, the last one's key counts
}

// A file holds one line of title, name, bytes of code and MAC; then the code.
std::string header_of(const std::string& key, const std::string& name, std::string_view content,
                      std::string_view code) {
  const std::string proven = concat(content.size(), " ", content, code);
  return concat("logitless cubin 2 ", name, " ", code.size(), " ", siphash(key, proven), "\n");
}

}  // namespace

std::string cached(const std::string& folder, std::string_view content,
                   const std::function<std::string()>& make) {
  if (folder.empty() || !make_cache_folder(folder).empty()) return make();
  const std::optional<std::string> key = key_of(folder);
  if (!key) return make();
  const std::string name = content_name(content);
  const std::string path = (std::filesystem::path(folder) / (name + ".cubin")).string();
  if (const std::optional<std::string> whole = read_own_file(path)) {
    const std::size_t line = whole->find('\n');
    if (line != std::string::npos) {
      std::string code = whole->substr(line + 1);
      if (whole->compare(0, line + 1, header_of(*key, name, content, code)) == 0) return code;
    }
  }
  const std::string code = make();
  write_own(path, header_of(*key, name, content, code) + code);
  return code;
}

}  // namespace logitless::cuda
