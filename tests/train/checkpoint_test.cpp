// Tests of checkpoints and of Hugging Face's files: round trips, and errors that name the fault.
#include "train/run/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/model/weight_files.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

GptConfig tiny() {
  GptConfig config;
  config.vocab = 13;
  config.context = 5;
  config.dim = 4;
  config.heads = 2;
  config.layers = 2;
  return config;
}

struct State {
  explicit State(const GptConfig& config, std::uint64_t seed = 0)
      : model(make_gpt(config)), list(model->parameters()), values(list), m(list), v(list) {
    if (seed == 0) return;
    std::uint64_t stream = seed;
    for (const TensorSet* set : {&values, &m, &v}) {
      for (std::size_t i = 0; i < list.size(); ++i, ++stream) {
        for (std::size_t k = 0; k < (*set)[i].size(); ++k) (*set)[i][k] = normal(stream, k);
      }
    }
  }
  static bool equal(const TensorSet& a, const TensorSet& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!std::equal(a[i].begin(), a[i].end(), b[i].begin(), b[i].end())) return false;
    }
    return true;
  }
  void save(const std::string& path) const {
    save_checkpoint(path, *model, {12, 96, 7, "0123", "{\"lr\":0.5}"}, values, m, v);
  }
  void load(const std::string& path) const { load_checkpoint(path, *model, values, m, v); }

  ModelPtr model;
  std::vector<Parameter> list;
  TensorSet values, m, v;
};

class CheckpointTest : public TestFolder {
 protected:
  // A file whose tensors or metadata a test changes.
  struct File {
    explicit File(const std::string& path) : source(path), metadata(source.metadata()) {
      for (const std::string& name : source.names()) tensors.push_back({name, source.tensor(name)});
    }
    void drop(const std::string& name) {
      std::erase_if(tensors, [&](const NamedTensor& t) { return t.name == name; });
    }
    ConstTensorView& at(const std::string& name) {
      return std::find_if(tensors.begin(), tensors.end(),
                          [&](const NamedTensor& t) { return t.name == name; })
          ->view;
    }
    void write(const std::string& path) const { write_safetensors(path, tensors, metadata); }

    TensorFile source;
    std::vector<NamedTensor> tensors;
    std::map<std::string, std::string> metadata;
  };
};

TEST_F(CheckpointTest, GivesBackEveryBit) {
  const State model(tiny(), 3);
  model.save(path("a"));
  const CheckpointHeader header = read_checkpoint_header(path("a"));
  EXPECT_EQ(header.model->config_text(), make_gpt(tiny())->config_text());
  EXPECT_EQ(header.state.step, 12);
  EXPECT_EQ(header.state.windows, 96);
  EXPECT_EQ(header.state.seed, 7u);
  EXPECT_EQ(header.state.data, "0123");
  EXPECT_EQ(header.state.options, "{\"lr\":0.5}");
  const State other(tiny());
  other.load(path("a"));
  EXPECT_TRUE(State::equal(model.values, other.values));
  EXPECT_TRUE(State::equal(model.m, other.m));
  EXPECT_TRUE(State::equal(model.v, other.v));
}

TEST_F(CheckpointTest, KeepsEveryFieldOfTheConfig) {
  GptConfig config = tiny();
  config.tied_head = false;
  config.activations = DType::bf16;
  State(config, 3).save(path("a"));
  const ModelPtr read = read_checkpoint_header(path("a")).model;
  EXPECT_EQ(read->config_text(), make_gpt(config)->config_text());
  EXPECT_FALSE(read->sizes().tied_head);
  EXPECT_EQ(read->sizes().activations, DType::bf16);
}

TEST_F(CheckpointTest, NamesWhatDoesNotFit) {
  const State model(tiny(), 3);
  model.save(path("good"));
  const auto refused = [&](const std::function<void(File&)>& change, const std::string& text) {
    File file(path("good"));
    change(file);
    file.write(path("bad"));
    expect_message([&] { State(tiny()).load(path("bad")); }, path("bad") + "': " + text);
  };
  refused([](File& f) { f.drop("h.1.ln_2.bias"); },
          "tensor 'h.1.ln_2.bias': expected f32[4], found none");
  refused([](File& f) { f.drop("optimizer.v.wpe.weight"); },
          "tensor 'optimizer.v.wpe.weight': expected f32[5, 4], found none");
  refused([](File& f) { f.at("wte.weight") = f.at("wpe.weight"); },
          "tensor 'wte.weight': expected f32[13, 4], found f32[5, 4]");
  const std::vector<std::int32_t> numbers(20);
  refused(
      [&](File& f) {
        f.at("wpe.weight") = {numbers.data(), DType::i32, {5, 4}};
      },
      "tensor 'wpe.weight': expected f32[5, 4], found i32[5, 4]");
  refused(
      [&](File& f) {
        f.tensors.push_back({"more", {numbers.data(), DType::i32, {2}}});
      },
      "tensor 'more': expected none of this name, found i32[2]");
  for (const char* name : {"format", "config", "step", "windows", "seed", "data", "options"}) {
    refused(
        [&](File& f) { f.metadata.erase(name); },
        fmt::format("metadata '{}': expected a checkpoint of logitless train, found none", name));
  }
  refused([](File& f) { f.metadata["format"] = "pt"; },
          "metadata 'format': expected 'logitless train 1', found 'pt'");
  refused([](File& f) { f.metadata["step"] = "x"; },
          "metadata 'step': expected a number, found 'x'");
  refused([](File& f) { f.metadata["windows"] = "-4"; },
          "metadata 'windows': expected a number, found '-4'");
  refused([](File& f) { f.metadata["config"] = "{}"; },
          "metadata 'config': expected the sizes of a model, found '{}'");

  GptConfig wider = tiny();
  wider.dim = 8;
  expect_message([&] { State(wider).load(path("good")); },
                 "metadata 'config': expected {\"vocab\":13,\"context\":5,\"dim\":8,");
}

TEST_F(CheckpointTest, WritesHuggingFaceNames) {
  const State model(tiny(), 4);
  save_weights(path("a"), *make_gpt(tiny()), model.values);
  const TensorFile file(path("a"));
  EXPECT_EQ(file.names().size(), 2u + 12u * 2u + 2u);
  EXPECT_FALSE(file.contains("lm_head.weight"));
  EXPECT_EQ(describe(file.tensor("h.1.attn.c_attn.weight")), "f32[4, 12]");
  EXPECT_EQ(describe(file.tensor("h.0.mlp.c_proj.weight")), "f32[16, 4]");
  EXPECT_EQ(describe(file.tensor("ln_f.bias")), "f32[4]");
  const State other(tiny());
  load_weights(path("a"), *make_gpt(tiny()), other.values);
  EXPECT_TRUE(State::equal(model.values, other.values));
}

TEST_F(CheckpointTest, ReadsThePrefixMasksAndHead) {
  const State model(tiny(), 4);
  save_weights(path("plain"), *make_gpt(tiny()), model.values);
  File file(path("plain"));
  for (NamedTensor& tensor : file.tensors) tensor.name = "transformer." + tensor.name;
  const std::vector<float> mask(25);
  file.tensors.push_back({"transformer.h.0.attn.bias", {mask.data(), DType::f32, {1, 1, 5, 5}}});
  file.tensors.push_back({"transformer.h.1.attn.masked_bias", {mask.data(), DType::f32, {1}}});
  file.tensors.push_back({"lm_head.weight", file.at("transformer.wte.weight")});
  file.write(path("prefixed"));
  const State other(tiny());
  load_weights(path("prefixed"), *make_gpt(tiny()), other.values);
  EXPECT_TRUE(State::equal(model.values, other.values));

  const std::vector<float> head(13 * 4, 0.25f);
  file.at("lm_head.weight") = {head.data(), DType::f32, {13, 4}};
  file.write(path("untied"));
  expect_message([&] { load_weights(path("untied"), *make_gpt(tiny()), other.values); },
                 "tensor 'lm_head.weight': expected the numbers of wte.weight, found others");
  GptConfig untied = tiny();
  untied.tied_head = false;
  const State separate(untied);
  load_weights(path("untied"), *make_gpt(untied), separate.values);
  EXPECT_EQ(separate.values[separate.list.size() - 1][5], 0.25f);
  // An untied head that the file lacks starts as a copy of the embedding.
  load_weights(path("plain"), *make_gpt(untied), separate.values);
  EXPECT_TRUE(std::equal(separate.values[0].begin(), separate.values[0].end(),
                         separate.values[separate.list.size() - 1].begin()));

  file.tensors.push_back({"transformer.h.2.attn.bias", {mask.data(), DType::f32, {1}}});
  file.write(path("deeper"));
  expect_message([&] { load_weights(path("deeper"), *make_gpt(untied), separate.values); },
                 "tensor 'transformer.h.2.attn.bias': expected none of this name, found f32[1]");
}

}  // namespace
}  // namespace logitless::train
