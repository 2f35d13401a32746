// Exceptions of the library. Every message names the argument, the expected value and the actual
// one.
#pragma once

#include <stdexcept>
#include <string>

#include "logitless/export.h"

namespace logitless {

// Base of all exceptions, so that one catch is enough.
class LOGITLESS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a shape, dtype, option, index, file.
class LOGITLESS_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A valid request that no kernel or plan serves; the text lists the reason of each.
class LOGITLESS_API Unsupported : public Error {
 public:
  using Error::Error;
};

// The device, the operating system or the file system failed.
class LOGITLESS_API DeviceError : public Error {
 public:
  using Error::Error;
};

// A bug in logitless.
class LOGITLESS_API InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace logitless
