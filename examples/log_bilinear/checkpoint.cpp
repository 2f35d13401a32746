#include "checkpoint.h"

#include <fmt/format.h>

#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <vector>

namespace log_bilinear {
namespace {

using logitless::ConstTensorView;
using logitless::DType;

ConstTensorView view_of(const Parameter& parameter, const float* data) {
  return {data, DType::f32, {parameter.rows, parameter.columns}};
}

void restore(const logitless::TensorFile& file, const std::string& name, const Parameter& parameter,
             float* to) {
  const ConstTensorView from = file.tensor(name);
  const ConstTensorView expected = view_of(parameter, to);
  if (from.dtype() != expected.dtype() || from.rank() != 2 || from.size(0) != expected.size(0) ||
      from.size(1) != expected.size(1)) {
    throw std::runtime_error(fmt::format("--resume: tensor '{}' is {}, this run's is {}", name,
                                         logitless::describe(from), logitless::describe(expected)));
  }
  std::memcpy(to, from.data(), static_cast<std::size_t>(from.bytes()));
}

}  // namespace

void save_checkpoint(const std::string& path, const Model& model, const Optimizer& optimizer,
                     const Position& position, const std::map<std::string, std::string>& metadata) {
  const std::int64_t numbers[] = {position.step, static_cast<std::int64_t>(position.seed),
                                  position.examples};
  std::vector<logitless::NamedTensor> tensors = {
      {"training.position", ConstTensorView(numbers, DType::i64, {3})}};
  for (const Parameter& parameter : model.parameters()) {
    tensors.push_back({"model." + parameter.name, view_of(parameter, parameter.value())});
  }
  for (const Optimizer::State& state : optimizer.state()) {
    tensors.push_back({"optimizer." + state.name, view_of(*state.parameter, state.data())});
  }
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  logitless::write_safetensors(path, tensors, metadata);
}

Position load_checkpoint(const std::string& path, Model& model, Optimizer& optimizer,
                         const std::map<std::string, std::string>& metadata) {
  const logitless::TensorFile file(path);
  for (const auto& [name, value] : metadata) {
    const auto stored = file.metadata().find(name);
    if (stored == file.metadata().end()) {
      throw std::runtime_error(fmt::format("--resume: '{}' has no '{}'", path, name));
    }
    if (stored->second != value && name != "steps") {
      throw std::runtime_error(
          fmt::format("--resume: the checkpoint's {} is '{}', this run's is '{}'", name,
                      stored->second, value));
    }
  }
  for (const Parameter& parameter : model.parameters()) {
    restore(file, "model." + parameter.name, parameter, parameter.value());
  }
  for (const Optimizer::State& state : optimizer.state()) {
    restore(file, "optimizer." + state.name, *state.parameter, state.data());
  }
  const ConstTensorView numbers = file.tensor("training.position");
  if (numbers.dtype() != DType::i64 || numbers.numel() != 3) {
    throw std::runtime_error(fmt::format("--resume: 'training.position' is {}, expected i64[3]",
                                         logitless::describe(numbers)));
  }
  std::int64_t values[3];
  std::memcpy(values, numbers.data(), sizeof(values));
  return {values[0], static_cast<std::uint64_t>(values[1]), values[2]};
}

}  // namespace log_bilinear
