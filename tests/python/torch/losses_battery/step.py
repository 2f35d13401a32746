"""Runs a loss and measures it: outputs and gradients, and the memory that PyTorch's allocators gave out meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils._pytree as pytree
from torch._C._profiler import _EventType


def outputs_and_gradients(function: Callable, args: Sequence[torch.Tensor]) -> tuple[list, list]:
    """Returns tensor outputs, and gradients by the arguments that need one (None where there is none). The upstream
    gradient is 1, and 2 for the second number of each output."""
    outputs = [o for o in pytree.tree_leaves(function(*args)) if isinstance(o, torch.Tensor)]
    graded = [o for o in outputs if o.requires_grad]
    wanted = [a for a in args if a.requires_grad]
    if not graded:
        return outputs, []
    cotangents = [torch.ones_like(o, memory_format=torch.contiguous_format) for o in graded]
    for t in cotangents:
        if t.numel() > 1:
            t.view(-1)[1] = 2.0
    gradients = torch.autograd.grad(graded, wanted, cotangents, allow_unused=True)
    return [o.detach() for o in outputs], list(gradients)


def peak_of(run: Callable, results_count: bool = False) -> tuple[int, object]:
    """Returns the most bytes that the allocator of the default device had given out at one time during run(), and the
    result of run(). Temporaries of kernels count; the memory of returned tensors does not, unless results_count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = run()
    results = set()
    if not results_count:
        results = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)}
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
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


def _allocations(tree):
    """Yields (time, address, bytes; negative when freed)."""
    for event in tree:
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == torch.get_default_device().type:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def plan_peaks(plan, args: Sequence[torch.Tensor], measure: Callable) -> list[tuple]:
    """Returns each compiled function of an autochunk plan with the result of measure(run), where run() calls it
    alone."""
    traced, found = plan.traced, []
    for compiled in filter(None, (plan.forward, plan.backward)):
        pairs = zip(traced.outputs, traced.differentiable)
        cotangents = [torch.ones(o.shape, dtype=o.dtype, device=args[0].device) for o, yes in pairs if yes]
        inputs = [t.detach() for t in plan.inputs(compiled, args, cotangents)]
        with torch.no_grad():
            found.append((compiled, measure(lambda: compiled.function(*inputs))))
    return found
