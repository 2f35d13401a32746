"""Chunked functions as methods of a class."""

from __future__ import annotations

import types
from collections.abc import Callable


def binds(function: Callable) -> bool:
    """Returns whether Python binds an instance to a class attribute, unlike to a ``staticmethod`` or
    ``functools.partial``."""
    bind = getattr(type(function), "__get__", None)
    return bind is not None and isinstance(bind(function, object(), object), types.MethodType)
