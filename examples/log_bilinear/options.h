// Options of the command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace log_bilinear {

struct Options {
  // Text
  std::vector<std::string> text;  // files and directories; empty: the system's headers
  std::size_t max_text = 24u << 20;
  int vocab = 32768;
  std::string cache;  // directory
  // Model
  int dim = 128;
  int context = 8;
  std::string context_matrix = "full";  // or diagonal
  std::string word_vectors = "shared";  // or separate
  // Training
  std::string optimizer = "adamw";  // or adagrad
  double learning_rate = 0.0;       // 0: the optimiser's default
  double weight_decay = 0.0;
  std::int64_t steps = 850;
  std::int64_t batch = 512;
  std::int64_t warmup = -1;  // steps; -1: a twentieth of all
  std::uint64_t seed = 1;
  std::string dtype = "bf16";     // or f32: dtype of the head's GEMMs
  std::size_t memory_budget = 0;  // of the head's workspace; 0: the library's default
  double far_field = 0.0;         // wanted error of the far field's gradients; 0: exact
  bool far_both = false;          // the loss may be approximated, too
  // Running
  int threads = 0;  // 0: all
  std::int64_t stop_after = 0;
  std::int64_t evaluate_every = 0;  // steps; 0: a sixth of all
  std::int64_t valid_tokens = 16384;
  std::int64_t save_every = 0;
  std::string out = "log_bilinear-run";
  std::string resume;
  double log_every = 3.0;  // seconds
  std::int64_t generate = 96;
  double temperature = 0.7;
  std::string prompt = "#include <";
};

// Returns the options that change the result, by name, for the checkpoint.
std::map<std::string, std::string> training_options(const Options& options);

// Reads the command line, and with --resume the remaining training options from the checkpoint's
// metadata. `exit_code` is -1 if the program is to continue; otherwise help or an error has been
// printed. Throws std::runtime_error on an invalid checkpoint, or a given option that differs from
// it.
Options parse_options(int argc, char** argv, int& exit_code);

}  // namespace log_bilinear
