"""Gumbel noise of tokens and vocabulary entries, lowered to a tensor program.

An element is a function of a key of two words, the low 32 bits of its token's counter, and its vocabulary id. Two
numbers of Threefry-2x32 (20 rounds; Salmon et al. 2011) make 46 random bits v, and the noise is -log(-log(1 - v)), from
-2.9 to 32.6. The counter is added to the first word of the key, which is random.
"""

from __future__ import annotations

from .lower import Value

STEP = 2.0**-23  # of the numbers that the function `random` draws
MOST = 1 - 2.0**-24  # of v, which rounding may make 1


def gumbel(w, key: Value, counter: Value, vocab: int) -> Value:
    """key: [2]. counter: [N]. Returns f32 [N, vocab]."""
    f32, shape = w.dtypes.f32, (counter.shape[0], vocab)
    first, second = (w.cast(w.reshape(w.slice(key, 0, i, i + 1), ()), w.dtypes.i64) for i in range(2))
    word = w.add(w.reshape(w.cast(counter, w.dtypes.i64), (shape[0], 1)), first)
    operands = w.broadcast(word, shape), w.broadcast(w.iota((1, vocab), 1), shape)
    low, high = (
        w.map("random", [operands[0], w.add(second, w.number(stream, w.dtypes.i64)), operands[1]], f32)
        for stream in (0, 1)
    )
    uniform = w.add(low, w.scaled(w.add(high, w.number(STEP / 2, f32)), STEP))
    uniform = w.map("min", [uniform, w.number(MOST, f32, shape)], f32)
    race = w.map("log1p", [w.map("neg", [uniform], f32)], f32)
    return w.map("neg", [w.map("log", [w.map("neg", [race], f32)], f32)], f32)
