"""Plans under torch.func: grad, vjp, jacrev, and vmap, which runs one example after another. Second derivatives and
forward mode raise errors that name them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

ADVICE = "; differentiate by Tensor.backward, torch.autograd.grad, torch.func.grad or jacrev"
SECOND = "autochunk: second derivatives have no form in a chunked function; differentiate the function itself"


def active() -> bool:
    return torch._C._are_functorch_transforms_active()


def refuse_forward_mode() -> None:
    """Raises in forward mode of torch.autograd.forward_ad. Within torch.func, the rules below raise."""
    if not active() and torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"autochunk: there is no rule for forward-mode derivatives (torch.autograd.forward_ad){ADVICE}"
        )


def refuse_in_graph() -> None:
    """Raises for transforms and forward mode inside torch.compile."""
    refuse_forward_mode()
    if active():
        name = retrieve_current_functorch_interpreter().key().name.lower()
        raise NotImplementedError(
            f"autochunk: executor='native' has no rule for torch.func.{name} inside of torch.compile; leave the "
            "transform outside of what is compiled"
        )


def requires_grad(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor, or one that transforms have wrapped, requires a gradient."""
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def unwrapped(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors without the wrappers of transforms that have ended, which have no memory of their own."""
    return [torch._C._functorch.unwrap_if_dead(t) for t in tensors]


class _Rules(torch.autograd.Function):
    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(
            f"autochunk: there is no rule for forward-mode derivatives (torch.func.jvp, jacfwd){ADVICE}"
        )


def _one_by_one(rules, info, in_dims, args):
    if info.batch_size == 0:
        raise ValueError("autochunk: vmap over a dimension of size 0; expected one example at least")
    results = []
    for k in range(info.batch_size):
        of = [a.select(d, k) if isinstance(a, torch.Tensor) and d is not None else a for a, d in zip(args, in_dims)]
        results.append(rules.apply(*of))
    return tuple(torch.stack(r) for r in zip(*results)), (0,) * len(results[0])


class Transformed(_Rules):
    """Maps a plan and its inputs to the outputs, followed by the values that forward makes for backward."""

    @staticmethod
    def forward(plan, *tensors):
        return tuple(plan.run(plan.forward, tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        plan, *tensors = inputs
        traced = plan.traced
        count = len(traced.outputs)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        constant = [o for o, yes in zip(output, traced.differentiable) if not yes]
        ctx.mark_non_differentiable(*constant)
        ctx.count = count
        ctx.save_for_backward(*plan.saved(tensors, output[count:]))

    @staticmethod
    def backward(ctx, *cotangents):
        plan, traced = ctx.plan, ctx.plan.traced
        if any(t is not None for t in cotangents[ctx.count :]):  # upstream gradients of the gradients
            raise NotImplementedError(SECOND)
        wanted = [t for t, yes in zip(cotangents, traced.differentiable) if yes]
        if all(t is None for t in wanted) or not any(plan.has_grad):
            return (None,) * (1 + len(plan.has_grad))
        saved = ctx.saved_tensors  # read once, since each read under a checkpoint recomputes them
        made = iter(gradients(plan, saved, upstream(plan, cotangents, saved[0].device)))
        return (None, *(next(made) if has else None for has in plan.has_grad))

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(Transformed, info, in_dims, args)


def upstream(plan, cotangents: Sequence, device: torch.device) -> list[torch.Tensor]:
    """Returns the upstream gradients of the differentiable outputs, zeros for those that have none."""
    each = zip(cotangents, plan.traced.outputs, plan.traced.differentiable)
    return [torch.zeros(o.shape, dtype=o.dtype, device=device) if t is None else t for t, o, yes in each if yes]


def gradients(plan, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns ``plan.gradients`` by a function that transforms see."""
    return _Gradients.apply(plan, len(saved), *saved, *cotangents)


class _Gradients(_Rules):
    """Maps a plan, the number of saved tensors, these, and upstream gradients to the existing gradients."""

    @staticmethod
    def forward(plan, count, *tensors):
        return tuple(plan.gradients(tensors[:count], tensors[count:]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(SECOND)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(_Gradients, info, in_dims, args)


def gradients_once(function, ctx, cotangents: Sequence[torch.Tensor]) -> tuple:
    """Returns the results of a function's backward under create_graph=True, where derivatives of them raise."""
    if active():
        raise NotImplementedError(SECOND)
    with torch.no_grad():
        made = function.backward(ctx, *cotangents)
    places, given = [i for i, t in enumerate(made) if t is not None], [t for t in cotangents if t is not None]
    ended = dict(zip(places, _Once.apply(len(places), *(made[i] for i in places), ctx.saved_tensors[-1], *given)))
    return tuple(ended.get(i) for i in range(len(made)))


class _Once(torch.autograd.Function):
    """Returns the first ``count`` tensors, as functions of all others whose derivatives raise."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(SECOND)
