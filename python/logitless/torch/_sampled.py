"""Samples and best entries by the library's own kernels on a GPU: one GEMM for ids and log-probabilities
(``c_sample.h``)."""

from __future__ import annotations

import ast
from ctypes import byref, c_float, c_void_p
from typing import Any, Mapping, Optional

import torch
from torch import Tensor, nn

from .. import _library as c
from .._library import lib, parse_bytes
from . import _engine, _memory
from ._backend import why_portable
from ._precision import autocast_dtype, follows_torch
from .autograd import transformed

_PLAIN = (Tensor, nn.Parameter)
_TENSORS = ("hidden", "weight", "bias", "logit_bias", "temperature", "top_p", "min_p", "counter", "key")
_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}  # with the values that change nothing
_FLOATS = ("bias", "logit_bias", *_NUMBERS)


def serves(hidden: Any, weight: Any, given: Mapping[str, Any], memory_budget: Any) -> bool:
    """Returns whether ``sampled`` and ``best`` serve a call. hidden, weight: as the caller gave them."""
    x, w = given["hidden"], given["weight"]
    if transformed():
        return False
    if x.device.type != "cuda" or x.shape[0] == 0 or w.dtype != x.dtype:
        return False
    if x.dtype == torch.float32:  # log-probabilities in TF32, of autocast or of other chunks have other bits
        if memory_budget is not None or autocast_dtype("cuda") is not None or follows_torch(x):
            return False
    elif x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.compiler.is_compiling() and (type(hidden) not in _PLAIN or type(weight) not in _PLAIN):
        return False
    return not why_portable("cuda", x.device.index, x.dtype)


def sampled(
    given: Mapping[str, Any], key: int | Tensor | None, filters: Any, memory_budget: Any
) -> tuple[Tensor, Tensor]:
    """Returns tokens [N] int64 and log-probabilities [N].

    given: hidden [N, D], weight [V, D] and bias of the head; logit_bias; temperature, top_p and min_p, numbers or [N];
    counter [N]. key: a seed, or int64 [2]; None: greedy.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    numbers = [None if name in tensors else given.get(name, unused) for name, unused in _NUMBERS.items()]
    if filters.greedy:
        numbers[0] = 0.0
    if isinstance(key, Tensor):
        tensors["key"] = key
    form = (filters.softcap, filters.scale, 0 if filters.greedy else filters.top_k, *numbers)
    if torch.compiler.is_compiling():
        return torch.ops.logitless.sampled(list(tensors.values()), ",".join(tensors), *form, repr(memory_budget))
    return _run(tensors, *form, key if isinstance(key, int) else 0, memory_budget)


def _run(tensors, softcap, scale, top_k, temperature, top_p, min_p, seed, memory_budget) -> tuple[Tensor, Tensor]:
    made = [_dense(name, tensors.get(name)) for name in _TENSORS]
    hidden = made[0]
    tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    log_prob = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    given = {name: None if n is None else c_float(n).value for name, n in zip(_NUMBERS, (temperature, top_p, min_p))}
    # A plan serves all temperatures but 0, and all numbers of a filter that keep fewer entries.
    used = given["temperature"] == 0, given["top_p"] not in (None, 1), given["min_p"] not in (None, 0)
    key = "sample", softcap, scale, top_k, *used, memory_budget, _engine.place(hidden.device), *_layouts(made)
    numbers = dict(softcap=softcap, logit_scale=scale, seed=seed % (1 << 64), top_k=top_k)
    numbers |= {name: _NUMBERS[name] if n is None else n for name, n in given.items()}
    groups = dict(zip(_TENSORS, made)), dict(tokens=tokens, log_prob=log_prob)
    _enqueue("sample", key, numbers, groups, memory_budget)
    return tokens, log_prob


def best(given: Mapping[str, Any], target: Optional[Tensor], k: int, softcap: float, scale: float, memory_budget: Any):
    """Returns the log-probability [N] of the target or None, and the k largest [N, K] with their ids int64.

    given: hidden [N, D], weight [V, D] and bias of the head. target: [N].
    """
    tensors = {name: given[name] for name in ("hidden", "weight", "bias") if name in given}
    if target is not None:
        tensors["targets"] = target
    if torch.compiler.is_compiling():
        names = ",".join(tensors)
        found = torch.ops.logitless.best(list(tensors.values()), names, k, softcap, scale, repr(memory_budget))
    else:
        found = _run_best(tensors, k, softcap, scale, memory_budget)
    return None if target is None else found[2], *found[:2]


def _run_best(tensors, k, softcap, scale, memory_budget) -> tuple[Tensor, Tensor, Tensor]:
    names = "hidden", "weight", "bias", "targets"
    made = [_dense(name, tensors.get(name)) for name in names]
    values, ids, log_prob = _empty_best(made[0], made[3] is not None, k)
    key = "best", k, softcap, scale, memory_budget, _engine.place(made[0].device), *_layouts(made)
    outputs = dict(top_log_probs=values, top_ids=ids, log_prob=None if made[3] is None else log_prob)
    numbers = dict(k=k, softcap=softcap, logit_scale=scale)
    _enqueue("top_logprobs", key, numbers, (dict(zip(names, made)), outputs), memory_budget)
    return values, ids, log_prob


def _empty_best(hidden: Tensor, with_target: bool, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns top_log_probs, top_ids and log_prob, which is empty without a target."""
    tokens = hidden.shape[0]
    values = hidden.new_empty((tokens, k), dtype=torch.float32)
    ids = hidden.new_empty((tokens, k), dtype=torch.int64)
    return values, ids, hidden.new_empty(tokens if with_target else 0, dtype=torch.float32)


def _layouts(tensors: list[Optional[Tensor]]) -> list[Any]:
    return [None if t is None else (t.shape, t.dtype) for t in tensors]


def _enqueue(what: str, key: Any, numbers: dict[str, Any], groups, memory_budget: Any) -> None:
    """Runs a call with the plan of its key. groups: inputs and outputs by name."""
    hidden = groups[0]["hidden"]

    def run() -> None:
        plan = _engine.calls.remembered(key, lambda: _Plan(what, numbers, groups, memory_budget))
        plan.run(numbers, [t for group in groups for t in group.values() if t is not None])

    _engine.on_device(hidden.device, run)


def _dense(name: str, t: Optional[Tensor]) -> Optional[Tensor]:
    """Returns a tensor as the library takes it: contiguous, aligned to 16 bytes, weights of entries in float32."""
    if t is None:
        return None
    t = (t.float() if name in _FLOATS else t).contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


_CALLS = {
    "sample": ((c.SampleInputs, c.SampleOutputs), c.SampleOptions),
    "top_logprobs": ((c.TopLogprobsInputs, c.TopLogprobsOutputs), c.TopLogprobsOptions),
}


class _Plan:
    """A planned call of ``c_sample.h``. A run sets pointers and numbers."""

    def __init__(self, what: str, numbers: dict[str, Any], groups, memory_budget: Any):
        self.device = groups[0]["hidden"].device
        self.context = _engine._context(self.device)
        structs, options = _CALLS[what]
        filled = [_engine.fill(struct, tensors) for struct, tensors in zip(structs, groups)]
        self.fields = [field for _, fields in filled for field in fields]
        self.structs = [struct for struct, _ in filled]
        self.options = c.new(options)
        self._set(numbers)
        self.plan = c_void_p()
        pointers = byref(self.options), *[byref(s) for s in self.structs]
        plan = getattr(lib, f"logitless_plan_{what}")
        c.check(plan(self.context.handle, *pointers, parse_bytes(memory_budget), byref(self.plan)))
        self.call = getattr(lib, f"logitless_{what}")
        self.bytes = lib.logitless_sample_plan_workspace_bytes(self.plan)
        self.arguments = self.context.handle, self.plan, *pointers

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "plan", None):
            lib.logitless_sample_plan_destroy(self.plan)

    def _set(self, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            setattr(self.options, name, value)

    def run(self, numbers: dict[str, Any], tensors: list[Tensor]) -> None:
        self._set(numbers)
        for field, t in zip(self.fields, tensors, strict=True):
            field.data = _memory.address(field.name, t)
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        c.check(self.call(*self.arguments, workspace.data_ptr(), self.bytes))


# --- Operators of a graph of torch.compile.


@torch.library.custom_op(
    "logitless::sampled", mutates_args=(),
    schema="(Tensor[] tensors, str names, float softcap, float scale, int top_k, float? temperature, float? top_p, float? min_p, str memory_budget) -> (Tensor, Tensor)",
)
def _sampled(tensors, names, softcap, scale, top_k, temperature, top_p, min_p, memory_budget):
    given = dict(zip(names.split(","), tensors))
    return _run(given, softcap, scale, top_k, temperature, top_p, min_p, 0, ast.literal_eval(memory_budget))


@_sampled.register_fake
def _(tensors, names, softcap, scale, top_k, temperature, top_p, min_p, memory_budget):
    tokens = tensors[0].shape[0]
    return tensors[0].new_empty(tokens, dtype=torch.int64), tensors[0].new_empty(tokens, dtype=torch.float32)


@torch.library.custom_op(
    "logitless::best", mutates_args=(),
    schema="(Tensor[] tensors, str names, int k, float softcap, float scale, str memory_budget) -> (Tensor, Tensor, Tensor)",
)
def _best(tensors, names, k, softcap, scale, memory_budget):
    return _run_best(dict(zip(names.split(","), tensors)), k, softcap, scale, ast.literal_eval(memory_budget))


@_best.register_fake
def _(tensors, names, k, softcap, scale, memory_budget):
    return _empty_best(tensors[0], "targets" in names.split(","), k)
