// Wire format of the ranks over TCP: numbers in the machine's byte order, which all hosts share.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless {

inline constexpr std::uint64_t kTcpMagic = 0x6c6f6769746c3032;  // of this format
// Bits of the magic that differ between formats
inline constexpr std::uint64_t kTcpVersion = 0xffff;
inline constexpr std::size_t kMostTcpReason = 4096;  // bytes of a failure's text

enum class TcpKind : std::uint32_t {
  all_gather = 1,
  all_to_all = 2,
  endpoints = 3,  // from rank 0 when all have come: a TcpEndpoint for each rank
  failure = 4,    // error text of a DeviceError
  invalid = 5,    // error text of an InvalidArgument
};

// Precedes every message except TcpHello. Addresses and failures use the control connection.
struct TcpHeader {
  std::uint64_t magic = kTcpMagic;
  TcpKind kind = TcpKind::failure;
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;  // of the data after it
};

// The two connections of a pair of ranks: failures do not queue behind a call's data.
enum class TcpChannel : std::int32_t { calls = 1, control = 2 };

inline constexpr std::size_t kMostTcpJob = 63;  // bytes of a job's name

// First message of a connection, from the rank that made it. `port`: this rank listens there for
// later ranks. `process`: a random number that its two connections share.
struct TcpHello {
  std::uint64_t magic = kTcpMagic;
  std::int32_t rank = 0, size = 0, port = 0;
  TcpChannel channel = TcpChannel::calls;
  std::uint64_t process = 0;
  std::array<char, kMostTcpJob + 1> job = {};
};

struct TcpEndpoint {
  std::array<char, 64> address = {};  // numeric, as rank 0 sees it
  std::int32_t port = 0, reserved = 0;
};

// Returns whether the magic belongs to any format of this library.
inline bool is_ours(std::uint64_t magic) { return ((magic ^ kTcpMagic) & ~kTcpVersion) == 0; }

// Returns whether the header announces a failure, in any format.
inline bool is_failure(const TcpHeader& header) {
  return is_ours(header.magic) &&
         (header.kind == TcpKind::failure || header.kind == TcpKind::invalid);
}

inline std::string failure_bytes(TcpKind kind, std::string_view text) {
  TcpHeader header;
  header.kind = kind;
  header.bytes = std::min(text.size(), kMostTcpReason);
  std::string all(reinterpret_cast<const char*>(&header), sizeof(header));
  return all += text.substr(0, kMostTcpReason);
}

}  // namespace logitless
