"""Primitives without a form in a tensor program: JAX runs them, and the rest is chunked around them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from logitless.jax import autochunk
from logitless.jax._autochunk import Unsupported

ROWS, DIM, VOCAB = 96, 8, 512


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def whole(below, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape))


def cross_entropy(logits, target):
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]).mean()


def head_of(hidden):
    def loss(h, weight, target):
        return cross_entropy(hidden(h) @ weight.T, target)

    return loss


def head_arguments():
    return random(ROWS, DIM), random(VOCAB, DIM, seed=1), whole(VOCAB, ROWS)


def check_same(fn, args, budget, wanted=(0, 1)):
    """Checks numbers and gradients against JAX. Returns the chunked function, which has run."""
    chunked = autochunk(fn, memory_budget=budget)
    expected = jax.jit(jax.value_and_grad(fn, wanted))(*args)
    found = jax.jit(jax.value_and_grad(chunked, wanted))(*args)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        assert jnp.abs(a - e).max() <= 2e-5 * max(jnp.abs(e).max(), 1e-3)
    return chunked


def runs(chunked, name, *args):
    """The line of explain() for a primitive that runs."""
    return re.findall(rf"\b{name} runs as JAX has it, (.*)", chunked.explain(*args))


def stepped(h):
    """A long scan, whose gradient is another scan."""
    return lax.scan(lambda c, x: (jnp.tanh(c + x), c), h[0], h)[1]


def until_small(h):
    made = lax.while_loop(lambda c: jnp.abs(c[1]).max() > 1.0, lambda c: (c[0] + 1, 0.8 * c[1]), (0, lax.stop_gradient(h)))
    return h + made[1] * made[0]


def of_groups(h):
    experts = h[: 4 * DIM].reshape(4, DIM, DIM)
    return lax.ragged_dot(h, experts, jnp.array([10, 20, 30, ROWS - 60], jnp.int32))


def packed(h):
    """Rows of sequences that end at these positions, one of them empty."""
    ends = jnp.array([10, 10, 60, ROWS])
    return h * jnp.searchsorted(ends, jnp.arange(ROWS), side="right")[:, None]


HIDDEN = {
    "jit": packed,
    "scan": stepped,
    "while": until_small,
    "ragged_dot_general": of_groups,
    "sort": lambda h: lax.sort((h, 2 * h), num_keys=1)[1],
    "bessel_i0e": lambda h: h * lax.stop_gradient(lax.bessel_i0e(h)),
    "cholesky": lambda h: h @ jnp.linalg.cholesky(h.T @ h + jnp.eye(DIM)),
    "reduce_window_max": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "and": lambda h: h * (jnp.arange(DIM) & 3),
    "shift_right_logical": lambda h: h * (jnp.arange(DIM).astype(jnp.uint32) >> 1).astype(jnp.float32),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_head_is_chunked_around_it(name):
    args, budget = head_arguments(), ROWS * VOCAB * 4 // 4
    fn = head_of(HIDDEN[name])
    chunked = check_same(fn, args, budget)
    assert runs(chunked, name, *args), chunked.explain(*args)
    took = re.search(r"with \(budget .*, (.*)\)", chunked.explain(*args)).group(1)
    assert took == "met", chunked.explain(*args)


@pytest.mark.parametrize("function", [lax.cumprod, lax.cummax, lax.cummin], ids=lambda f: f.__name__)
def test_without_gradients(function):
    x = random(7, 9)
    chunked = autochunk(lambda x: function(x, 1) + jnp.prod(x, 1, keepdims=True), memory_budget=1000)
    assert jnp.allclose(chunked(x), function(x, 1) + jnp.prod(x, 1, keepdims=True), rtol=1e-6)
    assert re.search(rf"lax\.{function.__name__}_p\.bind\(\w+, axis=1, reverse=False\)", chunked.source())
    assert re.search(r"lax\.reduce_prod_p\.bind\(\w+, axes=\(1,\)\)", chunked.source())


def test_the_source_names_what_is_no_python():
    chunked = autochunk(head_of(until_small), memory_budget=50_000)
    assert re.search(r"\w+, \w+ = calls\[\"while_0\"\]\(.*, h\)", chunked.source(*head_arguments()))


# --- convolutions


def test_a_convolution_is_cut_along_images():
    """The kernel's gradient is a sum over images."""

    def loss(images, kernel):
        states = lax.conv_general_dilated(images, kernel, (1, 1), "SAME")
        return jnp.log(jnp.exp(states).sum(1)).mean()

    args = random(16, 3, 8, 8), random(64, 3, 3, 3, seed=1) / 9
    chunked = check_same(loss, args, 16 * 64 * 64 * 4 // 4)
    how = runs(chunked, "conv_general_dilated", *args)
    assert "chunk by chunk, along dimension 0" in how and "chunk by chunk, a sum of parts" in how, chunked.explain(*args)
    assert "whole" not in how and "met)" in chunked.explain(*args)
    assert "lax.conv_general_dilated_p.bind(images_part, " in chunked.source(*args)


@pytest.mark.parametrize("layout", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")], ids=lambda spec: spec[0])
@pytest.mark.parametrize("size", [1, 2])
def test_a_convolution_of_patches_is_a_product(layout, size):
    images, kernel = random(4, 3, 6, 6), random(64, 3, size, size, seed=1)
    if layout[0] == "NHWC":
        images, kernel = images.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)

    def loss(images, kernel, target):
        made = lax.conv_general_dilated(images, kernel, (size, size), "VALID", dimension_numbers=layout)
        return cross_entropy(made if layout[0] == "NHWC" else made.transpose(0, 2, 3, 1), target)

    args = images, kernel, whole(64, 4, 6 // size, 6 // size)
    chunked = check_same(loss, args, 4 * 36 // size**2 * 64 * 4 // 2)
    gradients = len(runs(chunked, "conv_general_dilated", *args))
    assert gradients == 0 if size == 1 else gradients > 0, chunked.explain(*args)


# --- masks with a bound


def test_rows_by_a_mask_with_a_bound():
    def loss(h, weight, target, mask):
        rows = jnp.nonzero(mask, size=ROWS // 2, fill_value=ROWS)[0]
        taken = jnp.where(rows[:, None] < ROWS, h.at[rows].get(mode="fill", fill_value=0), 0.0)
        logits = taken @ weight.T
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[rows][:, None], 1)[:, 0]
        return jnp.where(rows < ROWS, losses, 0.0).sum() / mask.sum()

    args = *head_arguments(), whole(3, ROWS) == 0
    chunked = check_same(loss, args, ROWS * VOCAB * 4 // 8)
    assert "met)" in chunked.explain(*args), chunked.explain(*args)


# --- around


@pytest.mark.parametrize("name", ["scan", "while"])
def test_transformations_around_it(name):
    h, weight, target = head_arguments()
    fn = head_of(HIDDEN[name])
    chunked = autochunk(fn, memory_budget=50_000)
    several = jnp.stack([h, 2 * h])
    found, expected = (jax.vmap(jax.grad(f), (0, None, None))(several, weight, target) for f in (chunked, fn))
    assert jnp.abs(found - expected).max() <= 2e-5 * jnp.abs(expected).max()
    total = lax.scan(lambda a, x: (a + chunked(x, weight, target), None), 0.0, several)[0]
    assert jnp.allclose(total, sum(fn(x, weight, target) for x in several), rtol=1e-5)


def test_what_cannot_run_as_it_is():
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    args = head_arguments()

    def shared(fn):
        specs = PartitionSpec("i"), PartitionSpec(), PartitionSpec("i")
        mean = lambda *given: lax.pmean(autochunk(fn)(*given), "i")  # noqa: E731
        return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*args)

    with pytest.raises(Unsupported, match=r"scan\(.*within a shard_map"):
        shared(head_of(stepped))
    assert jnp.allclose(shared(head_of(HIDDEN["bessel_i0e"])), head_of(HIDDEN["bessel_i0e"])(*args), rtol=1e-5)
    with pytest.raises(Unsupported, match=r"psum.*is of devices"):
        shared(lambda h, w, t: lax.psum(h, "i").sum())
    with pytest.raises(Unsupported, match=r"io_callback.*has effects"):
        autochunk(lambda h: jax.experimental.io_callback(lambda x: x, h, h).sum())(args[0])


@pytest.mark.parametrize("name", ["scan", "while", "sort", "cholesky"])
def test_the_library_refuses_it_by_name(name):
    with pytest.raises(Unsupported, match=rf"{name}\(.*executor='python' takes it"):
        autochunk(head_of(HIDDEN[name]), executor="native")(*head_arguments())
