"""Axes of a shard_map over which arrays vary."""

from __future__ import annotations

from typing import Mapping

import jax


def axes_of(*arrays: jax.Array) -> frozenset[str]:
    """Returns the axes of a shard_map over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        aval = jax.typeof(array)
        kind = getattr(aval, "manual_axis_type", None)
        axes |= getattr(aval, "vma", frozenset()) if kind is None else kind.varying
    return axes


def varying(arrays: Mapping[str, jax.Array | None], axes: frozenset[str]) -> dict[str, jax.Array | None]:
    """Marks the arrays as varying over all of the axes. A gradient through this is summed over the added axes."""

    def vary(array):
        missing = tuple(sorted(axes - axes_of(array)))
        if not missing:
            return array
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(array, missing, to="varying")
        return jax.lax.pvary(array, missing)

    return {name: None if array is None else vary(array) for name, array in arrays.items()}
