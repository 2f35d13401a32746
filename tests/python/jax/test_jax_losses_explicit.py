"""Ready-made losses of explicitly sharded arrays, against the same arrays on one device; and those that refuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_oracle import relative_error
from loss_frameworks import normal

import logitless.jax
from logitless.jax import losses

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

V, D, B, T = 24, 8, 4, 6
TOKENS, VOCAB = P("data"), P("model")
TARGETS = np.where(np.arange(B * T).reshape(B, T) % 5 == 1, -100, np.arange(B * T).reshape(B, T) % V).astype(np.int32)
HEAD = dict(hidden=normal(B, T, D, seed=1), weight=normal(V, D, seed=2), targets=TARGETS)
BIASED = {**HEAD, "bias": normal(V, seed=3)}
TEACHER = dict(teacher_hidden=normal(B, T, D + 3, seed=4), teacher_weight=normal(V, D + 3, seed=5))
PAIRS = dict(query=normal(8, D, seed=6), key=normal(8, D, seed=7))
OLD = {**BIASED, "advantages": normal(B, seed=8), "old_per_token_logps": normal(B, T, seed=9) * 0.1 - 3}
REFERENCE = {"ref_hidden": normal(B, T, D, seed=10)}
TOP = losses.TopK(np.arange(B * T * 3).reshape(B, T, 3).astype(np.int32) % V, normal(B, T, 3, seed=11) * 0.1 - 3)
BOTH = dict(query=TOKENS, key=TOKENS, negatives=TOKENS)
APART = dict(query=TOKENS, key=VOCAB, negatives=VOCAB)
POSITIONS = np.array([3, 0, -100, 7, 7, 1, 2, 5], np.int32)

TAKEN = {
    "info_nce": (losses.info_nce_loss, PAIRS, dict(symmetric=True), BOTH),
    "info_nce, one axis": (losses.info_nce_loss, {**PAIRS, "negatives": normal(6, D, seed=12), "targets": POSITIONS}, {}, BOTH),
    "info_nce, two axes": (losses.info_nce_loss, {**PAIRS, "negatives": normal(4, D, seed=12), "targets": POSITIONS}, {}, APART),
    "info_nce, none": (losses.info_nce_loss, PAIRS, dict(symmetric=True, reduction="none"), APART),
    "info_nce, keys": (losses.info_nce_loss, PAIRS, dict(symmetric=True), dict(query=P(), key=VOCAB)),
    "dpo": (losses.dpo_loss, {**BIASED, **REFERENCE}, {}, {}),
    "orpo": (losses.orpo_loss, BIASED, dict(shift=True), {}),
    "kto": (losses.kto_loss, {**BIASED, "preference_labels": np.arange(B) % 2 > 0, "ref_logps": normal(B, seed=13)}, dict(kl=0.1), {}),
    "grpo": (losses.grpo_loss, {**OLD, **REFERENCE}, dict(beta=0.1, entropy_coef=0.1, temperature=0.7), {}),
    "gspo": (losses.gspo_loss, {**OLD, "mask": np.arange(B * T).reshape(B, T) % 4 > 0}, {}, {}),
    "ppo": (losses.ppo_loss, {**OLD, "advantages": normal(B, T, seed=8)}, {}, {}),
    "jsd": (losses.jsd_loss, {**BIASED, **TEACHER}, {}, {}),
    "top_k": (losses.top_k_loss, {**HEAD, "top_k": TOP}, {}, {}),
    "top_k, tail": (losses.top_k_loss, {**HEAD, "top_k": TOP}, dict(tail=True, reduction="none"), {}),
    "group_advantages": (losses.group_advantages, {"rewards": normal(B, seed=14)}, dict(group_size=2), {}),
}  # fmt: skip
REFUSED = {
    "arcface": (losses.arcface_loss, HEAD, {}), "cosface": (losses.cosface_loss, HEAD, {}),
    "sampled": (losses.sampled_softmax_loss, HEAD, dict(num_sampled=5, seed=jax.random.key(0))),
    "multi_token": (losses.multi_token_loss, HEAD, dict(shifts=(1, 2))),
    "teacher_top_k": (losses.teacher_top_k, TEACHER, dict(k=3)),
    "student_top_k": (losses.student_top_k_loss, {**HEAD, **TEACHER}, dict(k=3)),
    "kept_logprobs": (logitless.jax.linear_kept_logprobs, {**HEAD, "kept_ids": np.zeros((B, T, 2), np.int32)}, {}),
}  # fmt: skip


def placed(arrays, specs):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    of_vocab = {name: VOCAB for name in ("weight", "bias", "teacher_weight")}
    spec = lambda name: {**of_vocab, **specs}.get(name, TOKENS)  # noqa: E731
    return mesh, {n: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(n))), a) for n, a in arrays.items()}  # noqa: B023


def step(loss, options):
    def total(leaves, others):
        found = loss(**leaves, **others, **options)
        found = found.loss if hasattr(found, "loss") else found
        return (found * jnp.arange(1.0, found.size + 1).reshape(found.shape)).sum()

    return jax.jit(jax.value_and_grad(total))


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    loss, arrays, options, specs = TAKEN[name]
    names = [n for n in ("hidden", "weight", "bias", "query", "key", "negatives", "rewards") if n in arrays]
    split = lambda a: ({n: a[n] for n in names}, {n: x for n, x in a.items() if n not in names})  # noqa: E731
    expected, gradients = step(loss, options)(*split(arrays))
    mesh, given = placed(arrays, specs)
    with jax.set_mesh(mesh):
        value, found = step(loss, options)(*split(given))
    assert relative_error(value, expected) < 2e-6
    for n in names:
        assert found[n].sharding.is_equivalent_to(given[n].sharding, given[n].ndim), n
        assert relative_error(found[n], gradients[n]) < 1e-5, n


def test_arrays_of_another_sharding():
    """They are moved: numpy beside an explicit weight, and keys that another axis than that of ``sharding`` shards."""
    pairs = {**PAIRS, "negatives": normal(4, D, seed=12)}
    mesh, given = placed({**HEAD, **pairs}, BOTH)
    with jax.set_mesh(mesh):
        found = logitless.jax.linear_cross_entropy(HEAD["hidden"], given["weight"], TARGETS)
        contrast = losses.info_nce_loss(**{n: given[n] for n in pairs}, sharding=logitless.jax.Sharding(mesh, tokens="model"))
    assert relative_error(found, logitless.jax.linear_cross_entropy(*HEAD.values())) < 2e-6
    assert relative_error(contrast, losses.info_nce_loss(**pairs)) < 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    loss, arrays, options = REFUSED[name]
    mesh, given = placed(arrays, {})
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"hidden: is sharded over explicit axes.*replicate it"):
        loss(**given, **options)


@pytest.mark.parametrize("specs, error, message", [
    (dict(query=P(None, "data")), NotImplementedError, r"query: expected explicit axes of the rows alone"),
    (dict(key=VOCAB, negatives=TOKENS), ValueError, r"negatives: expected rows sharded over \('model',\), the axes of key"),
])  # fmt: skip
def test_bad_axes_are_named(specs, error, message):
    mesh, given = placed({**PAIRS, "negatives": normal(4, D, seed=12)}, specs)
    with jax.set_mesh(mesh), pytest.raises(error, match=message):
        losses.info_nce_loss(**given)
