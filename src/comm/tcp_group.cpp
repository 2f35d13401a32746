// Communicator of processes with a TCP connection between each two. A call sends a header and its
// data to each rank and receives theirs, all concurrently. Differing, failed and vanished ranks are
// recognised by what arrives.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/call_text.h"
#include "comm/socket.h"
#include "comm/tcp_join.h"
#include "comm/tcp_wire.h"
#include "core/check.h"
#include "core/printable.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Time to report a failure to the other ranks.
constexpr milliseconds kGoodbye = std::chrono::seconds(2);
// Data sent to a host that was switched off is only known to be lost after a quarter of an hour.
constexpr milliseconds kStragglers = std::chrono::seconds(2);
constexpr int kTick = 50;  // ms between checks of the time and of other threads

std::string_view name_of(TcpKind kind) {
  return kind == TcpKind::all_gather ? "all_gather" : "all_to_all";
}

// Sends mine + stride * r to rank r; receives into to + bytes * r from rank r.
struct Exchange {
  TcpHeader header;
  const std::byte* mine = nullptr;
  std::size_t stride = 0;
  std::byte* to = nullptr;

  std::size_t whole() const { return sizeof(TcpHeader) + header.bytes; }
};

struct Peer {
  TcpLink link;
  TcpHeader theirs;                    // in this call
  std::size_t sent = 0, received = 0;  // of header and bytes in this call
  bool ended = false;                  // its connection for calls is closed
  bool left = false;                   // so is the control connection, without a failure
  Clock::time_point left_at = {};
};

// The reason of a group's failure, as ranks exchange it.
struct Failure {
  TcpKind kind = TcpKind::failure;
  std::string what;  // "rank 1 gave up: out of memory"; "": no failure
  std::string text;  // with the call; "": not known yet
};

class Tcp final : public Communicator {
 public:
  Tcp(TcpJoin how, milliseconds limit)
      : rank_(how.rank), limit_(limit), peers_(static_cast<std::size_t>(how.size)) {
    how.deadline = Clock::now() + limit;
    how.limit_text = concat(limit.count(), " ms");
    std::vector<TcpLink> links = join_by_tcp(how);
    for (std::size_t r = 0; r < peers_.size(); ++r) peers_[r].link = std::move(links[r]);
  }
  Tcp(const Tcp&) = delete;
  Tcp& operator=(const Tcp&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  DeviceKind device() const override { return DeviceKind::cpu; }
  bool capturable() const override { return false; }

  void all_gather(const void* mine, void* all, std::size_t bytes_each, void*) override {
    const auto* const from = static_cast<const std::byte*>(mine);
    auto* const to = static_cast<std::byte*>(all);
    if (std::byte* own = to + offset(rank_, bytes_each); bytes_each > 0 && own != from)
      std::memcpy(own, from, bytes_each);
    exchange(TcpKind::all_gather, from, 0, to, bytes_each);
  }
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each, void*) override {
    const auto* const from = static_cast<const std::byte*>(slices);
    auto* const to = static_cast<std::byte*>(slices_of_all);
    if (bytes_each > 0)
      std::memcpy(to + offset(rank_, bytes_each), from + offset(rank_, bytes_each), bytes_each);
    exchange(TcpKind::all_to_all, from, bytes_each, to, bytes_each);
  }

  void wait(void*, milliseconds) override { look(false); }
  void check() override { look(true); }

  void abort(std::string_view reason) noexcept override {
    try {
      set_failure({TcpKind::failure, concat("rank ", rank_, " gave up: ", reason), {}});
      const std::lock_guard calling(calling_);  // a running call ends by it
      notify();
    } catch (const std::exception&) {
      aborted_ = true;
    }
  }

 private:
  static std::size_t offset(int rank, std::size_t bytes) {
    return static_cast<std::size_t>(rank) * bytes;
  }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  // Returns the other ranks for which `is` holds.
  template <typename Is>
  std::vector<int> others(const Is& is) {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (r != rank_ && is(peer(r))) ranks.push_back(r);
    }
    return ranks;
  }

  void exchange(TcpKind kind, const std::byte* mine, std::size_t stride, std::byte* to,
                std::size_t bytes) {
    const std::lock_guard calling(calling_);
    throw_if_failed();
    ++calls_;
    exchange_ = {{kTcpMagic, kind, 0, bytes}, mine, stride, to};
    call_ = call_text(calls_, logitless::name_of(kind), bytes);
    for (Peer& p : peers_) p.sent = p.received = 0;
    try {
      run();
    } catch (const std::exception& error) {
      if (!aborted_) fail(error.what());  // an error of a socket
      throw;
    }
    exchange_ = {};
  }

  void run() {
    const Clock::time_point deadline = Clock::now() + limit_;
    const std::size_t whole = exchange_.whole();
    const auto unfinished = [&](const Peer& p) { return p.sent < whole || p.received < whole; };
    while (true) {
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        send(r);
        receive(r);
      }
      compare_calls();
      const std::vector<int> busy = others(unfinished);
      if (busy.empty()) return;
      if (!heard_.what.empty()) fail_as(heard_);
      hear_control();
      // Data sent before the failure is processed first.
      if (!heard_.what.empty()) continue;
      const std::vector<int> gone = others([&](const Peer& p) {
        return p.left && unfinished(p) &&
               (p.ended || p.received == whole || Clock::now() - p.left_at > kStragglers);
      });
      if (!gone.empty()) fail(left(gone));
      if (aborted_) {
        notify();
        throw_if_failed();
      }
      if (Clock::now() >= deadline) {
        const std::vector<int> late =
            others([](const Peer& p) { return p.received < sizeof(TcpHeader); });
        const bool some = !late.empty();
        fail(concat(ranks_text(some ? late : busy), " of ", size(),
                    some ? " did not arrive within " : " did not finish within ", limit_.count(),
                    " ms"));
      }
      wait_for_news(deadline);
    }
  }

  void wait_for_news(Clock::time_point deadline) {
    std::vector<pollfd> asked;
    for (const int r : others([](const Peer&) { return true; })) {
      const Peer& p = peer(r);
      if (!p.left) asked.push_back({p.link.control.descriptor(), POLLIN, 0});
      const bool takes = p.received < exchange_.whole() && !differs(p);
      const bool gives = p.sent < exchange_.whole() && !differs(p);
      const int events = (gives ? POLLOUT : 0) | (takes ? POLLIN : 0);
      if (events != 0 && !p.ended)
        asked.push_back({p.link.calls.descriptor(), static_cast<short>(events), 0});
    }
    // The rank that is furthest behind has the first deadline, and knows best which ranks are
    // missing.
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    ::poll(asked.data(), static_cast<nfds_t>(asked.size()),
           static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, kTick)));
  }

  // Sends as much as possible now.
  void send(int rank) {
    Peer& p = peer(rank);
    bool closed = p.ended;
    const auto slice = [&](const void* from, std::size_t begin, std::size_t count) {
      while (!closed && p.sent >= begin && p.sent < begin + count) {
        const std::size_t done = p.sent - begin;
        const std::size_t now = p.link.calls.send_some(static_cast<const std::byte*>(from) + done,
                                                       count - done, closed);
        if (now == 0) return;
        p.sent += now;
      }
    };
    slice(&exchange_.header, 0, sizeof(TcpHeader));
    if (differs(p)) return;  // its call differs: it takes no data
    slice(exchange_.mine + offset(rank, exchange_.stride), sizeof(TcpHeader),
          exchange_.header.bytes);
    p.ended = p.ended || (closed && p.received == exchange_.whole());
  }

  void receive(int rank) {
    Peer& p = peer(rank);
    const auto slice = [&](void* to, std::size_t begin, std::size_t count) {
      while (!p.ended && p.received >= begin && p.received < begin + count) {
        const std::size_t done = p.received - begin;
        const std::size_t now =
            p.link.calls.receive_some(static_cast<std::byte*>(to) + done, count - done, p.ended);
        if (now == 0) return;
        p.received += now;
      }
    };
    slice(&p.theirs, 0, sizeof(TcpHeader));
    if (differs(p)) return;
    slice(exchange_.to + offset(rank, exchange_.header.bytes), sizeof(TcpHeader),
          exchange_.header.bytes);
  }

  // Records failures that ranks report, and ranks that have left.
  void hear_control() {
    for (const int r : others([](const Peer& p) { return !p.left; })) {
      if (!heard_.what.empty()) return;
      TcpHeader header;
      const Socket& control = peer(r).link.control;
      const std::size_t there = control.receive_some(&header, sizeof(header), peer(r).left, true);
      if (peer(r).left) peer(r).left_at = Clock::now();
      if (there < sizeof(header)) continue;
      const Clock::time_point soon = Clock::now() + kGoodbye;
      std::string what(std::min<std::size_t>(header.bytes, kMostTcpReason), '\0');
      const bool whole = control.receive_all(&header, sizeof(header), soon) &&
                         control.receive_all(what.data(), what.size(), soon);
      what = printable(what);
      heard_ = {header.kind, what, header.kind == TcpKind::invalid ? what : ""};
      if (!whole) heard_ = {TcpKind::failure, left({r}), ""};
    }
  }

  bool differs(const Peer& p) const {
    if (p.received < sizeof(TcpHeader)) return false;
    const TcpHeader& own = exchange_.header;
    return p.theirs.kind != own.kind || p.theirs.bytes != own.bytes;
  }

  // Compares calls only when all headers are known, so that all ranks see the same difference.
  void compare_calls() {
    if (!others([](const Peer& p) { return p.received < sizeof(TcpHeader); }).empty()) return;
    const auto header = [&](int r) { return r == rank_ ? exchange_.header : peer(r).theirs; };
    const TcpHeader first = header(0);
    for (int r = 1; r < size(); ++r) {
      const TcpHeader other = header(r);
      if (other.kind == first.kind && other.bytes == first.bytes) continue;
      const auto said = [](const TcpHeader& h) {
        return exchange_text(logitless::name_of(h.kind), h.bytes);
      };
      const std::string text = concat("communicator: call ", calls_, ": rank ", r, ": ",
                                      said(other), ", rank 0: ", said(first));
      fail_as({TcpKind::invalid, text, text});
    }
  }

  // Checks for failures between calls; a running call finds them itself. `ends`: a rank that has
  // left counts as a failure.
  void look(bool ends) {
    throw_if_known();
    const std::unique_lock calling(calling_, std::try_to_lock);
    if (!calling.owns_lock()) return;
    call_ = calls_ == 0 ? "before the first call" : concat("after call ", calls_);
    hear_control();
    if (!heard_.what.empty()) fail_as(heard_);
    const std::vector<int> gone = others([](const Peer& p) { return p.left; });
    if (ends && !gone.empty()) fail(left(gone));
  }

  std::string left(const std::vector<int>& ranks) const {
    return concat(ranks_text(ranks), " of ", size(), ranks.size() == 1 ? " has left" : " have left",
                  ": the process has ended, or given its communicator up");
  }

  // Reports the failure to all connected ranks, once.
  void notify() {
    if (std::exchange(propagated_, true)) return;
    std::string all;
    {
      const std::lock_guard lock(mutex_);
      all = failure_bytes(failure_.kind, failure_.what);
    }
    for (const int r : others([](const Peer& p) { return !p.left; })) {
      try {
        peer(r).link.control.send_all(all.data(), all.size(), Clock::now() + kGoodbye);
      } catch (const Error&) {
        // It notices when this process ends.
      }
    }
  }

  [[noreturn]] void fail(const std::string& what) { fail_as({TcpKind::failure, what, ""}); }
  [[noreturn]] void fail_as(Failure failure) {
    if (failure.text.empty()) failure.text = concat("communicator: ", call_, ": ", failure.what);
    const bool first = set_failure(failure);
    notify();
    if (first && failure.kind == TcpKind::invalid) throw InvalidArgument(failure.text);
    throw_if_known();
    throw InternalError("communicator: a failure that is none");
  }
  // Returns whether it is the first failure, which is kept.
  bool set_failure(const Failure& failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_.what.empty()) return false;
    failure_ = failure;
    aborted_ = true;
    return true;
  }
  // Called in a call, or with calling_ held.
  void throw_if_failed() {
    if (!aborted_) return;
    notify();
    throw_if_known();
  }
  void throw_if_known() const {
    if (!aborted_) return;
    const std::lock_guard lock(mutex_);
    throw DeviceError(failure_.text.empty() ? concat("communicator: ", failure_.what)
                                            : failure_.text);
  }

  const int rank_;
  const milliseconds limit_;
  std::mutex calling_;  // held by a call, and by checks of the sockets between calls
  std::vector<Peer> peers_;
  Exchange exchange_;  // of the running call
  std::uint64_t calls_ = 0;
  std::string call_;          // its name in errors
  Failure heard_;             // failure reported by another rank
  bool propagated_ = false;   // the other ranks know of the failure
  mutable std::mutex mutex_;  // abort() may be called from any thread
  Failure failure_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::shared_ptr<Communicator> make_tcp(const std::string& host, int port, int rank, int size,
                                       milliseconds limit) {
  TcpOptions options;
  options.limit = limit;
  return make_tcp(host, port, rank, size, options);
}

std::shared_ptr<Communicator> make_tcp(const std::string& host, int port, int rank, int size,
                                       const TcpOptions& options) {
  const milliseconds limit = options.limit, after = options.waiting_after;
  require(size >= 1, "make_tcp: size: expected 1 or more, got ", size);
  require(rank >= 0 && rank < size, "make_tcp: rank: expected one in [0, ", size, "), got ", rank);
  require(port >= 1 && port <= 65535, "make_tcp: port: expected one in [1, 65535], got ", port);
  require(limit.count() >= 1, "make_tcp: limit: expected 1 ms or more, got ", limit.count());
  require(options.job.size() <= kMostTcpJob, "make_tcp: job: expected ", kMostTcpJob,
          " bytes at most, got ", options.job.size());
  require(options.job.find('\0') == std::string::npos,
          "make_tcp: job: expected text, got a byte 0");
  require(after.count() >= 0, "make_tcp: waiting_after: expected 0 ms or more, got ",
          after.count());
  // Limits the wait to a century, within the clock's range.
  const auto most = std::chrono::duration_cast<milliseconds>(std::chrono::years(100));
  TcpJoin how = {
      host, port, rank, size, options.job, {}, {}, options.waiting, std::min(after, most)};
  try {
    return std::make_shared<Tcp>(std::move(how), std::min(limit, most));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat("make_tcp: ", error.what()));
  } catch (const DeviceError& error) {
    throw DeviceError(concat("make_tcp: ", error.what()));
  }
}

}  // namespace logitless
