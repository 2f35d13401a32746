// XLA FFI handler of a FarFieldHead's step, whose state is an input and an output: 8 bytes of
// length, the bytes of FarFieldHead::state(), and zeros. All zeros: before the first step.
//
// On a GPU the handler waits for the stream, before the step to read the state and after it for the
// errors of the step. It is therefore not recorded into command buffers. The workspace is XLA's
// scratch memory for the time of the call. Orders take memory of the process.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "head/far/head.h"
#include "kernels/device/head.h"
#include "kernels/device/stream.h"
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

constexpr std::size_t kLength = sizeof(std::uint64_t);
constexpr std::size_t kAlignment = 256;

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
  options.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
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
  read_loss(call, c.in, c.out, {{"state", &c.state}}, {{"state", &c.next_state}});
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

// A head between two calls, and page-locked memory for the states before and after a step.
struct HeldHead {
  std::string key;
  std::unique_ptr<FarFieldHead> head;
  std::size_t bytes = 0;  // of `after`, the state that the head has
  std::shared_ptr<void> before, after;
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

// Fetches the state into `held.before`, and makes its head one that has this state. Returns the
// bytes of length and state.
std::size_t fetch_state(HeldHead& held, const FarCall& c, const Place& place, const Call& call,
                        const FarFieldOptions& options) {
  const auto room = static_cast<std::size_t>(c.state.bytes());
  if (held.before == nullptr) {
    held.before = cuda::make_pinned(room);
    held.after = cuda::make_pinned(room);
  }
  auto* const before = static_cast<std::byte*>(held.before.get());
  cuda::copy_to_host(before, c.state.data(), kLength, place.stream);
  const std::size_t length = checked_length(before, room);
  cuda::copy_to_host(before + kLength, static_cast<const std::byte*>(c.state.data()) + kLength,
                     length, place.stream);
  const std::size_t bytes = kLength + length;
  const bool same = held.head != nullptr && held.bytes == bytes &&
                    std::memcmp(held.after.get(), before, bytes) == 0;
  if (!same) {
    held.head = std::make_unique<FarFieldHead>(context_of(place, call), options);
    set_state(*held.head, before, length);
  }
  return bytes;
}

// Returns begin and end of the blocks in which two arrays differ.
std::pair<std::size_t, std::size_t> changed_range(const std::byte* a, const std::byte* b,
                                                  std::size_t bytes) {
  constexpr std::size_t kBlock = 4096;
  std::size_t first = bytes, end = 0;
  for (std::size_t at = 0; at < bytes; at += kBlock) {
    const std::size_t size = std::min(kBlock, bytes - at);
    if (std::memcmp(a + at, b + at, size) == 0) continue;
    first = std::min(first, at);
    end = at + size;
  }
  return {std::min(first, end), end};
}

// Writes the head's state to the next one in device memory. The old one has `before` bytes. Only
// what has changed is copied from the host.
void enqueue_state(HeldHead& held, const FarCall& c, std::size_t before, cuda::Stream stream) {
  const auto room = static_cast<std::size_t>(c.state.bytes());
  auto* const made = static_cast<std::byte*>(held.after.get());
  held.bytes = put_state(*held.head, made, room);
  const std::size_t common = std::min(before, held.bytes);
  auto* const to = static_cast<std::byte*>(c.next_state.data());
  const auto put = [&](std::size_t first, std::size_t end) {
    if (end > first) cuda::copy_async(to + first, made + first, end - first, stream);
  };
  if (to != c.state.data()) cuda::copy_async(to, c.state.data(), common, stream);
  const auto [first, end] =
      changed_range(made, static_cast<const std::byte*>(held.before.get()), common);
  put(first, end);
  put(common, held.bytes);
  if (room > held.bytes) cuda::fill_device(to + held.bytes, 0, room - held.bytes, stream);
}

void step_on_gpu(const Place& place, Call& call) {
  const FarCall c = read(call);
  const FarFieldOptions options = far_options(call);
  HeldHead held = held_heads().take(key_of(place, call, options));
  const std::size_t before = fetch_state(held, c, place, call, options);
  FarFieldHead& head = *held.head;
  FarPlans& plans = FarFieldAccess::of(head).plans;
  plans.borrow([&](std::size_t bytes) {
    const std::optional<void*> data = place.scratch->Allocate(bytes + kAlignment);
    if (!data.has_value())
      throw DeviceError(concat("far_field_step: XLA has no ", bytes, " bytes for its workspace"));
    return aligned_workspace({*data, bytes + kAlignment});
  });
  head.step(c.options, c.in, c.out);
  enqueue_state(held, c, before, place.stream);
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
