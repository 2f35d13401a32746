"""F.scaled_dot_product_attention as one operation on every device, and its gradient as another."""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from logitless._autochunk.attention import LARGEST_DIM, LARGEST_FAST_DIM, Attention
from logitless._autochunk.lower import broadcast_shapes
from logitless.torch._autochunk.aten import handles
from logitless.torch._autochunk.dtypes import DTYPES

# Operations that stand for attention in traces. They define shapes alone and never run: q [B, H, T, D], k and v [B,
# Hkv, S, D], bias [1 or B, 1 or H, 1 or T, S].
_FORWARD = "(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? bias, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
torch.library.define("logitless::attention", _FORWARD)
torch.library.define("logitless::attention_backward", _BACKWARD)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("logitless::attention")
def _(q, k, v, bias, causal, scale):
    return _contiguous(q), q.new_empty(q.shape[:3], dtype=DTYPES.wide(q.dtype))


@torch.library.register_fake("logitless::attention_backward")
def _(q, k, v, out, lse, d_out, bias, causal, scale):
    return _contiguous(q), _contiguous(k), _contiguous(v)


def _setup(ctx, inputs, output):
    q, k, v, bias, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, bias)


def _backward(ctx, d_out, d_lse):
    *saved, bias = ctx.saved_tensors
    made = torch.ops.logitless.attention_backward(*saved, d_out, bias, ctx.causal, ctx.scale)
    return (*made, None, None, None)


torch.library.register_autograd("logitless::attention", _backward, setup_context=_setup)


class OneAttention(TorchFunctionMode):
    """Replaces F.scaled_dot_product_attention by the operation above wherever their meanings agree."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = _attention(*args, **kwargs) if func is F.scaled_dot_product_attention else None
        return func(*args, **kwargs) if made is None else made


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Returns attention as the operation above, or None if the operation cannot express the arguments."""
    tensors = _cast([query, key, value])
    q, k, v = tensors
    if dropout_p != 0 or any(t.dim() < 2 or t.numel() == 0 for t in tensors):
        return None
    if q.dtype not in DTYPES[:4] or {t.dtype for t in tensors} != {q.dtype}:
        return None
    if q.shape[-1] != k.shape[-1] or k.shape[-2:] != v.shape[-2:]:
        return None
    leads = _leads(q.shape[:-2], k.shape[:-2], v.shape[:-2], enable_gqa)
    if leads is None:
        return None
    q, k, v = (_of_rank_4(t, lead) for t, lead in zip(tensors, leads))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if attn_mask is None:
        made = _aligned(q, k, v, scale) if is_causal else _one(q, k, v, False, scale)
    else:
        bias = None if is_causal or len(leads[0]) > 2 else _bias(attn_mask, q, k)
        if bias is None:
            return None
        made = _one(q, k, v, False, scale, bias)
    return made.reshape(*leads[0], *made.shape[2:])


def _cast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Casts as autocast does."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    return [
        t.to(torch.get_autocast_dtype(device)) if t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]


def _leads(q, k, v, grouped: bool) -> list[tuple[int, ...]] | None:
    """Broadcasts the dimensions before the last two. With grouped heads, k and v keep their own number of heads."""
    if grouped and min(len(q), len(k), len(v)) < 1:
        return None
    try:
        if not grouped:
            return [broadcast_shapes(q, k, v)] * 3
        lead = broadcast_shapes(q[:-1], k[:-1], v[:-1])
    except ValueError:
        return None
    if k[-1] != v[-1] or q[-1] % k[-1] != 0:
        return None
    return [(*lead, heads) for heads in (q[-1], k[-1], v[-1])]


def _of_rank_4(t: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    t = t.expand(*lead, *t.shape[-2:])
    heads = lead[-1] if lead else 1
    return t if t.dim() == 4 else t.reshape(math.prod(lead) // heads, heads, *t.shape[-2:])


def _bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Converts a mask to an additive bias. Returns None if its shape does not fit or it needs a gradient."""
    whole = (*q.shape[:3], k.shape[2])
    if mask.requires_grad or mask.dim() > 4 or mask.dtype not in (torch.bool, q.dtype):
        return None
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    if any(size not in (1, of) for size, of in zip(mask.shape, whole)):
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, float("-inf")).to(q.dtype)
    return mask.expand(*mask.shape[:3], whole[3])


def _one(q, k, v, causal: bool, scale: float, bias=None) -> torch.Tensor:
    return torch.ops.logitless.attention(q, k, v, bias, causal, scale)[0]


def _aligned(q, k, v, scale: float) -> torch.Tensor:
    """Aligns causal masks. PyTorch aligns the mask at the first query and key, the operation at the last of both."""
    queries, keys = q.shape[2], k.shape[2]
    if queries <= keys:
        return _one(q, k[:, :, :queries], v[:, :, :queries], True, scale)
    first = _one(q[:, :, :keys], k, v, True, scale)
    return torch.cat([first, _one(q[:, :, keys:], k, v, False, scale)], 2)


# --- lowering


def _has_kernel(w, q, bias) -> bool:
    """Returns whether attention has a kernel. The library has none for f64; its GPU kernels support no bias and no long
    rows."""
    if q.dtype == torch.float64 or (bias is not None and w.native and w.device != "cpu"):
        return False
    if w.native or w.device == "cpu":
        return w.device == "cpu" or q.shape[3] <= LARGEST_DIM
    return q.shape[3] <= LARGEST_DIM and q.shape[3] % 8 == 0  # PyTorch's fused kernels need a multiple of 8


def slow_on_gpu(graph: Optional[torch.fx.GraphModule]) -> bool:
    """Returns whether a graph has attention that is slower by the library's GPU kernels than by PyTorch's.

    In fp32 these have no tensor cores, and from 129 columns on they compute the scores three times.
    """
    if graph is None:
        return False
    for node in graph.graph.nodes:
        if node.target in (torch.ops.logitless.attention.default, torch.ops.logitless.attention_backward.default):
            q = node.args[0].meta["val"]
            if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[3] > LARGEST_FAST_DIM:
                return True
    return False


@handles("attention")
def _forward_rule(w, out, q, k, v, bias, causal, scale):
    attention = Attention(causal, scale, bias)
    return (attention.attend if _has_kernel(w, q, bias) else attention.attend_plainly)(w, q, k, v)


@handles("attention_backward")
def _backward_rule(w, out, q, k, v, result, lse, d_out, bias, causal, scale):
    attention = Attention(causal, scale, bias)
    made = attention.gradients if _has_kernel(w, q, bias) else attention.gradients_plainly
    return made(w, q, k, v, result, lse, d_out)
