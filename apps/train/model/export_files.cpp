#include "train/model/export_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "json/json.h"
#include "logitless/error.h"
#include "train/whole_file.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporary = ".export-";  // mkdtemp() appends six letters

[[noreturn]] void refuse(const std::string& path, const std::string& text) {
  throw InvalidArgument(fmt::format("'{}': {}", path, text));
}

[[noreturn]] void fail(const std::string& path, const char* what, const std::error_code& error) {
  throw DeviceError(fmt::format("'{}': {}: {}", path, what, error.message()));
}

std::error_code last_error() { return {errno, std::generic_category()}; }

std::string stem_of(const std::string& weights) {
  return weights.ends_with(kSafetensors) ? weights.substr(0, weights.size() - kSafetensors.size())
                                         : weights;
}

// Returns whether `text` is "-00001-of-00002".
bool is_shard_number(std::string_view text) {
  constexpr std::string_view kForm = "-ddddd-of-ddddd";
  return text.size() == kForm.size() &&
         std::equal(text.begin(), text.end(), kForm.begin(), [](char c, char form) {
           return form == 'd' ? c >= '0' && c <= '9' : c == form;
         });
}

bool is_shard(const std::string& path) {
  const std::string stem = stem_of(path);
  constexpr std::size_t kNumber = 15;
  return stem.size() != path.size() && stem.size() > kNumber &&
         is_shard_number(std::string_view(stem).substr(stem.size() - kNumber));
}

// Removes the temporary folders of killed exports: those that no process has locked.
void remove_leftovers(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kTemporary)) continue;
    const int left = ::open(entry->path().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (left < 0) continue;
    std::error_code none;
    if (::flock(left, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry->path(), none);
    ::close(left);
  }
}

}  // namespace

std::string export_path(const std::string& target) {
  std::error_code none;
  if (target.empty()) throw InvalidArgument("expected a folder or FILE.safetensors, got ''");
  if (fs::is_directory(target, none)) return (fs::path(target) / "model.safetensors").string();
  if (is_shard(target)) refuse(target, "is a shard of a model, expected the model's folder");
  if (target.ends_with(kIndex)) refuse(target, "is the index of a model, expected its folder");
  if (target.ends_with(kSafetensors)) return target;
  if (fs::exists(fs::symlink_status(target, none)))
    refuse(target, "is a file, expected a folder or FILE.safetensors");
  return (fs::path(target) / "model.safetensors").string();
}

std::string index_of(const std::string& weights) { return stem_of(weights) + std::string(kIndex); }

std::string shard_of(const std::string& weights, std::size_t number, std::size_t count) {
  return fmt::format("{}-{:05}-of-{:05}{}", stem_of(weights), number, count, kSafetensors);
}

bool is_shard_of(const std::string& weights, const std::string& path) {
  const std::string stem = stem_of(weights);
  return is_shard(path) && path.starts_with(stem) &&
         is_shard_number(std::string_view(stem_of(path)).substr(stem.size()));
}

std::set<std::string> shards_listed(const std::string& index) {
  std::set<std::string> shards;
  if (!index.ends_with(kIndex)) return shards;
  const Json json = Json::try_parse(file_contents(index).value_or("")).value_or(nullptr);
  const Json* map = json.is_object() ? json.find("weight_map") : nullptr;
  if (map == nullptr || !map->is_object()) return shards;
  for (const auto& [tensor, file] : map->items()) {
    const fs::path shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.has_filename() && shard == shard.filename()) shards.insert(shard.string());
  }
  return shards;
}

ExportFiles::ExportFiles(const std::string& weights)
    : weights_(weights), folder_(fs::path(weights).parent_path().string()) {
  if (folder_.empty()) folder_ = ".";
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) fail(folder_, "cannot make the folder", error);
  remove_leftovers(folder_);
  temporary_ = (fs::path(folder_) / (std::string(kTemporary) + "XXXXXX")).string();
  if (::mkdtemp(temporary_.data()) == nullptr) {
    temporary_.clear();
    fail(folder_, "cannot make a folder in it", last_error());
  }
  lock_ = ::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (lock_ >= 0) static_cast<void>(::flock(lock_, LOCK_EX | LOCK_NB));
}

ExportFiles::~ExportFiles() {
  std::error_code none;
  if (!temporary_.empty()) fs::remove_all(temporary_, none);
  if (lock_ >= 0) ::close(lock_);
}

std::string ExportFiles::in_place(const std::string& name) const {
  return (fs::path(folder_) / name).string();
}

std::string ExportFiles::add(const std::string& name) {
  added_.push_back(name);
  return (fs::path(temporary_) / name).string();
}

void ExportFiles::remove(const std::string& name) { removed_.push_back(name); }

// Returns the existing files of the old weights: the single file, the index and the shards that it
// lists.
std::vector<std::string> ExportFiles::weights_before() const {
  const std::string index = index_of(weights_);
  std::vector<std::string> names = {fs::path(weights_).filename().string(),
                                    fs::path(index).filename().string()};
  for (const std::string& shard : shards_listed(index)) {
    if (is_shard_of(weights_, in_place(shard))) names.push_back(shard);
  }
  std::erase_if(names, [&](const std::string& name) {
    std::error_code none;
    return !fs::exists(fs::symlink_status(in_place(name), none));
  });
  return names;
}

void ExportFiles::commit() {
  const auto added = [&](const std::string& name) {
    return std::find(added_.begin(), added_.end(), name) != added_.end();
  };
  std::error_code error;
  for (const std::string& name : added_) {
    if (fs::is_directory(in_place(name), error))
      throw DeviceError(fmt::format("'{}': is a folder, expected a file", in_place(name)));
  }
  const std::vector<std::string> before = weights_before();
  const std::string index = fs::path(index_of(weights_)).filename().string();
  const bool same_names = std::any_of(before.begin(), before.end(), [&](const std::string& name) {
    return is_shard_of(weights_, in_place(name)) && added(name);
  });
  // A reader now finds no index, rather than shards of two models.
  if (same_names) fs::remove(in_place(index), error);
  // The index, or the single file of all weights, is renamed last: it activates the new model.
  std::stable_sort(added_.begin(), added_.end(), [&](const std::string& a, const std::string& b) {
    const auto rank = [&](const std::string& name) {
      const std::string path = in_place(name);
      return name == index || path == in_place(fs::path(weights_).filename().string()) ? 2
             : is_shard_of(weights_, path)                                             ? 1
                                                                                       : 0;
    };
    return rank(a) < rank(b);
  });
  for (const std::string& name : added_) {
    fs::rename(fs::path(temporary_) / name, in_place(name), error);
    if (error) fail(in_place(name), "cannot rename onto it", error);
  }
  removed_.insert(removed_.end(), before.begin(), before.end());
  for (const std::string& name : removed_) {
    if (!added(name)) fs::remove(in_place(name), error);
  }
  if (const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
    static_cast<void>(::fsync(folder));
    ::close(folder);
  }
}

}  // namespace logitless::train
