"""Weights that FSDP1 frees after a unit's forward: views of a flat parameter, which are gathered once more for a loss.
"""

from __future__ import annotations

import weakref
from typing import Optional

from torch import Tensor


def _is_flat(base) -> bool:
    """Returns whether a tensor is a flat parameter of FSDP1, with shards elsewhere."""
    return getattr(base, "_is_flat_param", False) and hasattr(base, "_padded_unsharded_size")


def _of_all_ranks(flat) -> bool:
    """Returns whether the ranks of the default group hold the shards. FSDP1 does not expose its group."""
    import torch.distributed as dist

    return flat._local_shard.numel() * dist.get_world_size() == flat._padded_unsharded_size.numel()


class FlatShards:
    """The flat parameter of which a head's weight and bias are views, and its versions at the call."""

    def __init__(self, flat):
        self._flat = weakref.ref(flat)
        self._versions = self._of_now(flat)

    @staticmethod
    def of(weight: Tensor) -> Optional[FlatShards]:
        """Returns None for weights that are not freed, and for those whose ranks are unknown (HYBRID_SHARD)."""
        flat = weight._base
        return FlatShards(flat) if _is_flat(flat) and _of_all_ranks(flat) else None

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that optimizers step: the flat one and, with use_orig_params, the original ones."""
        flat = self._flat()
        return [] if flat is None else [flat, *(flat._params or ())]

    def _of_now(self, flat) -> list[int]:
        return [p._version for p in (flat, *(flat._params or ()))]

    def gathered(self, view: Tensor) -> Optional[Tensor]:
        """All-gathers the values of a view whose memory was freed. Collective. Returns None if they have changed."""
        import torch.distributed as dist

        flat = self._flat()
        if flat is None or self._of_now(flat) != self._versions:
            return None
        shard = flat._local_shard.detach().to(view.device, view.dtype)
        whole = shard.new_empty(flat._padded_unsharded_size.numel())
        dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def lasting(t: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the detached tensor. It is a copy if FSDP1 may free its memory and the ranks that hold it are unknown."""
    if t is None:
        return None
    return t.detach().clone() if _is_flat(t._base) and FlatShards.of(t) is None else t.detach()
