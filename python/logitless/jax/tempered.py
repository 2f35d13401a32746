"""A temperature for each token of ``linear_logprobs`` and ``linear_cross_entropy``; ``_losses/tempered.py`` says how."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._losses import tempered as shared
from .._options import HeadOptions, head_options, weights_of
from . import _arguments
from . import _xp as xp
from ._arguments import Arguments
from ._axes import axes_of, varying
from ._backend import backend
from .head import head


def folded(a: Arguments) -> Arguments:
    """Divides softcap and scale, or hidden states, by the temperature. One of each token that cannot be folded remains,
    as an array [...]."""
    if xp.is_number(a.temperature):
        return a._replace(**shared.scaled_options(a.temperature, a.softcap, a.logit_scale), temperature=None)
    x, w, t = (_arguments.anywhere(name, getattr(a, name)) for name in ("hidden", "weight", "temperature"))
    if t.shape not in (x.shape[:-1], ()):
        raise ValueError(f"temperature: expected {list(x.shape[:-1])} or [], got {list(t.shape)}")
    if not xp.is_floating(t):
        raise TypeError(f"temperature: expected floats, got {t.dtype.name}")
    t = jnp.broadcast_to(t, x.shape[:-1])
    dtype = divided_dtype(a, x, w)
    if dtype is not None:
        if a.targets is not None:
            t = shared.of_counted(jnp, t, jnp.asarray(a.targets), a.ignore_index)
        return a._replace(hidden=x.astype(dtype) / t[..., None].astype(dtype), temperature=None)
    if a.sharding is not None:
        raise NotImplementedError(
            "temperature: one for each token goes with a sharded head in float32, without bias and softcap, alone"
        )
    return a._replace(hidden=x, temperature=t)


def divided_dtype(a: Arguments, x: jax.Array, w: jax.Array) -> Any:
    """Returns the dtype in which hidden states x are divided by a temperature for each token; None if logits are."""
    if a.bias is not None or a.softcap is not None:
        return None
    dtype = jnp.promote_types(x.dtype, w.dtype)
    if dtype in (jnp.float32, jnp.float64):
        return dtype
    # A CPU's kernels multiply float32 hidden states by a 16-bit weight as it is.
    native = backend(x.dtype).name == "native" and jax.default_backend() == "cpu"
    return jnp.dtype(jnp.float32) if native and x.dtype == w.dtype and a.sharding is None else None


def outputs(
    options: HeadOptions, temperature: jax.Array, inputs: dict, targets: jax.Array, argmax: bool = False
) -> dict[str, jax.Array]:
    """Returns outputs of the head of tokens [N] by their names, with gradients, also by the temperatures."""
    t = temperature.reshape(-1)
    fixed = {"targets": targets, "temperature": jax.lax.stop_gradient(t)}
    axes = axes_of(*[a for a in (*inputs.values(), *fixed.values()) if a is not None])
    names = ("log_prob", "entropy", "lse", "variance") + ("argmax",) * argmax
    found = dict(zip(names, head(options, names, varying(inputs, axes), varying(fixed, axes))))
    made = shared.attached(xp, t, targets, options.ignore_index, *(found[name] for name in names[:4]))
    return {**found, **dict(zip(names, made))}


def losses(call: Any, temperature: jax.Array, argmax: bool) -> dict[str, jax.Array]:
    """Returns the outputs of the head and the loss of prepared arguments."""
    fixed, options = call.fixed, call.options
    found = outputs(head_options(options), temperature, call.inputs, fixed["targets"], argmax)
    loss = shared.loss(xp, options, found["log_prob"], found["lse"], fixed["targets"], weights_of(fixed))
    lse = found["lse"] if found["log_prob"].ndim == 1 else found["lse"][:, None]
    return {**found, "loss": loss, "target_logit": found["log_prob"] + lse}
