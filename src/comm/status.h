// What each rank says of itself before bytes are exchanged, so that a rank that fails still arrives
// and all learn of it.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "logitless/communicator.h"

namespace logitless {

enum class Stage : std::uint32_t { plan, exchange, end };
enum class ExchangeKind : std::uint32_t { none, all_gather, all_to_all, tokens };
// Which exception a rank is about to throw; bad_target alone is told by the header itself.
enum class Status : std::uint32_t {
  ok,
  bad_target,
  invalid_argument,
  unsupported,
  device_error,
  internal_error
};

inline constexpr std::uint32_t kStatusProtocol = 0x4c4c0002;  // raised when the header changes

// 64 bytes, as they travel.
struct StatusHeader {
  std::uint32_t protocol = kStatusProtocol;
  Stage stage = Stage::plan;
  std::uint64_t call = 0;  // of the plan, from 1 on; 0 while it is made
  std::uint64_t plan = 0;  // Agreement::plan; while it is made the library's version
  std::uint64_t bytes_each = 0;
  std::int64_t bad_position = 0, bad_target = 0;  // of targets: the first that is no word
  Status status = Status::ok;
  ExchangeKind kind = ExchangeKind::none;
  std::uint32_t exchange = 0;  // of the call, from 1 on
  std::uint32_t order = 0;     // of a far field's words, in short
};
static_assert(sizeof(StatusHeader) == 64);

// The exception as it travels: its class, and its text, of which 1000 bytes arrive.
Status status_of(const std::exception_ptr& exception, std::string& text);

// Collective: gathers everyone's header into `all` [size], between the hosts. Throws the same on
// all ranks:
// - InvalidArgument where ranks do not stand at the same place: "rank 2: call 5, rank 0: call 6"
// - what the ranks with a bad status say, "rank 2: ...", in the class of the first of them
// `text`: what this rank says with a bad status. Throws DeviceError when the group fails.
void meet(Communicator& communicator, const StatusHeader& mine, const std::string& text,
          std::vector<StatusHeader>& all);

}  // namespace logitless
