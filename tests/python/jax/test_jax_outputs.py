"""The outputs of linear_cross_entropy beside the loss: values, gradients, and combinations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import check_gradients, cross_entropy, in_float64, logits, problem, relative_error

from logitless.jax import linear_cross_entropy

NAMES = ("return_lse", "accuracy", "return_argmax", "return_target_logits")


def expected(hidden, weight, targets, bias):
    """Returns the outputs by name. Targets may be [..., K] for all but accuracy."""
    z = logits(hidden, weight, bias)
    y = targets if targets.ndim == hidden.ndim else targets[..., None]
    valid = y != -100
    of_targets = jnp.where(valid, jnp.take_along_axis(z, jnp.where(valid, y, 0), -1), 0.0).reshape(targets.shape)
    row = valid.any(-1)
    best = z.argmax(-1)
    return {
        "return_lse": jnp.where(row, jax.nn.logsumexp(z, -1), 0.0),
        "accuracy": ((best == y[..., 0]) & row).sum() / row.sum(),
        "return_argmax": jnp.where(row, best, -1),
        "return_target_logits": of_targets,
    }


@pytest.mark.parametrize("names", [n for k in range(1, 5) for n in itertools.combinations(NAMES, k)], ids="+".join)
def test_each_with_each_other(names):
    hidden, weight, targets, bias = problem()
    targets = targets.at[0, 1:4].set(logits(hidden, weight, bias).argmax(-1)[0, 1:4].astype("int32"))
    call = jax.jit(lambda *a: linear_cross_entropy(*a, **dict.fromkeys(names, True)))
    loss, *found = call(hidden, weight, targets, bias)
    assert relative_error(loss, cross_entropy(hidden, weight, targets, bias)) <= 2e-6 and len(found) == len(names)
    wanted = expected(hidden, weight, targets, bias)
    for name, value in zip(names, found):
        assert value.dtype == (jnp.int32 if name == "return_argmax" else jnp.float32)
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "more", [{}, dict(label_smoothing=0.1), dict(reduction="none"), dict(target_weight=True)], ids=str
)
def test_gradients_of_loss_lse_and_target_logits(more):
    arrays = problem(per_token=2 if "target_weight" in more else 0)
    if "target_weight" in more:
        more = dict(target_weight=jnp.asarray(np.random.default_rng(3).uniform(0.0, 1.0, (3, 7, 2)), "float32"))

    def ours(*a):
        loss, lse, of_targets = linear_cross_entropy(*a, return_lse=True, return_target_logits=True, **more)
        return loss.sum() + jnp.square(lse).sum() + jnp.square(of_targets).sum()

    def exact(*a, **options):
        wanted = expected(*a)
        squares = jnp.square(wanted["return_lse"]).sum() + jnp.square(wanted["return_target_logits"]).sum()
        return cross_entropy(*a, **options).sum() + squares

    value, gradients = jax.value_and_grad(ours, (0, 1, 3))(*arrays)
    wanted, wanted_gradients = in_float64(exact, *arrays, **more)
    assert relative_error(value, wanted) <= 2e-6
    check_gradients(gradients, wanted_gradients)
