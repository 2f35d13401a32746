// Those who connect to a rank, until it is known who they are.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/socket.h"
#include "comm/tcp_wire.h"

namespace logitless {

// Anybody may connect, and say anything or nothing: each has some seconds to greet, there are never
// more than kMost of them, and nothing that they do throws.
class TcpCallers {
 public:
  static constexpr std::size_t kMost = 128;

  struct Caller {
    Socket socket;
    TcpHello hello;
    std::size_t received = 0;  // bytes of it
    bool leaves = false;       // it was turned away, and reads why
    Socket::Deadline since = {}, until = {};
  };

  // Listens at the port; 0: any that is free.
  explicit TcpCallers(int port) : listener_(Socket::listen(port)) {}

  int port() const { return listener_.port(); }
  // Waits for news, for a twentieth of a second at most, and returns those who have greeted.
  std::vector<Caller> greetings();
  // It comes again with the next greetings, while it has time.
  void keep(Caller caller);
  // Tells it why, as InvalidArgument.
  void turn_away(Caller caller, const std::string& why);

  // Returns who was turned away last, and why more cannot be taken: "; 2 were turned away, ...".
  std::string trouble() const;

 private:
  void wait_for_news() const;
  void take_more();
  bool make_room();
  void tell(Caller& caller, const std::string& why);
  // Whether it has greeted; its socket is no longer open when it never will.
  bool read(Caller& caller);

  Socket listener_;
  std::vector<Caller> callers_;
  std::string full_, why_;  // the last one was turned away
  std::size_t turned_away_ = 0;
};

}  // namespace logitless
