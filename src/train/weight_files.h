// Weights as Hugging Face stores them: one safetensors file, or shards and an index of them. Errors
// are InvalidArgument and name the file, the tensor, what was expected and what was found;
// DeviceError where the operating system refuses.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "logitless/tensor_file.h"
#include "train/export_files.h"
#include "train/model.h"
#include "train/tensor_set.h"

namespace logitless::train {

inline constexpr std::size_t kShardBytes = 5'000'000'000;

// FOLDER/model.safetensors of a folder, or FOLDER/model.safetensors.index.json where that is what
// it has; any other path as it is.
std::string weights_path(const std::string& path);

// Opened for reading: FILE.safetensors, or the shards that FILE.safetensors.index.json lists.
class WeightFiles {
 public:
  // Throws where a shard lacks a tensor that the index says it has, or has one that it does not.
  explicit WeightFiles(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  ConstTensorView tensor(const std::string& name) const;

 private:
  std::string path_;
  std::vector<TensorFile> files_;
  std::vector<std::string> names_;
  std::map<std::string, std::size_t> file_of_;
};

// f32, bf16 and f16 tensors, made f32, under the model's names with its prefix or without. Tensors
// that are no weights are skipped, any others refused. lm_head.weight may be missing: a head of its
// own then starts as a copy of the table of words; with a tied one it must equal the table.
void load_weights(const std::string& path, const Model& model, const TensorSet& values);

struct SaveOptions {
  DType dtype = DType::f32;               // f32, bf16 or f16, rounded to nearest even
  std::size_t shard_bytes = kShardBytes;  // of the tensors of a file; one tensor is never cut
};

// Adds FILE.safetensors where all fits into one file, else shards FILE-00001-of-0000N.safetensors
// and FILE.safetensors.index.json. `path` is what `to` was made with. Extra memory: a shard in
// `dtype`, none for f32.
void add_weights(ExportFiles& to, const std::string& path, const Model& model,
                 const TensorSet& values, const SaveOptions& options);
// Writes these files alone in place of those that are there, as ExportFiles does.
void save_weights(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options = {});

}  // namespace logitless::train
