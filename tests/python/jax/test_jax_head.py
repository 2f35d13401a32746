import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import LSE_ERROR, check_gradients, doubles, enable_x64, in_float64, logprobs, problem, relative_error

from logitless.jax import linear_cross_entropy, linear_logprobs

OPTIONS = {"plain": {}, "softcap": dict(softcap=4.0), "scale": dict(logit_scale=1.7)}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs(options, dtype):
    arrays = problem(dtype=dtype)
    found = linear_logprobs(*arrays, **options)
    with enable_x64(True):
        hidden, weight, bias = doubles(arrays[0], arrays[1], arrays[3])
        expected = jax.jit(lambda *a: logprobs(*a, **options))(hidden, weight, np.asarray(arrays[2]), bias)
    for name, one, other in zip(("logprob", "entropy", "lse"), found, expected):
        assert one.dtype == jnp.float32 and one.shape == (3, 7) and one[0, 0] == 0.0, name
        assert relative_error(one, other) <= (LSE_ERROR if name == "lse" else 4e-6), name


@pytest.mark.parametrize(
    "outputs, dtype",
    [((0,), "float32"), ((1,), "float32"), ((2,), "float32"), ((0, 1, 2), "float32"), ((0, 1, 2), "bfloat16")],
)
def test_each_output_is_differentiable(outputs, dtype):
    arrays = problem(dtype=dtype)
    factors = np.random.default_rng(5).normal(size=(3, 3, 7))

    def weighted(function):
        return lambda *a: sum((factors[i] * function(*a, softcap=6.0)[i]).sum() for i in outputs)

    gradients = jax.jit(jax.grad(weighted(linear_logprobs), (0, 1, 3)))(*arrays)
    _, expected = in_float64(weighted(logprobs), *arrays)
    check_gradients(gradients, expected, dtype)


def test_several_targets_a_token():
    arrays = problem(per_token=4)
    factors = np.random.default_rng(5).normal(size=(3, 7, 4))

    def weighted(function):
        return lambda *a: (factors * function(*a)[0]).sum()

    assert linear_logprobs(*arrays)[0].shape == (3, 7, 4)
    gradients = jax.grad(weighted(linear_logprobs), (0, 1, 3))(*arrays)
    _, expected = in_float64(weighted(logprobs), *arrays)
    check_gradients(gradients, expected)


def test_one_token_and_no_token():
    hidden, weight, targets, bias = problem(ignored=False)
    logprob, entropy, lse = linear_logprobs(hidden[0, 0], weight, targets[0, 0], bias)
    assert logprob.shape == entropy.shape == lse.shape == ()
    assert relative_error(logprob, linear_logprobs(hidden, weight, targets, bias)[0][0, 0]) < 1e-6
    assert linear_logprobs(hidden[:0], weight, targets[:0], bias)[0].shape == (0, 7)


def test_its_mean_is_the_loss():
    hidden, weight, targets, bias = problem(ignored=False)

    def loss(*arrays):
        return -linear_logprobs(*arrays)[0].mean()

    value, gradients = jax.value_and_grad(loss, (0, 1, 3))(hidden, weight, targets, bias)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(hidden, weight, targets, bias)
    assert relative_error(value, expected) < 1e-6
    for one, other in zip(gradients, others):
        assert relative_error(one, other) < 1e-5


def test_a_policy_loss():
    """PPO's clipped ratio with an entropy bonus, against the same with logits."""
    arrays = problem(ignored=False)
    rng = np.random.default_rng(11)
    old = -4.0 + 0.3 * rng.normal(size=(3, 7))
    advantage = rng.normal(size=(3, 7))

    def policy(function):
        def loss(*a):
            logprob, entropy, _ = function(*a)
            ratio = jnp.exp(logprob - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            return -jnp.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * entropy.mean()

        return loss

    value, gradients = jax.value_and_grad(policy(linear_logprobs), (0, 1, 3))(*arrays)
    expected, others = in_float64(policy(logprobs), *arrays)
    assert relative_error(value, expected) < 1e-5
    check_gradients(gradients, others)


def test_same_bits_twice():
    arrays = problem((64,), 64, 1000, dtype="bfloat16")
    run = jax.jit(jax.value_and_grad(lambda *a: sum(o.sum() for o in linear_logprobs(*a)), (0, 1, 3)))
    for one, other in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*arrays))):
        assert (one == other).all()
