// What ranks say to each other over TCP: numbers in the machine's order, which all hosts share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace logitless {

inline constexpr std::uint64_t kTcpMagic = 0x6c6f6769746c3031;  // of this format
inline constexpr std::size_t kMostTcpReason = 4096;             // bytes of a failure's text

enum class TcpKind : std::uint32_t {
  all_gather = 1,
  all_to_all = 2,
  places = 3,   // what rank 0 knows when all have come: a TcpPlace for each rank
  failure = 4,  // the text of what went wrong: DeviceError
  invalid = 5,  // the same: InvalidArgument
};

// Ahead of everything but a TcpHello. Places and failures are said on the control connection.
struct TcpHeader {
  std::uint64_t magic = kTcpMagic;
  TcpKind kind = TcpKind::failure;
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;  // follow
};

// Two connections of each pair of ranks: what fails is not kept waiting behind bytes of a call.
enum class TcpChannel : std::int32_t { calls = 1, control = 2 };

// First on a connection, by who made it. port: where this rank listens for those after it.
struct TcpHello {
  std::uint64_t magic = kTcpMagic;
  std::int32_t rank = 0, size = 0, port = 0;
  TcpChannel channel = TcpChannel::calls;
};

struct TcpPlace {
  std::array<char, 64> address = {};  // numeric, as rank 0 sees it
  std::int32_t port = 0, reserved = 0;
};

inline bool is_failure(const TcpHeader& header) {
  return header.kind == TcpKind::failure || header.kind == TcpKind::invalid;
}

}  // namespace logitless
