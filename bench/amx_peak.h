#pragma once

namespace bench {

// Returns the FLOP/s of `threads` threads that multiply bf16 tiles in registers; 0 without AMX.
double amx_peak_flops(int threads);

}  // namespace bench
