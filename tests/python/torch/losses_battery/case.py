"""A loss of the battery: a function, its inputs at any size, and the value that dominates its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """One set of sizes for all losses: the big value of each has `rows` x `vocab` numbers, up to a small factor."""

    rows: int  # N, tokens
    dim: int  # D, of hidden states
    vocab: int  # V: vocabulary entries, classes, hidden units
    sequences: int = 8  # the number of sequences that the tokens form

    @property
    def length(self) -> int:
        """T: the length of a sequence."""
        return self.rows // self.sequences

    @property
    def pairs(self) -> int:
        """P: P x P numbers are as many as N x V."""
        return math.isqrt(self.rows * self.vocab)


SMALL = Sizes(256, 16, 1024)  # 1 MiB in f32
BENCH = Sizes(2048, 256, 8192)  # 64 MiB


class Maker:
    """Makes inputs: normal numbers and indices, the same for the same seed. dtype is that of normal numbers. drawn_on:
    the device that draws them, whose numbers are its own."""

    def __init__(self, sizes: Sizes, device="cpu", dtype=torch.float32, seed: int = 0, drawn_on="cpu"):
        self.z = sizes
        self.device = torch.device(device)
        self.dtype = dtype
        self._generator = torch.Generator(drawn_on).manual_seed(seed)
        self._draw = {"generator": self._generator, "device": drawn_on}

    def normal(self, *shape, scale=1.0, grad=True, dtype=None) -> torch.Tensor:
        made = torch.randn(shape, **self._draw) * scale
        return made.to(self.device, dtype or self.dtype).requires_grad_(grad)

    def uniform(self, *shape, low=0.0, high=1.0) -> torch.Tensor:
        made = torch.rand(shape, **self._draw) * (high - low) + low
        return made.to(self.device)

    def whole(self, high, *shape) -> torch.Tensor:
        return torch.randint(0, high, shape, **self._draw).to(self.device)

    def mask(self, *shape, share=0.9) -> torch.Tensor:
        """Returns 1.0 for about a share of the elements, the first of each row among them, and 0 for the others."""
        made = torch.rand(shape, **self._draw) < share
        made[..., 0] = True
        return made.to(self.device, torch.float32)

    def hidden(self, dtype=None, grad=True) -> torch.Tensor:
        """[N, D]"""
        return self.normal(self.z.rows, self.z.dim, dtype=dtype, grad=grad)

    def sequences(self, dtype=None, grad=True) -> torch.Tensor:
        """[B, T, D]"""
        return self.normal(self.z.sequences, self.z.length, self.z.dim, dtype=dtype, grad=grad)

    def head(self, dtype=None, grad=True) -> torch.Tensor:
        """[V, D], for logits of variance 4."""
        return self.normal(self.z.vocab, self.z.dim, scale=2 / self.z.dim**0.5, dtype=dtype, grad=grad)

    def targets(self, *shape, ignored=True) -> torch.Tensor:
        """Returns token ids [N], or of a shape; one in eleven of them is -100."""
        made = self.whole(self.z.vocab, *(shape or (self.z.rows,)))
        if ignored:
            made.view(-1)[::11] = -100
        return made


@dataclass(frozen=True)
class Case:
    family: str
    function: Callable
    inputs: Callable[[Maker], tuple]
    big: str  # the value that dominates memory, and its shape
    numbers: Callable[[Sizes], int]  # count of its numbers
    trains: bool  # whether it is differentiated, or evaluated alone

    @property
    def name(self) -> str:
        return self.function.__name__

    def big_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes of the big value in f32."""
        return 4 * self.numbers(sizes)

    def arguments(self, sizes: Sizes, device="cpu", dtype=torch.float32, drawn_on="cpu", seed=0) -> list[torch.Tensor]:
        made = list(self.inputs(Maker(sizes, device, dtype, seed, drawn_on)))
        return made if self.trains else [t.detach() for t in made]


CASES: dict[str, Case] = {}  # by name


def logits(z: Sizes) -> int:
    return z.rows * z.vocab


def all_pairs(z: Sizes) -> int:
    return z.pairs * z.pairs


def case(family: str, inputs, big="logits [N, V]", numbers=logits, trains=True):
    """Registers a function as a loss of the battery."""

    def registered(function):
        if function.__name__ in CASES:
            raise ValueError(f"two losses are called {function.__name__}")
        CASES[function.__name__] = Case(family, function, inputs, big, numbers, trains)
        return function

    return registered
