"""A comparison of a model's training step with and without a lazy head: loss, gradients, time and peak memory."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ._lazy import LazyHeadWarning, lazy_head, unpatch
from ._lazy._linear import is_lazy, linears_of
from ._peak import peak_of

_DEVICES = ("cpu", "cuda")
# Relative differences that rounding explains. 16-bit logits of the plain model are rounded, lazy ones are fp32.
_RTOL = {torch.float32: 1e-4, torch.float64: 1e-6}
_RTOL_16_BIT = 3e-2


@dataclass(frozen=True)
class Step:
    """A training step of the model, forward and backward."""

    loss: float
    seconds: float  # the median
    peak_bytes: int  # allocated at one time beyond what was allocated before, gradients included


@dataclass(frozen=True)
class Check:
    """The result of ``check``; ``str()`` of it is the table that it prints."""

    plain: Step
    lazy: Step
    loss_error: float  # relative
    gradient_error: float  # relative, in the 2-norm over all gradients; 0 without gradients
    furthest: str  # the parameter whose gradient contributes most to that error; "" without gradients
    rtol: float
    device: str
    notes: tuple[str, ...]  # why the lazy head saved less than it could: its warnings

    @property
    def same(self) -> bool:
        """Returns whether both errors are at most ``rtol``."""
        return self.loss_error <= self.rtol and self.gradient_error <= self.rtol

    def __str__(self) -> str:
        plain, lazy = self.plain, self.lazy
        rows = [
            ("", "the model", "with lazy_head", ""),
            ("loss", f"{plain.loss:.7g}", f"{lazy.loss:.7g}", f"relative difference {self.loss_error:.2g}"),
            ("gradients", "", "", f"relative difference {self.gradient_error:.2g}" + f", most in {self.furthest}" * bool(self.furthest)),
            ("time", _ms(plain.seconds), _ms(lazy.seconds), f"{_ratio(lazy.seconds, plain.seconds):.2f} of the model's"),
            ("peak memory", _mib(plain.peak_bytes), _mib(lazy.peak_bytes), f"{_mib(plain.peak_bytes - lazy.peak_bytes)} saved"),
        ]
        lines = [f"{name:<12}{a:>14}{b:>16}   {said}".rstrip() for name, a, b, said in rows]
        verdict = "the same" if self.same else "NOT the same"
        lines += [
            f"The losses and gradients are {verdict} to a relative {self.rtol:g}.",
            f"One training step on {self.device}; the peak is of PyTorch's allocator, beyond parameters and batch.",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def check(
    model: nn.Module, batch: Mapping[str, Any], *, rtol: Optional[float] = None, steps: int = 3, verbose: bool = True
) -> Check:
    """Compares a training step of a model with the same step under ``lazy_head``: did the loss change, and how much is
    saved?

    Each step is ``model(**batch).loss.backward()`` (the loss is the attribute or item ``loss``, or the output itself).
    All steps begin with the same random state and buffers. Afterwards the model is as before: parameters, gradients,
    buffers, mode, head, and the random state. It is not trained.

    model: what ``lazy_head`` takes, with its head plain, and parameters on one device, a CPU or a GPU. batch: its
        keyword arguments, labels among them, on that device.
    rtol: the largest relative difference of the loss, and of all gradients in the 2-norm, that counts as the same.
        Default: 1e-4 for float32 parameters, 3e-2 for 16-bit ones, whose plain model rounds its logits to 16 bits.
    steps: timed steps of each, after one that is not timed. verbose: print the table.

    The peak is the most memory that PyTorch's allocator gave out at one time during a step, beyond what was given out
    before: activations, logits, workspaces and gradients. On a GPU ``torch.cuda``'s peak statistics are reset.

    Raises TypeError or ValueError if there is no loss, if the head is lazy already, or if the model has no head that
    ``lazy_head`` takes. The message gives the reason.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping of the model's keyword arguments, got {type(batch).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps: expected 1 or more, got {steps!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module with a head, got {type(model).__name__}")
    if any(is_lazy(m) for m in linears_of(model)):
        raise ValueError("model: its head is lazy already, so there is nothing to compare with; call unpatch(model) first")
    unpatch(lazy_head(model))  # refuses what it cannot take, before the first step
    device = _device_of(model)
    if rtol is None:
        rtol = max(_RTOL.get(p.dtype, _RTOL_16_BIT) for p in model.parameters())
    with _restored(model, device) as reset:
        plain, expected = _measure(model, batch, steps, device, reset)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", LazyHeadWarning)
            lazy_head(model)
            try:
                lazy, found = _measure(model, batch, steps, device, reset)
            finally:
                unpatch(model)
    notes = dict.fromkeys(str(w.message) for w in said if issubclass(w.category, LazyHeadWarning))
    error, furthest = _difference(found, expected)
    loss_error = 0.0 if lazy.loss == plain.loss else abs(lazy.loss - plain.loss) / max(abs(plain.loss), 1e-30)
    result = Check(plain, lazy, loss_error, error, furthest, rtol, str(device), tuple(notes))
    if verbose:
        print(result)
    return result


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in _DEVICES:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"model: expected its parameters on one device, cpu or cuda, got {names}")
    return devices.pop()


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"model: expected an output with a loss of one number, got {type(output).__name__}; do the labels stand in the batch?"
        )
    return loss


# --- The state of a model that a step changes.


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields a function that sets buffers and random state as they are now, and frees gradients. At the end all of the
    three are as before."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def reset() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for p, _ in gradients:
            p.grad = None
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    try:
        yield reset
    finally:
        reset()
        for p, gradient in gradients:
            p.grad = gradient


def _measure(
    model: nn.Module, batch: Mapping[str, Any], steps: int, device: torch.device, reset: Callable
) -> tuple[Step, dict[str, Tensor]]:
    """Returns the measured step, and copies of the gradients on the CPU."""

    def step() -> float:
        loss = _loss_of(model(**batch))
        if loss.requires_grad:
            loss.backward()
        return loss.item()  # waits for a GPU

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.enable_grad():
        reset()
        loss = step()
        gradients = {n: p.grad.detach().to("cpu", copy=True) for n, p in model.named_parameters() if p.grad is not None}
        taken = []
        for _ in range(steps):
            reset()
            synchronize()
            begin = time.perf_counter()
            step()
            synchronize()
            taken.append(time.perf_counter() - begin)
        reset()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step()
            peak = torch.cuda.max_memory_allocated(device) - before
        else:
            peak, _ = peak_of(step, device="cpu")
    reset()
    return Step(loss, statistics.median(taken), peak), gradients


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the relative difference of all gradients in the 2-norm, and the parameter with the largest share of it.
    A gradient that only one of them has makes it infinite."""
    for name in found.keys() ^ expected.keys():
        return float("inf"), name
    shares = {n: float(torch.linalg.vector_norm((found[n] - g).float())) for n, g in expected.items()}
    norm = sum(float(torch.linalg.vector_norm(g.float())) ** 2 for g in expected.values()) ** 0.5
    error = sum(share**2 for share in shares.values()) ** 0.5
    return _ratio(error, norm) if error else 0.0, max(shares, key=shares.__getitem__, default="")
