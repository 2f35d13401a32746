"""MaxText's loss without logits, computed by the library.

With ``num_vocab_tiling`` above 1, MaxText's trainer passes the last layer's hidden states to ``vocab_tiling_nnx_loss``.
That function computes the logits of a part of the tokens at a time. ``patch()`` replaces it by the function of the same
name below, which applies the final norm and then calls the library.
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
from ..._options import share
from ..loss import linear_cross_entropy
from ..sharding import Sharding

_NAME = "vocab_tiling_nnx_loss"
_MODULES = ("maxtext.utils.vocabulary_tiling", "maxtext.trainers.pre_train.train")
_IGNORED = -(1 << 31)  # not a token id of any vocabulary
_replaced: dict[str, Any] = {}


def vocab_tiling_nnx_loss(
    model: Any, hidden_states: jax.Array, data: Mapping[str, jax.Array], config: Any, is_train: bool,
    *, memory_budget: int | str | None = None, sharding: Sharding | None = None, expected_ignored: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum over tokens of cross entropy + z_loss_multiplier lse^2, the sum of the z-loss terms), float32. The
    first has gradients by the model's parameters and hidden_states.

    hidden_states: [B, T, D] before the final norm.
    data: "targets" [B, T] and "targets_segmentation" [B, T], which is 0 for ignored tokens.
    memory_budget, sharding, expected_ignored: as in ``linear_cross_entropy``.
    model, config: MaxText's. The head is ``logits_via_embedding`` or ``logits_dense``, with MaxText's softcap, scale
        and dtypes. Sums of logits are float32 whatever ``cast_logits_to_fp32`` says.

    Raises ValueError for a mesh of several devices without sharding or explicit axes, and NotImplementedError for a
    quantised head.
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
        z_loss=multiplier, return_lse=True, memory_budget=memory_budget, sharding=sharding,
        expected_ignored=expected_ignored, **head,
    )
    squares = jnp.where(targets != _IGNORED, jax.lax.stop_gradient(lse) ** 2, 0.0)
    return loss, multiplier * squares.sum()


def _head(model: Any, config: Any) -> tuple[jax.Array, jax.Array | None, Any, dict[str, Any]]:
    """Returns (weight [V, D], bias [V], the dtype of both operands, softcap and scale)."""
    if config.logits_via_embedding:
        # MaxText always rounds a tied table to bfloat16 for this matrix product.
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


def patch(
    memory_budget: int | str | None = None, sharding: Sharding | None = None, *, expected_ignored: float = 0.0
) -> None:
    """Makes MaxText's trainer use the library's loss wherever ``num_vocab_tiling`` is above 1; ``unpatch()`` restores
    it. Steps that are already compiled do not change.

    memory_budget, expected_ignored: of a call, as in ``linear_cross_entropy``.
    sharding: how tokens and vocabulary are sharded over the model's mesh; not needed on one device.

    Raises ImportError without MaxText, and NotImplementedError for a version without that function.
    """
    parse_bytes(memory_budget)
    modules = [importlib.import_module(name) for name in _MODULES]
    for module in modules:
        if not hasattr(module, _NAME):
            raise NotImplementedError(f"maxtext: expected {_NAME} in {module.__name__}, as 0.2.5 has it")
    made = functools.partial(
        vocab_tiling_nnx_loss, memory_budget=memory_budget, sharding=sharding,
        expected_ignored=share("expected_ignored", expected_ignored),
    )
    for module in modules:
        _replaced.setdefault(module.__name__, getattr(module, _NAME))
        setattr(module, _NAME, made)


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    for name, function in _replaced.items():
        setattr(importlib.import_module(name), _NAME, function)
    _replaced.clear()
