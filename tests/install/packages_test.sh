#!/bin/bash
# Checks that a machine without some of the packages reports them in one line: packages_test.sh SOURCE_DIR WORK_DIR
# CMAKE CXX
set -uo pipefail

source=$1 work=$2 cmake=$3 cxx=$4
rm -rf "$work"
said=$("$cmake" -S "$source" -B "$work" -DCMAKE_CXX_COMPILER="$cxx" -DLOGITLESS_CUDA=OFF -DLOGITLESS_PYTHON=ON \
  -DLOGITLESS_BUILD_CLI=OFF -DLOGITLESS_BUILD_TESTS=OFF -DLOGITLESS_BUILD_BENCH=OFF -DLOGITLESS_BUILD_EXAMPLES=OFF \
  -DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON 2>&1) && { echo "it was configured"; exit 1; }
rm -rf "$work"
line="logitless: missing libhwy-dev libeigen3-dev; on Debian: apt-get install -y libhwy-dev libeigen3-dev"
grep -qE "^ *$line\$" <<<"$said" || { echo "expected the line '$line' in: $said"; exit 1; }
[[ $(grep -cE "CMake (Error|Warning)" <<<"$said") -eq 1 ]] || { echo "expected one error in: $said"; exit 1; }
