"""Losses written with logits, and arguments for them: the inputs of the autochunk tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax_oracle import doubles, enable_x64, relative_error

ROWS, DIM, VOCAB = 50, 8, 600
LOGITS = ROWS * VOCAB  # numbers


def random(*shape, dtype="float32", scale=0.5, seed=0):
    made = np.random.default_rng(sum(shape) + seed).normal(size=shape) * scale
    return jnp.asarray(made.astype(np.float32), dtype)  # the same numbers in every dtype that has them


def whole(high, *shape, seed=7):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def targets(rows=ROWS, vocab=VOCAB, ignored=3):
    return whole(vocab, rows).at[ignored].set(-100)


def integer_labels(logits, labels):
    """The cross entropy of optax."""
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    of_label = jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]
    return jnp.log(jnp.exp(shifted).sum(-1)) - of_label


def masked(losses, target):
    valid = target != -100
    return jnp.where(valid, losses, 0).sum() / valid.sum()


def cross_entropy(hidden, weight, target):
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.result_type(hidden.dtype, jnp.float32))
    return masked(integer_labels(logits, jnp.maximum(target, 0)), target)


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    lse = jax.nn.logsumexp(logits, -1)
    nll = lse - logits[jnp.arange(logits.shape[0]), jnp.maximum(target, 0)]
    return masked(nll + 1e-3 * lse**2, target)


def smoothed(hidden, weight, target):
    log_p = jax.nn.log_softmax(hidden @ weight.T)
    soft = jax.nn.one_hot(target, log_p.shape[-1], dtype=log_p.dtype) * 0.9 + 0.1 / log_p.shape[-1]
    return -(soft * log_p).sum(-1).mean()


def softcapped(hidden, weight, target):
    logits = 30 * jnp.tanh(hidden @ weight.T / 30)
    return masked(integer_labels(logits, jnp.where(target < 0, 0, target)), target)


def focal(hidden, weight, target):
    log_p = jax.nn.log_softmax(hidden @ weight.T)
    of_target = jnp.take_along_axis(log_p, jnp.maximum(target, 0)[:, None], 1)[:, 0]
    return -((1 - jnp.exp(of_target)) ** 2 * of_target).mean()


def per_token(hidden, weight, target):
    return integer_labels(hidden @ weight.T, jnp.maximum(target, 0))


def log_probabilities(hidden, weight, target):
    log_p = jax.nn.log_softmax(hidden @ weight.T)
    return jnp.take_along_axis(log_p, jnp.maximum(target, 0)[..., None], -1)[..., 0]


def two_heads(hidden, weight, other, target):
    return cross_entropy(hidden, weight, target) + 0.3 * cross_entropy(hidden, other, target)


def distillation(hidden, weight, teacher, teacher_weight):
    student = jax.nn.log_softmax(hidden @ weight.T / 2)
    wanted = jax.lax.stop_gradient(jax.nn.log_softmax(teacher @ teacher_weight.T / 2))
    return (jnp.exp(wanted) * (wanted - student)).sum(-1).mean()


def dpo(hidden, weight, reference, reference_weight, target):
    valid = (target != -100).reshape(10, -1)
    policy = (log_probabilities(hidden, weight, target).reshape(10, -1) * valid).sum(1)
    frozen = (log_probabilities(reference, reference_weight, target).reshape(10, -1) * valid).sum(1)
    margin = policy - jax.lax.stop_gradient(frozen)
    return -jax.nn.log_sigmoid(0.1 * (margin[:5] - margin[5:])).mean()


def grpo(hidden, weight, target, before, advantage):
    """A clipped ratio, with an entropy bonus."""
    logits = hidden.reshape(5, 10, -1) @ weight.T
    log_p = jax.nn.log_softmax(logits)
    target = target.reshape(5, 10)
    of_target = jnp.take_along_axis(log_p, jnp.maximum(target, 0)[..., None], -1).squeeze(-1)
    ratio = jnp.exp(of_target - before.reshape(5, 10))
    gain = jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 0.8, 1.2) * advantage[:, None])
    entropy = -(jax.nn.softmax(logits) * log_p).sum(-1)
    valid = target != -100
    each = jnp.where(valid, -gain - 0.01 * entropy, 0.0).sum(1) / valid.sum(1)
    return each.mean()


def bradley_terry(chosen, rejected, up, score):
    """Rewards of pairs, by a wide layer."""

    def reward(x):
        return jax.nn.gelu(x @ up) @ score

    return -jax.nn.log_sigmoid(reward(chosen) - reward(rejected)).mean()


def contrastive(image, text):
    image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
    logits = image @ text.T * 5.0
    labels = jnp.arange(logits.shape[0])
    return integer_labels(logits, labels).mean() + integer_labels(logits.T, labels).mean()


def attention(x, query, key, value):
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, m) for m in (query, key, value))
    scores = jnp.einsum("bhte,bhse->bhts", q, k) / 2.0
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.square(jnp.einsum("bhts,bhse->bthe", shares, v)).mean()


def mlp(x, gain, up, up_bias, down):
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain
    return x + jax.nn.gelu(y @ up + up_bias, approximate=False) @ down


LOSSES = [
    cross_entropy,
    z_loss,
    smoothed,
    softcapped,
    focal,
    per_token,
    two_heads,
    distillation,
    dpo,
    grpo,
    bradley_terry,
    contrastive,
    attention,
    mlp,
]


def arguments(fn, dtype="float32"):
    hidden, weight = random(ROWS, DIM, dtype=dtype), random(VOCAB, DIM, dtype=dtype)
    if fn is two_heads:
        return hidden, weight, random(VOCAB, DIM, dtype=dtype, seed=1), targets()
    if fn is distillation:
        return hidden, weight, random(ROWS, DIM, dtype=dtype, seed=4), random(VOCAB, DIM, dtype=dtype, seed=5)
    if fn is dpo:
        frozen = random(ROWS, DIM, dtype=dtype, seed=2), random(VOCAB, DIM, dtype=dtype, seed=3)
        return hidden, weight, *frozen, targets()
    if fn is grpo:
        before = log_probabilities(hidden, weight, targets()) + random(ROWS, scale=0.3).astype(dtype)
        return hidden, weight, targets(), before, random(5, dtype=dtype)
    if fn is bradley_terry:
        sizes = (ROWS, DIM), (ROWS, DIM), (DIM, VOCAB), (VOCAB,)
    elif fn is contrastive:
        sizes = (200, DIM), (200, DIM)
    elif fn is attention:
        sizes = (2, 80, DIM), (DIM, 2, 4), (DIM, 2, 4), (DIM, 2, 4)
    elif fn is mlp:
        sizes = (ROWS, DIM), (DIM,), (DIM, VOCAB), (VOCAB,), (VOCAB, DIM)
    else:
        return hidden, weight, targets()
    return tuple(random(*s, dtype=dtype, seed=i) for i, s in enumerate(sizes))


def floats(args):
    return tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))


def run(fn, args):
    """Returns outputs under jit, and gradients by the floating arguments for cotangents that are not 1. A function is
    compiled once for its shapes."""
    return _run(fn, *args)


@partial(jax.jit, static_argnums=0)
def _run(fn, *args):
    by = floats(args)

    def of(*varied):
        full = list(args)
        for i, v in zip(by, varied):
            full[i] = v
        return fn(*full)

    outputs, pull = jax.vjp(of, *(args[i] for i in by))
    rng = np.random.default_rng(11)
    cotangents = jax.tree.map(lambda o: cotangent(rng, o), outputs)
    return jax.tree.leaves(outputs), list(pull(cotangents))


def cotangent(rng, output):
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.asarray(np.float32(rng.normal(size=output.shape) * 0.3 + 1.5), output.dtype)


def exactly(fn, args):
    """Returns what run() does in float64."""
    with enable_x64(True):
        args = [jnp.asarray(doubles(a)[0]) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
        outputs, gradients = run(fn, args)
        return [np.asarray(o) for o in outputs], [np.asarray(g) for g in gradients]


def check_same(found, expected, error):
    """Checks (outputs, gradients): the same shapes, and a small relative error in L2."""
    for one, other in zip(found, expected):
        assert len(one) == len(other)
        for a, e in zip(one, other):
            assert a.shape == e.shape
            assert relative_error(a, e) <= error
