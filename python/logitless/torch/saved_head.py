"""A head on a GPU that saves its exponentials from forward to backward: three GEMMs for both instead of four."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import _library as c
from .._library import lib
from . import _engine, _memory, autograd, run
from ._backend import why_portable
from ._engine import Tensors
from .run import Form


class Problem(NamedTuple):
    """Everything that the plan of a head depends on, except memory. Only the shapes and dtypes of d_hidden and d_weight
    matter, which are not allocated yet."""

    form: Form
    inputs: Tensors
    outputs: Tensors
    gradients: Tensors

    @property
    def device(self) -> torch.device:
        return self.inputs["hidden"].device

    def key(self):
        tensors = {**self.inputs, **self.outputs, **self.gradients}
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
        return ("saved_head", self.form.options, _engine.place(self.device), *layouts)


def problem_of(hidden, weight, target, bias, form: Form, operand: Optional[Tensor] = None) -> Problem:
    """Returns the problem of a call. operand: weight in the engine's form, None if it has to be converted to it."""
    given, mixes = weight if operand is None else operand, run.mixes(hidden, weight, form)
    inputs = run.operands(hidden, given, target, bias, form.compute, mixes)
    gradients = run.gradients((hidden, weight, bias), inputs, form.needs, device="meta")
    return Problem(form, inputs, run.head_outputs(inputs["targets"], inputs["hidden"], form), gradients)


class _Pair:
    """The forward and backward calls of one shape, by one thread on one stream."""

    def __init__(self, problem: Problem):
        groups = problem.inputs, problem.outputs, problem.gradients
        options = problem.form.options
        self.forward = _engine.Call(_engine.SAVED_HEAD, options, groups, options.memory_budget)
        (self.inputs, self.input_fields), _, (self.gradients, self.gradient_fields) = self.forward.structs
        self.cotangents = c.new(c.HeadCotangents)
        # Cotangents have the shapes of their outputs.
        given = {n: problem.outputs[n] for n in ("log_prob", "entropy", "lse")}
        self.cotangent_fields = {n: _engine.tensor_struct(n, t) for n, t in given.items() if t is not None}

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
        c.check(
            lib.logitless_head_backward_saved(
                call.context.handle, call.plan, byref(call.options), byref(self.inputs), byref(self.cotangents),
                byref(self.gradients), workspace.data_ptr(), call.workspace_bytes,
            )
        )


def pair_of(problem: Problem) -> _Pair | Exception:
    def build():
        try:
            return _engine.on_device(problem.device, _Pair, problem)
        except (ValueError, NotImplementedError) as refused:
            return type(refused)(str(refused))  # the original's traceback would keep the call's tensors alive

    return _engine.calls.remembered(problem.key(), build)


# The hooks for saved tensors, and whether a backward retains its graph; older versions of PyTorch do not report the
# latter.
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None)
_knows_graphs = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")


def why_not(hidden: Tensor, form: Form) -> str:
    """Returns the reason why these calls cannot save exponentials; empty if they may."""
    if hidden.device.type != "cuda":
        return f"expected tensors on a GPU, got {hidden.device.type}"
    if (form.compute or hidden.dtype) == torch.float64:
        return "expected float32, bfloat16 or float16, got float64"
    if form.shard.group:
        return "expected the vocabulary of one rank, got a sharded weight"
    portable = why_portable("cuda", hidden.device.index, form.compute or hidden.dtype)
    if portable:
        return f"expected the library's kernels, got PyTorch's own operations: {portable}"
    return "" if _knows_graphs else f"expected a newer PyTorch, got {torch.__version__}"


def _allocated(t: Tensor, device: torch.device) -> Tensor:
    """Allocates what a contiguous tensor of the device "meta" stands for. ``empty_like`` of it takes 50 us longer."""
    return torch.empty(t.shape, dtype=t.dtype, device=device)


def _forward(inputs, form: Form, required: bool):
    """Returns (results, operand, workspace, d_weight), the last three of which must stay unchanged until the backward.
    operand is weight in the engine's form, such as autocast's dtype; None if that is weight itself. Returns None if
    hooks for saved tensors, the memory budget or the GPU's memory are against it, or raises if required."""
    # Hooks would move gigabytes, or convert memory that does not hold numbers: d_weight's memory holds exponentials.
    if _hooks(True) is not None:
        if required:
            raise ValueError("keep: expected no hooks of saved tensors (checkpoints, offloading), got some")
        return None
    problem = problem_of(*inputs, form)
    pair, device = pair_of(problem), problem.device
    try:
        if isinstance(pair, Exception):
            raise type(pair)(f"keep: {pair}")
        gradients = dict(problem.gradients)
        if gradients["d_weight"] is not None:
            gradients["d_weight"] = _allocated(gradients["d_weight"], device)
        workspace = torch.empty(pair.forward.workspace_bytes, dtype=torch.uint8, device=device)
        groups = problem.inputs, problem.outputs, gradients
        present = [t for group in groups for t in group.values() if t is not None]
        _engine.on_device(device, pair.forward.run, present, workspace)
    except (ValueError, NotImplementedError, torch.cuda.OutOfMemoryError):
        if required:
            raise
        return None
    operand = None if problem.inputs["weight"] is inputs[1] else problem.inputs["weight"]
    return run.head_results(problem.outputs), operand, workspace, gradients["d_weight"]


def _backward(inputs, form: Form, d_log_prob, d_entropy, d_lse, operand, workspace: Tensor, d_weight: Optional[Tensor]):
    problem = problem_of(*inputs, form, operand)
    gradients = problem.gradients | dict(d_weight=d_weight)
    if gradients["d_hidden"] is not None:
        gradients["d_hidden"] = _allocated(gradients["d_hidden"], problem.device)
    x = problem.inputs["hidden"]
    cotangents = dict(log_prob=run.vector(d_log_prob, x), entropy=run.vector(d_entropy, x), lse=run.vector(d_lse, x))
    pair = pair_of(problem)
    if isinstance(pair, Exception):
        raise pair
    _engine.on_device(problem.device, pair.backward, problem.inputs, cotangents, gradients, workspace)
    hidden, weight, _, bias = inputs
    return run.finished(gradients, (hidden, weight, bias))


class SavedHead(autograd.Function):
    """``autograd.Head`` for plain tensors on a GPU, which saves exponentials if possible, or raises if ``required``."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, form, required):
        ctx.form = form
        ctx.set_materialize_grads(False)
        found = _forward((hidden, weight, target, bias), form, required)
        results, *saved = (run.run_head(hidden, weight, target, bias, form), None, None, None) if found is None else found
        ctx.save_for_backward(hidden, weight, target, bias, *saved)
        ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, _):
        autograd.check_backward(d_log_prob, d_entropy, d_lse)
        nothing = (None,) * 6
        if d_log_prob is None and d_entropy is None and d_lse is None:
            return nothing
        *inputs, operand, workspace, d_weight = ctx.saved_tensors
        # The saved exponentials serve one backward, and under a softcap no gradient of the entropy.
        capped = d_entropy is not None and bool(ctx.form.options.softcap)
        if workspace is None or capped or autograd.keeps_graph():
            gradients = run.run_head_backward(*inputs, d_log_prob, d_entropy, d_lse, ctx.form)
        else:
            gradients = _backward(inputs, ctx.form, d_log_prob, d_entropy, d_lse, operand, workspace, d_weight)
        d_hidden, d_weight, d_bias = autograd.needed(gradients, ctx.form.needs)
        return d_hidden, d_weight, None, d_bias, None, None


head = autograd.eager_apply(SavedHead)
