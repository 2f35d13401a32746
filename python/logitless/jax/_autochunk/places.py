"""The lines of a function that its primitives, and their gradients, come from."""

from __future__ import annotations

import itertools
import os
import traceback

import jax
import jaxlib

from logitless._autochunk.places import chosen, shown

_JAX = tuple({os.path.dirname(module.__file__) + os.sep for module in (jax, jaxlib)})

_TRACER = os.path.join(os.path.dirname(__file__), "trace.py")


def place_of(source) -> str:
    """ "loss.py:12: logits = h @ w.T" of the source_info of an equation; "" where nothing is known."""
    frames = getattr(getattr(source, "traceback", None), "frames", None) or ()
    within = itertools.takewhile(lambda frame: frame.file_name != _TRACER, frames)
    found = chosen([(frame.file_name, frame.line_num) for frame in within], _JAX)
    return shown(*found) if found else ""


def place_of_error(error: BaseException) -> str:
    """The line that an error passed through, for a message to begin with."""
    frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    found = chosen(frames, _JAX)
    return f"{shown(*found)}: " if found else ""
