#include "train/run/checkpoint.h"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <set>

#include "json/json.h"
#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/run/bounds.h"

namespace logitless::train {
namespace {

constexpr const char* kMoments[] = {"optimizer.m.", "optimizer.v."};

[[noreturn]] void refuse(const std::string& path, const std::string& text) {
  throw InvalidArgument(fmt::format("'{}': {}", path, text));
}

ConstTensorView view_of(const Parameter& parameter, std::span<const float> values) {
  return {values.data(), DType::f32, parameter.shape};
}

// Reads the tensor `name` of the file into `to`.
void restore(const TensorFile& file, const std::string& path, const std::string& name,
             const Parameter& parameter, std::span<float> to) {
  const std::string expected = describe(view_of(parameter, to));
  if (!file.contains(name)) {
    refuse(path, fmt::format("tensor '{}': expected {}, found none", name, expected));
  }
  const ConstTensorView from = file.tensor(name);
  if (describe(from) != expected) {
    refuse(path, fmt::format("tensor '{}': expected {}, found {}", name, expected, describe(from)));
  }
  std::memcpy(to.data(), from.data(), to.size_bytes());
}

void check_no_others(const TensorFile& file, const std::string& path,
                     const std::set<std::string>& known) {
  for (const std::string& name : file.names()) {
    if (known.count(name) == 0) {
      refuse(path, fmt::format("tensor '{}': expected none of this name, found {}", name,
                               describe(file.tensor(name))));
    }
  }
}

CheckpointHeader header_of(const TensorFile& file, const std::string& path) {
  const auto text = [&](const std::string& name) -> const std::string& {
    const auto found = file.metadata().find(name);
    if (found == file.metadata().end()) {
      refuse(
          path,
          fmt::format("metadata '{}': expected a checkpoint of logitless train, found none", name));
    }
    return found->second;
  };
  const auto parsed = [&](const std::string& name, const char* what, auto&& parse) {
    const std::string& found = text(name);
    try {
      return parse(found);
    } catch (const std::exception& error) {
      refuse(path, fmt::format("metadata '{}': expected {}, found '{}' ({})", name, what, found,
                               error.what()));
    }
  };
  const auto number = [&](const std::string& name, std::uint64_t most) {
    return parsed(name, "a number", [&](const std::string& found) {
      const Json json = Json::parse(found);
      if (!json.is_number_unsigned()) throw InvalidArgument("it is not a whole number");
      const auto value = json.get<std::uint64_t>();
      if (value > most) throw InvalidArgument(fmt::format("the most there is is {}", most));
      return value;
    });
  };
  const auto count = [&](const std::string& name, std::int64_t most) {
    return static_cast<std::int64_t>(number(name, static_cast<std::uint64_t>(most)));
  };
  if (text("format") != kCheckpointFormat) {
    refuse(path, fmt::format("metadata 'format': expected '{}', found '{}'", kCheckpointFormat,
                             text("format")));
  }
  CheckpointHeader header;
  header.model = parsed("config", "the sizes of a model", parse_model);
  header.state.step = count("step", kMostSteps);
  header.state.windows = count("windows", kMostWindows);
  header.state.seed = number("seed", UINT64_MAX);
  header.state.data = text("data");
  header.state.options = text("options");
  if (file.metadata().count("far_steps") > 0)
    header.state.far_steps = count("far_steps", kMostWindows);
  return header;
}

}  // namespace

void save_checkpoint(const std::string& path, const Model& model, const RunState& state,
                     const TensorSet& values, const TensorSet& m, const TensorSet& v) {
  const std::vector<Parameter> list = model.parameters();
  std::vector<NamedTensor> tensors;
  for (std::size_t i = 0; i < list.size(); ++i) {
    tensors.push_back({list[i].name, view_of(list[i], values[i])});
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    tensors.push_back({kMoments[0] + list[i].name, view_of(list[i], m[i])});
    tensors.push_back({kMoments[1] + list[i].name, view_of(list[i], v[i])});
  }
  std::map<std::string, std::string> metadata = {{"format", kCheckpointFormat},
                                                 {"config", model.config_text()},
                                                 {"step", std::to_string(state.step)},
                                                 {"windows", std::to_string(state.windows)},
                                                 {"seed", std::to_string(state.seed)},
                                                 {"data", state.data},
                                                 {"options", state.options}};
  if (state.far_steps) metadata["far_steps"] = std::to_string(*state.far_steps);
  write_safetensors(path, tensors, metadata);
}

CheckpointHeader read_checkpoint_header(const std::string& path) {
  return header_of(TensorFile(path), path);
}

void load_checkpoint(const std::string& path, const Model& model, const TensorSet& values,
                     const TensorSet& m, const TensorSet& v) {
  const TensorFile file(path);
  const CheckpointHeader header = header_of(file, path);
  const std::string expected = model.config_text(), found = header.model->config_text();
  if (found != expected)
    refuse(path, fmt::format("metadata 'config': expected {}, found {}", expected, found));
  const std::vector<Parameter> list = model.parameters();
  std::set<std::string> known;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const TensorSet* sets[] = {&values, &m, &v};
    const std::string names[] = {list[i].name, kMoments[0] + list[i].name,
                                 kMoments[1] + list[i].name};
    for (std::size_t k = 0; k < std::size(sets); ++k) {
      restore(file, path, names[k], list[i], (*sets[k])[i]);
      known.insert(names[k]);
    }
  }
  check_no_others(file, path, known);
}

}  // namespace logitless::train
