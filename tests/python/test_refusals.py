"""docs/reference/refusals.md lists every NotImplementedError of the Python package, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/logitless"
ANY = "…"


def constants(folder):
    """Returns the strings that modules of a folder name in capitals."""
    found = {}
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found[node.targets[0].id] = node.value.value
    return found


def text(node, named):
    """Returns a message, with ANY for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text(node.value, named)
    return named.get(node.id, ANY) if isinstance(node, ast.Name) else ANY


def raised():
    """Returns the messages of ``raise NotImplementedError(...)`` by file and line. Bare ones are of abstract methods."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        named = constants(path.parent)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", "") == "NotImplementedError":
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text(node.exc.args[0], named)
    return found


def listed():
    """Returns the messages in the page's tables."""
    (page,) = (ROOT / "docs").rglob("refusals.md")
    tables = re.split(r"^\| message \| reason \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [row for table in tables for row in re.findall(r"^\| `([^`]+)` \|", table.split("\n\n")[0], re.MULTILINE)]


def describes(row, message):
    return row == message or (len(row.strip(ANY)) > 4 and message.startswith(row.rstrip(ANY)))


def test_every_refusal_has_a_row_and_every_row_a_refusal():
    messages, rows = raised(), listed()
    assert len(messages) > 50 and len(set(rows)) == len(rows)
    missing = {where: message for where, message in messages.items() if not any(describes(r, message) for r in rows)}
    assert not missing, missing
    stale = [row for row in rows if not any(describes(row, message) for message in messages.values())]
    assert not stale, stale


@pytest.mark.parametrize("source, expected", [
    ('"target: has none"', "target: has none"), ('f"{name}: expected {a.b}, got " f"{NAME!r}"', "…: expected …, got loss"), ("why", "…"),
])
def test_messages_are_read_with_their_values_left_out(source, expected):
    assert text(ast.parse(source, mode="eval").body, {"NAME": "loss"}) == expected
    assert describes(expected, expected) and not describes(ANY, "another")
