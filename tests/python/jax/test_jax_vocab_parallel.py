"""Four shards of a vocabulary against the full vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_oracle import check_gradients, doubles, enable_x64, of_kernels, problem, relative_error

from logitless.jax import (
    linear_cross_entropy,
    linear_logprobs,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_logprobs,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

VOCAB = 104
CLASSES = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, VOCAB), "float32")
TOKENS = jnp.asarray(np.random.default_rng(2).uniform(0.0, 2.0, (3, 7)), "float32")


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def sharded(function, check_vma=True, out_specs=P(), extra=()):
    """Runs function(hidden, weight, targets, bias, *extra) on four shards of weight and bias."""
    specs = (P(), P("tp"), P(), P("tp"), *extra)
    return jax.jit(jax.shard_map(function, mesh=mesh(tp=4), in_specs=specs, out_specs=out_specs, check_vma=check_vma))


OPTIONS = {
    "plain": {},
    "sum": dict(reduction="sum", z_loss=1e-2),
    "smoothed": dict(label_smoothing=0.1, softcap=6.0),
    "normalizer": dict(normalizer=9.0, logit_scale=0.5),
    "token weights": dict(token_weight=TOKENS),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradients(options):
    arrays = problem(vocab=VOCAB)
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", **options))
    value, gradients = jax.jit(jax.value_and_grad(parallel, (0, 1, 3)))(*arrays)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(*arrays, **options)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


def weighed(results):
    """Returns a number that depends on each result in a different way."""
    return sum((f(r) * (1 + jnp.arange(r.size).reshape(r.shape) % 3)).sum() for f, r in zip((jnp.asarray, jnp.sin, jnp.cos), results))


@pytest.mark.parametrize("check_vma", [True, False])
def test_lse_and_target_logits(check_vma):
    arrays = problem(vocab=VOCAB)
    options = dict(return_lse=True, return_target_logits=True, softcap=6.0, label_smoothing=0.1)
    parallel = sharded(
        lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", **options), check_vma, out_specs=(P(), P(), P())
    )
    found, expected = parallel(*arrays), linear_cross_entropy(*arrays, **options)
    assert (expected[2] == 0).any(), "no token is ignored"
    for value, whole in zip(found, expected):
        assert value.shape == whole.shape and relative_error(value, whole) < 2e-6
    gradients = jax.jit(jax.grad(lambda *a: weighed(parallel(*a)), (0, 1, 3)))(*arrays)
    check_gradients(gradients, jax.grad(lambda *a: weighed(linear_cross_entropy(*a, **options)), (0, 1, 3))(*arrays))
    alone = sharded(
        lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", reduction="none", return_lse=True), out_specs=(P(), P())
    )
    loss, lse = alone(*arrays)
    assert loss.shape == lse.shape == expected[1].shape


@pytest.mark.parametrize("options", [dict(logit_scale=-0.5), dict(softcap=3.0)], ids=str)
def test_argmax_and_accuracy(options):
    """The largest logits of two shards are equal for two tokens, whose lowest id counts."""
    hidden, weight, targets, bias = problem(vocab=VOCAB)
    options = dict(accuracy=True, return_argmax=True, return_target_logits=True, **options)
    best = linear_cross_entropy(hidden, weight, targets, bias, **options)[2]
    first, second = best[1, 1], best[2, 2]
    weight, bias = (a.at[(first + 52) % VOCAB].set(a[first]).at[(second + 26) % VOCAB].set(a[second]) for a in (weight, bias))
    targets = targets.at[1, 1].set(jnp.minimum(first, (first + 52) % VOCAB)).at[0, 3:].set(best[0, 3:])
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", **options))
    found = parallel(hidden, weight, targets, bias)
    expected = linear_cross_entropy(hidden, weight, targets, bias, **options)
    assert (found[2] == expected[2]).all() and found[1] == expected[1] and found[1] > 0.2
    assert relative_error(found[3], expected[3]) < 2e-6


def test_class_weights_are_sharded():
    arrays = problem(vocab=VOCAB)
    options = dict(label_smoothing=0.2)
    parallel = sharded(
        lambda *a: vocab_parallel_linear_cross_entropy(*a[:4], class_weight=a[4], axis_name="tp", **options),
        extra=(P("tp"),),
    )
    value, gradients = jax.jit(jax.value_and_grad(parallel, (0, 1, 3)))(*arrays, CLASSES)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(*arrays, class_weight=CLASSES, **options)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


@pytest.mark.parametrize("check_vma, dtype", [(True, "float32"), (False, "bfloat16")])
def test_losses_of_tokens(check_vma, dtype):
    arrays = problem(vocab=VOCAB, dtype=dtype)
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", reduction="none"), check_vma)
    value, gradients = jax.jit(jax.value_and_grad(lambda *a: (TOKENS * parallel(*a)).sum(), (0, 1, 3)))(*arrays)
    expected, others = jax.value_and_grad(
        lambda *a: (TOKENS * linear_cross_entropy(*a, reduction="none")).sum(), (0, 1, 3)
    )(*arrays)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others, dtype)


@pytest.mark.parametrize("check_vma", [True, False])
def test_logprobs_entropy_and_lse(check_vma):
    arrays = problem(vocab=VOCAB)
    factors = jnp.asarray(np.random.default_rng(5).normal(size=(3, 3, 7)), "float32")
    parallel = sharded(lambda *a: vocab_parallel_logprobs(*a, axis_name="tp", softcap=7.0), check_vma)

    def weighted(function):
        return lambda *a: sum((f * o).sum() for f, o in zip(factors, function(*a)))

    whole = lambda *a: linear_logprobs(*a, softcap=7.0)  # noqa: E731
    for one, other in zip(parallel(*arrays), whole(*arrays)):
        assert relative_error(one, other) < 2e-6 and one[0, 0] == 0.0
    gradients = jax.jit(jax.grad(weighted(parallel), (0, 1, 3)))(*arrays)
    check_gradients(gradients, jax.grad(weighted(whole), (0, 1, 3))(*arrays))


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e5])
def test_an_offset_of_all_logits_cancels(offset):
    hidden, weight, targets, bias = problem(vocab=VOCAB)
    # Multiples of 1/16: fp32 holds the logits exactly with any of the offsets.
    hidden, weight, bias = jnp.round(4 * hidden) / 4, jnp.round(4 * weight) / 4, jnp.round(4 * bias) / 4 + offset
    factors = jnp.asarray(np.random.default_rng(5).normal(size=(3, 3, 7)), "float32")

    def weighted(function):
        def total(*a):
            loss, (log_prob, entropy) = function(*a)
            return loss + (factors[0] * log_prob).sum() + (factors[1] * entropy).sum()

        return total

    parallel = sharded(
        lambda *a: (
            vocab_parallel_linear_cross_entropy(*a, axis_name="tp", reduction="sum"),
            vocab_parallel_logprobs(*a, axis_name="tp")[:2],
        )
    )
    with enable_x64(True):
        exact = tuple(jnp.asarray(a) for a in doubles(hidden, weight)) + (targets, jnp.asarray(doubles(bias)[0] - offset))

        def reference(hidden, weight, targets, bias):
            log_p = jax.nn.log_softmax(hidden @ weight.T + bias)
            valid = targets >= 0
            log_prob = jnp.where(valid, jnp.take_along_axis(log_p, jnp.where(valid, targets, 0)[..., None], -1)[..., 0], 0.0)
            return -log_prob.sum(), (log_prob, jnp.where(valid, -(jnp.exp(log_p) * log_p).sum(-1), 0.0))

        expected = jax.tree.leaves(reference(*exact))
        others = jax.grad(weighted(reference), (0, 1, 3))(*exact)
    for value, whole in zip(jax.tree.leaves(parallel(hidden, weight, targets, bias)), expected, strict=True):
        assert relative_error(value, whole) < 1e-6
    check_gradients(jax.jit(jax.grad(weighted(parallel), (0, 1, 3)))(hidden, weight, targets, bias), others)


def test_weights_have_gradients_too():
    arrays = problem(vocab=VOCAB, ignored=False)
    parallel = sharded(
        lambda *a: vocab_parallel_linear_cross_entropy(
            *a[:4], class_weight=a[4], token_weight=a[5], axis_name="tp", z_loss=0.1, reduction="sum"
        ),
        extra=(P("tp"), P()),
    )
    by_class, by_token = jax.jit(jax.grad(parallel, (4, 5)))(*arrays, CLASSES, TOKENS)
    z_losses = 0.1 * linear_logprobs(*arrays)[2] ** 2
    losses = linear_cross_entropy(*arrays, reduction="none")
    assert relative_error(by_token, CLASSES[arrays[2]] * losses + z_losses) < 2e-6
    assert relative_error(by_class, jnp.zeros(VOCAB).at[arrays[2]].add(TOKENS * losses)) < 2e-6


def test_gradients_taken_inside():
    arrays = problem(vocab=VOCAB)
    inside = sharded(
        jax.grad(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"), (0, 1, 3)),
        out_specs=(P(), P("tp"), P("tp")),
    )
    check_gradients(inside(*arrays), jax.grad(linear_cross_entropy, (0, 1, 3))(*arrays))


def test_a_shard_whose_entries_are_all_masked():
    hidden, weight, targets, bias = problem(vocab=VOCAB, ignored=False)
    bias, targets = bias.at[26:52].set(-jnp.inf), targets % 26
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"))
    value, gradients = jax.value_and_grad(parallel, (0, 1))(hidden, weight, targets, bias)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, targets, bias)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)
    entropy = sharded(lambda *a: vocab_parallel_logprobs(*a, axis_name="tp"))(hidden, weight, targets, bias)[1]
    assert relative_error(entropy, linear_logprobs(hidden, weight, targets, bias)[1]) < 2e-6


def test_a_logit_of_infinity_on_one_shard():
    """The log-sum-exp is infinite and the softmax NaN, as without shards and in PyTorch."""
    hidden, weight, targets, bias = problem(vocab=VOCAB, ignored=False)
    bias = bias.at[40].set(jnp.inf)
    rows = sharded(lambda *a: vocab_parallel_logprobs(*a, axis_name="tp"))(hidden, weight, targets, bias)
    for log_prob, entropy, lse in (rows, linear_logprobs(hidden, weight, targets, bias)):
        assert jnp.isposinf(lse).all() and jnp.isnan(log_prob).all() and jnp.isnan(entropy).all()
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"))
    for loss in (parallel, linear_cross_entropy):
        value, gradients = jax.value_and_grad(loss, (0, 1, 3))(hidden, weight, targets, bias)
        assert jnp.isnan(value) and all(jnp.isnan(g).all() for g in gradients)


def test_ignore_index_may_be_a_class_of_one_shard():
    hidden, weight, targets, bias = problem(vocab=VOCAB, ignored=False)
    targets = targets.at[1].set(0)
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", ignore_index=0))
    value, gradients = jax.value_and_grad(parallel, (0, 1, 3))(hidden, weight, targets, bias)
    whole = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))
    expected, others = whole(hidden, weight, targets, bias, ignore_index=0)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


def test_data_and_vocabulary_axes_together():
    hidden, weight, targets, bias = problem((4, 7), vocab=VOCAB, ignored=False)

    def local(hidden, weight, targets, bias):
        total = vocab_parallel_linear_cross_entropy(hidden, weight, targets, bias, axis_name="tp", normalizer=28)
        return jax.lax.psum(total, "dp")

    parallel = jax.shard_map(
        local, mesh=mesh(dp=2, tp=2), in_specs=(P("dp"), P("tp"), P("dp"), P("tp")), out_specs=P()
    )
    value, gradients = jax.jit(jax.value_and_grad(parallel, (0, 1, 3)))(hidden, weight, targets, bias)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(hidden, weight, targets, bias)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


@pytest.mark.parametrize("check_vma, compiled", [(True, True), (True, False), (False, True)])
def test_data_parallel_with_the_whole_vocabulary(check_vma, compiled):
    hidden, weight, targets, bias = problem((4, 7), vocab=VOCAB, ignored=False)
    parallel = jax.shard_map(
        lambda *a: jax.lax.pmean(linear_cross_entropy(*a), "dp"),
        mesh=mesh(dp=4), in_specs=(P("dp"), P(), P("dp"), P()), out_specs=P(), check_vma=check_vma,
    )
    run = jax.value_and_grad(parallel, (0, 1, 3))
    value, gradients = (jax.jit(run) if compiled else run)(hidden, weight, targets, bias)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(hidden, weight, targets, bias)
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


@of_kernels
def test_only_what_is_differentiated_is_computed():
    arrays = problem(vocab=VOCAB)
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"))
    text = str(jax.make_jaxpr(jax.grad(parallel, 0))(*arrays))
    assert "d_hidden" in text and "d_weight" not in text and "d_bias" not in text


def test_no_shard_holds_logits():
    tokens, dim, vocab = 2048, 64, 16384
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp", memory_budget="4MiB"))
    kinds = (((tokens, dim), "float32"), ((vocab, dim), "float32"), ((tokens,), "int32"), ((vocab,), "float32"))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    held = jax.jit(jax.value_and_grad(parallel, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert held < tokens * vocab // 4 * 4 / 3  # a third of a shard's logits


def test_columns_along_explicit_axes_are_refused():
    hidden, weight, targets, _ = problem((4, 7), dim=16)
    explicit = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Explicit,))
    weight = jax.device_put(weight, jax.sharding.NamedSharding(explicit, P(None, "dp")))
    with pytest.raises(NotImplementedError, match="weight: is sharded over explicit axes.*inside jax.shard_map"):
        linear_cross_entropy(hidden, weight, targets)


def test_errors():
    hidden, weight, targets, bias = problem(vocab=VOCAB, ignored=False)
    loss = vocab_parallel_linear_cross_entropy
    whole = jax.shard_map(
        lambda *a: loss(*a, axis_name="tp"), mesh=mesh(tp=4), in_specs=(P(), P(), P(), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match="weight: expected its rows sharded over axis 'tp'"):
        whole(hidden, weight, targets, bias)
    with pytest.raises(NameError, match="tp"):
        loss(hidden, weight, targets, bias, axis_name="tp")
    for options, match in (
        (dict(label_smoothing=1.5), r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
        (dict(z_loss=-1.0), "z_loss: expected a number >= 0, got -1.0"),
        (dict(reduction="max"), "reduction: expected 'none', 'mean' or 'sum', got 'max'"),
    ):
        with pytest.raises(ValueError, match=match):
            sharded(lambda *a: loss(*a, axis_name="tp", **options))(hidden, weight, targets, bias)


@of_kernels
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's loss is NaN instead")
@pytest.mark.parametrize("bad", [VOCAB, -1, VOCAB + 30])
def test_a_target_of_no_shard(bad):
    hidden, weight, targets, bias = problem(vocab=VOCAB, ignored=False)
    parallel = sharded(lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"))
    with pytest.raises((ValueError, RuntimeError), match=r"at position 9 is outside \[0, 26\)"):
        parallel(hidden, weight, targets.at[1, 2].set(bad), bias).block_until_ready()
