#!/bin/bash
# Its status is 0 where there is a GPU: it looks for the driver, in a container or under WSL as well. GPU_HERE names a
# command that answers instead.
set -euo pipefail
[[ -z ${GPU_HERE:-} ]] || exec "$GPU_HERE"
for file in /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0 /dev/dxg; do
  [[ ! -e $file ]] || exit 0
done
[[ $({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null) == *libcuda.so.1* ]]
