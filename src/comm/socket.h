// Non-blocking TCP sockets for the ranks of a group.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

namespace logitless {

// Owns its descriptor. All functions throw DeviceError with the system's message.
class Socket {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  // Listens on all IPv6 and IPv4 addresses of this host; port 0: any free port.
  static Socket listen(int port);
  // Retries until a listener accepts; throws at the deadline. `meanwhile` is called between
  // attempts with the reason of the last failure.
  static Socket connect(const std::string& host, int port, Deadline deadline,
                        const std::function<void(const std::string&)>& meanwhile = {});

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  int port() const;             // of this end
  std::string address() const;  // of the other end, numeric
  // Returns the next connection, or a closed socket if there is none. `full` is the reason why a
  // connection cannot be accepted now (no descriptors or memory left), else "".
  Socket accept(std::string& full) const;
  // Ends sending: the other end reads the remaining data and then the end.
  void end_sending() const;

  // Transfer some of the bytes and return their number, 0 if none are possible now. `closed` is set
  // if the other end is gone.
  std::size_t send_some(const void* data, std::size_t bytes, bool& closed) const;
  std::size_t receive_some(void* data, std::size_t bytes, bool& closed, bool peek = false) const;
  // Transfer all bytes; false when the deadline has passed or the other end is gone.
  bool send_all(const void* data, std::size_t bytes, Deadline deadline) const;
  bool receive_all(void* data, std::size_t bytes, Deadline deadline) const;

  // Returns false when the deadline has passed without data.
  bool wait_to_receive(Deadline deadline) const;

 private:
  // Waits for an event of poll(); false when the deadline has passed.
  bool wait(short event, Deadline deadline) const;

  int descriptor_ = -1;
};

}  // namespace logitless
