"""Runs a loss: its outputs and gradients, and the functions of its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils._pytree as pytree


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


def plan_peaks(plan, args: Sequence[torch.Tensor], measure: Callable) -> list[tuple]:
    """Returns each compiled function of an autochunk plan with the result of measure(run), where run() calls it
    alone."""
    traced, found = plan.traced, []
    for compiled in filter(None, (plan.forward, plan.backward)):
        pairs = zip(traced.outputs, traced.differentiable)
        cotangents = [torch.ones(o.shape, dtype=o.dtype, device=args[0].device) for o, yes in pairs if yes]
        kept = [torch.zeros(t.shape, dtype=t.dtype, device=args[0].device) for t in plan.kept]
        inputs = [t.detach() for t in plan.inputs(compiled, args, cotangents, kept)]
        with torch.no_grad():
            found.append((compiled, measure(lambda: compiled.function(*inputs))))
    return found
