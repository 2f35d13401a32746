"""Log-probabilities, entropy and log-sum-exp of each token, differentiable."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from .._library import parse_bytes
from . import _arguments, _ffi
from .._options import DEFAULT, HeadOptions, either_name

if TYPE_CHECKING:
    from .sharding import Sharding

GRADIENTS = {"d_hidden": "hidden", "d_weight": "weight", "d_bias": "bias"}


def gradient_dtype(dtype: str) -> str:
    """Of a gradient until it is scaled and rounded. The smallest gradients of float16 are float32's."""
    return "float32" if dtype == "float16" else dtype


def refuse_gradients(inputs: dict) -> None:
    """Raises for inputs that are being differentiated and have no gradient; of CustomVJPPrimal."""
    for name, primal in inputs.items():
        if primal is not None and primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.floating):
            raise NotImplementedError(f"{name}: has no gradient here; wrap it in jax.lax.stop_gradient")


def gradient_results(wanted: dict[str, jax.Array], inputs: dict) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the gradients that are wanted."""
    return {
        name: (inputs[of].shape, inputs[of].dtype.name) for name, of in GRADIENTS.items() if wanted[name].size > 0
    }


# What the forward keeps and what the backward returns have one structure whatever is differentiated, since JAX
# remembers the structure of one trace for all. So a choice travels as an array of one element for yes and of none for
# no, a shape and dtype as an array of no elements, and a gradient that nobody asked for is zeros, which a compiled
# program drops.
def flag(yes: bool) -> jax.Array:
    return jnp.zeros((int(yes),), jnp.int8)


def type_of(value: jax.Array | None) -> jax.Array | None:
    return None if value is None else jnp.empty((0, *value.shape), value.dtype)


def zeros_of(kept_type: jax.Array, axes: frozenset[str]) -> jax.Array:
    zeros = jnp.zeros(kept_type.shape[1:], kept_type.dtype)
    return _ffi.varying({"zeros": zeros}, axes)["zeros"]


def wanted_gradients(inputs: dict) -> dict[str, jax.Array]:
    """A flag for each gradient: whether its input is being differentiated; of CustomVJPPrimal."""
    return {name: flag(inputs[of] is not None and inputs[of].perturbed) for name, of in GRADIENTS.items()}


def all_gradients(found: dict[str, jax.Array], types: dict, axes: frozenset[str]) -> dict[str, jax.Array | None]:
    """By the names of the inputs: the gradients found, and zeros for the others."""
    return {
        of: found[name] if name in found else None if types[of] is None else zeros_of(types[of], axes)
        for name, of in GRADIENTS.items()
    }


def nan_at_bad_targets(value: jax.Array, targets: jax.Array, ignore_index: int, vocab: int) -> jax.Array:
    """value [N] or [N, K] with NaN where a target is neither a word nor ignore_index. The CPU's handler has failed by
    then; on a GPU nothing waits to see it."""
    if jax.default_backend() == "cpu":
        return value
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    return jnp.where(bad if bad.ndim == value.ndim else bad.any(-1), jnp.nan, value)


def _output_shape(name: str, inputs: dict) -> tuple[int, ...]:
    return inputs["targets"].shape if name in ("log_prob", "target_logit") else inputs["hidden"].shape[:-1]


def _forward(options: HeadOptions, outputs: tuple[str, ...], inputs: dict, fixed: dict) -> tuple[jax.Array, ...]:
    found = _ffi.call(
        "head_forward",
        options,
        {**inputs, **fixed},
        {name: (_output_shape(name, {**inputs, **fixed}), "float32") for name in outputs},
    )
    return tuple(found.values())


_head = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _head_fwd(options, outputs, inputs, fixed):
    refuse_gradients(fixed)
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    fixed_values = {name: None if p is None else p.value for name, p in fixed.items()}
    return _forward(options, outputs, values, fixed_values), (wanted_gradients(inputs), values, fixed_values)


def _head_bwd(options, outputs, kept, cotangents):
    wanted, inputs, fixed = kept
    given = {
        f"cotangent_{name}": cotangent
        for name, cotangent in zip(outputs, cotangents)
        if not isinstance(cotangent, SymbolicZero)
    }
    results = gradient_results(wanted, inputs)
    found = {}
    if given and results:
        found = _ffi.call("head_backward", options, {**inputs, **fixed, **given}, results)
    types = {name: type_of(value) for name, value in inputs.items()}
    return all_gradients(found, types, _ffi.axes_of(inputs["hidden"])), None


_head.defvjp(_head_fwd, _head_bwd, symbolic_zeros=True)


# Compiled: a shard_map that runs eagerly does not take the custom_vjp itself.
@functools.partial(jax.jit, static_argnums=(0, 1))
def head(options: HeadOptions, outputs: tuple[str, ...], inputs: dict, fixed: dict) -> tuple[jax.Array, ...]:
    """The outputs of the library's head_forward that are named, float32.

    inputs: hidden [N, D], weight [V, D], bias [V] or None: differentiable. fixed: targets [N] or [N, K], and
    vocab_weight [V] or None. The backward runs a forward of its own and keeps nothing but the inputs.
    """
    found = _head(options, outputs, inputs, fixed)
    vocab = inputs["weight"].shape[0]
    return tuple(nan_at_bad_targets(value, fixed["targets"], options.ignore_index, vocab) for value in found)


@either_name
def linear_logprobs(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ignore_index: int = DEFAULT.ignore_index,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
    sharding: Sharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each target, entropy and log-sum-exp of each token; the logits never exist as a whole.

    Of ``z = softcap(logit_scale * (hidden @ weight.T + bias))``. Policy and preference losses are functions of the
    three.

    Args:
        hidden: [..., D], float32, bfloat16 or float16.
        weight: [V, D], the dtype of hidden.
        targets: [...], int32 or int64; or [..., K]: K words a token.
        bias: [V], float.
        ignore_index: tokens whose targets are all this one cost nothing; their outputs are 0, without a gradient.
        softcap: ``c * tanh(z / c)``.
        logit_scale: 1 / temperature.
        memory_budget: bytes, or text such as "512MiB", that a call may take beyond its inputs and outputs; of each device.
        sharding: where words and tokens lie on a mesh; None: what the types of hidden and weight say on explicit axes.

    Returns:
        (logprob, entropy, lse), float32: [...] each, logprob shaped as targets. Entropy and lse are in nats.

    Each output has gradients by hidden, weight and bias, in their dtypes, summed in float32 and rounded once. The
    backward recomputes the forward and keeps the inputs alone; what is not differentiated is not computed.

    Extra memory: the plan's workspace, within ``memory_budget``.

    Raises, while the program is traced: ValueError and TypeError naming the argument; NotImplementedError for what no
    kernel serves. A target outside [0, V) that is not ignore_index makes the program fail on the CPU (a ValueError that
    names its position, a RuntimeError in some versions of JAX); on a GPU, where nothing waits, its outputs are NaN.
    """
    from . import sharding as meshes  # which stands on this

    sharding = meshes.of_types(hidden, weight) if sharding is None else sharding
    if sharding is not None:
        return meshes.sharded_logprobs(
            sharding, hidden, weight, targets, bias, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
            memory_budget=memory_budget,
        )
    x, w, b = _arguments.head(hidden, weight, bias)
    y = _arguments.indices("targets", targets)
    lead = x.shape[:-1]
    if y.shape != lead and not (y.ndim == x.ndim and y.shape[:-1] == lead and y.shape[-1] > 0):
        raise ValueError(f"targets: expected {list(lead)} or {list(lead)} with K words each, got {list(y.shape)}")
    options = HeadOptions(
        _arguments.integer("ignore_index", ignore_index),
        _arguments.softcap(softcap),
        _arguments.number("logit_scale", logit_scale),
        parse_bytes(memory_budget),
    )
    rows = {"hidden": x.reshape(-1, x.shape[-1]), "weight": w, "bias": b}
    fixed = {"targets": y.reshape(-1, *y.shape[len(lead) :])}
    axes = _ffi.axes_of(*[a for a in (*rows.values(), *fixed.values()) if a is not None])
    logprob, entropy, lse = head(
        options, ("log_prob", "entropy", "lse"), _ffi.varying(rows, axes), _ffi.varying(fixed, axes)
    )
    return logprob.reshape(y.shape), entropy.reshape(lead), lse.reshape(lead)
