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

// Throws unless the tensor is f64 of these sizes and has data.
template <typename Double>
Doubles<Double> doubles_of(const char* name, const TensorView& view,
                           std::span<const std::int64_t> sizes) {
  if (!view.defined()) return {};
  bool same = view.rank() == static_cast<int>(sizes.size());
  for (int d = 0; same && d < view.rank(); ++d) {
    same = view.size(d) == sizes[static_cast<std::size_t>(d)];
  }
  require(same && view.dtype() == DType::f64, name, ": expected f64[", sizes[0],
          sizes.size() > 1 ? concat(", ", sizes[1]) : "", "], got ", describe(view));
  require_data(name, view);
  return {static_cast<Double*>(view.data()), FlatIndex(view)};
}

struct Arguments {
  Doubles<const double> lse, target_logit, target_weight, token_weight, weighted_sum;
  Doubles<double> loss, d_lse, d_target_logit, d_weighted_sum;
  double class_total = 0.0;
  double vocab = 0.0;
  std::int64_t tokens = 0;
  std::int64_t per_token = 0;
};

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
  const std::array both{target_logit.size(0), target_logit.size(1)};
  const std::span token(both.data(), 1);

  const TensorView lse = view_from(in.lse, "lse");
  const TensorView target_weight = view_from(in.target_weight, "target_weight");
  const TensorView token_weight = view_from(in.token_weight, "token_weight");
  const TensorView weighted_sum = view_from(in.weighted_logit_sum, "weighted_logit_sum");
  const TensorView loss = view_from(out.loss, "loss");
  const TensorView d_lse = view_from(out.d_lse, "d_lse");
  const TensorView d_target_logit = view_from(out.d_target_logit, "d_target_logit");
  const TensorView d_weighted_sum = view_from(out.d_weighted_logit_sum, "d_weighted_logit_sum");

  Arguments a;
  a.lse = doubles_of<const double>("lse", lse, token);
  a.target_logit = doubles_of<const double>("target_logit", target_logit, both);
  a.target_weight = doubles_of<const double>("target_weight", target_weight, both);
  a.token_weight = doubles_of<const double>("token_weight", token_weight, token);
  a.weighted_sum = doubles_of<const double>("weighted_logit_sum", weighted_sum, token);
  a.loss = doubles_of<double>("loss", loss, token);
  a.d_lse = doubles_of<double>("d_lse", d_lse, token);
  a.d_target_logit = doubles_of<double>("d_target_logit", d_target_logit, both);
  a.d_weighted_sum = doubles_of<double>("d_weighted_logit_sum", d_weighted_sum, token);
  for (const NamedView& output : {NamedView{"loss", loss}, NamedView{"d_lse", d_lse},
                                  NamedView{"d_target_logit", d_target_logit},
                                  NamedView{"d_weighted_logit_sum", d_weighted_sum}}) {
    require_own_elements(output.name, output.view);
  }
  require_apart({{"loss", loss},
                 {"d_lse", d_lse},
                 {"d_target_logit", d_target_logit},
                 {"d_weighted_logit_sum", d_weighted_sum}},
                {{"lse", lse},
                 {"target_logit", target_logit},
                 {"target_weight", target_weight},
                 {"token_weight", token_weight},
                 {"weighted_logit_sum", weighted_sum}});
  a.class_total = in.class_total;
  a.vocab = static_cast<double>(in.vocab);
  a.tokens = both[0];
  a.per_token = both[1];
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
      loss.smooths() ? loss.add_smoothing(lse, a.weighted_sum[i], a.class_total, a.vocab) : 0.0;
  if (a.d_weighted_sum) a.d_weighted_sum[i] = d_sum;
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
