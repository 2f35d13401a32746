"""Values that a chunked function reads besides its arguments, which may change; copies of it; budgets that are not
met."""

import copy
import functools
import pickle
import random
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.jax import Unsupported, autochunk

TEMPERATURE = 2.0
X = jnp.arange(12.0).reshape(3, 4)
HELD = types.SimpleNamespace(factor=1.0, table=np.arange(4.0), shift=jnp.zeros(4), steps=[1.0, 2.0], act=jnp.tanh)


def of_what_is_held(x):
    return jnp.sum(HELD.act(0.1 * x * TEMPERATURE / HELD.factor) * sum(HELD.steps) * HELD.table + HELD.shift)


@autochunk
def decorated(x):
    return jnp.sum(x * TEMPERATURE)


class Layer:
    def __init__(self):
        self.factor = 1.0
        self.chunked = autochunk(self.loss)

    def loss(self, x):
        return jnp.sum(jnp.exp(x * 0.1) * self.factor)


def agrees(chunked, function):
    got, wanted = (jax.value_and_grad(f)(X) for f in (chunked, function))
    for g, w in zip(got, wanted):
        np.testing.assert_allclose(g, w, rtol=1e-5)
    np.testing.assert_allclose(chunked(X), function(X), rtol=1e-5)


@pytest.mark.parametrize("executor", ["native", "python"])
def test_what_changes_is_compiled_again(executor, monkeypatch):
    """A call sees the present global, attribute, list, numpy array and array, like the function itself."""
    chunked = autochunk(of_what_is_held, executor=executor)
    agrees(chunked, of_what_is_held)
    monkeypatch.setitem(globals(), "TEMPERATURE", 0.5)
    agrees(chunked, of_what_is_held)
    changes = {"factor": 3.0, "shift": jnp.ones(4), "table": np.ones(4), "steps": [4.0], "act": jnp.sin}
    for name, value in changes.items():
        monkeypatch.setattr(HELD, name, value)
        agrees(chunked, of_what_is_held)
    HELD.steps.append(1.0)
    agrees(chunked, of_what_is_held)
    assert sum(len(plans) for plans in chunked._made._made.values()) == 8


def test_a_closed_over_variable_that_changes():
    factor = 1.0

    def function(x):
        return jnp.sum(x * factor)

    chunked = autochunk(function)
    agrees(chunked, function)
    factor = 4.0
    agrees(chunked, function)


def test_copies():
    """Deep copies and pickles of an object that holds a chunked method, and of a decorated function."""
    layer = Layer()
    for _ in range(2):
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            other.factor = 2.0
            agrees(other.chunked, other.loss)
            agrees(layer.chunked, layer.loss)
    assert pickle.loads(pickle.dumps(decorated)) is decorated and copy.deepcopy(decorated) is decorated


@pytest.mark.parametrize("executor", ["native", "python"])
def test_a_budget_that_is_not_met_is_a_warning(executor):
    def missed(a, b):
        return jnp.square((a.T @ b) @ (b.T @ a)).sum()

    args = jnp.ones((8, 128)), jnp.ones((8, 128))
    chunked = autochunk(missed, memory_budget=512, executor=executor)
    with pytest.warns(UserWarning, match=r"autochunk: forward takes .* memory_budget is 512 B: .*would do") as warned:
        chunked(*args)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked(*args)
    text = chunked.explain()
    took = re.search(r"the function itself takes ([\d.]+) KiB beyond inputs and results, this ([\d.]+) KiB", text)
    compiled = jax.jit(missed).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert float(took[1]) == pytest.approx(compiled / 1024, abs=0.1)


@jax.custom_vjp
def scaled(x):
    return x


scaled.defvjp(lambda x: (x, None), lambda _, upstream: (upstream * HELD.factor,))


def test_a_custom_gradient_that_reads_a_variable(monkeypatch):
    function = lambda x: jnp.sum(jnp.exp(0.1 * scaled(x)))  # noqa: E731
    chunked = autochunk(function)
    for factor in (2.0, 5.0):
        monkeypatch.setattr(HELD, "factor", factor)
        jax.clear_caches()
        np.testing.assert_allclose(jax.grad(chunked)(X), jax.grad(function)(X), rtol=1e-6)


OPTIONS, ITEMS, KEPT = {"t": 1.0}, [{"t": 1.0}], []


def default(x, options=OPTIONS):
    return jnp.sum(x * options["t"])


@pytest.mark.parametrize(
    "function, change",
    [(default, lambda: OPTIONS.update(t=3.0)), (lambda x: jnp.sum(x * ITEMS[0]["t"]), lambda: ITEMS[0].update(t=3.0))],
)
def test_values_within_others(function, change):
    chunked = autochunk(function)
    agrees(chunked, function)
    change()
    agrees(chunked, function)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: jnp.sum(x) * random.random(), "random.random is drawn once"),
        (lambda x: jnp.sum(x) * np.random.rand(), "a number of np.random is drawn once"),
        (lambda x: KEPT.append(jnp.sum(x)) or jnp.sum(x), "keeps a tensor in KEPT, which is done once"),
    ],
)
def test_what_a_function_does_outside_of_itself(function, message):
    with pytest.raises(Unsupported, match=message):
        autochunk(function)(X)
    assert KEPT == []


class Holder:
    def __init__(self, function):
        self.function = function


def test_tensors_in_lists_of_the_function_itself():
    def local(x):
        kept = []
        Holder(lambda y: kept.append(y)).function(x * 2)
        Holder(functools.partial(kept.append)).function(x * 3)
        return jnp.sum(kept[0] * kept[1])

    agrees(autochunk(local), local)


def test_what_only_stays_behind():
    def kept(x):
        OPTIONS["mean"] = jnp.mean(x)
        return jnp.sum(x) + OPTIONS["mean"]

    with pytest.warns(UserWarning, match="what the function keeps in OPTIONS is not there after a call"):
        made = autochunk(kept)(X)
    assert "mean" not in OPTIONS
    np.testing.assert_allclose(made, kept(X), rtol=1e-6)
    del OPTIONS["mean"]
