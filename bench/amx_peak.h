#pragma once

namespace bench {

// FLOP/s of `threads` threads that do nothing but bf16 tile products on registers; 0 where there is
// no AMX.
double amx_peak_flops(int threads);

}  // namespace bench
