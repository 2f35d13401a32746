// Options of `logitless train`.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "train/device/choice.h"
#include "train/model/llama_config.h"
#include "train/run/checkpoint.h"
#include "train/run/trainer.h"

namespace logitless::train {

struct RunOptions {
  // Model
  std::string model;  // a preset or a config.json, which gives the sizes; empty: the sizes below
  // The configuration from --model, --init or the checkpoint; none: a GPT-2.
  std::optional<LlamaConfig> llama = {};
  std::int64_t vocab = 32768;
  std::int64_t dim = 128;
  std::int64_t heads = 4;
  std::int64_t layers = 4;
  std::int64_t context = 0;  // 0: the preset's, or else length
  bool untied = false;
  DType dtype = DType::f32;
  // Data
  std::vector<std::string> data, val;  // llm.c's files; without val the end of data is held out
  std::vector<std::string> text;  // files and folders; without text and data: the system's headers
  std::string cache;  // folder of cached tokenizers and token ids; empty: default_cache_directory()
  // Weights with a tokenizer next to them, which tokenizes the text: --init, or its value when the
  // checkpoint's run began. Empty: a tokenizer is trained on the text.
  std::string tokenizer;
  // Training
  std::int64_t batch = 2;
  std::int64_t length = 128;
  std::int64_t steps = 800;
  std::int64_t accumulate = 1;
  // Ranks that share each step: threads of this process, each with a GPU or a share of the CPU's
  // cores, or processes started by a launcher. `batch` is that of one rank.
  std::int64_t ranks = 1;
  bool shard_head = false;  // vocabulary-parallel head: each rank holds a shard of the vocabulary
  double rate = 1e-3;
  std::int64_t warmup = -1;  // steps; -1: a twentieth of all
  double floor = -1.0;       // the last rate; -1: a tenth of the highest
  double weight_decay = 0.1;
  double clip = 1.0;
  std::uint64_t seed = 1;
  std::int64_t eval_every = 0;  // steps; 0: a quarter of all
  // Machine
  DeviceWish device = DeviceWish::automatic;
  std::size_t budget = 0;
  bool chunk = true;
  bool head_engine = true;  // compute the loss on the head engine; false: in a loop of the compiler
  bool epilogues = true;    // fused epilogues of GEMMs on a GPU
  int threads = 0;
  // Far field: the target relative error of the gradients, in (0, 1); 0: exact gradients. far_both:
  // the loss may be approximated as well.
  double far_field = 0.0;
  bool far_both = false;
  // Files
  std::string resume, save, init, hugging_face;
  std::string log = {};  // empty: next to `save`, if that is given
  SaveOptions export_options;
  // Sample
  std::int64_t sample = 64;  // tokens; 0: none
  std::string prompt;        // empty: the first tokens of the held-out data
  double temperature = 0.8;
  std::int64_t top_k = 50;

  bool has_shards() const { return !data.empty(); }
  // Returns whether the sizes above define the model.
  bool has_own_sizes() const { return model.empty() && !llama; }
  // Returns model_type of config.json.
  std::string model_type() const { return llama ? llama->type : "gpt2"; }
  // Makes the model. `vocab_count`: the vocabulary size of the text's tokenizer.
  ModelPtr make_model(std::int64_t vocab_count) const;
  TrainOptions train_options() const;
  // Returns the options with the values that they take where none was given.
  RunOptions effective(const ModelSizes& sizes) const;
  std::int64_t tokens_of_step() const { return batch * accumulate * ranks * length; }
  std::int64_t steps_between_validations() const;
  // Returns the path of the log; empty: none.
  std::string log_path() const;
};

// Throw InvalidArgument naming the option ("--dim: ...") when options are invalid together.
// check_given() takes those on the command line, by name without dashes; check_options() checks all
// values.
void check_given(const RunOptions& options, const std::set<std::string>& given);
void check_options(const RunOptions& options);

// Key in options_text() of the folder that relative paths start from.
inline constexpr const char* kOptionsFolder = "folder";

// Returns the options that decide the result of training, as JSON for the checkpoint.
std::string options_text(const RunOptions& options);

// Returns the options that must be equal on all ranks, as (name, text): all but --threads.
std::vector<std::pair<std::string, std::string>> shared_options(const RunOptions& options);

// Fills options that were not given with the checkpoint's. Its relative paths start from the folder
// in which they were given, or from the current folder if only that has them. Model, length and
// seed must not differ: throws InvalidArgument naming the option and both values.
RunOptions with_checkpoint(const RunOptions& options, const std::set<std::string>& given,
                           const CheckpointHeader& checkpoint);

// Fills sizes that were not given with those of --init's file; its config.json gives all of them
// for a Llama or a Qwen. Throws InvalidArgument naming the option, the file's value and the given
// one.
RunOptions with_model_file(const RunOptions& options, const std::set<std::string>& given);

// Returns $XDG_CACHE_HOME/logitless or ~/.cache/logitless.
std::string default_cache_directory();

}  // namespace logitless::train
