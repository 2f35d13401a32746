"""Types of autochunk: overloads that keep a function's signature, for PyTorch and for JAX."""

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import logitless
import pytest
from logitless import _c_api
from logitless._autochunk.options import Keywords

SEEN = Path(__file__).parent / "support" / "autochunk_types.py"


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python before 3.11 keeps no overloads")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_overloads_keep_the_signature(framework):
    module = pytest.importorskip(f"logitless.{framework}")
    direct, with_options = typing.get_overloads(module.autochunk)
    own = inspect.signature(module.autochunk).parameters
    assert ["fn", *Keywords.__annotations__] == list(own)
    hints = [typing.get_type_hints(f, localns={"Unpack": typing.Unpack}) for f in (direct, with_options)]
    assert all(found["options"] == typing.Unpack[Keywords] for found in hints)
    P, R = typing.get_args(hints[0]["fn"])
    assert isinstance(P, typing.ParamSpec) and isinstance(R, typing.TypeVar)
    assert hints[0]["return"] == module.AutoChunked[P, R]
    assert typing.get_args(hints[1]["return"])[-1] == module.AutoChunked[P, R]

    def plain(hidden, *, scale=1.0):
        return hidden

    assert inspect.signature(module.autochunk(plain)) == inspect.signature(plain)
    assert issubclass(module.Unsupported, NotImplementedError)


@pytest.mark.parametrize("name, of_library", [("_Precision", _c_api.PRECISIONS), ("_Reduction", _c_api.REDUCTIONS)])
def test_stubs_allow_what_the_library_does(name, of_library):
    stub = (Path(logitless.__file__).parent / "torch/loss.pyi").read_text()
    (allowed,) = re.findall(rf"^{name} = Literal\[(.*)\]$", stub, re.M)
    assert set(re.findall(r'"(\w+)"', allowed)) == of_library.keys()


def test_what_a_type_checker_sees(tmp_path):
    """Runs mypy where it is installed. It sees this package alone: reading the frameworks takes minutes."""
    pytest.importorskip("mypy")
    (tmp_path / "logitless").symlink_to(Path(logitless.__file__).parent)
    options = ["--no-site-packages", "--follow-imports=silent", "--ignore-missing-imports", "--no-incremental"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, SEEN], capture_output=True, text=True,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
    )
    said = {}
    for line, text in re.findall(r"autochunk_types\.py:(\d+): \w+: (.*)", done.stdout):
        said.setdefault(int(line), []).append(text)
    expected = {
        number: line.split("  # ")[1]
        for number, line in enumerate(SEEN.read_text().splitlines(), 1)
        if "  # " in line
    }
    assert len(expected) == 10 and said.keys() == expected.keys(), done.stdout
    for number, text in expected.items():
        assert any(text in message for message in said[number]), done.stdout
