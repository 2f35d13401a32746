// XLA FFI handler of a FarFieldHead's step, whose state is an input and an output: 8 bytes of
// length, the bytes of FarFieldHead::state(), and zeros. All zeros: before the first step.
//
// On a GPU the handler waits for the stream twice: before the step to read the front of the state,
// and after it for its errors. It is not recorded into command buffers therefore. The host reads
// and writes the rest of the state, its orders, only where they change. The workspace is XLA's
// scratch memory for the time of the call. Orders take memory of the process.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "head/far/head.h"
#include "head/tensor_roles.h"
#include "kernels/device/head.h"
#include "kernels/device/stream.h"
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

constexpr std::size_t kLength = sizeof(std::uint64_t);

FarFieldOptions far_options(const Call& call) {
  FarFieldOptions options;
  options.accuracy = static_cast<Accuracy>(call.attribute<std::int64_t>("accuracy"));
  options.error = call.attribute<double>("error");
  options.sample_every = call.attribute<std::int64_t>("sample_every");
  options.audit_rows = call.attribute<std::int64_t>("audit_rows");
  options.audit_every = call.attribute<std::int64_t>("audit_every");
  options.refresh_every = call.attribute<std::int64_t>("refresh_every");
  options.refresh_delay = call.attribute<std::int64_t>("refresh_delay");
  options.sample_rows = call.attribute<std::int64_t>("sample_rows");
  options.memory_budget = budget_of(call);
  return options;
}

struct FarCall {
  CrossEntropyOptions options;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  ConstTensorView state;
  TensorView next_state;
};

FarCall read(Call& call) {
  FarCall c;
  c.options = loss_options(call);
  call.read([&](const SlotVisitor& visit) {
    each_loss_input(visit, c.in);
    each_loss_output(visit, c.out);
    visit("state", c.state);
    visit("state", c.next_state);
  });
  check(static_cast<std::size_t>(c.state.bytes()) >= kLength &&
            c.state.bytes() == c.next_state.bytes(),
        "state: ", c.state.bytes(), " bytes, and ", c.next_state.bytes(), " of the next one");
  return c;
}

// Returns the length at the start of a state of `bytes` bytes.
std::size_t checked_length(const void* state, std::size_t bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, state, kLength);
  require(length <= bytes - kLength, "state: the first 8 bytes tell of ", length, " bytes, but ",
          bytes - kLength, " follow");
  return static_cast<std::size_t>(length);
}

void set_state(FarFieldHead& head, const std::byte* state, std::size_t length) {
  if (length > 0) head.set_state({state + kLength, length});
}

// Writes length and state to `to`, of `bytes` bytes. Returns the bytes written.
std::size_t put_state(const FarFieldHead& head, std::byte* to, std::size_t bytes) {
  const std::vector<std::byte> made = head.state();
  const std::uint64_t length = made.size();
  check(bytes >= kLength + made.size(), "state: ", made.size(), " bytes for room of ", bytes);
  std::memcpy(to, &length, kLength);
  std::copy(made.begin(), made.end(), to + kLength);
  return kLength + made.size();
}

void step_on_cpu(const Place& place, Call& call) {
  const FarCall c = read(call);
  const auto bytes = static_cast<std::size_t>(c.state.bytes());
  FarFieldHead head(context_of(place, call), far_options(call));
  set_state(head, static_cast<const std::byte*>(c.state.data()),
            checked_length(c.state.data(), bytes));
  head.step(c.options, c.in, c.out);
  auto* const to = static_cast<std::byte*>(c.next_state.data());
  const std::size_t written = put_state(head, to, bytes);
  std::fill(to + written, to + bytes, std::byte{0});
}

// ---- On a GPU

// Bytes at the start of a state that are read first: length, names and counts of every state.
constexpr std::size_t kFront = 16384;

// A head between two calls.
struct HeldHead {
  std::string key;
  std::unique_ptr<FarFieldHead> head;
  StateOutline outline;          // of the state that the head has
  std::shared_ptr<void> memory;  // page-locked, 2 kFront bytes
};

// Heads that have just taken a step. One that is given the state that it has already needs neither
// to read it nor to copy its orders to the device. Heads are equal to new ones otherwise, so that a
// step stays a function of its inputs.
class HeldHeads {
 public:
  // Removes and returns the last one of this key; an empty one if there is none.
  HeldHead take(std::string key) {
    const std::lock_guard lock(mutex_);
    for (auto held = heads_.begin(); held != heads_.end(); ++held) {
      if (held->key != key) continue;
      HeldHead found = std::move(*held);
      heads_.erase(held);
      return found;
    }
    HeldHead made;
    made.key = std::move(key);
    return made;
  }
  void put(HeldHead held) {
    std::list<HeldHead> dropped;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    heads_.push_front(std::move(held));
    if (heads_.size() > kMost) dropped.splice(dropped.begin(), heads_, std::prev(heads_.end()));
  }

 private:
  static constexpr std::size_t kMost = 16;
  std::mutex mutex_;
  std::list<HeldHead> heads_;  // the last used first
};

HeldHeads& held_heads() {
  static auto* const heads = new HeldHeads;  // outlives XLA's threads and the driver
  return *heads;
}

// Returns equal texts for calls that equal heads can serve.
std::string key_of(const Place& place, const Call& call, const FarFieldOptions& options) {
  return concat("device ", place.device_index, " stream ", place.stream, " accuracy ",
                static_cast<int>(options.accuracy), " error ", options.error, " ",
                options.sample_every, " ", options.audit_rows, " ", options.audit_every, " ",
                options.refresh_every, " ", options.refresh_delay, " ", options.sample_rows, " ",
                options.memory_budget, " ", call.signature());
}

// Returns true if a state of `length` bytes that begins with `front` is that of the outline. Its
// names tell orders apart, so that these are not compared.
bool is_of(const StateOutline& outline, std::size_t length, std::span<const std::byte> front) {
  return outline.bytes == length && outline.front.size() <= front.size() &&
         std::equal(outline.front.begin(), outline.front.end(), front.begin());
}

// Makes the held head one that has the given state. Returns whether it had it already.
bool read_state(HeldHead& held, const FarCall& c, const Place& place, const Call& call,
                const FarFieldOptions& options) {
  const auto room = static_cast<std::size_t>(c.state.bytes());
  if (held.memory == nullptr) held.memory = cuda::make_pinned(2 * kFront);
  auto* const front = static_cast<std::byte*>(held.memory.get());
  const std::size_t read = std::min(room, kFront);
  cuda::copy_to_host(front, c.state.data(), read, place.stream);
  const std::size_t length = checked_length(front, room);
  const auto given = std::span(front, read).subspan(kLength);
  if (held.head != nullptr && is_of(held.outline, length, given)) return true;
  held.head = std::make_unique<FarFieldHead>(context_of(place, call), options);
  if (length == 0) return false;
  std::vector<std::byte> whole(length);
  const std::size_t known = std::min(length, given.size());
  std::copy_n(given.begin(), known, whole.begin());
  if (length > known)
    cuda::copy_to_host(whole.data() + known,
                       static_cast<const std::byte*>(c.state.data()) + kLength + known,
                       length - known, place.stream);
  held.head->set_state(whole);
  return false;
}

// Writes the head's state to the next one in device memory. `before`: the outline of the given one,
// null if it is unknown. Orders that have not changed are copied from there. Returns host memory
// that must live until the stream has passed.
std::vector<std::byte> enqueue_state(HeldHead& held, const FarCall& c, const StateOutline* before,
                                     cuda::Stream stream) {
  const auto room = static_cast<std::size_t>(c.state.bytes());
  held.outline = FarFieldAccess::of(*held.head).controller.outline();
  const StateOutline& made = held.outline;
  check(room >= kLength + made.bytes, "state: ", made.bytes, " bytes for room of ", room);
  auto* const to = static_cast<std::byte*>(c.next_state.data());
  const auto* const from = static_cast<const std::byte*>(c.state.data());
  const std::size_t orders = made.bytes - made.front.size();
  const bool kept = before != nullptr && before->orders == made.orders &&
                    before->bytes - before->front.size() == orders &&
                    (to != from || before->front.size() == made.front.size()) &&
                    kLength + made.front.size() <= kFront;
  std::vector<std::byte> whole;
  if (kept) {
    auto* const front = static_cast<std::byte*>(held.memory.get()) + kFront;
    const std::uint64_t length = made.bytes;
    std::memcpy(front, &length, kLength);
    std::copy(made.front.begin(), made.front.end(), front + kLength);
    if (to != from && orders > 0)
      cuda::copy_async(to + kLength + made.front.size(), from + kLength + before->front.size(),
                       orders, stream);
    cuda::copy_async(to, front, kLength + made.front.size(), stream);
  } else {
    whole.resize(kLength + made.bytes);
    put_state(*held.head, whole.data(), whole.size());
    cuda::copy_async(to, whole.data(), whole.size(), stream);
  }
  const std::size_t written = kLength + made.bytes;
  if (room > written) cuda::fill_device(to + written, 0, room - written, stream);
  return whole;
}

void step_on_gpu(const Place& place, Call& call) {
  const FarCall c = read(call);
  const FarFieldOptions options = far_options(call);
  HeldHead held = held_heads().take(key_of(place, call, options));
  const bool known = read_state(held, c, place, call, options);
  const StateOutline before = held.outline;
  FarFieldHead& head = *held.head;
  FarPlans& plans = FarFieldAccess::of(head).plans;
  plans.borrow([&](std::size_t bytes) { return scratch_of(place, "far_field_step", bytes); });
  head.step(c.options, c.in, c.out);
  const auto whole = enqueue_state(held, c, known ? &before : nullptr, place.stream);
  head.statistics();  // waits, and throws for a target out of range
  plans.borrow(nullptr);
  held_heads().put(std::move(held));
}

void run_far_field_step(const Place& place, Call call) {
  place.device == DeviceKind::cpu ? step_on_cpu(place, call) : step_on_gpu(place, call);
}

}  // namespace
}  // namespace logitless::xla_handlers

using logitless::xla_handlers::run_far_field_step;

LOGITLESS_XLA_HANDLERS_WITH_SCRATCH(far_field_step);
