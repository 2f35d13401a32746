"""autochunk under JAX's transformations: jit, grad, scan, checkpoint, vmap, shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autochunk_losses import DIM, ROWS, VOCAB, arguments, check_same, cross_entropy, random, run, whole
from jax.sharding import PartitionSpec as P
from jax_oracle import relative_error

from logitless.jax import autochunk

exact = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))  # returns the value, and gradients by hidden and weight

def test_only_what_is_differentiated_is_computed():
    args = arguments(cross_entropy)
    chunked = autochunk(cross_entropy, chunks=3)
    _, (_, expected) = exact(*args)
    assert relative_error(jax.grad(chunked, 1)(*args), expected) <= 1e-5
    assert "d_weight" in chunked.source() and "d_hidden" not in chunked.source()
    chunked(*args)
    assert "outputs alone" in chunked.explain() and "d_weight" not in chunked.source()


@pytest.mark.parametrize("gradients", ["auto", "backward"])
def test_transformations(gradients):
    hidden, weight, target = arguments(cross_entropy)
    chunked = autochunk(cross_entropy, chunks=3, gradients=gradients)
    expected = exact(hidden, weight, target)
    transformed = {
        "eager": jax.value_and_grad(chunked, (0, 1)),
        "jit of grad": jax.jit(jax.value_and_grad(chunked, (0, 1))),
        "grad of jit": jax.value_and_grad(jax.jit(chunked), (0, 1)),
        "checkpoint": jax.jit(jax.value_and_grad(jax.checkpoint(chunked), (0, 1))),
    }
    for how, function in transformed.items():
        for a, b in zip(jax.tree.leaves(function(hidden, weight, target)), jax.tree.leaves(expected)):
            assert relative_error(a, b) <= 1e-5, how


@pytest.mark.parametrize("checkpointed", [False, True])
def test_scan(checkpointed):
    hidden, weight, target = arguments(cross_entropy)

    def microbatches(fn):
        body = jax.checkpoint(fn) if checkpointed else fn

        def total(hidden, weight):
            def step(sum_, part):
                return sum_ + body(part[0], weight, part[1]), None

            return jax.lax.scan(step, 0.0, (hidden.reshape(5, 10, -1), target.reshape(5, 10)))[0]

        return jax.jit(jax.value_and_grad(total, (0, 1)))(hidden, weight)

    found, expected = microbatches(autochunk(cross_entropy, chunks=2)), microbatches(cross_entropy)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert relative_error(a, b) <= 1e-5


def test_vmap():
    hidden, weight, target = arguments(cross_entropy)
    hidden, target = hidden.reshape(5, 10, -1), target.reshape(5, 10)

    def losses(fn):
        return jax.vmap(jax.value_and_grad(fn, (0, 1)), (0, None, 0))

    found = losses(autochunk(cross_entropy, chunks=3))(hidden, weight, target)
    expected = jax.jit(losses(cross_entropy))(hidden, weight, target)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_shard_map():
    """Rows are sharded over four devices; the weight is replicated."""
    rows = ROWS // 4 * 4
    hidden, weight, target = arguments(cross_entropy)
    hidden, target = hidden[:rows], jnp.maximum(target[:rows], 0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))

    def total(fn):
        @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
        def loss(hidden, weight, target):
            return jax.lax.pmean(fn(hidden, weight, target), "data")

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, weight, target)

    chunked = autochunk(cross_entropy, chunks=3)
    for a, b in zip(jax.tree.leaves(total(chunked)), jax.tree.leaves(total(cross_entropy))):
        assert relative_error(a, b) <= 1e-5
    assert "to='varying'" in chunked.source() or "lax.pvary" in chunked.source()
    _, found = run(chunked, (hidden, weight, target))  # outside of it
    check_same(([], found), ([], run(cross_entropy, (hidden, weight, target))[1]), 1e-5)


def test_second_derivatives_are_refused():
    hidden, weight, target = arguments(cross_entropy)
    for gradients in ("auto", "backward"):
        chunked = autochunk(cross_entropy, chunks=3, gradients=gradients)
        with pytest.raises(NotImplementedError, match="second derivatives have no form in a chunked function"):
            jax.grad(lambda h: jax.grad(chunked)(h, weight, target).sum())(hidden)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: chunked(h, weight, target), (hidden,), (hidden,))


def test_frozen_and_integer_arguments():
    hidden, weight, target = arguments(cross_entropy)
    chunked = autochunk(cross_entropy, chunks=3)
    by_target = jax.grad(chunked, (0, 2), allow_int=True)(hidden, weight, target)[1]
    assert by_target.dtype == jax.dtypes.float0
    found = jax.grad(lambda h: chunked(h, jax.lax.stop_gradient(weight), target))(hidden)
    assert relative_error(found, exact(hidden, weight, target)[1][0]) <= 1e-5
    assert "d_weight" not in chunked.source()


def test_new_shapes_and_constants_are_traced_again():
    calls = []

    @autochunk(chunks=3)
    def loss(hidden, weight, target, smoothing):
        """A loss."""
        calls.append(hidden.shape)
        log_p = jax.nn.log_softmax(hidden @ weight.T)
        of_target = jnp.take_along_axis(log_p, target[:, None], 1).mean()
        return -(1 - smoothing) * of_target - smoothing * log_p.mean()

    hidden, weight, target = random(ROWS, DIM), random(VOCAB, DIM), whole(VOCAB, ROWS)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=3)
    step(hidden, weight, target, 0.0)
    traced = len(calls)
    step(hidden * 2, weight, target, 0.0)
    jax.jit(jax.value_and_grad(lambda *a: loss(*a, 0.0), (0, 1)))(hidden, weight, target)
    assert len(calls) == traced
    step(hidden[:20], weight, target[:20], 0.0)
    assert len(calls) > traced
    assert abs(loss(hidden, weight, target, 0.5) - loss(hidden, weight, target, 0.0)) > 1e-3
    assert loss.__name__ == "loss" and loss.__doc__ == "A loss."


def test_methods_are_bound():
    class Model:
        def __hash__(self):
            return 1

        @autochunk(chunks=3)
        def loss(self, hidden, weight, target):
            return cross_entropy(hidden, weight, target)

    args = arguments(cross_entropy)
    assert relative_error(Model().loss(*args), exact(*args)[0]) <= 1e-6
