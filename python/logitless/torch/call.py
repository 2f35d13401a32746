"""One call of ``linear_cross_entropy`` or ``linear_logprobs``: its checks, its tensors in the engine's form, and its
results."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import _token_loss
from .._options import PER_TOKEN, WEIGHTS, LossOptions, LossWeights, head_options, shape_text, weight_shapes
from . import _engine, _memory, _positions, autograd, data_parallel, dtensor, saved_head
from ._arguments import POSITIONS, Arguments, loss_options
from ._backend import is_native
from ._precision import autocast_dtype, follows_torch
from .quantized import QuantizedWeight
from .ranks import ALL, VocabShard
from .run import BIAS, EAGER, HIDDEN, OPERATOR, TRANSFORM, WEIGHT, Form, MainGrad

_PLAIN = (Tensor, nn.Parameter)
_INTEGERS = (torch.int32, torch.int64)


class Asked(NamedTuple):
    """Outputs that are asked of a head, besides log-probabilities and log-sum-exps."""

    argmax: bool = False
    entropy: bool = True  # some calls compute it anyway
    # Save exponentials from forward to backward. True: or raise; False: never; None: if possible.
    keep: Optional[bool] = False


class Call(NamedTuple):
    """A checked call in the engine's form, with a weight [V, D] and tensors of this rank."""

    hidden: Tensor  # [N, D] or [B, T, D]
    weight: Tensor
    target: Tensor  # [N] or [B, T], and [..., K] for weighted targets
    bias: Optional[Tensor]
    weights: LossWeights
    options: LossOptions
    shard: VocabShard
    own: bool  # each rank has a loss of its own tokens
    lead: torch.Size  # the shape of results per token
    per_token: int  # K for weighted targets, else 0
    divisor: Optional[Tensor]  # a normalizer that is a tensor divides the sum
    accuracy: bool  # the results that are asked for besides the loss
    lse: bool
    argmax: bool
    target_logits: bool

    def tensors(self):
        return *self[:4], *self.weights


# --- Keys of calls that were seen before.


def key_of(args: tuple, kwargs: dict) -> Any:
    """Returns the cache key of a call of plain eager tensors, or None. It has everything that the checks read, so a
    call that passed them once passes again."""
    if len(args) not in (3, 4) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    parts: list[Any] = []
    for place, t in enumerate(args):
        if t is None and place == 3:
            parts.append(None)
            continue
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_nested or t.is_neg():
            return None
        parts.append((t.shape, t.stride(), t.dtype, t.device, t.requires_grad))
    for name, value in kwargs.items():
        if value is not None and type(value) not in (bool, int, float, str):
            return None
        parts.append((name, type(value), value))  # the type distinguishes True from 1
    device = args[0].device.type
    if device in ("cpu", "cuda") and not is_native(args[0]):
        return None
    if device == "cpu":
        where: Any = torch.get_num_threads()
    elif device == "cuda":  # misaligned tensors are copied first
        where = _engine.current_stream(args[0].device), args[0].data_ptr() % 16, args[1].data_ptr() % 16
        if torch.float32 in (args[0].dtype, args[1].dtype):
            where = *where, follows_torch(args[0], torch.float32)
    else:
        return None
    casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (*parts, where, torch.is_grad_enabled(), casts)


# --- Checks.


def check_tensors(a: Arguments) -> None:
    """Checks that tensor arguments are tensors, or None if optional, and on hidden's device."""
    for name, t in zip((*POSITIONS[:4], *WEIGHTS), (a.hidden, a.weight, a.target, a.bias, *a.weights)):
        if isinstance(t, Tensor):
            _memory.check(name, t, a.hidden.device)
        elif t is not None or name in POSITIONS[:3]:
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    if isinstance(a.normalizer, Tensor):
        _memory.check_number("normalizer", a.normalizer, a.hidden.device)
        if a.normalizer.dim() or a.normalizer.dtype == torch.bool or a.normalizer.is_complex():
            kind = str(a.normalizer.dtype).removeprefix("torch.")
            raise ValueError(f"normalizer: expected a number or a scalar tensor, got {kind}{list(a.normalizer.shape)}")


def check_head(hidden, weight, bias, columns: int = -1) -> None:
    """Checks that the engine supports hidden, weight and bias. columns: the columns of weight if ranks hold column
    shards of it, else -1."""
    for name, t in (("hidden", hidden), ("weight", weight)):
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {t.dtype}")
    if hidden.dim() < 1:
        raise ValueError("hidden: expected [..., D], got a scalar")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden: expected [..., D] with at least one column, got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != (hidden.shape[-1] if columns < 0 else columns):
        raise ValueError(f"weight: expected [V, {hidden.shape[-1]}], got {list(weight.shape)}")
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias: expected floats, got {bias.dtype}")


def _shift_of(value, hidden: Tensor) -> int:
    """Returns the number of positions by which targets are shifted against hidden [..., T, D]."""
    if not isinstance(value, int):
        raise TypeError(f"shift: expected an int, True or False, got {value!r}")
    if value and hidden.dim() < 3:
        raise ValueError(f"shift: expected hidden [..., T, D], got {list(hidden.shape)} and {value}")
    if value and not 0 < value < hidden.shape[-2]:
        raise ValueError(f"shift: expected 0 to {hidden.shape[-2] - 1} for {hidden.shape[-2]} tokens, got {value}")
    return int(value)


def _chunk_bytes(chunk: int | str, hidden: Tensor, weight: Tensor) -> int:
    """Returns the bytes of a chunk's fp32 logits. A chunk is a number of tokens, or for "aspect_ratio:N" has 1 / N of
    hidden's elements."""
    if isinstance(chunk, int):
        return max(1, min(chunk, hidden.shape[:-1].numel()) * weight.shape[:-1].numel() * 4)
    return max(1, hidden.numel() * 4 // int(chunk.partition(":")[2] or 1))


def _soft_targets(target: Tensor, vocab: int, hidden: Tensor):
    """Returns class probabilities [..., V] as V weighted targets per token."""
    if target.shape[-1] != vocab or target.dim() != hidden.dim():
        raise ValueError(
            f"target: expected class probabilities {list(hidden.shape[:-1]) + [vocab]}, got {list(target.shape)}"
        )
    if vocab > 65536:
        raise NotImplementedError(
            f"target: class probabilities of {vocab} vocabulary entries are not supported, at most 65536; give the largest as target "
            "[..., K] and target_weight"
        )
    if target.requires_grad:
        raise NotImplementedError("target: class probabilities have no gradient here; detach them")
    classes = torch.arange(vocab, device=target.device).expand(target.shape)
    return classes, target.float() if target.dtype != torch.float64 else target


def _rows(hidden: Tensor, target: Tensor, per_token: int):
    """Returns hidden [N, D] or [B, T, D], the engine's forms for any number of leading dimensions, and target to match.
    """
    lead = hidden.shape[:-1]
    want = (*lead, per_token) if per_token else tuple(lead)
    if tuple(target.shape) != want:
        raise ValueError(f"target: expected {list(want)} for hidden {list(hidden.shape)}, got {list(target.shape)}")
    # Rows with one stride are used without a copy.
    if len(lead) == 1 or (len(lead) == 2 and hidden.stride(0) == lead[1] * hidden.stride(1)):
        return hidden, target
    tail = target.shape[len(lead):]
    return hidden.reshape(-1, hidden.shape[-1]), target.reshape(lead.numel(), *tail)


def _shaped(number: torch.dtype, name: str, t: Optional[Tensor], want, rows) -> Optional[Tensor]:
    """Returns checked weights in the engine's form."""
    if t is None:
        return None
    if tuple(t.shape) != tuple(want):
        raise ValueError(f"{name}: expected {list(want)}, got {list(t.shape)}")
    return t.reshape(rows).to(number)


def checked_call(a: Arguments, shard: VocabShard = ALL, own: bool = False) -> Call:
    """Checks and converts the arguments, whose tensors are local. Raises the errors of linear_cross_entropy."""
    options = loss_options(a)
    hidden, weight, target, weights = a.hidden, a.weight, a.target, a.weights
    check_head(hidden, weight, a.bias, shard.columns)
    vocab = shard.vocab if shard.group else weight.shape[0]
    if a.chunk is not None and not options.memory_budget:
        options = options._replace(memory_budget=-_chunk_bytes(a.chunk, hidden, weight))
    single = hidden.dim() == 1  # one token
    if single:
        hidden, target = hidden[None], target[None]
        given = ((name, getattr(weights, name)) for name in PER_TOKEN)
        weights = weights._replace(**{name: t[None] for name, t in given if t is not None})
    if target.dtype.is_floating_point:
        if weights.target_weight is not None:
            raise TypeError("target: expected int32 or int64 beside target_weight, got " + str(target.dtype))
        if a.ignore_index is not None:
            raise ValueError(f"ignore_index: expected None beside class probabilities, got {a.ignore_index}")
        if a.return_target_logits:
            raise ValueError("return_target_logits: expected False beside class probabilities, got True")
        target, of_targets = _soft_targets(target, vocab, hidden)
        weights = weights._replace(target_weight=of_targets)
    elif target.dtype not in _INTEGERS:
        raise TypeError(f"target: expected int32, int64 or class probabilities, got {target.dtype}")
    for name, t in zip(WEIGHTS, weights):
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: has no gradient here; detach it")
    shift = _shift_of(a.shift, hidden)
    if shift:
        hidden, target = hidden[..., : hidden.shape[-2] - shift, :], target[..., shift:]
        if any(getattr(weights, name) is not None for name in PER_TOKEN):
            raise NotImplementedError("shift: does not go with token_weight or target_weight; shift them yourself")
    if weights.target_weight is not None and target.dim() != hidden.dim():
        raise ValueError(
            f"target_weight: goes with target {shape_text(hidden.shape[:-1], 'K')}, K token ids for each token, got target "
            f"{list(target.shape)}; token_weight has one weight for each token"
        )
    per_token = 0 if weights.target_weight is None else target.shape[-1]
    lead = hidden.shape[:-1]
    hidden, target = _rows(hidden, target, per_token)
    rows, number = hidden.shape[:-1], torch.float64 if hidden.dtype == torch.float64 else torch.float32
    wanted = weight_shapes(vocab, lead, (per_token,))
    flat = wanted if len(rows) == len(lead) else weight_shapes(vocab, rows, (per_token,))
    weights = LossWeights(*map(functools.partial(_shaped, number), WEIGHTS, weights, wanted, flat))
    if a.accuracy and per_token:
        raise NotImplementedError("accuracy: needs one target a token")
    if shard.tokens and not own and a.accuracy:
        raise NotImplementedError("accuracy: not of sharded tokens; compare return_argmax with the targets")
    divisor = a.normalizer if isinstance(a.normalizer, Tensor) else None
    return Call(
        hidden, weight, target, a.bias, weights,
        options if divisor is None else options._replace(reduction="sum"), shard, own, torch.Size() if single else lead,
        per_token, divisor, bool(a.accuracy), bool(a.return_lse), bool(a.return_argmax), bool(a.return_target_logits),
    )


# --- The form of a call, and its results.


def compute_dtype(hidden: Tensor, weight: Tensor, blocks: bool = False) -> Optional[torch.dtype]:
    """Returns the dtype that hidden and weight are cast to, or None: autocast's, except for float64, as in PyTorch;
    or fp32 if one of them has it, which 16 bits are exact in. blocks: the call takes a 16-bit weight beside fp32 hidden
    states as it is, without a copy of it. Gradients have the dtypes of their tensors."""
    casts = autocast_dtype(hidden.device.type)
    if casts is not None and hidden.dtype != torch.float64:
        return casts
    if hidden.dtype == weight.dtype:
        return None
    narrow = weight.dtype if hidden.dtype == torch.float32 and blocks else hidden.dtype
    if torch.float32 in (hidden.dtype, weight.dtype) and narrow in (torch.bfloat16, torch.float16):
        return torch.float32
    other = "16 bits beside float32" if hidden.dtype == torch.float32 and blocks else "float32 beside 16 bits"
    raise TypeError(
        f"weight: expected {hidden.dtype}, the dtype of hidden, or {other}, got {weight.dtype}; cast one, or use "
        "torch.autocast"
    )


def needs_of(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> int:
    if not torch.is_grad_enabled():
        return 0
    return (
        (HIDDEN if hidden.requires_grad else 0)
        | (WEIGHT if weight.requires_grad else 0)
        | (BIAS if bias is not None and bias.requires_grad else 0)
    )


def way_of(*tensors: Optional[Tensor]) -> str:
    """Returns how the gradients of a call are recorded. Eager code skips the dispatcher; tracers, transforms of
    torch.func and other tensor classes do not."""
    if autograd.transformed():
        return TRANSFORM
    if torch.compiler.is_compiling():
        return OPERATOR
    for t in tensors:
        if t is not None and type(t) not in (*_PLAIN, QuantizedWeight):
            return OPERATOR
    return EAGER


def with_fixed_lse(a: Arguments) -> Any:
    """Computes linear_cross_entropy of plain tensors, in whose results an lse has no gradient and costs nothing."""
    check_tensors(a)
    return results_of(checked_call(a), fixed_lse=True)


def cross_entropy(
    a: Arguments, spread: dtensor.Spread = dtensor.Spread(), key: Any = None, main_grad: Optional[MainGrad] = None
) -> Any:
    """Computes linear_cross_entropy. key: that of ``key_of``. main_grad: as in ``results_of``."""
    check_tensors(a)
    a, shard = dtensor.local_arguments(a, spread)
    if a.weight.dim() > 2:
        return _positions.cross_entropy(lambda part: results_of(checked_call(part)), a)
    call = checked_call(a, shard, spread.own)
    same = key is not None and call.hidden is a.hidden and call.target is a.target
    return results_of(call, key if same else None, main_grad=main_grad)


def results_of(call: Call, key: Any = None, fixed_lse: bool = False, main_grad: Optional[MainGrad] = None) -> Any:
    """Computes the results of a call. key: the key under which it may be remembered, for tensors that were not
    converted. fixed_lse: an lse has no gradient. main_grad: where a loss of reduction "none" adds weight's gradient."""
    options, target = call.options, call.target
    needs = needs_of(call.hidden, call.weight, call.bias)
    compute = compute_dtype(call.hidden, call.weight, blocks=True)
    # The loss itself returns an lse without a gradient; the head's outputs all have gradients.
    of_head = call.target_logits or (call.lse and bool(needs) and not fixed_lse)
    argmax = call.argmax or call.accuracy
    if call.weights.token_weight is not None and not (of_head or call.lse or argmax or call.per_token):
        # Nothing but the loss is asked for, of which a weight of 0 leaves the token out: it costs nothing.
        target = torch.where(call.weights.token_weight == 0.0, options.ignore_index, target)
        call, key = call._replace(target=target), None
    form = Form(options, call.shard, compute, needs, argmax, lse=call.lse, way=way_of(*call.tensors()), main_grad=main_grad)
    if of_head or call.lse or argmax or form.way != EAGER:
        key = None
    waits = options.reduction == "none" and bool(needs)  # for the upstream gradients
    if key is not None and (compute is not None or waits):
        _engine.calls.remember(key, form)  # without a plan
    elif key is not None:
        form = form._replace(key=key)
    if main_grad is not None and form.way != EAGER:  # others return their gradients
        raise NotImplementedError("main_grad: expected an eager call of plain tensors, got one that is traced")
    if of_head:
        asked = Form(head_options(options), call.shard, compute, needs, argmax, entropy=False, way=form.way)
        log_prob, _, lse, index = autograd.head(call.hidden, call.weight, target, call.bias, asked)
        form = form._replace(argmax=False, lse=False)
    together = call.shard.tokens and not call.own  # a mean includes tokens of other ranks
    alone = not (options.label_smoothing or together)
    if of_head and alone and all(t is None for t in call.weights._replace(token_weight=None)):
        loss = _from_head(log_prob, lse, target, call.weights, options)
    else:
        loss_of = data_parallel if call.own and options.reduction != "none" else autograd
        loss, loss_lse, loss_index, *_ = loss_of.cross_entropy(*call.tensors(), None, form)
        lse, index = (lse, index) if of_head else (loss_lse if form.way == EAGER else loss_lse.detach(), loss_index)
    return with_outputs(call, loss, lse, index, log_prob if of_head else None)


def with_outputs(call: Call, loss: Tensor, lse: Tensor, index: Tensor, log_prob: Optional[Tensor]) -> Any:
    """Returns the loss of a call, or a tuple of it and the other results that are asked for. log_prob: of the targets, if
    their logits are asked for."""
    options, lead, target = call.options, call.lead, call.target
    if call.divisor is not None:
        loss = loss / call.divisor.to(device=loss.device, dtype=loss.dtype)
    results = [loss.reshape(lead) if options.reduction == "none" else loss]
    if call.lse:
        results.append(lse.reshape(lead))
    if call.accuracy:
        valid = target != options.ignore_index
        results.append((index == target).logical_and(valid).sum() / valid.sum().clamp(min=1))
    if call.argmax:
        results.append(index.reshape(lead))
    if call.target_logits:
        logits = log_prob + (lse[..., None] if call.per_token else lse)
        logits = torch.where(target == options.ignore_index, 0.0, logits)
        results.append(logits.reshape((*lead, call.per_token) if call.per_token else lead))
    return results[0] if len(results) == 1 else tuple(results)


def _from_head(log_prob, lse, target, weights: LossWeights, options: LossOptions):
    """Computes the loss of one target per token, of which only tokens have weights, from its log-probability: 4 GEMMs with
    its gradient instead of 3."""
    loss = _token_loss.formula(torch, options, lse, -log_prob)
    if weights.token_weight is not None:
        loss = loss * weights.token_weight
    if options.reduction == "none":
        return loss
    total = loss.sum()
    if options.reduction == "mean" and not options.normalizer:
        shares = _token_loss.token_shares(torch, weights, target != options.ignore_index, target, loss.new_ones(()))
        return total / shares.sum().clamp(min=torch.finfo(loss.dtype).tiny)
    return total / options.normalizer if options.reduction == "mean" else total


def head_arguments(a: Arguments, shard: VocabShard = ALL) -> tuple[tuple[Tensor, Tensor, Tensor, Optional[Tensor]], torch.Size]:
    """Returns the checked hidden, weight, target and bias of linear_logprobs in the engine's form, and the shape of
    target."""
    hidden, weight, target, bias = a.hidden, a.weight, a.target, a.bias
    check_head(hidden, weight, bias, shard.columns)
    if target.dtype not in _INTEGERS:
        raise TypeError(f"target: expected int32 or int64, got {target.dtype}")
    lead, shape = hidden.shape[:-1], target.shape
    if shape[: len(lead)] != lead or len(shape) > len(lead) + 1:
        raise ValueError(f"target: expected {list(lead)} or {shape_text(lead, 'K')}, got {list(shape)}")
    per_token = shape[-1] if len(shape) > len(lead) else 0
    if len(shape) > len(lead) and per_token == 0:
        raise ValueError("target: expected 1 or more targets a token, got 0")
    if not lead:
        hidden, target = hidden[None], target[None]
    hidden, target = _rows(hidden, target, per_token)
    return (hidden, weight, target, bias), shape


def log_probs(
    a: Arguments, options: LossOptions, asked: Asked, spread: dtensor.Spread, key: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes linear_logprobs with the outputs asked for: (log_prob, entropy, lse, argmax); the others are empty. key:
    that of ``key_of``, or None."""
    check_tensors(a)
    a, shard = dtensor.local_arguments(a, spread)
    inputs, shape = head_arguments(a, shard)
    hidden, weight, target, bias = inputs
    lead = a.hidden.shape[:-1]
    needs = needs_of(hidden, weight, bias)
    same = key is not None and hidden is a.hidden and target is a.target
    form = Form(
        head_options(options), shard, compute_dtype(hidden, weight, blocks=True), needs, asked.argmax, asked.entropy,
        way=way_of(*inputs), key=key if same and not needs else None,
    )
    reason = "" if asked.keep is False or not form.needs else saved_head.why_not(hidden, form)
    if isinstance(weight, QuantizedWeight):
        reason = reason or "expected None or False beside a quantised weight"
    if asked.keep and form.needs and (reason or form.way != EAGER):
        raise ValueError(f"keep: {reason or 'expected an eager call of plain tensors, got one that is traced'}")
    saves = asked.keep is not False and bool(form.needs) and form.way == EAGER and not reason
    seen = SeenHead(form, saves, required=bool(asked.keep))
    log_prob, entropy, lse, argmax = seen.run(inputs)
    if same and form.needs and form.way == EAGER:
        _engine.calls.remember(key, seen)
    entropy = entropy.reshape(lead) if asked.entropy else entropy
    return log_prob.reshape(shape), entropy, lse.reshape(lead), argmax.reshape(lead) if asked.argmax else argmax


class SeenHead(NamedTuple):
    """A call of ``linear_logprobs`` that passed its checks, without its tensors."""

    form: Form
    saves: bool  # exponentials, from forward to backward
    required: bool  # that they are saved

    def run(self, inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (log_prob, entropy, lse, argmax) of hidden, weight, target and bias in the engine's form."""
        return saved_head.head(*inputs, self.form, self.required) if self.saves else autograd.head(*inputs, self.form)


def repeat_log_probs(seen: SeenHead | _engine.Call, *inputs: Optional[Tensor]) -> tuple[Tensor, ...]:
    """Computes linear_logprobs of a call that was seen before, with gradients to come if it is a ``SeenHead``."""
    if isinstance(seen, SeenHead):
        results = seen.run(inputs)
        return results if seen.form.argmax else results[:3]
    log_prob, entropy, lse, *index = seen.replay(inputs)
    return log_prob, entropy, lse, *(t.to(torch.int64) for t in index)
