#include "comm/status.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string_view>

#include "comm/call_text.h"
#include "core/check.h"
#include "core/printable.h"
#include "logitless/error.h"

namespace logitless {
namespace {

constexpr std::size_t kTextBytes = 1000;

std::string version_text(std::uint64_t version) {
  return concat("logitless ", version >> 32, ".", (version >> 16) & 0xffff, ".", version & 0xffff);
}

std::string call_of(const StatusHeader& header) {
  return header.stage == Stage::plan ? "makes a plan" : concat("call ", header.call);
}

std::string place_of(const StatusHeader& header) {
  if (header.stage == Stage::plan) return "makes a plan";
  if (header.stage == Stage::end) return concat("the end of call ", header.call);
  if (header.kind == ExchangeKind::tokens)
    return concat("call ", header.call, " with ", header.bytes_each, " tokens");
  const bool gather = header.kind == ExchangeKind::all_gather;
  return concat("exchange ", header.exchange, " of call ", header.call, " (",
                exchange_text(gather ? "all_gather" : "all_to_all", header.bytes_each), ")");
}

// Throws unless all headers are `same` as rank 0's; `place` describes a header.
template <typename Same, typename Place>
void require_same(const std::vector<StatusHeader>& all, const Same& same, const Place& place) {
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (!same(all[r], all.front()))
      throw InvalidArgument(concat("rank ", r, ": ", place(all[r]), ", rank 0: ", place(all[0])));
  }
}

template <typename T>
auto equal(T StatusHeader::*field) {
  return [field](const StatusHeader& a, const StatusHeader& b) { return a.*field == b.*field; };
}

// Compares calls, also those of ranks with a bad status.
void check_calls(const std::vector<StatusHeader>& all) {
  using H = StatusHeader;
  require_same(all, equal(&H::protocol),
               [](const H& h) { return concat("protocol ", std::hex, h.protocol); });
  const auto makes_plan = [](const H& h) { return h.stage == Stage::plan; };
  require_same(
      all, [&](const H& a, const H& b) { return makes_plan(a) == makes_plan(b); }, call_of);
  require_same(all, equal(&H::plan), [&](const H& h) {
    return makes_plan(h) ? version_text(h.plan) : concat("plan ", std::hex, h.plan);
  });
  require_same(all, equal(&H::call), call_of);
}

// Returns whether two ranks are at the same exchange; sizes of plans may differ.
bool same_place(const StatusHeader& a, const StatusHeader& b) {
  return a.stage == b.stage && a.exchange == b.exchange && a.kind == b.kind &&
         (a.bytes_each == b.bytes_each || a.stage == Stage::plan);
}

[[noreturn]] void throw_as(Status status, const std::string& text) {
  switch (status) {
    case Status::unsupported:
      throw Unsupported(text);
    case Status::device_error:
      throw DeviceError(text);
    case Status::internal_error:
      throw InternalError(text);
    default:
      throw InvalidArgument(text);
  }
}

// Exchanges the error texts and throws those of the ranks with a bad status. Collective.
[[noreturn]] void throw_bad(Communicator& communicator, const std::vector<StatusHeader>& all,
                            const std::string& text) {
  using Text = std::array<char, kTextBytes + 1>;
  Text mine{};
  std::memcpy(mine.data(), text.data(), std::min(text.size(), kTextBytes));
  std::vector<Text> texts(all.size());
  communicator.all_gather_host(mine.data(), texts.data(), sizeof(Text));

  std::string said;
  Status status = Status::ok;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const StatusHeader& header = all[r];
    if (header.status == Status::ok) continue;
    if (status == Status::ok) status = header.status;
    said += concat(said.empty() ? "" : "; ", "rank ", r, ": ");
    texts[r].back() = '\0';
    said += header.status == Status::bad_target
                ? concat("targets: ", header.bad_target, " at position ", header.bad_position,
                         " is no vocabulary entry")
                : printable(texts[r].data());
  }
  throw_as(status, said);
}

}  // namespace

Status status_of(const std::exception_ptr& exception, std::string& text) {
  try {
    std::rethrow_exception(exception);
  } catch (const InvalidArgument& e) {
    text = e.what();
    return Status::invalid_argument;
  } catch (const Unsupported& e) {
    text = e.what();
    return Status::unsupported;
  } catch (const DeviceError& e) {
    text = e.what();
    return Status::device_error;
  } catch (const std::bad_alloc&) {
    text = "out of memory";
    return Status::device_error;
  } catch (const std::exception& e) {
    text = e.what();
    return Status::internal_error;
  } catch (...) {
    text = "an exception of unknown type";
    return Status::internal_error;
  }
}

void exchange_status(Communicator& communicator, const StatusHeader& mine, const std::string& text,
                     std::vector<StatusHeader>& all) {
  all.resize(static_cast<std::size_t>(communicator.size()));
  communicator.all_gather_host(&mine, all.data(), sizeof(StatusHeader));
  check_calls(all);
  const auto bad = [](const StatusHeader& h) { return h.status != Status::ok; };
  if (std::any_of(all.begin(), all.end(), bad)) throw_bad(communicator, all, text);
  require_same(all, same_place, place_of);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].order != all[0].order)
      throw InvalidArgument(concat("order: rank ", r,
                                   " has another one than rank 0; expected those of one "
                                   "share_order"));
  }
}

}  // namespace logitless
