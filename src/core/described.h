// A view in a message of require(): its text is made only if the message is. It takes about a
// microsecond, and a call checks dozens of views.
#pragma once

#include <ostream>

#include "logitless/tensor_view.h"

namespace logitless {

struct Described {
  const ConstTensorView& view;
};
inline Described described(const ConstTensorView& view) { return {view}; }
inline std::ostream& operator<<(std::ostream& out, const Described& of) {
  return out << describe(of.view);
}

}  // namespace logitless
