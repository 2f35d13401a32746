"""torch.compile(model, backend="logitless"): logitless chunks the regions that benefit, Inductor compiles the rest.

    loss = torch.compile(lambda **batch: model(**batch).loss, backend="logitless", options={"memory_budget": "2GiB"})
    loss(input_ids=ids, labels=ids).backward()
    print(logitless.torch.explain_compiled())
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from logitless._autochunk.options import Limits
from logitless._library import parse_bytes
from logitless.torch._compile import regions, run
from logitless.torch._compile.effects import REGION

NAME = "logitless"
_numbers = itertools.count()


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(..., options={...})``."""

    memory_budget: int | str | None = None  # of each region, as in autochunk
    min_bytes: int | str = "16MiB"  # the least size of a matrix product that seeds a region
    ratio: float = 8.0  # see regions.grow
    inner: str | Callable = "inductor"  # the backend of the rest
    inner_options: Mapping[str, Any] = field(default_factory=dict)  # options of that backend


def checked(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Returns the checked options. Raises ValueError for an unknown option, TypeError and ValueError for invalid
    values."""
    given = dict(options or {})
    known = Options.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ValueError(f"torch.compile, backend '{NAME}': there is no option '{name}'; expected {', '.join(known)}")
    made = Options(**given)
    parse_bytes(made.memory_budget)
    try:
        smallest = parse_bytes(made.min_bytes)
    except (TypeError, ValueError):
        smallest = 0
    if smallest < 1:
        raise ValueError(f'min_bytes: expected bytes, or text such as "16MiB", above 0, got {made.min_bytes!r}')
    if isinstance(made.ratio, bool) or not isinstance(made.ratio, (int, float)) or not made.ratio >= 1:
        raise ValueError(f"ratio: expected a number, 1 or more, got {made.ratio!r}")
    if made.inner == NAME or not (isinstance(made.inner, str) or callable(made.inner)):
        raise ValueError(f"inner: expected another backend of torch.compile, got {made.inner!r}")
    if not isinstance(made.inner_options, Mapping):
        raise TypeError(f"inner_options: expected a dict, got {made.inner_options!r}")
    if mode not in (None, "default") and made.inner != "inductor":
        raise ValueError(f"mode: {mode!r} is Inductor's; inner is {made.inner!r}")
    return made


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """Compiles a graph; ``torch.compile(backend="logitless")`` calls it for each.

    Regions around matrix products of at least ``min_bytes`` become programs of the library, one operator each, if that
    lowers their memory. They are specialised on shapes. Everything else goes to ``inner``, as do regions with an
    operation that has no form in a tensor program. ``explain_compiled`` reports the decisions. A graph that returns its
    logits cannot chunk them, for example a model whose output has them beside the loss. A warning says so before the
    rest is compiled.
    """
    wanted = checked(options, mode)
    min_bytes = parse_bytes(wanted.min_bytes)
    limits = Limits(parse_bytes(wanted.memory_budget), 0, False, True)
    nodes = graph.graph.nodes
    name = wanted.inner if isinstance(wanted.inner, str) else getattr(wanted.inner, "__name__", repr(wanted.inner))
    made = run.CompiledGraph(next(_numbers), sum(n.op.startswith("call") for n in nodes), name)

    def take(region: regions.Region) -> None:
        chunked = run.ChunkedRegion(graph, region, limits, min_bytes)

        def call(*inputs):
            return chunked(*inputs)

        call.__name__ = call.__qualname__ = REGION
        regions.replace(graph.graph, region, call)
        made.regions.append(chunked)

    made.refused += regions.find(graph.graph, min_bytes, wanted.ratio, take)
    for what, why in made.refused:
        if why == regions.RETURNED:  # before compiling the rest, which may take minutes
            warnings.warn(f"torch.compile, backend '{NAME}': not chunked: {what}: {why}", stacklevel=2)
    graph.graph.lint()
    graph.recompile()
    run.graphs.append(made)
    return _inner(graph, example_inputs, wanted, mode)


def _inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], wanted: Options, mode: str | None) -> Callable:
    if wanted.inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode not in (None, "default") else {}), **wanted.inner_options}
        return compile_fx(graph, example_inputs, config_patches=patches or None)
    compiler = torch._dynamo.lookup_backend(wanted.inner)
    given = {"options": dict(wanted.inner_options)} if wanted.inner_options else {}
    return compiler(graph, example_inputs, **given)


backend.reset = run.graphs.clear  # called by torch._dynamo.reset()


def register() -> None:
    """Registers the backend with torch.compile, in case the package's entry point is not installed."""
    if NAME not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name=NAME)
