"""Samples and best entries of heads on meshes of four devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.jax import (
    Sharding, linear_logprobs, linear_sample, linear_top_logprobs, vocab_parallel_logprobs, vocab_parallel_sample,
    vocab_parallel_top_logprobs,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

TOKENS, DIM, VOCAB = (8, 4), 16, 104
RANDOM = np.random.default_rng(0)
HIDDEN, WEIGHT, BIAS, LOGIT_BIAS = (
    jnp.asarray(RANDOM.normal(size=shape), "float32") for shape in ((*TOKENS, DIM), (VOCAB, DIM), VOCAB, VOCAB)
)
SPREAD = jnp.linspace(0.0, 2.0, 32).reshape(TOKENS)
TARGETS = jnp.arange(32).reshape(TOKENS)
KEY = jax.random.key(3)


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


DATA_AND_VOCAB, FSDP = dict(tokens="data", vocab="model"), dict(tokens=P(("data", "model")), vocab=("data", "model"))
CASES = {
    "plain": (dict(tokens="data"), dict(temperature=jnp.array(0.7))),
    "greedy": (dict(vocab="model"), dict(temperature=0)),
    "greedy, bias": (FSDP, dict(temperature=0, logit_bias=LOGIT_BIAS)),
    "top-k": (DATA_AND_VOCAB, dict(top_k=70, top_p=0.8, counter=jnp.arange(32).reshape(TOKENS) * 3 + 7)),
    "top-p": (FSDP, dict(top_p=jnp.maximum(SPREAD / 2, 0.01), temperature=SPREAD)),
    "min-p": (DATA_AND_VOCAB, dict(min_p=0.02, softcap=4.0, logit_scale=0.7, logit_bias=LOGIT_BIAS, memory_budget="48KiB")),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_one_device(name):
    layout, options = CASES[name]
    sharding = Sharding(mesh(), **layout)
    shape = {n: options[n] for n in ("softcap", "logit_scale", "memory_budget") if n in options}

    @jax.jit
    def drawn(*head):
        made = linear_sample(*head, key=KEY, sharding=sharding, **options)
        return *made, linear_logprobs(*head[:2], made.tokens, head[2], sharding=sharding, **shape)[0]

    tokens, log_prob, again = drawn(HIDDEN, WEIGHT, BIAS)
    one = linear_sample(HIDDEN, WEIGHT, BIAS, key=KEY, **options)
    np.testing.assert_array_equal(tokens, one.tokens)
    np.testing.assert_array_equal(log_prob, again)
    np.testing.assert_allclose(log_prob, one.log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [DATA_AND_VOCAB, FSDP], ids=["data and vocab", "fsdp"])
def test_the_best_entries_are_those_of_one_device(layout):
    sharding = Sharding(mesh(), **layout)
    made = jax.jit(lambda *a: linear_top_logprobs(*a, k=60, sharding=sharding))(HIDDEN, WEIGHT, TARGETS, BIAS)
    one = linear_top_logprobs(HIDDEN, WEIGHT, TARGETS, BIAS, k=60)
    np.testing.assert_array_equal(made.top_ids, one.top_ids)
    log_probs = jax.jit(lambda ids: linear_logprobs(HIDDEN, WEIGHT, ids, BIAS, sharding=sharding)[0])
    np.testing.assert_array_equal(made.top_log_probs, log_probs(made.top_ids))
    np.testing.assert_array_equal(made.log_prob, log_probs(TARGETS))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    def shard(hidden, weight, bias, logit_bias):
        made = vocab_parallel_sample(hidden, weight, bias, axis_name="tp", key=KEY, top_k=30, logit_bias=logit_bias)
        best = vocab_parallel_top_logprobs(hidden, weight, bias=bias, axis_name="tp", k=30)
        return *made, vocab_parallel_logprobs(hidden, weight, made.tokens, bias, axis_name="tp")[0], best.top_ids

    devices = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    specs = P(), P("tp"), P("tp"), P("tp")
    run = jax.jit(jax.shard_map(shard, mesh=devices, in_specs=specs, out_specs=P(), check_vma=check_vma))
    tokens, log_prob, again, ids = run(HIDDEN, WEIGHT, BIAS, LOGIT_BIAS)
    np.testing.assert_array_equal(tokens, linear_sample(HIDDEN, WEIGHT, BIAS, key=KEY, top_k=30, logit_bias=LOGIT_BIAS).tokens)
    np.testing.assert_array_equal(log_prob, again)
    np.testing.assert_array_equal(ids, linear_top_logprobs(HIDDEN, WEIGHT, bias=BIAS, k=30).top_ids)


def test_equal_entries_of_all_devices():
    sharding = Sharding(mesh(), vocab=("data", "model"))
    same = jnp.zeros((300, 4)), jnp.ones((24, 4))
    best = jax.jit(lambda *head: linear_top_logprobs(*head, k=9, sharding=sharding))(*same)
    assert best.log_prob is None and best.top_ids[:2].tolist() == [list(range(9))] * 2
    tokens = jax.jit(lambda *head: linear_sample(*head, key=KEY, top_p=0.1, sharding=sharding).tokens)(*same)
    assert len(set(tokens.tolist())) == 24


def test_explicit_axes():
    axes, one = mesh(AxisType.Explicit), linear_sample(HIDDEN, WEIGHT, BIAS, key=KEY, top_k=9)
    best = linear_top_logprobs(HIDDEN, WEIGHT, TARGETS, BIAS, k=9)
    specs = P("data"), P("model"), P("model"), P("data")
    given = [jax.device_put(a, NamedSharding(axes, s)) for a, s in zip((HIDDEN, WEIGHT, BIAS, TARGETS), specs)]
    with jax.set_mesh(axes):
        made = jax.jit(lambda *head: linear_sample(*head, key=KEY, top_k=9))(*given[:3])
        found = jax.jit(lambda *a: linear_top_logprobs(a[0], a[1], a[3], a[2], k=9))(*given)
    assert made.tokens.sharding.spec[0] == "data"
    np.testing.assert_array_equal(made.tokens, one.tokens)
    np.testing.assert_array_equal(found.top_ids, best.top_ids)
    np.testing.assert_allclose(found.log_prob, best.log_prob, rtol=1e-5, atol=1e-5)


def test_bad_arguments():
    sharding = Sharding(mesh(), vocab="model")
    for given, error, text in (
        (dict(sharding=3), TypeError, "sharding: expected logitless.jax.Sharding or None, got int"),
        (dict(top_k=105), ValueError, "top_k: expected at most 104"),
        (dict(logit_bias=BIAS[:52]), ValueError, r"logit_bias: expected \[104\], got \[52\]"),
        (dict(temperature=SPREAD[0]), ValueError, r"temperature: expected \[8, 4\] or \[\], got \[4\]"),
        (dict(memory_budget=10), ValueError, "memory_budget: 10 bytes is below the least plan"),
    ):
        with pytest.raises(error, match=text):
            linear_sample(HIDDEN, WEIGHT, BIAS, key=KEY, **{"sharding": sharding, **given})
    with pytest.raises(ValueError, match="k: expected at most 104"):
        linear_top_logprobs(HIDDEN, WEIGHT, k=105, sharding=sharding)
    devices = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    whole = jax.shard_map(
        lambda *head: vocab_parallel_sample(*head, axis_name="tp", key=KEY).tokens, mesh=devices, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"weight: expected its rows sharded over axes \('tp',\)"):
        jax.jit(whole)(HIDDEN, WEIGHT)
