"""F.ctc_loss with lengths in tensors. PyTorch's alphas are as wide as the longest target, which depends on values. Here
they have the width that padded targets allow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from logitless._autochunk.externs import Call
from logitless.torch._autochunk.aten import handles

# Operations that stand for it in traces. They define shapes alone and never run: log_probs [T, N, V], targets [N, S] or
# concatenated, lengths [N]. Alphas are [N, T, 2 S + 1]. Concatenated targets have none; their gradient recomputes them.
_FORWARD = (
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity)"
    " -> (Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor d_losses, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, Tensor losses,"
    " Tensor alphas, int blank, bool zero_infinity) -> Tensor"
)
torch.library.define("logitless::ctc_loss", _FORWARD)
torch.library.define("logitless::ctc_loss_backward", _BACKWARD)


@torch.library.register_fake("logitless::ctc_loss")
def _(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity):
    frames, count, _ = log_probs.shape
    shape = (count, frames, 2 * targets.shape[1] + 1) if targets.dim() == 2 else (0,)
    return log_probs.new_empty(count), log_probs.new_empty(shape)


@torch.library.register_fake("logitless::ctc_loss_backward")
def _(d_losses, log_probs, *rest):
    return log_probs.new_empty(log_probs.shape)


def _setup(ctx, inputs, output):
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, d_losses, d_alphas):
    made = torch.ops.logitless.ctc_loss_backward(d_losses, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return made, None, None, None, None, None


torch.library.register_autograd("logitless::ctc_loss", _backward, setup_context=_setup)


class OneCtc(TorchFunctionMode):
    """Replaces F.ctc_loss by the operation above where PyTorch's own would read the lengths."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = _ctc_loss(*args, **kwargs) if func is F.ctc_loss else None
        return func(*args, **kwargs) if made is None else made


def _ctc_loss(
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
) -> torch.Tensor | None:
    """Returns the loss by the operation above, or None if the operation cannot express the arguments."""
    if targets.dim() not in (1, 2) or reduction not in ("none", "mean", "sum"):
        return None
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()
    x = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    if x.dtype not in (torch.float32, torch.float64) or x.dim() != 3 or not 0 <= blank < x.shape[2]:
        return None
    lengths = [torch.as_tensor(n).to(torch.long).reshape(-1) for n in (input_lengths, target_lengths)]
    rows = targets.shape[:1] if targets.dim() == 2 else x.shape[1:2]
    if {rows, *(n.shape for n in lengths)} != {x.shape[1:2]}:
        return None
    losses = torch.ops.logitless.ctc_loss(x, targets.to(torch.long), *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0, losses)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses.device, losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses if log_probs.dim() == 3 else losses.squeeze(0)


# --- lowering


def _call(helper: str, options: str, count: int | None) -> Call:
    return Call(
        "aten._ctc_loss" + ("" if count else "_backward"),
        f"{helper} {options}",
        lambda texts, read: f"{helper}({', '.join(texts)}, {options})",
        count,
        helper,
    )


@handles("ctc_loss")
def _forward_rule(w, out, log_probs, targets, input_lengths, target_lengths, blank, zero_infinity):
    operands = [log_probs, targets, input_lengths, target_lengths]
    call = _call("_ctc_loss", f"{blank}, {zero_infinity}", 2)
    padded = targets.rank == 2
    rows = [[1, 0, 0, 0, 0]] if padded else []
    losses = w.extern(call, operands, out[0].dtype, out[0].shape, 0, rows)
    alphas = w.extern(call, operands, out[1].dtype, out[1].shape, 1, rows) if padded else w.number(0, out[1].dtype, (0,))
    return losses, alphas


@handles("ctc_loss_backward")
def _backward_rule(w, out, d_losses, log_probs, targets, il, tl, losses, alphas, blank, zero_infinity):
    padded = targets.rank == 2
    operands = [d_losses, log_probs, targets, il, tl, *([losses, alphas] if padded else [])]
    call = _call("_ctc_loss_backward", f"{blank}, {zero_infinity}", None)
    rows = [[0, 1, 0, 0, 0, 0, 0, 1]] if padded else []
    return w.extern(call, operands, out.dtype, out.shape, 0, rows)
