// What ranks say to each other over TCP: numbers in the machine's order, which all hosts share.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless {

inline constexpr std::uint64_t kTcpMagic = 0x6c6f6769746c3032;  // of this format
inline constexpr std::uint64_t kTcpVersion = 0xffff;  // bits of the magic that tell formats apart
inline constexpr std::size_t kMostTcpReason = 4096;   // bytes of a failure's text

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

inline constexpr std::size_t kMostTcpJob = 63;  // bytes of a job's name

// First on a connection, by who made it. port: where this rank listens for those after it. process:
// a number that its two connections share, and nobody else's.
struct TcpHello {
  std::uint64_t magic = kTcpMagic;
  std::int32_t rank = 0, size = 0, port = 0;
  TcpChannel channel = TcpChannel::calls;
  std::uint64_t process = 0;
  std::array<char, kMostTcpJob + 1> job = {};
};

struct TcpPlace {
  std::array<char, 64> address = {};  // numeric, as rank 0 sees it
  std::int32_t port = 0, reserved = 0;
};

// Of this format or another one of the library's.
inline bool is_ours(std::uint64_t magic) { return ((magic ^ kTcpMagic) & ~kTcpVersion) == 0; }

// Every format says failures like this.
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
