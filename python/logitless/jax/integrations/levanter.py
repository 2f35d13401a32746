"""levanter's fused cross entropy, computed by the library.

levanter's models compute their loss with ``levanter.kernels.pallas.fused_cross_entropy_loss``, which has a table of
implementations. ``patch()`` replaces the entries that levanter chooses by default on CPUs and GPUs.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._library import parse_bytes
from ..head import linear_logprobs

_MODULE = "levanter.kernels.pallas.fused_cross_entropy_loss"
_NAMES = ("xla", "batched_xla")  # levanter's default implementations
_replaced: dict[str, Any] = {}


def loss_and_lse(
    x: ArrayLike, labels: ArrayLike, w: ArrayLike, *, block_sizes: Any = None, dtype: DTypeLike | None = None,
    logit_soft_cap: float | None = None, precision: Any = None, return_argmax: bool = False,
    memory_budget: int | str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (loss, lse) [B] of softmax(x @ w), with gradients of both, in the interface of levanter's table.

    x: [B, H]. labels: [B]. w: [H, V]. Both are multiplied in the dtype that theirs promote to.
    block_sizes: ignored; the workspace follows from memory_budget.
    dtype: of the results; sums are float32 regardless.
    precision: ignored. On a CPU, float32 matrix products run in float32; on a GPU only the default precision is
        guaranteed.
    Raises NotImplementedError for return_argmax, so that levanter falls back to its next implementation.
    """
    if return_argmax:
        raise NotImplementedError("return_argmax: expected False, got True")
    x, w = jnp.asarray(x), jnp.asarray(w)
    common = jnp.promote_types(x.dtype, w.dtype)
    logprob, _, lse = linear_logprobs(
        x.astype(common), w.astype(common).T, labels, ignore_index=-(1 << 31), softcap=logit_soft_cap,
        memory_budget=memory_budget,
    )
    kind = jnp.float32 if dtype is None else dtype
    return -logprob.astype(kind), lse.astype(kind)


def patch(memory_budget: int | str | None = None) -> None:
    """Replaces levanter's default implementations by the library; ``unpatch()`` restores them. Programs that are
    already compiled do not change.

    memory_budget: of a call, as in ``linear_logprobs``.

    Raises ImportError without levanter, and NotImplementedError for a version without that table.
    """
    parse_bytes(memory_budget)
    table = _table()
    made = functools.partial(loss_and_lse, memory_budget=memory_budget)
    for name in _NAMES:
        _replaced.setdefault(name, table[name])
        table[name] = made


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    if _replaced:
        _table().update(_replaced)
        _replaced.clear()


def _table() -> dict[str, Any]:
    table = getattr(importlib.import_module(_MODULE), "IMPLEMENTATIONS", None)
    if table is None:
        table = getattr(importlib.import_module(f"{_MODULE}.api"), "IMPLEMENTATIONS", None)
    missing = [name for name in _NAMES if name not in (table or {})]
    if missing:
        raise NotImplementedError(f"levanter: expected IMPLEMENTATIONS of {_MODULE} with {list(_NAMES)}, without {missing}")
    return table
