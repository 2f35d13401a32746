"""A framework's dtypes, by their names in the text form of tensor programs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Dtypes(NamedTuple):
    f32: Any
    bf16: Any
    f16: Any
    f64: Any
    i32: Any
    i64: Any
    i8: Any  # booleans

    def name(self, dtype) -> str | None:
        return next((name for name, own in self._asdict().items() if own == dtype), None)

    def floating(self, dtype) -> bool:
        return dtype in self[:4]

    @property
    def narrow(self) -> tuple:
        return self.bf16, self.f16

    def wide(self, dtype):
        """Returns the dtype that composite operations compute in: f32 for 16-bit operands, as the frameworks' kernels
        do."""
        return self.f32 if dtype in self.narrow else dtype

    def listed(self) -> str:
        return ", ".join(str(d).removeprefix("torch.") for d in self)
