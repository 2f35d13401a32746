"""Logits with a large common offset, which losses and gradients do not see: by the library they are what the logits
without the offset give, as JAX's own log_softmax is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import enable_x64, relative_error

from logitless.jax import autochunk

ROWS, DIM = 70, 24
MOST = 1e-6, 1e-5, 1e-5, 1e-5  # relative: of the loss, and of each gradient in the 2-norm


def picked(z, t):
    return jnp.take_along_axis(z, t[:, None], 1)[:, 0]


def spelled_out(h, w, b, t):
    z = h @ w.T + b
    return (jax.nn.logsumexp(z, -1) - picked(z, t)).mean()


def log_probs(h, w, b, t):
    return -picked(jax.nn.log_softmax(h @ w.T + b), t).mean()


def entropy(h, w, b, t):
    z = jax.nn.log_softmax(h @ w.T + b)
    return -(jnp.exp(z) * z).sum(-1).mean() - picked(z, t).mean()


def problem(vocab, offset, dtype=np.float32):
    """Whole sixteenths: fp32 holds the logits exactly, whatever the offset here."""
    rng = np.random.default_rng(3)

    def whole(*shape):
        return np.round(4 * rng.normal(size=shape)) / 4

    arrays = whole(ROWS, DIM), whole(vocab, DIM) / 2, whole(vocab) + offset
    return [jnp.asarray(a, dtype) for a in arrays] + [jnp.asarray(rng.integers(0, vocab, ROWS), jnp.int32)]


@pytest.mark.parametrize("vocab", [300, 4000])  # below and above what the head engine takes
@pytest.mark.parametrize("fn", [spelled_out, log_probs, entropy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"chunks": 3}], ids=str)
def test_losses_and_gradients(options, fn, vocab):
    if fn is spelled_out and vocab == 4000 and not options:
        pytest.skip("the engine's log-sum-exp is float32 where the logit is chosen before it is subtracted")
    chunked = jax.jit(jax.value_and_grad(autochunk(fn, executor="native", **options), (0, 1, 2)))
    with enable_x64(True):
        wanted = jax.tree.leaves(jax.value_and_grad(fn, (0, 1, 2))(*problem(vocab, 0.0, np.float64)))
    for offset in (0.0, 1e4, 1e5):
        for found, exact, most in zip(jax.tree.leaves(chunked(*problem(vocab, offset))), wanted, MOST, strict=True):
            assert relative_error(found, exact) < most, offset
