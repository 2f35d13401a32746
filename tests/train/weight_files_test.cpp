// Tests weights in Hugging Face's files: dtypes, shards and their index, and errors.
#include "train/model/weight_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "train/hash.h"
#include "train/model/llama.h"
#include "train/test_folder.h"
#include "train/whole_file.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

ModelPtr tiny(bool tied = false) {
  LlamaConfig config;
  config.type = "qwen2";
  config.vocab = 16;
  config.context = 8;
  config.dim = 8;
  config.inner = 12;
  config.layers = 2;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_size = 4;
  config.qkv_bias = true;
  config.tied_head = tied;
  return make_llama(config);
}

struct Weights {
  explicit Weights(ModelPtr of, std::uint64_t seed = 0)
      : model(std::move(of)), list(model->parameters()), values(list) {
    for (std::size_t i = 0; i < list.size() && seed > 0; ++i) {
      for (std::size_t k = 0; k < values[i].size(); ++k)
        values[i][k] = static_cast<float>(normal(mix(seed, i), k));
    }
  }
  bool operator==(const Weights& other) const {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!std::ranges::equal(values[i], other.values[i])) return false;
    }
    return true;
  }
  void save(const std::string& path, const SaveOptions& options = {}) const {
    save_weights(path, *model, values, options);
  }
  void load(const std::string& path) const { load_weights(path, *model, values); }

  ModelPtr model;
  std::vector<Parameter> list;
  TensorSet values;
};

class WeightFilesTest : public TestFolder {
 protected:
  std::string model() const { return path("model.safetensors"); }
  std::string index() const { return path("model.safetensors.index.json"); }
  Json read_index() const { return Json::parse(*file_contents(index())); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
};

TEST_F(WeightFilesTest, ShardsGiveBackEveryBit) {
  const Weights saved(tiny(), 5), read(tiny());
  saved.save(model(), {DType::f32, 1000});
  EXPECT_EQ(weights_path(root_.string()), index());
  read.load(index());
  EXPECT_TRUE(read == saved);
  const Json json = read_index();
  EXPECT_EQ(json.at("weight_map").size(), saved.list.size());
  std::size_t bytes = 0;
  for (const Parameter& p : saved.list) bytes += 4 * static_cast<std::size_t>(p.numel());
  EXPECT_EQ(json.at("metadata").at("total_size"), bytes);
  const std::vector<std::string> names = files();
  ASSERT_GT(names.size(), 3u);
  EXPECT_EQ(names[0], fmt::format("model-00001-of-{:05}.safetensors", names.size() - 1));
  for (std::size_t i = 0; i + 1 < names.size(); ++i) {
    std::size_t held = 0;
    const TensorFile shard(path(names[i]));
    for (const std::string& name : shard.names())
      held += static_cast<std::size_t>(shard.tensor(name).bytes());
    EXPECT_LE(held, 1000u) << names[i];
    EXPECT_EQ(shard.metadata().at("format"), "pt");
  }
  // Each tensor gets its own file where no two fit into one.
  const Weights other(tiny());
  saved.save(path("one.safetensors"), {DType::f32, 1});
  other.load(path("one.safetensors.index.json"));
  EXPECT_TRUE(other == saved);
}

TEST_F(WeightFilesTest, SavingReplacesWhatWasThere) {
  const Weights first(tiny(), 5), second(tiny(), 6), read(tiny());
  first.save(model(), {DType::f32, 1000});
  second.save(model(), {DType::f32, 1000});
  read.load(weights_path(root_.string()));
  EXPECT_TRUE(read == second);
  // One file replaces shards, and shards replace it; a load finds the last save.
  first.save(model());
  EXPECT_EQ(weights_path(root_.string()), model());
  EXPECT_FALSE(fs::exists(index()));
  read.load(weights_path(root_.string()));
  EXPECT_TRUE(read == first);
  second.save(model(), {DType::f32, 1000});
  EXPECT_FALSE(fs::exists(model()));
  read.load(weights_path(root_.string()));
  EXPECT_TRUE(read == second);
  for (const std::string& name : files()) EXPECT_FALSE(name.ends_with(".new")) << name;
}

TEST_F(WeightFilesTest, SixteenBitsAreRoundedOnceAndReadExactly) {
  const Weights saved(tiny(), 5);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    // All tensors are 16-bit, in several files.
    saved.save(model(), {dtype, 400});
    const Weights read(tiny()), again(tiny());
    read.load(weights_path(root_.string()));
    const double unit = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    double largest = 0.0;
    for (std::size_t i = 0; i < saved.list.size(); ++i) {
      for (std::size_t k = 0; k < saved.values[i].size(); ++k) {
        const double x = saved.values[i][k], y = read.values[i][k];
        if (std::abs(x) > 1e-3) largest = std::max(largest, std::abs(y - x) / std::abs(x));
      }
    }
    EXPECT_LE(largest, unit);
    EXPECT_GT(largest, unit / 4.0);
    // Representable values stay the same.
    read.save(path("again.safetensors"), {dtype, kShardBytes});
    again.load(path("again.safetensors"));
    EXPECT_TRUE(again == read);
    EXPECT_EQ(TensorFile(path("again.safetensors")).tensor("model.norm.weight").dtype(), dtype);
  }
}

// The tensors of one file, which a test changes and writes again.
struct Tensors {
  explicit Tensors(const std::string& path) : source(path) {
    for (const std::string& name : source.names()) list.push_back({name, source.tensor(name)});
  }
  void drop(const std::string& name) {
    std::erase_if(list, [&](const NamedTensor& t) { return t.name == name; });
  }
  TensorFile source;
  std::vector<NamedTensor> list;
};

TEST_F(WeightFilesTest, NamesWhatDoesNotFit) {
  Weights(tiny(), 5).save(path("good.safetensors"));
  const auto refused = [&](auto change, const std::string& text) {
    Tensors tensors(path("good.safetensors"));
    change(tensors);
    write_safetensors(path("bad.safetensors"), tensors.list, {});
    expect_message([&] { Weights(tiny()).load(path("bad.safetensors")); },
                   path("bad.safetensors") + "': tensor " + text);
  };
  const std::string k = "model.layers.1.self_attn.k_proj.weight";
  const std::vector<float> numbers(64);
  refused([&](Tensors& t) { t.drop(k); }, "'" + k + "': expected f32[4, 8], found none");
  refused(
      [&](Tensors& t) {
        t.drop(k);
        t.list.push_back({k, {numbers.data(), DType::bf16, {8, 4}}});
      },
      "'" + k + "': expected f32[4, 8], found bf16[8, 4]");
  refused(
      [&](Tensors& t) {
        t.drop(k);
        t.list.push_back({k, {numbers.data(), DType::i32, {4, 8}}});
      },
      "'" + k + "': expected f32[4, 8], bf16 or f16, found i32[4, 8]");
  refused(
      [&](Tensors& t) {
        t.list.push_back(
            {"model.layers.2.input_layernorm.weight", {numbers.data(), DType::f32, {8}}});
      },
      "'model.layers.2.input_layernorm.weight': expected none of this name, found f32[8]");
}

TEST_F(WeightFilesTest, ReadsThePrefixOldBuffersAndHeads) {
  const Weights saved(tiny(), 5), read(tiny());
  saved.save(path("good.safetensors"));
  Tensors tensors(path("good.safetensors"));
  const std::vector<float> buffer(2);
  for (NamedTensor& t : tensors.list) {
    if (t.name.starts_with("model.")) t.name = t.name.substr(6);
  }
  tensors.list.push_back(
      {"layers.0.self_attn.rotary_emb.inv_freq", {buffer.data(), DType::f32, {2}}});
  write_safetensors(path("bare.safetensors"), tensors.list, {});
  read.load(path("bare.safetensors"));
  EXPECT_TRUE(read == saved);
  // A tied model accepts a head only if it equals the token embedding.
  expect_message([&] { Weights(tiny(true)).load(path("good.safetensors")); },
                 "tensor 'lm_head.weight': expected the numbers of embed_tokens.weight");
  Tensors copied(path("good.safetensors"));
  const ConstTensorView vocab_ids = copied.source.tensor("model.embed_tokens.weight");
  copied.drop("lm_head.weight");
  write_safetensors(path("headless.safetensors"), copied.list, {});
  copied.list.push_back({"lm_head.weight", vocab_ids});
  write_safetensors(path("copied.safetensors"), copied.list, {});
  const Weights tied(tiny(true)), headless(tiny());
  tied.load(path("copied.safetensors"));
  tied.load(path("headless.safetensors"));
  // An untied head that the file lacks starts as a copy of the embedding.
  headless.load(path("headless.safetensors"));
  EXPECT_TRUE(std::ranges::equal(headless.values[0], headless.values[headless.list.size() - 1]));
}

TEST_F(WeightFilesTest, AnIndexIsHeldToItsShards) {
  Weights(tiny(), 5).save(model(), {DType::f32, 1000});
  const Json good = read_index();
  const auto refused = [&](auto change, const std::string& text) {
    Json json = good;
    change(json);
    write("model.safetensors.index.json", json.dump());
    expect_message([&] { Weights(tiny()).load(index()); }, text);
  };
  const std::string norm = "model.norm.weight";
  const std::string file = good.at("weight_map").at(norm).text();
  refused([&](Json& j) { j.erase("weight_map"); }, index() + "': weight_map: expected an object");
  refused([&](Json& j) { j["weight_map"].erase(norm); },
          "tensor '" + norm + "': is in a shard, but not in weight_map");
  refused([&](Json& j) { j["weight_map"]["more"] = file; },
          "tensor 'more': expected in '" + file + "', found none");
  refused([&](Json& j) { j["weight_map"][norm] = "model-00001-of-" + file.substr(15); },
          "tensor '" + norm + "': expected in 'model-00001-of-" + file.substr(15) +
              "', found in another file");
  for (const char* outside : {"../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", ""}) {
    refused([&](Json& j) { j["weight_map"][norm] = outside; },
            "weight_map: '" + norm + "': expected the name of a file, found \"" + outside);
  }
  refused([&](Json& j) { j["weight_map"][norm] = 4; }, "expected the name of a file, found 4");
  refused([&](Json& j) { j["weight_map"]["more"] = "gone.safetensors"; },
          "weight_map: 'more': there is no file '" + path("gone.safetensors"));
  write("model.safetensors.index.json", "{");
  expect_message([&] { Weights(tiny()).load(index()); }, "weight_map: expected an object");
  // A tensor is in two shards.
  write("model.safetensors.index.json", good.dump());
  const std::string first = fmt::format("model-00001-of-{}", file.substr(15));
  fs::copy_file(path(first), path("twice.safetensors"));
  refused([&](Json& j) { j["weight_map"]["more"] = "twice.safetensors"; }, "has it once more");
}

}  // namespace
}  // namespace logitless::train
