"""First calls of autochunked functions inside JAX's transformations and inside other chunked functions; calls without
rows; release of plans; lines that messages name."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless._autochunk.function as plans
from logitless.jax import Unsupported, autochunk

ROWS, DIM, VOCAB = 12, 4, 60


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    lse = jax.nn.logsumexp(logits, -1)
    return (lse - jnp.take_along_axis(logits, target[:, None], 1)[:, 0] + 1e-3 * lse**2).mean()


def per_token(hidden, weight, target):
    return jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T), target[:, None], 1)[:, 0]


def arguments(rows=ROWS):
    random = np.random.default_rng(0)
    hidden, weight = (random.standard_normal((n, DIM)).astype(np.float32) for n in (rows, VOCAB))
    return jnp.asarray(hidden), jnp.asarray(weight), jnp.arange(rows) * 7 % VOCAB


def gradients(fn):
    return jax.value_and_grad(lambda *args: (fn(*args) ** 2).sum(), (0, 1))


def check_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fn", "executor"), [(z_loss, "python"), (per_token, "native")])
@pytest.mark.parametrize("how", ["jit", "grad of jit", "checkpoint", "vmap of grad", "jacrev"])
def test_cold(fn, executor, how):
    args = arguments(4 if how == "jacrev" else ROWS)
    parts = tuple(a.reshape(3, 4, *a.shape[1:]) if i != 1 else a for i, a in enumerate(args)) if "vmap" in how else args
    transformed = {
        "jit": lambda f: jax.jit(gradients(f)),
        "grad of jit": lambda f: gradients(jax.jit(f)),
        "checkpoint": lambda f: gradients(jax.checkpoint(lambda h, w, t: f(jnp.tanh(h * 2), w, t))),
        "vmap of grad": lambda f: jax.vmap(gradients(f), (0, None, 0)),
        "jacrev": lambda f: jax.jacrev(f),
    }[how]
    check_same(transformed(autochunk(fn, chunks=3, executor=executor))(*parts), jax.jit(transformed(fn))(*parts))


@pytest.mark.parametrize("executor", ["python", "native"])
def test_inside_of_another_and_no_rows(executor):
    inner = autochunk(z_loss, chunks=3, executor=executor)
    outer = autochunk(lambda h, w, t: inner(h * 2, w, t) * 3, chunks=3, executor=executor)
    hidden, weight, target = arguments()
    plain = jax.jit(gradients(lambda h, w, t: z_loss(h * 2, w, t) * 3))
    check_same(gradients(outer)(hidden, weight, target), plain(hidden, weight, target))
    assert inner.last is None
    none = hidden[:0], weight, target[:0]
    for fn in (z_loss, per_token):
        chunked, plain = (
            jax.value_and_grad(lambda *a, f=f: f(*a).sum(), (0, 1)) for f in (autochunk(fn, executor=executor), fn)
        )
        check_same(chunked(*none), jax.jit(plain)(*none))


def test_plans_let_go_before_their_backward(monkeypatch):
    monkeypatch.setattr(plans, "_KEPT", 2)
    chunked = autochunk(z_loss, chunks=3)
    waiting = []
    for rows in (3, 4, 5):
        args = arguments(rows)
        waiting.append((args, *jax.vjp(lambda h, args=args: chunked(h, *args[1:]), args[0])))
        assert len(chunked._made) <= 2
    for args, made, pull in waiting:
        check_same((made, pull(jnp.ones_like(made))[0]), jax.jit(jax.value_and_grad(z_loss))(*args))


def test_the_lines_that_messages_name():
    def of_frequencies(x):
        doubled = x * 2
        return abs(jnp.fft.rfft(doubled)).sum()

    def branching(x):
        return x if x.sum() > 0 else 2 * x

    name = r"autochunk: test_jax_autochunk_calls\.py:\d+: "
    # The second time JAX reuses its cached trace of rfft, which has another line.
    for fn in (of_frequencies, jax.jit(of_frequencies), lambda x: abs(jnp.fft.rfft(x)).mean()):
        line = r".*rfft\(x\)\)\.mean.*" if fn.__name__ == "<lambda>" else r"return abs\(jnp\.fft\.rfft\(doubled\)\)\.sum"
        with pytest.raises(Unsupported, match=rf"{name}{line}\S*: fft\(float32\[3, 4\]\)"):
            autochunk(fn)(jnp.ones((3, 4)))
    with pytest.raises(Unsupported, match=name + r"return x if x\.sum\(\) > 0 else 2 \* x: the function needs the values"):
        autochunk(branching)(jnp.ones((3, 4)))
    text = autochunk(z_loss, memory_budget="1KiB").explain(*arguments())
    assert re.search(r"\n  test_jax_autochunk_calls\.py:\d+: .*: \w+ %\w+ f32\[[\d, ]+\]: along dimension", text)


class Output:
    def __init__(self, loss):
        self.loss = loss


def test_outputs_and_effects_that_are_refused():
    x = jnp.ones((3, 4))
    with pytest.raises(Unsupported, match="returns a Output, whose contents are no outputs"):
        autochunk(lambda x: (x.sum(), Output(x.max())))(x)
    assert autochunk(lambda x: (x.sum(), Output(3)))(x)[1].loss == 3
    with pytest.raises(Unsupported, match="needs the values of an array"):
        autochunk(lambda x: x.sum() * np.asarray(x).max())(x)

    def printing(x):
        jax.debug.print("{}", x.sum())
        return x.sum()

    with pytest.raises(Unsupported, match=r"test_jax_autochunk_calls\.py:\d+: .*has effects, Debug"):
        autochunk(printing)(x)


def test_methods_and_constants_that_compare_alike():
    class Model:
        @autochunk(chunks=3)
        def loss(self, *args):
            return z_loss(*args)

        unbound = autochunk(functools.partial(z_loss), chunks=3)

    model, args = Model(), arguments()
    check_same((model.loss(*args), model.unbound(*args)), (z_loss(*args), z_loss(*args)))
    assert "3 chunks" in model.loss.explain(*args) and model.loss.source(*args)
    signed = autochunk(lambda x, zero: x.sum() * math.copysign(1.0, zero))
    assert signed(jnp.ones(3), 0.0) == -signed(jnp.ones(3), -0.0)
