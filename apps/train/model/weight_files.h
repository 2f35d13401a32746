// Weights in Hugging Face's format: one safetensors file, or shards and their index. Errors are
// InvalidArgument and name the file and the tensor, with the expected and the actual value;
// DeviceError where the operating system refuses.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "logitless/tensor_file.h"
#include "train/model/export_files.h"
#include "train/model/model.h"
#include "train/optimizer/tensor_set.h"

namespace logitless::train {

inline constexpr std::size_t kShardBytes = 5'000'000'000;

// Returns FOLDER/model.safetensors for a folder, or FOLDER/model.safetensors.index.json if only
// that exists; other paths unchanged.
std::string weights_path(const std::string& path);

// Reads FILE.safetensors, or the shards listed in FILE.safetensors.index.json.
class WeightFiles {
 public:
  // Throws where the index and a shard disagree on the shard's tensors.
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

// Loads f32, bf16 and f16 tensors as f32, by the model's names with or without its prefix. Ignores
// the tensors listed in FileNames::ignored, and refuses other unknown ones. lm_head.weight may be
// missing: an untied head then starts as a copy of the token embedding. For a tied head it must
// equal the embedding.
void load_weights(const std::string& path, const Model& model, const TensorSet& values);

struct SaveOptions {
  DType dtype = DType::f32;  // f32, bf16 or f16, rounded to nearest even
  std::size_t shard_bytes =
      kShardBytes;  // limit for the tensors of a file; a tensor is never split
};

// Adds FILE.safetensors where all tensors fit into one file, else shards
// FILE-00001-of-0000N.safetensors and FILE.safetensors.index.json. `path` is the one that `to` was
// made with. Takes memory for a shard in `dtype`; none for f32.
void add_weights(ExportFiles& to, const std::string& path, const Model& model,
                 const TensorSet& values, const SaveOptions& options);
// Replaces existing weights by these files only, as ExportFiles does.
void save_weights(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options = {});

}  // namespace logitless::train
