"""linear_sample and linear_top_logprobs of JAX: the tokens of PyTorch's formulas, whose probabilities
tests/python/torch/test_sampling.py measures."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless.jax.sampling as sampling
from logitless.jax import _sampled, linear_logprobs, linear_sample, linear_top_logprobs
from logitless.jax._noise import gumbel

KEY = jax.random.key(3)


def head(tokens, dim, vocab, dtype=np.float32):
    rng = np.random.default_rng(0)
    made = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, dim), (vocab, dim), (vocab,)))
    return [jnp.asarray(a, dtype) for a in made]


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.5, top_k=9, top_p=0.7), dict(min_p=0.1)], ids=str)
def test_tokens_are_the_largest_entries_after_noise(options):
    hidden, weight, bias = head(64, 16, 300)
    made = jax.jit(lambda *a: linear_sample(*a, key=KEY, **options))(hidden, weight, bias)
    z = (hidden @ weight.T + bias) / options.get("temperature", 1.0)
    noise = gumbel(jax.random.key_data(KEY), jnp.arange(64), 300)
    keep = jnp.ones_like(z, bool)
    if "top_k" in options:
        keep = z >= jnp.sort(z, -1)[:, -options["top_k"]][:, None]
    if "top_p" in options:
        p = jnp.sort(jax.nn.softmax(jnp.where(keep, z, -jnp.inf), -1), -1)[:, ::-1]
        last = jnp.argmax(jnp.cumsum(p, -1) >= options["top_p"], -1)
        keep &= jax.nn.softmax(jnp.where(keep, z, -jnp.inf), -1) >= p[jnp.arange(64), last][:, None]
    if "min_p" in options:
        keep &= jax.nn.softmax(z, -1) >= options["min_p"] * jax.nn.softmax(z, -1).max(-1, keepdims=True)
    expected = jnp.where(keep, z + noise, -jnp.inf).argmax(-1)
    assert (made.tokens == expected).mean() > 0.98  # sums of probabilities in another order
    np.testing.assert_array_equal(made.log_prob, linear_logprobs(hidden, weight, made.tokens, bias)[0])


def test_noise_is_pytorch_s():
    torch = pytest.importorskip("torch")
    from logitless.torch._noise import gumbel as of_torch

    parts, counter = [3333333333, 7], [0, 5, 1 << 30]
    found = gumbel(jnp.asarray(parts, jnp.uint32), jnp.asarray(counter), 500)
    np.testing.assert_allclose(found, of_torch(torch.tensor(parts), torch.tensor(counter), 500), rtol=2e-6, atol=1e-6)
    steps = (np.arange(500 * 64) + 0.5) / (500 * 64)
    noise = np.sort(np.asarray(gumbel(jnp.asarray(parts, jnp.uint32), jnp.arange(64), 500)).ravel())
    assert np.abs(np.exp(-np.exp(-noise)) - steps).max() < 1.95 / math.sqrt(noise.size)


def test_a_token_does_not_depend_on_its_batch():
    hidden, weight, bias = head(40, 16, 300)
    counter = jnp.arange(40) + 7
    whole = linear_sample(hidden, weight, bias, key=KEY, counter=counter, top_k=20)
    some = linear_sample(hidden[5:9], weight, bias, key=KEY, counter=counter[5:9], top_k=20)
    np.testing.assert_array_equal(some.tokens, whole.tokens[5:9])
    other = linear_sample(hidden, weight, bias, key=jax.random.key(4), counter=counter, top_k=20)
    assert (other.tokens != whole.tokens).any()
    greedy = linear_sample(hidden, weight, bias, temperature=0)
    np.testing.assert_array_equal(greedy.tokens, (hidden @ weight.T + bias).argmax(-1))


@pytest.mark.parametrize("backend", ["", "portable"])
def test_two_dtypes_have_the_bits_of_training(backend, monkeypatch):
    monkeypatch.setenv("LOGITLESS_BACKEND", backend)
    jax.clear_caches()
    hidden, weight, bias = head(40, 16, 300)
    weight = weight.astype(jnp.bfloat16)
    full = hidden, weight.astype(jnp.float32), bias
    for options in (dict(key=KEY, top_k=20), dict(temperature=0.0)):
        made = linear_sample(hidden, weight, bias, **options)
        np.testing.assert_array_equal(made.log_prob, linear_logprobs(hidden, weight, made.tokens, bias)[0])
        np.testing.assert_array_equal(made.tokens, linear_sample(*full, **options).tokens)
    best = linear_top_logprobs(hidden, weight, bias=bias, k=6)
    np.testing.assert_array_equal(best.top_ids, linear_top_logprobs(*full[:2], bias=bias, k=6).top_ids)
    np.testing.assert_array_equal(best.top_log_probs, linear_logprobs(hidden, weight, best.top_ids, bias)[0])
    jax.clear_caches()


def test_results_have_no_gradients():
    def total(*arrays):
        best = linear_top_logprobs(*arrays[:2], jnp.arange(20), arrays[2], k=3)
        return sum(jnp.sum(x) for x in (linear_sample(*arrays, key=KEY).log_prob, best[0], best[1]))

    assert not any(g.any() for g in jax.grad(total, (0, 1, 2))(*head(20, 8, 60)))


def test_the_best_log_probabilities():
    hidden, weight, bias = head(20, 16, 300)
    targets = jnp.arange(20)
    made = linear_top_logprobs(hidden.reshape(4, 5, 16), weight, targets.reshape(4, 5), bias, k=6)
    values, ids = jax.lax.top_k(jax.nn.log_softmax(hidden @ weight.T + bias, -1), 6)
    np.testing.assert_allclose(made.top_log_probs.reshape(20, 6), values, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(made.top_ids.reshape(20, 6), ids)
    np.testing.assert_array_equal(made.log_prob.ravel(), linear_logprobs(hidden, weight, targets, bias)[0])
    assert linear_top_logprobs(jnp.zeros((2, 4)), jnp.ones((5, 4)), k=5).top_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.fixture
def by_custom_calls(monkeypatch):
    """The custom calls of a GPU's samples, which run on a CPU too."""
    monkeypatch.setattr(_sampled, "platform_of_jax", lambda: "cuda")
    monkeypatch.setattr(sampling, "chunked", None)  # no program


SPREAD = jnp.linspace(0.05, 1, 40)
CALLS = [
    dict(temperature=0.0), dict(top_k=9, top_p=0.7), dict(temperature=2 * SPREAD, top_p=SPREAD, min_p=SPREAD / 50),
    dict(counter=jnp.arange(40) + 7, logit_bias=jnp.arange(300) / 100.0, softcap=4.0, logit_scale=0.5),
]  # fmt: skip


@pytest.mark.parametrize("options", CALLS, ids=lambda options: ",".join(options))
def test_custom_calls_draw_the_tokens_of_programs(options, request):
    head_of_calls = head(40, 16, 300, jnp.bfloat16)
    draw = lambda *arrays: linear_sample(*arrays, key=KEY, **options)  # noqa: E731
    expected = draw(*head_of_calls)
    request.getfixturevalue("by_custom_calls")
    for made in (draw(*head_of_calls), jax.jit(draw)(*head_of_calls)):
        np.testing.assert_array_equal(made.tokens, expected.tokens)
        np.testing.assert_array_equal(made.log_prob, expected.log_prob)


@pytest.mark.parametrize("targets", [None, jnp.arange(40)], ids=["", "targets"])
def test_custom_calls_find_the_best_entries_of_programs(targets, request):
    hidden, weight, bias = head(40, 16, 300, jnp.bfloat16)
    expected = linear_top_logprobs(hidden, weight, targets, bias, k=6)
    request.getfixturevalue("by_custom_calls")
    for made in (linear_top_logprobs(hidden, weight, targets, bias, k=6),
                 jax.vmap(lambda h: linear_top_logprobs(h, weight, targets, bias, k=6))(hidden[None])):
        for a, b in zip(made, expected):
            assert a is b is None or np.array_equal(np.reshape(a, np.shape(b)), b)


def test_custom_calls_are_lowered_for_platforms_without_them(by_custom_calls):
    arrays, targets = head(8, 16, 300, jnp.bfloat16), jnp.arange(8)
    draw = lambda *a: (linear_sample(*a, key=KEY, top_k=5, top_p=0.9), linear_top_logprobs(*a[:2], targets, k=3))  # noqa: E731
    text = jax.jit(draw).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert "logitless_sample" not in text and "logitless_top_logprobs" not in text


def test_bad_arguments():
    hidden, weight, bias = head(4, 8, 40)
    with pytest.raises(TypeError, match="key: expected a key of jax.random"):
        linear_sample(hidden, weight, bias)
    with pytest.raises(ValueError, match="top_p: expected a number above 0 to 1"):
        linear_sample(hidden, weight, bias, key=KEY, top_p=1.5)
    with pytest.raises(ValueError, match="key: expected a key of two uint32"):
        linear_sample(hidden, weight, bias, key=jnp.zeros(3, jnp.uint32))
