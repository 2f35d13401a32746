// Communicators over the C ABI.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

namespace logitless::capi {

template <>
inline logitless_communicator_callbacks_options defaults() {
  logitless_communicator_callbacks_options value{};
  value.struct_size = sizeof(value);
  value.size = 1;
  return value;
}
template <>
inline logitless_communicator_nccl_options defaults() {
  logitless_communicator_nccl_options value{};
  value.struct_size = sizeof(value);
  value.limit_ms = kCommunicatorLimit / std::chrono::milliseconds(1);
  value.copy_engines = 1;
  return value;
}

}  // namespace logitless::capi

namespace {

static_assert(LOGITLESS_NCCL_ID_BYTES == sizeof(NcclId));

std::chrono::milliseconds limit_from(std::int64_t limit_ms, const char* name) {
  require(limit_ms >= 1, name, ": expected 1 ms or more, got ", limit_ms);
  return std::chrono::milliseconds(limit_ms);
}

void require_ok(logitless_status status) {
  if (status != LOGITLESS_OK)
    throw DeviceError(
        concat("the callback returned status ", status, " (", logitless_status_name(status), ")"));
}

CommunicatorCallbacks callbacks_from(const logitless_communicator_callbacks_options* from) {
  const logitless_communicator_callbacks_options c = read_struct(from, "options");
  CommunicatorCallbacks callbacks;
  callbacks.rank = c.rank;
  callbacks.size = c.size;
  require(c.device == LOGITLESS_DEVICE_CPU || c.device == LOGITLESS_DEVICE_CUDA,
          "options.device: ", c.device, " is no logitless_device");
  callbacks.device = static_cast<DeviceKind>(c.device);
  callbacks.capturable = c.capturable != 0;
  void* const user = c.user;
  const auto exchange = [user](logitless_exchange_function function) {
    return [=](const void* mine, void* all, std::size_t bytes_each, void* stream) {
      require_ok(function(mine, all, bytes_each, stream, user));
    };
  };
  if (c.all_gather != nullptr) callbacks.all_gather = exchange(c.all_gather);
  if (c.all_to_all != nullptr) callbacks.all_to_all = exchange(c.all_to_all);
  if (c.all_gather_host != nullptr) {
    callbacks.all_gather_host = [call = exchange(c.all_gather_host)](const void* mine, void* all,
                                                                     std::size_t bytes_each) {
      call(mine, all, bytes_each, nullptr);
    };
  }
  if (c.wait != nullptr) {
    callbacks.wait = [wait = c.wait, user](void* stream, std::chrono::milliseconds limit) {
      require_ok(wait(stream, limit.count(), user));
    };
  }
  if (c.abort != nullptr) {
    callbacks.abort = [abort = c.abort, user](std::string_view reason) {
      abort(std::string(reason).c_str(), user);
    };
  }
  return callbacks;
}

std::shared_ptr<Communicator> nccl_from(const logitless_communicator_nccl_options* from) {
  const logitless_communicator_nccl_options c = read_struct(from, "options");
  require(c.watch == 0 || c.watch == 1, "options.watch: expected 0 or 1, got ", c.watch);
  require(c.copy_engines == 0 || c.copy_engines == 1, "options.copy_engines: expected 0 or 1, got ",
          c.copy_engines);
  require(c.reserved == 0, "options.reserved: expected 0, got ", c.reserved);
  require((c.id == nullptr) != (c.nccl_comm == nullptr),
          "options: expected either id or nccl_comm, got ", c.id == nullptr ? "neither" : "both");
  NcclOptions options;
  options.max_ctas = c.max_ctas;
  options.watch = c.watch == 1;
  options.copy_engines = c.copy_engines == 1;
  options.limit = limit_from(c.limit_ms, "options.limit_ms");
  if (c.nccl_comm != nullptr) return borrow_nccl(c.nccl_comm, options);
  NcclId id;
  std::memcpy(id.data(), c.id, id.size());
  return make_nccl(id, c.rank, c.size, options);
}

}  // namespace

#define LOGITLESS_DEFINE_INIT(name)                                           \
  void logitless_##name##_init(logitless_##name* value, size_t struct_size) { \
    init(value, struct_size);                                                 \
  }
LOGITLESS_DEFINE_INIT(communicator_callbacks_options)
LOGITLESS_DEFINE_INIT(communicator_nccl_options)

logitless_status logitless_communicator_threads(int32_t size, int64_t limit_ms,
                                                logitless_communicator** communicators) {
  return guarded([&] {
    require_pointer(communicators, "communicators");
    std::vector<std::unique_ptr<logitless_communicator>> made;
    for (auto& rank : make_thread_group(size, limit_from(limit_ms, "limit_ms")))
      made.push_back(std::make_unique<logitless_communicator>(std::move(rank)));
    for (auto& rank : made) *communicators++ = rank.release();
  });
}

logitless_status logitless_communicator_tcp(const char* host, int32_t port, int32_t rank,
                                            int32_t size, int64_t limit_ms,
                                            logitless_communicator** communicator) {
  return guarded([&] {
    require_pointer(host, "host");
    require_pointer(communicator, "communicator");
    *communicator = new logitless_communicator{
        make_tcp(host, port, rank, size, limit_from(limit_ms, "limit_ms"))};
  });
}

logitless_status logitless_communicator_callbacks(
    const logitless_communicator_callbacks_options* options,
    logitless_communicator** communicator) {
  return guarded([&] {
    require_pointer(communicator, "communicator");
    *communicator = new logitless_communicator{make_callbacks(callbacks_from(options))};
  });
}

const char* logitless_nccl_missing(void) {
  static const std::string missing = nccl_missing();
  return missing.c_str();
}

logitless_status logitless_nccl_id(void* id) {
  return guarded([&] {
    require_pointer(id, "id");
    const NcclId made = make_nccl_id();
    std::memcpy(id, made.data(), made.size());
  });
}

logitless_status logitless_communicator_nccl(const logitless_communicator_nccl_options* options,
                                             logitless_communicator** communicator) {
  return guarded([&] {
    require_pointer(communicator, "communicator");
    *communicator = new logitless_communicator{nccl_from(options)};
  });
}

void logitless_communicator_destroy(logitless_communicator* communicator) { delete communicator; }

int32_t logitless_communicator_rank(const logitless_communicator* communicator) {
  return communicator == nullptr ? -1 : communicator->communicator->rank();
}
int32_t logitless_communicator_size(const logitless_communicator* communicator) {
  return communicator == nullptr ? 0 : communicator->communicator->size();
}

logitless_status logitless_communicator_all_gather(logitless_communicator* communicator,
                                                   const void* mine, void* all, size_t bytes_each,
                                                   void* stream) {
  return guarded([&] {
    Communicator& c = communicator_of(communicator);
    require(bytes_each == 0 || (mine != nullptr && all != nullptr),
            "all_gather: mine and all: expected pointers, got NULL");
    c.all_gather(mine, all, bytes_each, stream);
  });
}

logitless_status logitless_communicator_all_to_all(logitless_communicator* communicator,
                                                   const void* slices, void* slices_of_all,
                                                   size_t bytes_each, void* stream) {
  return guarded([&] {
    Communicator& c = communicator_of(communicator);
    require(bytes_each == 0 || (slices != nullptr && slices_of_all != nullptr),
            "all_to_all: slices and slices_of_all: expected pointers, got NULL");
    c.all_to_all(slices, slices_of_all, bytes_each, stream);
  });
}

logitless_status logitless_communicator_all_gather_host(logitless_communicator* communicator,
                                                        const void* mine, void* all,
                                                        size_t bytes_each) {
  return guarded([&] {
    Communicator& c = communicator_of(communicator);
    require(bytes_each == 0 || (mine != nullptr && all != nullptr),
            "all_gather_host: mine and all: expected pointers, got NULL");
    c.all_gather_host(mine, all, bytes_each);
  });
}

logitless_status logitless_communicator_wait(logitless_communicator* communicator, void* stream,
                                             int64_t limit_ms) {
  return guarded(
      [&] { communicator_of(communicator).wait(stream, limit_from(limit_ms, "limit_ms")); });
}

logitless_status logitless_communicator_check(logitless_communicator* communicator) {
  return guarded([&] { communicator_of(communicator).check(); });
}

logitless_status logitless_communicator_abort(logitless_communicator* communicator,
                                              const char* reason) {
  return guarded([&] {
    Communicator& c = communicator_of(communicator);
    require_pointer(reason, "reason");
    c.abort(reason);
  });
}
