"""Convolutions with non-overlapping patches, such as 1 x 1 kernels, as matrix products: linear layers on patches."""

from __future__ import annotations

from dataclasses import dataclass

from logitless._autochunk.lower import Value, Writer


@dataclass(frozen=True)
class Patches:
    """Images [N, C, size...] as patches for a kernel [O, C, kernel...]. The stride equals the kernel's size, or the
    kernel covers the whole image."""

    channels: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        return [s // k for s, k in zip(self.sizes, self.kernel)]

    @property
    def _shape(self) -> list[int]:
        """The shape [C, count, kernel, ...] of one image's patches, without kernel sizes of 1."""
        pairs = zip(self.counts, self.kernel)
        return [self.channels, *(s for n, k in pairs for s in ((n,) if k == 1 else (n, k)))]

    @property
    def inner(self) -> list[int]:
        """The dimensions of the channel and the kernel in patches [N, C, count, kernel, ...]."""
        dims, d = [1], 2
        for k in self.kernel:
            dims += [] if k == 1 else [d + 1]
            d += 1 if k == 1 else 2
        return dims

    @property
    def outer(self) -> list[int]:
        """The dimensions of the image and the patch index."""
        return [d for d in range(1 + len(self._shape)) if d not in self.inner]

    def of(self, w: Writer, x: Value) -> Value:
        for d, (n, k) in enumerate(zip(self.counts, self.kernel)):
            x = w.slice(x, 2 + d, 0, n * k)
        return w.reshape(x, [x.shape[0], *self._shape])

    def weight(self, w: Writer, weight: Value) -> Value:
        """Reshapes the kernel [O, C, kernel...] to drop its sizes of 1."""
        return w.reshape(weight, [*weight.shape[:2], *(k for k in self.kernel if k > 1)])

    def image(self, w: Writer, patches: Value) -> Value:
        """Assembles images from patches [N, count..., C, kernel...], padded with zeros to their size."""
        order = self.outer + self.inner
        x = w.transpose(patches, [order.index(d) for d in range(patches.rank)])
        x = w.reshape(x, [x.shape[0], self.channels, *(n * k for n, k in zip(self.counts, self.kernel))])
        for d, size in enumerate(self.sizes):
            x = w.pad(x, 2 + d, 0, size - x.shape[2 + d])
        return x

    def convolved(self, w: Writer, x: Value, weight: Value, dtype=None) -> Value:
        """Returns the convolution as [N, count..., O]."""
        kernel = self.weight(w, weight)
        return w.dot(self.of(w, x), kernel, (self.inner, list(range(1, kernel.rank))), dtype=dtype)
