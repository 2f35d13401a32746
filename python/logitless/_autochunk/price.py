"""The price of a budget: the predicted time of a plan beside that of the fastest one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

NEAR = 1.1  # predicted times within this factor count as equal
_SLOW = 5.0  # a plan that takes this many times as long as the fastest is a warning


@dataclass(frozen=True)
class Price:
    """The predicted time that a budget costs."""

    times: float = 1.0  # the plan's, over that of the fastest plan
    bytes: int = 0  # of the smallest plan that takes at most a tenth longer than the fastest
    value: str = ""  # the largest value that the fastest plan may hold: name, operation and type

    @property
    def is_reported(self) -> bool:
        return self.times > NEAR

    @property
    def is_slow(self) -> bool:
        return self.times >= _SLOW

    def text(self, size: str) -> str:
        """Returns the price in words. size: of the fast plan, as text."""
        held = f", which may hold {self.value}" if self.value else ""
        return (
            f"predicted to take {self.times:.1f} times as long as the fastest plan{held}; "
            f"a budget of {self.bytes} ({size}) allows one within {100 * (NEAR - 1):.0f} % of it"
        )


def price_of(seconds: float, plans: Iterable[tuple[int, float]], value: str) -> Price:
    """Returns the price of a plan of some predicted seconds. plans: bytes and seconds of all that are known."""
    plans = list(plans)
    best = min([seconds, *(s for _, s in plans)])
    if best <= 0.0:
        return Price()
    enough = min((b for b, s in plans if s <= NEAR * best), default=0)
    return Price(seconds / best, enough, value)


def beside(seconds: float, price: Price, other_seconds: float, other: Price) -> Price:
    """Returns the price of a plan where another executor's plans, whose prices are known, may be chosen, too."""
    best, other_best = seconds / price.times, other_seconds / other.times
    if min(best, other_best) <= 0.0:
        return price
    known = other if other.bytes > 0 and (other_best, other.bytes) < (best * NEAR, price.bytes) else price
    return replace(known, times=seconds / min(best, other_best))


def weight(size: int, seconds: float) -> float:
    """Orders plans over a budget, the less the better: 1 % more memory must save 2 % of the time."""
    return float(size) ** 2 * seconds
