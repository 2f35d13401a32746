"""Cross entropy and log-probabilities of a vocabulary head, without the logits."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import _token_loss
from .._options import DEFAULT, HeadOptions, LossOptions, either_name, head_options, term_docs, unexpected
from . import _arguments, _distributed, _fast, _func, _kept, _own, _positions
from ._kept import SavedHeadFunction
from ._ops import BIAS, HIDDEN, WEIGHT, HeadFunction, LossFunction, rows_are_aligned, run_cross_entropy, run_head
from ._ranks import ALL, Sharding, VocabShard, raise_on_all_ranks


def _autocast(hidden: Tensor, weight: Tensor) -> Optional[torch.dtype]:
    """Returns autocast's dtype, or None outside of autocast and for float64, as in PyTorch."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"weight: expected {hidden.dtype}, the dtype of hidden, got {weight.dtype}; cast one, or use torch.autocast"
        )
    return None


def _needs(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> int:
    if not torch.is_grad_enabled():
        return 0
    return (
        (HIDDEN if hidden.requires_grad else 0)
        | (WEIGHT if weight.requires_grad else 0)
        | (BIAS if bias is not None and bias.requires_grad else 0)
    )


def _plain(*tensors) -> bool:
    """Returns whether eager code may skip the dispatcher: no tracer, no transform of torch.func, no other tensor class.
    """
    return not (torch.compiler.is_compiling() or _func.active()) and all(
        t is None or type(t) is Tensor or type(t) is nn.Parameter for t in tensors
    )


def _cross_entropy(hidden, weight, target, bias, class_weight, token_weight, target_weight, options, argmax, vocab_shard=ALL):
    """Returns (loss, lse without a gradient, argmax or an empty tensor)."""
    compute = _autocast(hidden, weight)
    needs = _needs(hidden, weight, bias)
    if not _plain(hidden, weight, target, bias, class_weight, token_weight, target_weight):
        loss, lse, index, *_ = _func.cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, None, *options, *vocab_shard, compute,
            needs, argmax,
        )
        return loss, lse.detach(), index
    if not needs:
        loss, lse, index, *_ = run_cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, None, options, compute, 0, argmax,
            vocab_shard,
        )
        return loss, lse, index
    return LossFunction.apply(
        hidden, weight, bias, target, class_weight, token_weight, target_weight, options, compute, needs, argmax, vocab_shard
    )


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


def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Cross entropy of ``softmax(softcap(logit_scale * (hidden @ weight.T + bias)))``, without storing the logits.

    {signature}

    It also accepts the calls of ``torch.nn.functional.linear_cross_entropy`` (``input``, ``linear_weight``,
    ``linear_bias``, ``weight`` for the class weights, ``options``). The same holds for
    ``cut_cross_entropy.linear_cross_entropy`` (``e``, ``c``, ``targets``, all of them by position too). So either is
    replaced by a change of import. Their options about approximations (``filter_eps``, ``impl``, ``acc_policy``, ...)
    are accepted, with exact gradients and fp32 sums. The chunk size of ``options`` is a hint: without memory_budget,
    the workspace is about the size of its fp32 logits.

    Args:
        hidden: [..., D], float32, bfloat16 or float16. float64 runs slowly on PyTorch's own operations.
        weight: [V, D], the dtype of hidden; under autocast both are cast. For hidden [N, D] it may be [V, d_1, ...,
            d_K, D]: a head for each position d, with target [N, d_1, ..., d_K] (or probabilities [N, V, d_1, ..., d_K])
            and bias [V, d_1, ..., d_K]. Any strides are accepted. A GPU copies hidden and weight if their rows are not
            contiguous or not aligned to 16 bytes.
        target: [...] int32 or int64; or, with ``target_weight``, [..., K]: K weighted token ids per token; or class
            probabilities [..., V], float, for V up to 65536.
        bias: [V].
        reduction: "none" (loss [...]), "mean", "sum".
        ignore_index: tokens with this target have loss 0 and no gradient, and cost nothing; None is -100. Not for class
            probabilities.
        {terms}
        class_weight: [V] float; ``mean`` divides by the weights of the targets, as PyTorch does.
        softcap: ``c * tanh(logits / c)``.
        logit_scale: 1 / temperature.
        normalizer: ``mean`` divides by this positive number or scalar tensor instead, such as the token count of the
            global batch. The value of a tensor is not checked, since that would synchronise with a GPU.
        token_weight: [...] float: factors of the tokens' losses.
        target_weight: [..., K] float.
        shift: True or 1: position t predicts target t + 1 of ``hidden`` [B, T, D] and ``target`` [B, T]; n: t + n.
        accuracy: also returns the fraction of tokens whose largest logit is their target.
        return_lse: also returns the log-sum-exp [...], with a gradient.
        return_argmax: also returns the token id of the largest logit [...], int64; -1 for ignored tokens.
        return_target_logits: also returns the logits of the targets, shaped as target, with a gradient; 0 for ignored
            ones. They, and an lse with a gradient, cost one more GEMM (4). With label_smoothing, class_weight or
            target_weight they take a separate head: 1 GEMM, and 3 in a backward that reaches them.
        memory_budget: bytes, or text such as "512MiB", that the call may take beyond its inputs and gradients. It is
            a ceiling: a call takes no more than its speed is worth, and less than the fp32 logits if a plan does. The
            default is the least workspace whose predicted time is within 3 % of the best, among plans below a limit.
            The limit is a quarter of the fp32 logits (at least 16 MiB), or three tenths for a plan that saves exp(z) of
            all tokens. If no plan is below it, the least plan runs.
        sharding: a ``Sharding``: the vocabulary is sharded over the ranks of a process group, and weight and bias are
            this rank's shard. cut_cross_entropy's ``vocab_parallel_options`` are equivalent.

    A DTensor weight may be sharded over the vocabulary (dimension 0). If tokens differ between ranks, it may also be
    sharded over columns (dimension 1). On the CPU and, in bfloat16, on Hopper GPUs, no rank gathers such a weight or
    its gradient. With a DTensor hidden, replicated or sharded by tokens over the same ranks, the loss is over all
    tokens and the same on all ranks. With a plain hidden each rank has its own loss, and the weight gets the mean of
    the ranks' gradients, as in FSDP. Calls and backwards are collective, and all ranks raise an error of one.

    Returns:
        The loss, float32 (float64 for float64 inputs), or a tuple (loss, lse, accuracy, argmax, target logits) of those
        asked for.

    Memory: the workspace of the plan, within ``memory_budget``. Gradients of a mean or sum are computed in the forward
    and saved until the backward; those of float16 in fp32, since the loss scale is applied then. Gradients are summed
    in fp32 and rounded once. Results are deterministic, bit for bit.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. A target outside
            [0, V) that is not ignore_index is a ValueError on the CPU. On a GPU the loss is NaN, since the host does
            not wait for an error.
        NotImplementedError: no kernel or plan supports the call; second derivatives.
    """
    key = _fast.key_of(args, kwargs)
    if key is not None and (known := _fast.find(key)) is not None:
        return known(*args)
    a = _arguments.bind(args, kwargs)

    def call():
        _arguments.check_tensors(a)
        a["vocab_shard"], a["own"] = _distributed.place(a)
        if a["weight"].dim() > 2:
            return _positions.cross_entropy(_loss, a)
        return _loss(a, key, args)

    return raise_on_all_ranks(_distributed.group_of(a), call, lambda: not a.get("gathered"))


if linear_cross_entropy.__doc__:  # not under python -OO
    linear_cross_entropy.__doc__ = linear_cross_entropy.__doc__.replace("{terms}", term_docs(8)).replace(
        "{signature}", _arguments.signature_text(4)
    )


class Prepared(NamedTuple):
    """Bound arguments in the engine's form, with a weight [V, D]."""

    options: LossOptions
    hidden: Tensor  # [N, D] or [B, T, D]
    weight: Tensor
    target: Tensor
    bias: Optional[Tensor]
    class_weight: Optional[Tensor]
    token_weight: Optional[Tensor]
    target_weight: Optional[Tensor]
    lead: torch.Size  # the leading sizes of hidden before it was flattened
    per_token: int  # K for weighted targets [..., K], else 0
    single: bool  # hidden [D]

    def tensors(self):
        return self.hidden, self.weight, self.target, self.bias, self.class_weight, self.token_weight, self.target_weight


def prepare(a: dict[str, Any]) -> Prepared:
    """Checks and converts bound arguments. Raises the errors of linear_cross_entropy."""
    options = _arguments.loss_options(a)
    hidden, weight, target, bias = a["hidden"], a["weight"], a["target"], a["bias"]
    vocab_shard: VocabShard = a.get("vocab_shard", ALL)
    _arguments.check_head(hidden, weight, bias, vocab_shard.columns)
    vocab = vocab_shard.vocab if vocab_shard.group else weight.shape[0]
    if a["chunk"] is not None and not options.memory_budget:
        options = options._replace(memory_budget=-_arguments.chunk_bytes(a["chunk"], hidden, weight))
    token_weight, target_weight = a["token_weight"], a["target_weight"]
    if hidden.dim() == 1:  # one token
        hidden, target = hidden[None], target[None]
        token_weight = None if token_weight is None else token_weight[None]
        target_weight = None if target_weight is None else target_weight[None]
        single = True
    else:
        single = False
    if target.dtype.is_floating_point:
        if target_weight is not None:
            raise TypeError("target: expected int32 or int64 beside target_weight, got " + str(target.dtype))
        if a["ignore_index"] is not None:
            raise ValueError(f"ignore_index: expected None beside class probabilities, got {a['ignore_index']}")
        if a["return_target_logits"]:
            raise ValueError("return_target_logits: expected False beside class probabilities, got True")
        target, target_weight = _soft_targets(target, vocab, hidden)
    elif target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected int32, int64 or class probabilities, got {target.dtype}")
    for name in ("class_weight", "token_weight", "target_weight"):
        if a[name] is not None and a[name].requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: has no gradient here; detach it")
    shift = _arguments.shift_of(a["shift"], hidden)
    if shift:
        hidden, target = hidden[..., : hidden.shape[-2] - shift, :], target[..., shift:]
        if token_weight is not None or target_weight is not None:
            raise NotImplementedError("shift: does not go with token_weight or target_weight; shift them yourself")
    per_token = 0 if target_weight is None else target.shape[-1]
    lead = hidden.shape[:-1]
    hidden, target = _rows(hidden, target, per_token)
    rows = hidden.shape[:-1]
    token_weight = _shaped("token_weight", token_weight, lead, rows)
    target_weight = _shaped("target_weight", target_weight, (*lead, per_token), (*rows, per_token))
    if a["accuracy"] and per_token:
        raise NotImplementedError("accuracy: needs one target a token")
    if isinstance(a["normalizer"], Tensor):
        options = options._replace(reduction="sum")
    number = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    class_weight = a["class_weight"]
    if class_weight is not None:
        if list(class_weight.shape) != [vocab]:
            raise ValueError(f"class_weight: expected [{vocab}], got {list(class_weight.shape)}")
        class_weight = class_weight.to(number)
    token_weight = None if token_weight is None else token_weight.to(number)
    target_weight = None if target_weight is None else target_weight.to(number)
    return Prepared(
        options, hidden, weight, target, bias, class_weight, token_weight, target_weight, lead, per_token, single
    )


def _loss(a: dict[str, Any], key: Any = None, args: tuple = ()) -> Any:
    """Computes linear_cross_entropy of bound arguments, with a weight [V, D]. ``key``: the cache key of the plain call
    ``args``."""
    call = prepare(a)
    vocab_shard, own = a.get("vocab_shard", ALL), a.get("own", False)
    together = vocab_shard.tokens and not own  # a mean includes tokens of other ranks
    if together and a["accuracy"]:
        raise NotImplementedError("accuracy: not of sharded tokens; compare return_argmax with the targets")
    options, lead, per_token = call.options, call.lead, call.per_token
    hidden, weight, target, bias, class_weight, token_weight, target_weight = call.tensors()
    normalizer = a["normalizer"]
    argmax = bool(a["return_argmax"] or a["accuracy"])
    if (
        key is not None
        and hidden is args[0]
        and target is args[2]
        and options.reduction != "none"
        and not (a["return_lse"] or a["return_target_logits"] or argmax)
        and hidden.dtype is not torch.float64
        and _autocast(hidden, weight) is None
        and (bias is None or bias.dtype in (torch.float32, weight.dtype))
        and (hidden.device.type == "cpu" or (rows_are_aligned(hidden) and rows_are_aligned(weight) and target.is_contiguous() and (bias is None or bias.dtype == torch.float32)))
    ):
        loss = _fast.FastLoss(hidden, weight, target, bias, options, _needs(hidden, weight, bias))
        result = loss(hidden, weight, target, bias)
        _fast.remember(key, loss)
        return result
    # The loss itself returns an lse without a gradient; the head's outputs all have gradients.
    of_head = a["return_target_logits"] or (a["return_lse"] and _needs(hidden, weight, bias))
    if of_head:
        log_prob, lse, index = _head_outputs(hidden, weight, target, bias, options, argmax, vocab_shard)
    if of_head and not (per_token or options.label_smoothing or class_weight is not None or together):
        loss = _from_head(log_prob, lse, target, token_weight, options)
    else:
        loss_of = _own.cross_entropy if own and options.reduction != "none" else _cross_entropy
        loss, loss_lse, loss_index = loss_of(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, options, argmax and not of_head,
            vocab_shard,
        )
        lse, index = (lse, index) if of_head else (loss_lse, loss_index)
    if isinstance(normalizer, Tensor):
        loss = loss / normalizer.to(device=loss.device, dtype=loss.dtype)
    lead = torch.Size() if call.single else lead
    if options.reduction == "none":
        loss = loss.reshape(lead)
    results = [loss]
    if a["return_lse"]:
        results.append(lse.reshape(lead))
    if a["accuracy"]:
        valid = target != options.ignore_index
        results.append((index == target).logical_and(valid).sum() / valid.sum().clamp(min=1))
    if a["return_argmax"]:
        results.append(index.reshape(lead))
    if a["return_target_logits"]:
        logits = log_prob + (lse[..., None] if per_token else lse)
        logits = torch.where(target == options.ignore_index, 0.0, logits)
        results.append(logits.reshape((*lead, per_token) if per_token else lead))
    return results[0] if len(results) == 1 else tuple(results)


def _shaped(name: str, t: Optional[Tensor], want, rows):
    if t is None:
        return None
    if tuple(t.shape) != tuple(want):
        raise ValueError(f"{name}: expected {list(want)}, got {list(t.shape)}")
    return t.reshape(rows)


def _from_head(log_prob, lse, target, token_weight, options: LossOptions):
    """Computes the loss of one target per token from its log-probability: 4 GEMMs with its gradient instead of 3."""
    loss = _token_loss.formula(torch, options, lse, -log_prob)
    count = (target != options.ignore_index).to(loss.dtype)
    if token_weight is not None:
        loss, count = loss * token_weight, count * token_weight
    if options.reduction == "none":
        return loss
    total = loss.sum()
    if options.reduction == "mean":
        total = total / (options.normalizer or count.sum().clamp(min=torch.finfo(count.dtype).tiny))
    return total


def _head_outputs(hidden, weight, target, bias, options: LossOptions, argmax: bool, vocab_shard: VocabShard):
    """Returns (log_prob, lse, argmax or an empty tensor) with the options of a loss."""
    log_prob, _, lse, index = _head(hidden, weight, target, bias, head_options(options), Asked(argmax, entropy=False), vocab_shard)
    return log_prob, lse, index


class Asked(NamedTuple):
    """Outputs that are asked of a head, besides log-probabilities and log-sum-exps."""

    argmax: bool = False
    entropy: bool = True  # some calls compute it anyway
    # Save exponentials from forward to backward. True: or raise; False: never; None: if possible.
    keep: Optional[bool] = False


def _head(hidden, weight, target, bias, options: HeadOptions, asked: Asked = Asked(), vocab_shard: VocabShard = ALL):
    compute = _autocast(hidden, weight)
    needs = _needs(hidden, weight, bias)
    plain = _plain(hidden, weight, target, bias)
    reason = "" if asked.keep is False or not needs else _kept.why_not(hidden, compute, vocab_shard)
    if asked.keep and needs and not (plain and reason == ""):
        raise ValueError(f"keep: {reason or 'expected an eager call of plain tensors, got one that is traced'}")
    if not plain:
        return _func.head(hidden, weight, target, bias, *options, *vocab_shard, compute, needs, asked.argmax)
    if not needs:
        return run_head(hidden, weight, target, bias, options, compute, asked.argmax, vocab_shard, asked.entropy)
    if asked.keep is not False and reason == "":
        return SavedHeadFunction.apply(
            hidden, weight, bias, target, options, compute, needs, asked.argmax, asked.entropy, bool(asked.keep)
        )
    return HeadFunction.apply(
        hidden, weight, bias, target, options, compute, needs, asked.argmax, vocab_shard, asked.entropy
    )


@either_name
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ignore_index: int = DEFAULT.ignore_index,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    return_argmax: bool = False,
    keep: bool = False,
    memory_budget: int | str | None = None,
    sharding: Optional[Sharding] = None,
) -> tuple[Tensor, ...]:
    """Returns the log-probability of each target, and the entropy and log-sum-exp of each token, all with gradients.

    Policy and preference losses (PPO, GRPO, DPO, ORPO, SimPO, KTO) are functions of these.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden. bias: [V].
        target: [...] or [..., K], int32 or int64. Rows whose targets are all ``ignore_index`` give 0 and cost nothing.
        return_argmax: also returns the token id of the largest logit [...], int64, the first of several; -1 for ignored
            rows.
        keep: save the exponentials of all logits, in 16 bits, from forward to backward: two GEMMs backward instead of
            three. For eager calls on a GPU. They and weight's gradient, whose memory holds about half of them, exist
            from the forward on; the rest takes at most memory_budget (default: three tenths of the fp32 logits). A
            gradient of the entropy, or a backward that retains its graph, recomputes everything, in addition to the
            saved memory.
        softcap, logit_scale, memory_budget, sharding, and a DTensor weight: as in ``linear_cross_entropy``.

    Returns:
        (log_prob, entropy, lse), and argmax if asked for, float32 (float64 for float64 inputs): log_prob shaped as
        target, the others [...]. Logarithms are natural. The cost is one GEMM forward, and three or (with a gradient of
        the entropy) four backward.

    Raises as ``linear_cross_entropy``. ``keep`` raises ValueError on the CPU, for float64, for a sharded vocabulary and
    for traced calls. It also does with hooks of saved tensors (checkpoints, offloading), and for a memory budget that
    is too small; the message names the bytes that it takes.
    """
    if not isinstance(keep, bool):
        raise TypeError(f"keep: expected True or False, got {keep!r}")
    asked = Asked(bool(return_argmax), keep=keep)
    found = token_log_probs(
        hidden, weight, target, bias, asked, sharding, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, memory_budget=memory_budget,
    )
    return found if return_argmax else found[:3]


def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], asked: Asked,
    sharding: Optional[Sharding] = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``linear_logprobs`` with the outputs asked for: (log_prob, entropy, lse, argmax); the others are empty.
    """
    a = {**_arguments.DEFAULTS, **options}
    checked = _arguments.loss_options(a)
    a.update(hidden=hidden, weight=weight, target=target, bias=bias, sharding=sharding, return_argmax=asked.argmax)

    def call():
        _arguments.check_tensors(a)
        vocab_shard, _ = _distributed.place(a)
        return _logprobs(a, checked, asked, vocab_shard)

    return raise_on_all_ranks(_distributed.group_of(a), call, lambda: not a.get("gathered"))


def _logprobs(a: dict[str, Any], checked: LossOptions, asked: Asked, vocab_shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, target, bias = a["hidden"], a["weight"], a["target"], a["bias"]
    _arguments.check_head(hidden, weight, bias, vocab_shard.columns)
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected int32 or int64, got {target.dtype}")
    lead = hidden.shape[:-1]
    if target.shape[: len(lead)] != lead or target.dim() > len(lead) + 1:
        raise ValueError(f"target: expected {list(lead)} or {list(lead) + ['K']}, got {list(target.shape)}")
    shape = target.shape
    per_token = shape[-1] if target.dim() > len(lead) else 0
    if target.dim() > len(lead) and per_token == 0:
        raise ValueError("target: expected 1 or more targets a token, got 0")
    if not lead:
        hidden, target = hidden[None], target[None]
    hidden, target = _rows(hidden, target, per_token)
    log_prob, entropy, lse, argmax = _head(hidden, weight, target, bias, head_options(checked), asked, vocab_shard)
    entropy = entropy.reshape(lead) if asked.entropy else entropy
    return log_prob.reshape(shape), entropy, lse.reshape(lead), argmax.reshape(lead) if asked.argmax else argmax


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` with its own weight [vocab, dim], and a bias [vocab] if asked for.

    Args:
        dim: D of hidden.
        vocab: V.
        bias, device, dtype: as in ``nn.Linear``.
        options: every keyword of ``linear_cross_entropy`` except bias, checked when the module is created.

    ``forward(hidden, target, **more)`` returns the result of ``linear_cross_entropy``; ``more`` replaces options for
    one call.
    """

    def __init__(self, dim: int, vocab: int, bias: bool = False, device=None, dtype=None, **options: Any):
        super().__init__()
        known = [name for name in _arguments.DEFAULTS if name != "bias"]
        for name in options:
            if name not in known:
                raise unexpected("LinearCrossEntropy", name, known)
        _arguments.loss_options({**_arguments.DEFAULTS, **options})
        self.dim, self.vocab, self.options = dim, vocab, dict(options)
        linear = nn.Linear(dim, vocab, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    @either_name
    def forward(self, hidden: Tensor, target: Tensor, **more: Any) -> Any:
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **{**self.options, **more})

    def extra_repr(self) -> str:
        options = "".join(f", {k}={v!r}" for k, v in self.options.items())
        return f"dim={self.dim}, vocab={self.vocab}, bias={self.bias is not None}{options}"
