#include "comm/tcp_join.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <random>
#include <string_view>
#include <utility>

#include "comm/call_text.h"
#include "comm/tcp_callers.h"
#include "comm/tcp_wire.h"
#include "core/check.h"
#include "core/printable.h"

namespace logitless {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGreeting = std::chrono::seconds(5);  // between a rank's two connections
// Time to report a failure to the other ranks.
constexpr milliseconds kGoodbye = std::chrono::seconds(1);
constexpr int kTick = 50;  // ms between checks of the time

bool is_of_this_host(std::string_view address) {
  return address.starts_with("127.") || address == "::1";
}

std::uint64_t random_number() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

class Joining {
 public:
  explicit Joining(const TcpJoin& how)
      : how_(how),
        notice_at_(Clock::now() + how.waiting_after),
        pause_(std::max(how.waiting_after, milliseconds(1))),
        ranks_(static_cast<std::size_t>(how.size)),
        endpoints_(ranks_.size()),
        processes_(ranks_.size()) {}

  std::vector<TcpLink> join() {
    try {
      TcpCallers callers(rank_ == 0 ? how_.port : 0);
      if (rank_ > 0) {
        connect(0, how_.host, how_.port, callers.port());
        receive_endpoints();
        for (int r = 1; r < rank_; ++r) connect(r, address_of(r), endpoint(r).port, 0);
      }
      accept_later_ranks(callers);
      if (rank_ == 0) send_endpoints();
    } catch (const std::exception& error) {
      send_error_to_others(error);
      throw;
    }
    return std::move(ranks_);
  }

 private:
  int size() const { return how_.size; }
  TcpLink& link(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Socket& control(int rank) { return link(rank).control; }
  TcpEndpoint& endpoint(int rank) { return endpoints_[static_cast<std::size_t>(rank)]; }

  // Replaces a loopback address that rank 0 sees for ranks of its host by rank 0's own address.
  std::string address_of(int rank) {
    const std::string address = endpoint(rank).address.data();
    return is_of_this_host(address) ? control(0).address() : address;
  }

  void connect(int to, const std::string& host, int port, int own_port) {
    try {
      control(to) = Socket::connect(host, port, deadline_, [&](const std::string& why) {
        notice([&] {
          return concat("rank ", to, " at ", printable(host), ", port ", port, ": ", why);
        });
      });
    } catch (const DeviceError& error) {
      throw DeviceError(concat("rank ", rank_, ": ", error.what()));
    }
    send_greeting(to, TcpChannel::control, own_port);
    try {
      // It is listening, or has failed.
      link(to).calls = Socket::connect(host, port, std::min(deadline_, Clock::now() + kGreeting));
    } catch (const DeviceError&) {
      throw_received_error(to);
    }
    send_greeting(to, TcpChannel::calls, own_port);
  }
  void send_greeting(int to, TcpChannel channel, int own_port) {
    TcpHello hello = {kTcpMagic, rank_, size(), own_port, channel, process_, {}};
    how_.job.copy(hello.job.data(), kMostTcpJob);
    const Socket& socket = channel == TcpChannel::control ? control(to) : link(to).calls;
    if (!socket.send_all(&hello, sizeof(hello), deadline_)) throw_received_error(to);
  }

  void accept_later_ranks(TcpCallers& callers) {
    int missing = 2 * (size() - 1 - rank_);
    while (missing > 0) {
      if (Clock::now() >= deadline_)
        throw DeviceError(concat(ranks_text(unheard()), " of ", size(), " did not arrive within ",
                                 how_.limit_text, callers.trouble()));
      notice([&] {
        return concat(ranks_text(unheard()), " at port ", callers.port(), callers.trouble());
      });
      for (TcpCallers::Caller& caller : callers.greetings())
        missing -= take(callers, std::move(caller)) ? 1 : 0;
      check_connected_ranks();
    }
  }

  // Returns whether the caller is a connection of one of the ranks; keeps it then.
  bool take(TcpCallers& callers, TcpCallers::Caller caller) {
    const TcpHello& hello = caller.hello;
    const int rank = hello.rank;
    const std::string job(hello.job.data(), ::strnlen(hello.job.data(), kMostTcpJob));
    if (job != how_.job) {
      callers.turn_away(std::move(caller), concat("job: rank ", rank, " is of ", job_text(job),
                                                  ", rank ", rank_, " of ", job_text(how_.job)));
      return false;
    }
    if (const std::string why = mistake(hello); !why.empty()) {
      // Without a job name it may belong to another job, which must not end this one.
      if (job.empty()) {
        callers.turn_away(std::move(caller), why);
        return false;
      }
      refused_ = std::move(caller.socket);  // it receives the reason
      throw InvalidArgument(why);
    }
    const auto r = static_cast<std::size_t>(rank);
    if (hello.channel == TcpChannel::calls) {
      if (!control(rank).is_open()) {
        callers.keep(std::move(caller));  // its control connection may be read later
        return false;
      }
      if (hello.process != processes_[r]) {
        callers.turn_away(std::move(caller), twice_text(rank));
        return false;
      }
      link(rank).calls = std::move(caller.socket);
      return true;
    }
    processes_[r] = hello.process;
    caller.socket.address().copy(endpoint(rank).address.data(), sizeof(TcpEndpoint::address) - 1);
    endpoint(rank).port = hello.port;
    control(rank) = std::move(caller.socket);
    return true;
  }

  // Returns the mistake in a greeting of this group, or "".
  std::string mistake(const TcpHello& hello) {
    const int rank = hello.rank;
    if (hello.size != size())
      return concat("size: rank ", rank, " has ", hello.size, ", rank ", rank_, ": ", size());
    if (rank <= rank_ || rank >= size()) return concat("rank: ", rank, " came to rank ", rank_);
    if (hello.port < 0 || hello.port > 65535)
      return concat("port: rank ", rank, " listens at ", hello.port);
    if (hello.channel == TcpChannel::control)
      return control(rank).is_open() ? twice_text(rank) : "";
    if (hello.channel == TcpChannel::calls)
      return link(rank).calls.is_open() ? twice_text(rank) : "";
    return concat("channel: rank ", rank, " has none of number ", static_cast<int>(hello.channel));
  }
  std::string twice_text(int rank) const {
    return concat("rank: two are rank ", rank, " of ", size());
  }
  static std::string job_text(const std::string& job) {
    return job.empty() ? "none" : concat("'", printable(job), "'");
  }

  // Reports periodically, to the caller, what this rank waits for.
  template <typename Text>
  void notice(const Text& text) {
    const Clock::time_point now = Clock::now();
    if (!how_.waiting || now < notice_at_) return;
    pause_ *= 2;
    notice_at_ = now + pause_;
    how_.waiting(concat("rank ", rank_, " of ", size(), " waits for ", text()));
  }

  // Checks whether a connected rank has left or failed.
  void check_connected_ranks() {
    for (int r = 0; r < size(); ++r) {
      TcpHeader header;
      bool closed = false;
      if (!control(r).is_open()) continue;
      const std::size_t there = control(r).receive_some(&header, sizeof(header), closed, true);
      if (closed) fail_of(r);
      if (there == sizeof(header)) throw_received_error(r);
    }
  }

  void receive_endpoints() {
    TcpHeader header;
    // Waits a little longer than rank 0, whose deadline is the same and which reports the missing
    // ranks.
    const Clock::time_point last = deadline_ + kGoodbye;
    while (!control(0).wait_to_receive(Clock::now() + milliseconds(kTick)) && Clock::now() < last) {
      notice([&] {
        return concat("rank 0 at ", printable(how_.host), ", port ", how_.port,
                      ", which waits for others");
      });
    }
    if (!control(0).receive_all(&header, sizeof(header), last)) {
      if (Clock::now() < last) fail_of(0);
      throw DeviceError(
          concat("rank ", rank_, ": rank 0 still waits for others after ", how_.limit_text));
    }
    if (is_failure(header)) throw_failure(0, header);
    const std::size_t bytes = endpoints_.size() * sizeof(TcpEndpoint);
    if (header.magic != kTcpMagic || header.kind != TcpKind::endpoints || header.bytes != bytes)
      throw DeviceError(not_ours());
    if (!control(0).receive_all(endpoints_.data(), bytes, deadline_)) fail_of(0);
    for (int r = 1; r < rank_; ++r) {
      endpoint(r).address.back() = '\0';
      if (endpoint(r).port < 1 || endpoint(r).port > 65535)
        throw DeviceError(
            concat("rank ", r, " of ", size(), " listens at no port: ", endpoint(r).port));
    }
  }
  void send_endpoints() {
    TcpHeader header;
    header.kind = TcpKind::endpoints;
    header.bytes = endpoints_.size() * sizeof(TcpEndpoint);
    for (int r = 1; r < size(); ++r) {
      if (!control(r).send_all(&header, sizeof(header), deadline_) ||
          !control(r).send_all(endpoints_.data(), header.bytes, deadline_))
        fail_of(r);
    }
  }

  std::vector<int> unheard() const {
    std::vector<int> ranks;
    for (int r = rank_ + 1; r < size(); ++r) {
      const TcpLink& link = ranks_[static_cast<std::size_t>(r)];
      if (!link.calls.is_open() || !link.control.is_open()) ranks.push_back(r);
    }
    return ranks;
  }

  [[noreturn]] void fail_of(int rank) const {
    if (Clock::now() >= deadline_)
      throw DeviceError(
          concat("rank ", rank, " of ", size(), " did not answer within ", how_.limit_text));
    throw DeviceError(concat("rank ", rank, " of ", size(), " has left"));
  }

  // Throws the failure that the rank sent before it left.
  [[noreturn]] void throw_received_error(int rank) {
    TcpHeader header;
    if (!control(rank).receive_all(&header, sizeof(header), Clock::now() + kGoodbye)) fail_of(rank);
    throw_failure(rank, header);
  }
  [[noreturn]] void throw_failure(int rank, const TcpHeader& header) {
    if (!is_failure(header)) throw DeviceError(not_ours());
    std::string text(std::min<std::size_t>(header.bytes, kMostTcpReason), '\0');
    if (!control(rank).receive_all(text.data(), text.size(), Clock::now() + kGoodbye))
      fail_of(rank);
    if (header.kind == TcpKind::invalid) throw InvalidArgument(printable(text));
    throw DeviceError(printable(text));
  }
  std::string not_ours() const {
    return concat("rank ", rank_, ": who listens there is not rank 0 of this group");
  }

  void send_error_to_others(const std::exception& error) noexcept {
    try {
      const bool invalid = dynamic_cast<const InvalidArgument*>(&error) != nullptr;
      const std::string all =
          failure_bytes(invalid ? TcpKind::invalid : TcpKind::failure, error.what());
      ranks_.push_back({Socket(), std::move(refused_)});
      for (const TcpLink& other : ranks_) {
        if (other.control.is_open())
          other.control.send_all(all.data(), all.size(), Clock::now() + kGoodbye);
      }
    } catch (const std::exception&) {
      // They notice when this process ends.
    }
  }

  const TcpJoin& how_;
  const int rank_ = how_.rank;
  const Clock::time_point deadline_ = how_.deadline;
  const std::uint64_t process_ = random_number();
  Clock::time_point notice_at_;
  milliseconds pause_;
  std::vector<TcpLink> ranks_;
  std::vector<TcpEndpoint> endpoints_;
  std::vector<std::uint64_t> processes_;  // pair the connections of one process
  Socket refused_;
};

}  // namespace

std::vector<TcpLink> join_by_tcp(const TcpJoin& how) {
  if (how.size == 1) return std::vector<TcpLink>(1);
  return Joining(how).join();
}

}  // namespace logitless
