"""Statistics over seeds: Student's t intervals, paired tests, Holm's correction, repeated tests and
the number of further seeds.

Runs of one seed see the same data in the same order, so rows are compared seed by seed. The
statements are about *other seeds on the same test images*. The variance over test images is another
one (see ``bootstrap``).

A row that was chosen because it looks best leads partly by luck, and the luck of a seed is the same
on validation and on test, because both measure the same trained model. A test against "the best on
validation" alone therefore raises false alarms. With 8 equal rows of 5 seeds it does so in 9 % of
all comparisons if validation and test share nine tenths of their variance over seeds, and in 10 %
if they share all of it, instead of 5 %. Without a reference, ``paired_tests`` tests all pairs and
corrects for all of them (4.4 %), so you can look at any row afterwards (``differences_from``). A
reference is a row that was named before anything was measured, such as the baseline of a paper.

>>> ours, theirs = {0: 493.0, 1: 491.5, 2: 494.1, 3: 492.2}, {0: 489.9, 1: 488.6, 2: 490.4, 3: 489.5}
>>> [pair] = paired_tests({"Unified": ours, "TripletHN": theirs})
>>> pair.describe("RSUM")
'Unified is higher than TripletHN in RSUM over 4 seeds: +3.10 (95 % interval 2.41 to 3.79, p < 0.001).'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import numpy as np

from visavis.core.errors import DataError, SpecError, suggest_name

SIGNIFICANCE_LEVEL = 0.05
"""Share of comparisons of equal rows in which some difference may be reported."""
CONFIDENCE = 1 - SIGNIFICANCE_LEVEL
"""Confidence level of intervals."""
POWER = 0.8
"""Probability of finding a real difference."""
MIN_SEEDS = 4
"""Seeds from which tables show a t interval. With two seeds its half-width is nine standard
deviations, which is often more than the scale of a recall.
"""
MAX_MORE_SEEDS = 100
"""Differences that need more further seeds are too small to matter."""
ROUNDING_TOLERANCE = 1e-9
"""Values that differ by less than this share of their size count as equal. Such differences are
rounding errors.
"""

Verdict = Literal["higher", "lower", "not distinguishable", "not tested"]


@dataclass(frozen=True)
class Interval:
    """Two bounds of a value, by default those of a 95 % confidence interval.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        kind: Kind of the bounds, in words.
    """

    low: float
    high: float
    kind: str = "95 % interval"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __neg__(self) -> Interval:
        return replace(self, low=-self.high, high=-self.low)

    def within(self, low: float, high: float) -> Interval:
        """Cut the interval at the bounds of a scale, which keeps its coverage."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))

    def __str__(self) -> str:
        return f"{format_number(self.low)} to {format_number(self.high)}"


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Paired t-test of row a minus row b over seeds.

    With fewer than two seeds, ``std``, ``interval``, ``p`` and ``adjusted_p`` are None. If the
    difference is the same in every seed, p is that of the sign test, 2^(1 - seeds), or 1 if the
    difference is 0.

    Attributes:
        a: Name of the first row.
        b: Name of the second row.
        seeds: Seeds that both rows have.
        difference: Mean difference, in the unit of the metric.
        std: Sample standard deviation of the difference over seeds.
        interval: 95 % t interval of this pair alone.
        range: Smallest and largest difference of a seed.
        p: p-value of the paired t-test.
        adjusted_p: p-value after Holm's correction for ``tests`` tests.
        tests: Number of tests.
    """

    a: str
    b: str
    seeds: tuple[int, ...]
    difference: float
    std: float | None = None
    interval: Interval | None = None
    range: Interval | None = None
    p: float | None = None
    adjusted_p: float | None = None
    tests: int = 1

    @property
    def spread(self) -> Interval | None:
        """Spread of the difference in tables: the range below ``MIN_SEEDS``, else the interval."""
        return self.interval if len(self.seeds) >= MIN_SEEDS else self.range

    @property
    def verdict(self) -> Verdict:
        """Whether row a is higher or lower than row b, in words."""
        if self.adjusted_p is None:
            return "not tested"
        if self.adjusted_p > SIGNIFICANCE_LEVEL:
            return "not distinguishable"
        return "higher" if self.difference > 0 else "lower"

    @property
    def more_seeds(self) -> int | None:
        """Number of further seeds that would settle the test, as ``more_seeds`` computes it. 0 if
        it is settled, None if unknown.
        """
        if self.verdict in ("higher", "lower"):
            return 0
        return (
            None
            if self.std is None
            else more_seeds(
                self.difference, self.std, len(self.seeds), level=SIGNIFICANCE_LEVEL / self.tests
            )
        )

    def swapped(self) -> PairedTest:
        """Return the test of row b minus row a."""
        return replace(
            self,
            a=self.b,
            b=self.a,
            difference=-self.difference,
            interval=None if self.interval is None else -self.interval,
            range=None if self.range is None else -self.range,
        )

    @property
    def p_text(self) -> str | None:
        """The corrected p-value, with more digits if it is small. None without a test."""
        if self.adjusted_p is None:
            return None
        digits = 3 if self.adjusted_p < 0.1 else 2
        return "< 0.001" if self.adjusted_p < 0.001 else f"{self.adjusted_p:.{digits}f}"

    def describe(self, metric: str) -> str:
        """Describe the test in a sentence."""
        names = f"{self.a} and {self.b}"
        difference = format_number(self.difference, signed=True)
        seeds = len(self.seeds)
        if self.p_text is None:
            return f"{names} share {'one' if seeds else 'no'} seed: {difference} {metric}. No test is possible. Train more seeds of both."
        p = f"p {self.p_text}" if self.p_text.startswith("<") else f"p = {self.p_text}"
        if self.tests > 1:
            p += f" after Holm's correction for {self.tests} tests"
        if self.std == 0:
            if not self.difference:
                return f"{names} have the same {metric} in each of {seeds} seeds."
            settled = (
                "" if self.verdict == "not distinguishable" else f": {self.a} is {self.verdict}"
            )
            return f"{self.a} against {self.b} is {difference} {metric} in each of {seeds} seeds, so only its sign is tested ({p}){settled}."
        spread = f"{self.spread.kind} {self.spread}, " if self.spread else ""
        numbers = f"{difference} ({spread}{p})."
        if self.verdict != "not distinguishable":
            return f"{self.a} is {self.verdict} than {self.b} in {metric} over {seeds} seeds: {numbers}"
        needed = f"more than {MAX_MORE_SEEDS} more seeds"
        if self.more_seeds is not None:
            needed = f"about {self.more_seeds} more seed{'s' * (self.more_seeds > 1)}"
        return f"{names} are not distinguishable in {metric} over {seeds} seeds: {numbers} If the difference is real, a test needs {needed} to show it."

    def to_json(self) -> dict[str, Any]:
        """Return the test as a JSON object."""
        few = {"interval": None} if len(self.seeds) < MIN_SEEDS else {}
        return asdict(self) | few | {"verdict": self.verdict, "more_seeds": self.more_seeds}


def t_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Compute the t interval of a mean over seeds: mean ± t s / sqrt(n). None: no spread."""
    from scipy.special import stdtrit

    values = [_check_finite(value, "a value") for value in values]
    std = _sample_std(values)
    if not std:
        return None
    mean = fmean(values)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half_width = quantile * std / math.sqrt(len(values))
    return Interval(mean - half_width, mean + half_width)


def spread_over_seeds(values: Sequence[float]) -> Interval | None:
    """Describe the spread of values over seeds: their range below ``MIN_SEEDS``, else the t
    interval of their mean.
    """
    interval = t_interval(values)
    if interval is None or len(values) >= MIN_SEEDS:
        return interval
    return Interval(min(values), max(values), f"range of {len(values)} seeds")


def paired_t_test(
    a: Mapping[int, float], b: Mapping[int, float], *, names: tuple[str, str] = ("a", "b")
) -> PairedTest:
    """Test the difference of two rows over the seeds that both have, without a correction for
    several tests.
    """
    from scipy.special import stdtr

    for name, row in zip(names, (a, b), strict=True):
        _checked_values(name, row)
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise DataError(
            f"{names[0]}, {names[1]}: expected a seed in common, got none. Run both with the same "
            "seeds."
        )
    differences = [a[seed] - b[seed] for seed in seeds]
    # Rounding is relative to the compared values, not to their small differences.
    operands = [row[seed] for row in (a, b) for seed in seeds]
    mean = fmean(differences)
    std = _sample_std(differences, operands)
    if std is None:
        p = None
    elif std:
        p = 2 * float(stdtr(len(seeds) - 1, -abs(mean) / std * math.sqrt(len(seeds))))
    else:
        mean = mean if abs(mean) > ROUNDING_TOLERANCE * max(map(abs, operands)) else 0.0
        p = 2.0 ** (1 - len(seeds)) if mean else 1.0
    return PairedTest(
        a=names[0],
        b=names[1],
        seeds=seeds,
        difference=mean,
        std=std,
        interval=t_interval(differences) if std else None,
        range=Interval(min(differences), max(differences), f"range of {len(seeds)} seeds")
        if std
        else None,
        p=p,
        adjusted_p=p,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests, so that any false alarm is as rare as with one test,
    however the tests depend.

    Formula: in ascending order, the running maximum of $min(1, (m - j + 1) p_j)$.

    Args:
        p_values: p-values of the tests.

    Returns:
        Adjusted p-values, in the order of the input.

    Source:
        Holm, A simple sequentially rejective multiple test procedure (1979).

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    # ascending p-values
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(
        np.sort(p_values) * np.arange(len(p_values), 0, -1)
    ).clip(max=1)
    return adjusted.tolist()


def sequential_p_value(p_values: Sequence[float], stages: int | None = None) -> float:
    """Compute the p-value of a test that is repeated after further seeds, so that you can stop at
    any stage without more false alarms.

    Each stage has a share of the error, and the shares add up to at most 1. So the error is bounded
    for every kind of test, however the stages depend.

    Formula: $min(1, min_k p_k / w_k)$ with the share $w_k = 1 / K$ of each of $K$ planned stages,
    or $w_k = 2^(-k)$ of the k-th stage if their number is open.

    Args:
        p_values: p-values of the stages so far, in their order. Each is of all seeds until then.
        stages: Number of stages, fixed before the first one. None: open.

    Returns:
        The p-value over all stages. It can be corrected for several tests by ``holm``.

    Raises:
        SpecError: If a p-value is not from 0 to 1, or there are more stages than planned.

    Source:
        Spending of the error by Lan and DeMets, Discrete sequential boundaries for clinical trials
        (1983), with Bonferroni's inequality instead of the normal distribution of the statistics,
        which a t-test of few seeds does not have.

    Example:
        >>> sequential_p_value([0.08, 0.01], stages=2), sequential_p_value([0.08, 0.01])
        (0.02, 0.04)
    """
    if stages is not None and len(p_values) > stages:
        raise SpecError(
            f"stages: expected at least {len(p_values)}, one for each p-value, got {stages}. Plan "
            "more stages before the first one."
        )
    for p in p_values:
        if not 0 <= p <= 1:
            raise SpecError(f"p_values: expected numbers from 0 to 1, got {p}. Pass p-values.")
    shares = (1 / stages if stages else 0.5**stage for stage in range(1, len(p_values) + 1))
    return min([1.0, *(p / share for p, share in zip(p_values, shares, strict=True))])


def paired_tests(
    rows: Mapping[str, Mapping[int, float]], reference: str | None = None
) -> list[PairedTest]:
    """Test every row against a reference, or all pairs of rows, corrected for the number of tests.

    Pairs with fewer than two common seeds are not tested and not counted. Without a common seed,
    their difference is that of the means.

    Args:
        rows: Value by seed, for each row.
        reference: Row that was chosen before anything was measured. None: all pairs.

    Returns:
        One test per pair, in the order of the rows.

    Raises:
        DataError: If a row has no values, or a value is not finite.
        SpecError: If the reference is not a row.
    """
    if reference is not None and reference not in rows:
        raise SpecError(
            f"reference: {reference} is not a row of the comparison: "
            f"{suggest_name(reference, rows)}"
        )
    pairs = (
        combinations(rows, 2)
        if reference is None
        else ((name, reference) for name in rows if name != reference)
    )
    tests = []
    for a, b in pairs:
        if rows[a].keys() & rows[b].keys():
            tests.append(paired_t_test(rows[a], rows[b], names=(a, b)))
            continue
        # Rows without a common seed, such as after failed runs.
        means = [fmean(_checked_values(name, rows[name]).values()) for name in (a, b)]
        untested = PairedTest(a=a, b=b, seeds=(), difference=means[0] - means[1])
        tests.append(untested)
    p_values = [test.p for test in tests if test.p is not None]
    # In the order of the tests that have a p-value.
    adjusted_p_values = iter(holm(p_values))
    num_tests = max(len(p_values), 1)
    return [
        replace(
            test, adjusted_p=None if test.p is None else next(adjusted_p_values), tests=num_tests
        )
        for test in tests
    ]


def compare_with_best(rows: Mapping[str, Mapping[int, float]], best: str) -> dict[str, PairedTest]:
    """Test every other row minus the row that turned out best. With a probability of at least 95 %,
    the truly best row is this row or not distinguishable from it.
    """
    # p is multiplied by the number of other rows. The truly best row is missed only if its test
    # against one of the others rejects, whichever of them turned out best (Bonferroni's bound, for
    # the multiple comparisons with the best of Hsu, 1984). With 48 rows, Holm's correction for all
    # pairs would multiply the smallest p by 1,128 instead of 47.
    others = max(len(rows) - 1, 1)
    return {
        test.a: replace(
            test,
            adjusted_p=None if test.p is None else min(1.0, others * test.p),
            tests=others,
        )
        for test in paired_tests(rows, best)
    }


def differences_from(pairs: Iterable[PairedTest], name: str) -> dict[str, PairedTest]:
    """Select the tests of one row, each as the other row minus this row.

    Args:
        pairs: Tests of pairs.
        name: The row.

    Returns:
        Tests by the name of the other row.
    """
    tests = [
        pair if pair.b == name else pair.swapped() for pair in pairs if name in (pair.a, pair.b)
    ]
    return {test.a: test for test in tests}


def more_seeds(
    difference: float,
    std: float,
    seeds: int,
    *,
    level: float = SIGNIFICANCE_LEVEL,
    power: float = POWER,
    max_seeds: int = MAX_MORE_SEEDS,
) -> int | None:
    """Estimate the number of further seeds after which a paired t-test finds a difference."""
    # With few seeds the observed difference and standard deviation are rough, and so is the
    # estimate. With several tests, pass the level of one of them. That is enough for Holm, whatever
    # the others show.
    for name, value, limit in (
        ("seeds", seeds, 10**6),
        ("max_seeds", max_seeds, 10**6),
        ("level", level, 1),
        ("power", power, 1),
    ):
        if not 0 <= value <= limit:
            raise SpecError(
                f"{name}: expected a number from 0 to {limit:,}, got {value}. Pass a number in "
                "this range."
            )
    if not (difference and std):
        return None
    total_seeds = np.arange(max(seeds, 2), seeds + max_seeds + 1)  # a test needs two seeds
    has_power = power_of_paired_test(difference / std, total_seeds, level) >= power
    return int(total_seeds[has_power.argmax()]) - seeds if has_power.any() else None


def power_of_paired_test(effect: float, seeds: np.ndarray, level: float) -> np.ndarray:
    """Probability that a two-sided paired t-test finds a difference of ``effect`` standard
    deviations, for each number of seeds.
    """
    from scipy.special import nctdtr, stdtrit

    critical_t = stdtrit(seeds - 1, 1 - level / 2)
    # The limit keeps the noncentrality finite.
    expected_t = min(abs(effect), 1e150) * np.sqrt(seeds)
    # Both tails of the noncentral t distribution. SciPy returns NaN for some that are negligible:
    # the other side from an expected t of 3.4 on, this side from 35 on.
    misses, reversals = (
        np.nan_to_num(nctdtr(seeds - 1, expected_t, bound)) for bound in (critical_t, -critical_t)
    )
    power: np.ndarray = 1 - misses + reversals
    return power


def format_number(value: float, *, signed: bool = False) -> str:
    """Format a number with three significant digits and a typographic minus.

    Args:
        value: The number.
        signed: Whether positive numbers get a plus sign.

    Returns:
        The text.

    Example:
        >>> format_number(-0.0123456), format_number(493.04), format_number(1.5, signed=True), format_number(-0.0, signed=True)
        ('−0.0123', '493', '+1.50', '0')
    """
    value = value or 0.0  # a reversed difference of 0 is -0.0
    sign = "+" if signed and value else ""
    text = f"{value:{sign}#.3g}".rstrip(".") if 0 < abs(value) < 999.5 else f"{value:{sign}.0f}"
    return text.replace("-", "−")


def _checked_values(name: str, by_seed: Mapping[int, float]) -> Mapping[int, float]:
    if not by_seed:
        raise DataError(
            f"{name}: expected a value to compare, got none. Remove this row or train it."
        )
    for seed, value in by_seed.items():
        _check_finite(value, f"{name}, seed {seed}")
    return by_seed


def _check_finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise DataError(
            f"{name}: expected a finite number, got {value}. Remove this run or train it again."
        )
    return value


def _sample_std(values: Sequence[float], operands: Sequence[float] = ()) -> float | None:
    """Sample standard deviation. None for one value, 0 if values differ by rounding only.
    ``operands``: values they were computed from.
    """
    if len(values) < 2:
        return None
    if max(values) - min(values) <= ROUNDING_TOLERANCE * max(map(abs, [*values, *operands])):
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
