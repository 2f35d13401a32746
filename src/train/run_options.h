// What the user of `logitless train` may choose.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "train/checkpoint.h"
#include "train/device_choice.h"
#include "train/llama_config.h"
#include "train/trainer.h"

namespace logitless::train {

struct RunOptions {
  // Model
  std::string model;  // a preset or a config.json, which gives the sizes; empty: those below
  // Of --model, of --init or of the checkpoint; none: a GPT-2.
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
  std::vector<std::string> text;  // files and folders; without it and data: the system's headers
  std::string cache;              // of tokenizers and words; empty: default_cache_directory()
  // Weights that have a tokenizer beside them, whose words the text has: --init, or what it was
  // when the checkpoint's run began. Empty: one that is trained on the text.
  std::string tokenizer;
  // Training
  std::int64_t batch = 2;
  std::int64_t length = 128;
  std::int64_t steps = 800;
  std::int64_t accumulate = 1;
  // That share each step: threads of the process with a GPU, or a share of the CPU's cores, each;
  // or processes that a launcher has started. batch is of one of them.
  std::int64_t ranks = 1;
  bool shard_head = false;  // each rank has a share of the head's words
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
  bool head_engine = true;  // the loss on the head engine; false: a loop like the rest
  bool epilogues = true;    // of products on a GPU
  int threads = 0;
  // Far field: the relative error wanted of the gradients, in (0, 1); 0: exact ones. Both: the loss
  // may be approximated, too.
  double far_field = 0.0;
  bool far_both = false;
  // Files
  std::string resume, save, init, hugging_face;
  std::string log = {};  // empty: beside `save`, if that is there
  SaveOptions export_options;
  // Sample
  std::int64_t sample = 64;  // words; 0: none
  std::string prompt;        // empty: the first words of the held-out data
  double temperature = 0.8;
  std::int64_t top_k = 50;

  bool has_shards() const { return !data.empty(); }
  // Whether the sizes above are the model's.
  bool has_own_sizes() const { return model.empty() && !llama; }
  // model_type of config.json.
  std::string model_type() const { return llama ? llama->type : "gpt2"; }
  // `words` is the vocabulary of the text's tokenizer.
  ModelPtr make_model(std::int64_t words) const;
  TrainOptions train_options() const;
  std::int64_t tokens_of_step() const { return batch * accumulate * ranks * length; }
  std::int64_t steps_between_validations() const;
  // Of the steps; empty: none.
  std::string log_path() const;
};

// These throw InvalidArgument naming the option ("--dim: ...") when some do not go together: of
// those on the command line, by name without the dashes, and of all values.
void check_given(const RunOptions& options, const std::set<std::string>& given);
void check_options(const RunOptions& options);

// In options_text(), where a path is relative: the folder that it starts from.
inline constexpr const char* kOptionsFolder = "folder";

// Those that decide what is learnt, as JSON, for the checkpoint.
std::string options_text(const RunOptions& options);

// All that ranks must have in common, by name and as text: everything but --threads.
std::vector<std::pair<std::string, std::string>> shared_options(const RunOptions& options);

// What was not given takes the checkpoint's value, its relative paths from the folder that they
// were given in, or from the current one where only that has them. Model, length and seed may not
// differ: throws InvalidArgument naming the option, the checkpoint's value and the one given.
RunOptions with_checkpoint(const RunOptions& options, const std::set<std::string>& given,
                           const CheckpointHeader& checkpoint);

// What was not given of the model's sizes is the file's of --init, and all of them where its
// config.json is a Llama's or a Qwen's. Throws InvalidArgument naming
// the option, what the file has and what was given.
RunOptions with_model_file(const RunOptions& options, const std::set<std::string>& given);

// $XDG_CACHE_HOME/logitless or ~/.cache/logitless.
std::string default_cache_directory();

}  // namespace logitless::train
