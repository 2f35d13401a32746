#pragma once

// Functions compiled for the CPU and, by nvcc, for the GPU too.
#if defined(__CUDACC__)
#define LOGITLESS_HOST_DEVICE __host__ __device__
#else
#define LOGITLESS_HOST_DEVICE
#endif
