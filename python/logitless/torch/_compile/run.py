"""Regions as functions of a captured graph: programs of the library if that pays, else the original operations."""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections import deque
from dataclasses import dataclass, field, replace

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from logitless._autochunk.options import Limits, Unsupported
from logitless._autochunk.plan import format_bytes
from logitless.torch._autochunk import native, transforms
from logitless.torch._autochunk.function import AutoChunked, Plan, outputs_of, specialized
from logitless.torch._autochunk.trace import alone
from logitless.torch._compile.effects import REGION
from logitless.torch._compile.regions import Region, described, extracted

log = logging.getLogger("logitless.torch.compile")


class _Body:
    """A region's graph as a function, whose operations keep their source lines."""

    def __init__(self, module: torch.fx.GraphModule):
        self.module = module
        self.__signature__ = _signature(module)

    def __call__(self, *inputs):
        return torch.fx.Interpreter(self.module).run(*inputs)


def _signature(module: torch.fx.GraphModule) -> inspect.Signature:
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


class ChunkedRegion(AutoChunked):
    """The function that replaces a region. The tracer of AOTAutograd calls it with fake tensors."""

    def __init__(self, owner: torch.fx.GraphModule, region: Region, limits: Limits, min_bytes: int):
        self.body = extracted(owner, region)
        super().__init__(_Body(self.body), replace(limits, keep=False), "auto", "run")
        self.__name__ = self.__qualname__ = REGION
        self.what = described(region.seed)
        self.min_bytes = min_bytes
        self.reports: list[str] = []  # distinct reports of the decisions

    def __call__(self, *inputs):
        plan, tensors = self._decided(inputs)
        if isinstance(plan, str):
            return self.body(*inputs)
        return outputs_of(plan, tensors)

    def refused(self, error, stacklevel: int) -> str:
        return str(error)

    def missed(self, plan: Plan) -> None:
        """Does nothing, since it is not yet decided whether the plan runs."""

    def _decided(self, inputs) -> tuple[Plan | str, list[torch.Tensor]]:
        try:
            transforms.refuse_in_graph()
            for t in inputs:
                if is_traceable_wrapper_subclass(t):
                    raise Unsupported(f"a {type(t).__name__} among its inputs; expected plain tensors")
            plan, tensors = self._plan(pytree.tree_map(specialized, inputs), {}, {})
            if not isinstance(plan, str):
                plan = self._worthwhile(plan, tensors[0].device)
        # Any error here only means that the graph is compiled without the region.
        except Exception as error:
            plan, tensors = f"{type(error).__name__}: {error}", []
        text = f"not chunked: {self.what}: {plan}" if isinstance(plan, str) else f"chunked: {self.what}\n{plan.describe()}"
        if text not in self.reports:
            self.reports.append(text)
            log.info("%s", text)
        return plan, tensors

    def _worthwhile(self, plan: Plan, device: torch.device) -> Plan | str:
        if plan.traced.captured:
            return "it holds tensors of its own"
        if plan.seed:
            return "it draws random numbers"
        made = [c for c in (plan.forward, plan.backward) if c is not None]
        before, after = (max(getattr(c, name) for c in made) for name in ("before", "after"))
        if before - after < max(self.min_bytes // 2, before // 4):
            return f"chunks would take {format_bytes(after)}, without them {format_bytes(before)}"
        super().missed(plan)
        with alone():
            for compiled in made:
                native.runner(compiled.request, device)  # raises now if a GPU lacks a requirement
        return plan


@dataclass
class CompiledGraph:
    """The decisions about a graph."""

    number: int
    operations: int
    inner: str
    regions: list[ChunkedRegion] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def describe(self) -> str:
        lines = [f"graph {self.number}: {self.operations} operations, those outside of what is chunked by {self.inner}"]
        lines += [text for region in self.regions for text in region.reports]
        lines += [f"not chunked: {what}: {why}" for what, why in self.refused]
        if len(lines) == 1:
            lines.append("no product is large enough, and so much larger than what it is made of (min_bytes, ratio)")
        return textwrap.indent("\n".join(lines), "  ").removeprefix("  ").rstrip()


_KEPT = 64
graphs: deque[CompiledGraph] = deque(maxlen=_KEPT)


def explain_compiled() -> str:
    """Reports what ``torch.compile(..., backend="logitless")`` did with the last 64 graphs that it compiled in this
    process. It lists the parts that are chunked, with their memory before and after, and those that are not, with the
    reason."""
    return "\n".join(graph.describe() for graph in graphs) + "\n" if graphs else "no graph was compiled\n"
