#include "train/hugging_face.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/bounds.h"
#include "train/fast_tokenizer.h"
#include "train/json_number.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kHeadSize = 64;  // of every GPT-2
constexpr int kGpt2EndOfText = 50256;   // of the tokens of llm.c's files
constexpr const char* kConfig = "config.json";
constexpr const char* kTokenizer = "tokenizer.model";
constexpr const char* kFast = "tokenizer.json";
constexpr const char* kFastConfig = "tokenizer_config.json";
constexpr const char* kEndOfText = "</s>";  // the tokenizer's word of that number

std::string beside(const std::string& path, const char* name) {
  return (fs::path(path).parent_path() / name).string();
}

std::optional<std::string> contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// Whole or not at all.
void write_whole(const std::string& path, const std::string& text) {
  const std::string temporary = fmt::format("{}.{}-0.tmp", path, ::getpid());
  std::ofstream out(temporary, std::ios::binary);
  out << text;
  out.close();
  std::error_code error;
  if (out) fs::rename(temporary, path, error);
  if (!out || error) {
    std::error_code none;
    fs::remove(temporary, none);
    throw DeviceError(fmt::format("'{}': cannot be written", path));
  }
}

// The object in config.json beside `path`; none without the file.
std::optional<Json> read_config(const std::string& path) {
  const std::string name = beside(path, kConfig);
  const std::optional<std::string> text = contents(name);
  if (!text) return std::nullopt;
  Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw InvalidArgument(fmt::format("'{}': expected an object", name));
  return json;
}

std::int64_t heads_of(const std::string& path, std::int64_t dim) {
  const std::optional<Json> json = read_config(path);
  if (!json || !json->contains("n_head")) return dim % kHeadSize == 0 ? dim / kHeadSize : 0;
  const Json& found = json->at("n_head");
  try {
    const std::int64_t heads = whole_number(found);
    if (whole_bounds("heads").allow(heads)) return heads;
  } catch (const InvalidArgument&) {
    // Said below.
  }
  throw InvalidArgument(fmt::format("'{}': n_head: {}, found {}", beside(path, kConfig),
                                    whole_bounds("heads").expected(), found.dump()));
}

}  // namespace

GptConfig read_hugging_face_sizes(const std::string& path) {
  const TensorFile file(path);
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

std::optional<std::string> read_hugging_face_tokenizer(const std::string& path) {
  return contents(beside(path, kTokenizer));
}

void check_hugging_face_folder(const std::string& path) {
  if (const std::optional<Json> json = read_config(path); json) {
    if (json->value("model_type", Json()) != "gpt2") {
      throw InvalidArgument(
          fmt::format("'{}': expected that of a GPT-2, which may be replaced, found model_type {}; "
                      "name a folder of its own",
                      beside(path, kConfig), json->value("model_type", Json()).dump()));
    }
  }
  for (const char* name : {kConfig, kTokenizer, kFast, kFastConfig})
    check_writable(beside(path, name));
}

void save_hugging_face_folder(const std::string& path, const GptConfig& config,
                              const std::string* tokenizer_model, int end_of_text) {
  Json json = {{"architectures", {"GPT2LMHeadModel"}},
               {"model_type", "gpt2"},
               {"vocab_size", config.vocab},
               {"n_positions", config.context},
               {"n_embd", config.dim},
               {"n_head", config.heads},
               {"n_layer", config.layers},
               {"activation_function", "gelu_new"},
               {"layer_norm_epsilon", 1e-5},
               {"tie_word_embeddings", config.tied_head},
               {"torch_dtype", "float32"}};
  // Ours starts a text with the word that ends the one before, as GPT-2's does.
  const int end = tokenizer_model != nullptr ? end_of_text : kGpt2EndOfText;
  if (end < config.vocab) json["bos_token_id"] = json["eos_token_id"] = end;
  write_whole(beside(path, kConfig), json.dump(2) + "\n");
  if (tokenizer_model == nullptr) return;
  write_whole(beside(path, kTokenizer), *tokenizer_model);
  write_whole(beside(path, kFast), fast_tokenizer_json(*tokenizer_model));
  const Json tokenizer = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                          {"bos_token", kEndOfText},
                          {"eos_token", kEndOfText},
                          {"unk_token", "<unk>"},
                          {"clean_up_tokenization_spaces", false},
                          {"model_max_length", config.context}};
  write_whole(beside(path, kFastConfig), tokenizer.dump(2) + "\n");
}

}  // namespace logitless::train
