#include "comm/tcp_join.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <string_view>
#include <utility>

#include "comm/call_text.h"
#include "comm/tcp_wire.h"
#include "core/check.h"

namespace logitless {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGreeting = std::chrono::seconds(5);  // to say who one is
constexpr milliseconds kGoodbye = std::chrono::seconds(1);   // to tell the others of a failure
constexpr int kTick = 50;                                    // ms between looks at the time

bool is_of_this_host(std::string_view address) {
  return address.starts_with("127.") || address == "::1";
}

class Joining {
 public:
  Joining(int rank, int size, Clock::time_point deadline, const std::string& limit_text)
      : rank_(rank),
        deadline_(deadline),
        limit_text_(limit_text),
        ranks_(static_cast<std::size_t>(size)),
        places_(ranks_.size()) {}

  std::vector<TcpLink> join(const std::string& host, int port) {
    try {
      const Socket listener = Socket::listen(rank_ == 0 ? port : 0);
      if (rank_ > 0) {
        connect(0, host, port, listener.port());
        receive_places();
        for (int r = 1; r < rank_; ++r) connect(r, address_of(r), place(r).port, 0);
      }
      take_those_after(listener);
      if (rank_ == 0) send_places();
    } catch (const std::exception& error) {
      tell_others(error);
      throw;
    }
    return std::move(ranks_);
  }

 private:
  struct Stranger {  // who has not said yet who it is
    Socket socket;
    TcpHello hello;
    std::size_t received = 0;
    Clock::time_point until;
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  TcpLink& link(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Socket& control(int rank) { return link(rank).control; }
  TcpPlace& place(int rank) { return places_[static_cast<std::size_t>(rank)]; }

  // Rank 0 sees those of its own host at addresses that mean another host elsewhere.
  std::string address_of(int rank) {
    const std::string address = place(rank).address.data();
    return is_of_this_host(address) ? control(0).address() : address;
  }

  void connect(int to, const std::string& host, int port, int own_port) {
    try {
      control(to) = Socket::connect(host, port, deadline_);
    } catch (const DeviceError& error) {
      throw DeviceError(concat("rank ", rank_, ": ", error.what()));
    }
    say_hello(to, TcpChannel::control, own_port);
    try {
      // It listens, or has failed.
      link(to).calls = Socket::connect(host, port, std::min(deadline_, Clock::now() + kGreeting));
    } catch (const DeviceError&) {
      throw_told(to);
    }
    say_hello(to, TcpChannel::calls, own_port);
  }
  void say_hello(int to, TcpChannel channel, int own_port) {
    const TcpHello hello = {kTcpMagic, rank_, size(), own_port, channel};
    const Socket& socket = channel == TcpChannel::control ? control(to) : link(to).calls;
    if (!socket.send_all(&hello, sizeof(hello), deadline_)) throw_told(to);
  }

  void take_those_after(const Socket& listener) {
    int missing = 2 * (size() - 1 - rank_);
    std::vector<Stranger> strangers;
    while (missing > 0) {
      if (Clock::now() >= deadline_)
        throw DeviceError(
            concat(ranks_text(unheard()), " of ", size(), " did not arrive within ", limit_text_));
      wait_for_news(listener, strangers);
      for (Socket other = listener.accept(); other.is_open(); other = listener.accept())
        strangers.push_back({std::move(other), {}, 0, Clock::now() + kGreeting});
      for (Stranger& stranger : strangers) missing -= take(stranger) ? 1 : 0;
      std::erase_if(strangers, [](const Stranger& s) { return !s.socket.is_open(); });
      look_at_those_here();
    }
  }

  void wait_for_news(const Socket& listener, const std::vector<Stranger>& strangers) const {
    std::vector<pollfd> asked = {{listener.descriptor(), POLLIN, 0}};
    for (const Stranger& stranger : strangers)
      asked.push_back({stranger.socket.descriptor(), POLLIN, 0});
    ::poll(asked.data(), static_cast<nfds_t>(asked.size()), kTick);
  }

  // Whether it is a connection of one of the ranks; its socket is no longer open when that is
  // known.
  bool take(Stranger& stranger) {
    bool closed = false;
    auto* const to = reinterpret_cast<std::byte*>(&stranger.hello);
    stranger.received += stranger.socket.receive_some(to + stranger.received,
                                                      sizeof(TcpHello) - stranger.received, closed);
    const TcpHello& hello = stranger.hello;
    const bool whole = stranger.received == sizeof(TcpHello);
    if (!whole && !closed && Clock::now() < stranger.until) return false;
    if (!whole || hello.magic != kTcpMagic) {
      stranger.socket = Socket();
      return false;
    }
    const bool is_rank = hello.rank > rank_ && hello.rank < std::max(size(), hello.size);
    const auto slot = [&]() -> Socket& {
      return hello.channel == TcpChannel::control ? control(hello.rank) : link(hello.rank).calls;
    };
    if (!is_rank || hello.size != size() || slot().is_open()) {
      refused_ = std::move(stranger.socket);  // it is told why
      require(hello.size == size(), "size: rank ", hello.rank, " has ", hello.size, ", rank ",
              rank_, ": ", size());
      throw InvalidArgument(is_rank ? concat("rank: two are rank ", hello.rank, " of ", size())
                                    : concat("rank: ", hello.rank, " came to rank ", rank_));
    }
    stranger.socket.address().copy(place(hello.rank).address.data(), sizeof(TcpPlace::address) - 1);
    place(hello.rank).port = hello.port;
    slot() = std::move(stranger.socket);
    return true;
  }

  // One that has come may have gone again, or have failed.
  void look_at_those_here() {
    for (int r = 0; r < size(); ++r) {
      TcpHeader header;
      bool closed = false;
      if (!control(r).is_open()) continue;
      const std::size_t there = control(r).receive_some(&header, sizeof(header), closed, true);
      if (closed) fail_of(r);
      if (there == sizeof(header)) throw_told(r);
    }
  }

  void receive_places() {
    TcpHeader header;
    // Rank 0, whose time ends when this rank's does, says who is missing.
    const Clock::time_point last = deadline_ + kGoodbye;
    if (!control(0).receive_all(&header, sizeof(header), last)) {
      if (Clock::now() < last) fail_of(0);
      throw DeviceError(
          concat("rank ", rank_, ": rank 0 still waits for others after ", limit_text_));
    }
    if (is_failure(header)) throw_failure(0, header);
    const std::size_t bytes = places_.size() * sizeof(TcpPlace);
    if (header.magic != kTcpMagic || header.kind != TcpKind::places || header.bytes != bytes)
      throw DeviceError(concat("rank ", rank_, ": who listens there is not rank 0 of this group"));
    if (!control(0).receive_all(places_.data(), bytes, deadline_)) fail_of(0);
    for (TcpPlace& there : places_) there.address.back() = '\0';
  }
  void send_places() {
    TcpHeader header;
    header.kind = TcpKind::places;
    header.bytes = places_.size() * sizeof(TcpPlace);
    for (int r = 1; r < size(); ++r) {
      if (!control(r).send_all(&header, sizeof(header), deadline_) ||
          !control(r).send_all(places_.data(), header.bytes, deadline_))
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
          concat("rank ", rank, " of ", size(), " did not answer within ", limit_text_));
    throw DeviceError(concat("rank ", rank, " of ", size(), " has left"));
  }

  // What the rank says before it leaves.
  [[noreturn]] void throw_told(int rank) {
    TcpHeader header;
    if (!control(rank).receive_all(&header, sizeof(header), Clock::now() + kGoodbye)) fail_of(rank);
    throw_failure(rank, header);
  }
  [[noreturn]] void throw_failure(int rank, const TcpHeader& header) {
    std::string text(std::min<std::size_t>(header.bytes, kMostTcpReason), '\0');
    if (!control(rank).receive_all(text.data(), text.size(), Clock::now() + kGoodbye))
      fail_of(rank);
    if (header.kind == TcpKind::invalid) throw InvalidArgument(text);
    throw DeviceError(text);
  }

  void tell_others(const std::exception& error) noexcept {
    try {
      const std::string text = std::string(error.what()).substr(0, kMostTcpReason);
      TcpHeader header;
      header.kind = dynamic_cast<const InvalidArgument*>(&error) != nullptr ? TcpKind::invalid
                                                                            : TcpKind::failure;
      header.bytes = text.size();
      const std::string all =
          std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + text;
      ranks_.push_back({Socket(), std::move(refused_)});
      for (const TcpLink& other : ranks_) {
        if (other.control.is_open())
          other.control.send_all(all.data(), all.size(), Clock::now() + kGoodbye);
      }
    } catch (const std::exception&) {
      // They learn of it when this process ends.
    }
  }

  const int rank_;
  const Clock::time_point deadline_;
  const std::string& limit_text_;
  std::vector<TcpLink> ranks_;
  std::vector<TcpPlace> places_;
  Socket refused_;
};

}  // namespace

std::vector<TcpLink> join_by_tcp(const std::string& host, int port, int rank, int size,
                                 Socket::Deadline deadline, const std::string& limit_text) {
  if (size == 1) return std::vector<TcpLink>(1);
  return Joining(rank, size, deadline, limit_text).join(host, port);
}

}  // namespace logitless
