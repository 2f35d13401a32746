#include "train/model/weight_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "core/half.h"
#include "json/json.h"
#include "logitless/error.h"
#include "train/whole_file.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& path, const std::string& text) {
  throw InvalidArgument(fmt::format("'{}': {}", path, text));
}

// Reads an index: tensor name -> file name.
std::map<std::string, std::string> shards_of(const std::string& path) {
  const std::optional<std::string> text = file_contents(path);
  if (!text) refuse(path, "cannot be read");
  const Json json = Json::try_parse(*text).value_or(nullptr);
  if (!json.is_object() || !json.contains("weight_map") || !json.at("weight_map").is_object())
    refuse(path, "weight_map: expected an object of tensors and their files, found none");
  std::map<std::string, std::string> shards;
  for (const auto& [name, file] : json.at("weight_map").items()) {
    // Shards must lie in the folder of the index.
    const fs::path shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.empty() || shard != shard.filename() || shard == ".." || shard == ".") {
      refuse(path, fmt::format("weight_map: '{}': expected the name of a file, found {}", name,
                               file.dump()));
    }
    shards[name] = shard.string();
  }
  return shards;
}

std::string expected_of(const Parameter& parameter) {
  return describe(ConstTensorView(nullptr, DType::f32, parameter.shape));
}

void widen(const ConstTensorView& from, std::span<float> to) {
  if (from.dtype() == DType::f32) {
    std::memcpy(to.data(), from.data(), to.size_bytes());
    return;
  }
  // The bytes may have any alignment.
  const auto* bytes = static_cast<const std::byte*>(from.data());
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    to[i] = from.dtype() == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
}

// Loads the tensor `name` into `to`.
void restore(const WeightFiles& files, const std::string& name, const Parameter& parameter,
             std::span<float> to) {
  const std::string expected = expected_of(parameter);
  if (!files.contains(name))
    refuse(files.path(), fmt::format("tensor '{}': expected {}, found none", name, expected));
  const ConstTensorView from = files.tensor(name);
  const bool same_shape =
      describe(ConstTensorView(nullptr, from.dtype(), parameter.shape)) == describe(from);
  if (!same_shape || !is_head_float(from.dtype())) {
    refuse(files.path(), fmt::format("tensor '{}': expected {}{}, found {}", name, expected,
                                     same_shape ? ", bf16 or f16" : "", describe(from)));
  }
  widen(from, to);
}

std::size_t size_in(const Parameter& parameter, DType dtype) {
  return static_cast<std::size_t>(parameter.numel()) * size_of(dtype);
}

// Assigns parameters to files: returns their indices, in order, for each file.
std::vector<std::vector<std::size_t>> files_of(const std::vector<Parameter>& list,
                                               const SaveOptions& options) {
  std::vector<std::vector<std::size_t>> files(1);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::size_t more = size_in(list[i], options.dtype);
    if (!files.back().empty() && bytes + more > options.shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += more;
  }
  return files;
}

void write_tensors(const std::string& path, const std::vector<Parameter>& list,
                   const std::vector<std::size_t>& indices, const TensorSet& values, DType dtype) {
  std::vector<std::vector<std::uint16_t>> rounded;
  rounded.reserve(indices.size());
  std::vector<NamedTensor> tensors;
  for (const std::size_t i : indices) {
    const void* data = values[i].data();
    if (dtype != DType::f32) {
      std::vector<std::uint16_t>& bits = rounded.emplace_back();
      bits.reserve(values[i].size());
      for (const float x : values[i])
        bits.push_back(dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x));
      data = bits.data();
    }
    tensors.push_back({list[i].name, {data, dtype, list[i].shape}});
  }
  write_safetensors(path, tensors, {{"format", "pt"}});
}

}  // namespace

std::string weights_path(const std::string& path) {
  std::error_code none;
  if (!fs::is_directory(path, none)) return path;
  const std::string whole = (fs::path(path) / "model.safetensors").string();
  const std::string index = index_of(whole);
  return !fs::exists(whole, none) && fs::exists(index, none) ? index : whole;
}

WeightFiles::WeightFiles(const std::string& path) : path_(path) {
  const auto take = [&](const std::string& file) {
    files_.emplace_back(file);
    for (const std::string& name : files_.back().names()) {
      if (!file_of_.emplace(name, files_.size() - 1).second)
        refuse(path_, fmt::format("tensor '{}': '{}' has it once more", name, file));
      names_.push_back(name);
    }
  };
  if (!path.ends_with(".json")) {
    take(path);
    return;
  }
  const std::map<std::string, std::string> shards = shards_of(path);
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, shard] : shards) {
    if (!opened.contains(shard)) {
      const fs::path file = fs::path(path).parent_path() / shard;
      if (std::error_code none; !fs::exists(file, none))
        refuse(path, fmt::format("weight_map: '{}': there is no file '{}'", name, file.string()));
      take(file.string());
      opened[shard] = files_.size() - 1;
    }
    const auto found = file_of_.find(name);
    if (found == file_of_.end() || found->second != opened[shard]) {
      refuse(path, fmt::format("tensor '{}': expected in '{}', found {}", name, shard,
                               found == file_of_.end() ? "none" : "in another file"));
    }
  }
  for (const std::string& name : names_) {
    if (!shards.contains(name))
      refuse(path, fmt::format("tensor '{}': is in a shard, but not in weight_map", name));
  }
}

ConstTensorView WeightFiles::tensor(const std::string& name) const {
  return files_[file_of_.at(name)].tensor(name);
}

void load_weights(const std::string& path, const Model& model, const TensorSet& values) {
  const WeightFiles files(path);
  const FileNames names = model.file_names();
  const std::vector<Parameter> list = model.parameters();
  const std::string prefix =
      files.contains(names.prefix + names.token_embedding) ? names.prefix : "";
  const auto stored = [&](const std::string& name) {
    return name == kHeadWeight ? name
                               : prefix + (names.written ? name.substr(names.prefix.size()) : name);
  };
  std::set<std::string> known = {kHeadWeight};
  for (std::size_t i = 0; i < list.size(); ++i) {
    const bool copied = list[i].name == kHeadWeight && !files.contains(kHeadWeight);
    const std::string name = copied ? prefix + names.token_embedding : stored(list[i].name);
    restore(files, name, list[i], values[i]);
    known.insert(name);
  }
  for (const std::string& name : names.ignored) known.insert(prefix + name);
  for (const std::string& name : files.names()) {
    if (!known.contains(name)) {
      refuse(files.path(), fmt::format("tensor '{}': expected none of this name, found {}", name,
                                       describe(files.tensor(name))));
    }
  }
  if (!model.sizes().tied_head || !files.contains(kHeadWeight)) return;
  std::vector<float> weight(values[0].size());
  restore(files, kHeadWeight, list[0], weight);
  if (!std::equal(weight.begin(), weight.end(), values[0].begin())) {
    refuse(files.path(), fmt::format("tensor '{}': expected the numbers of {}, found others; the "
                                     "model's head is not tied",
                                     kHeadWeight, names.token_embedding));
  }
}

void add_weights(ExportFiles& to, const std::string& path, const Model& model,
                 const TensorSet& values, const SaveOptions& options) {
  const std::vector<Parameter> list = model.parameters();
  const std::vector<std::vector<std::size_t>> files = files_of(list, options);
  const std::string name = fs::path(path).filename().string();
  if (files.size() == 1) return write_tensors(to.add(name), list, files[0], values, options.dtype);
  Json map = Json::object();
  std::size_t bytes = 0;
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::string shard = shard_of(name, f + 1, files.size());
    write_tensors(to.add(shard), list, files[f], values, options.dtype);
    for (const std::size_t i : files[f]) {
      map[list[i].name] = shard;
      bytes += size_in(list[i], options.dtype);
    }
  }
  const Json json = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  write_file(to.add(index_of(name)), json.dump(2) + "\n");
}

void save_weights(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options) {
  ExportFiles files(path);
  add_weights(files, path, model, values, options);
  files.commit();
}

}  // namespace logitless::train
