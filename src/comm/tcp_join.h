// How ranks that are processes find each other.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/socket.h"

namespace logitless {

// What connects two ranks.
struct TcpLink {
  Socket calls, control;
};

struct TcpJoin {
  std::string host;  // of rank 0
  int port = 0;
  int rank = 0, size = 1;
  std::string job;  // "": no name, and anybody may be of another one
  Socket::Deadline deadline;
  std::string limit_text;                         // how errors name the time there was
  std::function<void(std::string_view)> waiting;  // told who is missing; may be empty
  std::chrono::milliseconds waiting_after{0};     // first, then each time after twice as long
};

// Connects this rank with each other one: rank 0 listens at the port of its host, learns where the
// others listen and tells them; each then connects with those before it. By rank; this rank's own
// is not open. Afterwards failures alone are said on the control connections. Who connects and is
// no rank is left alone; a rank of another job, version or, in a group without a name, size, or one
// that has come before, is told so and throws InvalidArgument, while the others wait on. Throws
// DeviceError naming the ranks that have not come when the deadline is over, or one that has gone
// again; InvalidArgument where ranks of one named job do not agree on the size, or two have the
// same number. What one of them throws those that have come throw, too.
std::vector<TcpLink> join_by_tcp(const TcpJoin& how);

}  // namespace logitless
