#include "train/run/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <type_traits>

#include "json/json.h"
#include "logitless/error.h"
#include "train/json_number.h"
#include "train/model/gpt.h"
#include "train/model/hugging_face.h"
#include "train/model/llama.h"
#include "train/run/bounds.h"
#include "train/run/log.h"

namespace logitless::train {
namespace {

constexpr std::string_view kFixed[] = {"model",   "vocab",  "dim",   "heads",  "layers",
                                       "context", "untied", "dtype", "length", "seed"};
constexpr std::string_view kSizeNames[] = {"vocab", "dim", "heads", "layers", "context"};
constexpr std::int64_t kLeastTextVocab = 300;  // 256 bytes and the tokenizer's special tokens
// Options that older checkpoints lack: these have the defaults.
constexpr std::string_view kYounger[] = {"far-field", "far-both", "cache",
                                         "tokenizer", "ranks",    "shard-head"};
constexpr std::string_view kSources[] = {"data", "val", "text"};
constexpr std::string_view kPaths[] = {"data", "val", "text", "cache", "tokenizer"};

template <typename Names>
bool contains(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Calls visit(name, field) for each option in a checkpoint; names are those of the command line.
template <typename Options, typename Visit>
void each_option(Options& o, Visit&& visit) {
  visit("model", o.model);
  visit("vocab", o.vocab);
  visit("dim", o.dim);
  visit("heads", o.heads);
  visit("layers", o.layers);
  visit("context", o.context);
  visit("untied", o.untied);
  visit("dtype", o.dtype);
  visit("data", o.data);
  visit("val", o.val);
  visit("text", o.text);
  visit("cache", o.cache);
  visit("tokenizer", o.tokenizer);
  visit("batch", o.batch);
  visit("length", o.length);
  visit("steps", o.steps);
  visit("accumulate", o.accumulate);
  visit("ranks", o.ranks);
  visit("shard-head", o.shard_head);
  visit("lr", o.rate);
  visit("warmup", o.warmup);
  visit("min-lr", o.floor);
  visit("weight-decay", o.weight_decay);
  visit("clip", o.clip);
  visit("seed", o.seed);
  visit("eval-every", o.eval_every);
  visit("far-field", o.far_field);
  visit("far-both", o.far_both);
}

template <typename T>
Json to_json(const T& value) {
  if constexpr (std::is_same_v<T, DType>) {
    return std::string(name_of(value));
  } else {
    return value;
  }
}

// Throws unless the value is allowed on the command line, or stands for an option that was not
// given.
template <typename T>
void from_json(const Json& json, std::string_view name, T& value) {
  const auto require = [&](bool holds, const std::string& expected) {
    if (!holds) throw InvalidArgument(fmt::format("{}, found {}", expected, json.dump()));
  };
  if constexpr (std::is_same_v<T, DType>) {
    require(json == "f32" || json == "bf16", "expected f32 or bf16");
    value = parse_dtype(json.get<std::string>());
  } else if constexpr (std::is_same_v<T, bool>) {
    value = json.get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    const WholeBounds& bounds = whole_bounds(name);
    const std::int64_t number = whole_number(json);
    require(number == bounds.unset || bounds.allow(number), bounds.expected());
    value = static_cast<T>(number);
  } else if constexpr (std::is_same_v<T, double>) {
    const RealBounds& bounds = real_bounds(name);
    const double number = json.get<double>();
    require(number == bounds.unset || bounds.allow(number), bounds.expected());
    value = number;
  } else {
    value = json.get<T>();
  }
}

// Calls visit(path) for each path that is stored in a checkpoint.
template <typename Options, typename Visit>
void each_path(Options& o, Visit&& visit) {
  each_option(o, [&](std::string_view name, auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if (!contains(kPaths, name)) return;
    if constexpr (std::is_same_v<Field, std::string>) visit(name, field);
    if constexpr (std::is_same_v<Field, std::vector<std::string>>) {
      for (auto& path : field) visit(name, path);
    }
  });
}

// Returns the current folder; empty where it is unknown, or not UTF-8, which a checkpoint requires.
std::string current_folder() {
  std::error_code error;
  const std::string folder = std::filesystem::current_path(error).string();
  try {
    Json(folder).dump();
  } catch (const JsonError&) {
    return {};
  }
  return folder;
}

// Returns a path of a run that began in `folder`, as seen from the current folder.
std::string from_folder(const std::string& path, const std::string& folder) {
  if (path.empty() || std::filesystem::path(path).is_absolute()) return path;
  std::error_code none;
  const std::string there = (std::filesystem::path(folder) / path).lexically_normal().string();
  const bool only_here =
      !std::filesystem::exists(there, none) && std::filesystem::exists(path, none);
  return only_here ? path : there;
}

[[noreturn]] void fail(const std::string& text) { throw InvalidArgument(text); }

void refuse_together(const std::set<std::string>& given, const char* one,
                     std::initializer_list<const char*> others, const char* why) {
  if (given.count(one) == 0) return;
  for (const char* other : others) {
    if (given.count(other) > 0) {
      fail(fmt::format("--{}: cannot be given beside --{}: {}", other, one, why));
    }
  }
}

}  // namespace

ModelPtr RunOptions::make_model(std::int64_t vocab_count) const {
  if (llama) {
    LlamaConfig result = *llama;
    result.tied_head = result.tied_head && !untied;
    result.activations = dtype;
    return make_llama(result);
  }
  GptConfig result;
  if (!model.empty()) {
    result = gpt_preset(model);
  } else {
    result.vocab = vocab_count;
    result.dim = dim;
    result.heads = heads;
    result.layers = layers;
    result.context = context > 0 ? context : length;
  }
  result.tied_head = !untied;
  result.activations = dtype;
  return make_gpt(result);
}

RunOptions RunOptions::effective(const ModelSizes& sizes) const {
  RunOptions result = *this;
  const Schedule schedule = train_options().schedule;
  result.warmup = schedule.warmup;
  result.floor = schedule.floor;
  result.eval_every = steps_between_validations();
  result.vocab = sizes.vocab;
  result.dim = sizes.dim;
  result.heads = sizes.heads;
  result.layers = sizes.layers;
  result.context = sizes.context;
  result.untied = !sizes.tied_head;
  result.dtype = sizes.activations;
  return result;
}

TrainOptions RunOptions::train_options() const {
  TrainOptions result;
  result.batch = batch;
  result.accumulate = accumulate;
  result.schedule.peak = rate;
  result.schedule.floor = floor < 0.0 ? 0.1 * rate : floor;
  result.schedule.warmup = warmup < 0 ? steps / 20 : warmup;
  result.schedule.steps = steps;
  result.adamw.weight_decay = weight_decay;
  result.clip = clip;
  result.seed = seed;
  result.memory_budget = budget;
  result.chunk = chunk;
  result.head_engine = head_engine;
  result.shard_head = shard_head;
  result.epilogues = epilogues;
  result.threads = threads;
  if (far_field > 0.0) {
    result.far_field.emplace();
    result.far_field->error = far_field;
    result.far_field->accuracy = far_both ? Accuracy::far_both : Accuracy::far_backward;
    // The head counts micro-batches: `accumulate` steps with the same weights.
    result.far_field->audit_every *= accumulate;
    result.far_field->refresh_every *= accumulate;
  }
  return result;
}

std::int64_t RunOptions::steps_between_validations() const {
  return eval_every > 0 ? eval_every : std::max<std::int64_t>(1, (steps + 3) / 4);
}

void check_given(const RunOptions& options, const std::set<std::string>& given) {
  refuse_together(given, "model", {"vocab", "dim", "heads", "layers", "context"},
                  "the model has its own sizes");
  refuse_together(given, "data", {"text", "cache"}, "its files hold tokens already");
  refuse_together(given, "no-chunk", {"budget"}, "a program without loops has one size");
  refuse_together(given, "resume", {"init"}, "both are weights to start from");
  if (options.sample == 0) {
    for (const char* name : {"prompt", "temperature", "top-k"}) {
      if (given.count(name) > 0) fail(fmt::format("--{}: is of --sample, which is 0", name));
    }
  }
  if (options.temperature == 0.0 && given.count("top-k") > 0)
    fail("--top-k: is of --temperature above 0, with which there is a choice");
}

void check_options(const RunOptions& o) {
  if (!o.val.empty() && o.data.empty()) fail("--val: validates --data, which was not given");
  if (!o.prompt.empty() && o.has_shards()) fail("--prompt: the tokens of --data have no text");
  if (!o.cache.empty() && o.has_shards()) fail("--cache: is of --text, but the data is --data");
  if (o.has_own_sizes() && !o.has_shards() && o.vocab < kLeastTextVocab) {
    fail(fmt::format("--vocab: expected at least {} for --text, got {}", kLeastTextVocab, o.vocab));
  }
  if (o.llama && !o.has_shards() && o.llama->vocab < kLeastTextVocab) {
    fail(fmt::format("--text: expected a model of at least {} tokens, found {}", kLeastTextVocab,
                     o.llama->vocab));
  }
  if (o.has_own_sizes() && o.dim % o.heads != 0) {
    fail(fmt::format("--heads: expected a divisor of --dim {}, got {}", o.dim, o.heads));
  }
  if (o.far_both && o.far_field == 0.0) fail("--far-both: is of --far-field, which was not given");
  const bool shards_head = o.shard_head && o.ranks > 1;
  for (const auto& [given, name] :
       {std::pair(o.far_field > 0.0, "far-field"), std::pair(shards_head, "shard-head")}) {
    if (given && !(o.chunk && o.head_engine)) {
      fail(fmt::format("--{}: cannot be given beside --{}: it is of losses on the head engine",
                       name, o.chunk ? "no-head-engine" : "no-chunk"));
    }
  }
  if (shards_head && o.far_field > 0.0)
    fail("--shard-head: cannot be given beside --far-field: that is of whole heads");
  if (const std::string unserved = unserved_on_gpu(o);
      o.device == DeviceWish::cuda && !unserved.empty())
    fail(fmt::format("--device: cuda does not serve {}; expected cpu beside it", unserved));
  if (o.floor > o.rate) {
    fail(fmt::format("--min-lr: expected at most --lr {}, got {}", o.rate, o.floor));
  }
  if (o.warmup > o.steps) {
    fail(fmt::format("--warmup: expected at most --steps {}, got {}", o.steps, o.warmup));
  }
  const ModelSizes sizes = o.make_model(o.vocab)->sizes();
  if (o.length > sizes.context) {
    fail(fmt::format("--length: expected at most --context {}, got {}", sizes.context, o.length));
  }
  if (o.shard_head && sizes.tied_head) {
    fail(
        "--shard-head: expected a head with a matrix of its own (--untied); this model's is its "
        "token embedding, of which every rank reads all");
  }
}

std::string RunOptions::log_path() const {
  if (!log.empty() || save.empty()) return log;
  return log_of(save);
}

std::string options_text(const RunOptions& options) {
  Json json = Json::object();
  each_option(options, [&](const char* name, const auto& field) {
    json[name] = to_json(field);
    try {
      json[name].dump();
    } catch (const JsonError&) {
      fail(fmt::format("--{}: expected UTF-8, which is all that --save can store, got {}", name,
                       json[name].dump(-1, NotUtf8::replace_ascii)));
    }
  });
  bool relative = false;
  each_path(options, [&](std::string_view, const std::string& path) {
    relative = relative || (!path.empty() && !std::filesystem::path(path).is_absolute());
  });
  if (const std::string folder = current_folder(); relative && !folder.empty())
    json[kOptionsFolder] = folder;
  return json.dump();
}

std::vector<std::pair<std::string, std::string>> shared_options(const RunOptions& o) {
  std::vector<std::pair<std::string, std::string>> facts;
  const auto add = [&](const std::string& name, const auto& value) {
    facts.emplace_back("--" + name, Json(value).dump(-1, NotUtf8::replace_ascii));
  };
  each_option(o, [&](const char* name, const auto& field) { add(name, to_json(field)); });
  add("device", o.device == DeviceWish::cpu ? "cpu" : o.device == DeviceWish::cuda ? "cuda" : "");
  add("budget", o.budget);
  add("no-chunk", !o.chunk);
  add("no-head-engine", !o.head_engine);
  add("no-epilogues", !o.epilogues);
  add("resume", o.resume);
  add("save", o.save);
  add("log", o.log);
  add("init", o.init);
  add("export", o.hugging_face);
  add("export-dtype", std::string(name_of(o.export_options.dtype)));
  add("shard-size", o.export_options.shard_bytes);
  add("sample", o.sample);
  add("prompt", o.prompt);
  add("temperature", o.temperature);
  add("top-k", o.top_k);
  return facts;
}

RunOptions with_checkpoint(const RunOptions& options, const std::set<std::string>& given,
                           const CheckpointHeader& checkpoint) {
  RunOptions merged = options;
  const std::string config = checkpoint.model->config_text();
  merged.llama = checkpoint.model->type() == "gpt2"
                     ? std::nullopt
                     : std::optional(parse_llama_config(Json::parse(config)));
  const bool own_data = std::any_of(std::begin(kSources), std::end(kSources),
                                    [&](auto name) { return given.count(std::string(name)) > 0; });
  Json stored;
  std::set<std::string_view> taken;
  try {
    stored = Json::parse(checkpoint.state.options);
    each_option(merged, [&](const char* name, auto& field) {
      if (contains(kYounger, name) && !stored.contains(name)) return;
      const Json& value = stored.at(name);
      if (given.count(name) > 0) {
        if (contains(kFixed, name) && value != to_json(field)) {
          throw InvalidArgument(fmt::format("--{}: the checkpoint has {}, got {}", name,
                                            value.dump(), to_json(field).dump()));
        }
      } else if (!(own_data && (contains(kSources, name) || name == std::string_view("cache")))) {
        try {
          from_json(value, name, field);
          taken.insert(name);
          // A Llama's sizes come from the checkpoint.
          if (name == std::string_view("model") && !merged.model.empty() && !merged.llama)
            gpt_preset(merged.model);
        } catch (const std::exception& error) {
          throw InvalidArgument(fmt::format("--resume: '{}': metadata 'options': {}: {}",
                                            options.resume, name, error.what()));
        }
      }
    });
    const Json* folder = stored.find(kOptionsFolder);
    if (folder != nullptr && *folder != current_folder()) {
      each_path(merged, [&](std::string_view name, std::string& path) {
        if (taken.contains(name)) path = from_folder(path, folder->text());
      });
    }
  } catch (const JsonError& error) {
    throw InvalidArgument(fmt::format("--resume: '{}': metadata 'options' cannot be read: {}",
                                      options.resume, error.what()));
  }
  return merged;
}

RunOptions with_model_file(const RunOptions& options, const std::set<std::string>& given) {
  ModelConfig of_init;
  try {
    of_init = read_hugging_face_config(options.init);
  } catch (const Error& error) {
    fail(fmt::format("--init: {}", error.what()));
  }
  RunOptions merged = options;
  if (!options.has_shards() && has_hugging_face_tokenizer(options.init))
    merged.tokenizer = options.init;
  if (const auto* llama = std::get_if<LlamaConfig>(&of_init)) {
    for (const std::string_view name : kSizeNames) {
      if (given.count(std::string(name)) > 0)
        fail(fmt::format("--{}: '{}' has its own sizes", name, options.init));
    }
    merged.llama = *llama;
    return merged;
  }
  const GptConfig file = std::get<GptConfig>(of_init);
  const auto take = [&](const char* name, std::int64_t found, std::int64_t& field) {
    if (given.count(name) == 0) {
      field = found;
    } else if (field != found) {
      fail(fmt::format("--{}: '{}' has {}, got {}", name, options.init, found, field));
    }
  };
  take("vocab", file.vocab, merged.vocab);
  take("dim", file.dim, merged.dim);
  take("layers", file.layers, merged.layers);
  take("context", file.context, merged.context);
  if (given.count("heads") == 0) {
    if (file.heads == 0) {
      fail(fmt::format(
          "--heads: expected a number: '{}' does not tell, and no config.json beside it",
          options.init));
    }
    merged.heads = file.heads;
  }
  merged.untied = options.untied || !file.tied_head;
  return merged;
}

std::string default_cache_directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::string(cache) + "/logitless";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/logitless";
  }
  return ".cache/logitless";
}

}  // namespace logitless::train
