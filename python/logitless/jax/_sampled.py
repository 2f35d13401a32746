"""Samples and best entries by the library's own kernels on a GPU: one GEMM for ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._library import parse_bytes
from .._options import HeadOptions
from . import _chunks, _ffi, _portable
from ._axes import axes_of, varying
from ._backend import backend, platform_of_jax

_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}  # with the values that change nothing
_FLOATS = ("bias", "logit_bias", *_NUMBERS)


def serves(hidden: Any, weight: Any, given: Mapping[str, Any]) -> bool:
    """Returns whether ``sampled`` and ``best`` serve a call. hidden, weight: as the caller gave them."""
    from .sharding import of_types  # imported here, since that module imports this package's calls

    x, w = given["hidden"], given["weight"]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype or x.shape[0] == 0:
        return False
    if platform_of_jax() != "cuda" or backend(x.dtype).name != "native":
        return False
    return of_types(hidden, weight) is None


def sampled(
    given: Mapping[str, Any], key: jax.Array | None, filters: Any, memory_budget: Any
) -> tuple[jax.Array, ...]:
    """Returns tokens [N] int32 and log-probabilities [N].

    given: hidden [N, D], weight [V, D] and bias of the head; logit_bias; temperature, top_p and min_p, numbers or [N];
    counter [N]. key: of the noise, int32 [2]; None: greedy.
    """
    arrays = {name: value for name, value in given.items() if isinstance(value, jax.Array)}
    numbers = {name: given.get(name, unused) for name, unused in _NUMBERS.items()}
    numbers = {name: _NUMBERS[name] if name in arrays else value for name, value in numbers.items()}
    if filters.greedy:
        numbers["temperature"] = 0.0
    if key is not None:  # two of 64 bits
        arrays["key"] = jnp.stack([key, jnp.zeros_like(key)], 1).reshape(4)
    tokens = given["hidden"].shape[0]
    attributes = {name: np.float32(value) for name, value in numbers.items()}
    attributes["top_k"] = np.int64(0 if filters.greedy else filters.top_k)
    outputs = {"tokens": ((tokens,), "int32"), "log_prob": ((tokens,), "float32")}

    def elsewhere(*operands):
        found = dict(zip(arrays, operands))
        if key is not None:
            found["key"] = found["key"].reshape(2, 2)[:, 0]
            found.setdefault("counter", jnp.arange(tokens, dtype=jnp.int32))
            used = {name for name in _NUMBERS if name in given}
            found |= {name: jnp.float32(numbers[name]) for name in used if name not in found}
        ids = _chunks.run("sample", parse_bytes(memory_budget), found, *filters)
        return ids, _log_probs(found, ids, filters.softcap, filters.scale, memory_budget)

    return _call("sample", arrays, outputs, _head(attributes, filters.softcap, filters.scale, memory_budget), elsewhere)


def best(given: Mapping[str, Any], targets: Any, k: int, softcap: float, scale: float, memory_budget: Any):
    """Returns the log-probability [N] of the targets or None, and the k largest [N, K] with their ids int32."""
    arrays = {name: given[name] for name in ("hidden", "weight", "bias") if name in given}
    tokens = given["hidden"].shape[0]
    outputs = {"top_log_probs": ((tokens, k), "float32"), "top_ids": ((tokens, k), "int32")}
    if targets is not None:
        arrays["targets"] = targets
        outputs["log_prob"] = ((tokens,), "float32")
    attributes = _head({"k": np.int64(k)}, softcap, scale, memory_budget)

    def elsewhere(*operands):
        head = dict(zip(arrays, operands))
        own = head.pop("targets", None)
        ids = jnp.sort(_chunks.run("best_entries", parse_bytes(memory_budget), head, softcap, scale, k))
        values = _log_probs(head, ids, softcap, scale, memory_budget)
        order = jnp.argsort(-values, -1, stable=True)
        found = jnp.take_along_axis(values, order, -1), jnp.take_along_axis(ids, order, -1)
        return found if own is None else (*found, _log_probs(head, own, softcap, scale, memory_budget))

    found = _call("top_logprobs", arrays, outputs, attributes, elsewhere)
    return None if targets is None else found[2], *found[:2]


def _log_probs(given: Mapping[str, jax.Array], ids: jax.Array, softcap: float, scale: float, memory_budget: Any) -> jax.Array:
    """Returns the log-probabilities of ids [N] or [N, K] in JAX's own operations."""
    options = HeadOptions(softcap=softcap, logit_scale=scale, memory_budget=-parse_bytes(memory_budget))
    inputs = {name: given.get(name) for name in ("hidden", "weight", "bias")}
    return _portable.call("head_forward", options, {**inputs, "targets": ids}, {"log_prob": (ids.shape, "float32")})["log_prob"]


def _head(attributes: dict[str, Any], softcap: float, scale: float, memory_budget: Any) -> dict[str, Any]:
    budget = np.int64(parse_bytes(memory_budget))
    return {**attributes, "softcap": np.float32(softcap), "logit_scale": np.float32(scale), "memory_budget": budget}


def _call(function: str, arrays, outputs, attributes: Mapping[str, Any], elsewhere: Any) -> tuple[jax.Array, ...]:
    arrays = {name: a.astype(jnp.float32) if name in _FLOATS else a for name, a in arrays.items()}
    arrays = varying(arrays, axes_of(*arrays.values()))
    axes = axes_of(*arrays.values())

    def run(device: int, *operands):
        results = [_ffi.result_type(shape, dtype, axes) for shape, dtype in outputs.values()]
        target = jax.ffi.ffi_call(f"logitless_{function}", results, vmap_method="sequential")
        names = {"inputs": ",".join(arrays), "outputs": ",".join(outputs)}
        return tuple(target(*operands, **names, threads=np.int64(_ffi.threads_of(device)), **attributes))

    return _ffi.on_platform(run, elsewhere, axes, *arrays.values())
