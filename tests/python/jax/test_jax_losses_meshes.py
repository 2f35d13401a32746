"""Ready-made losses on meshes of two and four devices, against one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_oracle import relative_error
from loss_frameworks import normal

from logitless.jax import Sharding, losses

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.parametrize("options", [
    dict(symmetric=True, negatives=6), dict(targets=np.array([3, 0, -100, 7, 7, 1, 2, 5], np.int32), negatives=4),
    dict(reduction="none"), dict(symmetric=True, reduction="sum"),
], ids=str)  # fmt: skip
def test_info_nce(options):
    options = dict(options)
    rows, keys = normal(8, 6, seed=71), normal(8, 6, seed=72)
    negatives = normal(options.pop("negatives", 0), 6, seed=73)

    def call(sharding):
        def loss(query, key, more, temperature):
            found = losses.info_nce_loss(
                query, key, negatives=more if len(more) else None, temperature=temperature, sharding=sharding, **options)
            return (found * rows[:, 0]).sum() if found.ndim else found

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(rows, keys, negatives, jnp.float32(0.5))

    (value, gradients), (expected, others) = call(Sharding(mesh(), tokens="data")), call(None)
    assert relative_error(value, expected) < 2e-6
    for one, other in zip(gradients, others):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("message, change", {
    "key: expected a multiple of 2 rows, which are sharded over ('data',), got [7, 6]": dict(key=normal(7, 6, seed=1)),
    "negatives: expected a multiple of 2 rows": dict(negatives=normal(3, 6, seed=1)),
    "sharding: expected tokens=axes of the rows alone": dict(sharding=dict(vocab="data")),
}.items())  # fmt: skip
def test_bad_rows_are_named(message, change):
    sharding = Sharding(mesh(), **change.pop("sharding", dict(tokens="data")))
    given = {"query": normal(8, 6, seed=1), "key": normal(8, 6, seed=2), "targets": np.zeros(8, np.int32), **change}
    with pytest.raises(ValueError) as raised:
        losses.info_nce_loss(**given, sharding=sharding)
    assert message in str(raised.value)


def test_grad_cache_repeats_dropout_on_each_device():
    """Rows have keys of their own. The compiled program gathers no rows of the encoder, and holds less than the 2 MiB of
    its activations."""
    rows, dim, wide = 256, 8, 2048
    weights = normal(dim, wide, seed=74), normal(wide, dim, seed=75)
    inputs, keys = normal(rows, dim, seed=76), jax.random.split(jax.random.key(3), rows)

    def encode(weights, x, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (wide,)))(keys)
        return jnp.where(kept, jnp.tanh(x @ weights[0]), 0.0) @ weights[1]

    def loss(weights, x, keys, size):
        encoder = lambda *given: encode(weights, *given)  # noqa: E731
        found = losses.grad_cache(encoder, x, keys, micro_batch=size) if size else encoder(x, keys)
        return losses.info_nce_loss(found, x, temperature=0.5)

    data = NamedSharding(mesh(), P("data"))
    placed = weights, jax.device_put(inputs, data), jax.device_put(keys, data)
    steps = {size: jax.jit(jax.grad(lambda *a: loss(*a, size))).lower(*placed).compile() for size in (0, 16)}  # noqa: B023
    for one, other in zip(steps[16](*placed), steps[0](*placed)):
        assert relative_error(one, other) < 1e-5
    held = [steps[size].memory_analysis().temp_size_in_bytes for size in (16, 0)]
    assert held[0] < 1 << 20 < held[1], held


V, D = 22, 6
MODELS = normal(4, 6, D, seed=77), normal(V, D, seed=78), normal(V, seed=79)
TEACHER = normal(4, 6, D + 3, seed=80), normal(V, D + 3, seed=81), normal(V, seed=82)
TARGETS = np.where(np.arange(24).reshape(4, 6) % 5 == 1, -100, np.arange(24).reshape(4, 6) % V).astype(np.int32)
DIVERGENCES = [
    ("jsd_loss", dict(vocab="model", tokens="data"), dict(beta=0.3, temperature=1.5, softcap=4.0, teacher_softcap=5.0)),
    ("forward_kl_loss", dict(vocab="model"), dict(weight_hard_loss=0.5, weight_soft_loss=0.7, logit_scale=0.8)),
    ("reverse_kl_loss", dict(vocab="data", tokens="data"), dict(reduction="none", temperature=2.0)),
    ("total_variation_loss", dict(vocab="model", tokens=P("data", "model")), dict(normalizer=7.0)),
    ("jsd_loss", dict(tokens="data"), dict(reduction="sum", targets=None)),
]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("name, layout, options", DIVERGENCES, ids=str)
def test_divergences(name, layout, options):
    options = {"targets": TARGETS, **options}
    of_teacher = dict(teacher_hidden=TEACHER[0], teacher_weight=TEACHER[1], teacher_bias=TEACHER[2])
    two = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(sharding):
        def loss(hidden, weight, bias):
            given = dict(hidden=hidden, weight=weight, bias=bias, **of_teacher, sharding=sharding, **options)
            found = getattr(losses, name)(**given)
            return (found * MODELS[0][..., 0]).sum() if found.ndim else found

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    compiled = step(Sharding(two, **layout)).lower(*MODELS).compile()
    (value, gradients), (expected, others) = compiled(*MODELS), step(None)(*MODELS)
    assert relative_error(value, expected) < 2e-6
    for one, other in zip(gradients, others):
        assert relative_error(one, other) < 1e-5
    assert not re.search(rf"\[{V},\d+\]\S* all-gather", compiled.as_text()), "a head is gathered"
    frozen = jax.jit(jax.grad(lambda x: getattr(losses, name)(
        x, *MODELS[1:2], *TEACHER[:2], sharding=Sharding(two, **layout), **{**options, "reduction": "sum", "normalizer": None}).sum()))
    assert np.isfinite(frozen(MODELS[0])).all()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("name, layout, options", [
    ("jsd_loss", dict(vocab="model", tokens="data"), dict(temperature=1.5, teacher_softcap=5.0, weight_hard_loss=0.3)),
    ("forward_kl_loss", dict(vocab=("data", "model")), dict(reduction="none")),
    ("forward_kl_loss", dict(vocab=("model", "data")), {}),
    ("jsd_loss", dict(vocab="data", tokens="data"), dict(reduction="sum")),
    ("total_variation_loss", dict(tokens="data"), {}),
], ids=str)  # fmt: skip
def test_teachers_of_another_vocabulary(name, layout, options):
    """The teacher's rows are sharded by themselves, and each is on few devices at a time."""
    vocab, of_teacher = 20, 28
    ids = np.where(np.arange(vocab) % 7 == 2, -1, np.arange(vocab)[::-1] * 5 % of_teacher).astype(np.int32)
    leaves = MODELS[0], MODELS[1][:vocab], MODELS[2][:vocab]
    others = TEACHER[0], normal(of_teacher, D + 3, seed=83), normal(of_teacher, seed=84)
    two = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(sharding):
        def loss(hidden, weight, bias, states, head, shift, ids):
            found = getattr(losses, name)(
                hidden, weight, states, head, bias, shift, teacher_ids=ids, targets=np.minimum(TARGETS, vocab - 1),
                sharding=sharding, **options)
            return (found * MODELS[0][..., 0]).sum() if found.ndim else found

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    compiled = step(Sharding(two, **layout)).lower(*leaves, *others, ids).compile()
    (value, gradients), (expected, wanted) = compiled(*leaves, *others, ids), step(None)(*leaves, *others, ids)
    assert relative_error(value, expected) < 2e-6
    for one, other in zip(gradients, wanted):
        assert relative_error(one, other) < 1e-5
    assert not re.search(rf"\[({vocab}|{of_teacher}),\d+\]\S* all-gather", compiled.as_text()), "a head is gathered"
    bad = step(Sharding(two, **layout))(*leaves, *others, np.where(np.arange(vocab) == 3, of_teacher, ids))[0]
    assert np.isnan(bad)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_divergences_of_explicit_types_and_without_jit():
    of_teacher = dict(zip(("teacher_hidden", "teacher_weight", "teacher_bias"), TEACHER))
    expected = losses.forward_kl_loss(*MODELS[:2], *TEACHER[:2], targets=TARGETS)
    auto, explicit = (
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit))
    sharding = Sharding(auto, vocab="model", tokens="data")
    assert relative_error(losses.forward_kl_loss(*MODELS[:2], *TEACHER[:2], targets=TARGETS, sharding=sharding), expected) < 2e-6
    with jax.set_mesh(explicit):
        hidden, targets, states = (jax.device_put(a, NamedSharding(explicit, P("data"))) for a in (MODELS[0], TARGETS, TEACHER[0]))
        weight, head = (jax.device_put(a, NamedSharding(explicit, P("model"))) for a in (MODELS[1], TEACHER[1]))
        found, gradient = jax.jit(jax.value_and_grad(losses.forward_kl_loss, 1))(hidden, weight, states, head, targets=targets)
    assert relative_error(found, expected) < 2e-6 and np.isfinite(np.asarray(gradient)).all()
    with pytest.raises(ValueError, match=r"teacher_ids: expected \[22\], got \[20\]"):
        losses.jsd_loss(*MODELS[:2], **of_teacher, teacher_ids=np.zeros(20, np.int32), sharding=sharding)
    with pytest.raises(ValueError, match=r"teacher_weight: expected a multiple of 2 along dimension 0"):
        losses.jsd_loss(*MODELS[:2], TEACHER[0], TEACHER[1][:21], teacher_ids=np.zeros(22, np.int32), sharding=sharding)
    with pytest.raises(ValueError, match=r"teacher_weight: expected \[22\]"):
        losses.jsd_loss(*MODELS[:2], TEACHER[0], TEACHER[1][:20], sharding=sharding)
