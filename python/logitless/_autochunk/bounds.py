"""Bounds of the integers that a statement computes, derived from the bounds of its operands."""

from __future__ import annotations

import math
from collections.abc import Sequence

Bounds = tuple[float, float]  # the smallest and the largest value

_KEPT = {"reshape", "transpose", "slice", "broadcast", "flip", "cast", "reduce_max", "stop_gradient"}
_TESTS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"}
_MOST = 2**53  # sums beyond it are not exact in float64


def bounds_of(text: str, operands: Sequence[Bounds | None], shape: Sequence[int]) -> Bounds | None:
    """Returns a statement's bounds, computed from its operation and its operands' bounds. Returns None if they are
    unknown."""
    if text == "iota":
        return 0, max(max(shape, default=1) - 1, 0)
    if text in _TESTS:
        return 0, 1
    if text == "select":
        operands = operands[1:]
    if text in ("max", "min"):
        ends = [o or (-math.inf, math.inf) for o in operands]
        chosen = max if text == "max" else min
        found = tuple(chosen(o[k] for o in ends) for k in range(2))
        return None if found == (-math.inf, math.inf) else found
    if not operands or None in operands:
        return None
    if text in _KEPT:
        return operands[0]
    if text in ("select", "concat"):
        return min(o[0] for o in operands), max(o[1] for o in operands)
    found = None
    if text == "add":
        found = operands[0][0] + operands[1][0], operands[0][1] + operands[1][1]
    elif text == "sub":
        found = operands[0][0] - operands[1][1], operands[0][1] - operands[1][0]
    elif text == "mul" and all(math.isfinite(n) for o in operands for n in o):
        ends = [a * b for a in operands[0] for b in operands[1]]
        found = min(ends), max(ends)
    return found if found is not None and all(abs(n) < _MOST for n in found) else None
