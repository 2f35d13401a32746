"""Tokens sampled from a vocabulary head, and its best log-probabilities, without the logits."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._losses import sampling as shared
from .._losses.options import count, number
from .._options import DEFAULT, either_name
from . import _xp as xp
from .loss import Asked, token_log_probs
from .losses._formulas import FORMULAS, chunked

FORMULAS["sample"] = lambda given, *form: shared.sample(xp, given, shared.Filters(*form))
FORMULAS["best_entries"] = lambda given, *form: shared.best_entries(xp, given, *form)


class Sample(NamedTuple):
    """Sampled tokens."""

    tokens: Tensor  # [...] int64
    log_prob: Tensor  # [...] float32 (float64 for float64 inputs)


class TopLogProbs(NamedTuple):
    """Log-probabilities of targets and of the best entries."""

    log_prob: Tensor  # [...] of the target; empty without targets
    top_log_probs: Tensor  # [..., K], largest first
    top_ids: Tensor  # [..., K] int64
    lse: Tensor  # [...]


@either_name
def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    *,
    temperature: float | Tensor = 1.0,
    top_k: Optional[int] = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    logit_bias: Optional[Tensor] = None,
    seed: Optional[int] = None,
    counter: Optional[Tensor] = None,
    generator: Optional[torch.Generator] = None,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
) -> Sample:
    """Samples a token at each position from ``softmax(logits)``, without storing the logits of all of them.

    The logits are ``softcap(logit_scale * (hidden @ weight.T + bias))``, in float32. They become
    ``(logits + logit_bias) / temperature``, and entries are dropped by top_k, then by top_p over the rest, and by min_p.
    A token is the largest entry after Gumbel noise is added: an exact sample of the softmax over the entries left.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden, or float32 beside 16 bits. bias: [V].
        temperature: a number, or a float tensor [...]. 0 takes the largest entry, the first of several.
        top_k: keeps the k largest entries, 1 to V; and those equal to the last.
        top_p: a number or a tensor [...], above 0 and at most 1: keeps the smallest set of the largest entries whose probabilities
            sum to at least top_p; and those equal to the last. 1 keeps all.
        min_p: a number or a tensor [...], from 0 to 1: keeps entries of at least min_p times the largest probability.
        logit_bias: [V] float; -inf forbids an entry.
        seed: an int. None: drawn from ``generator``, or PyTorch's default generator of the CPU.
        counter: [...] int64, a number for each token; None: its index. The noise of an entry is a function of the seed,
            the low 32 bits of its token's counter, and its vocabulary id. So a token does not depend on the others of
            its call: give each sequence and position a counter of its own, and a new call new counters or a new seed.
        softcap, logit_scale: as in ``linear_logprobs``.
        memory_budget: bytes, or text such as "512MiB", for either pass.

    Returns:
        Sample(tokens, log_prob). log_prob is what ``linear_logprobs(hidden, weight, tokens, bias)`` returns with the
        same softcap and logit_scale, bit for bit: temperature, filters and logit_bias do not enter. To train at a
        temperature T, give ``logit_scale=1 / T`` to both and leave temperature at 1. Without gradients.

    Cost: two GEMMs, one for the tokens and one for their log-probabilities. top_p without top_k sorts the vocabulary.
    Noise has 46 random bits an entry; sums of probabilities are float32.

    Raises ValueError and TypeError that name the argument, and the errors of ``linear_logprobs``.
    """
    given, lead, device = _head(hidden, weight, bias)
    tokens, vocab = given["hidden"].shape[0], given["weight"].shape[0]
    greedy = not isinstance(temperature, Tensor) and number("temperature", temperature, 0.0) == 0
    if top_k is not None and count("top_k", top_k) > vocab:
        raise ValueError(f"top_k: expected at most {vocab}, the vocabulary of weight, got {top_k}")
    form = shared.Filters(
        0.0 if softcap is None else number("softcap", softcap, above=0.0), number("logit_scale", logit_scale),
        0 if top_k in (None, vocab) else int(top_k), top_p is not None, min_p is not None, greedy,
    )  # fmt: skip
    if logit_bias is not None:
        given["logit_bias"] = xp.fixed("logit_bias", logit_bias, torch.float32, (vocab,))
    if not greedy:
        given["temperature"] = _per_token("temperature", temperature, lead, device, 0.0)
        given["key"] = _key(seed, generator, device)
        given["counter"] = _counter(counter, lead, tokens, device)
        if top_p is not None:
            given["top_p"] = _per_token("top_p", top_p, lead, device, most=1.0, above=0.0)
        if min_p is not None:
            given["min_p"] = _per_token("min_p", min_p, lead, device, 0.0, 1.0)
    with torch.no_grad():
        chosen = chunked("sample", memory_budget, "auto")(given, *form).reshape(lead)
        log_prob = token_log_probs(
            hidden, weight, chosen, bias, Asked(entropy=False), softcap=softcap, logit_scale=logit_scale,
            memory_budget=memory_budget,
        )[0]
    return Sample(chosen, log_prob)


@either_name
def linear_top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    *,
    k: int,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
) -> TopLogProbs:
    """Returns the k largest log-probabilities at each position with their token ids, and that of a target.

    Serving engines report them for prompts, and distillation stores them of a teacher.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden, or float32 beside 16 bits. bias: [V].
        target: [...] int32 or int64, or None.
        k: 1 to V.
        softcap, logit_scale, memory_budget: as in ``linear_logprobs``.

    Returns:
        TopLogProbs(log_prob, top_log_probs, top_ids, lse). Log-probabilities have the bits of ``linear_logprobs``. Equal
        ones are in the order of their ids. Without gradients; ``linear_logprobs`` takes the ids as targets [..., K].

    Cost: two GEMMs, one for the ids and one for their log-probabilities.

    Raises ValueError and TypeError that name the argument, and the errors of ``linear_logprobs``.
    """
    given, lead, _ = _head(hidden, weight, bias)
    vocab = given["weight"].shape[0]
    if count("k", k) > vocab:
        raise ValueError(f"k: expected at most {vocab}, the vocabulary of weight, got {k}")
    form = 0.0 if softcap is None else number("softcap", softcap, above=0.0), number("logit_scale", logit_scale)
    with torch.no_grad():
        ids = chunked("best_entries", memory_budget, "auto")(given, *form, k).reshape(*lead, k)
        targets = ids.sort(-1).values  # then a stable sort orders equal ones by id
        if target is not None:
            of_target = xp.indices("target", target, lead).to(torch.int64)
            targets = torch.cat([targets, of_target[..., None]], -1)
        found, _, lse, _ = token_log_probs(
            hidden, weight, targets, bias, Asked(entropy=False), softcap=softcap, logit_scale=logit_scale,
            memory_budget=memory_budget,
        )
        best, order = found[..., :k].sort(dim=-1, descending=True, stable=True)
        log_prob = found.new_empty(0) if target is None else found[..., k]
    return TopLogProbs(log_prob, best, targets[..., :k].gather(-1, order), lse)


def _head(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple[dict[str, Any], tuple[int, ...], torch.device]:
    """Returns the checked head, the shape of its tokens and their device."""
    with torch.no_grad():
        given = {name: t.detach() for name, t in xp.checked_head("", hidden, weight, bias).items()}
    return given, tuple(hidden.shape[:-1]), given["hidden"].device


def _per_token(name: str, value: Any, lead: tuple[int, ...], device: torch.device, *bounds: float, **more: float) -> Tensor:
    """Returns a number as a scalar tensor, or a tensor [...] as one of all tokens. The values of a tensor are not
    checked, since that would synchronise with a GPU."""
    if isinstance(value, Tensor):
        return xp.fixed(name, value, torch.float32, lead).reshape(-1)
    return torch.full((), number(name, value, *bounds, **more), device=device)


def _key(seed: Any, generator: Optional[torch.Generator], device: torch.device) -> Tensor:
    """Returns the key of the noise [2] int64, of 32 bits each."""
    if seed is None:
        where = "cpu" if generator is None else generator.device
        seed = int(torch.randint(1 << 62, (), generator=generator, device=where))
    elif generator is not None:
        raise ValueError("generator: expected None beside a seed")
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    return torch.tensor([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], device=device)


def _counter(counter: Optional[Tensor], lead: tuple[int, ...], tokens: int, device: torch.device) -> Tensor:
    if counter is None:
        return torch.arange(tokens, device=device)
    return xp.indices("counter", counter, lead).reshape(-1).to(torch.int64)
