"""Completion of each module shows its public API, lazy imports included."""

import importlib
import os
import pickle
import rlcompleter
import subprocess
import sys

import pytest

MODULES = ("logitless", "logitless.torch", "logitless.torch.losses", "logitless.jax", "logitless.jax.losses")


@pytest.mark.parametrize("name", MODULES)
def test_dir_is_the_public_api(name):
    pytest.importorskip((name.split(".") + ["numpy"])[1])
    module = importlib.import_module(name)
    assert {*dir(module)} - {"torch", "jax"} == {*module.__all__} and len({*module.__all__}) == len(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
    completed = rlcompleter.Completer({"m": module}).attr_matches("m.")
    assert {c.removeprefix("m.").rstrip("()") for c in completed} >= {n for n in module.__all__ if not n.startswith("_")}
    with pytest.raises(AttributeError, match="no attribute 'linear_nothing'"):
        module.linear_nothing


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_losses_are_pickled_by_name(framework):
    pytest.importorskip(framework)
    module = importlib.import_module(f"logitless.{framework}.losses")
    for name in module.__all__:
        loss = getattr(module, name)
        assert pickle.loads(pickle.dumps(loss)) is loss and loss.__module__.startswith(module.__name__ + ".")


def test_listing_imports_nothing():
    pytest.importorskip("torch")
    code = "import sys, logitless.torch as t; before = set(sys.modules); dir(t); assert set(sys.modules) == before; t.linear_sample"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
