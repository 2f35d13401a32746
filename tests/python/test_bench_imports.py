"""Names that scripts of bench and examples import from this repository exist: nothing else runs most of those scripts."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["python", "tests/python", "tests/python/torch", "tests/python/jax", "tests/python/support", "bench", "examples/python"]
SCRIPTS = sorted(p for folder in ("bench", "examples") for p in (ROOT / folder).rglob("*.py"))


def names_in(path: Path) -> set[str]:
    """Returns what a module defines, imports or holds as a submodule; "*" if that depends on its run."""
    found = {p.stem for p in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return found


def file_of(module: str) -> Path | None:
    places = (ROOT / folder / module.replace(".", "/") for folder in FOLDERS)
    files = (f for place in places for f in (place.with_suffix(".py"), place / "__init__.py"))
    return next((f for f in files if f.is_file()), None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_imported_names_exist(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or not (file := file_of(node.module)):
            continue
        there = names_in(file)
        for name in node.names:
            assert "*" in there or name.name in there, f"{script.name}:{node.lineno}: {node.module} has no {name.name}"
