#include "head/far/replicas.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "comm/digest.h"
#include "core/safetensors.h"
#include "head/far/order_file.h"
#include "logitless/tensor_file.h"

namespace logitless {
namespace {

// Bytes that each rank contributes to one exchange of an order.
constexpr std::size_t kSlice = std::size_t{1} << 20;

void add_facts(const FarFacts& common, PlanDigest& digest) {
  for (const auto& [name, text] : common) digest.same(name, text);
}

// Exchanges the values of all ranks with all their bits.
void add_number(PlanDigest& digest, const char* name, double value) {
  digest.own(name, std::bit_cast<std::int64_t>(value));
}
double number_of(const Agreement& agreed, int rank, const char* name) {
  return std::bit_cast<double>(agreed.value_of(rank, name));
}

}  // namespace

FarFieldStatistics far_statistics_of_replicas(Communicator& ranks, const FarFacts& common,
                                              const FarFieldStatistics& mine) {
  const Agreement agreed = agree(ranks, [&](PlanDigest& digest) {
    add_facts(common, digest);
    digest.own("fallback", mine.dense_fallback);
    digest.own("audited", mine.audited_tokens);
    add_number(digest, "selected", mine.selected);
    add_number(digest, "error", mine.audited_error);
    add_number(digest, "lse error", mine.audited_lse_error);
    add_number(digest, "lse error, most", mine.audited_lse_error_max);
  });
  FarFieldStatistics out = mine;
  out.dense_fallback = false;
  out.audited_tokens = 0;
  out.audited_lse_error_max = 0.0;
  double error = 0.0, lse_error = 0.0, selected = 0.0, keepers = 0.0;
  for (int r = 0; r < ranks.size(); ++r) {
    out.dense_fallback = out.dense_fallback || agreed.value_of(r, "fallback") != 0;
    const double of_rank = number_of(agreed, r, "selected");
    if (of_rank < 1.0 || agreed.value_of(r, "fallback") != 0) {  // or the rank has no pairs
      selected += of_rank;
      keepers += 1.0;
    }
    const std::int64_t tokens = agreed.value_of(r, "audited");
    if (tokens == 0 || number_of(agreed, r, "error") == 0.0) continue;
    out.audited_tokens += tokens;
    const auto count = static_cast<double>(tokens);
    error += count * std::pow(number_of(agreed, r, "error"), 2);
    lse_error += count * std::pow(number_of(agreed, r, "lse error"), 2);
    const double most = number_of(agreed, r, "lse error, most");
    if (most > out.audited_lse_error_max || std::isnan(most)) out.audited_lse_error_max = most;
  }
  out.selected = keepers > 0.0 ? selected / keepers : 1.0;
  if (out.audited_tokens == 0) return out;
  const auto count = static_cast<double>(out.audited_tokens);
  out.audited_error = std::sqrt(error / count);
  out.audited_lse_error = std::sqrt(lse_error / count);
  return out;
}

ReplicasOrder order_of_replicas(Communicator& ranks, const FarFacts& common, bool tokens, bool far,
                                const std::function<VocabOrder()>& make) {
  const Agreement agreed = agree(ranks, [&](PlanDigest& digest) {
    add_facts(common, digest);
    digest.own("tokens", tokens);
    digest.own("far", far);
  });
  int maker = 0;
  while (maker < ranks.size() && agreed.value_of(maker, "tokens") == 0) ++maker;
  if (maker == ranks.size()) return {};
  for (int r = maker; r < ranks.size(); ++r)
    if (agreed.value_of(r, "tokens") != 0 && agreed.value_of(r, "far") == 0)
      return {.tokens = true};
  std::vector<std::byte> made;
  const Agreement sizes = agree(ranks, [&](PlanDigest& digest) {
    if (ranks.rank() == maker) {
      const VocabOrder order = make();
      std::vector<NamedTensor> tensors;
      append_order(order, "order.", tensors);
      made = safetensors_bytes(tensors, {});
    }
    digest.own("bytes", static_cast<std::int64_t>(made.size()));
  });
  const auto bytes = static_cast<std::size_t>(sizes.value_of(maker, "bytes"));
  made.resize(bytes);
  std::vector<std::byte> all(std::min(bytes, kSlice) * static_cast<std::size_t>(ranks.size()));
  for (std::size_t first = 0; first < bytes; first += kSlice) {
    const std::size_t count = std::min(kSlice, bytes - first);
    ranks.all_gather_host(made.data() + first, all.data(), count);
    std::copy_n(all.data() + static_cast<std::size_t>(maker) * count, count, made.data() + first);
  }
  const std::string name = "order of the ranks";
  return {true, order_of(TensorFile(made, name), name, "order.")};
}

}  // namespace logitless
