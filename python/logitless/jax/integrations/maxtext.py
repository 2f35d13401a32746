"""MaxText's loss without logits on the library.

With ``num_vocab_tiling`` above 1 MaxText's trainer gives the last layer's hidden states to ``vocab_tiling_nnx_loss``, which
asks the model for the logits of a part of the tokens at a time. ``patch()`` puts ``vocab_tiling_nnx_loss`` below, of the
same arguments, in its place: the final norm as before, and the library for what follows.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ..._library import parse_bytes
from ..loss import linear_cross_entropy
from ..sharding import Sharding

_NAME = "vocab_tiling_nnx_loss"
_MODULES = ("maxtext.utils.vocabulary_tiling", "maxtext.trainers.pre_train.train")
_IGNORED = -(1 << 31)  # no word of any vocabulary
_replaced: dict[str, Any] = {}


def vocab_tiling_nnx_loss(
    model: Any, hidden_states: jax.Array, data: Mapping[str, jax.Array], config: Any, is_train: bool,
    *, memory_budget: int | str | None = None, sharding: Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum over tokens of cross entropy + z_loss_multiplier lse^2, that of the latter), float32. The first has gradients
    by the model's parameters and hidden_states.

    hidden_states: [B, T, D] before the final norm. data: "targets" [B, T] and "targets_segmentation" [B, T], 0 of tokens
    that count for nothing. memory_budget, sharding: as of ``linear_cross_entropy``. model, config: MaxText's; ``logits_via_embedding`` or ``logits_dense``, soft cap, scale and dtypes
    are followed. Sums of logits are float32 whatever ``cast_logits_to_fp32`` says.

    Raises ValueError for a mesh of several devices without sharding or explicit axes, NotImplementedError for a quantised
    head.
    """
    several = model.mesh is not None and model.mesh.size > 1
    if several and sharding is None and AxisType.Explicit not in model.mesh.axis_types:
        raise ValueError(f"sharding: expected logitless.jax.Sharding for the mesh {dict(model.mesh.shape)}, got None")
    decoder = model.decoder
    states = decoder.decoder_norm(hidden_states)
    states = decoder.dropout(states, deterministic=not (is_train and config.enable_dropout))
    weight, bias, dtype, head = _head(model, config)
    targets = jnp.where(data["targets_segmentation"] != 0, data["targets"], _IGNORED)
    multiplier = float(config.z_loss_multiplier)
    loss, lse = linear_cross_entropy(
        states.astype(dtype), weight.astype(dtype), targets, bias, reduction="sum", ignore_index=_IGNORED,
        z_loss=multiplier, return_lse=True, memory_budget=memory_budget, sharding=sharding, **head,
    )
    squares = jnp.where(targets != _IGNORED, jax.lax.stop_gradient(lse) ** 2, 0.0)
    return loss, multiplier * squares.sum()


def _head(model: Any, config: Any) -> tuple[jax.Array, jax.Array | None, Any, dict[str, Any]]:
    """(weight [V, D], bias [V], the dtype both operands are multiplied in, softcap and scale)"""
    if config.logits_via_embedding:
        # MaxText rounds a tied table to bfloat16 for this product whatever the other dtypes are.
        table = model.token_embedder.embedding[...].astype(jnp.bfloat16)
        dtype = jnp.promote_types(jnp.bfloat16, config.dtype)
        scale = table.shape[-1] ** -0.5 if config.normalize_embedding_logits else 1.0
        return table, None, dtype, dict(logit_scale=scale, softcap=config.final_logits_soft_cap or None)
    dense = model.decoder.logits_dense
    for name in ("quant", "weight_quant"):
        if getattr(dense, name, None) is not None:
            raise NotImplementedError(f"maxtext: expected logits_dense without {name}, got {getattr(dense, name)}")
    bias = getattr(dense, "bias", None)
    return dense.kernel[...].T, None if bias is None else bias[...], dense.dtype, {}


def patch(memory_budget: int | str | None = None, sharding: Sharding | None = None) -> None:
    """Has MaxText's trainer take the library's loss where ``num_vocab_tiling`` is above 1, whatever the number;
    ``unpatch()`` undoes it. Steps that are compiled already stay as they are.

    memory_budget: of a call, as of ``linear_cross_entropy``. sharding: where tokens and the words of the head lie on the
    model's mesh; of one device it needs none.

    Raises ImportError without MaxText, NotImplementedError for a version without that function.
    """
    parse_bytes(memory_budget)
    modules = [importlib.import_module(name) for name in _MODULES]
    for module in modules:
        if not hasattr(module, _NAME):
            raise NotImplementedError(f"maxtext: expected {_NAME} in {module.__name__}, as 0.2.5 has it")
    made = functools.partial(vocab_tiling_nnx_loss, memory_budget=memory_budget, sharding=sharding)
    for module in modules:
        _replaced.setdefault(module.__name__, getattr(module, _NAME))
        setattr(module, _NAME, made)


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    for name, function in _replaced.items():
        setattr(importlib.import_module(name), _NAME, function)
    _replaced.clear()
