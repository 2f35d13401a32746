// Incoming connections of a rank that have not identified themselves.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/socket.h"
#include "comm/tcp_wire.h"

namespace logitless {

// Any process may connect and send anything or nothing. Each caller has some seconds to greet, at
// most kMost wait at a time, and none of their errors throws.
class TcpCallers {
 public:
  static constexpr std::size_t kMost = 128;

  struct Caller {
    Socket socket;
    TcpHello hello;
    std::size_t received = 0;  // bytes of it
    bool leaves = false;       // rejected; reads the reason
    Socket::Deadline since = {}, until = {};
  };

  // Listens at the port; 0: any free port.
  explicit TcpCallers(int port) : listener_(Socket::listen(port)) {}

  int port() const { return listener_.port(); }
  // Waits for news for at most a twentieth of a second, and returns the callers that have greeted.
  std::vector<Caller> greetings();
  // Returns it again with the next greetings, until its time is over.
  void keep(Caller caller);
  // Sends it the reason, as InvalidArgument.
  void turn_away(Caller caller, const std::string& why);

  // Returns the last rejected caller, and why more cannot be accepted: "; 2 were turned away, ...".
  std::string trouble() const;

 private:
  void wait_for_news() const;
  void take_more();
  bool drop_oldest();
  void reply(Caller& caller, const std::string& why);
  // Returns whether it has greeted; closes its socket when it never will.
  bool read(Caller& caller);

  Socket listener_;
  std::vector<Caller> callers_;
  std::string full_, why_;  // resources are exhausted; reason of the last rejection
  std::size_t turned_away_ = 0;
};

}  // namespace logitless
