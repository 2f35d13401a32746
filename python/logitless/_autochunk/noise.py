"""Gumbel noise of tokens and vocabulary entries, lowered to a tensor program.

An element is a function of a key of two words, the low 32 bits of its token's counter, and its vocabulary id. The
function `uniform` makes 39 random bits v of Philox-4x32 (10 rounds; Salmon et al. 2011), of which 16 come from a result
that eight entries share. The noise is -log(-log(1 - v)), from -2.9 to 27.8. The counter is added to the first word of
the key, which is random.
"""

from __future__ import annotations

from .lower import Value


def gumbel(w, key: Value, counter: Value, vocab: int) -> Value:
    """key: [2]. counter: [N]. Returns f32 [N, vocab]."""
    f32, shape = w.dtypes.f32, (counter.shape[0], vocab)
    first, second = (w.cast(w.reshape(w.slice(key, 0, i, i + 1), ()), w.dtypes.i64) for i in range(2))
    word = w.add(w.reshape(w.cast(counter, w.dtypes.i64), (shape[0], 1)), first)
    ids = w.broadcast(w.iota((1, vocab), 1), shape)
    uniform = w.map("uniform", [w.broadcast(word, shape), second, ids], f32)
    race = w.map("log1p", [w.map("neg", [uniform], f32)], f32)
    return w.map("neg", [w.map("log", [w.map("neg", [race], f32)], f32)], f32)
