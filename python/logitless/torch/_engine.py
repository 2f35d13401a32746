"""Calls of the C ABI on torch tensors. What does not change between calls of one shape is built once."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_void_p
import torch

from .. import _library as c
from .._library import lib
from .._options import HeadOptions, LossOptions, struct_of

DTYPES = {
    torch.float32: c.F32,
    torch.bfloat16: c.BF16,
    torch.float16: c.F16,
    torch.int32: c.I32,
    torch.int64: c.I64,
}

_LEAST_BUDGET, _MOST_BUDGET = 16 << 20, 512 << 20
_KEPT_BYTES = 1 << 20  # a workspace as small stays from call to call; calls of one stream and thread do not overlap
_MOST_CALLS = 256  # of different shapes and options that a thread keeps


def _tensor_struct(t: torch.Tensor) -> c.Tensor:
    s = c.Tensor()
    s.data = t.data_ptr() or 64  # an empty tensor has no memory, which is no mistake
    s.dtype = DTYPES[t.dtype]
    s.rank = t.dim()
    s.shape[: t.dim()] = t.shape
    s.strides[: t.dim()] = t.stride()
    return s


class _Call:
    """One C call with its plan: new pointers are all that a run sets."""

    def __init__(self, device: torch.device, options, structs, request_bytes, plan_function, run_function, extra):
        self.context = _context(device)
        self.structs = structs
        self.options = options
        self.run_function = run_function
        self.extra = extra
        self.plan = c_void_p()

        def plan(budget):
            request = c.new(c.PlanRequest)
            request.memory_budget, request.kind = budget, c.PLAN_KINDS["any"]
            pointers = [byref(s) for s, _ in structs]
            return plan_function(self.context.handle, byref(options), *pointers, byref(request), byref(self.plan))

        status = 1
        if request_bytes:
            status = plan(request_bytes)
        else:
            budget = _default_budget(structs)
            while status == 1 and budget <= _MOST_BUDGET:  # less than any plan takes: twice as much
                status = plan(budget)
                budget *= 2
            if status == 1:
                status = plan(0)
        c.check(status)
        self.kept: torch.Tensor | None = None
        self.workspace_bytes = lib.logitless_plan_workspace_bytes(self.plan)
        self.arguments = (
            self.context.handle,
            self.plan,
            byref(options),
            *[byref(s) for s, _ in structs],
        )
        # Fields in the order in which run() takes tensors.
        self.fields = [field for _, fields in structs for field in fields]

    def __del__(self):
        if getattr(self, "plan", None):
            lib.logitless_plan_destroy(self.plan)

    def run(self, tensors, device):
        for field, tensor in zip(self.fields, tensors):
            field.data = tensor.data_ptr() or 64
        workspace = self.kept
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            if self.workspace_bytes <= _KEPT_BYTES:
                self.kept = workspace
        status = self.run_function(*self.arguments, workspace.data_ptr(), self.workspace_bytes, *self.extra)
        if status:
            c.check(status)


def _default_budget(structs) -> int:
    """An eighth of the fp32 logits: nothing is saved by a workspace that is as large as they are."""
    hidden, weight = structs[0][1][:2]
    tokens = 1
    for d in range(hidden.rank - 1):
        tokens *= hidden.shape[d]
    return min(_MOST_BUDGET, max(_LEAST_BUDGET, tokens * weight.shape[0] * 4 // 8))


def _context(device: torch.device) -> c.Context:
    if device.type == "cpu":
        return c.context(threads=torch.get_num_threads())
    stream = torch.cuda.current_stream(device)
    return c.context(c.CUDA, stream.device_index, stream.cuda_stream)


def _place(device: torch.device):
    """What of a device a call depends on."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return device.index, torch.cuda.current_stream(device).cuda_stream


_calls = threading.local()


def _call(kind, options, tensors: dict[str, torch.Tensor | None], device, build) -> tuple[_Call, list]:
    present = [t for t in tensors.values() if t is not None]
    key = (
        kind,
        options,
        device.type,
        _place(device),
        *[None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()],
    )
    cache = _calls.__dict__
    found = cache.get(key)
    if found is None:
        if len(cache) >= _MOST_CALLS:
            cache.clear()
        found = cache[key] = build()
    return found, present


def _fill(struct_type, tensors):
    """A struct of tensor pointers, and the tensor structs behind it in order."""
    struct, fields = c.new(struct_type), []
    for name, tensor in tensors.items():
        if tensor is not None:
            fields.append(_tensor_struct(tensor))
            setattr(struct, name, ctypes.pointer(fields[-1]))
    return struct, fields


def _run(kind, options, groups, device, plan_function, run_function, extra=()):
    """groups: (struct type, {field: tensor}) in the order of the C call's arguments."""
    tensors = {f"{i}.{name}": t for i, (_, group) in enumerate(groups) for name, t in group.items()}

    def build():
        structs = [_fill(struct_type, group) for struct_type, group in groups]
        if kind == "loss":
            structs[0][0].grad_loss = 1.0
        return _Call(device, struct_of(options), structs, options.memory_budget, plan_function, run_function, extra)

    if device.type == "cuda":
        with torch.cuda.device(device):
            call, present = _call(kind, options, tensors, device, build)
            call.run(present, device)
        return
    call, present = _call(kind, options, tensors, device, build)
    call.run(present, device)


def prepare_cross_entropy(options: LossOptions, inputs: dict, outputs: dict) -> _Call:
    """The call alone. Its run() takes the tensors that are not None, in this order."""
    structs = [_fill(c.CrossEntropyInputs, inputs), _fill(c.CrossEntropyOutputs, outputs)]
    structs[0][0].grad_loss = 1.0
    return _Call(
        inputs["hidden"].device,
        struct_of(options),
        structs,
        options.memory_budget,
        lib.logitless_plan_cross_entropy,
        lib.logitless_cross_entropy,
        (None,),
    )


def cross_entropy(options: LossOptions, inputs: dict, outputs: dict) -> None:
    """logitless_cross_entropy: writes ``outputs``, tensors by the names of the C struct; None is no tensor."""
    groups = [(c.CrossEntropyInputs, inputs), (c.CrossEntropyOutputs, outputs)]
    _run(
        "loss",
        options,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_cross_entropy,
        lib.logitless_cross_entropy,
        (None,),
    )


def head_forward(options: HeadOptions, inputs: dict, outputs: dict) -> None:
    groups = [(c.HeadInputs, inputs), (c.HeadOutputs, outputs)]
    _run(
        "head",
        options,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_head_forward,
        lib.logitless_head_forward,
    )


def head_backward(options: HeadOptions, inputs: dict, cotangents: dict, gradients: dict) -> None:
    groups = [(c.HeadInputs, inputs), (c.HeadCotangents, cotangents), (c.HeadGradients, gradients)]
    _run(
        "head_backward",
        options,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_head_backward,
        lib.logitless_head_backward,
    )
