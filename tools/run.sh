#!/bin/bash
# Builds the command and trains with it: tools/run.sh [argument of `logitless train`...]
# GPU kernels take longer to compile than everything else. They are left out where nvcc is found but no GPU. The build
# folder is then ${BUILD}-cpu, so that neither build undoes the other. This does not apply if CMAKE_ARGS has
# -DLOGITLESS_CUDA=..., or the command was built in $BUILD before.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc_here() { [[ -n ${CUDACXX:-} || -x /usr/local/cuda/bin/nvcc ]] || command -v nvcc >/dev/null; }

build=${BUILD:-build}
if [[ ${CMAKE_ARGS:-} != *LOGITLESS_CUDA* && ! -x $build/src/cli/logitless ]] && nvcc_here && ! tools/gpu_here.sh; then
  build=$build-cpu
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DLOGITLESS_CUDA=OFF"
  echo "no GPU here: built for the CPU, in $build (CMAKE_ARGS=-DLOGITLESS_CUDA=ON builds GPU kernels)"
fi
BUILD=$build tools/build.sh release src/cli/logitless
exec "$build/src/cli/logitless" train "$@"
