"""Replacement of a library's function in the modules that have imported it."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(name: str, found: Any, made: Any) -> None:
    """Replaces what modules call ``name``, those that were generated among them, except this package's."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "logitless" and getattr(module, "__dict__", {}).get(name) is found:
            setattr(module, name, made)
