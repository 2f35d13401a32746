"""A head on a GPU that saves its exponentials from forward to backward: three GEMMs for both instead of four."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import _library as c
from .._library import lib
from .._options import HeadOptions, struct_of
from . import _engine, _memory
from ._ops import (
    _bias, _bits, _compute, _empty, _finish, _gradient_like, _keeps_graph, _vectors, head_outputs, head_results,
    refuse_second_derivatives, run_head, run_head_backward,
)
from ._ranks import VocabShard

# Inputs, outputs and gradients of a forward by the C structs' names; None marks a missing tensor. Only the shape and
# dtype of d_hidden matter.
Tensors = dict[str, Optional[Tensor]]


class Problem(NamedTuple):
    """Everything that the plan of a head depends on, except memory."""

    options: HeadOptions
    inputs: Tensors
    outputs: Tensors
    gradients: Tensors

    @property
    def device(self) -> torch.device:
        return self.inputs["hidden"].device

    def key(self):
        tensors = {**self.inputs, **self.outputs, **self.gradients}
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
        return ("kept", self.options, _engine.place(self.device), *layouts)


class _Pair:
    """The forward and backward calls of one shape, by one thread on one stream."""

    def __init__(self, problem: Problem):
        groups = [(c.HeadInputs, problem.inputs), (c.HeadOutputs, problem.outputs), (c.HeadGradients, problem.gradients)]
        structs = [_engine.fill(kind, tensors) for kind, tensors in groups]
        self.forward = _engine.Call(
            problem.device, struct_of(problem.options), structs, problem.options.memory_budget,
            lib.logitless_plan_head_saved, lib.logitless_head_forward_saved, (),
        )
        (self.inputs, self.input_fields), _, (self.gradients, self.gradient_fields) = structs
        self.cotangents = c.new(c.HeadCotangents)
        # Cotangents have the shapes of their outputs.
        self.cotangent_fields = {n: _engine.tensor_struct(n, problem.outputs[n]) for n in ("log_prob", "lse")}

    def backward(self, inputs: Tensors, cotangents: Tensors, gradients: Tensors, workspace: Tensor) -> None:
        for fields, tensors in ((self.input_fields, inputs), (self.gradient_fields, gradients)):
            for field, tensor in zip(fields, [t for t in tensors.values() if t is not None]):
                field.data = _memory.address(field.name, tensor)
        for name, field in self.cotangent_fields.items():
            if cotangents[name] is None:
                setattr(self.cotangents, name, None)
            else:
                field.data = _memory.address(name, cotangents[name])
                setattr(self.cotangents, name, ctypes.pointer(field))
        call = self.forward
        status = lib.logitless_head_backward_saved(
            call.context.handle, call.plan, byref(call.options), byref(self.inputs), byref(self.cotangents),
            byref(self.gradients), workspace.data_ptr(), call.workspace_bytes,
        )
        if status:
            c.check(status)


def _pair(problem: Problem) -> Optional[_Pair | Exception]:
    def build():
        try:
            return _engine.on_device(problem.device, _Pair, problem)
        except (ValueError, NotImplementedError) as refused:
            return type(refused)(str(refused))  # the original's traceback would keep the call's tensors alive

    return _engine.remembered(problem.key(), build)


# The hooks for saved tensors, and whether a backward retains its graph; older versions of PyTorch do not report the
# latter.
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None)
_knows_graphs = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")


def why_not(hidden: Tensor, compute: Optional[torch.dtype], vocab_shard: VocabShard) -> str:
    """Returns the reason why these calls cannot save exponentials; empty if they may."""
    if hidden.device.type != "cuda":
        return f"expected tensors on a GPU, got {hidden.device.type}"
    if (compute or hidden.dtype) == torch.float64:
        return "expected float32, bfloat16 or float16, got float64"
    if vocab_shard.group:
        return "expected the vocabulary of one rank, got a sharded weight"
    return "" if _knows_graphs else f"expected a newer PyTorch, got {torch.__version__}"


def _hooked() -> str:
    """Returns the reason against saving if hooks for saved tensors are active. Hooks would move gigabytes, or convert
    memory that does not hold numbers: d_weight's memory holds exponentials."""
    hooked = _hooks(True) is not None
    return "expected no hooks of saved tensors (checkpoints, offloading), got some" if hooked else ""


def _forward(problem: Problem) -> tuple[Tensor, Optional[Tensor]]:
    """Writes the outputs. Returns the workspace and d_weight, which must stay unchanged until the backward. Raises if
    no plan saves the exponentials within the memory budget, or if allocation fails."""
    pair = _pair(problem)
    if isinstance(pair, Exception):
        raise type(pair)(f"keep: {pair}")
    gradients, device = dict(problem.gradients), problem.device
    if gradients["d_weight"] is not None:
        gradients["d_weight"] = torch.empty_like(gradients["d_weight"], device=device)
    present = [t for group in (problem.inputs, problem.outputs, gradients) for t in group.values() if t is not None]
    workspace = torch.empty(pair.forward.workspace_bytes, dtype=torch.uint8, device=device)
    _engine.on_device(device, pair.forward.run, present, device, workspace)
    return workspace, gradients["d_weight"]


def _problem(hidden, weight, target, bias, options, compute, needs: int, outputs: tuple[bool, bool]) -> Problem:
    """Builds the problem. outputs: whether there is an argmax, and an entropy. Gradients except the bias's are not
    allocated yet."""
    x, w = _compute(hidden, compute), _compute(weight, compute)
    target, b = _vectors(x.device, target, bias)
    need = _bits(needs)
    gradients = dict(
        d_hidden=_gradient_like(hidden.to("meta"), x.dtype) if need[0] else None,
        d_weight=_gradient_like(weight.to("meta"), x.dtype) if need[1] else None,
        d_bias=torch.empty(bias.shape, dtype=torch.float32, device=x.device) if need[2] else None,
    )
    made = head_outputs(target, hidden.shape[:-1], *outputs)
    return Problem(options, dict(hidden=x, weight=w, targets=target, bias=_bias(b, w)), made, gradients)


class SavedHeadFunction(torch.autograd.Function):
    """``HeadFunction`` for plain tensors on a GPU, which saves exponentials if possible."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options, compute, needs, argmax, entropy, required):
        ctx.call = options, compute, needs
        ctx.outputs = argmax, entropy
        ctx.set_materialize_grads(False)
        found = _saved_forward((hidden, weight, target, bias), ctx, required)
        if found is None:
            results = run_head(hidden, weight, target, bias, options, compute, argmax, entropy=entropy)
            workspace = d_weight = None
        else:
            results, workspace, d_weight = found
        ctx.save_for_backward(hidden, weight, target, bias, workspace, d_weight)
        ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, *_):
        refuse_second_derivatives()
        nothing = (None,) * 7
        if d_log_prob is None and d_entropy is None and d_lse is None:
            return (None, None, None, *nothing)
        *inputs, workspace, d_weight = ctx.saved_tensors
        # The saved exponentials serve one backward, without a gradient of the entropy.
        if workspace is None or d_entropy is not None or _keeps_graph():
            gradients = run_head_backward(*inputs, d_log_prob, d_entropy, d_lse, *ctx.call)
        else:
            gradients = _saved_backward(ctx, inputs, d_log_prob, d_lse, workspace, d_weight)
        d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, _bits(ctx.call[2])))
        return (d_hidden, d_weight, d_bias, *nothing)


def _saved_forward(inputs, ctx, required: bool):
    """Returns (results, workspace, d_weight), or None if saving is impossible and not required."""
    hooked = _hooked()
    if hooked and required:
        raise ValueError(f"keep: {hooked}")
    if hooked:
        return None
    problem = _problem(*inputs, *ctx.call, ctx.outputs)
    try:
        workspace, d_weight = _forward(problem)
    except (ValueError, NotImplementedError, torch.cuda.OutOfMemoryError):
        if required:
            raise
        return None
    return head_results(problem.outputs), workspace, d_weight


def _saved_backward(ctx, inputs, d_log_prob, d_lse, workspace, d_weight):
    hidden, weight, target, bias = inputs
    problem = _problem(*inputs, *ctx.call, ctx.outputs)
    gradients = problem.gradients | dict(d_weight=d_weight)
    if gradients["d_hidden"] is not None:
        gradients["d_hidden"] = torch.empty_like(gradients["d_hidden"], device=problem.device)
    d_log_prob, d_lse = _vectors(problem.device, d_log_prob, d_lse)
    pair = _pair(problem)
    if isinstance(pair, Exception):
        raise pair
    _engine.on_device(
        problem.device, pair.backward, problem.inputs, dict(log_prob=d_log_prob, lse=d_lse), gradients, workspace
    )
    like = (hidden, weight, bias)
    return tuple(_empty(hidden) if g is None else _finish(g, t) for g, t in zip(gradients.values(), like))
