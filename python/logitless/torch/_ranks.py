"""Words of a head over the ranks of a process group: what a call says of them, and what ranks tell each other before it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import numpy as np
import torch

from .. import _library as c
from .._communicator import Communicator

Result = TypeVar("Result")

_FAILED = -1
_TEXT = 512  # bytes of a message that the others get


class Words(NamedTuple):
    """Which words of a vocabulary this rank has, as values that operators take. Without a group: all of them."""

    group: str = ""  # the name of a process group
    vocab: int = 0
    first_word: int = 0
    tokens: bool = False  # hidden and everything per token are this rank's own


ALL = Words()


class Group:
    """A process group as a communicator of the library. Calls are collective, and on the CPU done when they return."""

    def __init__(self, name: str):
        self.process_group = process_group(name)
        self.communicator = _communicator(self.process_group)
        self.size = self.communicator.size
        self.plans = 0  # made so far: the same number on all ranks
        self.calls = 0  # of the library's, begun here
        self.ended = False  # the process group is no more

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """[size, ...] of every rank's ``mine``."""
        all = np.empty((self.size, *mine.shape), mine.dtype)
        self.communicator.all_gather(np.ascontiguousarray(mine).view(np.uint8), all.view(np.uint8).reshape(-1))
        return all

    def ready(self, plan: int) -> bool:
        """Whether all ranks have made the plan that they want to run, ``plan`` here (0: none yet). Raises what a rank
        failed with that does not come to the call."""
        plans = self.gather(np.array([plan]))[:, 0]
        if (plans == _FAILED).any():
            self._raise(plans == _FAILED, b"")
        return plan > 0 and bool((plans == plan).all())

    def fail(self, error: Exception) -> None:
        """Arrives for the others, who raise what this rank failed with."""
        try:
            failed = self.gather(np.array([_FAILED]))[:, 0] == _FAILED
            self._raise(failed, f"{type(error).__name__}: {error}".encode())
        except c.LogitlessError:
            pass

    def _raise(self, failed: np.ndarray, text: bytes) -> None:
        mine = np.zeros(_TEXT, np.uint8)
        mine[: min(len(text), _TEXT)] = np.frombuffer(text[:_TEXT], np.uint8)
        rank = int(failed.argmax())
        said = self.gather(mine)[rank].tobytes().rstrip(b"\0").decode(errors="replace")
        raise c.LogitlessError(f"rank {rank}: {said}")


def process_group(name: str):
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def _communicator(group) -> Communicator:
    import torch.distributed as dist

    def bytes_of(memory):
        return torch.frombuffer(memory, dtype=torch.uint8, count=len(memory))

    # Its name from PyTorch 2.13 on, and before.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def all_gather(mine, all):
        getattr(dist, gather)(bytes_of(all), bytes_of(mine), group=group)

    def all_to_all(pieces, pieces_of_all):
        dist.all_to_all_single(bytes_of(pieces_of_all), bytes_of(pieces), group=group)

    return Communicator.callbacks(dist.get_rank(group), dist.get_world_size(group), all_gather, all_to_all)


_groups: dict[str, Group] = {}
_lock = threading.Lock()


def group_of(name: str) -> Group:
    """The group of a name, made once; another one when the name has come to stand for another process group."""
    with _lock:
        found = _groups.get(name)
        if found is None or found.process_group is not process_group(name):
            for other in [n for n, group in _groups.items() if not _resolves(n, group)]:
                _groups.pop(other).ended = True
            found = _groups[name] = Group(name)
        return found


def _resolves(name: str, group: Group) -> bool:
    try:
        return process_group(name) is group.process_group
    except Exception:  # of a process group that was destroyed
        return False


def struct_of(words: Words) -> c.Sharding:
    struct = c.new(c.Sharding)
    struct.words = group_of(words.group).communicator.handle
    struct.vocab, struct.first_word, struct.tokens = words.vocab, words.first_word, int(words.tokens)
    return struct


def together(group: Group, function: Callable[[], Result]) -> Result:
    """A collective part of a call: what it raises every rank raises, so that ``told`` has nothing to tell."""
    try:
        return function()
    except Exception as error:
        error._logitless_told = True  # type: ignore[attr-defined]
        cause = group.communicator.cause()
        if isinstance(error, c.LogitlessError) and cause is not None:
            raise error from cause
        raise


def told(name: str, function: Callable[[], Result], tell: Callable[[], bool] = lambda: True) -> Result:
    """``function()``, which makes calls of the library together with the ranks of the group ``name`` (empty: alone);
    where it fails before the first, and ``tell()``, the other ranks are told."""
    if not name or torch.compiler.is_compiling():
        return function()
    group = group_of(name)
    before = group.calls
    try:
        return function()
    except Exception as error:
        if group.calls == before and not getattr(error, "_logitless_told", False) and tell():
            group.fail(error)
        raise


class Sharding(NamedTuple):
    """For plain tensors: the words of a head are spread over the ranks of ``group``, a rank's weight being rows
    ``[first_word, first_word + rows)`` of ``vocab``, its bias [rows]; rows may differ between ranks and be 0. Everything
    else of words is of the whole vocabulary: targets, ``class_weight``, label smoothing, argmax. Calls are collective.

    Args:
        group: a ``torch.distributed.ProcessGroup``; never a default one.
        vocab, first_word: None: the ranks' rows one after another, or up to the last one of a rank, which an exchange of
            8 bytes tells.
        tokens: hidden, target and everything per token are this rank's own tokens, of any number (sequence-parallel
            input). Otherwise they are the same on all ranks. Either way a mean or sum is that of all tokens, the same
            on all ranks, and gradients are complete; the upstream gradient has to be the same on all ranks.
    """

    group: Any
    vocab: Optional[int] = None
    first_word: Optional[int] = None
    tokens: bool = False


def words_of(sharding: Any, rows: int) -> Words:
    """What the argument ``sharding`` says, with ``rows`` of weight here. Raises TypeError, ValueError."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected logitless.torch.Sharding or None, got {type(sharding).__name__}")
    name = getattr(sharding.group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"sharding.group: expected a torch.distributed.ProcessGroup, got {type(sharding.group).__name__}")
    if sharding.first_word is None and sharding.vocab is not None:
        raise ValueError(f"sharding: expected first_word beside vocab={sharding.vocab!r}, got None")
    for field in ("vocab", "first_word"):
        value = getattr(sharding, field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62):
            raise ValueError(f"sharding.{field}: expected a number of words from 0 on, got {value!r}")
    if not isinstance(sharding.tokens, bool):
        raise TypeError(f"sharding.tokens: expected True or False, got {sharding.tokens!r}")
    if sharding.vocab is not None:
        return Words(name, sharding.vocab, sharding.first_word, sharding.tokens)
    if torch.compiler.is_compiling():
        raise ValueError("sharding: expected vocab and first_word under torch.compile, got None")
    group = group_of(name)
    first = sharding.first_word
    if first is not None:
        return Words(name, max(together(group, lambda: _rows(group, first + rows))), first, sharding.tokens)
    counts = together(group, lambda: _rows(group, rows))
    return Words(name, sum(counts), sum(counts[: group.communicator.rank]), sharding.tokens)


def _rows(group: Group, rows: int) -> list[int]:
    counts = group.gather(np.array([rows]))[:, 0]
    if (counts < 0).any():
        group._raise(counts < 0, b"")
    return counts.tolist()
