// What the trainer asks of a kind of language model: its parameters, the network that programs are
// written from, and its names in the files of Hugging Face.
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
  std::string name;  // as Hugging Face's safetensors call it: "h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;
  double constant = 0.0;   // what it starts from ...
  double deviation = 0.0;  // ... plus normal numbers of this deviation
  std::int64_t numel() const;
  bool is_matrix() const { return shape.size() == 2; }
};

// Starting values of the parameter at `index` of the list. Depends on seed, index and size alone.
void initialise(const Parameter& parameter, std::size_t index, std::uint64_t seed,
                std::span<float> values);

// f32 [length, columns]: a row for each position of a row of tokens, the same in every step.
struct PositionTable {
  std::string name;
  std::int64_t columns = 0;
  std::vector<float> values;
};

struct ModelSizes {
  std::int64_t vocab = 0;
  std::int64_t context = 0;  // positions there are
  std::int64_t dim = 0;
  std::int64_t heads = 0;
  std::int64_t layers = 0;
  bool tied_head = true;
  // f32, or bf16: products and the residual stream in bf16; weights, the statistics of norms,
  // softmax and loss in f32 all the same.
  DType activations = DType::f32;
};

// The tensors of a file. All but that of a head of its own, lm_head.weight, have the prefix or none
// has it; Parameter::name is as we write it.
struct FileNames {
  std::string prefix;
  bool written = false;              // with the prefix
  std::string words;                 // the table of words, without the prefix
  std::vector<std::string> ignored;  // without the prefix: masks and the like, which are no weights
};

inline constexpr const char* kHeadWeight = "lm_head.weight";

// What programs read where activations are narrower than f32 and a product wants a weight.
enum class Weights : std::uint8_t {
  masters,  // the parameter, rounded in every run
  rounded,  // another parameter, rounded_name(): the caller keeps it beside the f32 one
};
// Of the parameter's copy in the dtype of activations.
std::string rounded_name(const std::string& name);

class Network;

class Model {
 public:
  virtual ~Model() = default;
  // "gpt2", "llama", "qwen2", "qwen3": model_type of config.json.
  virtual std::string type() const = 0;
  virtual ModelSizes sizes() const = 0;
  // In the order of all programs and of checkpoints.
  virtual std::vector<Parameter> parameters() const = 0;
  // Rows of positions 0 to length - 1.
  virtual std::vector<PositionTable> tables(std::int64_t length) const = 0;
  // The network but for the head, written into a graph: [N, dim] in the dtype of activations, after
  // the last norm; N = batch * length.
  virtual Value hidden(Network& network) const = 0;
  // The parameter [vocab, dim] whose products with it are the logits.
  virtual std::string head() const = 0;
  // All of it as JSON, for checkpoints: what parse_model() reads. Equal for equal models.
  virtual std::string config_text() const = 0;
  virtual FileNames file_names() const = 0;
  // config.json of transformers. `end_of_text`: of the tokenizer of the run; negative: none.
  virtual Json config_json(int end_of_text) const = 0;
};

using ModelPtr = std::shared_ptr<const Model>;

// Throws InvalidArgument, or a JSON exception, on what config_text() never gives.
ModelPtr parse_model(const std::string& config_text);

// A graph that a model writes itself into.
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
  // What reports call the values made while it lives: "layer3", in it "mlp".
  Scope scope(const std::string& name) { return Scope(graph_, name); }
  // x + y, called "residual".
  Value residual(Value x, Value y);

  // f32 [rows, vocab] of hidden [rows, dim].
  Value logits(Value hidden);
  // From now on the head's weight has so many words.
  void set_head_words(std::int64_t words);
  Value hidden() { return model_.hidden(*this); }
  // A result d_NAME for each parameter, through its rounded copy as well.
  void add_gradients(Value loss);

 private:
  Graph& graph_;
  const Model& model_;
  DType activations_;
  bool rounded_;
  Dim batch_, length_;
  std::map<std::string, Shape> shapes_;   // of the model's parameters
  std::map<std::string, Value> by_name_;  // what has been read
  Value tokens_;

  Value parameter(const std::string& name, const std::string& of, DType dtype);
};

inline constexpr std::int64_t kIgnoredTarget = -100;

// All programs take the parameters and tables that they read, f32, under their names, or rounded
// (Weights), and
//   tokens   i64 [batch, length]   in [0, vocab)
// Sizes may be symbols. They throw InvalidArgument on a length over the context.

// One step of training.
//   targets  i64 [batch, length]   in [0, vocab), or kIgnoredTarget
//   inverse_count  f32 []          1 / targets of the whole batch that are not ignored
// Results: loss f32 [], the sum over targets of their losses times inverse_count, and for each
// parameter its gradient d_NAME, f32.
Graph build_step(const Model& model, const Dim& batch, const Dim& length,
                 Weights weights = Weights::masters);

// Validation: tokens and targets as above. Results: loss f32 [], the sum, and count f32 [], of
// targets that are not ignored.
Graph build_loss(const Model& model, const Dim& batch, const Dim& length,
                 Weights weights = Weights::masters);

// Sampling.
//   last  i64 [batch]   position of the last token of each row; those after it do not matter
// Result: logits f32 [batch, vocab] of the word after it; with `head_words` of so many words, which
// the head's weight has.
Graph build_logits(const Model& model, const Dim& batch, const Dim& length,
                   Weights weights = Weights::masters, std::int64_t head_words = 0);

}  // namespace logitless::train
