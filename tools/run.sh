#!/bin/bash
# Builds the command and trains with it: tools/run.sh [argument of `logitless train`...]
# GPU kernels take longer to compile than everything else. They are left out where nvcc is found but no GPU. The build
# folder is then ${BUILD}-cpu, so that neither build undoes the other. This does not apply if CMAKE_ARGS has
# -DLOGITLESS_CUDA=..., or the command was built in $BUILD before. GPU_HERE names a command whose status says whether
# there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

# Looks for the driver, in a container or under WSL as well.
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
