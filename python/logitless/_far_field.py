"""The far field of a training run, for both frameworks: its options, the library's head, and its state as bytes."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_size_t, c_void_p
from typing import Any, NamedTuple

from . import _library as c
from ._library import lib
from ._options import plain_number

ACCURACIES = {name: value for name, value in c.ACCURACIES.items() if name != "exact"}


class Options(NamedTuple):
    """The library's FarFieldOptions."""

    error: float = 0.01
    accuracy: str = "far_backward"
    sample_every: int = 16
    audit_rows: int = 128
    audit_every: int = 25
    refresh_every: int = 100
    refresh_delay: int = 4
    sample_rows: int = 1024
    memory_budget: int = 0

    def struct(self) -> c.FarFieldOptions:
        struct = c.new(c.FarFieldOptions)
        for name, value in self._asdict().items():
            setattr(struct, name, ACCURACIES[value] if name == "accuracy" else value)
        return struct

    def check(self) -> Options:
        """Returns the options. Raises ValueError if the library rejects them; without the library they are unused."""
        if not c.why_missing():
            Head(self, c.Context(threads=1))
        return self

    def accumulated(self, calls: int) -> Options:
        """Returns the options of a head that makes one step of so many calls. Raises ValueError if there are too many
        calls."""
        made = self._replace(audit_every=self.audit_every * calls, refresh_every=self.refresh_every * calls)
        try:
            return made.check()
        except ValueError as error:
            raise ValueError(f"accumulate: with {calls} calls a step, {error}") from None


class Report(NamedTuple):
    """Counters of a head since its creation, or since the creation of the head whose state it loaded."""

    steps: int
    dense_steps: int  # dense steps, fallbacks and repeated steps included
    repeated_steps: int  # dense steps that repeated a far-field step whose audit exceeded the error
    audits: int
    refreshes: int  # vocabulary orders that were adopted
    last_error: float  # of the last audit; -1: no audit yet
    worst_accepted_error: float  # the largest audited error of the far-field steps that were not repeated
    tau: float  # the threshold of the next far-field step
    mean_selected: float  # mean fraction of selected tiles over the far-field steps
    vocab: int  # vocabulary entries of the current order; 0: none
    far: bool  # whether the next step is a far-field step


class Statistics(NamedTuple):
    """Statistics of the last step. After a dense step `passes` is 0 and `selected` 1."""

    tokens: int
    valid_tokens: int  # tokens that are not ignored
    mean_log_prob: float  # mean log-probability of the targets
    selected: float  # the fraction of pairs (vocabulary tile, token block) computed exactly
    sampled: float  # the fraction of pairs sampled for the gradients of weight and bias alone
    passes: float  # multiply-adds in units of tokens * vocab * dim
    bound: float  # bound of the relative error of the gradient of hidden; -1: none
    audited_error: float  # the measured relative error; -1: not audited
    audited_lse_error: float  # root mean square over the audited tokens, in nats
    audited_lse_error_max: float  # the largest error of one token
    imbalance: float  # over vocabulary shards: the most selected pairs on one rank over the mean; else 1
    # Errors of far-both's estimates in each step with sample_every, measured at the sampled tiles alone.
    sampled_lse_error: float  # root mean square over tokens, in nats
    sampled_most: float  # the largest mass of a sampled tile over a token's total; above 1 if estimates are too low


def options(**given: Any) -> Options:
    """Returns checked options. Raises ValueError or TypeError that names the invalid one."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "accuracy":
            if value not in ACCURACIES:
                raise ValueError(f"accuracy: expected one of {', '.join(map(repr, ACCURACIES))}, got {value!r}")
        elif name == "memory_budget":
            value = c.parse_bytes(value)
        elif name == "error":
            value = plain_number(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"error: expected a number in (0, 1), got {value!r}")
            if not 0 < value < 1:
                raise ValueError(f"error: expected a number in (0, 1), got {value}")
        else:
            value = plain_number(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if not -(1 << 63) <= value < 1 << 63:
                raise ValueError(f"{name}: expected an int of 64 bits, got {value}")
        values[name] = value
    return Options(**values).check()


class Head:
    """A logitless_far_head and its context. Calls from several threads are serialised."""

    def __init__(self, options: Options, context: c.Context, replicas: Any = None):
        self.options, self.context = options, context
        self.handle = c_void_p()
        self._lock = threading.RLock()
        self._replicas = replicas  # a Communicator; its callbacks live as long as the head
        struct = options.struct()
        if replicas is not None:
            struct.replicas = replicas.handle
        c.check(lib.logitless_far_head_create(context.handle, byref(struct), byref(self.handle)))

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "handle", None):
            lib.logitless_far_head_destroy(self.handle)

    def step(self, options, inputs: c.CrossEntropyInputs, outputs: c.CrossEntropyOutputs) -> None:
        with self._lock:
            c.check(lib.logitless_far_head_step(self.handle, byref(options), byref(inputs), byref(outputs), None))

    def state(self) -> bytes:
        data, size = c_void_p(), c_size_t()
        with self._lock:
            c.check(lib.logitless_far_head_state(self.handle, byref(data), byref(size)))
            return ctypes.string_at(data, size.value)

    def set_state(self, state: bytes) -> None:
        with self._lock:
            c.check(lib.logitless_far_head_set_state(self.handle, state, len(state)))

    def report(self) -> Report:
        struct = c.new(c.FarFieldReport)
        with self._lock:
            c.check(lib.logitless_far_head_report(self.handle, byref(struct)))
        values = {name: getattr(struct, name) for name in Report._fields}
        return Report(**{**values, "far": bool(struct.far)})

    def statistics(self) -> Statistics:
        struct = c.new(c.LossStatistics)
        with self._lock:
            c.check(lib.logitless_far_head_statistics(self.handle, byref(struct)))
        return Statistics(*(getattr(struct, name) for name in Statistics._fields))

    def explain(self) -> str:
        with self._lock:
            return lib.logitless_far_head_explain(self.handle).decode()
