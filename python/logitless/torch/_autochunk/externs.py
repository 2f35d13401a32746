"""ATen operations without a form in a tensor program. PyTorch runs them, at once or chunk by chunk along independent
dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.utils._pytree as pytree

from logitless._autochunk.externs import SUM, WHOLE, Call, Row, spread_rows
from logitless._autochunk.lower import Value, Writer, rules_of
from logitless.torch._autochunk.aten import axis_of
from logitless.torch._autochunk.aten_random import DRAWING


def why_not(w: Writer, target, args: Sequence, kwargs: dict, out) -> str:
    """Returns the reason why PyTorch cannot run an operation inside the program; "" if it can."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return "expected an ATen operation"
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.name.removeprefix("aten::") in DRAWING:
        return "it draws random numbers in a way of its own"
    if target._schema.is_mutable or _keeps_statistics(target, args, kwargs):
        return "it writes into a tensor"
    if target is torch.ops.aten.as_strided.default:
        return "it depends on how tensors lie in memory"
    unknown = next((o.dtype for o in _tensors(out) if w.dtypes.name(o.dtype) is None), None)
    if unknown is not None:
        return f"dtype {unknown} has no form in a tensor program; expected one of {w.dtypes.listed()}"
    return "the library has no code for it; executor='python' takes it" if w.native else ""


def _tensors(out) -> list[torch.Tensor]:
    return [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor)]


def _keeps_statistics(target, args: Sequence, kwargs: dict) -> bool:
    """Returns whether it is a batch norm that updates running statistics. Some schemas do not declare that mutation."""
    named = _named(target, args, kwargs)
    running = next((named[name] for name in ("running_mean", "running_var") if named.get(name) is not None), None)
    return running is not None and bool(named.get("training", named.get("train", False)))


def _named(target, args: Sequence, kwargs: dict) -> dict:
    """Returns the arguments by the schema's names."""
    named = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    named.update(zip([a.name for a in target._schema.arguments], args))
    return {**named, **kwargs}


class _Mask:
    """Stands for the argument that selects the results."""


def _source(x, operands: list[Value], device: str) -> list:
    """Returns an argument as Python source: texts, with the index of an operand in place of a tensor."""
    if isinstance(x, Value):
        operands.append(x)
        return [len(operands) - 1]
    if isinstance(x, (list, tuple)):
        parts = [part for item in x for part in (", ", *_source(item, operands, device))][1:]
        return ["[", *parts, "]"]
    if isinstance(x, torch.device):
        return ["device" if x.type == device else f'torch.device("{x}")']
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return [str(x)]
    if isinstance(x, float) and not math.isfinite(x):
        return [f'float("{x}")']
    return [repr(x)]


def _call(target, args: Sequence, kwargs: dict, operands: list[Value], device: str) -> tuple[Call, dict]:
    """Returns the call, and its arguments by the schema's names. operands: extended by the call's tensors."""
    named = _named(target, args, kwargs)
    given = [a.name for a in target._schema.arguments[: len(args)]]
    shown: list = []
    for place, (name, x) in enumerate([*zip(given, args), *kwargs.items()]):
        shown += ([", "] if place else []) + ([f"{name}="] if place >= len(args) else [])
        shown += [_Mask] if name == "output_mask" else _source(x, operands, device)
    returns = target._schema.returns
    count = len(returns) if len(returns) > 1 else None
    view = ".clone()" if any(r.alias_info is not None for r in returns) else ""
    name = f"torch.ops.{target.namespace}.{str(target).partition('.')[2]}"

    def emit(texts: Sequence[str], read: Sequence[int]) -> str:
        mask = str([k in read for k in range(count or 1)])
        made = (texts[p] if isinstance(p, int) else mask if p is _Mask else p for p in shown)
        return f"{name}({''.join(made)}){view}"

    key = emit([f"%{i}" for i in range(len(operands))], range(count or 1))
    return Call(str(target), key, emit, count), named


def run_as_it_is(w: Writer, target, out, args: Sequence, kwargs: dict, wanted: Sequence[int]):
    """Returns the results of an operation that PyTorch runs. wanted: the indices of results that are read, if there are
    several."""
    operands: list[Value] = []
    call, named = _call(target, args, kwargs, operands, w.device)
    outs = out if isinstance(out, (list, tuple)) else [out]
    if call.count != (len(outs) if isinstance(out, (list, tuple)) else None):
        raise w.refuse(f"its {len(outs)} results are a list, which has no form in a tensor program")
    made: list[Value | None] = [None] * len(outs)
    for k in wanted if call.count is not None else [0]:
        along = _along(target, named, operands, k, outs[k])
        made[k] = w.extern(call, operands, outs[k].dtype, tuple(outs[k].shape), k, along)
    return tuple(made) if call.count is not None else made[0]


# --- independent dimensions of operations: rows for one result, by the operation's name

_ALONG: dict[str, Callable] = {}
_rules = rules_of(_ALONG)


def _along(target, named: dict, operands: list[Value], k: int, out: torch.Tensor) -> list[Row]:
    name = target._schema.name.split("::")[1]
    shapes = [v.shape for v in operands]
    if torch.Tag.pointwise in target.tags:
        return spread_rows(shapes, out.shape, range(out.dim()))
    rule = _ALONG.get(name)
    return [] if rule is None else [row for row in rule(named, shapes, k, tuple(out.shape)) if _fits(row, shapes)]


def _fits(row: Row, shapes: Sequence[Sequence[int]]) -> bool:
    return any(at != WHOLE and shape[at] > 1 for at, shape in zip(row, shapes))


@_rules("cumprod", "cummax", "cummin", "prod", "mode", "nanmedian", "renorm")
def _all_but_one(named, shapes, k, out):
    """Chunks along every dimension except the one that is scanned or reduced."""
    [shape] = shapes[:1]
    if "dim" not in named or len(shapes) != 1 or not shape:
        return []
    axis = axis_of(named["dim"], len(shape))
    gone = len(out) < len(shape)
    others = [d for d in range(len(shape)) if d != axis]
    if named.get("maxnorm") is not None:
        return [[axis, axis]]
    return [[d, d - (gone and d > axis)] for d in others]


@_rules("convolution")
def _convolution(named, shapes, k, out):
    """Chunks along images and output channels."""
    rest = [0] * (len(shapes) - 2)
    rows = [[0, *[WHOLE] * (len(shapes) - 1), 0]]
    if named["groups"] == 1:
        rows.append([WHOLE, 1 if named["transposed"] else 0, *rest, 1])
    return rows


@_rules("convolution_backward")
def _convolution_backward(named, shapes, k, out):
    return [[0, 0, WHOLE, 0 if k == 0 else SUM]]


@_rules("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward")
@_rules("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward")
def _of_images(named, shapes, k, out):
    """Chunks along images and channels: every feature map is independent."""
    return [[d] * (len(shapes) + 1) for d in range(len(out) - 2)]


@_rules("im2col", "col2im")
def _of_blocks(named, shapes, k, out):
    """Chunks along images: [N, C, H, W] and [N, C K, L]."""
    return [[0, 0]] if {len(shapes[0]), len(out)} == {4, 3} else []


@_rules("grid_sampler_2d", "grid_sampler_3d", "_cdist_forward")
def _of_examples(named, shapes, k, out):
    return [[0] * (len(shapes) + 1)] if len({shape[:1] for shape in shapes}) == 1 and len(out) > 2 else []
