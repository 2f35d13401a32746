#!/bin/bash
# Builds the command and trains with it: tools/run.sh [argument of `logitless train`...]
# GPU kernels take longer to compile than all else. Where nvcc is found and no GPU, they are left out, in a folder of its
# own, ${BUILD}-cpu, so that neither this nor a build with them undoes the other; unless CMAKE_ARGS has -DLOGITLESS_CUDA=...,
# or the command was built in $BUILD before. GPU_HERE names a command that says by its status whether there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

# The driver, as the system has it with a GPU, in a container or under WSL.
gpu_here() {
  local file
  for file in /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0 /dev/dxg; do
    [[ ! -e $file ]] || return 0
  done
  [[ $({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null) == *libcuda.so.1* ]]
}
nvcc_here() { [[ -n ${CUDACXX:-} || -x /usr/local/cuda/bin/nvcc ]] || command -v nvcc >/dev/null; }

build=${BUILD:-build}
if [[ ${CMAKE_ARGS:-} != *LOGITLESS_CUDA* && ! -x $build/src/cli/logitless ]] && nvcc_here && ! ${GPU_HERE:-gpu_here}; then
  build=$build-cpu
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DLOGITLESS_CUDA=OFF"
  echo "no GPU here: built for the CPU, in $build (CMAKE_ARGS=-DLOGITLESS_CUDA=ON builds GPU kernels)"
fi
BUILD=$build tools/build.sh release src/cli/logitless
exec "$build/src/cli/logitless" train "$@"
