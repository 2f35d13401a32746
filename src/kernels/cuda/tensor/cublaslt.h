// Declarations of the part of cuBLASLt that this library calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless::cuda::lt {

using Handle = void*;
using Descriptor = void*;  // of a matrix product
using Layout = void*;
using Preference = void*;

// Layouts of cublasLtMatmulAlgo_t and cublasLtMatmulHeuristicResult_t.
struct Algorithm {
  std::uint64_t data[8];
};
struct Found {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// Values of cublasLt.h, cublas_api.h and library_types.h.
inline constexpr int kF32 = 0, kF64 = 1, kF16 = 2, kBf16 = 14;
inline constexpr int kCompute32F = 68, kCompute32FPedantic = 69, kCompute64FPedantic = 71;
inline constexpr int kDescriptorTransposeA = 3, kDescriptorTransposeB = 4, kDescriptorEpilogue = 7,
                     kDescriptorBias = 8, kDescriptorAux = 11, kDescriptorAuxLeading = 12;
// Epilogues; aux is the input of gelu, which its gradient reads.
inline constexpr std::int32_t kEpilogueBias = 4, kEpilogueGelu = 32 | 128,
                              kEpilogueGeluGradient = 64 | 128;
inline constexpr int kLayoutBatchCount = 5, kLayoutBatchStride = 6;
inline constexpr int kPreferenceWorkspace = 1, kPreferenceReductions = 3, kPreferenceAlignment = 5;
inline constexpr int kAlgorithmId = 0, kAlgorithmTile = 1, kAlgorithmSplit = 2,
                     kAlgorithmStages = 6, kAlgorithmCluster = 8;
inline constexpr std::uint32_t kReduceInComputeType = 2;  // no atomics, no narrow partial sums

struct Functions {
  std::string missing;  // what is missing, or empty
  int (*create)(Handle*) = nullptr;
  int (*make_descriptor)(Descriptor*, int, int) = nullptr;
  int (*free_descriptor)(Descriptor) = nullptr;
  int (*set_descriptor)(Descriptor, int, const void*, std::size_t) = nullptr;
  int (*make_layout)(Layout*, int, std::uint64_t, std::uint64_t, std::int64_t) = nullptr;
  int (*free_layout)(Layout) = nullptr;
  int (*set_layout)(Layout, int, const void*, std::size_t) = nullptr;
  int (*make_preference)(Preference*) = nullptr;
  int (*free_preference)(Preference) = nullptr;
  int (*set_preference)(Preference, int, const void*, std::size_t) = nullptr;
  int (*find_algorithms)(Handle, Descriptor, Layout, Layout, Layout, Layout, Preference, int,
                         Found*, int*) = nullptr;
  int (*get_algorithm)(const Algorithm*, int, void*, std::size_t, std::size_t* written) = nullptr;
  int (*multiply)(Handle, Descriptor, const void* alpha, const void* a, Layout, const void* b,
                  Layout, const void* beta, const void* c, Layout, void* d, Layout,
                  const Algorithm*, void* workspace, std::size_t, cudaStream_t) = nullptr;
};
const Functions& functions();

// Returns an attribute kAlgorithm...; -1 where the library does not report it.
std::int64_t attribute_of(const Algorithm& algorithm, int attribute);

}  // namespace logitless::cuda::lt
