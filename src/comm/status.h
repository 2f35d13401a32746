// Status header that each rank exchanges before data, so that a failing rank still arrives and all
// ranks learn of the failure.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "logitless/communicator.h"

namespace logitless {

enum class Stage : std::uint32_t { plan, exchange, end };
enum class ExchangeKind : std::uint32_t { none, all_gather, all_to_all, tokens };
// The exception that a rank is about to throw; only bad_target needs no text beyond the header.
enum class Status : std::uint32_t {
  ok,
  bad_target,
  invalid_argument,
  unsupported,
  device_error,
  internal_error
};

inline constexpr std::uint32_t kStatusProtocol = 0x4c4c0002;  // raised when the header changes

// A header of 64 bytes, exchanged as raw memory.
struct StatusHeader {
  std::uint32_t protocol = kStatusProtocol;
  Stage stage = Stage::plan;
  std::uint64_t call = 0;  // number within the plan, from 1 on; 0 while it is made
  std::uint64_t plan = 0;  // Agreement::plan; the library's version while it is made
  std::uint64_t bytes_each = 0;
  std::int64_t bad_position = 0, bad_target = 0;  // first target outside the vocabulary
  Status status = Status::ok;
  ExchangeKind kind = ExchangeKind::none;
  std::uint32_t exchange = 0;  // number within the call, from 1 on
  std::uint32_t order = 0;     // hash of the far field's order
};
static_assert(sizeof(StatusHeader) == 64);

// Returns the class of an exception and its text, of which 1000 bytes are exchanged.
Status status_of(const std::exception_ptr& exception, std::string& text);

// Barrier: gathers all headers into `all` [size], between the hosts. `text` is this rank's error
// text with a bad status. Collective. Throws the same on all ranks:
// - InvalidArgument if ranks are not at the same exchange: "rank 2: call 5, rank 0: call 6"
// - the errors of the ranks with a bad status, "rank 2: ...", in the class of the first of them
//
// Throws DeviceError when the group fails.
void exchange_status(Communicator& communicator, const StatusHeader& mine, const std::string& text,
                     std::vector<StatusHeader>& all);

}  // namespace logitless
