"""autochunk of ordered operations: running sums, sorting, writing rows by index, loops of few iterations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autochunk_losses import check_same, exactly, random, run, whole
from jax_oracle import GRADIENT_ERROR

from logitless.jax import autochunk

ROWS, COLUMNS = 24, 20


def sums(x, i):
    logs = jnp.sin(jax.lax.cumlogsumexp(x, 1, reverse=True)).sum() + (jnp.flip(x) * x).sum()
    two = jnp.exp(jnp.cumsum(x, 1)).mean() + jnp.sin(jnp.cumsum(x, 0)).sum()
    return two + logs, jnp.cumsum(i), jnp.cumsum(x > 0, 1)


def sorting(x, i):
    top, index = jax.lax.top_k(x, 3)
    ordered = (jnp.sort(x, 1) * jnp.arange(COLUMNS)).sum() + (jnp.sort(x, 0, descending=True)[:5] ** 2).sum()
    some = jnp.median(x, 1).sum() + jnp.quantile(x, 0.3, axis=1).sum() + jnp.exp(jax.lax.top_k(x, 18)[0]).sum()
    return jnp.exp(top).sum() + ordered + some, index, jnp.argsort(x, 1), jnp.argsort(x, 1, descending=True)


def running(x, i):
    by, (held, places) = x[0] + 0.05, jax.lax.stop_gradient((x, i % 4))
    one = (jnp.cumprod(x, 1) * x).sum() + jnp.sin(jnp.prod(x, 0)).sum() + jnp.sin(jax.lax.cummax(x, 1)).sum()
    held = jax.lax.cumprod(held, 1, reverse=True) + jax.lax.cummin(held, 0) + jax.lax.cummax(held, 1, reverse=True)
    two = (jnp.fmod(x, 0.3) + x % -0.7 + x // 0.3 + jnp.remainder(x, by)) * x
    tops = jax.ops.segment_max(jax.lax.stop_gradient(x), places, 4)
    sums = jnp.sin(jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 2), (2, 1), "SAME"))
    least = jax.ops.segment_min(jax.lax.stop_gradient(x[:9]), places[:9], 4)[places[:9]]
    return one + two.sum() + sums.sum() + (held * x).sum(), jnp.exp(x - tops[places]), least


def rows(x, i):
    some = jnp.array([3, 1, 7])
    one = jnp.exp(x.at[some].set(x[:3] * 2, unique_indices=True)).mean() + jnp.exp(x[:, 1::3]).sum()
    two = jnp.exp(x.at[:, some].set(x[:, 4:7], unique_indices=True)).mean() + jnp.exp(jnp.diagonal(x, 1)).sum()
    three = (jnp.round(x * 3) * x).sum() + jax.scipy.special.erfinv(jnp.tanh(x)).sum()
    return one + two + three + jnp.exp(jnp.diag(x[0])).sum() + (jnp.eye(ROWS, COLUMNS) * x).sum()


def rounds(x, i):
    def step(carry, row):
        return carry * 0.5 + row, jnp.sin(carry) * row

    last, each = jax.lax.scan(step, x[0], x)
    _, back = jax.lax.scan(step, x[0], x, reverse=True)
    chosen = jax.lax.cond(i[0] > 2, lambda x: x**2, lambda x: jnp.exp(x), x)
    power = jax.lax.fori_loop(0, 3, lambda k, y: y * x + k, x)
    return last.sum() + (each * back).sum() + chosen.sum() + power.mean()


def convolutions(x, i):
    """Along one axis: of all channels, of each channel alone, of groups. Gradients of kernels have 3 to 5 windows."""
    series, numbers = x.reshape(2, 40, 6), x.reshape(-1)

    def of(shape, padding, groups, step=1, apart=1):
        kernel, layout = numbers[: np.prod(shape)].reshape(shape), ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(series, kernel, (step,), [padding], None, (apart,), layout, groups)

    one, two, three = of((3, 6, 3), (1, 1), 1), of((4, 1, 6), (3, 0), 6), of((5, 2, 9), (4, 1), 3, 2, 2)
    return jnp.sin(one).sum() + jnp.exp(two).mean() + (three**2).sum(), of((2, 3, 4), (-1, 0), 2)


EXECUTORS = ["python", "native"]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("fn", [sums, sorting, running, rows, convolutions, rounds], ids=lambda f: f.__name__)
def test_outputs_and_gradients(fn, executor):
    if fn is rounds and executor == "native" and jax.default_backend() != "cpu":
        pytest.skip("the library runs XLA's operations on a CPU alone")
    args = random(ROWS, COLUMNS), whole(5, ROWS)
    check_same(run(autochunk(fn, executor=executor), args), exactly(fn, args), GRADIENT_ERROR["float32"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_are_sorted_in_chunks(executor):
    def chosen(hidden, weight):
        top, _ = jax.lax.top_k(hidden @ weight.T, 24)
        return jnp.square(jnp.cumsum(jax.nn.softmax(top), 1)).mean()

    args = random(48, 8), random(300, 8)
    chunked = autochunk(chosen, chunks=4, executor=executor)
    check_same(run(chunked, args), exactly(chosen, args), GRADIENT_ERROR["float32"])
    assert "4 chunks" in chunked.explain()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_last_of_equal_rows_is_written(executor):
    index = jnp.array([2, 0, 2, 1, 0])
    x, new = random(4, 3), random(5, 3)
    expected = np.array(x)
    for place, row in zip(index, new):
        expected[place] = row
    assert (autochunk(lambda x, new: x.at[index].set(new), executor=executor)(x, new) == expected).all()


# --- random numbers


def dropped(key, hidden, weight):
    one, two = jax.random.split(key)
    kept = jax.random.bernoulli(one, 0.7, hidden.shape)
    logits = jnp.where(kept, hidden / 0.7, 0) @ weight.T
    noise = jax.random.normal(jax.random.fold_in(two, 3), logits.shape) + jax.random.uniform(two, logits.shape)
    return jnp.square(jax.nn.logsumexp(logits + noise, 1)).mean()


of_dropped = jax.jit(jax.value_and_grad(dropped, (1, 2)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("options", [{}, {"chunks": 5}, {"chunks": 4, "gradients": "backward"}], ids=str)
def test_random_numbers_are_those_of_jax(executor, options):
    key, hidden, weight = jax.random.key(3), random(40, 8), random(300, 8)
    chunked = autochunk(dropped, executor=executor, **options)
    found = jax.value_and_grad(chunked, (1, 2))(key, hidden, weight)
    expected = of_dropped(key, hidden, weight)
    check_same(([found[0]], found[1]), ([expected[0]], expected[1]), GRADIENT_ERROR["float32"])
    other = jax.jit(chunked)(jax.random.key(4), hidden, weight)
    assert abs(other - of_dropped(jax.random.key(4), hidden, weight)[0]) < 1e-4 * abs(other) and other != found[0]


def test_keys_of_words_and_keys_made_inside():
    x = jnp.zeros((30, 50))
    fn = lambda x: jax.random.uniform(jax.random.PRNGKey(7), x.shape) + x  # noqa: E731
    assert (autochunk(fn)(x) == fn(x)).all()
    words = jax.random.PRNGKey(5)
    coins = lambda key, x: jnp.where(jax.random.bernoulli(key, 0.3, x.shape), 1.0, x)  # noqa: E731
    assert (autochunk(coins)(words, x) == coins(words, x)).all()


def test_other_random_bits_are_refused():
    with pytest.raises(NotImplementedError, match="random_bits.*dtype uint16 has no form"):
        autochunk(lambda key, x: jax.random.bits(key, x.shape, "uint16") * x)(jax.random.key(0), random(4, 6))
    with pytest.raises(NotImplementedError, match="uint32"):
        autochunk(lambda key, x: jax.random.bits(key, x.shape) * x)(jax.random.key(0), random(4, 6))
