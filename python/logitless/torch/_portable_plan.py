"""Plans of the portable implementation: chunks of tokens, blocks of the vocabulary, and the bytes that they take."""

from __future__ import annotations

from typing import NamedTuple

_LEAST_LIMIT = 16 << 20  # bytes that a call may take without a budget, if a quarter of the logits is less
_CPU_TILE = 128 << 20  # bytes of logits in memory at a time, beyond which a CPU gains nothing
_CPU_ROWS = 4 << 20  # bytes of logits that a CPU passes over several times, within its caches
_WIDE_BLOCK = 16 << 20  # bytes of a block of weight, or of its gradient, in fp32
_DEQUANTIZED = 3  # more blocks that it takes to dequantise one: in fp32, its copy in the dtype of hidden, and temporaries
_LEAST_TOKENS, _LEAST_VOCAB = 16, 64  # of a tile of logits
_FEW_TOKENS = 32  # a GEMM of fewer takes longer than a second one


class Sizes(NamedTuple):
    """Everything that a plan depends on, except the budget."""

    tokens: int
    dim: int
    vocab: int  # rows of weight
    per_token: int  # targets per token
    number: int  # bytes of a logit: 4, or 8 for float64
    cast: bool = False  # blocks of 16-bit operands are cast to fp32
    direct: bool = False  # 16-bit operands are multiplied with results in fp32
    spare: int = 0  # more tiles that a pass over logits needs: one for a softcap, and one for an entropy
    hidden: bool = False  # gradients that are needed
    weight: bool = False
    sum_hidden: bool = False  # those whose sums need memory of their own, in fp32
    sum_weight: bool = False
    cpu: bool = True
    sharded: bool = False  # ranks exchange statistics of all tokens between forward and backward
    quantized: bool = False  # blocks of weight are dequantised


class Plan(NamedTuple):
    """``stored``: the logits of a chunk of tokens stay in memory from the softmax to the gradients. Otherwise the
    gradients recompute them, in blocks of ``vocab`` entries."""

    stored: bool
    together: bool  # one recomputation serves both gradients
    tokens: int  # of a chunk
    vocab: int  # of a block
    rows: int  # tokens of a pass over logits
    bytes: int  # beyond inputs and results


def _rows(s: Sizes, tokens: int, vocab: int) -> int:
    return min(tokens, max(1, _CPU_ROWS // (vocab * s.number))) if s.cpu else tokens


def _fixed(s: Sizes) -> int:
    """Returns the bytes of numbers per token and per vocabulary entry."""
    return s.tokens * (160 + 32 * min(s.per_token, 8)) + s.vocab * 2 * s.number + 4096


def _tile(s: Sizes, tokens: int, vocab: int) -> int:
    """Returns the bytes of logits [tokens, vocab], and of the chunk's numbers and operands."""
    logits = tokens * vocab * (s.number + 2 * s.direct)
    logits += s.spare * _rows(s, tokens, vocab) * vocab * s.number
    return logits + tokens * (s.dim * s.number * (2 if s.hidden or s.weight else 1) + 40 * s.per_token)


def _stored(s: Sizes, tokens: int, limit: int) -> Plan:
    """Returns the plan that keeps the logits of so many tokens."""
    block = max(1, min(s.vocab, min(_WIDE_BLOCK, max(limit // 8, 1)) // max(1, s.dim * s.number)))
    sums = s.vocab * s.dim * s.number if s.sum_weight and tokens < s.tokens else 0
    blocks = block * s.dim * s.number * ((s.cast or s.direct) + _DEQUANTIZED * s.quantized)
    taken = _fixed(s) + _tile(s, tokens, s.vocab) + sums + blocks
    return Plan(True, True, tokens, block, _rows(s, tokens, s.vocab), taken)


def _recomputed(s: Sizes, tokens: int, vocab: int, together: bool) -> Plan:
    """Returns the plan that recomputes logits in tiles [tokens, vocab]."""
    wide = vocab * s.dim * s.number
    blocks = wide * (s.cast + _DEQUANTIZED * s.quantized + s.weight * (s.sum_weight or s.direct))
    sums = s.tokens * s.dim * s.number if together and s.sum_hidden else 0
    taken = _fixed(s) + _tile(s, tokens, vocab) + blocks + sums
    return Plan(False, together, tokens, vocab, _rows(s, tokens, vocab), taken)


def _largest_recomputed(s: Sizes, limit: int, together: bool) -> Plan:
    tokens, vocab = s.tokens, max(s.vocab, 1)
    if s.cpu:
        tokens, vocab = min(tokens, 2048), min(vocab, 4096)
    least_tokens, least_vocab = min(tokens, _LEAST_TOKENS), min(vocab, _LEAST_VOCAB)
    while True:
        plan = _recomputed(s, tokens, vocab, together)
        if plan.bytes <= limit or (tokens == least_tokens and vocab == least_vocab):
            return plan
        if vocab > least_vocab and (vocab >= tokens or tokens == least_tokens):
            vocab = max(vocab // 2, least_vocab)
        else:
            tokens = max(tokens // 2, least_tokens)


def plan_of(s: Sizes, budget: int) -> Plan:
    """Returns the plan within a budget in bytes (0: the default; below 0: a hint, which the least plan may exceed).

    Raises ValueError if the least plan takes more, with its bytes.
    """
    s = s._replace(tokens=max(s.tokens, 1))
    limit = abs(budget) or max(_LEAST_LIMIT, s.tokens * s.vocab * s.number // 4)
    gradients = s.hidden or s.weight
    if gradients and not s.sharded and s.vocab:
        most = min(s.tokens, max(1, _CPU_TILE // (s.vocab * s.number))) if s.cpu else s.tokens
        tokens = most
        plan = _stored(s, tokens, limit)
        if plan.bytes > limit and tokens > 1:  # bytes are linear in tokens
            one, two = _stored(s, 1, limit).bytes, _stored(s, 2, limit).bytes
            tokens = max(1, min(most, 1 + (limit - one) // max(1, two - one)))
            plan = _stored(s, tokens, limit)
        if plan.bytes <= limit and tokens >= min(s.tokens, _FEW_TOKENS):
            return plan
    plan = _largest_recomputed(s, limit, together=True)
    if plan.bytes > limit or min(plan.tokens, plan.vocab) < min(_FEW_TOKENS, s.tokens, s.vocab):
        apart = _largest_recomputed(s, limit, together=False)
        if plan.bytes > limit or min(apart.tokens, apart.vocab) > min(plan.tokens, plan.vocab):
            plan = apart
    if plan.bytes > limit and budget > 0:
        raise ValueError(
            f"memory_budget: {budget} bytes is below the least plan of the portable implementation, which needs "
            f"{plan.bytes} bytes"
        )
    return plan
