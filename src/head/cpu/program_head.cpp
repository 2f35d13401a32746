#include "head/program_head.h"

#include "core/element.h"
#include "head/cpu/engine.h"

namespace logitless::cpu {
namespace {

// Reads the program's targets, and exchanges the outputs and gradients of each token.
class Tokens {
 public:
  explicit Tokens(const ProgramHead& head) : head_(head), at_(head.targets) {}

  // The engine refuses targets outside the vocabulary: their rows read entry 0 and ignore it.
  void begin() const {
    auto* vocab_ids = reinterpret_cast<std::int64_t*>(head_.scratch);
    for (std::int64_t row = 0; row < head_.call.shape.tokens; ++row) {
      const std::int64_t id = target(row);
      vocab_ids[row] = head_.ignored && id == *head_.ignored ? -1 : has_logit(id) ? id : 0;
      head_.lse[row] = head_.logit[row] = 0.0f;
      if (head_.log_prob != nullptr) head_.log_prob[row] = 0.0f;
    }
  }
  void write(const TokenResult& r, TokenCoefficients& coefficients) const {
    head_.lse[r.row] = static_cast<float>(r.lse);
    const bool has = has_logit(target(r.row));
    head_.logit[r.row] = has ? r.target_logit[0] : 0.0f;
    if (head_.log_prob != nullptr && has) head_.log_prob[r.row] = static_cast<float>(r.log_prob(0));
    if (head_.d_lse != nullptr) give_cotangents(r, coefficients);
  }
  void give_cotangents(const TokenResult& r, TokenCoefficients& coefficients) const {
    coefficients.cotangent.lse = head_.d_lse[r.row];
    if (has_logit(target(r.row))) coefficients.delta[0] = head_.d_logit[r.row];
  }

 private:
  std::int64_t target(std::int64_t row) const {
    return load_index(head_.targets.data(), head_.targets.dtype(), at_(row));
  }
  bool has_logit(std::int64_t id) const { return id >= 0 && id < head_.call.shape.vocab; }

  const ProgramHead& head_;
  FlatIndex at_;
};

}  // namespace

std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, const HeadCall& call,
                                                   FarRun far) {
  const Tokens tokens(head);
  tokens.begin();
  Engine engine(call);
  engine.run([&](const TokenResult& r, TokenCoefficients& coefficients) {
    tokens.write(r, coefficients);
  });
  if (far == FarRun::none) return {};
  engine.audit([&](const TokenResult& r, TokenCoefficients& coefficients) {
    tokens.give_cotangents(r, coefficients);
  });
  return engine.far_statistics();
}

}  // namespace logitless::cpu
