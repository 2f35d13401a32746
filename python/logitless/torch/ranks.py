"""Vocabulary shards over the ranks of a process group: ``Sharding``, and its form in a call."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from .. import _library as c
from . import _memory, groups
from .groups import Group, group_of, together


class VocabShard(NamedTuple):
    """This rank's vocabulary shard, as values that operators accept. Without a group: the full vocabulary."""

    group: str = ""  # the name of a process group
    vocab: int = 0
    vocab_begin: int = 0
    tokens: bool = False  # hidden and everything per token are this rank's own
    exchange: int = c.EXCHANGE_PLANNED  # the exchange of such tokens or of weights
    columns: int = -1  # this rank's columns of weight, if columns are sharded
    interleaved: bool = False  # the vocabulary is interleaved for load balance


ALL = VocabShard()


def struct_of(vocab_shard: VocabShard, device: torch.device) -> c.Sharding:
    struct = c.new(c.Sharding)
    struct.vocab_group = group_of(vocab_shard.group).of_memory(device).handle
    struct.vocab, struct.vocab_begin = vocab_shard.vocab, vocab_shard.vocab_begin
    struct.tokens, struct.exchange = int(vocab_shard.tokens), vocab_shard.exchange
    struct.interleaved = int(vocab_shard.interleaved)
    if vocab_shard.columns >= 0:
        struct.weight, struct.columns = c.WEIGHT_COLUMNS, vocab_shard.columns
    return struct


def configure_exchanges(
    group: Any, *, copy_engines: bool = True, max_ctas: Optional[int] = None, process_group: bool = False
) -> None:
    """Sets how the GPUs of one host exchange data for heads sharded over the ranks of ``group``, if its backend is
    NCCL. Collective, before the group's first head on a GPU, with the same arguments on all ranks.

    Args:
        group: a ``torch.distributed.ProcessGroup``.
        copy_engines: if the GPUs have peer access, copy engines transfer large data and take no SMs from the GEMMs. The
            receive buffers are memory of the group, which stays allocated. False: thread blocks of NCCL transfer
            everything.
        max_ctas: the most thread blocks of an exchange that NCCL runs; 0: NCCL chooses; None: 4, or 8 with
            copy_engines=False. More are faster in isolation, but slow concurrent GEMMs and take more memory of each
            GPU: 76 MiB for 4 with four ranks, 148 for 8, 292 for 16, 488 for 32.
        process_group: uses the process group's own collectives. This takes no extra memory but more host time, and a
            lost rank is noticed only at their timeout.

    Raises TypeError and ValueError. Raises NotImplementedError if the library does not run the exchanges: another
    backend, several hosts, processes that do not see each other, or no NCCL found. Raises RuntimeError after the
    group's first head on a GPU.
    """
    for option, given in (("copy_engines", copy_engines), ("process_group", process_group)):
        if not isinstance(given, bool):
            raise TypeError(f"{option}: expected True or False, got {given!r}")
    if max_ctas is not None and (isinstance(max_ctas, bool) or not isinstance(max_ctas, int) or not 0 <= max_ctas <= 64):
        raise ValueError(f"max_ctas: expected an int from 0 to 64, or None, got {max_ctas!r}")
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    of = group_of(name)
    backend = groups.backend_of(of.process_group, torch.device("cuda"))
    if backend is None or backend.name() != "nccl" or not of.on_one_host():
        raise NotImplementedError("group: expected ranks of one host with NCCL for their GPUs")
    missing = c.lib.logitless_nccl_missing().decode()
    if missing:
        raise NotImplementedError(f"group: {missing}")
    if process_group and (not copy_engines or max_ctas is not None):
        raise ValueError("process_group: goes with neither copy_engines nor max_ctas, which are of the library's exchanges")
    if of.gpu_communicator is not None:
        raise RuntimeError("configure_exchanges: expected before the group's first head on a GPU")
    if max_ctas is None:
        max_ctas = groups.CTAS_BESIDE_COPIES if copy_engines else groups.MOST_CTAS
    of.exchanges = groups.Exchanges(copy_engines, max_ctas, process_group)


class Sharding(NamedTuple):
    """A vocabulary sharded over the ranks of ``group``, for plain tensors. Each rank's weight is rows ``[vocab_begin,
    vocab_begin + rows)`` of ``vocab``, and its bias is [rows]. The number of rows may differ between ranks and be 0.
    Other values of the vocabulary are global: targets, weights of classes, label smoothing, argmax. Calls are collective.

    Args:
        group: a ``torch.distributed.ProcessGroup``; there is no default.
        vocab, vocab_begin: None: the ranks' rows are concatenated in rank order, or vocab ends at the largest last row;
            either takes an exchange of 8 bytes.
        tokens: hidden, target and everything per token are this rank's own tokens, of any number (sequence-parallel
            input). Otherwise they are the same on all ranks. Either way a mean or sum is over all tokens and the same
            on all ranks, and gradients are complete. The upstream gradient must be the same on all ranks.
        exchange: with ``tokens``, the data that ranks exchange; the same on all ranks. "tokens": hidden states and slices
            of their gradient. "weights": rows of weight, a slice at a time, and slices of its gradient; takes 4 GEMMs.
            "planned": the one predicted to be faster.
        weight: how weight is sharded. "rows": vocabulary entries. "columns": weight is [vocab, C] with all rows, and C (0 or
            more) of hidden's D columns, in rank order. Then bias and its gradient are full and the same on all ranks.
            It requires ``tokens``, and weights are exchanged.
        interleaved: the vocabulary was interleaved with ``interleave_vocab``, so that frequent entries are spread evenly; plans of
            the far field depend on it. The same on all ranks.
    """

    group: Any
    vocab: Optional[int] = None
    vocab_begin: Optional[int] = None
    tokens: bool = False
    exchange: str = "planned"
    weight: str = "rows"
    interleaved: bool = False


def interleave_vocab(vocab: int, ranks: int, average: Optional[torch.Tensor] = None, seed: int = 0) -> torch.Tensor:
    """Returns a permutation, i64 [vocab], that interleaves the vocabulary for load balance: each of ``ranks`` equal
    parts has as many frequent and rare entries.

    Tokenizers order ids from frequent to rare. With contiguous shards of that order, the far field selects almost all
    tiles of the first rank. A ``Sharding`` takes contiguous ranges, so the vocabulary is permuted when a checkpoint is
    loaded, and ``Sharding(interleaved=True)`` informs the planner:

    - rank r's rows are ``weight[interleaved].tensor_split(ranks)[r]``, and likewise the bias's
    - targets, and other token ids, become ``torch.argsort(interleaved)[target]``
    - weights of classes become ``of_classes[interleaved]``
    - ``weight[torch.argsort(interleaved)]`` of all ranks' concatenated rows is the checkpoint's weight

    Args:
        average: [vocab], the frequencies of the entries (counts or average probabilities); None: ordered by id.

    Raises ValueError for numbers below 1 or above 2**31 - 1, and for an average of another size or with NaN or
    infinity.
    """
    for name, value in (("vocab", vocab), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise ValueError(f"{name}: expected an int from 1 to {(1 << 31) - 1}, got {value!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected an int from 0 to 2**64 - 1, got {seed!r}")
    if average is not None:
        _memory.check("average", average)
        if tuple(average.shape) != (vocab,):
            raise ValueError(f"average: expected [{vocab}], got {list(average.shape)}")
        average = average.detach().to("cpu", torch.float32).contiguous()
    interleaved = torch.empty(vocab, dtype=torch.int32)
    values = None if average is None else ctypes.cast(average.data_ptr(), ctypes.POINTER(ctypes.c_float))
    to = ctypes.cast(interleaved.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    c.check(c.lib.logitless_interleave_vocab(vocab, ranks, values, seed, to))
    return interleaved.long()


def vocab_shard_of(sharding: Any, rows: int, columns: int) -> VocabShard:
    """Returns the vocabulary shard of the argument ``sharding``, for this rank's weight [rows, columns]. Raises
    TypeError and ValueError."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected logitless.torch.Sharding or None, got {type(sharding).__name__}")
    name = getattr(sharding.group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"sharding.group: expected a torch.distributed.ProcessGroup, got {type(sharding.group).__name__}")
    if sharding.vocab_begin is None and sharding.vocab is not None:
        raise ValueError(f"sharding: expected vocab_begin beside vocab={sharding.vocab!r}, got None")
    for field in ("vocab", "vocab_begin"):
        value = getattr(sharding, field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62):
            raise ValueError(f"sharding.{field}: expected a number of vocabulary entries from 0 on, got {value!r}")
    for field in ("tokens", "interleaved"):
        if not isinstance(getattr(sharding, field), bool):
            raise TypeError(f"sharding.{field}: expected True or False, got {getattr(sharding, field)!r}")
    if sharding.exchange not in c.EXCHANGE_MODES:
        raise ValueError(f"sharding.exchange: expected one of {', '.join(map(repr, c.EXCHANGE_MODES))}, got {sharding.exchange!r}")
    if not sharding.tokens and sharding.exchange != "planned":
        raise ValueError(f"sharding.exchange: expected 'planned' where all ranks have all tokens, got {sharding.exchange!r}")
    if sharding.weight not in c.WEIGHT_SHARDINGS:
        raise ValueError(
            f"sharding.weight: expected one of {', '.join(map(repr, c.WEIGHT_SHARDINGS))}, got {sharding.weight!r}"
        )
    exchange = c.EXCHANGE_MODES[sharding.exchange]
    if sharding.weight == "columns":
        if not sharding.tokens or sharding.exchange == "tokens":
            raise ValueError("sharding.weight: 'columns' move to each rank's own tokens; expected tokens=True and weights that move")
        if sharding.vocab_begin not in (None, 0) or sharding.vocab not in (None, rows):
            raise ValueError(f"sharding: columns are of all {rows} vocabulary entries, got vocab={sharding.vocab!r}, vocab_begin={sharding.vocab_begin!r}")
        return VocabShard(name, rows, 0, True, exchange, columns)
    if sharding.vocab is not None:
        return VocabShard(name, sharding.vocab, sharding.vocab_begin, sharding.tokens, exchange, interleaved=sharding.interleaved)
    if torch.compiler.is_compiling():
        raise ValueError("sharding: expected vocab and vocab_begin under torch.compile, got None")
    group = group_of(name)
    first = sharding.vocab_begin
    if first is not None:
        vocab = max(together(group, lambda: row_counts(group, first + rows)))
        return VocabShard(name, vocab, first, sharding.tokens, exchange, interleaved=sharding.interleaved)
    counts = together(group, lambda: row_counts(group, rows))
    before = sum(counts[: group.communicator.rank])
    return VocabShard(name, sum(counts), before, sharding.tokens, exchange, interleaved=sharding.interleaved)


def row_counts(group: Group, rows: int) -> list[int]:
    """Returns the rows of each rank. Raises the error of a rank that failed before."""
    counts = group.gather(np.array([rows]))[:, 0]
    if (counts < 0).any():
        group._raise(counts < 0, b"")
    return counts.tolist()
