"""In which order the runs of a comparison are made: all seeds of all settings, or a race against the clock.

In a race (successive halving; Karnin et al. 2013, Jamieson and Talwalkar 2016) all settings begin with one seed. After each round the
better half by mean validation RSUM goes on, with twice as many seeds, until two are left or the time is over. All that are still in the
race have the same seeds, so that they are compared pair by pair; the test split decides nothing.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from visavis.comparison.jobs import Outcome
from visavis.comparison.settings import Setting
from visavis.errors import VisavisError

Round = list[tuple[Setting, int]]
"""Settings and the seeds that each is to be trained with."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_budget(text: str) -> float:
    """Seconds, from a time such as "90s", "30m" or "1.5h". Raises VisavisError.

    >>> parse_budget("30m")
    1800.0
    """
    written = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if written is None or float(written[1]) == 0:
        raise VisavisError(f"the budget is {text!r}, expected a time such as 90s, 30m or 1.5h.")
    return float(written[1]) * _UNITS[written[2]]


def everything(settings: Sequence[Setting], seeds: int) -> Round:
    """Every setting with every seed; the first seed of all comes first, so that a comparison that is cut short is still one."""
    return [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]


def rounds(settings: Sequence[Setting], seeds: int, outcomes: Callable[[], Sequence[Outcome]]) -> Iterator[Round]:
    """The rounds of a race. outcomes: all that are known by then."""
    begun, left = 0, list(settings)
    while begun < seeds:
        through = min(max(2 * begun, 1), seeds) if len(left) > 2 else seeds
        yield [(setting, seed) for seed in range(begun + 1, through + 1) for setting in left]
        begun = through
        left = better_half(left, outcomes())


def better_half(settings: Sequence[Setting], outcomes: Sequence[Outcome]) -> list[Setting]:
    """The better half of settings by mean validation RSUM over the seeds that all of them have; two at least, those without a run that succeeded last."""
    runs: dict[str, dict[int, float]] = {setting.name: {} for setting in settings}
    for one in outcomes:
        if one.setting in runs and not one.failure:
            runs[one.setting][one.seed] = one.validation_rsum
    of_all = set.intersection(*map(set, (seeds for seeds in runs.values() if seeds))) if any(runs.values()) else set()

    def mean(setting: Setting) -> float:
        own = [value for seed, value in runs[setting.name].items() if seed in of_all]
        return statistics.fmean(own) if own else float("-inf")

    kept = [setting.name for setting in sorted(settings, key=mean, reverse=True)[: max(2, -(-len(settings) // 2))]]
    return [setting for setting in settings if setting.name in kept]


class Clock:
    """What is left of a budget, told by what the runs so far took. seconds: None for no limit."""

    def __init__(self, seconds: float | None):
        self.seconds, self.began, self.runs = seconds, time.monotonic(), 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def fitting(self, runs: Round) -> Round:
        """As many seeds of a round as end within the budget at the pace so far; the first round whole, as there is none yet."""
        if self.seconds is None or not self.runs:
            return runs
        room = (self.seconds - self.elapsed) / (self.elapsed / self.runs)
        seeds = sorted({seed for _, seed in runs})
        of_each = len(runs) / len(seeds)
        return [(setting, seed) for setting, seed in runs if of_each * (1 + seeds.index(seed)) <= room]
