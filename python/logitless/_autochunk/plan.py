"""Compiles programs to Python functions within a budget, and describes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from logitless import _library as c
from logitless._autochunk.checks import Checks
from logitless._autochunk.externs import Call, described
from logitless._autochunk.native import Machine, Request, program
from logitless._autochunk.options import Limits, Unsupported
from logitless._autochunk.locations import located, located_in
from logitless._autochunk.price import Price, price_of, weight
from logitless._autochunk.text import load
from logitless._compiler import Program

# Emits a compiled program: returns the function's Python and the bytes that it takes beyond inputs and results. If the
# library runs the program, the source is the program's own text.
Emit = Callable[[Program], tuple[str, int]]

_ATTEMPTS = 4  # the most smaller budgets tried until the Python function meets the one asked for
_BALANCED = 3  # plans tried where no budget is met
_LARGER = 2  # the most larger budgets tried if less than half of the budget is used
_MATTERS = 0.01  # fraction of the peak; smaller values are not reported
_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i32": 4, "i64": 8, "i8": 1}
# The default memory of a GPU's programs: a quarter of the largest value, but 64 MiB at least. A plan may take 3 % more time
# than the fastest one that is so small. That one may take 1.2 times as long as the fastest of all. The limit is 1.1 times
# where a plan within it fits into half of the function's own memory.
_SHARE, _SMALL, _SLACK, _PATIENCE, _NEAR = 4, 64 << 20, 0.03, 1.2, 1.1
_ONCE = 1e-3  # extra work of a plan that recomputes nothing, at most
_MANY = 128  # chunks of a loop beyond which calling its operations takes longer than running them


@dataclass
class Tried:
    """A candidate program for the function."""

    source: str
    bytes: int
    request: Request
    calling: float = 0.0  # seconds of calling its operations, which the compiler's rates leave out

    @property
    def program(self) -> Program:
        return program(self.request)

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.program.report["after"]["predicted_seconds"] + self.calling


@dataclass
class Compiled:
    """A compiled program and its function."""

    name: str
    source: str
    parameters: list[str]
    function: Callable
    before: int  # bytes beyond inputs and results, without loops
    after: int
    regions: list[dict] = field(default_factory=list)  # values that became loops
    refusals: list[str] = field(default_factory=list)  # values that did not, with the reason
    heads: list[dict] = field(default_factory=list)  # heads that run on the head engine
    request: Request = Request("")
    threads: int = 1  # CPU threads that run it, if the library does
    locations: dict[str, str] = field(default_factory=dict)  # the line of the user's code of each value
    externs: list[str] = field(default_factory=list)  # descriptions of operations that the framework runs
    most: int = 0  # the bytes that values may take by default; 0: there is a budget, or no plan is that small
    near: bool = False  # by default: smaller plans take a tenth more time than the fastest of all
    epilogues: list[dict] = field(default_factory=list)  # products whose kernel computes more, if the library runs it
    seconds: float = 1.0  # the predicted time
    plain_seconds: float = 0.0  # without loops, if the library runs it
    price: Price = Price()  # of the budget

    @property
    def of_threads(self) -> int:
        """Bytes with the kernels' scratch for all threads. The number of threads changes nothing else."""
        if self.threads <= 1:
            return self.after
        more = program(self.request.on(threads=self.threads)).arena_bytes - program(self.request).arena_bytes
        return self.after + more

    def located(self, message: str) -> str:
        return located(message, self.locations)

    def _place(self, head: str) -> str:
        """Returns the prefix of a line about a value such as "mm.head"."""
        location = self.locations.get(head.partition(".")[0])
        return f"{location}: " if location else ""

    def describe(self, budget: int) -> str:
        met = "" if budget == 0 else f" (budget {format_bytes(budget)}, {'met' if self.after <= budget else 'NOT met'})"
        lines = [
            f"{self.name}: {format_bytes(self.before)} beyond inputs and results without loops, "
            f"{format_bytes(self.after)} with{met}"
        ]
        if budget > 0 and self.price.is_reported:
            lines.append(f"  {self.slower()}")
        if self.near:
            lines.append(
                f"  no budget: the least memory within {100 * (_NEAR - 1):.0f} % of the fastest plan, which half of the "
                "function's own memory has room for"
            )
        elif self.most > 0:
            lines.append(
                f"  no budget: the least memory within {100 * _SLACK:.0f} % of the fastest plan of at most "
                f"{format_bytes(self.most)}"
            )
        if self.plain_seconds > 0.0:
            lines.append(f"  predicted: {1e3 * self.seconds:.3g} ms; without loops {1e3 * self.plain_seconds:.3g} ms")
        if self.threads > 1:
            took = format_bytes(self.of_threads)
            lines.append(f"  with what kernels take for {self.threads} threads instead of one: {took}")
        for h in self.heads:
            lines.append(
                f"  {self._place(h['head'])}{h['head']}: on the head engine, {h['plan']} plan, kernel {h['kernel']}, chunks of "
                f"{h['chunk_tokens']} tokens"
            )
        for r in self.regions:
            rounds = -(-r["extent"] // r["chunk"])
            more = f", {100 * r['extra_work']:.1f} % more multiply-adds" if r["extra_work"] > 1e-4 else ""
            phases = f"{r['phases']} phase{'s' if r['phases'] > 1 else ''}"
            lines.append(
                f"  {self.located(r['seed'])}: along {r['cut']}, {r['extent']} in {rounds} chunks of {r['chunk']}, {phases}{more}"
            )
            lines += [f"    boundary: {self.located(b)}" for b in r["boundaries"]]
        if not self.regions and not self.heads:
            lines.append("  no loops")
        lines += [
            f"  {self._place(e['product'])}{e['product']}: the kernel of the product {e['size']} also computes {e['epilogue']}"
            for e in self.epilogues
        ]
        lines += [f"  {e}" for e in self.externs]
        lines += [f"  not chunked: {self.located(r)}" for r in self.refusals if self._matters(r, budget)]
        return "\n".join(lines)

    def _matters(self, refusal: str, budget: int) -> bool:
        """Returns whether a refusal is worth reporting. It is if it names a value larger than 1 % of the peak, or is
        the last one of a plan over budget."""
        if self.over(budget) and refusal is self.refusals[-1]:
            return True
        return _size_in(refusal) > _MATTERS * self.before and not refusal.endswith("the head engine makes it")

    def over(self, budget: int) -> int:
        """Returns the bytes over a budget, 0 if it is met."""
        return max(self.after - budget, 0) if budget > 0 else 0

    def slower(self) -> str:
        """Describes the time that the budget costs."""
        return self.price.text(format_bytes(self.price.bytes))

    def missed(self, budget: int) -> str:
        """Describes a budget that is not met, the reason if it is known, and its price."""
        why = f": {self.located(self.refusals[-1])}" if self.refusals else ""
        price = f"; it is {self.slower()}" if self.price.is_reported else ""
        return (
            f"{self.name} takes {format_bytes(self.after)} beyond inputs and results, memory_budget is "
            f"{format_bytes(budget)}{why}{price}"
        )


_TYPE = re.compile(rf"\b({'|'.join(_SIZES)})\[([\d, ]*)\]")


def _size_in(message: str) -> float:
    """Returns the bytes of the value that a message names, or inf if it names no type."""
    found = _TYPE.search(message)
    return math.inf if found is None else _SIZES[found[1]] * _numbers_in(message)


def _numbers_in(message: str) -> int:
    """Returns the number of elements of the value that a message names, 0 if it names no type."""
    found = _TYPE.search(message)
    return 0 if found is None else math.prod(int(n) for n in found[2].split(",") if n.strip())


def format_bytes(count: int) -> str:
    """Formats a number of bytes: 1536 -> "1.5 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _compiled(request: Request, native: bool, locations: dict[str, str]) -> Program:
    try:
        return program(request)
    except (NotImplementedError, ValueError) as error:
        what = "has no form of" if isinstance(error, NotImplementedError) else "refuses"
        advice = "; executor='python' may run it" if native else ""
        why = located_in(str(error), request.text, locations)
        raise Unsupported(f"autochunk: the compiler {what} this program: {why}{advice}") from error


def compile_text(
    text: str,
    name: str,
    parameters: list[str],
    emit: Emit,
    limits: Limits,
    machine: Machine = Machine(),
    function: Callable[[Request], Callable] | None = None,
    locations: dict[str, str] | None = None,
    calls: Sequence[Call] = (),
    framework: str = "",
    space: dict | None = None,
    checks: Checks | None = None,
    spare: Callable[[], int] = lambda: 0,
    calling: Callable[[str], float] = lambda source: 0.0,
) -> Compiled:
    """Compiles a program to a function that meets the budget, if one is found.

    parameters: in the order of the function. function: makes the callable of a program that the library runs; None: the
    Python that emit wrote runs. locations: the user's line of each value, for messages. calls: the framework's functions
    that the program calls. space: names available to the generated module. checks: index checks that run before the
    function. spare: bytes that a plan may take by default if smaller ones are slower. calling: seconds of calling the
    operations of a source, beyond the compiler's prediction.
    """
    c.require("autochunk")
    if not parameters:
        raise Unsupported(f"autochunk: {name} reads no input")
    asked, locations = Request(text, machine, externs=function is None, checks=checks), locations or {}

    def made(request: Request) -> Tried:
        source, size = emit(_compiled(request, function is not None, locations))
        return Tried(source, size, request, calling(source))

    plain = made(replace(asked, chunk=False))
    tried: list[Tried] = []

    def attempt(budget: int, chunks: int) -> int:
        tried.append(made(replace(asked, budget=budget, chunks=chunks)))
        return tried[-1].bytes

    open_choice, most, near = limits.budget == 0 and limits.chunks == 0, 0, False
    if open_choice and limits.slack > 0.0:
        attempt(0, 0)
        all_plans = _compiled(replace(asked, budget=1), function is not None, locations)  # listed for budgets alone
        attempt(_frugal(all_plans.report["plans"], limits.slack), 0)
    elif open_choice and machine.device == c.DEVICE_CUDA and plain.bytes > 0:
        searched = [asked, asked.on(head_engine=False)] if machine.head_engine else [asked]
        searched = [replace(a, budget=_share_of(plain.program)) for a in searched]
        asked, wanted, most, near = _by_default(plain, [made(a) for a in searched], spare)
        attempt(wanted, 0)
    else:
        attempt(limits.budget, limits.chunks)
    after = tried[-1].bytes
    if machine.head_engine and limits.budget > 0 and after > limits.budget:
        # Loops take less memory than the least plan of the head engine.
        asked = asked.on(head_engine=False)
        after = attempt(limits.budget, 0)
    if limits.budget > 0:
        # The compiler's budget counts values. The library takes kernels' scratch as well, which the report lists with each
        # plan; Python keeps more values of a chunk alive. Without a listed plan that fits, the search tries smaller budgets
        # until one is met, then larger ones again to get fewer chunks.
        wanted, too_large, listed, on_cpu = limits.budget, 0, 0, machine.device == c.DEVICE_CPU
        for _ in range(_ATTEMPTS):
            if after <= limits.budget or (too_large > 0 and tried[-1].source == tried[-2].source):
                break
            too_large = wanted
            listed = _fitting(tried[-1], limits.budget) if on_cpu and function is not None else 0
            wanted = listed or max(min(int(wanted * min(0.9 * limits.budget / after, 0.7)), _taken(tried[-1]) - 1), 1)
            after = attempt(wanted, 0)
        for _ in range(_ATTEMPTS if too_large > 0 else 0):
            uses = max((t.bytes for t in tried if t.bytes <= limits.budget), default=0) > 0.8 * limits.budget
            if after > limits.budget or (uses and (listed > 0 or not on_cpu)) or (on_cpu and _is_fast(tried, limits.budget)):
                break
            middle = (wanted + too_large) // 2
            if attempt(middle, 0) <= limits.budget:
                wanted = middle
            else:
                too_large = middle
        for _ in range(_LARGER if function is None and too_large == 0 else 0):  # and a few larger ones
            if 2 * tried[-1].bytes > limits.budget:
                break
            wanted *= 2
            attempt(wanted, 0)
        # If the compiler's choice does not meet the budget, try the same number of chunks for every loop.
        if function is None and after <= limits.budget and _rounds(_chosen(tried, limits.budget)) >= _MANY:
            chunks = 8
            while chunks < _MANY and attempt(limits.budget // 4, chunks) > limits.budget:
                chunks *= 2
        chunks, last = 2, math.inf
        while after > limits.budget and after < 0.98 * last:
            last = after if chunks > 2 else math.inf
            chunks *= 2
            after = attempt(limits.budget // 4, chunks)
        if min(t.bytes for t in tried) > limits.budget:
            for request, wanted in _balanced(tried):
                tried.append(made(replace(request, budget=wanted, chunks=0)))
    last_report = tried[-1].program.report
    before = plain.bytes
    if most > 0:
        tried = tried if tried[-1].seconds < plain.seconds or tried[-1].bytes < before else [plain]
    elif limits.chunks == 0:  # loops that save no memory are dropped
        tried = [t for t in tried if t.bytes < before] + [plain]
    chosen = _chosen(tried, limits.budget)
    report = chosen.program.report
    refusals = sorted(report["not_chunked"] or last_report["not_chunked"], key=_size_in)  # the largest is last
    if not refusals and 0 < limits.budget < chosen.bytes:
        refusals = ["what remains is outside of loops: the compiler's plan is of fewer values than what runs"]
    elif 0 < limits.budget < chosen.bytes:
        found = min(t.bytes for t in tried)
        least = f"{format_bytes(found)} is the least that was found, for which a budget of {found} would do"
        refusals = [*refusals[:-1], f"{refusals[-1]}; {least}"]
    runs = load(chosen.source, name, space) if function is None else function(chosen.request)
    compiled = Compiled(
        name, chosen.source, parameters, runs, before, chosen.bytes, report["regions"], refusals,
        report["heads"], chosen.request, locations=locations, most=most, near=near,
        externs=described(chosen.program.text, calls, locations, framework), seconds=chosen.seconds,
        price=price_of(chosen.seconds, _known([plain, *tried], function is not None), _largest(plain.program, locations)),
    )
    if function is not None:
        compiled.epilogues, compiled.plain_seconds = report["epilogues"], plain.seconds
    if limits.strict:
        _check_strict(compiled, limits)
    return compiled


def _rounds(made: Tried) -> int:
    """Returns the number of chunks of the longest loop."""
    return max((-(-r["extent"] // r["chunk"]) for r in made.program.report["regions"]), default=1)


def _share_of(plain: Program) -> int:
    """Returns the bytes that a program should take without a budget: a quarter of its largest value, in fp32, or 64 MiB."""
    largest = 4 * max((_numbers_in(v["operation"]) for v in plain.report["before"]["at_peak"]), default=0)
    return max(largest // _SHARE, _SMALL)


def _by_default(plain: Tried, searched: Sequence[Tried], spare: Callable[[], int]) -> tuple[Request, int, int, bool]:
    """Chooses the memory of a program without a budget. Returns the request, the budget of its plan, the bytes that the
    plan may take, and whether it is chosen since smaller ones are slow.

    It is the least memory within 3 % of the fastest plan of at most a quarter of the largest value; less than 64 MiB counts
    as 64 MiB, of which the fastest plan is taken. A plan that recomputes nothing may exceed the quarter by a fifth, as a
    head's does. Where no such plan is fast enough, it is one of at most half of the value, and so on. Where that takes more
    than 1.1 times as long as the fastest of all, it is the smallest plan within the spare bytes that does not. searched:
    compiled with the head engine first, whose plans are taken of equal ones.
    """
    share = _share_of(plain.program)
    found = [(p, s.request) for s in searched for p in s.program.report["plans"]]
    plans = [(p["value_bytes"], p["seconds"], p["extra_work"], request) for p, request in found]
    best = min([plain.seconds, *(seconds for _, seconds, *_ in plans)])
    for most in (share << i for i in range(_SHARE.bit_length())):
        room = most + share // 5 if most == share else most  # of plans that recompute nothing
        fast = [p for p in plans if p[0] <= (room if p[2] < _ONCE else most) and p[1] <= _PATIENCE * best]
        if fast:
            enough = (1 + _SLACK) * min(seconds for _, seconds, *_ in fast)
            small = min(most, _SMALL)
            chosen = min((p for p in fast if p[1] <= enough), key=lambda p: (max(p[0], small), p[1], p[0]))
            near = [p for p in plans if p[1] <= _NEAR * best and p[0] <= spare()] if chosen[1] > _NEAR * best else []
            chosen = min(near, key=lambda p: (p[0], p[1]), default=chosen)
            return chosen[3], chosen[0], max(most, chosen[0]), bool(near)
    return replace(searched[0].request, budget=0), 0, 0, False


def _frugal(plans: list[dict], slack: float) -> int:
    """Returns the bytes of the smallest plan that recomputes nothing and whose time is within the slack of the fastest.
    """
    once = [p for p in plans if p["extra_work"] < _ONCE]
    enough = (1 + slack) * min(p["seconds"] for p in once)
    return max(min(p["value_bytes"] for p in once if p["seconds"] <= enough), 1)


def _taken(made: Tried) -> int:
    """Returns the bytes of the compiler's chosen plan."""
    return next(p["value_bytes"] for p in made.program.report["plans"] if p["chosen"])


def _fitting(made: Tried, budget: int) -> int:
    """Returns the bytes of values of the fastest plan that the compiler lists within a budget of everything that the
    library takes; 0: none."""
    copies = made.bytes - made.program.arena_bytes
    plans = [p for p in made.program.report["plans"] if p["arena_bytes"] + copies <= budget]
    return min(plans, key=lambda p: p["seconds"], default={"value_bytes": 0})["value_bytes"]


def _is_fast(tried: list[Tried], budget: int) -> bool:
    """Returns whether the plan for a budget takes at most 1.2 times as long as the fastest of all."""
    return _chosen(tried, budget).seconds <= _PATIENCE * min(t.seconds for t in tried)


def _balanced(tried: Sequence[Tried]) -> list[tuple[Request, int]]:
    """Returns requests, each with its budget, for the plans of the best balance of memory and time among all that the
    compiler found: a few, since what runs takes more than their values."""
    found = {p["value_bytes"]: (p["seconds"], t.request) for t in tried for p in t.program.report["plans"]}
    best = sorted(found, key=lambda size: weight(size, found[size][0]))[:_BALANCED]
    return [(found[size][1], max(size, 1)) for size in best]


def _known(tried: Sequence[Tried], native: bool) -> list[tuple[int, float]]:
    """Returns bytes and predicted seconds of the plans that were tried, and of those that the compiler lists for the
    library: its bytes are those of the arena and of copies of inputs."""
    known = [(t.bytes, t.seconds) for t in tried]
    for t in tried if native else ():
        copies = t.bytes - t.program.arena_bytes
        known += [(p["arena_bytes"] + copies, p["seconds"]) for p in t.program.report["plans"]]
    return known


def _largest(plain: Program, locations: dict[str, str]) -> str:
    """Returns the largest value of a program without loops, with its line."""
    live = plain.report["before"]["at_peak"]
    if not live:
        return ""
    name = live[0]["value"]
    place = locations.get(name.partition(".")[0])
    return (f"{place}: " if place else "") + f"%{name} {live[0]['operation']}".rstrip()


def _chosen(tried: list[Tried], budget: int) -> Tried:
    """Chooses a candidate: the least memory without a budget, else the predicted fastest that meets it, without very many
    chunks where there is one. If the budget cannot be met, memory and time are balanced: chunks that save almost nothing
    are not taken."""
    if budget == 0:
        return min(tried, key=lambda t: (t.bytes, _rounds(t) >= _MANY, t.seconds))
    meeting = [t for t in tried if t.bytes <= budget]
    if not meeting:
        return min(tried, key=lambda t: weight(t.bytes, t.seconds))
    return max(meeting, key=lambda t: (_rounds(t) < _MANY, -t.seconds, t.bytes))


def _check_strict(made: Compiled, limits: Limits) -> None:
    if 0 < limits.budget < made.after and limits.ready:
        raise ValueError(
            f"memory_budget: expected at least {format_bytes(made.after)}, the least plan that was found, got "
            f"{format_bytes(limits.budget)}"
        )
    if 0 < limits.budget < made.after:
        raise ValueError(f"autochunk: strict: {made.missed(limits.budget)}")
    for region in made.regions:
        if region["boundaries"]:
            raise ValueError(f"autochunk: strict: {made.name}: {made.located(region['boundaries'][0])}")
