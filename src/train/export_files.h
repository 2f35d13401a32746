// The files of an export: written beside the model that is there, then put in its place.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

inline constexpr std::string_view kSafetensors = ".safetensors";
inline constexpr std::string_view kIndex = ".safetensors.index.json";

// Returns FOLDER/model.safetensors of a folder, which need not be there, and FILE.safetensors as it
// is. Throws InvalidArgument where `target` is a file of another kind, a shard or an index.
std::string export_path(const std::string& target);

// Returns the index of the shards that a model has in place of the file `weights`.
std::string index_of(const std::string& weights);
// Returns the name of shard `number`, counted from 1, of `count`.
std::string shard_of(const std::string& weights, std::size_t number, std::size_t count);
// Returns whether `path` is called as a shard of `weights` would be.
bool is_shard_of(const std::string& weights, const std::string& path);
// Returns the names of the files that an index lists; none where `index` is none or cannot be read.
std::set<std::string> shards_listed(const std::string& index);

// Files that replace a model. They are written into a folder of this object's own beside it, which
// nobody else can name or open, and take their names in commit(). Without commit() the old model
// stays as it was; a process that is killed while files take their names leaves the old model or
// the new one, or no index where both have shards of the same names. Throws DeviceError where the
// operating system refuses.
class ExportFiles {
 public:
  // `weights`: what export_path() returns. Makes its folder where there is none, and removes what
  // killed exports left there.
  explicit ExportFiles(const std::string& weights);
  ~ExportFiles();
  ExportFiles(const ExportFiles&) = delete;
  ExportFiles& operator=(const ExportFiles&) = delete;

  // Returns where to write the file that commit() calls `name`.
  std::string add(const std::string& name);
  // Removes the file of that name in commit(), if there is one.
  void remove(const std::string& name);
  // Weights are the files that were added as FILE.safetensors, or as its shards and index. Those
  // of the model before are removed last.
  void commit();

 private:
  std::string in_place(const std::string& name) const;
  std::vector<std::string> weights_before() const;

  std::string weights_;
  std::string folder_;     // of `weights_`
  std::string temporary_;  // below it
  int lock_ = -1;          // held while this process lives, so that others leave the folder alone
  std::vector<std::string> added_, removed_;
};

}  // namespace logitless::train
