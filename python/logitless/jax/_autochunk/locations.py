"""Lines of the user's function that its primitives, and their gradients, come from."""

from __future__ import annotations

import itertools
import os
import traceback

import jax
import jaxlib

from logitless._autochunk.locations import chosen, shown

_JAX = tuple({os.path.dirname(module.__file__) + os.sep for module in (jax, jaxlib)})

_TRACER = os.path.join(os.path.dirname(__file__), "trace.py")


def location_of(source) -> str:
    """Returns the line of an equation's source_info, such as "loss.py:12: logits = h @ w.T"; "" if unknown."""
    frames = getattr(getattr(source, "traceback", None), "frames", None) or ()
    within = itertools.takewhile(lambda frame: frame.file_name != _TRACER, frames)
    found = chosen([(frame.file_name, frame.line_num) for frame in within], _JAX)
    return shown(*found) if found else ""


def location_of_error(error: BaseException) -> str:
    """Returns the line that raised an error, as the prefix of a message."""
    frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    found = chosen(frames, _JAX)
    return f"{shown(*found)}: " if found else ""
