// The state of a FarController as a safetensors file.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/hash.h"
#include "core/safetensors.h"
#include "head/far/controller.h"
#include "head/far/order_file.h"

namespace logitless {
namespace {

// Sizes of the saved state besides orders, in the order of the file. The `Before` sizes are those
// of files that precede the change to far_backward.
constexpr std::size_t kCounts = 20, kCountsBefore = 16;
constexpr std::size_t kNumbers = 6, kNumbersBefore = 4;
constexpr std::size_t kTensorsBeforeOrders = 2;

// Reads all values of a state, or the first `before` of a state saved by an older version.
template <typename T, std::size_t kCount>
void read_values(const ConstTensorView& from, DType dtype, std::size_t before,
                 const std::string& path, const char* name, std::array<T, kCount>& to) {
  const auto count = static_cast<std::size_t>(from.numel());
  require(from.dtype() == dtype && (count == kCount || count == before), path, ": ", name,
          ": expected ", name_of(dtype), "[", kCount, "], got ", describe(from));
  std::memcpy(to.data(), from.data(), count * sizeof(T));
}

}  // namespace

std::vector<std::int64_t> FarController::counts() const {
  const FarFieldReport& r = s_.report;
  return {r.steps,   r.dense_steps, r.repeated_steps, r.audits,     r.refreshes,
          r.far,     s_.order_step, s_.takeover,      s_.interval,  s_.next_refresh,
          s_.wait,   s_.last_audit, s_.far_steps,     s_.trials,    s_.trial_due,
          s_.misses, s_.backward,   s_.retry_both,    s_.both_wait, s_.backward_steps};
}

std::vector<double> FarController::numbers() const {
  const FarFieldReport& r = s_.report;
  return {r.last_error,    r.worst_accepted_error, r.tau,
          r.mean_selected, s_.both_missed,         s_.other_tau};
}

// Returns a name of the contents of both orders; empty without. Moments follow from the weights
// that the other arrays were made of.
const std::string& FarController::orders_name() {
  const std::array<const VocabOrder*, 2> orders = {&s_.order, &s_.pending};
  const auto same = [](const VocabOrder* a, const VocabOrder& b) {
    return a->empty() ? b.empty() : !b.empty() && a->vocab_ids().data() == b.vocab_ids().data();
  };
  if (std::equal(orders.begin(), orders.end(), named_.begin(), same)) return name_;
  std::string names;
  const auto add = [&](const auto& values) {
    const auto bytes = std::as_bytes(values);
    names += content_name({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  for (std::size_t k = 0; k < orders.size(); ++k) {
    named_[k] = *orders[k];
    if (orders[k]->empty()) continue;
    names += k == 0 ? "order" : "pending";
    add(orders[k]->vocab_ids());
    add(orders[k]->average());
    if (orders[k]->has_moments()) add(orders[k]->log2_caution());
  }
  name_ = names.empty() ? names : content_name(names);
  return name_;
}

// Calls `write(tensors, metadata)` with the state.
template <typename Write>
void FarController::write(Write&& write) {
  wait_for_order();
  const std::vector<std::int64_t> counts = this->counts();
  const std::vector<double> numbers = this->numbers();
  std::vector<NamedTensor> tensors = {
      {"counts", {counts.data(), DType::i64, {std::int64_t{kCounts}}}},
      {"numbers", {numbers.data(), DType::f64, {std::int64_t{kNumbers}}}}};
  if (!s_.order.empty()) append_order(s_.order, "order.", tensors);
  if (!s_.pending.empty()) append_order(s_.pending, "pending.", tensors);
  std::map<std::string, std::string> metadata = {
      {"kind", "logitless far field"},
      {"accuracy", std::string(name_of(options_.accuracy))},
      {"reason", s_.reason}};
  if (!s_.layout.empty()) metadata["layout"] = s_.layout;
  if (tensors.size() > kTensorsBeforeOrders) metadata["orders"] = orders_name();
  write(tensors, metadata);
}

void FarController::save(const std::string& path) {
  write([&](const auto& tensors, const auto& metadata) {
    write_safetensors(path, tensors, metadata);
  });
}

std::vector<std::byte> FarController::state() {
  std::vector<std::byte> made;
  write([&](const auto& tensors, const auto& metadata) {
    made = safetensors_bytes(tensors, metadata);
  });
  return made;
}

StateOutline FarController::outline() {
  StateOutline made;
  write([&](const auto& tensors, const auto& metadata) {
    made.front = safetensors_bytes(tensors, metadata, kTensorsBeforeOrders);
    made.bytes = made.front.size();
    for (const NamedTensor& tensor : std::span(tensors).subspan(kTensorsBeforeOrders))
      made.bytes += static_cast<std::size_t>(tensor.view.bytes());
  });
  made.orders = orders_name();
  return made;
}

void FarController::load(const std::string& path) { read(TensorFile(path), path); }

void FarController::set_state(std::span<const std::byte> state) {
  read(TensorFile(state, "state"), "state");
}

void FarController::read(const TensorFile& file, const std::string& path) {
  const auto& metadata = file.metadata();
  const auto kind = metadata.find("kind");
  require(kind != metadata.end() && kind->second == "logitless far field", path,
          ": expected the state of a FarFieldHead");
  const auto accuracy = metadata.find("accuracy");
  require(accuracy != metadata.end() && accuracy->second == name_of(options_.accuracy), path,
          ": saved with accuracy ", accuracy == metadata.end() ? "none" : accuracy->second,
          ", this head has ", name_of(options_.accuracy));
  const ConstTensorView counts = file.tensor("counts");
  const ConstTensorView numbers = file.tensor("numbers");
  std::array<std::int64_t, kCounts> c{};
  std::array<double, kNumbers> n{};
  read_values(counts, DType::i64, kCountsBefore, path, "counts", c);
  read_values(numbers, DType::f64, kNumbersBefore, path, "numbers", n);
  FarDecisions s;
  FarFieldReport& r = s.report;
  r.steps = c[0];
  r.dense_steps = c[1];
  r.repeated_steps = c[2];
  r.audits = c[3];
  r.refreshes = c[4];
  r.far = c[5] != 0;
  s.order_step = c[6];
  s.takeover = c[7];
  s.interval = c[8];
  s.next_refresh = c[9];
  s.wait = c[10];
  s.last_audit = c[11];
  s.far_steps = c[12];
  s.trials = static_cast<int>(c[13]);
  s.trial_due = c[14] != 0;
  s.misses = c[15];
  s.backward = c[16] != 0;
  s.retry_both = c[17];
  s.both_wait = c[18];
  s.backward_steps = c[19];
  r.last_error = n[0];
  r.worst_accepted_error = n[1];
  r.tau = n[2];
  r.mean_selected = n[3];
  s.both_missed = n[4];
  s.other_tau = numbers.numel() == kNumbers ? n[5] : kFirstTau;
  // Sums of these counts and of values that options allow fit in 64 bits.
  constexpr std::int64_t kMostCount = INT64_C(1) << 60;
  const bool counts_hold = std::all_of(c.begin(), c.end(), [](std::int64_t count) {
    return count >= -kMostCount && count <= kMostCount;
  });
  require(counts_hold && s.interval >= 1 && s.wait >= 0 && c[13] >= 0 && c[13] <= kTrials &&
              r.dense_steps >= 0 && r.steps >= r.dense_steps && r.repeated_steps >= 0 &&
              s.misses >= 0 && r.audits >= 0 && r.refreshes >= 0 && s.last_audit >= 0 &&
              s.far_steps >= 0 && s.retry_both >= 0 && s.both_wait >= 0 && s.backward_steps >= 0 &&
              (!s.backward || options_.accuracy == Accuracy::far_both),
          path, ": counts: no state of a FarFieldHead");
  require(r.tau >= kLeastTau && r.tau <= kMostTau && r.mean_selected >= 0.0 &&
              r.mean_selected <= 1.0 && r.worst_accepted_error >= 0.0 && s.both_missed >= 0.0 &&
              s.both_missed <= 1.0 && s.other_tau >= kLeastTau && s.other_tau <= kMostTau,
          path, ": numbers: no state of a FarFieldHead");
  if (file.contains("order.vocab_ids")) s.order = order_of(file, path, "order.");
  if (file.contains("pending.vocab_ids")) s.pending = order_of(file, path, "pending.");
  s.making_vocab = s.pending.vocab();
  require((s.takeover >= 0) == !s.pending.empty(), path, ": pending order: expected ",
          s.takeover >= 0 ? "one" : "none");
  const auto reason = metadata.find("reason");
  if (reason != metadata.end()) s.reason = reason->second;
  const auto layout = metadata.find("layout");
  if (layout != metadata.end()) s.layout = layout->second;
  making_ = {};
  s_ = std::move(s);
}

}  // namespace logitless
