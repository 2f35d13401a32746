"""Lines of the user's code, as reports and errors name them: "loss.py:12: logits = (h @ w.T).float()"."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

_OWN = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")})


def chosen(frames: Iterable[tuple[str, int]], frameworks: tuple[str, ...]) -> tuple[str, int] | None:
    """Chooses the frame of the user's code. frames: (file, line), innermost first. Returns the first outside of
    installed packages, else the first outside of this package and the frameworks' folders."""
    inside = None
    for file, line in frames:
        if file.startswith((_OWN, *frameworks)) or file.startswith("<eval_with_key>"):
            continue
        if not file.startswith(_INSTALLED):
            return file, line
        inside = inside or (file, line)
    return inside


def shown(file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"{os.path.basename(file)}:{line}" + (f": {code}" if code else "")


def located(message: str, locations: Mapping[str, str]) -> str:
    """Prefixes a message with the line of the first value in it that has one. Values appear as "%name" or "name
    (operation) type"."""
    names = (a or b for a, b in re.findall(r"%(\w+)|\b(\w+) \(\w+\) \w+\[", message))
    found = (locations[name] for name in names if name in locations)
    location = next(found, None)
    return message if location is None else f"{location}: {message}"
