"""Groups of ranks: include/logitless/c_communicator.h for Python."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import Any, Callable

import numpy as np

from ._c_api import (
    DEVICE_CUDA, DEVICE_ERROR, OK, AbortFunction, CommunicatorCallbacksOptions, CommunicatorNcclOptions, ExchangeFunction,
    WaitFunction,
)
from ._library import LogitlessError, check, lib, new

# all_to_all or all_gather of host memory: (send buffer, receive buffer).
Exchange = Callable[[memoryview, memoryview], Any]
# The same for GPU memory: (send address, its bytes, receive address, its bytes, cudaStream_t).
GpuExchange = Callable[[int, int, int, int, int], Any]

_NCCL_ID_BYTES = 128


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _address(buffer: Any, size: int, name: str, writable: bool) -> int:
    array = np.frombuffer(buffer, np.uint8)
    if array.size != size:
        raise ValueError(f"{name}: expected {size} bytes, got {array.size}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: expected memory that can be written")
    return array.ctypes.data


def _guarded(function, raised: list[BaseException]):
    """Wraps a function to return a status. It stores the exception that the function raised."""

    def call(*arguments):  # the last argument is the user's pointer
        try:
            function(*arguments[:-1])
            return OK
        except BaseException as error:
            raised.append(error)
            return DEVICE_ERROR

    return call


def _host_exchange(function: Exchange, slices: int, size: int, raised: list[BaseException]):
    def call(mine, all, bytes_each, stream):
        function(_view(mine, bytes_each * slices), _view(all, bytes_each * size))

    return ExchangeFunction(_guarded(call, raised))


class Communicator:
    """One rank's handle of a group, for CPU memory or, with ``nccl`` and ``gpu_callbacks``, GPU memory. It exchanges
    bytes and never reduces.

    Every rank must make the same calls in the same order, each from one thread at a time. A failure is permanent and
    affects the whole group: all later calls raise ``LogitlessError``.
    """

    def __init__(self, handle: c_void_p):
        self.handle, self._kept, self._raised = handle, None, []

    @staticmethod
    def threads(size: int, limit: float = 60.0) -> list[Communicator]:
        """Returns the communicators of a group whose ranks are threads of this process. ``limit``: seconds to wait for
        other ranks."""
        handles = (c_void_p * max(size, 0))()
        check(lib.logitless_communicator_threads(size, round(limit * 1000), handles))
        return [Communicator(c_void_p(handle)) for handle in handles]

    @staticmethod
    def tcp(host: str, port: int, rank: int, size: int, limit: float = 60.0) -> Communicator:
        """Joins a group whose ranks are processes, on one host or several. Collective: rank 0 listens at ``port`` on
        all its addresses, and the others connect to ``host``. Nothing is encrypted. ``limit``: seconds to wait for
        other ranks."""
        made = Communicator(c_void_p())
        check(lib.logitless_communicator_tcp(host.encode(), port, rank, size, round(limit * 1000), byref(made.handle)))
        return made

    @staticmethod
    def callbacks(
        rank: int, size: int, all_gather: Exchange, all_to_all: Exchange, abort: Callable[[str], Any] | None = None
    ) -> Communicator:
        """Joins a group that uses the caller's collectives. ``all_gather(mine, all)`` fills ``all`` with every rank's
        ``mine``, in rank order. ``all_to_all(slices, slices_of_all)`` sends the r-th of ``size`` equal parts of its
        first buffer to rank r. An exception that they raise becomes the cause of the call's ``LogitlessError``."""
        raised: list[BaseException] = []
        options = new(CommunicatorCallbacksOptions)
        options.rank, options.size = rank, size
        options.all_gather = _host_exchange(all_gather, 1, size, raised)
        options.all_to_all = _host_exchange(all_to_all, size, size, raised)
        return Communicator._of(options, raised, abort)

    @staticmethod
    def gpu_callbacks(
        rank: int, size: int, all_gather: GpuExchange, all_to_all: GpuExchange, all_gather_host: Exchange,
        wait: Callable[[int, float], Any], abort: Callable[[str], Any] | None = None,
    ) -> Communicator:
        """Joins a group that uses the caller's collectives on GPU memory. ``all_gather(mine, mine_bytes, all,
        all_bytes, stream)`` and ``all_to_all`` enqueue work. ``all_gather_host`` exchanges host memory. ``wait(stream,
        seconds)`` returns once the stream is done."""
        raised: list[BaseException] = []

        def exchange(function, slices):
            def call(mine, all, bytes_each, stream):
                function(mine or 0, bytes_each * slices, all or 0, bytes_each * size, stream or 0)

            return ExchangeFunction(_guarded(call, raised))

        options = new(CommunicatorCallbacksOptions)
        options.rank, options.size, options.device = rank, size, DEVICE_CUDA
        options.all_gather, options.all_to_all = exchange(all_gather, 1), exchange(all_to_all, size)
        options.all_gather_host = _host_exchange(all_gather_host, 1, size, raised)
        options.wait = WaitFunction(_guarded(lambda stream, limit_ms: wait(stream or 0, limit_ms / 1000), raised))
        return Communicator._of(options, raised, abort)

    @staticmethod
    def nccl_id() -> bytes:
        """Returns the id that one rank sends to the others, for ``nccl``. Raises LogitlessError if NCCL is missing."""
        id = ctypes.create_string_buffer(_NCCL_ID_BYTES)
        check(lib.logitless_nccl_id(id))
        return id.raw

    @staticmethod
    def nccl(
        id: bytes, rank: int, size: int, max_ctas: int = 0, limit: float = 60.0, watch: bool = False, copy_engines: bool = True
    ) -> Communicator:
        """Joins a group over NCCL, one GPU per rank: the thread's current device. Collective.

        max_ctas: the most thread blocks of a collective's kernel; 0: NCCL chooses. limit: seconds to wait for other
        ranks. watch: a thread aborts the group when the process of another rank on this host has ended. copy_engines:
        large transfers into the group's memory use copy engines. This needs all ranks on one host, with peer access
        between their GPUs.
        """
        if len(id) != _NCCL_ID_BYTES:
            raise ValueError(f"id: expected the {_NCCL_ID_BYTES} bytes of nccl_id(), got {len(id)}")
        kept = ctypes.create_string_buffer(id, _NCCL_ID_BYTES)
        options = new(CommunicatorNcclOptions)
        options.id, options.rank, options.size = ctypes.cast(kept, c_void_p), rank, size
        options.max_ctas, options.limit_ms = max_ctas, round(limit * 1000)
        options.watch, options.copy_engines = int(watch), int(copy_engines)
        made = Communicator(c_void_p())
        check(lib.logitless_communicator_nccl(byref(options), byref(made.handle)))
        return made

    @staticmethod
    def _of(options, raised: list[BaseException], abort: Callable[[str], Any] | None) -> Communicator:
        if abort is not None:
            options.abort = AbortFunction(lambda reason, user: abort(reason.decode(errors="replace")))
        made = Communicator(c_void_p())
        check(lib.logitless_communicator_callbacks(byref(options), byref(made.handle)))
        made._kept, made._raised = options, raised
        return made

    @property
    def rank(self) -> int:
        return lib.logitless_communicator_rank(self._open())

    @property
    def size(self) -> int:
        return lib.logitless_communicator_size(self._open())

    def all_gather(self, mine: Any, all: Any) -> None:
        """Fills ``all`` with every rank's ``mine``: buffers of size * bytes_each and bytes_each bytes."""
        bytes_each = np.frombuffer(mine, np.uint8).size
        self._exchange(lib.logitless_communicator_all_gather, mine, bytes_each, all, bytes_each)

    def all_gather_host(self, mine: Any, all: Any) -> None:
        """Fills ``all`` with every rank's ``mine``, in host memory, also for a group that exchanges GPU memory."""
        bytes_each = np.frombuffer(mine, np.uint8).size

        def gather(handle, source, target, bytes_each, stream):
            return lib.logitless_communicator_all_gather_host(handle, source, target, bytes_each)

        self._exchange(gather, mine, bytes_each, all, bytes_each)

    def all_to_all(self, slices: Any, slices_of_all: Any) -> None:
        """Fills ``slices_of_all`` with the parts that every rank sends to this one."""
        total = np.frombuffer(slices, np.uint8).size
        if total % self.size:
            raise ValueError(f"slices: expected a multiple of {self.size} bytes, got {total}")
        self._exchange(lib.logitless_communicator_all_to_all, slices, total, slices_of_all, total // self.size)

    def check(self) -> None:
        """Raises LogitlessError if the group is known to have failed. It does not communicate."""
        check(lib.logitless_communicator_check(self._open()))

    def abort(self, reason: str) -> None:
        """Aborts the whole group, from any thread."""
        check(lib.logitless_communicator_abort(self._open(), reason.encode()))

    def cause(self) -> BaseException | None:
        """Returns the exception of the first of the caller's collectives that failed, if one did."""
        return self._raised[0] if self._raised else None

    def _exchange(self, function, given, given_bytes, to, bytes_each):
        source = _address(given, given_bytes, "given", False)
        target = _address(to, bytes_each * self.size, "to", True)
        try:
            check(function(self._open(), source, target, bytes_each, None))
        except LogitlessError as error:
            raise error from self.cause()

    def _open(self) -> c_void_p:
        if not self.handle:
            raise ValueError("communicator: expected one that is open, got one after close()")
        return self.handle

    def close(self, _lib=lib) -> None:
        """Leaves the group once no plan uses it any more. No call is possible on this object afterwards."""
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            _lib.logitless_communicator_destroy(handle)  # bound as a default, since this module is empty at interpreter exit

    def __del__(self):
        self.close()
