"""Ranks that work together: include/logitless/c_communicator.h for Python."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import Any, Callable

import numpy as np

from ._c_api import (
    DEVICE_ERROR, OK, AbortFunction, CommunicatorCallbacksOptions, ExchangeFunction,
)
from ._library import LogitlessError, check, lib, new

# Two buffers of bytes: what this rank gives, what it gets.
Exchange = Callable[[memoryview, memoryview], Any]


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _address(buffer: Any, size: int, name: str, writable: bool) -> int:
    array = np.frombuffer(buffer, np.uint8)
    if array.size != size:
        raise ValueError(f"{name}: expected {size} bytes, got {array.size}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: expected memory that can be written")
    return array.ctypes.data


class Communicator:
    """One rank's end of a group, for the CPU's memory. It moves bytes and never adds.

    Every rank makes the same calls in the same order, each from one thread at a time. A group fails as a whole and for
    good: calls raise ``LogitlessError`` then."""

    def __init__(self, handle: c_void_p):
        self.handle, self._kept, self._raised = handle, None, []

    @staticmethod
    def threads(size: int, limit: float = 60.0) -> list[Communicator]:
        """A group whose ranks are threads of this process, by rank; ``limit``: seconds to wait for the others."""
        handles = (c_void_p * max(size, 0))()
        check(lib.logitless_communicator_threads(size, round(limit * 1000), handles))
        return [Communicator(c_void_p(handle)) for handle in handles]

    @staticmethod
    def callbacks(
        rank: int, size: int, all_gather: Exchange, all_to_all: Exchange, abort: Callable[[str], Any] | None = None
    ) -> Communicator:
        """Collectives of the caller's. ``all_gather(mine, all)`` fills ``all`` with what each rank gives as ``mine``,
        in the order of ranks; of ``all_to_all(pieces, pieces_of_all)`` piece r is for rank r. What they raise is the
        cause of the ``LogitlessError`` that the call raises."""
        raised: list[BaseException] = []

        def exchange(function, pieces):
            @ExchangeFunction
            def call(mine, all, bytes_each, stream, user):
                try:
                    function(_view(mine, bytes_each * pieces), _view(all, bytes_each * size))
                    return OK
                except BaseException as error:
                    raised.append(error)
                    return DEVICE_ERROR

            return call

        options = new(CommunicatorCallbacksOptions)
        options.rank, options.size = rank, size
        options.all_gather, options.all_to_all = exchange(all_gather, 1), exchange(all_to_all, size)
        if abort is not None:
            options.abort = AbortFunction(lambda reason, user: abort(reason.decode(errors="replace")))
        made = Communicator(c_void_p())
        check(lib.logitless_communicator_callbacks(byref(options), byref(made.handle)))
        made._kept, made._raised = options, raised
        return made

    @property
    def rank(self) -> int:
        return lib.logitless_communicator_rank(self.handle)

    @property
    def size(self) -> int:
        return lib.logitless_communicator_size(self.handle)

    def all_gather(self, mine: Any, all: Any) -> None:
        """Fills ``all`` with the ``mine`` of every rank: buffers of bytes_each and size * bytes_each bytes."""
        bytes_each = np.frombuffer(mine, np.uint8).size
        self._exchange(lib.logitless_communicator_all_gather, mine, bytes_each, all, bytes_each)

    def all_to_all(self, pieces: Any, pieces_of_all: Any) -> None:
        """Fills ``pieces_of_all`` with the piece of every rank that is for this one."""
        total = np.frombuffer(pieces, np.uint8).size
        if total % self.size:
            raise ValueError(f"pieces: expected a multiple of {self.size} bytes, got {total}")
        self._exchange(lib.logitless_communicator_all_to_all, pieces, total, pieces_of_all, total // self.size)

    def abort(self, reason: str) -> None:
        """Gives up, for the whole group; from any thread."""
        check(lib.logitless_communicator_abort(self.handle, reason.encode()))

    def cause(self) -> BaseException | None:
        """What the first of the caller's collectives that failed raised, if one did."""
        return self._raised[0] if self._raised else None

    def _exchange(self, function, given, given_bytes, to, bytes_each):
        source = _address(given, given_bytes, "given", False)
        target = _address(to, bytes_each * self.size, "to", True)
        try:
            check(function(self.handle, source, target, bytes_each, None))
        except LogitlessError as error:
            raise error from self.cause()

    def __del__(self):
        if getattr(self, "handle", None):
            lib.logitless_communicator_destroy(self.handle)
