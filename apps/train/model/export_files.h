// The files of an export: written next to the existing model, then renamed over it.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

inline constexpr std::string_view kSafetensors = ".safetensors";
inline constexpr std::string_view kIndex = ".safetensors.index.json";

// Returns FOLDER/model.safetensors for a folder, which need not exist, and FILE.safetensors
// unchanged. Throws InvalidArgument where `target` is a file of another kind, a shard or an index.
std::string export_path(const std::string& target);

// Returns the path of the index that a sharded model has instead of the file `weights`.
std::string index_of(const std::string& weights);
// Returns the name of shard `number`, counted from 1, of `count`.
std::string shard_of(const std::string& weights, std::size_t number, std::size_t count);
// Returns whether `path` has the name of a shard of `weights`.
bool is_shard_of(const std::string& weights, const std::string& path);
// Returns the names of the files in an index; none where `index` is missing, no index, or
// unreadable.
std::set<std::string> shards_listed(const std::string& index);

// Files that replace a model. They are written into a locked temporary folder next to it and get
// their names in commit(). Without commit() the old model stays as it was. A process killed during
// commit() leaves the old model or the new one; where both have shards of the same names, it may
// leave no index. Throws DeviceError where the operating system refuses.
class ExportFiles {
 public:
  // `weights`: a result of export_path(). Creates its folder if needed, and removes the leftovers
  // of killed exports there.
  explicit ExportFiles(const std::string& weights);
  ~ExportFiles();
  ExportFiles(const ExportFiles&) = delete;
  ExportFiles& operator=(const ExportFiles&) = delete;

  // Returns the path to write to for the file that commit() calls `name`.
  std::string add(const std::string& name);
  // Makes commit() remove the file `name`, if there is one.
  void remove(const std::string& name);
  // Renames the added files into place. The files added as FILE.safetensors, or as its shards and
  // index, are the weights; those of the old model are removed last.
  void commit();

 private:
  std::string in_place(const std::string& name) const;
  std::vector<std::string> weights_before() const;

  std::string weights_;
  std::string folder_;     // the folder of `weights_`
  std::string temporary_;  // below it
  int lock_ = -1;          // locks the temporary folder: other processes do not remove it
  std::vector<std::string> added_, removed_;
};

}  // namespace logitless::train
