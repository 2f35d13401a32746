#include "comm/tcp_callers.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/check.h"

namespace logitless {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGreeting = std::chrono::seconds(5);  // time to send a greeting
constexpr milliseconds kFarewell = std::chrono::seconds(1);  // time to read the rejection
constexpr milliseconds kLeast{250};  // least time, even when there are too many
constexpr int kTick = 50;            // ms between checks of the time

}  // namespace

std::vector<TcpCallers::Caller> TcpCallers::greetings() {
  wait_for_news();
  std::vector<Caller> greeted;
  // Reads earlier callers first: those that finish free slots.
  for (int round = 0; round < 2; ++round) {
    for (Caller& caller : callers_) {
      if (read(caller)) greeted.push_back(std::move(caller));
    }
    std::erase_if(callers_, [](const Caller& c) { return !c.socket.is_open(); });
    if (round == 0) take_more();
  }
  return greeted;
}

void TcpCallers::wait_for_news() const {
  // A connection at a full listener is no news.
  const bool full = !full_.empty() || callers_.size() >= kMost;
  std::vector<pollfd> asked;
  if (!full) asked.push_back({listener_.descriptor(), POLLIN, 0});
  for (const Caller& caller : callers_) asked.push_back({caller.socket.descriptor(), POLLIN, 0});
  ::poll(asked.data(), static_cast<nfds_t>(asked.size()), kTick);
}

void TcpCallers::take_more() {
  while (callers_.size() < kMost || drop_oldest()) {
    Socket other = listener_.accept(full_);
    if (other.is_open()) {
      const Clock::time_point now = Clock::now();
      callers_.push_back({std::move(other), {}, 0, false, now, now + kGreeting});
    } else if (full_.empty() || !drop_oldest()) {
      return;
    }
  }
}

// Drops the oldest caller, unless it has only just connected.
bool TcpCallers::drop_oldest() {
  const auto first =
      std::min_element(callers_.begin(), callers_.end(),
                       [](const Caller& a, const Caller& b) { return a.since < b.since; });
  if (first == callers_.end() || Clock::now() - first->since < kLeast) return false;
  callers_.erase(first);
  return true;
}

bool TcpCallers::read(Caller& caller) {
  bool closed = false;
  try {
    if (caller.leaves) {
      std::array<std::byte, 4096> rest;
      while (!closed && caller.socket.receive_some(rest.data(), rest.size(), closed) > 0) {
      }
    } else if (caller.received < sizeof(TcpHello)) {
      auto* const to = reinterpret_cast<std::byte*>(&caller.hello);
      caller.received += caller.socket.receive_some(to + caller.received,
                                                    sizeof(TcpHello) - caller.received, closed);
    }
  } catch (const DeviceError&) {
    closed = true;  // an error of its connection
  }
  const std::uint64_t magic = caller.hello.magic;
  const bool named = !caller.leaves && caller.received >= sizeof(magic);
  if (closed || Clock::now() >= caller.until || (named && !is_ours(magic))) {
    caller.socket = Socket();
    return false;
  }
  if (named && magic != kTcpMagic)
    reply(caller, "version: a rank is of a version of logitless whose greeting is another one");
  return !caller.leaves && caller.received == sizeof(TcpHello);
}

void TcpCallers::keep(Caller caller) { callers_.push_back(std::move(caller)); }

void TcpCallers::turn_away(Caller caller, const std::string& why) {
  reply(caller, why);
  callers_.push_back(std::move(caller));
}

void TcpCallers::reply(Caller& caller, const std::string& why) {
  ++turned_away_;
  why_ = why;
  caller.leaves = true;
  caller.until = Clock::now() + kFarewell;
  const std::string all = failure_bytes(TcpKind::invalid, why);
  try {
    bool closed = false;
    caller.socket.send_some(all.data(), all.size(), closed);
    caller.socket.end_sending();
  } catch (const DeviceError&) {
    caller.until = {};  // its connection is broken
  }
}

std::string TcpCallers::trouble() const {
  std::string text;
  if (turned_away_ > 0)
    text = concat("; connections turned away: ", turned_away_, ", the last one for ", why_);
  if (!full_.empty()) text += concat("; more connections wait: ", full_);
  return text;
}

}  // namespace logitless
