"""What seeds say of a difference: intervals by Student's t, paired tests, Holm's correction, and how many more seeds would settle it.

Runs of one seed see the same data in the same order, so rows are compared seed by seed. These are statements about *other seeds on the
same test images*; what other images would say is another variance, and is kept apart (``bootstrap``).

Which pairs. A row that was chosen because it looks best is ahead partly by luck, and the luck of a seed is the same on validation and on
test, as both measure the same trained model. Tests against "the best on validation" alone therefore raise false alarms: with 8 equal rows
of 5 seeds in 9 % of all comparisons where validation and test share nine tenths of their variance over seeds, in 10 % where they share all
of it, instead of 5 %. ``compared`` without a reference tests all pairs and corrects for all of them (4.4 %), so that any row may be looked
at afterwards (``against``); a reference is for a row that was named before anything was measured, such as a paper's baseline.

>>> ours, theirs = {0: 493.0, 1: 491.5, 2: 494.1, 3: 492.2}, {0: 489.9, 1: 488.6, 2: 490.4, 3: 489.5}
>>> [pair] = compared({"Unified": ours, "TripletHN": theirs})
>>> round(pair.difference, 2), str(pair.interval), pair.verdict
(3.1, '2.41 to 3.79', 'higher')
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from visavis.errors import DataError, SpecError, nearest

LEVEL = 0.05
"""The share of comparisons of equal rows in which some difference may be found."""
POWER = 0.8
"""The probability with which a real difference is to be found."""
MOST_SEEDS = 100
"""More seeds than that settle nothing that matters."""
ROUNDING = 1e-9
"""Values that differ by less than this share of their size are equal: the rest is rounding."""

Verdict = Literal["higher", "lower", "not distinguishable", "not tested"]


@dataclass(frozen=True)
class Interval:
    """Where a value lies with a confidence of 95 %, unless another was asked for."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __str__(self) -> str:
        return f"{number(self.low)} to {number(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Row a minus row b, by seed.

    seeds: those that both have. difference: its mean, in the unit of the metric. deviation: its sample standard deviation over seeds.
    interval: of this pair alone, by t. p: of the paired t-test. adjusted_p: by Holm, among ``tests`` tests. None of these stands
    where there are less than two seeds; where the difference is the same in every seed, p is that of the signs, 2^(1 - seeds), or 1 where it is 0.
    """

    a: str
    b: str
    seeds: tuple[int, ...]
    difference: float
    deviation: float | None
    interval: Interval | None
    p: float | None
    adjusted_p: float | None
    tests: int = 1

    @property
    def verdict(self) -> Verdict:
        """How a stands to b, in words."""
        if self.adjusted_p is None:
            return "not tested"
        if self.adjusted_p > LEVEL:
            return "not distinguishable"
        return "higher" if self.difference > 0 else "lower"

    @property
    def more_seeds(self) -> int | None:
        """How many more seeds would settle it; see ``more_seeds``. 0 where it is settled; None also where no spread is known."""
        if self.verdict in ("higher", "lower"):
            return 0
        return None if self.deviation is None else more_seeds(self.difference, self.deviation, len(self.seeds), level=LEVEL / self.tests)

    def turned(self) -> Paired:
        """Row b minus row a."""
        return replace(self, a=self.b, b=self.a, difference=-self.difference, interval=None if self.interval is None else -self.interval)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict, "more_seeds": self.more_seeds}


def t_interval(values: Iterable[float], confidence: float = 1 - LEVEL) -> Interval | None:
    """The interval of a mean over seeds: mean ± t s / sqrt(n). None for one value, and for equal ones, which show no spread.

    Raises DataError for a value that is no number.
    """
    from scipy.special import stdtrit

    values = [_finite(value, "a value") for value in values]
    deviation = _deviation(values)
    if not deviation:
        return None
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * deviation / math.sqrt(len(values))
    return Interval(_mean(values) - half, _mean(values) + half)


def paired_by_seed(a: Mapping[int, float], b: Mapping[int, float], *, names: tuple[str, str] = ("a", "b")) -> Paired:
    """The paired t-test of two rows over the seeds that both have, each value by its seed.

    Raises DataError for a value that is no number, and for rows without a common seed.
    """
    from scipy.special import stdtr

    for name, row in zip(names, (a, b), strict=True):
        _check(name, row)
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise DataError(f"{names[0]} and {names[1]} have no seed in common, so that nothing can be compared: run both with the same seeds.")
    differences = [a[seed] - b[seed] for seed in seeds]
    mean, deviation = _mean(differences), _deviation(differences, [row[seed] for row in (a, b) for seed in seeds])
    if deviation is None:
        p = None
    elif deviation:
        p = 2 * float(stdtr(len(seeds) - 1, -abs(mean) / deviation * math.sqrt(len(seeds))))
    else:
        size = max(abs(row[seed]) for row in (a, b) for seed in seeds)
        mean = mean if abs(mean) > ROUNDING * size else 0.0
        p = 2.0 ** (1 - len(seeds)) if mean else 1.0
    interval = t_interval(differences) if deviation else None
    return Paired(a=names[0], b=names[1], seeds=seeds, difference=mean, deviation=deviation, interval=interval, p=p, adjusted_p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p corrected for all of them, so that any false alarm among them is as rare as with one test, however they depend.

    Formula: in ascending order, the largest of min(1, (m - j + 1) p_j) so far. Source: Holm, A simple sequentially rejective multiple test
    procedure (1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(np.sort(p_values) * np.arange(len(p_values), 0, -1)).clip(max=1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = stepped
    return adjusted.tolist()


def compared(rows: Mapping[str, Mapping[int, float]], reference: str | None = None) -> list[Paired]:
    """Every row minus a reference, or all pairs of rows, in their order, corrected for the number of tests.

    rows: for each row, its value by seed. reference: a row that was chosen before anything was measured, see above; None: all pairs.
    Pairs of one common seed or none are not tested and not counted; where there is none, their difference is that of the rows' means.
    Raises SpecError for a reference that is no row, DataError for a row without values or with one that is no number.
    """
    if reference is not None and reference not in rows:
        raise SpecError(f"the reference {reference} is no row of the comparison: {nearest(reference, rows)}")
    pairs = combinations(rows, 2) if reference is None else ((name, reference) for name in rows if name != reference)
    found = [_pair(a, b, rows[a], rows[b]) for a, b in pairs]
    tested = [p for pair in found if (p := pair.p) is not None]
    adjusted = iter(holm(tested))
    return [replace(pair, adjusted_p=None if pair.p is None else next(adjusted), tests=max(len(tested), 1)) for pair in found]


def against(pairs: Iterable[Paired], name: str) -> dict[str, Paired]:
    """Those of the pairs that a row is in, as every other row minus it, by the other's name."""
    found = [pair if pair.b == name else pair.turned() for pair in pairs if name in (pair.a, pair.b)]
    return {pair.a: pair for pair in found}


def more_seeds(
    difference: float, deviation: float, seeds: int, *, level: float = LEVEL, power: float = POWER, most: int = MOST_SEEDS
) -> int | None:
    """How many more seeds a paired t-test at ``level`` needs to find a difference with this power; None where ``most`` are not enough.

    difference, deviation: of the differences over seeds, as they were seen: of few seeds it is a rough guess. With several tests the
    level is that of one of them: enough for Holm, whatever the others come to.
    """
    from scipy.special import nctdtr, stdtrit

    if not (difference and deviation):
        return None
    total = np.arange(max(seeds, 2), seeds + most + 1)
    critical, expected = stdtrit(total - 1, 1 - level / 2), abs(difference) / deviation * np.sqrt(total)
    found = 1 - nctdtr(total - 1, expected, critical) + nctdtr(total - 1, expected, -critical) >= power
    return int(total[found.argmax()]) - seeds if found.any() else None


def number(value: float, *, signed: bool = False) -> str:
    """A number to three digits as a reader wants it, with a proper minus.

    >>> number(-0.0123456), number(493.04), number(1.5, signed=True), number(-0.0, signed=True)
    ('−0.0123', '493', '+1.50', '0')
    """
    value = value or 0.0  # of a difference turned round
    sign = "+" if signed and value else ""
    text = f"{value:{sign}#.3g}".rstrip(".") if 0 < abs(value) < 999.5 else f"{value:{sign}.0f}"
    return text.replace("-", "−")


def _pair(a: str, b: str, row: Mapping[int, float], other: Mapping[int, float]) -> Paired:
    """``paired_by_seed``, also of rows that have no seed in common, as where runs failed."""
    if row.keys() & other.keys():
        return paired_by_seed(row, other, names=(a, b))
    for name, values in ((a, row), (b, other)):
        _check(name, values)
    difference = _mean([*row.values()]) - _mean([*other.values()])
    return Paired(a=a, b=b, seeds=(), difference=difference, deviation=None, interval=None, p=None, adjusted_p=None)


def _check(name: str, row: Mapping[int, float]) -> None:
    if not row:
        raise DataError(f"{name} has no values to compare: leave it out, or train it.")
    for seed, value in row.items():
        _finite(value, f"{name}, seed {seed},")


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise DataError(f"{what} is {value}, expected a number: leave out the run that came to it, or train it anew.")
    return value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float], of: Sequence[float] = ()) -> float | None:
    """The sample standard deviation; None for one value, 0 where they differ by rounding alone. of: what they were computed from."""
    if len(values) < 2:
        return None
    if max(values) - min(values) <= ROUNDING * max(map(abs, [*values, *of])):
        return 0.0
    return math.sqrt(math.fsum((value - _mean(values)) ** 2 for value in values) / (len(values) - 1))
