"""Lines of the user's code, as reports and errors name them: "loss.py:12: logits = (h @ w.T).float()"."""

from __future__ import annotations

import io
import linecache
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

_OWN = str(Path(__file__).parents[1]) + os.sep
INSTALLED = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")})


def chosen(frames: Iterable[tuple[str, int]], frameworks: tuple[str, ...]) -> tuple[str, int] | None:
    """Chooses the frame of the user's code. frames: (file, line), innermost first. Returns the first outside of
    installed packages, else the first outside of this package and the frameworks' folders."""
    inside = None
    for file, line in frames:
        if file.startswith((_OWN, *frameworks)) or file.startswith("<eval_with_key>"):
            continue
        if not file.startswith(INSTALLED):
            return file, line
        inside = inside or (file, line)
    return inside


_LONGEST = 100  # characters of a line of code that reports show


def brief(code: str) -> str:
    """Cuts a long line of code: to its lambda if it has one, and to the characters that reports show."""
    if len(code) > _LONGEST:
        code = _only_lambda(code)
    return code if len(code) <= _LONGEST else code[: _LONGEST - 1].rstrip() + "…"


def _only_lambda(code: str) -> str:
    """Returns the only lambda of a line, or the line itself."""
    begin, end, depth, in_body = None, None, 0, False
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.string == "lambda" and token.type == tokenize.NAME:
                if begin is not None:
                    return code
                begin = token.start[1]
            elif begin is None or end is not None or token.type != tokenize.OP:
                continue
            elif depth == 0 and (token.string in ")]}" or in_body and token.string == ","):
                end = token.start[1]
            elif depth == 0 and token.string == ":":
                in_body = True
            else:
                depth += (token.string in "([{") - (token.string in ")]}")
    except (tokenize.TokenError, SyntaxError):  # the line goes on in the next one
        pass
    return code if begin is None else code[begin:end].rstrip()


def shown(file: str, line: int) -> str:
    code = brief(linecache.getline(file, line).strip())
    return f"{os.path.basename(file)}:{line}" + (f": {code}" if code else "")


def located(message: str, locations: Mapping[str, str]) -> str:
    """Prefixes a message with the line of the first value in it that has one. Values appear as "%name" or "name
    (operation) type"."""
    names = (a or b for a, b in re.findall(r"%(\w+)|\b(\w+) \(\w+\) \w+\[", message))
    found = (locations[name] for name in names if name in locations)
    location = next(found, None)
    return message if location is None else f"{location}: {message}"


def located_in(message: str, text: str, locations: Mapping[str, str]) -> str:
    """Prefixes a compiler's message as ``located`` does, or with the line of the statement of the text that it names, such
    as "program:4:9: ..."."""
    made = located(message, locations)
    place = re.match(r"program:(\d+):", message)
    if made != message or place is None:
        return made
    [statement] = text.splitlines()[int(place[1]) - 1 : int(place[1])] or [""]
    found = next((locations[name] for name in re.findall(r"%(\w+)", statement) if name in locations), None)
    return message if found is None else f"{found}: {message}"
