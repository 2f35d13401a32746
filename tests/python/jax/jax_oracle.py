"""The losses written with logits, in float64, and the comparisons with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.jax import backend

enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

GRADIENT_ERROR = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 4e-3}  # relative L2
LSE_ERROR = 1e-6

ON_CPU = jax.default_backend() == "cpu"
PORTABLE = backend().name == "portable"
of_kernels = pytest.mark.skipif(PORTABLE, reason="a property of the library's kernels and their plans")
BUDGET = "8MiB" if ON_CPU else "56MiB"  # plans for GPUs take more


def problem(shape=(3, 7), dim=16, vocab=101, dtype="float32", seed=0, bias=True, per_token=0, ignored=True):
    """Returns hidden, weight, targets, bias (or None): logits of a few nats, some targets ignored."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(*shape, dim)), dtype)
    weight = jnp.asarray(rng.normal(size=(vocab, dim)) * 1.5 / np.sqrt(dim), dtype)
    targets = rng.integers(0, vocab, (*shape, per_token) if per_token else shape)
    if ignored and targets.size > 2:
        targets.reshape(-1)[[0, targets.size // 2]] = -100
    shift = jnp.asarray(rng.normal(size=vocab), "float32") if bias else None
    return hidden, weight, jnp.asarray(targets, jnp.int32), shift


def doubles(*arrays):
    return tuple(None if a is None else np.asarray(a).astype(np.float64) for a in arrays)


def logits(hidden, weight, bias, softcap=None, logit_scale=1.0):
    u = hidden @ weight.T
    u = logit_scale * (u if bias is None else u + bias)
    return u if softcap is None else softcap * jnp.tanh(u / softcap)


def cross_entropy(
    hidden, weight, targets, bias=None, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, class_weight=None,
    z_loss=0.0, softcap=None, logit_scale=1.0, normalizer=None, token_weight=None, target_weight=None,
):
    z = logits(hidden, weight, bias, softcap, logit_scale)
    lse = jax.nn.logsumexp(z, -1)
    log_p = z - lse[..., None]
    vocab = z.shape[-1]
    classes = jnp.ones(vocab) if class_weight is None else jnp.asarray(class_weight)
    y = targets if target_weight is not None else targets[..., None]
    each_valid = y != ignore_index
    vocab_ids = jnp.where(each_valid, y, 0)
    share = jnp.where(each_valid, 1.0 if target_weight is None else target_weight, 0.0)
    of_target = -(share * classes[vocab_ids] * jnp.take_along_axis(log_p, vocab_ids, -1)).sum(-1)
    losses = (1 - label_smoothing) * of_target + z_loss * lse**2
    if label_smoothing:
        losses = losses - label_smoothing / vocab * (classes * log_p).sum(-1)
    valid = each_valid.any(-1)
    tokens = jnp.where(valid, 1.0 if token_weight is None else token_weight, 0.0)
    losses = jnp.where(valid, tokens * losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if normalizer is not None:
        return losses.sum() / normalizer
    count = (tokens if target_weight is not None else tokens * classes[vocab_ids[..., 0]]).sum()
    return losses.sum() / jnp.where(count == 0, 1.0, count)


def logprobs(hidden, weight, targets, bias=None, *, ignore_index=-100, softcap=None, logit_scale=1.0):
    z = logits(hidden, weight, bias, softcap, logit_scale)
    lse = jax.nn.logsumexp(z, -1)
    log_p = z - lse[..., None]
    many = targets.ndim == hidden.ndim
    y = targets if many else targets[..., None]
    each_valid = y != ignore_index
    logprob = jnp.where(each_valid, jnp.take_along_axis(log_p, jnp.where(each_valid, y, 0), -1), 0.0)
    valid = each_valid.any(-1)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return logprob if many else logprob[..., 0], jnp.where(valid, entropy, 0.0), jnp.where(valid, lse, 0.0)


def in_float64(function, *arrays, **options):
    """Returns the function's result and its gradients by the float arrays, in float64."""
    with enable_x64(True):
        options = {k: doubles(v)[0] if hasattr(v, "shape") else v for k, v in options.items()}
        integers = [a is not None and jnp.issubdtype(a.dtype, jnp.integer) for a in arrays]
        values = [np.asarray(a) if integer else doubles(a)[0] for a, integer in zip(arrays, integers)]
        values = [None if v is None else jnp.asarray(v) for v in values]
        by = tuple(i for i, v in enumerate(values) if v is not None and jnp.issubdtype(v.dtype, jnp.floating))
        value, gradients = jax.jit(jax.value_and_grad(lambda *a: function(*a, **options), by))(*values)
        return np.asarray(value), [np.asarray(g) for g in gradients]


def relative_error(found, expected) -> float:
    found, expected = doubles(found, expected)
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (size if size > 0 else 1.0))


def check_gradients(found, expected, dtype="float32"):
    assert len(found) == len(expected)
    for name, one, other in zip(("hidden", "weight", "bias"), found, expected):
        assert one.shape == other.shape, name
        assert relative_error(one, other) <= GRADIENT_ERROR[dtype], name
