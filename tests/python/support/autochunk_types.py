"""Functions that autochunk has decorated, as a type checker sees them: this file is read, not run. The comment at the
end of a line is the checker's report of that line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitless.jax import autochunk as jax_autochunk
    from logitless.torch import autochunk

    @autochunk
    def bare(hidden: bytes, scale: float = 1.0) -> int:
        return 3

    @autochunk(memory_budget="2GiB", executor="native")
    def with_options(hidden: bytes, *, names: list[str]) -> str:
        return ""

    @jax_autochunk
    def of_jax(hidden: bytes) -> float:
        return 0.5

    @jax_autochunk(chunks=4)
    def of_jax_with_options(hidden: bytes) -> complex:
        return 1j

    reveal_type(bare(b"", scale=2.0))  # Revealed type is "int"
    reveal_type(with_options(b"", names=["a"]))  # Revealed type is "str"
    reveal_type(of_jax(b""))  # Revealed type is "float"
    reveal_type(of_jax_with_options(b""))  # Revealed type is "complex"
    reveal_type(bare.explain(b""))  # Revealed type is "str"
    reveal_type(with_options.source())  # Revealed type is "str"
    bare("text")  # Argument 1
    with_options(b"")  # Missing named argument "names"
    of_jax(b"", 3)  # Too many arguments
    autochunk(bare, memory=3)  # No overload variant
