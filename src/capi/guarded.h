// Turns exceptions into status codes, for every function of the C ABI.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "core/check.h"
#include "logitless/c_api.h"
#include "logitless/error.h"

namespace logitless::capi {

// Stores the text for logitless_last_error() of this thread, and returns the status.
logitless_status fail(logitless_status status, const char* text) noexcept;

template <typename F>
logitless_status guarded(F&& function) noexcept {
  try {
    std::forward<F>(function)();
    return LOGITLESS_OK;
  } catch (const InvalidArgument& e) {
    return fail(LOGITLESS_INVALID_ARGUMENT, e.what());
  } catch (const Unsupported& e) {
    return fail(LOGITLESS_UNSUPPORTED, e.what());
  } catch (const DeviceError& e) {
    return fail(LOGITLESS_DEVICE_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return fail(LOGITLESS_DEVICE_ERROR, "out of memory");
  } catch (const std::exception& e) {
    return fail(LOGITLESS_INTERNAL_ERROR, e.what());
  } catch (...) {
    return fail(LOGITLESS_INTERNAL_ERROR, "an exception of unknown type");
  }
}

template <typename T>
void require_pointer(T* pointer, const char* name) {
  require(pointer != nullptr, name, ": expected a pointer, got NULL");
}

}  // namespace logitless::capi
