"""Warnings at the caller's line."""

from __future__ import annotations

import sys
import warnings


def warn(text: str) -> None:
    """Issues a warning at the caller's line, outside of this package and the framework."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("logitless.", "torch.", "jax.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
