// How ranks that are processes find each other.
#pragma once

#include <string>
#include <vector>

#include "comm/socket.h"

namespace logitless {

// What connects two ranks.
struct TcpLink {
  Socket calls, control;
};

// Connects this rank with each other one: rank 0 listens at the port of its host, learns where the
// others listen and tells them; each then connects with those before it. By rank; this rank's own
// is not open. Afterwards failures alone are said on the control connections. Who connects and is
// no rank is left alone. Throws DeviceError naming the ranks that have not come when the deadline
// is over, or one that has gone again; InvalidArgument where ranks do not agree on the size, or two
// have the same number. What one of them throws those that have come throw, too. `limit_text`: how
// errors name the time there was.
std::vector<TcpLink> join_by_tcp(const std::string& host, int port, int rank, int size,
                                 Socket::Deadline deadline, const std::string& limit_text);

}  // namespace logitless
