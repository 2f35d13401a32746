"""Log-sum-exps as a softmax subtracts them, in any framework."""

from __future__ import annotations

import math

from logitless._autochunk.lower import Value, Writer


def settled(w: Writer, lse: Value) -> Value:
    """The log-sum-exp, and NaN where it is infinite: inf of a row that holds inf, whose softmax is NaN everywhere. The
    compiler knows this form (passes/settle.cpp), and so does fused.py."""
    finite = w.map("lt", [w.map("abs", [lse], lse.dtype), w.number(math.inf, lse.dtype)], w.dtypes.i8)
    made = w.map("select", [finite, lse, w.number(math.nan, lse.dtype)], lse.dtype)
    w.settled[lse.name] = made
    return made
