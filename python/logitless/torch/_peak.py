"""The peak memory of a function, from the allocations that PyTorch's profiler records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.utils._pytree as pytree
from torch._C._profiler import _EventType


def peak_of(run: Callable, results_count: bool = False, device: Optional[str] = None) -> tuple[int, Any]:
    """Returns the most bytes that the allocator of a device type (None: the default device's) had given out at one time
    during run(), beyond those before, and the result of run(). Temporaries of kernels count; the memory of returned
    tensors does not, unless results_count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = run()
    results = set()
    if not results_count:
        results = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)}
    device = device or torch.get_default_device().type
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree(), device))
    last = {}  # the live allocation at each address
    for place, (_, address, size) in enumerate(events):
        if size > 0:
            last[address] = place
    ignored = {last[a] for a in results if a in last}
    now = most = 0
    for place, (_, address, size) in enumerate(events):
        if place in ignored:
            continue
        now += size
        most = max(most, now)
    return most, made


def _allocations(tree: list, device: str) -> Iterator[tuple[int, int, int]]:
    """Yields (time, address, bytes; negative when freed)."""
    work = list(tree)
    while work:
        event = work.pop()
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == device:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        work.extend(event.children)
