// Communicator of the caller's own collectives. It numbers calls, and fails permanently at the
// first failure.
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "comm/call_text.h"
#include "core/check.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

class Callbacks final : public Communicator {
 public:
  explicit Callbacks(CommunicatorCallbacks callbacks) : callbacks_(std::move(callbacks)) {}

  int rank() const override { return callbacks_.rank; }
  int size() const override { return callbacks_.size; }
  DeviceKind device() const override { return callbacks_.device; }

  void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream) override {
    exchange("all_gather", bytes_each,
             [&] { callbacks_.all_gather(mine, all, bytes_each, stream); });
  }
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                  void* stream) override {
    exchange("all_to_all", bytes_each,
             [&] { callbacks_.all_to_all(slices, slices_of_all, bytes_each, stream); });
  }
  void all_gather_host(const void* mine, void* all, std::size_t bytes_each) override {
    if (device() == DeviceKind::cpu) return all_gather(mine, all, bytes_each, nullptr);
    exchange("all_gather_host", bytes_each,
             [&] { callbacks_.all_gather_host(mine, all, bytes_each); });
  }

  bool capturable() const override { return callbacks_.capturable; }

  void wait(void* stream, milliseconds limit) override {
    throw_if_failed();
    if (device() == DeviceKind::cpu) return;
    run([&] { return concat("wait after call ", calls_); },
        [&] { callbacks_.wait(stream, limit); });
  }

  void check() override { throw_if_failed(); }

  void abort(std::string_view reason) noexcept override {
    set_failure(concat("communicator: rank ", rank(), " gave up: ", reason));
    // Aborts even if a callback has failed here: the other ranks may not know.
    if (!aborted_.exchange(true) && callbacks_.abort) callbacks_.abort(reason);
  }

 private:
  template <typename F>
  void exchange(std::string_view kind, std::size_t bytes_each, const F& call) {
    throw_if_failed();
    ++calls_;
    if (bytes_each == 0) return;
    run([&] { return call_text(calls_, kind, bytes_each); }, call);
  }

  template <typename Text, typename F>
  void run(const Text& text, const F& call) {
    std::string why;
    try {
      return call();
    } catch (const std::exception& e) {
      why = e.what();
    } catch (...) {
      why = "an exception of unknown type";
    }
    set_failure(concat("communicator: ", text(), " on rank ", rank(), ": ", why));
    throw_if_failed();
  }

  // Only the first failure is kept.
  void set_failure(const std::string& failure) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = failure;
  }
  void throw_if_failed() const {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw DeviceError(failure_);
  }

  const CommunicatorCallbacks callbacks_;
  std::uint64_t calls_ = 0;
  mutable std::mutex mutex_;  // abort() may be called from any thread
  std::string failure_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::shared_ptr<Communicator> make_callbacks(CommunicatorCallbacks callbacks) {
  const CommunicatorCallbacks& c = callbacks;
  require(c.size >= 1, "make_callbacks: size: expected 1 or more, got ", c.size);
  require(c.rank >= 0 && c.rank < c.size, "make_callbacks: rank: expected one in [0, ", c.size,
          "), got ", c.rank);
  require(c.all_gather != nullptr, "make_callbacks: all_gather: expected a function, got none");
  require(c.all_to_all != nullptr, "make_callbacks: all_to_all: expected a function, got none");
  const bool gpu = c.device == DeviceKind::cuda;
  require(gpu || !c.capturable, "make_callbacks: capturable: the CPU captures nothing");
  const auto check = [&](bool given, const char* name) {
    require(given || !gpu, "make_callbacks: ", name, ": expected a function, got none");
    require(gpu || !given, "make_callbacks: ", name, ": only a GPU's communicator has one");
  };
  check(c.all_gather_host != nullptr, "all_gather_host");
  check(c.wait != nullptr, "wait");
  return std::make_shared<Callbacks>(std::move(callbacks));
}

}  // namespace logitless
