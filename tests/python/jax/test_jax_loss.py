import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax_oracle import BUDGET, ON_CPU, check_gradients, cross_entropy, in_float64, of_kernels, problem, relative_error

from logitless.jax import linear_cross_entropy, linear_logprobs

VOCAB = 101
RNG = np.random.default_rng(7)
CLASSES = jnp.asarray(RNG.uniform(0.5, 2.0, VOCAB), "float32")
TOKENS = jnp.asarray(RNG.uniform(0.0, 2.0, (3, 7)), "float32")

OPTIONS = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "smoothed": dict(label_smoothing=0.1),
    "class weights": dict(class_weight=CLASSES),
    "class weights, smoothed": dict(class_weight=CLASSES, label_smoothing=0.2, reduction="sum"),
    "z-loss": dict(z_loss=1e-2),
    "softcap": dict(softcap=5.0),
    "scale": dict(logit_scale=0.7),
    "normalizer": dict(normalizer=11.0),
    "token weights": dict(token_weight=TOKENS),
    "all": dict(
        label_smoothing=0.1, class_weight=CLASSES, z_loss=1e-3, softcap=8.0, logit_scale=1.3, token_weight=TOKENS,
        normalizer=5,
    ),
}


def value_and_grad(hidden, weight, targets, bias, **options):
    by = (0, 1) if bias is None else (0, 1, 3)
    return jax.value_and_grad(linear_cross_entropy, by)(hidden, weight, targets, bias, **options)


def compare(arrays, dtype="float32", **options):
    value, gradients = value_and_grad(*arrays, **options)
    expected, expected_gradients = in_float64(cross_entropy, *arrays, **options)
    assert value.dtype == jnp.float32
    assert relative_error(value, expected) <= 2e-6
    check_gradients(gradients, expected_gradients, dtype)
    assert [g.dtype for g in gradients] == [a.dtype for a in (arrays[0], arrays[1], arrays[3]) if a is not None]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradients(options):
    compare(problem(), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", ["plain", "softcap", "all"])
def test_16_bit(options, dtype):
    compare(problem(dtype=dtype), dtype, **OPTIONS[options])


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape, dim, vocab, budget", [((3, 7), 16, 101, None), ((256,), 64, 2000, "4MiB"), ((256,), 64, 2000, "1280KiB")])
def test_float32_hidden_states_beside_a_16_bit_weight(half, shape, dim, vocab, budget):
    """Loss and gradient of hidden are exact to float32."""
    if budget is not None and not ON_CPU:
        budget = BUDGET
    hidden, weight, targets, bias = problem(shape, dim, vocab)
    arrays = hidden, weight.astype(half), targets, bias
    value, gradients = value_and_grad(*arrays, memory_budget=budget)
    expected, expected_gradients = in_float64(cross_entropy, *arrays)
    assert relative_error(value, expected) <= 2e-6
    for found, wanted, dtype in zip(gradients, expected_gradients, ("float32", half, "float32")):
        assert found.dtype == dtype
        check_gradients((found,), (wanted,), dtype)


@of_kernels
def test_blocks_of_a_16_bit_weight():
    """No float32 copy of the weight exists."""
    kinds = (((256, 1024), "float32"), ((400_000, 1024), "bfloat16"), ((256,), "int32"))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]

    def held(budget):
        step = jax.value_and_grad(functools.partial(linear_cross_entropy, memory_budget=budget))
        return jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    copy = 4 * 400_000 * 1024
    for budget in ("192MiB", None, "2GiB"):
        assert held(budget) < copy // 2


@pytest.mark.parametrize(
    "dtype, options", [("float32", {}), ("bfloat16", OPTIONS["all"] | {"normalizer": None})], ids=["plain", "all"]
)
def test_losses_of_tokens(dtype, options):
    arrays = problem(dtype=dtype)
    factors = jnp.asarray(np.random.default_rng(3).normal(size=(3, 7)), "float32")

    def weighted(function):
        return lambda *a, factors, **o: (factors * function(*a, reduction="none", **o)).sum()

    run = jax.value_and_grad(weighted(linear_cross_entropy), (0, 1, 3))
    value, gradients = run(*arrays, factors=factors, **options)
    expected, expected_gradients = in_float64(weighted(cross_entropy), *arrays, factors=factors, **options)
    assert relative_error(value, expected) <= 1e-5  # terms of both signs
    check_gradients(gradients, expected_gradients, dtype)
    losses = linear_cross_entropy(*arrays, reduction="none", **options)
    assert losses.shape == (3, 7) and losses[0, 0] == 0.0


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 3)]),
    dim=st.integers(1, 33),
    vocab=st.integers(1, 300),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.3, 1.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5, 2.0]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_options(shape, dim, vocab, reduction, smoothing, z_loss, softcap, scale, bias, seed):
    arrays = problem(shape, dim, vocab, seed=seed, bias=bias)
    options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, softcap=softcap, logit_scale=scale)
    value, gradients = value_and_grad(*arrays, **options)
    expected, expected_gradients = in_float64(cross_entropy, *arrays, **options)
    assert abs(float(value) - expected) <= 3e-6 * max(1.0, abs(expected))
    for found, other in zip(gradients, expected_gradients):
        # With one vocabulary entry, or where terms cancel, gradients are rounding errors alone.
        assert np.linalg.norm(np.float64(found) - other) <= 1e-5 * max(1.0, np.linalg.norm(other))


def test_several_weighted_targets_a_token():
    hidden, weight, targets, bias = problem(per_token=3)
    shares = jnp.asarray(RNG.dirichlet(np.ones(3), (3, 7)), "float32")
    for options in ({}, dict(reduction="sum", token_weight=TOKENS)):
        compare((hidden, weight, targets, bias), target_weight=shares, **options)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16"])
def test_small_integers_are_no_targets(kind):
    hidden, weight, targets, _ = problem(ignored=False)
    for call in (linear_cross_entropy, linear_logprobs):
        with pytest.raises(TypeError, match=f"targets: expected int32 or int64, got {kind}"):
            call(hidden, weight, targets.astype(kind))


def test_an_ignore_index_beyond_int32_and_none():
    hidden, weight, targets, _ = problem()
    for call in (linear_cross_entropy, lambda *a, **o: linear_logprobs(*a, **o)[0]):
        plain = jnp.where(targets < 0, 0, targets)
        assert (call(hidden, weight, plain, ignore_index=2**40) == call(hidden, weight, plain)).all()
        assert (call(hidden, weight, targets, ignore_index=None) == call(hidden, weight, targets)).all()
    with pytest.raises(ValueError, match=r"hidden: expected \[..., D\] with at least one column, got \[3, 7, 0\]"):
        linear_cross_entropy(hidden[..., :0], weight[:, :0], targets)


def test_ignore_index_may_be_a_class():
    hidden, weight, targets, _ = problem(ignored=False)
    targets = targets.at[0].set(0)
    compare((hidden, weight, targets, None), ignore_index=0)


def test_equal_logits_lose_log_vocab():
    loss = linear_cross_entropy(jnp.zeros((4, 8)), jnp.ones((50257, 8)), jnp.arange(4))
    assert abs(float(loss) - np.log(50257)) < 1e-6


def test_mean_over_no_token_is_zero():
    hidden, weight, _, bias = problem()
    value, gradients = value_and_grad(hidden, weight, jnp.full((3, 7), -100), bias)
    assert value == 0.0 and all((g == 0.0).all() for g in gradients)
    value, gradients = value_and_grad(hidden[:0], weight, jnp.zeros((0, 7), jnp.int32), bias)
    assert value == 0.0 and all((g == 0.0).all() for g in gradients)
    assert linear_cross_entropy(hidden[:0], weight, jnp.zeros((0, 7), jnp.int32), reduction="none").shape == (0, 7)


def test_masked_entries_have_no_probability():
    hidden, weight, targets, bias = problem(ignored=False)
    bias = bias.at[50:].set(-jnp.inf)
    targets = targets % 50
    value, gradients = value_and_grad(hidden, weight, targets, bias)
    expected, few = value_and_grad(hidden, weight[:50], targets, bias[:50])
    assert relative_error(value, expected) < 1e-6
    assert relative_error(gradients[1][:50], few[1]) < 1e-6 and (gradients[1][50:] == 0.0).all()


def test_nan_in_gives_nan():
    hidden, weight, targets, _ = problem(ignored=False)
    assert jnp.isnan(linear_cross_entropy(hidden.at[1, 2, 3].set(jnp.nan), weight, targets))


def test_accuracy():
    hidden, weight, targets, bias = problem()
    best = jnp.argmax(hidden @ weight.T + bias, -1).astype(jnp.int32)
    targets = jnp.where(targets == -100, -100, targets).at[1].set(best[1])
    found = jax.value_and_grad(linear_cross_entropy, has_aux=True)(hidden, weight, targets, bias, accuracy=True)
    (loss, accuracy), gradient = found
    expected, expected_gradient = jax.value_and_grad(linear_cross_entropy)(hidden, weight, targets, bias)
    valid = targets != -100
    assert accuracy.dtype == jnp.float32
    assert np.isclose(accuracy, (valid & (targets == best)).sum() / valid.sum())
    assert loss == expected and (gradient == expected_gradient).all()
    losses, accuracy = linear_cross_entropy(hidden, weight, jnp.full((3, 7), -100), accuracy=True, reduction="none")
    assert accuracy == 0.0 and losses.shape == (3, 7)


def test_normalizer_may_be_traced():
    arrays = problem()

    @jax.jit
    def loss(count, hidden):
        return linear_cross_entropy(hidden, *arrays[1:], normalizer=count)

    value, (by_count, by_hidden) = jax.value_and_grad(loss, (0, 1))(jnp.float32(19.0), arrays[0])
    expected, expected_gradients = in_float64(cross_entropy, *arrays, normalizer=19.0)
    assert relative_error(value, expected) < 1e-6
    assert relative_error(by_hidden, expected_gradients[0]) < 1e-5
    assert relative_error(by_count, -expected / 19.0) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scaled_losses_have_scaled_gradients(dtype):
    arrays = problem(dtype=dtype)
    gradients = jax.grad(lambda *a: 37.5 * linear_cross_entropy(*a), (0, 1, 3))(*arrays)
    _, expected = in_float64(lambda *a: 37.5 * cross_entropy(*a), *arrays)
    check_gradients(gradients, expected, dtype)


def test_loss_scaling_keeps_the_small_gradients_of_float16():
    hidden, weight, targets, bias = problem(dtype="float16")
    tiny = jnp.full((3, 7), 2.0**-20)  # gradients below float16's smallest number
    total = functools.partial(linear_cross_entropy, reduction="sum")
    gradient = jax.grad(lambda h: 2.0**20 * total(h, weight, targets, token_weight=tiny))
    expected = jax.grad(lambda h: total(h, weight, targets))
    assert relative_error(gradient(hidden), expected(hidden)) < 1e-3


@of_kernels
def test_denormal_numbers_are_kept():
    hidden, weight, targets, _ = problem(ignored=False)
    tiny = jnp.asarray(np.full((3, 7), 2.0**-140, "float32"))  # XLA's own arithmetic would flush it
    losses = np.asarray(linear_cross_entropy(hidden, weight, targets, reduction="none", token_weight=tiny))
    expected = np.asarray(linear_cross_entropy(hidden, weight, targets, reduction="none"))
    assert np.allclose(np.float64(losses) * 2.0**140, expected, rtol=1e-2)


def test_same_bits_twice():
    arrays = problem((64,), 64, 1000, dtype="bfloat16")
    run = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1, 3)))
    for one, other in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*arrays))):
        assert (one == other).all()


def test_any_budget_gives_the_same_loss():
    hidden, weight, targets, _ = problem((256,), 32, 2000)

    def run(budget):
        loss = functools.partial(linear_cross_entropy, memory_budget=budget)
        return jax.value_and_grad(loss, (0, 1))(hidden, weight, targets)

    least, most = run("2MiB" if ON_CPU else BUDGET), run(1 << 30)
    assert relative_error(least[0], most[0]) < 1e-6
    for one, other in zip(least[1], most[1]):
        assert relative_error(one, other) < 1e-5


@of_kernels
def test_a_budget_is_a_ceiling():
    """A small head takes no more with a large budget than without a budget, and that is less than its fp32 logits."""
    tokens, dim, vocab = 1024, 64, 8192
    kinds = (((tokens, dim), "float32"), ((vocab, dim), "float32"), ((tokens,), "int32"))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]

    def held(budget):
        step = jax.value_and_grad(functools.partial(linear_cross_entropy, memory_budget=budget), (0, 1))
        return jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * vocab * 4
    assert held("256MiB") <= held(None)
    assert held(None) < logits or not ON_CPU  # cuBLAS has a chunk's fp32 logits and what it multiplies


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_token_of_weight_0_is_left_out(reduction):
    rng = np.random.default_rng(3)
    hidden, weight = rng.standard_normal((12, 8)).astype(np.float32), rng.standard_normal((50, 8)).astype(np.float32)
    targets, of_token = rng.integers(0, 50, 12), (rng.random(12) + 0.5).astype(np.float32)
    of_token[::3] = 0.0
    counted = of_token != 0.0
    hidden[::3] = np.nan

    def total(h, w, y, weights):
        return linear_cross_entropy(h, w, y, token_weight=weights, reduction=reduction).sum()

    both = jax.value_and_grad(total, argnums=(0, 1))
    wanted, (d_hidden, d_weight) = both(hidden[counted], weight, targets[counted], of_token[counted])
    loss, (found_hidden, found_weight) = jax.jit(both)(hidden, weight, targets, of_token)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert not np.asarray(found_hidden)[::3].any()
    np.testing.assert_allclose(np.asarray(found_hidden)[counted], d_hidden, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found_weight, d_weight, rtol=1e-4, atol=1e-6)
