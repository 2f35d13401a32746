#!/bin/bash
# Runs a command so that ThreadSanitizer works: tools/under_tsan.sh COMMAND...
# GCC's run-time library cannot place its shadow memory when the kernel randomises addresses over more than 28 bits;
# setarch -R turns that off for the command, where the system lets it.
set -euo pipefail

export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
if setarch "$(uname -m)" -R true 2>/dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
