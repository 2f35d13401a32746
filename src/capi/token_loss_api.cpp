// The loss of a token over the C ABI: math/token_loss.h on f64 tensors.
#include <array>
#include <cmath>
#include <span>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "head/overlap.h"
#include "head/validate.h"
#include "math/token_loss.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

namespace {

// An optional tensor of doubles by flat index.
template <typename Double>
struct Doubles {
  Double* data = nullptr;
  FlatIndex index;

  explicit operator bool() const { return data != nullptr; }
  Double& operator[](std::int64_t flat) const { return data[index(flat)]; }
};

// Reads an optional tensor. Throws unless it is f64 of these sizes and has data.
template <typename Double>
void read(const char* name, const TensorView& view, std::span<const std::int64_t> sizes,
          Doubles<Double>& to) {
  if (!view.defined()) return;
  bool same = view.rank() == static_cast<int>(sizes.size());
  for (int d = 0; same && d < view.rank(); ++d) {
    same = view.size(d) == sizes[static_cast<std::size_t>(d)];
  }
  require(same && view.dtype() == DType::f64, name, ": expected f64[", sizes[0],
          sizes.size() > 1 ? concat(", ", sizes[1]) : "", "], got ", describe(view));
  require_data(name, view);
  to = {static_cast<Double*>(view.data()), FlatIndex(view)};
}

struct Arguments {
  Doubles<const double> lse, target_logit, target_weight, token_weight, weighted_logit_sum;
  Doubles<double> loss, d_lse, d_target_logit, d_weighted_logit_sum;
  double class_total = 0.0;
  double vocab = 0.0;
  std::int64_t tokens = 0;
  std::int64_t per_token = 0;
};

// The tensors by name, as in head/tensor_roles.h, with their rank: [N] or [N, K].
template <typename Visit, typename... Structs>
void each_input(const Visit& visit, Structs&... s) {
  visit("lse", 1, s.lse...);
  visit("target_logit", 2, s.target_logit...);
  visit("target_weight", 2, s.target_weight...);
  visit("token_weight", 1, s.token_weight...);
  visit("weighted_logit_sum", 1, s.weighted_logit_sum...);
}

template <typename Visit, typename... Structs>
void each_output(const Visit& visit, Structs&... s) {
  visit("loss", 1, s.loss...);
  visit("d_lse", 1, s.d_lse...);
  visit("d_target_logit", 2, s.d_target_logit...);
  visit("d_weighted_logit_sum", 1, s.d_weighted_logit_sum...);
}

Arguments arguments_from(const logitless_token_loss_inputs* inputs,
                         const logitless_token_loss_outputs* outputs, const LossTerms& terms) {
  const logitless_token_loss_inputs in = read_struct(inputs, "inputs");
  const logitless_token_loss_outputs out = read_struct(outputs, "outputs");
  const TensorView target_logit = view_from(in.target_logit, "target_logit");
  require(target_logit.rank() == 2, "target_logit: expected f64[N, K], got ",
          target_logit.defined() ? describe(target_logit) : "none");
  require(in.lse != nullptr, "lse: expected f64[N], got none");
  require(in.weighted_logit_sum != nullptr || terms.label_smoothing == 0.0,
          "weighted_logit_sum: label_smoothing needs it, got none");
  require(in.vocab > 0, "vocab: expected a number > 0, got ", in.vocab);
  const std::array sizes{target_logit.size(0), target_logit.size(1)};

  Arguments a;
  NamedViews read_views, written_views;
  const auto reader = [&](NamedViews& views) {
    return [&](const char* name, std::size_t rank, auto& to, const logitless_tensor* tensor) {
      const TensorView view = view_from(tensor, name);
      read(name, view, std::span(sizes).first(rank), to);
      views.add({name, view});
    };
  };
  each_input(reader(read_views), a, in);
  each_output(reader(written_views), a, out);
  for (const NamedView& output : std::span<const NamedView>(written_views))
    require_own_elements(output.name, output.view);
  require_apart(written_views, read_views);
  a.class_total = in.class_total;
  a.vocab = static_cast<double>(in.vocab);
  a.tokens = sizes[0];
  a.per_token = sizes[1];
  return a;
}

void write_loss(const LossTerms& terms, const Arguments& a, std::int64_t i) {
  const double lse = a.lse[i];
  // A softmax with a logit of +inf is NaN.
  const double subtracted = lse == INFINITY ? NAN : lse;
  TokenLoss loss(terms, a.token_weight ? a.token_weight[i] : 1.0, 1.0);
  for (std::int64_t slot = i * a.per_token; slot < (i + 1) * a.per_token; ++slot) {
    const double d_target = loss.add_target(a.target_weight ? a.target_weight[slot] : 1.0, 1.0,
                                            a.target_logit[slot] - subtracted);
    if (a.d_target_logit) a.d_target_logit[slot] = d_target;
  }
  const double d_sum =
      loss.smooths() ? loss.add_smoothing(lse, a.weighted_logit_sum[i], a.class_total, a.vocab)
                     : 0.0;
  if (a.d_weighted_logit_sum) a.d_weighted_logit_sum[i] = d_sum;
  const double d_lse = loss.add_lse(lse);
  if (a.d_lse) a.d_lse[i] = d_lse;
  if (a.loss) a.loss[i] = loss.value();
}

}  // namespace

logitless_status logitless_token_losses(const logitless_loss_terms* terms,
                                        const logitless_token_loss_inputs* inputs,
                                        const logitless_token_loss_outputs* outputs) {
  return guarded([&] {
    const logitless_loss_terms c = read_optional_struct(terms, "terms");
    require_loss_numbers(c);
    const LossTerms wanted = loss_terms(c);
    const Arguments a = arguments_from(inputs, outputs, wanted);
    for (std::int64_t i = 0; i < a.tokens; ++i) write_loss(wanted, a, i);
  });
}
