"""Cross entropy and log-probabilities of a vocabulary head, without the logits."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import _token_loss
from .._options import DEFAULT, HeadOptions, LossOptions, either_name, head_options, term_docs, unexpected
from . import _arguments, _distributed, _fast, _func, _kept, _own, _positions
from ._kept import KeptHeadFunction
from ._ops import BIAS, HIDDEN, WEIGHT, HeadFunction, LossFunction, rows_are_aligned, run_cross_entropy, run_head
from ._ranks import ALL, Sharding, Words, told


def _autocast(hidden: Tensor, weight: Tensor) -> Optional[torch.dtype]:
    """The dtype autocast asks for; None outside of it. float64 stays, as in PyTorch."""
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
    """Whether eager code may skip the dispatcher: no tracer, no transform of torch.func and no other tensor class is at work."""
    return not (torch.compiler.is_compiling() or _func.active()) and all(
        t is None or type(t) is Tensor or type(t) is nn.Parameter for t in tensors
    )


def _cross_entropy(hidden, weight, target, bias, class_weight, token_weight, target_weight, options, argmax, words=ALL):
    """(loss, lse without a gradient, argmax or an empty tensor)."""
    compute = _autocast(hidden, weight)
    needs = _needs(hidden, weight, bias)
    if not _plain(hidden, weight, target, bias, class_weight, token_weight, target_weight):
        loss, lse, index, *_ = _func.cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, None, *options, *words, compute,
            needs, argmax,
        )
        return loss, lse.detach(), index
    if not needs:
        loss, lse, index, *_ = run_cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, None, options, compute, 0, argmax,
            words,
        )
        return loss, lse, index
    return LossFunction.apply(
        hidden, weight, bias, target, class_weight, token_weight, target_weight, options, compute, needs, argmax, words
    )


def _rows(hidden: Tensor, target: Tensor, per_token: int):
    """hidden [N, D] or [B, T, D] and target to match: what the engine takes of any number of leading dimensions."""
    lead = hidden.shape[:-1]
    want = (*lead, per_token) if per_token else tuple(lead)
    if tuple(target.shape) != want:
        raise ValueError(f"target: expected {list(want)} for hidden {list(hidden.shape)}, got {list(target.shape)}")
    # Rows that lie at one stride are taken as they are, others copied.
    if len(lead) == 1 or (len(lead) == 2 and hidden.stride(0) == lead[1] * hidden.stride(1)):
        return hidden, target
    tail = target.shape[len(lead):]
    return hidden.reshape(-1, hidden.shape[-1]), target.reshape(lead.numel(), *tail)


def _soft_targets(target: Tensor, vocab: int, hidden: Tensor):
    """Class probabilities [..., V] as V weighted targets a token."""
    if target.shape[-1] != vocab or target.dim() != hidden.dim():
        raise ValueError(
            f"target: expected class probabilities {list(hidden.shape[:-1]) + [vocab]}, got {list(target.shape)}"
        )
    if vocab > 65536:
        raise NotImplementedError(
            f"target: class probabilities of {vocab} words are not supported, at most 65536; give the largest as target "
            "[..., K] and target_weight"
        )
    if target.requires_grad:
        raise NotImplementedError("target: class probabilities have no gradient here; detach them")
    words = torch.arange(vocab, device=target.device).expand(target.shape)
    return words, target.float() if target.dtype != torch.float64 else target


def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Cross entropy of ``softmax(softcap(logit_scale * (hidden @ weight.T + bias)))``; the logits never exist as a whole.

    {signature}

    Takes the calls of ``torch.nn.functional.linear_cross_entropy`` (``input``, ``linear_weight``, ``linear_bias``,
    ``weight`` for the class weights, ``options``) and of ``cut_cross_entropy.linear_cross_entropy`` (``e``, ``c``,
    ``targets``, all of them by position too) as well: either is replaced by changing the import. What they say about
    approximations (``filter_eps``, ``impl``, ``acc_policy``, ...) is met by exact gradients and fp32 sums; the chunk
    size of ``options`` is a hint: without memory_budget, the workspace is about its fp32 logits.

    Args:
        hidden: [..., D], float32, bfloat16 or float16 (float64 runs slowly on PyTorch's own operations).
        weight: [V, D], the dtype of hidden, or for hidden [N, D] [V, d_1, ..., d_K, D]: a head for each position d, with
            target [N, d_1, ..., d_K] (or probabilities [N, V, d_1, ..., d_K]) and bias [V, d_1, ..., d_K]; under autocast
            both are cast. Strides may be any; on a GPU hidden and weight are copied where their rows are not contiguous or
            not aligned to 16 bytes.
        target: [...] int32 or int64; or, with ``target_weight``, [..., K]: K weighted words a token; or class
            probabilities [..., V], float, for V up to 65536.
        bias: [V].
        reduction: "none" (loss [...]), "mean", "sum".
        ignore_index: tokens of this target have loss 0, no gradient, and cost nothing; None is -100. Not with class
            probabilities.
        {terms}
        class_weight: [V] float; ``mean`` divides by the weights of the targets, as PyTorch does.
        softcap: ``c * tanh(logits / c)``.
        logit_scale: 1 / temperature.
        normalizer: ``mean`` divides by this number above 0 or scalar tensor instead, such as the tokens of the whole
            batch. A tensor's value is not looked at, which a GPU would be waited for: it divides whatever it is.
        token_weight: [...] float: factors of the tokens' losses.
        target_weight: [..., K] float.
        shift: True or 1: position t predicts target t + 1 of ``hidden`` [B, T, D] and ``target`` [B, T]; n: t + n.
        accuracy: also returns the fraction of tokens whose largest logit is their target.
        return_lse: also returns the log-sum-exp [...], with a gradient.
        return_argmax: also returns the word of the largest logit [...], int64; -1 for ignored tokens.
        return_target_logits: also returns the logits of the targets, shaped as target, with a gradient; 0 for ignored
            ones. They, and an lse with a gradient, cost a pass more (4), or with label_smoothing, class_weight or
            target_weight a head of their own (1 pass, and 3 in a backward that reaches them).
        memory_budget: bytes, or text such as "512MiB", the call may take beyond its inputs and gradients. Default:
            the least workspace within 3 % of the best predicted time among plans of at most a quarter of the fp32 logits
            (16 MiB at least), three tenths for a plan that keeps exp(z) of all tokens at once, or the least plan if none
            is.
        sharding: a ``Sharding``: the words are spread over the ranks of a process group, and weight and bias are this
            rank's. cut_cross_entropy's ``vocab_parallel_options`` say the same.

    A weight that is a DTensor with its words (dimension 0) sharded, or its columns (dimension 1) where tokens are each
    rank's own, stays where it is, on the CPU and, in bfloat16, on Hopper GPUs: no rank gathers it or its gradient. With a DTensor hidden, replicated or sharded by tokens over the same
    ranks, the loss is that of all tokens, the same on all ranks; with a plain hidden each rank's loss is its own, and the
    weight gets the mean of the ranks' gradients, as from FSDP. Calls and backwards are collective, and what a rank raises all do.

    Returns:
        The loss, float32 (float64 of float64), or a tuple (loss, lse, accuracy, argmax, target logits) of those asked
        for.

    Memory: the workspace of the plan, within ``memory_budget``; gradients of a mean or sum are made in the forward and
    kept until the backward, those of float16 in fp32, which the loss scale has to reach. Gradients sum in fp32 and are
    rounded once. The same inputs give the same bits.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. A target outside [0, V) that is not
            ignore_index is a ValueError on the CPU; on a GPU, where nothing waits, the loss is NaN.
        NotImplementedError: what no kernel or plan serves; second derivatives.
    """
    key = _fast.key_of(args, kwargs)
    if key is not None and (known := _fast.find(key)) is not None:
        return known(*args)
    a = _arguments.bind(args, kwargs)

    def call():
        _arguments.check_tensors(a)
        a["words"], a["own"] = _distributed.place(a)
        if a["weight"].dim() > 2:
            return _positions.cross_entropy(_loss, a)
        return _loss(a, key, args)

    return told(_distributed.group_of(a), call, lambda: not a.get("gathered"))


if linear_cross_entropy.__doc__:  # not under python -OO
    linear_cross_entropy.__doc__ = linear_cross_entropy.__doc__.replace("{terms}", term_docs(8)).replace(
        "{signature}", _arguments.signature_text(4)
    )


class Prepared(NamedTuple):
    """Bound arguments as the engine takes them, with a weight [V, D]."""

    options: LossOptions
    hidden: Tensor  # [N, D] or [B, T, D]
    weight: Tensor
    target: Tensor
    bias: Optional[Tensor]
    class_weight: Optional[Tensor]
    token_weight: Optional[Tensor]
    target_weight: Optional[Tensor]
    lead: torch.Size  # the leading sizes of hidden, before it was made of two or three dimensions
    per_token: int  # K of weighted targets [..., K], else 0
    single: bool  # hidden [D]

    def tensors(self):
        return self.hidden, self.weight, self.target, self.bias, self.class_weight, self.token_weight, self.target_weight


def prepare(a: dict[str, Any]) -> Prepared:
    """Checks bound arguments. Raises what linear_cross_entropy does."""
    options = _arguments.loss_options(a)
    hidden, weight, target, bias = a["hidden"], a["weight"], a["target"], a["bias"]
    words: Words = a.get("words", ALL)
    _arguments.check_head(hidden, weight, bias, words.columns)
    vocab = words.vocab if words.group else weight.shape[0]
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
    """linear_cross_entropy of bound arguments, with a weight [V, D]; ``key`` is what the plain call ``args`` is to be
    remembered by."""
    call = prepare(a)
    words, own = a.get("words", ALL), a.get("own", False)
    together = words.tokens and not own  # a mean is over tokens that are not here
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
    # The loss itself gives an lse without a gradient; log-probabilities give all of them theirs.
    of_head = a["return_target_logits"] or (a["return_lse"] and _needs(hidden, weight, bias))
    if of_head:
        log_prob, lse, index = _head_outputs(hidden, weight, target, bias, options, argmax, words)
    if of_head and not (per_token or options.label_smoothing or class_weight is not None or together):
        loss = _from_head(log_prob, lse, target, token_weight, options)
    else:
        loss_of = _own.cross_entropy if own and options.reduction != "none" else _cross_entropy
        loss, loss_lse, loss_index = loss_of(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, options, argmax and not of_head,
            words,
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
    """The loss of one target a token, made of its log-probability: 4 passes with those of its gradient instead of 3."""
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


def _head_outputs(hidden, weight, target, bias, options: LossOptions, argmax: bool, words: Words):
    """(log_prob, lse, argmax or an empty tensor) under the options of a loss."""
    log_prob, _, lse, index = _head(hidden, weight, target, bias, head_options(options), Asked(argmax, entropy=False), words)
    return log_prob, lse, index


class Asked(NamedTuple):
    """Of a head, beside log-probabilities and log-sum-exps."""

    argmax: bool = False
    entropy: bool = True  # some calls make it anyway
    # Whether exponentials stay from forward to backward: yes, or an error; no; or where they can (None).
    keep: Optional[bool] = False


def _head(hidden, weight, target, bias, options: HeadOptions, asked: Asked = Asked(), words: Words = ALL):
    compute = _autocast(hidden, weight)
    needs = _needs(hidden, weight, bias)
    plain = _plain(hidden, weight, target, bias)
    reason = "" if asked.keep is False or not needs else _kept.why_not(hidden, compute, words)
    if asked.keep and needs and not (plain and reason == ""):
        raise ValueError(f"keep: {reason or 'expected an eager call of plain tensors, got one that is traced'}")
    if not plain:
        return _func.head(hidden, weight, target, bias, *options, *words, compute, needs, asked.argmax)
    if not needs:
        return run_head(hidden, weight, target, bias, options, compute, asked.argmax, words, asked.entropy)
    if asked.keep is not False and reason == "":
        return KeptHeadFunction.apply(
            hidden, weight, bias, target, options, compute, needs, asked.argmax, asked.entropy, bool(asked.keep)
        )
    return HeadFunction.apply(
        hidden, weight, bias, target, options, compute, needs, asked.argmax, words, asked.entropy
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
    """Log-probability of each target, and entropy and log-sum-exp of each token, each with a gradient.

    Losses of policies and preferences (PPO, GRPO, DPO, ORPO, SimPO, KTO) are functions of these.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden. bias: [V].
        target: [...] or [..., K], int32 or int64. Rows whose targets are all ``ignore_index`` give 0 and cost nothing.
        return_argmax: also returns the word of the largest logit [...], int64, the first of several; -1 for ignored rows.
        keep: exponentials of all logits, in 16 bits, stay from forward to backward: two passes backward instead of three.
            On a GPU, of eager calls. They and weight's gradient, whose memory holds about half of them, exist from the
            forward on; the rest is at most memory_budget (default: three tenths of the fp32 logits). A gradient of the
            entropy, and a backward that retains its graph, make everything again, beside what is held.
        softcap, logit_scale, memory_budget, sharding, and a weight that is a DTensor: as of ``linear_cross_entropy``.

    Returns:
        (log_prob, entropy, lse), and argmax if asked for: float32 (float64 of float64): log_prob shaped as target, the
        others [...]; natural logarithms. One pass over the weights forward, three or (with a gradient of the entropy)
        four backward.

    Raises: as ``linear_cross_entropy``; ValueError for ``keep`` on the CPU, of float64, of sharded words, of calls that
        are traced, with hooks of saved tensors (checkpoints, offloading), and where the memory budget is below what it takes, naming that.
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
    """``linear_logprobs`` with what is asked of it: (log_prob, entropy, lse, argmax), empty what is not."""
    a = {**_arguments.DEFAULTS, **options}
    checked = _arguments.loss_options(a)
    a.update(hidden=hidden, weight=weight, target=target, bias=bias, sharding=sharding, return_argmax=asked.argmax)

    def call():
        _arguments.check_tensors(a)
        words, _ = _distributed.place(a)
        return _logprobs(a, checked, asked, words)

    return told(_distributed.group_of(a), call, lambda: not a.get("gathered"))


def _logprobs(a: dict[str, Any], checked: LossOptions, asked: Asked, words: Words) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, target, bias = a["hidden"], a["weight"], a["target"], a["bias"]
    _arguments.check_head(hidden, weight, bias, words.columns)
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
    log_prob, entropy, lse, argmax = _head(hidden, weight, target, bias, head_options(checked), asked, words)
    entropy = entropy.reshape(lead) if asked.entropy else entropy
    return log_prob.reshape(shape), entropy, lse.reshape(lead), argmax.reshape(lead) if asked.argmax else argmax


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` with a weight [vocab, dim] of its own, and a bias [vocab] if asked for.

    Args:
        dim: D of hidden.
        vocab: V.
        bias, device, dtype: as of ``nn.Linear``.
        options: every keyword of ``linear_cross_entropy`` but bias, checked when the module is made.

    ``forward(hidden, target, **more)`` returns what ``linear_cross_entropy`` does; ``more`` replaces options for one call.
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
