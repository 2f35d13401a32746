"""Plans of the portable implementation: chunks of tokens, blocks of the vocabulary, and the bytes that they take."""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

_LEAST_LIMIT = 16 << 20  # bytes that a call may take without a budget, if a quarter of the logits is less
_CPU_TILE = 128 << 20  # bytes of logits in memory at a time, beyond which a CPU gains nothing
_CPU_ROWS = 4 << 20  # bytes of logits that a CPU passes over several times, within its caches
_WIDE_BLOCK = 16 << 20  # bytes of a block of weight, or of its gradient, in fp32
_GPU_BLOCK = 128 << 20  # the same on a GPU, of a product that is added in parts
_DEQUANTIZED = 3  # more blocks, in fp32, that dequantising one takes at most, temporaries of other packages among them
_LEAST_TOKENS, _LEAST_VOCAB = 16, 64  # of a tile of logits
_FEW_TOKENS = 32  # a GEMM of fewer takes longer than a second one
_CHUNK = 128  # a GPU's chunk has a multiple of so many tokens
# Tokens whose logits a GPU recomputes in the time in which it adds a chunk's gradient of weight.
_ADDING, _ADDING_WIDE = 700, 50  # by products of 16-bit operands, and of fp32
_TRAFFIC, _TRAFFIC_WIDE = 70, 5  # multiply-adds of such products in the time in which a GPU moves a byte
# The time of a host to launch work, in multiply-adds of 16-bit operands that a GPU computes meanwhile.
_ROUND, _PASS = 6e11, 1.3e11  # the outputs of a chunk of tokens, and one pass over a tile of logits (2 ms and 0.45 ms)


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
    own: int = 0  # tokens whose gradients of logits fit into the memory of the gradient of weight
    adds: bool = False  # 16-bit products are added to fp32 in place


class Plan(NamedTuple):
    """``stored``: the logits of a chunk of tokens stay in memory from the softmax to the gradients. Otherwise the
    gradients recompute them, in blocks of ``vocab`` entries, but for tokens whose gradients of logits are saved."""

    stored: bool
    together: bool  # one recomputation serves both gradients
    tokens: int  # of a chunk
    vocab: int  # of a block
    rows: int  # tokens of a pass over logits
    bytes: int  # beyond inputs and results
    saved: int = 0  # tokens whose gradients of logits are saved, in the dtype of operands
    own: int = 0  # those of them in the memory of the gradient of weight
    chunk: int = 1  # of saved tokens


def _rows(s: Sizes, tokens: int, vocab: int) -> int:
    return min(tokens, max(1, _CPU_ROWS // (vocab * s.number))) if s.cpu else tokens


def _fixed(s: Sizes) -> int:
    """Returns the bytes of numbers per token and per vocabulary entry."""
    return s.tokens * (160 + 32 * min(s.per_token, 8)) + s.vocab * 2 * s.number + 4096


def _states(s: Sizes, apart: bool) -> int:
    """Returns the bytes of a token's operand [D], and of its gradient if that is made apart from the sums."""
    if s.direct:
        return s.dim * (s.number // 2 + s.number * (apart or not s.adds) * s.hidden)
    return s.dim * s.number * (2 if s.hidden or s.weight else 1)


def _tile(s: Sizes, tokens: int, vocab: int, apart: bool = False) -> int:
    """Returns the bytes of logits [tokens, vocab], and of the chunk's numbers and operands."""
    logits = tokens * vocab * (s.number + 2 * s.direct)
    logits += s.spare * _rows(s, tokens, vocab) * vocab * s.number
    return logits + tokens * (_states(s, apart) + 40 * s.per_token)


def _stored(s: Sizes, tokens: int, limit: int) -> Plan:
    """Returns the plan that keeps the logits of so many tokens."""
    most = _WIDE_BLOCK if s.cpu else _GPU_BLOCK
    block = max(1, min(s.vocab, min(most, max(limit // 8, 1)) // max(1, s.dim * s.number)))
    block -= block % 64 if not s.cpu and 64 < block < s.vocab else 0  # rows of a block are aligned
    sums = s.vocab * s.dim * s.number if s.sum_weight and tokens < s.tokens else 0
    blocks = block * s.dim * s.number * ((s.cast or s.direct) + _DEQUANTIZED * s.quantized)
    taken = _fixed(s) + _tile(s, tokens, s.vocab, True) + sums + blocks
    return Plan(True, True, tokens, block, _rows(s, tokens, s.vocab), taken)


def _recomputed(s: Sizes, tokens: int, vocab: int, together: bool) -> Plan:
    """Returns the plan that recomputes logits in tiles [tokens, vocab]."""
    wide = vocab * s.dim * s.number
    blocks = wide * (s.cast + _DEQUANTIZED * s.quantized + s.weight * (s.sum_weight or s.direct))
    sums = s.tokens * s.dim * s.number if together and s.sum_hidden else 0
    apart = s.hidden and not (together and s.weight)  # a chunk's gradient of hidden is a sum of its own
    taken = _fixed(s) + _tile(s, tokens, vocab, apart) + blocks + sums
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


def _widest(s: Sizes, limit: int, tokens: int, together: bool) -> Plan:
    """Returns the plan with the widest blocks for a chunk of tokens. Bytes are linear in the width."""
    one, two = (_recomputed(s, tokens, width, together).bytes for width in (1, 2))
    most = max(1, min(s.vocab, 1 + (limit - one) // max(1, two - one)))
    most -= most % 64 if 64 < most < s.vocab else 0  # rows of a tile are aligned
    blocks = -(-s.vocab // most)
    return _recomputed(s, tokens, min(most, -(-s.vocab // blocks // 64) * 64), together)


def _recomputing(s: Sizes, limit: int) -> Plan:
    """Returns the plan that recomputes the logits of all tokens, once or for each gradient."""
    plan = _largest_recomputed(s, limit, together=True)
    if plan.bytes > limit or min(plan.tokens, plan.vocab) < min(_FEW_TOKENS, s.tokens, s.vocab):
        apart = _largest_recomputed(s, limit, together=False)
        if plan.bytes > limit or min(apart.tokens, apart.vocab) > min(plan.tokens, plan.vocab):
            plan = apart
    if s.cpu or not s.vocab:
        return plan
    found, tokens = [plan], s.tokens
    while tokens >= min(s.tokens, _FEW_TOKENS):
        found += [p for together in (True, False) if (p := _widest(s, limit, tokens, together)).bytes <= limit]
        tokens = -(-tokens // 2)
        if tokens == 1:
            break
    return min(found, key=lambda one: (one.bytes > limit, _cost(s, one)))


def _cost(s: Sizes, plan: Plan) -> float:
    """Returns the time that a plan takes, in tokens whose logits a GPU computes meanwhile: of the device, or of the host
    that launches its work if that is longer."""
    adding, chunks = _ADDING if s.direct else _ADDING_WIDE, -(-(s.tokens - plan.saved) // plan.tokens)
    gradients, blocks = s.hidden + s.weight, -(-s.vocab // max(plan.vocab, 1))
    byte = (_TRAFFIC if s.direct else _TRAFFIC_WIDE) / max(1, s.dim)
    device = s.tokens * (1 + gradients + byte * 4.5 * s.number)
    if plan.stored:
        device += chunks * adding * s.weight
        rounds, passes = chunks, 2 * chunks
    else:
        of_hidden = adding * s.tokens / max(s.vocab, 1) * blocks
        device += (s.tokens - plan.saved) * (1 if plan.together else gradients) * (1 + byte * 2 * s.number)
        device += of_hidden * s.hidden + adding * max(chunks - 1, 0) * s.weight
        of_saved = -(-plan.saved // plan.chunk)
        rounds = chunks + of_saved
        passes = 2 * of_saved + blocks * chunks * (1 + (1 if plan.together else gradients)) + (plan.saved > 0) * blocks / 2
    host = rounds * _ROUND + passes * _PASS
    host /= max(1, s.vocab * s.dim) * (1 if s.direct else _ADDING / _ADDING_WIDE)
    return max(device, host) + 0.1 * min(device, host)


def _saved(s: Sizes, limit: int) -> Optional[Plan]:
    """Returns the plan of a GPU that saves the gradients of many tokens' logits; None if there is no memory for a chunk.

    The first are in the memory of the gradient of weight until that is written.
    """
    element, own = s.number // 2 if s.direct else s.number, min(s.own, s.tokens)
    sums = s.tokens * s.dim * s.number if s.hidden and s.sum_hidden else 0
    fixed = _fixed(s) + sums + s.tokens * s.dim * element
    best, chunk = None, min(s.tokens, (limit - fixed) // max(1, _tile(s, 1, s.vocab)))
    while chunk >= min(_FEW_TOKENS, s.tokens):
        if chunk >= _CHUNK:
            chunk -= chunk % _CHUNK
        columns = min(s.vocab, max(1, limit // 2 // max(1, s.dim * s.number)))
        for _ in range(6):
            plan = _saved_by(s, limit, fixed, chunk, columns, own)
            if plan is not None and (best is None or _cost(s, plan) < _cost(s, best)):
                best = plan
            columns = max(1, columns // 2)
        chunk //= 2
    return best


def _saved_by(s: Sizes, limit: int, fixed: int, chunk: int, columns: int, own: int) -> Optional[Plan]:
    """Returns the plan that saves most in blocks of about so many columns; None if it exceeds the limit. fixed: bytes."""
    element, left = s.number // 2 if s.direct else s.number, s.tokens - own
    blocks = -(-s.vocab // columns)
    block = min(s.vocab, -(-s.vocab // blocks // 64) * 64)
    wide = block * s.dim * s.number * (1 + s.cast + _DEQUANTIZED * s.quantized)
    first = _tile(s, chunk, s.vocab) + (wide if s.cast or s.quantized else 0)
    each, of_token = s.vocab * element, _tile(s, 2, block) - _tile(s, 1, block)
    of_rest = wide + _tile(s, 1, block) - of_token
    most = (limit - fixed - first) // each
    if each > of_token:
        most = min(most, (limit - fixed - of_rest - left * of_token) // (each - of_token))
    more = max(0, min(left, most))
    taken = fixed + more * each + max(first, of_rest + (left - more) * of_token)
    plan = Plan(False, True, max(1, left - more), block, chunk, taken, own + more, own, chunk)
    return plan if taken <= limit else None


def limit_of(tokens: int, vocab: int, number: int, budget: int) -> int:
    """Returns the bytes that a call may take. number: bytes of a logit. budget: as in ``plan_of``."""
    return abs(budget) or max(_LEAST_LIMIT, tokens * vocab * number // 4)


@functools.lru_cache(maxsize=256)
def plan_of(s: Sizes, budget: int) -> Plan:
    """Returns the plan within a budget in bytes (0: the default; below 0: a hint, which the least plan may exceed).

    Raises ValueError if the least plan takes more, with its bytes.
    """
    s = s._replace(tokens=max(s.tokens, 1))
    limit = limit_of(s.tokens, s.vocab, s.number, budget)
    gradients, found = s.hidden or s.weight, []
    if gradients and not s.sharded and s.vocab:
        most = min(s.tokens, max(1, _CPU_TILE // (s.vocab * s.number))) if s.cpu else s.tokens
        tokens = most
        plan = _stored(s, tokens, limit)
        if plan.bytes > limit and tokens > 1:  # bytes are linear in tokens
            one, two = _stored(s, 1, limit).bytes, _stored(s, 2, limit).bytes
            tokens = max(1, min(most, 1 + (limit - one) // max(1, two - one)))
            plan = _stored(s, tokens, limit)
        if plan.bytes <= limit and tokens >= min(s.tokens, _FEW_TOKENS):
            if s.cpu or tokens == s.tokens:
                return plan
            found.append(plan)
        if s.weight and not s.cpu and (saved := _saved(s, limit)):
            found.append(saved)
    plan = _recomputing(s, limit)
    if plan.bytes <= limit:
        found.append(plan)
    plan = min(found, key=lambda one: _cost(s, one), default=plan)
    if plan.bytes > limit and budget > 0:
        raise ValueError(
            f"memory_budget: {budget} bytes is below the least plan of the portable implementation, which needs "
            f"{plan.bytes} bytes"
        )
    return plan
