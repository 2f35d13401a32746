// The trainer's interface to a language model: its parameters, the network from which programs are
// built, and its names in the files of Hugging Face.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "json/json.h"
#include "logitless/dtype.h"
#include "logitless/graph.h"

namespace logitless::train {

struct Parameter {
  std::string name;  // the name in Hugging Face's safetensors: "h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;
  double constant = 0.0;   // initial value ...
  double deviation = 0.0;  // ... plus normal random numbers of this deviation
  std::int64_t numel() const;
  bool is_matrix() const { return shape.size() == 2; }
};

// Sets the initial values of the parameter at `index` of the list. They depend on seed, index and
// size alone.
void initialise(const Parameter& parameter, std::size_t index, std::uint64_t seed,
                std::span<float> values);

// Table f32 [length, columns]: a row for each position, the same in every step.
struct PositionTable {
  std::string name;
  std::int64_t columns = 0;
  std::vector<float> values;
};

struct ModelSizes {
  std::int64_t vocab = 0;
  std::int64_t context = 0;  // number of positions
  std::int64_t dim = 0;
  std::int64_t heads = 0;
  std::int64_t layers = 0;
  bool tied_head = true;
  // f32 or bf16. With bf16, matrix products and the residual stream are in bf16; weights and the
  // statistics of norms, softmax and loss stay in f32.
  DType activations = DType::f32;
};

// Names of the tensors in a file. Either all of them have the prefix or none; lm_head.weight, of an
// untied head, never has it. Parameter::name is the name on export.
struct FileNames {
  std::string prefix;
  bool written = false;              // export with the prefix
  std::string token_embedding;       // the token embedding, without the prefix
  std::vector<std::string> ignored;  // buffers such as masks, without the prefix
};

inline constexpr const char* kHeadWeight = "lm_head.weight";

// The parameter that programs read for a matrix product whose activations are narrower than f32.
enum class Weights : std::uint8_t {
  masters,  // the f32 parameter, rounded in every run
  rounded,  // another parameter, rounded_name(), which the caller updates with the f32 one
};
// Returns the name of the parameter's copy in the dtype of activations.
std::string rounded_name(const std::string& name);

class Network;

class Model {
 public:
  virtual ~Model() = default;
  // Returns model_type of config.json: "gpt2", "llama", "qwen2" or "qwen3".
  virtual std::string type() const = 0;
  virtual ModelSizes sizes() const = 0;
  // Returns the parameters in the order of all programs and checkpoints.
  virtual std::vector<Parameter> parameters() const = 0;
  // Returns the tables with rows for positions 0 to length - 1.
  virtual std::vector<PositionTable> tables(std::int64_t length) const = 0;
  // Adds the network up to the head to a graph. Returns hidden states [N, dim] in the dtype of
  // activations, after the last norm; N = batch * length.
  virtual Value hidden(Network& network) const = 0;
  // Returns the name of the head's weight [vocab, dim].
  virtual std::string head() const = 0;
  // Returns the model as JSON for checkpoints, which parse_model() reads. Equal models have equal
  // texts.
  virtual std::string config_text() const = 0;
  virtual FileNames file_names() const = 0;
  // Returns config.json of transformers. `end_of_text` is the tokenizer's; negative: none.
  virtual Json config_json(int end_of_text) const = 0;
};

using ModelPtr = std::shared_ptr<const Model>;

// Parses a config_text(). Throws InvalidArgument or a JSON exception on anything else.
ModelPtr parse_model(const std::string& config_text);

// A graph under construction, to which a model adds its operations.
class Network {
 public:
  Network(Graph& graph, const Model& model, const Dim& batch, const Dim& length, Weights weights);

  const Dim& batch() const { return batch_; }
  const Dim& length() const { return length_; }
  Dim rows() const { return batch_ * length_; }
  Value tokens() const { return tokens_; }  // i64 [batch, length]
  Value master(const std::string& name);    // f32
  Value weight(const std::string& name);    // in the dtype of activations
  Value table(const std::string& name) const { return by_name_.at(name); }
  // Names the values made during its lifetime, for reports: "layer3", in it "mlp".
  Scope scope(const std::string& name) { return Scope(graph_, name); }
  // Returns x + y, named "residual".
  Value residual(Value x, Value y);

  // Returns logits f32 [rows, vocab] of hidden [rows, dim].
  Value logits(Value hidden);
  // Sets the number of rows of the head's weight, a vocabulary shard.
  void set_head_vocab(std::int64_t vocab_count);
  Value hidden() { return model_.hidden(*this); }
  // Adds a result d_NAME for each parameter; it includes the gradient of the rounded copy.
  void add_gradients(Value loss);

 private:
  Graph& graph_;
  const Model& model_;
  DType activations_;
  bool rounded_;
  Dim batch_, length_;
  std::map<std::string, Shape> shapes_;   // shapes of the model's parameters
  std::map<std::string, Value> by_name_;  // inputs that are in the graph
  Value tokens_;

  Value parameter(const std::string& name, const std::string& of, DType dtype);
};

inline constexpr std::int64_t kIgnoredTarget = -100;

// The programs of a model. They take the parameters and tables that they read, under their names,
// in f32 or rounded (Weights). They also take
//   tokens   i64 [batch, length]   in [0, vocab)
// Sizes may be symbols. Each function throws InvalidArgument on a length over the context.

// Builds one step of training. Further inputs:
//   targets  i64 [batch, length]   in [0, vocab), or kIgnoredTarget
//   inverse_count  f32 []          1 / targets of the whole batch that are not ignored
// Results: the loss f32 [], which is the sum of the targets' losses times inverse_count, and for
// each parameter its gradient d_NAME, f32.
Graph build_step(const Model& model, const Dim& batch, const Dim& length,
                 Weights weights = Weights::masters);

// Builds the loss for validation, of tokens and targets as above. Results: loss f32 [], the sum,
// and count f32 [], the number of targets that are not ignored.
Graph build_loss(const Model& model, const Dim& batch, const Dim& length,
                 Weights weights = Weights::masters);

// Builds the logits for sampling. Further input:
//   last  i64 [batch]   position of the last token of each row; later tokens have no effect
// Result: logits f32 [batch, vocab] of the next token. With `head_vocab` above 0 the head's weight
// is a shard with that many entries, and so are the logits.
Graph build_logits(const Model& model, const Dim& batch, const Dim& length,
                   Weights weights = Weights::masters, std::int64_t head_vocab = 0);

}  // namespace logitless::train
