"""Edge cases of the primitives that autochunk lowers: every executor gives JAX's result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from logitless.jax import Unsupported, autochunk

EXECUTORS = ("native", "python")
NAN, INF = float("nan"), float("inf")


def f(*x):
    return jnp.array(x, jnp.float32)


def i(*x):
    return jnp.array(x, jnp.int32)


SPECIAL = f(NAN, -0.0, 0.0, INF, -INF, -1.5, 1.5, -0.5, 2.0, 100.0, -100.0, 2.5)
TOP, BOTTOM = f(7, -7, 1, -1, 0, -0.0, INF, -INF, NAN, 5, -5, 1, 1), f(2, 2, 0, 0, 0, 3, 2, 2, 1, INF, INF, -INF, 0.1)
ROWS = f([1, NAN, 3], [NAN, NAN, 0], [-INF, 1, 2], [-INF, -INF, -INF], [0, -0.0, 0], [2, 2, -1])
EMPTY, Z = jnp.zeros((3, 0)), jnp.arange(20.0).reshape(4, 5)
FAR = i(1, 5, -1, -6, 2**31 - 1, -(2**31), 4, 99)
SOME = i(1, 5, -1, -6)
TOPS = f([INF, 1, 2], [INF, INF, 0], [-INF, -INF, -INF], [INF, -INF, 0], [INF, NAN, 1], [1, 2, 3])  # rows with inf
ZEROS = f(*(-0.0, 0.0) * 9)
FRACTIONS = f(-0.3, -0.5, -0.7, -1.5, -2.5, 0.3, 0.5, 1.5, 2.5, 0.49999997, -0.49999997)
INTS = i(2**31 - 1, -(2**31), 2**24 + 1, -7, 0)
NEAR = i(2**24 + 1, 2**24, 2**24 + 3, 2**24 + 2)  # that f32 takes for one another

VALUES = {
    "quotients of whole numbers": (lambda a: (a // 2, a // -3, a % 3, a % -3, lax.div(a, jnp.int32(2))), i(7, -7, 6, 0, -1, 2**31 - 1)),
    "quotients by arrays": (lambda a, b: (a // b, a % b, lax.div(a, b), lax.rem(a, b)), i(7, -7, 7, -7), i(2, 2, -2, -2)),
    "quotients by 0": (lambda a, b: (lax.div(a, b), lax.rem(a, b), a // b, a % b), i(7, -7, 0), i(0, 0, 0)),
    "quotients of floats": (lambda a, b: (a // b, a / b), TOP, BOTTOM),
    "remainders of floats": (lambda a, b: (a % b, jnp.fmod(a, b), lax.rem(a, b)), TOP, BOTTOM),
    "shifts": (lambda a, b: (a << b, a >> b, lax.shift_right_logical(a, b)), i(1, -1, 5, -8, 1, -8), i(3, 3, 1, 31, 32, -1)),
    "casts to whole numbers": (lambda a: a.astype(jnp.int32), f(NAN, INF, -INF, 1e20, 3e9, -3e9, 1.9, -1.9, -0.0, 2**31)),
    "casts": (lambda a: (a.astype(jnp.bfloat16), a.astype(jnp.float16), a.astype(bool)), f(NAN, INF, -INF, 1e20, 65520, 1e-8)),
    "signs": (lambda a: (jnp.abs(a), -a, jnp.floor(a), jnp.ceil(a), jnp.trunc(a), a * 0, a - a, jnp.sign(a), jnp.round(a)), SPECIAL),
    "functions": (lambda a: (1 / a, lax.rsqrt(a), jnp.sqrt(a), jnp.log(a), jnp.log1p(a), jnp.exp(a), jnp.expm1(a)), SPECIAL),
    "activations": (lambda a: (jax.nn.sigmoid(a), jnp.tanh(a), lax.erf(a), jax.nn.softplus(a), jax.nn.silu(a)), SPECIAL),
    "angles": (lambda a: (jnp.arctan(a), jnp.arcsin(a), jnp.arccos(a), jnp.tan(a), jnp.arctanh(a), jnp.arcsinh(a)), SPECIAL),
    "angles of points": (jnp.arctan2, f(0, 1, -1, 1, -2, NAN, 3, -3), f(2, 0, 0, -1, -3, 1, INF, -INF)),
    "tails": (lambda a: (lax.erfc(a), jnp.sinh(a), jnp.cosh(a), jnp.exp2(a / 4), jnp.log2(a)), jnp.append(SPECIAL, f(5.0, -8.0))),
    "gamma functions": (lambda a: (lax.lgamma(a), lax.digamma(a)), f(NAN, INF, -1.5, 1.5, -0.25, 1e-3, 2, 77)),
    "powers": (jnp.power, f(0, 0, 0, -0.0, -0.0, NAN, 1, -1, -2, INF, -INF), f(0, 1, -1, -1, -3, 0, NAN, INF, 0.5, 0, 3)),
    "powers by numbers": (lambda a: tuple(a**e for e in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.5)), SPECIAL),
    "tests": (lambda a: (jnp.isnan(a), jnp.isinf(a), jnp.isfinite(a), a == a, a != a, a < 1, a.astype(bool)), SPECIAL),
    "tests of whole numbers": (lambda a: (a == a[0], a < a[0], a.max(), a.argmax()), i(2**31 - 1, 2**31 - 2, 2**24 + 1, 2**24)),
    "extremes of two": (lambda a, b: (jnp.maximum(a, b), jnp.minimum(a, b), jnp.fmax(a, b)), f(NAN, 1, INF), f(1, NAN, NAN)),
    "extremes of rows": (lambda a: (a.max(1), a.min(1), a.argmax(1), a.argmin(1)), ROWS),
    "sums of rows": (lambda a: (a.sum(1), a.mean(1), jax.nn.logsumexp(a, 1), a.cumsum(1), lax.cumlogsumexp(a, 1)), ROWS),
    "softmax": (lambda a: (jax.nn.softmax(a, 1), jax.nn.log_softmax(a, 1)), ROWS),
    "softmax of inf": (lambda a: (jax.nn.softmax(a, 1), jax.nn.log_softmax(a, 1), jax.nn.logsumexp(a, 1)), TOPS),
    "softmax of inf alone": (lambda a: jax.nn.softmax(a, 1), TOPS),
    "exponentials of inf": (lambda a: jnp.log(jnp.exp(a - a.max(1, keepdims=True)).sum(1)) + a.max(1), TOPS),
    "cross entropy of inf": (lambda z, y: -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1), TOPS, i(1, 0, 1, 0, 0, 2)),
    "integers that wrap": (lambda a: (a + 1, a - 1, a * a, -a, abs(a), a.sum(), a.cumsum(), (a + 1) < a, a.astype(float)), INTS),
    "order of integers": (lambda a: (a.max(), a.min(), a.argmax(), a.argmin(), jnp.clip(a, 5, 9), jnp.sort(a)), INTS),
    "the least integer by -1": (lambda a, b: (lax.div(a, b), lax.rem(a, b), a // b, a % b), INTS, i(-1, -1, -1, -1, -1)),
    "quotients of ends": (lambda a, b: (lax.div(a, b), lax.rem(a, b), a // b, a % b), INTS, i(-(2**31), 2**31 - 1, -3, 2, -(2**31))),
    "equal labels beside numbers": (lambda y, x: jnp.where(y[:, None] == y[::-1], x, -x) * 0.5, NEAR, Z[:, :4] + 1),
    "sums of labels beside numbers": (lambda y, x: jnp.where(y - 3 == 2**24, x, -x) + jnp.where(y * 2 > 2**25 + 1, x, 0.0), NEAR, f(1, 2, 3, 4)),
    "order": (lambda a: (jnp.sort(a, 1), jnp.argsort(a, 1), jnp.argsort(a, 1, descending=True), lax.top_k(a, 2)[0]), ROWS),
    "empty sums": (lambda a: (a.sum(1), a.mean(1), a.sum(), a @ a.T, a.any(1), a.all(1), a.any(), a.max(0)), EMPTY),
    "empty maximum": (lambda a: (a.max(1, initial=-3), jax.nn.logsumexp(a, 1)), EMPTY),
    "rows": (lambda z, y: (z[y], z[:, y], z.at[y].get(mode="clip"), z.at[y].get(mode="fill", fill_value=7.0)), Z, FAR),
    "numbers": (lambda z, y: (z[y, y], jnp.take(z, y)), Z, FAR),
    "one of each row": (lambda z, y: (z[jnp.arange(4), y], jnp.take_along_axis(z, y[:, None], 1)), Z, SOME),
    "take": (lambda z, y: tuple(jnp.take(z, y, 0, mode=m) for m in (None, "clip", "wrap", "fill")), Z, FAR),
    "of whole numbers": (lambda z, y: (z[y], z.at[y].get(mode="fill"), (z > 3).at[y].get(mode="fill")), jnp.arange(5), FAR),
    "one_hot": (lambda y: jax.nn.one_hot(y, 5), FAR),
    "writes": (lambda z, y: (z.at[y].set(1.0), z.at[y].add(1.0), z.at[y].add(1.0, mode="clip")), Z, FAR),
    "writes into each row": (lambda z, y: (z.at[jnp.arange(4), y].set(1.0), z.at[jnp.arange(4), y].add(1.0)), Z, SOME),
    "sums by segment": (lambda z, y: jax.ops.segment_sum(z, y, 4), Z, i(1, 5, -1, 3)),
    "slices at a start": (lambda z, y: (lax.dynamic_index_in_dim(z, y, 0), lax.dynamic_index_in_dim(z, -y, 0)), Z, jnp.int32(99)),
    "branches": (lambda a, y: lax.switch(y, [lambda x: x, lambda x: -x, lambda x: x * 2], a), SPECIAL, jnp.int32(9)),
}

# The signs of zeros are those of JAX's primitives run one by one; XLA drops the sum with 0 from what it compiles.
SIGNS = {
    "neutral numbers": (lambda a: (a + -0.0, a - 0.0, 0.0 - a, a * 1.0, a / 1.0, -(-a), a**1), ZEROS),
    "sums with 0": (lambda a: (a + 0.0, 0.0 + a, a - -0.0), ZEROS),
    "bounds": (lambda a: (jnp.maximum(a, 0), jnp.maximum(0, a), jnp.minimum(a, 0), jnp.minimum(0, a), jax.nn.relu(a)), ZEROS),
    "clips": (lambda a: (jnp.clip(a, 0, 1), jnp.clip(a, -1, 0), jnp.clip(a, -0.0, 1), jax.nn.relu6(a)), ZEROS),
    "choices": (lambda a: (jnp.where(a == 0, a, a), jnp.maximum(a, a), jnp.minimum(a, a), jnp.sign(a), abs(a)), ZEROS),
    "rounding": (lambda a: (jnp.round(a), jnp.trunc(a), jnp.floor(a), jnp.ceil(a), lax.round(a)), jnp.concatenate([FRACTIONS, ZEROS])),
}

# Functions of one array, whose values and gradients are compared.
GRADIENTS = {
    "at ties": (lambda a: a.max(1).sum() + jnp.maximum(a, a[:, ::-1]).sum(), f([1, 1, 0], [0, 0, 0])),
    "at 0": (lambda a: jnp.abs(a).sum() + jax.nn.relu(a).sum() + jnp.clip(a, 0, 1).sum() + jnp.sqrt(a).sum(), f(0, 1, 4)),
    "at a NaN": (lambda a: jnp.abs(a).sum() + jnp.log(a).sum() + (a**2).sum(), f(NAN, 1, INF)),
    "of a softmax of inf": (lambda a: (jax.nn.log_softmax(a) * 0.5 + jax.nn.softmax(a)).sum(), f([INF, 1], [1, 2])),
    "of a log-sum-exp of inf": (lambda a: jax.nn.logsumexp(a, 1).sum(), f([INF, 1], [1, 2])),
    "of empty rows": (lambda a: jax.nn.logsumexp(a, 1).sum(), f([-INF, -INF], [1, -INF], [2, 3])),
    "of bad labels": (lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), SOME[:, None], 1).mean(), Z),
    "of clipped labels": (lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), SOME[:, None], 1, mode="clip").mean(), Z),
    "of bad rows": (lambda z: jnp.square(z[i(1, 5, -1, 99)]).sum(), Z),
}


def compare(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in wanted]
    for g, w in zip(got, wanted):
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=2e-6, atol=1e-6)


def run_or_refused(executor, call):
    """Skips where the library has no form of an operation: it refuses by name, and no other executor does."""
    try:
        return call()
    except Unsupported as error:
        assert executor == "native" and "executor='python' takes it" in str(error)
        pytest.skip(f"the library has no form of it: {error}")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", VALUES)
def test_values(name, executor):
    function, *arguments = VALUES[name]
    compare(run_or_refused(executor, lambda: autochunk(function, executor=executor)(*arguments)), function(*arguments))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SIGNS)
def test_signs(name, executor):
    if (name, executor) == ("sums with 0", "python"):
        pytest.skip("XLA drops them")
    function, x = SIGNS[name]
    for got, wanted in zip(run_or_refused(executor, lambda: autochunk(function, executor=executor)(x)), function(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, executor):
    function, x = GRADIENTS[name]
    compare(jax.value_and_grad(autochunk(function, executor=executor))(x), jax.value_and_grad(function)(x))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_bad_labels_of_64_bit(executor):
    """JAX wraps 2^33 to 0, because it casts indices to 32 bits."""
    with jax.enable_x64(True):
        z, y = Z.astype(jnp.float32), jnp.array([1, 2**33, 0, 4])

        def loss(z, y):
            return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()

        compare(autochunk(loss, executor=executor)(z, y), loss(z, y))
