#include "comm/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/printable.h"

namespace logitless {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Limit of one attempt: a host may have several addresses, one of which does not respond.
constexpr milliseconds kAttempt = std::chrono::seconds(5);
constexpr milliseconds kFirstPause{10}, kLongestPause{200};  // between attempts

[[noreturn]] void fail(const std::string& what) {
  throw DeviceError(concat(what, ": ", std::strerror(errno)));
}

void set_up(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL, 0);
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0) fail("socket");
  const auto set = [&](int level, int name, int value) {
    ::setsockopt(descriptor, level, name, &value, sizeof(value));
  };
  set(SOL_SOCKET, SO_REUSEADDR, 1);  // the port of an earlier group is free at once
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that is switched off does not close its connections: keep-alives notice after 25
  // seconds.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

int milliseconds_to(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count() + 1, 0, 1000));
}

template <std::size_t N>
bool is_one_of(int error, const int (&errors)[N]) {
  return std::find(std::begin(errors), std::end(errors), error) != std::end(errors);
}
bool is_gone(int error) {
  constexpr int kGone[] = {ECONNRESET,   ECONNABORTED, EPIPE,     ETIMEDOUT,
                           EHOSTUNREACH, ENETUNREACH,  EHOSTDOWN, ENOTCONN};
  return is_one_of(error, kGone);
}
bool is_busy(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

struct Address {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  sockaddr* any() { return reinterpret_cast<sockaddr*>(&storage); }
};

using NameFunction = int (*)(int, sockaddr*, socklen_t*);

Address name_of_end(int descriptor, NameFunction function) {
  Address address;
  address.size = sizeof(address.storage);
  if (function(descriptor, address.any(), &address.size) < 0) address.size = 0;
  return address;
}

int port_of(const Address& address) {
  return ntohs(address.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

// Returns whether the socket is connected with itself: the system may choose a free local port as
// its own end's port.
bool is_connected_with_itself(int descriptor) {
  const Address here = name_of_end(descriptor, ::getsockname);
  const Address there = name_of_end(descriptor, ::getpeername);
  return here.size == there.size && std::memcmp(&here.storage, &there.storage, here.size) == 0;
}

Address any_address(int family, int port) {
  Address address;
  if (family == AF_INET6) {
    auto* const six = reinterpret_cast<sockaddr_in6*>(&address.storage);
    six->sin6_family = AF_INET6;
    six->sin6_addr = in6addr_any;
    six->sin6_port = htons(static_cast<std::uint16_t>(port));
    address.size = sizeof(*six);
  } else {
    auto* const four = reinterpret_cast<sockaddr_in*>(&address.storage);
    four->sin_family = AF_INET;
    four->sin_addr.s_addr = htonl(INADDR_ANY);
    four->sin_port = htons(static_cast<std::uint16_t>(port));
    address.size = sizeof(*four);
  }
  return address;
}

}  // namespace

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}
Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket Socket::listen(int port) {
  // An IPv6 socket accepts both families; some hosts have only IPv4.
  for (const int family : {AF_INET6, AF_INET}) {
    Socket made(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!made.is_open()) continue;
    set_up(made.descriptor_);
    const int off = 0;
    if (family == AF_INET6)
      ::setsockopt(made.descriptor_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    Address address = any_address(family, port);
    if (::bind(made.descriptor_, address.any(), address.size) == 0 &&
        ::listen(made.descriptor_, SOMAXCONN) == 0)
      return made;
    if (errno == EADDRINUSE) break;
  }
  fail(concat("cannot listen at port ", port));
}

Socket Socket::connect(const std::string& host, int port, Deadline deadline,
                       const std::function<void(const std::string&)>& meanwhile) {
  std::string why = "nobody listens there";
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    addrinfo wanted = {};
    wanted.ai_family = AF_UNSPEC;
    wanted.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, [](addrinfo* all) {
      if (all != nullptr) ::freeaddrinfo(all);
    });
    if (error != 0) why = ::gai_strerror(error);
    for (const addrinfo* at = found; error == 0 && at != nullptr; at = at->ai_next) {
      Socket made(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
      if (!made.is_open()) {
        why = std::strerror(errno);
        continue;
      }
      set_up(made.descriptor_);
      int state = ::connect(made.descriptor_, at->ai_addr, at->ai_addrlen) < 0 ? errno : 0;
      if (state == EINPROGRESS) {
        state = ETIMEDOUT;
        socklen_t size = sizeof(state);
        if (made.wait(POLLOUT, std::min(deadline, Clock::now() + kAttempt)))
          ::getsockopt(made.descriptor_, SOL_SOCKET, SO_ERROR, &state, &size);
      }
      if (state == 0 && is_connected_with_itself(made.descriptor_)) state = ECONNREFUSED;
      if (state == 0) return made;
      why = std::strerror(state);
    }
    if (Clock::now() >= deadline) break;
    if (meanwhile) meanwhile(why);
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline - Clock::now()));
  }
  throw DeviceError(concat("cannot connect to ", printable(host), ", port ", port, ": ", why));
}

int Socket::port() const { return port_of(name_of_end(descriptor_, ::getsockname)); }

std::string Socket::address() const {
  Address address = name_of_end(descriptor_, ::getpeername);
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(address.any(), address.size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) !=
      0)
    return {};  // the peer is gone
  // A dual-stack socket shows IPv4 addresses as mapped ones.
  constexpr std::string_view kMapped = "::ffff:";
  std::string_view name = text;
  if (name.starts_with(kMapped)) name.remove_prefix(kMapped.size());
  return std::string(name);
}

Socket Socket::accept(std::string& full) const {
  full.clear();
  const int other = ::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC);
  if (other < 0) {
    constexpr int kOurs[] = {EBADF, EINVAL, ENOTSOCK, EFAULT, EOPNOTSUPP};
    constexpr int kFull[] = {EMFILE, ENFILE, ENOBUFS, ENOMEM};
    if (is_one_of(errno, kOurs)) fail("accept");
    if (is_one_of(errno, kFull)) full = std::strerror(errno);
    return {};  // any other error concerns the connecting peer
  }
  Socket made(other);
  set_up(other);
  return made;
}

void Socket::end_sending() const { ::shutdown(descriptor_, SHUT_WR); }

std::size_t Socket::send_some(const void* data, std::size_t bytes, bool& closed) const {
  const ssize_t sent = ::send(descriptor_, data, bytes, MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<std::size_t>(sent);
  if (is_gone(errno))
    closed = true;
  else if (!is_busy(errno))
    fail("send");
  return 0;
}

std::size_t Socket::receive_some(void* data, std::size_t bytes, bool& closed, bool peek) const {
  const ssize_t got = ::recv(descriptor_, data, bytes, peek ? MSG_PEEK : 0);
  if (got > 0) return static_cast<std::size_t>(got);
  if (got == 0 ? bytes > 0 : is_gone(errno))
    closed = true;
  else if (got < 0 && !is_busy(errno))
    fail("receive");
  return 0;
}

bool Socket::send_all(const void* data, std::size_t bytes, Deadline deadline) const {
  const auto* at = static_cast<const std::byte*>(data);
  for (bool closed = false; bytes > 0;) {
    const std::size_t sent = send_some(at, bytes, closed);
    if (closed || (sent == 0 && !wait(POLLOUT, deadline))) return false;
    at += sent;
    bytes -= sent;
  }
  return true;
}

bool Socket::receive_all(void* data, std::size_t bytes, Deadline deadline) const {
  auto* at = static_cast<std::byte*>(data);
  for (bool closed = false; bytes > 0;) {
    const std::size_t got = receive_some(at, bytes, closed);
    if (closed || (got == 0 && !wait(POLLIN, deadline))) return false;
    at += got;
    bytes -= got;
  }
  return true;
}

bool Socket::wait_to_receive(Deadline deadline) const { return wait(POLLIN, deadline); }

bool Socket::wait(short event, Deadline deadline) const {
  do {
    pollfd asked = {descriptor_, event, 0};
    const int ready = ::poll(&asked, 1, milliseconds_to(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail("poll");
  } while (Clock::now() < deadline);
  return false;
}

}  // namespace logitless
