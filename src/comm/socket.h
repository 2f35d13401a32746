// TCP sockets that do not block, as the ranks of a group use them.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

namespace logitless {

// Owns its descriptor. All throw DeviceError with the system's words.
class Socket {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  // On all addresses of this host, IPv6's and IPv4's; port 0: any that is free.
  static Socket listen(int port);
  // Asks again until somebody listens there; throws when the deadline is over. `meanwhile`: called
  // between attempts with the reason why the last one failed.
  static Socket connect(const std::string& host, int port, Deadline deadline,
                        const std::function<void(const std::string&)>& meanwhile = {});

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  int port() const;             // of this end
  std::string address() const;  // of the other end, numeric
  // Who has connected, one at a time; not open where nobody has. `full`: why one that has connected
  // cannot be taken now, where descriptors or memory are at their end; "" otherwise.
  Socket accept(std::string& full) const;
  // Nothing more is sent; the other end reads what was, and then the end.
  void end_sending() const;

  // Some of the bytes: how many, 0 where none go now. `closed`: set where the other end is gone.
  std::size_t send_some(const void* data, std::size_t bytes, bool& closed) const;
  std::size_t receive_some(void* data, std::size_t bytes, bool& closed, bool peek = false) const;
  // All of them; false when the deadline is over or the other end is gone.
  bool send_all(const void* data, std::size_t bytes, Deadline deadline) const;
  bool receive_all(void* data, std::size_t bytes, Deadline deadline) const;

  // False when the deadline is over and nothing has come.
  bool wait_to_receive(Deadline deadline) const;

 private:
  // For an event of poll(); false when the deadline is over.
  bool wait(short event, Deadline deadline) const;

  int descriptor_ = -1;
};

}  // namespace logitless
