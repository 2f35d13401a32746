#include "comm/collective_calls.h"

namespace logitless {

CollectiveCalls::CollectiveCalls(std::shared_ptr<Communicator> communicator, std::uint64_t plan)
    : communicator_(std::move(communicator)) {
  header_.plan = plan;
  all_.reserve(static_cast<std::size_t>(communicator_->size()));
}

void CollectiveCalls::all_gather(const void* mine, void* all, std::size_t bytes_each,
                                 void* stream) {
  barrier_before(ExchangeKind::all_gather, bytes_each);
  communicator_->all_gather(mine, all, bytes_each, stream);
}

void CollectiveCalls::all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                                 void* stream) {
  barrier_before(ExchangeKind::all_to_all, bytes_each);
  communicator_->all_to_all(slices, slices_of_all, bytes_each, stream);
}

void CollectiveCalls::require_same_tokens(std::int64_t count, std::uint64_t order) {
  if (!on_device() || header_.exchange > 0) return;
  header_.order = static_cast<std::uint32_t>(order ^ order >> 32);
  barrier_at(Stage::exchange, ExchangeKind::tokens, static_cast<std::size_t>(count));
}

void CollectiveCalls::bad_target(std::int64_t position, std::int64_t target) {
  if (header_.status != Status::ok) return;
  header_.status = Status::bad_target;
  header_.bad_position = position;
  header_.bad_target = target;
}

void CollectiveCalls::begin() {
  header_.call += 1;
  header_.exchange = 0;
  header_.status = Status::ok;
  header_.order = 0;
  text_.clear();
  propagated_ = false;
}

void CollectiveCalls::end() {
  if (on_device() && header_.exchange > 0) return;
  barrier_at(Stage::end, ExchangeKind::none, 0);
}

void CollectiveCalls::propagate(const std::exception_ptr& exception) noexcept {
  if (propagated_) return;
  try {
    header_.status = status_of(exception, text_);
    if (on_device() && header_.exchange > 0) return communicator_->abort(text_);
    barrier_at(Stage::end, ExchangeKind::none, 0);
  } catch (...) {
    // The other ranks could not be informed; this rank rethrows its own error.
  }
}

void CollectiveCalls::barrier_before(ExchangeKind kind, std::size_t bytes_each) {
  if (!on_device() || header_.exchange == 0) barrier_at(Stage::exchange, kind, bytes_each);
}

void CollectiveCalls::barrier_at(Stage stage, ExchangeKind kind, std::size_t bytes_each) {
  header_.stage = stage;
  header_.kind = kind;
  header_.bytes_each = bytes_each;
  if (stage == Stage::exchange) header_.exchange += 1;
  // A barrier throws on all ranks, or the group has failed: no further report is needed.
  propagated_ = true;
  exchange_status(*communicator_, header_, text_, all_);
  propagated_ = false;
}

}  // namespace logitless
