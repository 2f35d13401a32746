"""The ready-made losses in JAX: memory and batch invariance. Their formulas are in tests/python/losses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_oracle import ON_CPU, of_kernels
from loss_frameworks import RNG, normal

from logitless import _library as library
from logitless._autochunk.native import Machine
from logitless._cache import Cache
from logitless.jax import linear_cross_entropy, linear_logprobs, losses
from logitless.jax._autochunk import native
from logitless.jax.losses import _formulas


@of_kernels
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the budget is for plans of a CPU")
def test_memory_is_within_the_budget():
    """Measures XLA's temporaries of bf16 losses and gradients by hidden and weight; logits would be 4 MiB."""
    rows, dim, vocab = 256, 16, 4096
    shapes = ((4, rows // 4, dim), (vocab, dim))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] * 2
    vocab_ids = np.zeros((4, rows // 4), np.int32)
    gradients = 2 * (rows + vocab) * dim

    def temporaries(loss):
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        return step.memory_analysis().temp_size_in_bytes

    budget = 3 << 19
    text = losses.explain_divergence(*arrays, memory_budget=budget)
    assert "1.5 MiB, met)" in text and "forward_and_gradients" in text
    for loss in (
        lambda x, w, *teacher: losses.jsd_loss(x, w, *teacher, memory_budget=budget),
        lambda x, w, t, _: losses.dpo_loss(x, w, vocab_ids, ref_hidden=t, memory_budget=budget).loss,
    ):
        assert temporaries(loss) < budget + 2 * gradients + (1 << 17) < 4 * rows * vocab


def test_formulas_of_many_budgets_are_bounded(monkeypatch):
    monkeypatch.setattr(_formulas, "_made", Cache(4))
    monkeypatch.setattr(_formulas, "_explained", Cache(4))
    arrays = [jax.ShapeDtypeStruct((rows, 4), jnp.float32) for rows in (3, 5)] * 2
    for budget in range(6):
        assert losses.explain_divergence(*arrays, memory_budget=(1 << 20) + budget)
    assert 0 < len(_formulas._made) + len(_formulas._explained) <= 4


@pytest.mark.parametrize("dim", [2048, 4096])
def test_half_of_ligers_memory_takes_six_products(monkeypatch, dim):
    """Plans 8192 tokens and 128256 vocabulary entries for a GPU, without one; no gradient has a copy in float32."""
    machine = Machine(library.DEVICE_CUDA, 90, threads=0, head_engine=True)
    monkeypatch.setattr(native, "default_machine", lambda: machine)
    monkeypatch.setattr(_formulas, "_made", Cache(64))
    arrays = [jax.ShapeDtypeStruct((rows, dim), jnp.bfloat16) for rows in (8192, 128256)] * 2
    text = losses.explain_divergence(*arrays, memory_budget="465MiB")
    assert "(budget 465.0 MiB, met)" in text and text.count("1 phase, 50.0 % more multiply-adds") == 2, text
    taken = re.search(r"without loops, ([0-9.]+) GiB with", losses.explain_divergence(*arrays))
    assert float(taken[1]) < 1.3 + 4 * 128256 * dim / 2**30


@of_kernels
@pytest.mark.parametrize("dtype", ["float32"] * ON_CPU + ["bfloat16", "float16"])
def test_the_same_bits_whatever_the_batch(dtype):
    """A token has the same bits in any batch, by each call, with gradients and budgets; on a CPU with a temperature for
    each token, too."""
    hidden = normal(300, 40, seed=1)
    hidden[1::3] *= 8  # their sums leave the range in which exponentials are summed at first
    hidden = np.asarray(jnp.asarray(hidden, dtype))
    weight = jnp.asarray(normal(9001, 40, seed=2, scale=0.4), dtype)
    index = RNG(3).integers(0, 9001, 300).astype(np.int32)
    options = dict(softcap=9.0, logit_scale=0.7)

    def scored(rows, **more):
        return np.asarray(losses.selective_log_softmax(hidden[rows], weight, index[rows], batch_invariant=True, **more))

    together = scored(np.arange(300), memory_budget="64MiB", **options)
    for rows in ([7], RNG(4).permutation(300)[:17]):
        assert np.array_equal(scored(np.asarray(rows), **options), together[np.asarray(rows)])
    by_loss = linear_cross_entropy(hidden[20:290], weight, index[20:290], reduction="none", **options)
    by_gradients, _ = jax.vjp(lambda *a: linear_logprobs(*a, index, **options)[0], hidden, weight)
    assert np.array_equal(-by_loss, together[20:290]) and np.array_equal(by_gradients, together)
    if ON_CPU:
        each = np.linspace(0.5, 2, 300, dtype=np.float32)
        alone = [scored(np.arange(i, i + 1), temperature=each[i : i + 1]) for i in range(0, 300, 30)]
        assert np.array_equal(np.concatenate(alone), scored(np.arange(300), temperature=each)[::30])


@of_kernels
def test_bits_that_are_not_promised_are_refused():
    given = normal(3, 8, seed=1), normal(20, 8, seed=2), np.arange(3)
    half, each = (*(jnp.asarray(a, jnp.bfloat16) for a in given[:2]), given[2]), np.ones(3, np.float32)
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Explicit,))
    sharded = jax.device_put(half[1], NamedSharding(mesh, PartitionSpec("v", None)))
    cases = [
        ("the library's kernels, got JAX's own operations: they divide", half, dict(temperature=each, softcap=3.0)),
        ("a whole vocabulary, got a sharded one", (half[0], sharded, half[2]), {}),
    ]
    for message, arguments, options in cases + [("a kernel among hopper, .*, got cublas", given, {})] * (not ON_CPU):
        with pytest.raises(NotImplementedError, match="batch_invariant: expected " + message):
            losses.selective_log_softmax(*arguments, batch_invariant=True, **options)
