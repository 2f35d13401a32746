"""Log-probabilities of given token ids beside those of the target, by one call of the head."""

from __future__ import annotations

from typing import Any

from .._options import shape_text


def with_selected(xp: Any, name: str, target: Any, selected: Any, lead: tuple[int, ...], ignore_index: int):
    """Returns the token ids of one call of the head [..., K]: those of the target, if any, then the selected ones.

    xp: torch or jax.numpy. name: of the argument target, [...] or [..., K] or None. selected: [K] or [..., K]. A token
    whose target is ignored has no selected ids. Raises ValueError for other shapes.
    """
    shape = tuple(selected.shape)
    if not shape or shape[:-1] not in ((), lead) or shape[-1] == 0:
        raise ValueError(f"selected_ids: expected [K] or {shape_text(lead, 'K')}, got {list(shape)}")
    selected = xp.broadcast_to(selected, (*lead, shape[-1]))
    if target is None:
        return selected
    if tuple(target.shape[: len(lead)]) != lead or target.ndim > len(lead) + 1:
        raise ValueError(f"{name}: expected {list(lead)} or {shape_text(lead, 'K')}, got {list(target.shape)}")
    ids = target if target.ndim > len(lead) else target[..., None]
    ignored = (ids == ignore_index).all(-1)[..., None]
    return xp.concatenate([ids, xp.where(ignored, ignore_index, selected)], -1)


def parts(log_prob: Any, target: Any, count: int) -> tuple[Any, Any]:
    """Splits the log-probabilities of ``with_selected``: of the target, in its shape, or None; of the ``count`` selected
    ids."""
    first = log_prob.shape[-1] - count
    if target is None:
        return None, log_prob
    return log_prob[..., :first].reshape(target.shape), log_prob[..., first:]
