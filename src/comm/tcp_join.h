// Rendezvous of ranks that are processes.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/socket.h"

namespace logitless {

// The two connections between two ranks.
struct TcpLink {
  Socket calls, control;
};

struct TcpJoin {
  std::string host;  // of rank 0
  int port = 0;
  int rank = 0, size = 1;
  std::string job;  // "": no name; others may belong to another job
  Socket::Deadline deadline;
  std::string limit_text;                         // the limit in errors
  std::function<void(std::string_view)> waiting;  // receives the missing ranks; may be empty
  std::chrono::milliseconds waiting_after{0};  // time before the first report; it doubles with each
};

// Connects this rank with each other one and returns the connections by rank; this rank's own is
// not open. Rank 0 listens at the port of its host and collects and distributes the addresses of
// all ranks. Each rank then connects with the ranks before it. Afterwards the control connections
// carry only failures.
//
// Connections from outside the group are ignored. A rank of another job or version is rejected and
// throws InvalidArgument, while the others wait on. In a group without a name, the same holds for
// another size or a duplicate rank. Throws DeviceError naming the ranks missing at the deadline, or
// one that has left again. Throws InvalidArgument if ranks of one named job differ in size or share
// a number. A failure of one rank is thrown on all that have connected.
std::vector<TcpLink> join_by_tcp(const TcpJoin& how);

}  // namespace logitless
