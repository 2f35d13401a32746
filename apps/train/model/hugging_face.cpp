#include "train/model/hugging_face.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "json/json.h"
#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/json_number.h"
#include "train/run/bounds.h"
#include "train/tokenizer/fast_tokenizer.h"
#include "train/whole_file.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kHeadSize = 64;  // that of every GPT-2
constexpr const char* kConfig = "config.json";
constexpr const char* kTokenizer = "tokenizer.model";
constexpr const char* kFast = "tokenizer.json";
constexpr const char* kFastConfig = "tokenizer_config.json";

std::string beside(const std::string& path, const char* name) {
  return (fs::path(path).parent_path() / name).string();
}

// Returns the JSON object in a file; none without the file.
std::optional<Json> read_json(const std::string& path) {
  const std::optional<std::string> text = file_contents(path);
  if (!text) return std::nullopt;
  Json json = Json::try_parse(*text).value_or(nullptr);
  if (!json.is_object()) throw InvalidArgument(fmt::format("'{}': expected an object", path));
  return json;
}

LlamaConfig llama_of(const std::string& path, const Json& json) {
  try {
    return parse_llama_config(json);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("'{}': {}", path, error.what()));
  }
}

// Returns the name of a dtype in transformers.
const char* torch_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
}

std::int64_t heads_of(const std::string& path, std::int64_t dim) {
  const std::optional<Json> json = read_json(beside(path, kConfig));
  if (!json || !json->contains("n_head")) return dim % kHeadSize == 0 ? dim / kHeadSize : 0;
  const Json& found = json->at("n_head");
  try {
    const std::int64_t heads = whole_number(found);
    if (whole_bounds("heads").allow(heads)) return heads;
  } catch (const InvalidArgument&) {
    // reported below
  }
  throw InvalidArgument(fmt::format("'{}': n_head: {}, found {}", beside(path, kConfig),
                                    whole_bounds("heads").expected(), found.dump()));
}

// Sets the end-of-text word from the files next to `path`.
void set_end_of_text(const std::string& path, TokenizerModel& model) {
  if (const std::optional<Json> json = read_json(beside(path, kFastConfig)); json) {
    Json token = json->value("eos_token", Json());
    if (token.is_object()) token = token.value("content", Json());
    if (token.is_string()) model.end_of_text = token.get<std::string>();
  }
  if (!model.end_of_text.empty()) return;
  if (const std::optional<Json> json = read_json(beside(path, kConfig)); json) {
    Json word = json->value("eos_token_id", Json());
    if (word.is_array() && !word.empty()) word = word.at(0);
    if (word.is_number_unsigned() && word.get<std::uint64_t>() <= INT32_MAX) {
      model.end_of_text_word = word.get<std::int32_t>();
      return;
    }
  }
  throw InvalidArgument(fmt::format(
      "'{}': expected the token between two texts as eos_token in {} or eos_token_id in "
      "{} beside it, found neither",
      beside(path, kFast), kFastConfig, kConfig));
}

// Adds the tokenizer's files, and removes those of another tokenizer, which transformers might read
// instead.
void add_tokenizer(ExportFiles& files, const Tokenizer& tokenizer, std::int64_t context) {
  const TokenizerModel& words = tokenizer.model();
  const auto put = [&](const char* name, const std::string& bytes) {
    if (bytes.empty()) {
      files.remove(name);
    } else {
      write_file(files.add(name), bytes);
    }
  };
  if (words.format == TokenizerModel::Format::byte_level) {
    put(kTokenizer, "");
    put(kFast, words.bytes);
    put(kFastConfig, words.config);
    return;
  }
  put(kTokenizer, words.bytes);
  const SentencePieceModel pieces = parse_sentence_pieces(words.bytes);
  if (!words.fast.empty() || !fast_tokenizer_refusal(pieces).empty()) {
    put(kFast, words.fast);
    put(kFastConfig, words.config);
    return;
  }
  put(kFast, fast_tokenizer_json(pieces));
  const auto unknown = std::find_if(pieces.pieces.begin(), pieces.pieces.end(), [](const auto& p) {
    return p.kind == SentencePieceModel::Kind::unknown;
  });
  const std::string& end = pieces.pieces.at(static_cast<std::size_t>(tokenizer.end_of_text())).text;
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"bos_token", end},
                       {"eos_token", end},
                       {"unk_token", unknown == pieces.pieces.end() ? Json() : Json(unknown->text)},
                       {"clean_up_tokenization_spaces", false},
                       {"model_max_length", context}};
  put(kFastConfig, words.config.empty() ? config.dump(2) + "\n" : words.config);
}

GptConfig gpt_sizes(const std::string& path) {
  const WeightFiles file(path);
  const std::string prefix = file.contains("transformer.wte.weight") ? "transformer." : "";
  const auto matrix = [&](const std::string& name) {
    if (!file.contains(name)) {
      throw InvalidArgument(
          fmt::format("'{}': tensor '{}': expected a matrix, found none", path, name));
    }
    const ConstTensorView view = file.tensor(name);
    if (view.rank() != 2) {
      throw InvalidArgument(fmt::format("'{}': tensor '{}': expected a matrix, found {}", path,
                                        name, describe(view)));
    }
    return view;
  };
  const ConstTensorView words = matrix(prefix + "wte.weight");
  GptConfig config;
  config.vocab = words.size(0);
  config.dim = words.size(1);
  config.context = matrix(prefix + "wpe.weight").size(0);
  config.layers = 0;
  while (file.contains(fmt::format("{}h.{}.ln_1.weight", prefix, config.layers))) ++config.layers;
  config.heads = heads_of(path, config.dim);
  if (file.contains("lm_head.weight")) {
    const ConstTensorView head = file.tensor("lm_head.weight");
    config.tied_head =
        describe(head) == describe(words) &&
        std::memcmp(head.data(), words.data(), static_cast<std::size_t>(words.bytes())) == 0;
  }
  return config;
}

}  // namespace

ModelConfig find_model(const std::string& name) {
  std::vector<std::string> names = gpt_preset_names();
  if (std::find(names.begin(), names.end(), name) != names.end()) return gpt_preset(name);
  if (is_llama_preset(name)) return llama_preset(name);
  std::error_code none;
  const std::string path =
      fs::is_directory(name, none) ? (fs::path(name) / kConfig).string() : name;
  if (const std::optional<Json> json = read_json(path); json) return llama_of(path, *json);
  for (std::string& more : llama_preset_names()) names.push_back(std::move(more));
  throw InvalidArgument(fmt::format("'{}' is unknown; expected {}, a config.json or its folder",
                                    name, fmt::join(names, ", ")));
}

ModelConfig read_hugging_face_config(const std::string& path) {
  const std::string name = beside(path, kConfig);
  const std::optional<Json> json = read_json(name);
  if (!json || json->value("model_type", Json("gpt2")) == "gpt2") return gpt_sizes(path);
  return llama_of(name, *json);
}

bool has_hugging_face_tokenizer(const std::string& path) {
  std::error_code none;
  return fs::exists(beside(path, kTokenizer), none) || fs::exists(beside(path, kFast), none);
}

TokenizerModel read_hugging_face_tokenizer(const std::string& path) {
  TokenizerModel model;
  if (std::optional<std::string> bytes = file_contents(beside(path, kTokenizer)); bytes) {
    model.bytes = std::move(*bytes);
    model.fast = file_contents(beside(path, kFast)).value_or("");
    model.config = file_contents(beside(path, kFastConfig)).value_or("");
    return model;
  }
  std::optional<std::string> bytes = file_contents(beside(path, kFast));
  if (!bytes) {
    throw InvalidArgument(
        fmt::format("'{}': expected {} or {} beside it, found neither", path, kTokenizer, kFast));
  }
  model.format = TokenizerModel::Format::byte_level;
  model.bytes = std::move(*bytes);
  model.config = file_contents(beside(path, kFastConfig)).value_or("");
  set_end_of_text(path, model);
  return model;
}

void check_hugging_face_folder(const std::string& path, const std::string& model_type) {
  if (const std::optional<Json> json = read_json(beside(path, kConfig)); json) {
    if (json->value("model_type", Json()) != model_type) {
      throw InvalidArgument(
          fmt::format("'{}': expected that of a {}, which may be replaced, found model_type {}; "
                      "name a folder of its own",
                      beside(path, kConfig), model_type == "gpt2" ? "GPT-2" : model_type,
                      json->value("model_type", Json()).dump()));
    }
  }
  for (const char* name : kExportedBeside) check_writable(beside(path, name));
}

std::string missing_fast_tokenizer(const TokenizerModel& model) {
  if (model.format == TokenizerModel::Format::byte_level || !model.fast.empty()) return "";
  return fast_tokenizer_refusal(parse_sentence_pieces(model.bytes));
}

void export_model(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options, const Tokenizer* tokenizer) {
  ExportFiles files(path);
  add_weights(files, path, model, values, options);
  Json json = model.config_json(tokenizer != nullptr ? tokenizer->end_of_text() : -1);
  json["torch_dtype"] = torch_name(options.dtype);
  if (tokenizer != nullptr && !tokenizer->before_text().empty())
    json["bos_token_id"] = tokenizer->before_text().front();
  write_file(files.add(kConfig), json.dump(2) + "\n");
  if (tokenizer != nullptr) add_tokenizer(files, *tokenizer, model.sizes().context);
  files.commit();
}

}  // namespace logitless::train
