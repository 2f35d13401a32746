// The loops of the library; see the public header.
#pragma once

#include "logitless/parallel.h"  // IWYU pragma: export
