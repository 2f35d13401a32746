// Options of the far field: --tau --order --order-rows --save-order --sample-every
// --sample-seed --audit.
#pragma once

#include <string>

#include "cli/args.h"
#include "cli/convert.h"
#include "cli/tensors.h"
#include "logitless/logitless.h"

namespace logitless::cli {

// Copies `most` evenly spaced rows of hidden [..., D].
OwnedTensor sample_rows(const ConstTensorView& hidden, std::int64_t most);

struct MadeOrder {
  VocabOrder order;
  std::size_t bytes = 0;  // peak memory of making it; 0 if it was read from a file
};

struct FarArgs {
  double tau = 0.0;  // 0: the default
  std::string order = "fresh";
  std::int64_t order_rows = 1536;
  std::string save_order;
  std::int64_t sample_every = 0, sample_seed = 0;
  std::int64_t audit = 0;

  void add(Options& options);
  // Adds tau, sample_every and audit. Throws UsageError when one of these options is given without
  // a far-field plan, or without the option that it depends on.
  void add_to(PlanRequest& request, const std::set<std::string>& given) const;
  // Throws UsageError where --save-order or `out`, the file of --out, would replace an input or the
  // other.
  void check_files(const TensorLoader& loader, const std::string& out) const;
  // Returns the order of the file, or makes one from evenly spaced rows of hidden, with moments if
  // the plan needs them. Saves it if requested. Plans of the making get `budget` (0: the default).
  MadeOrder make(const Context& context, const CrossEntropyOptions& options,
                 const CrossEntropyInputs& in, const LossPlan& plan, std::size_t budget) const;
};

}  // namespace logitless::cli
