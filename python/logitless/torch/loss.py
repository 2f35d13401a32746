"""Cross entropy and log-probabilities of a vocabulary head, without the logits."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._losses import selected as shared
from .._losses.options import bad_id
from .._options import DEFAULT, either_name, term_docs, unexpected
from . import _engine, _memory, autograd, call, quantized
from ._arguments import DEFAULTS, bind, loss_options, named, signature_text
from .call import Asked
from .dtensor import replicated, spread_of
from .groups import raise_on_all_ranks
from .ranks import Sharding


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
        hidden: [..., D], float32, bfloat16, float16 or float64, on any device. ``backend(hidden)`` returns whether the
            library's kernels serve it, or PyTorch's own operations.
        weight: [V, D], the dtype of hidden; under autocast both are cast. One of both may be float32 beside 16 bits, and
            both are multiplied as float32. Neither is copied: a CPU's kernels read both as they are. Those of a GPU
            widen a chunk of 16-bit hidden states, or a strip of a 16-bit weight (32 MiB), at a time. PyTorch's
            operations and sharded vocabularies cast all hidden states, and the latter take no 16-bit weight. For hidden
            [N, D] weight may be [V, d_1, ..., d_K, D]: a head for each position d, with target [N, d_1, ..., d_K] (or
            probabilities [N, V, d_1, ..., d_K]) and bias [V, d_1, ..., d_K]. Any strides are accepted. A GPU copies
            hidden and weight if their rows are not contiguous or not aligned to 16 bytes. A frozen one may be quantised:
            a ``QuantizedWeight``, or a weight of torchao or bitsandbytes, of which a block is dequantised at a time.
        target: [...] int32 or int64; or, with ``target_weight``, [..., K]: K weighted token ids per token; or class
            probabilities [..., V], float, for V up to 65536.
        bias: [V].
        reduction: "none" (loss [...]), "mean", "sum".
        ignore_index: tokens with this target have loss 0 and no gradient; None is -100. They cost nothing, except where all
            tokens are multiplied: on a GPU by the kernel ``cublas`` (float32, two dtypes, compute capability 7.5) and in
            cuBLAS's gradients without expected_ignored (docs/use/gpu.md); on devices other than a CPU in small calls of
            PyTorch's own operations. Not for class probabilities.
        {terms}
        class_weight: [V] float; ``mean`` divides by the weights of the targets, as PyTorch does.
        softcap: ``c * tanh(logits / c)``.
        logit_scale: factor of the products.
        temperature: a number above 0, or a tensor [...] of floats above 0, with a gradient: divides the logits, after the
            softcap. Without bias and softcap, a tensor divides hidden states of float32, and on a CPU those of 16 bits (in
            float32, 4 N D bytes). Otherwise PyTorch's operations compute the logits in float32, a chunk at a time: four
            GEMMs, without label_smoothing and sharding, and ``torch.compile`` breaks its graph.
        normalizer: ``mean`` divides by this positive number or scalar tensor instead, such as the token count of the
            global batch. The value of a tensor is not checked, since that would synchronise with a GPU.
        token_weight: [...] float: factors of the tokens' losses. A token of weight 0 costs nothing, whatever its hidden
            state holds, unless other results of it are asked for.
        target_weight: [..., K] float.
        shift: True or 1: position t predicts target t + 1 of ``hidden`` [B, T, D] and ``target`` [B, T]; n: t + n.
        accuracy: also returns the fraction of tokens whose largest logit is their target.
        return_lse: also returns the log-sum-exp [...], with a gradient.
        return_argmax: also returns the token id of the largest logit [...], int64; -1 for ignored tokens.
        return_target_logits: also returns the logits of the targets, shaped as target, with a gradient; 0 for ignored
            ones. They, and an lse with a gradient, cost one more GEMM (4). With label_smoothing, or weights of classes or
            targets, they take a separate head: 1 GEMM, and 3 in a backward that reaches them.
        precision: of the products of float32 tensors on a GPU, summed in float32. "ieee": float32. "tf32": operands are
            rounded to TF32. "bf16x3": three products of bf16, some 1e-6 of each off. Both from compute capability 8.0
            on. None: what PyTorch does at the call, by
            ``torch.backends.cuda.matmul`` (``fp32_precision`` or ``allow_tf32``). Other tensors take "ieee" alone.
        memory_budget: bytes, or text such as "512MiB", that the call may take beyond its inputs and gradients. It is
            a ceiling: a call takes no more than its speed is worth, and less than the fp32 logits if a plan does. The
            default is the least workspace whose predicted time is within 3 % of the best, among plans below a limit.
            The limit is a quarter of the fp32 logits, or three tenths for a plan that saves exp(z) of all tokens. It is
            at least 16 MiB, and on a GPU at least all of the logits up to 64 MiB. If no plan is below it, the least one
            runs.
        expected_ignored: the share of the tokens that is expected to be ignored, in [0, 1]: a hint for GPUs whose
            gradients are cuBLAS's, which else takes all tokens. It then multiplies as many as are expected to count, and
            a slower kernel the others that do. Results differ by the order of sums alone. Best the share itself where the
            host knows it, in steps of a sixteenth or so, since each value has a plan; else the least share of a batch.
            0 with a sharding.
        sharding: a ``Sharding``: the vocabulary is sharded over the ranks of a process group, and weight and bias are
            this rank's shard. cut_cross_entropy's ``vocab_parallel_options`` are equivalent.

    A DTensor weight may be sharded over the vocabulary (dimension 0). If tokens differ between ranks, it may also be
    sharded over columns (dimension 1). On the CPU and, in 16 bits, on GPUs of compute capability 8.0 or more, no rank
    gathers such a weight or its gradient. With a DTensor hidden, replicated or sharded by tokens over the same ranks,
    the loss is over all tokens and the same on all ranks. With a plain hidden each rank has its own loss, and the weight
    gets the mean of the ranks' gradients, as in FSDP. Calls and backwards are collective, and all ranks raise an error of
    one.

    Returns:
        The loss, float32 (float64 for float64 inputs), or a tuple (loss, lse, accuracy, argmax, target logits) of those
        asked for.

    Memory: the workspace of the plan, within ``memory_budget``. Gradients of a mean or sum are computed in the forward
    and saved until the backward; those of float16 in fp32, since the loss scale is applied then. Gradients are summed
    in fp32 and rounded once. Results are deterministic, bit for bit.

    Batch invariance: with reduction "none" the loss and lse of a token have the same bits whatever the other tokens of
    the call: their number, order, values and mask. Nor do gradients, memory_budget and threads matter, except that
    beside return_lse a term of lse is added in another order with gradients. The library's kernels keep this on a CPU, and on a
    GPU from compute capability 8.0 on for 16-bit hidden and weight. PyTorch's own operations do not, among them those for
    a temperature tensor and a quantised weight. Nor do float32 and a sharded vocabulary on a GPU.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. A target outside
            [0, V) that is not ignore_index is a ValueError on the CPU. On a GPU the loss is NaN, since the host does
            not wait for an error.
        NotImplementedError: no kernel or plan supports the call; second derivatives.
    """
    key = call.key_of(args, kwargs)
    if key is not None and (seen := _engine.calls.find(key)) is not None:
        return autograd.repeat(seen, *args)
    arguments = quantized.taken(bind(args, kwargs))
    if arguments.temperature is not None:
        from . import tempered

        arguments = tempered.folded(arguments)
        if arguments.temperature is not None:
            return tempered.cross_entropy(arguments)
    spread = spread_of(arguments)
    return raise_on_all_ranks(spread.group, lambda: call.cross_entropy(arguments, spread, key))


if linear_cross_entropy.__doc__:  # not under python -OO
    linear_cross_entropy.__doc__ = linear_cross_entropy.__doc__.replace("{terms}", term_docs(8)).replace(
        "{signature}", signature_text(4)
    )


@either_name
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    *,
    selected_ids: Optional[Tensor] = None,
    ignore_index: int = DEFAULT.ignore_index,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    temperature: float | Tensor | None = None,
    return_argmax: bool = False,
    keep: Optional[bool] = None,
    precision: Optional[str] = None,
    memory_budget: int | str | None = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> tuple[Any, ...]:
    """Returns the log-probability of each target, and the entropy and log-sum-exp of each token, all with gradients.

    Policy and preference losses (PPO, GRPO, DPO, ORPO, SimPO, KTO) are functions of these.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits, as in
            ``linear_cross_entropy``. bias: [V].
        target: [...] or [..., K], int32 or int64. Rows whose targets are all ``ignore_index`` (None is -100) give 0; their
            cost is that in ``linear_cross_entropy``. None, with selected_ids: no target.
        selected_ids: [K], the same for each token, or [..., K], int32 or int64: also returns the log-probabilities of
            these token ids [..., K], with gradients, by the same GEMMs. 0 for ``ignore_index``, and where the target is
            ignored.
        return_argmax: also returns the token id of the largest logit [...], int64, the first of several; -1 for ignored
            rows.
        keep: save the exponentials of all logits, in 16 bits, from forward to backward: two GEMMs backward instead of
            three. For eager calls on a GPU. They and weight's gradient, whose memory holds about half of them, exist
            from the forward on. So does weight in autocast's dtype, if it has another. The rest takes at most
            memory_budget (default: three tenths of the fp32 logits). None: save them where that is possible, and there
            is no softcap. With False, many calls before one backward hold nothing. A backward that retains its graph,
            and a gradient of the entropy under a softcap, recompute everything, in addition to the saved memory.
        temperature: as in ``linear_cross_entropy``: a number, or a tensor [...] with a gradient.
        softcap, logit_scale, precision, memory_budget, expected_ignored, sharding, and a DTensor weight: as in
            ``linear_cross_entropy``.

    Returns:
        (log_prob, entropy, lse), then argmax and the log-probabilities of selected_ids if asked for, float32 (float64
        for float64 inputs): log_prob shaped as target, or None without it, the others [...]. Logarithms are natural. The cost
        is one GEMM forward. Backward it is two where exponentials are saved, else three. A gradient of the entropy on a CPU
        or under a softcap takes four.

    Batch invariance: as in ``linear_cross_entropy``. log_prob has the bits of its loss with reduction "none", negated. On a
    GPU the last bits of a token depend on all its targets and selected_ids.

    Raises as ``linear_cross_entropy``. Where no input needs a gradient, nothing is saved, whatever ``keep`` is. Else
    ``keep=True`` raises ValueError on the CPU, for float64, for a sharded
    vocabulary and for traced calls. It also does with hooks of saved tensors (checkpoints, offloading), and for a
    memory budget that is too small; the message names the bytes that it takes.
    """
    key = None
    if selected_ids is None:
        options = dict(
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, temperature=temperature,
            return_argmax=return_argmax, keep=keep, precision=precision, memory_budget=memory_budget,
            expected_ignored=expected_ignored, sharding=sharding,
        )
        key = call.key_of((hidden, weight, target, bias), options)
        key = None if key is None else ("logprobs", key)
        if key is not None and (seen := _engine.calls.find(key)) is not None:
            return call.repeat_log_probs(seen, hidden, weight, target, bias)
    if keep is not None and not isinstance(keep, bool):
        raise TypeError(f"keep: expected True, False or None, got {keep!r}")
    if keep is None and softcap is not None:
        keep = False  # a gradient of the entropy would recompute everything beside the saved memory
    weight = quantized.taken(named(hidden=hidden, weight=weight, target=target, bias=bias, sharding=sharding)).weight
    ids = target if selected_ids is None else _ids_of(hidden, weight, target, selected_ids, ignore_index, sharding)
    found = token_log_probs(
        hidden, weight, ids, bias, Asked(bool(return_argmax), keep=keep), sharding, ignore_index=ignore_index,
        softcap=softcap, logit_scale=logit_scale, temperature=temperature, precision=precision,
        memory_budget=memory_budget, expected_ignored=expected_ignored, key=key,
    )
    results = found if return_argmax else found[:3]
    if selected_ids is None:
        return results
    log_prob, selected = shared.parts(results[0], target, selected_ids.shape[-1])
    return log_prob, *results[1:], selected


def _ids_of(hidden, weight, target, selected, ignore_index: Any, sharding: Optional[Sharding]) -> Tensor:
    """Returns the checked ids of target and selected_ids [..., K]."""
    for name, t in (("hidden", hidden), ("weight", weight), ("selected_ids", selected), ("target", target)):
        if not isinstance(t, Tensor) and (name != "target" or t is not None):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    for name, t in (("target", target), ("selected_ids", selected)):
        if t is not None:
            _memory.check(name, t, hidden.device)
            if t.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: expected int32 or int64, got {t.dtype}")
    ignore_index = loss_options(named(hidden=hidden, weight=weight, target=target, ignore_index=ignore_index)).ignore_index
    selected = replicated("selected_ids", selected)
    if selected.device.type == "cpu" and sharding is None and not torch.compiler.is_compiling():
        bad = ((selected < 0) | (selected >= weight.shape[0])) & (selected != ignore_index)
        if not torch._C._are_functorch_transforms_active() and bool(bad.any()):
            at = int(bad.flatten().nonzero()[0])
            raise ValueError(bad_id("selected_ids", weight.shape[0], ignore_index, int(selected.flatten()[at]), at))
    target = None if target is None else replicated("target", target)
    return shared.with_selected(torch, "target", target, selected, tuple(hidden.shape[:-1]), ignore_index)


def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], asked: Asked,
    sharding: Optional[Sharding] = None, key: Any = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``linear_logprobs`` with the outputs asked for: (log_prob, entropy, lse, argmax); the others are empty.
    key: of the cached call of ``linear_logprobs`` itself, or None."""
    arguments = quantized.taken(
        named(hidden=hidden, weight=weight, target=target, bias=bias, sharding=sharding, **options)
    )
    if arguments.temperature is not None:
        from . import tempered

        arguments = tempered.folded(arguments)
        if arguments.temperature is not None:
            return tempered.log_probs(arguments, asked)
    checked = loss_options(arguments)
    spread = spread_of(arguments)
    return raise_on_all_ranks(spread.group, lambda: call.log_probs(arguments, checked, asked, spread, key))


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
        known = [name for name in DEFAULTS if name != "bias"]
        for name in options:
            if name not in known:
                raise unexpected("LinearCrossEntropy", name, known)
        loss_options(named(hidden=None, weight=None, target=None, **options))
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
