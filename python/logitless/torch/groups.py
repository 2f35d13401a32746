"""Process groups as communicators of the library, and the metadata that their ranks exchange before a call."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np
import torch

from .. import _library as c
from .._communicator import Communicator

Result = TypeVar("Result")

# The most thread blocks of an NCCL exchange, which runs concurrently with GEMMs that want all SMs: without and with
# copy engines. docs/use/groups.md has the costs of other values.
MOST_CTAS, CTAS_BESIDE_COPIES = 8, 4
_FAILED = -1
_TEXT = 512  # bytes of a message that is propagated to other ranks


class Exchanges(NamedTuple):
    """The options of ``configure_exchanges``."""

    copy_engines: bool = True
    max_ctas: int = CTAS_BESIDE_COPIES
    process_group: bool = False


class Group:
    """A process group as communicators of the library. Calls are collective. Exchanges of host memory are complete when
    they return; those of GPU memory are enqueued."""

    def __init__(self, name: str):
        self.process_group = process_group(name)
        self._hosts = _host_group(self.process_group, name)
        self.given_up = ""  # the reason why no GPU call is possible any more
        self.communicator = _communicator(self._hosts)
        self.gpu_communicator: Communicator | None = None
        self.exchanges = Exchanges()  # of gpu_communicator
        self._meets: Callable[[Any, Any], None] = self.communicator.all_gather  # exchanges metadata between hosts
        self.size = self.communicator.size
        self._processes: list[int] = []
        self._share_memory = False
        self._processes = self._of_ranks()
        self.plans = 0  # plans made so far: the same number on all ranks
        self.calls = 0  # library calls begun on this rank
        self.ended = False  # the process group was destroyed

    def of_memory(self, device: torch.device) -> Communicator:
        """Returns the communicator for the memory of a device."""
        if device.type == "cpu":
            return self.communicator
        if self.gpu_communicator is None:
            native = _nccl_communicator(self, device)
            if native is not None:
                self._meets = native.all_gather_host  # in shared memory: no call of PyTorch, no socket
            self.gpu_communicator = native or _gpu_communicator(self, self._hosts, device)
        return self.gpu_communicator

    def on_one_host(self) -> bool:
        """Returns whether all ranks are processes on one host that see each other and share memory."""
        return all(self._processes) and self._share_memory

    def cause(self) -> BaseException | None:
        """Returns the exception of the first of PyTorch's collectives that failed, if one did."""
        of_gpu = None if self.gpu_communicator is None else self.gpu_communicator.cause()
        return self.communicator.cause() or of_gpu

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """All-gathers ``mine`` of every rank: [size, ...]."""
        all = np.empty((self.size, *mine.shape), mine.dtype)
        try:
            self._meets(np.ascontiguousarray(mine).view(np.uint8), all.view(np.uint8).reshape(-1))
        except c.LogitlessError as error:
            raise self._who_failed(error) from error.__cause__
        return all

    def _of_ranks(self) -> list[int]:
        """Returns the process id of each rank, or 0 for one that this process cannot see."""
        place = _pid_namespace()
        memory = _shared_memory() if place else 0
        numbers = b"".join(n.to_bytes(8, "little") for n in (os.getpid(), memory))
        mine = np.frombuffer(place.ljust(8, b"\0") + numbers, np.uint64)
        every = self.gather(mine)
        self._share_memory = memory > 0 and bool((every[:, 2] == memory).all())
        return [int(process) if place and where == mine[0] else 0 for where, process, _ in every]

    def _who_failed(self, error: c.LogitlessError) -> c.LogitlessError:
        """Names the failed rank if its process on this host has ended. PyTorch's collectives only name an address."""
        for _ in range(5):
            for rank, process in enumerate(self._processes):
                if process and _has_ended(process):
                    return c.LogitlessError(f"rank {rank}'s process has ended: {error}")
            time.sleep(0.1)
        return error

    def ready(self, plan: int) -> bool:
        """Returns whether all ranks have made the plan that they want to run. plan: this rank's (0: none yet). Raises
        the error of a rank that failed before the call."""
        plans = self.gather(np.array([_FAILED if self.given_up else plan]))[:, 0]
        if (plans == _FAILED).any():
            self._raise(plans == _FAILED, self.given_up.encode())
        return plan > 0 and bool((plans == plan).all())

    def least(self, number: int) -> int:
        """Returns the least of the ranks' numbers, which are 0 or more. Raises the error of a rank that failed before."""
        numbers = self.gather(np.array([number]))[:, 0]
        if (numbers == _FAILED).any():
            self._raise(numbers == _FAILED, b"")
        return int(numbers.min())

    def fail(self, error: Exception) -> None:
        """Propagates this rank's failure to the other ranks, which raise it."""
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
        # Escapes control characters, so that another process's message cannot control the terminal.
        shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in said)
        raise c.LogitlessError(f"rank {rank}: {shown}")


def exists(name: str) -> bool:
    """Returns whether this process has a process group of the name."""
    try:
        return process_group(name) is not None
    except Exception:  # no such group, or no distributed package
        return False


def process_group(name: str):
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def backend_of(group, device: torch.device):
    """Returns the backend of a process group for a device's memory, or None."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


_made: dict[str, int] = {}  # number of host groups made for each name


def _host_group(group, name: str):
    """Returns the group if it supports CPU memory (gloo), else a new one of the same ranks. Collective in that case."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if backend_of(group, torch.device("cpu")) is not None:
        return group
    # The key uses the group's name, which its ranks share; new_group would count the groups that each rank made.
    _made[name] = _made.get(name, 0) + 1
    store = dist.PrefixStore(f"logitless/{name}/{_made[name]}", _get_default_store())
    return _Hosts(dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group)))


class _Hosts:
    """A gloo group that is not registered with PyTorch."""

    def __init__(self, group):
        self.group = group

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()


def _all_gather(all, mine, group):
    import torch.distributed as dist

    if isinstance(group, _Hosts):
        return group.group.allgather([list(all.chunk(group.size()))], [mine]).wait()
    # Its name since PyTorch 2.13, and before.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, gather)(all, mine, group=group)


def _all_to_all(slices_of_all, slices, group):
    import torch.distributed as dist

    if isinstance(group, _Hosts):
        return group.group.alltoall_base(slices_of_all, slices, [], []).wait()
    dist.all_to_all_single(slices_of_all, slices, group=group)


def _host_exchange(function, group):
    def bytes_of(memory):
        return torch.frombuffer(memory, dtype=torch.uint8, count=len(memory))

    return lambda mine, all: function(bytes_of(all), bytes_of(mine), group)


def _communicator(hosts) -> Communicator:
    return Communicator.callbacks(
        hosts.rank(), hosts.size(), _host_exchange(_all_gather, hosts), _host_exchange(_all_to_all, hosts)
    )


class _Bytes:
    """Exposes GPU memory to torch.as_tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _pid_namespace() -> bytes:
    """Returns 8 bytes that identify this host and its process namespace; empty if the system does not provide them."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_bytes(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return b""
    return hashlib.sha256(boot + str(space).encode()).digest()[:8]


def _shared_memory() -> int:
    """Returns the id of the shared memory that this process sees; 0 for none."""
    try:
        return os.stat("/dev/shm").st_dev
    except OSError:
        return 0


def _has_ended(process: int) -> bool:
    """Returns whether a process has ended, even if its parent has not reaped it."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return stat[stat.rfind(")") + 2 :][:1] in ("Z", "X")


def _nccl_communicator(of: Group, device: torch.device) -> Communicator | None:
    """Makes an NCCL communicator for ranks of one host, beside the process group's own. Exchanges call nothing of
    PyTorch. The hosts synchronise in shared memory, and the end of a rank's process aborts exchanges that wait for it.
    Returns None on all ranks if one of them lacks a requirement."""
    backend = backend_of(of.process_group, device)
    if backend is None or backend.name() != "nccl":
        return None
    wanted = of.exchanges
    able = of.on_one_host() and not c.lib.logitless_nccl_missing()
    facts = np.array([able, *wanted], np.int64)
    every = of.gather(facts)
    if (every[:, 1:] != facts[1:]).any():
        raise ValueError(f"configure_exchanges: expected the same on all ranks of a group, got {every[:, 1:].tolist()}")
    if wanted.process_group or not every[:, 0].all():
        return None
    rank = of.communicator.rank
    id = Communicator.nccl_id() if rank == 0 else bytes(128)
    id = of.gather(np.frombuffer(id, np.uint8))[0].tobytes()
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    seconds = limit.total_seconds() if limit is not None else 600.0
    with torch.cuda.device(device):
        made = Communicator.nccl(
            id, rank, of.size, wanted.max_ctas, seconds, watch=True, copy_engines=wanted.copy_engines
        )
    weakref.finalize(of, _finish, made, device, os.getpid())
    return made


def _finish(communicator: Communicator, device: torch.device, process: int) -> None:
    """Closes a communicator at the end of a group or of the interpreter. Other ranks may still wait for this GPU's
    enqueued sends."""
    if os.getpid() != process:  # a forked process
        return
    try:
        communicator.check()  # the GPU may wait forever in a failed group
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        communicator.abort(f"{type(error).__name__}: {error}"[:200])  # this GPU will not send any more
    communicator.close()


def _gpu_communicator(of: Group, hosts, device: torch.device) -> Communicator:
    """Makes a communicator from a process group whose backend supports GPU memory (NCCL); with gloo, data goes through
    the host. If a call fails between its exchanges, other ranks learn of it at the next one."""
    group = of.process_group

    # Successive calls exchange the same memory, on the same two streams.
    @functools.lru_cache(maxsize=64)
    def stream_of(address: int):
        # ExternalStream(0) would be a new stream.
        return torch.cuda.ExternalStream(address, device) if address else torch.cuda.default_stream(device)

    @functools.lru_cache(maxsize=512)
    def bytes_at(address: int, size: int):
        return torch.as_tensor(_Bytes(address, size), device=device)

    backend = backend_of(group, device)
    enqueues = backend is not None and backend.name() != "gloo"

    def exchange(function):
        def call(mine, mine_bytes, all, all_bytes, stream):
            if all_bytes == 0:
                return
            with torch.cuda.device(device), torch.cuda.stream(stream_of(stream)):
                given, to = bytes_at(mine, mine_bytes), bytes_at(all, all_bytes)
                if enqueues:
                    return function(to, given, group)
                got = torch.empty(all_bytes, dtype=torch.uint8)
                function(got, given.cpu(), hosts)
                to.copy_(got)

        return call

    def wait(stream, seconds):
        end = time.monotonic() + seconds
        while not stream_of(stream).query():
            if time.monotonic() > end:
                raise TimeoutError(f"the stream is not done within {seconds} s")
            time.sleep(1e-4)

    def give_up(reason: str) -> None:
        of.given_up = reason or "a call failed between its exchanges"

    return Communicator.gpu_callbacks(
        group.rank(), group.size(), exchange(_all_gather), exchange(_all_to_all), _host_exchange(_all_gather, hosts),
        wait, give_up,
    )


_groups: dict[str, Group] = {}
_lock = threading.Lock()


def group_of(name: str) -> Group:
    """Returns the group of a name, cached; a new one if the name now refers to another process group."""
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
    except Exception:  # the process group was destroyed
        return False


def least_of_ranks(name: str, number: int, device: torch.device) -> int:
    """Returns the least of the numbers of a group's ranks, with and without the library. Collective."""
    if not c.why_missing():
        group = group_of(name)
        return together(group, lambda: group.least(number))
    from torch.distributed import ReduceOp, all_reduce

    least = torch.tensor(number, device=device)
    all_reduce(least, ReduceOp.MIN, process_group(name))
    return int(least.item())


def together(group: Group, function: Callable[[], Result]) -> Result:
    """Runs a collective part of a call. All ranks raise its error, so ``raise_on_all_ranks`` does not repeat it."""
    try:
        return function()
    except Exception as error:
        error._logitless_propagated = True  # type: ignore[attr-defined]
        cause = group.cause()
        if isinstance(error, c.LogitlessError) and cause is not None:
            raise error from cause
        raise


def raise_on_all_ranks(name: str, function: Callable[[], Result]) -> Result:
    """Runs ``function()``, which makes library calls together with the ranks of the group ``name`` (empty: none). If it
    fails before the first call, the failure is propagated to the other ranks, if the library is there."""
    if not name or torch.compiler.is_compiling() or c.why_missing():
        return function()
    group = group_of(name)
    before = group.calls
    try:
        return function()
    except Exception as error:
        if group.calls == before and not getattr(error, "_logitless_propagated", False):
            group.fail(error)
            error._logitless_propagated = True  # type: ignore[attr-defined]
        raise
