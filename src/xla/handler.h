// Common parts of the XLA FFI handlers: the device of a call, conversion of errors, and the two
// symbols.
#pragma once

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>

#include "logitless/export.h"
#include "xla/buffers.h"

namespace logitless::xla_handlers {

namespace ffi = xla::ffi;

// Device and stream of a call.
struct Place {
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  void* stream = nullptr;
  ffi::ScratchAllocator* scratch = nullptr;  // of a GPU, for handlers that ask for it
};

// Returns XLA's scratch memory on the GPU of a call, for the time of the call.
inline Workspace scratch_of(const Place& place, const char* handler, std::size_t bytes) {
  const std::optional<void*> data = place.scratch->Allocate(bytes + kAlignment);
  if (!data.has_value())
    throw DeviceError(concat(handler, ": XLA has no ", bytes, " bytes for its workspace"));
  return aligned_workspace({*data, bytes + kAlignment});
}

// Restores the default floating-point environment. XLA's threads flush denormal numbers to zero;
// the library's results assume default rounding and denormals.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

using Run = void (*)(const Place&, Call);

// Turns the library's exceptions into XLA's errors with their text.
inline ffi::Error guarded(Run run, const Place& place, const Call& call) noexcept {
  try {
    const DefaultFloatEnvironment floats;
    run(place, call);
    return ffi::Error::Success();
  } catch (const InvalidArgument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const Unsupported& e) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, e.what());
  } catch (const DeviceError& e) {
    return ffi::Error(ffi::ErrorCode::kUnavailable, e.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  } catch (...) {
    return ffi::Error::Internal("an exception of unknown type");
  }
}

template <Run kRun>
ffi::Error on_cpu(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  return guarded(kRun, Place{}, Call(arguments, results, attributes));
}

template <Run kRun>
ffi::Error on_cuda(void* stream, std::int32_t device_index, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  return guarded(kRun, Place{DeviceKind::cuda, device_index, stream},
                 Call(arguments, results, attributes));
}

template <Run kRun>
ffi::Error on_cuda_with_scratch(void* stream, std::int32_t device_index,
                                ffi::ScratchAllocator scratch, ffi::RemainingArgs arguments,
                                ffi::RemainingRets results, ffi::Dictionary attributes) {
  return guarded(kRun, Place{DeviceKind::cuda, device_index, stream, &scratch},
                 Call(arguments, results, attributes));
}

inline auto cpu_binding() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(); }

inline auto cuda_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

inline auto cuda_binding_with_scratch() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace logitless::xla_handlers

// Defines the symbols of a handler, logitless_xla_NAME_cpu and _cuda. The arguments after the name
// are those that XLA_FFI_DEFINE_HANDLER_SYMBOL takes after a binding: traits of the GPU handler.
// The second macro's GPU handler has a scratch allocator.
#define LOGITLESS_XLA_HANDLERS(name, ...) \
  LOGITLESS_XLA_HANDLERS_OF(name, on_cuda, cuda_binding, ##__VA_ARGS__)
#define LOGITLESS_XLA_HANDLERS_WITH_SCRATCH(name, ...) \
  LOGITLESS_XLA_HANDLERS_OF(name, on_cuda_with_scratch, cuda_binding_with_scratch, ##__VA_ARGS__)
#define LOGITLESS_XLA_HANDLERS_OF(name, on_gpu, gpu_binding, ...)                          \
  extern "C" LOGITLESS_API XLA_FFI_Error* logitless_xla_##name##_cpu(XLA_FFI_CallFrame*);  \
  extern "C" LOGITLESS_API XLA_FFI_Error* logitless_xla_##name##_cuda(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(logitless_xla_##name##_cpu,                                \
                                logitless::xla_handlers::on_cpu<run_##name>,               \
                                logitless::xla_handlers::cpu_binding());                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(logitless_xla_##name##_cuda,                               \
                                logitless::xla_handlers::on_gpu<run_##name>,               \
                                logitless::xla_handlers::gpu_binding(), ##__VA_ARGS__)
