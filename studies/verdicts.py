"""Tests of claims on the runs of the study. Each returns a number with its interval and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy.stats import bootstrap, rankdata
from study import read_evidence

from visavis.evaluation.statistics import (
    Interval,
    PairedTest,
    format_number,
    holm,
    paired_t_test,
    paired_tests,
    t_interval,
)

Verdict = Literal["holds", "does not hold", "undecided", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
RESAMPLES = 4000
"""Bootstrap samples. The smallest p-value is 0.0005, below 0.05 divided by the number of claims."""


@dataclass(frozen=True)
class Comparison:
    """A mean over seeds that is tested against a bound.

    Attributes:
        values: Values by seed, such as paired differences.
        bound: The bound.
        tests: Number by which the level of the claim is divided, for a claim of several
            comparisons.
    """

    values: tuple[float, ...]
    bound: float = 0.0
    tests: int = 1


@dataclass(frozen=True)
class ClaimResult:
    """The result of a claim's test: its numbers as text, its verdict, and the two-sided p-value of
    the claim.

    ``p`` is 1 without a test. A claim of several comparisons has the p-value of the comparison that
    decides it, corrected for their number. ``decisive`` has the comparisons that must all reject
    for a verdict on the side of the measured means. It is empty if the spread is not over seeds.
    """

    summary: str
    verdict: Verdict
    p: float = 1.0
    decisive: tuple[Comparison, ...] = ()


class Missing(Exception):
    """Runs, or a metric of runs, that a claim needs and the study does not have yet."""


def runs(address: str) -> dict[int, dict[str, Any]]:
    """The runs of ``experiment/setting`` by seed."""
    experiment, setting = address.split("/", 1)
    by_seed = {
        line["seed"]: line
        for line in read_evidence(experiment)
        if line["setting"] == setting and "failure" not in line
    }
    if len(by_seed) < 2:
        raise Missing(address)
    return by_seed


def values(address: str, metric: str) -> dict[int, float]:
    """A metric of the runs of ``experiment/setting`` by seed."""
    return {seed: measured(line, metric) for seed, line in runs(address).items()}


def measured(line: dict[str, Any], metric: str) -> float:
    """A metric of a run, by its key or by its name in ``DERIVED``. "A less B" is the difference of
    two metrics.
    """
    if " less " in metric:
        one, other = metric.split(" less ")
        return measured(line, one) - measured(line, other)
    try:
        return (
            DERIVED[metric](line)
            if metric in DERIVED
            else {**line, **line["counts"], **line["metrics"]}[metric]
        )
    except KeyError:
        raise Missing(f"{metric} of {line['setting']}") from None


def _hardest(epoch: dict[str, float]) -> float:
    return (epoch["hardest_i2t_mean"] + epoch["hardest_t2i_mean"]) / 2


def _steps_to_95(line: dict[str, Any]) -> float:
    return next(
        epoch["step"] for epoch in line["epochs"] if epoch["rsum"] >= 0.95 * line["validation_rsum"]
    )


def _both(part: str, name: str) -> Callable[[dict[str, Any]], float]:
    """A function that returns the mean of both directions."""
    return lambda line: (line[part][f"i2t_{name}"] + line[part][f"t2i_{name}"]) / 2


DERIVED: dict[str, Callable[[dict[str, Any]], float]] = {
    "gap": lambda line: line["epochs"][-1]["positive_mean"] - _hardest(line["epochs"][-1]),
    "steps to 95 %": _steps_to_95,
    "most early similarity": lambda line: max(
        min(epoch["positive_mean"], _hardest(epoch)) for epoch in line["epochs"][1:]
    ),
    "triplets at the start": _both("counts", "per_query_at_start"),
    "R@1": _both("metrics", "r1"),
    "mAP@5 by hits": _both("metrics", "map_at_5_hits"),
    "CS@100": _both("metrics", "cs_at_100"),
    "CS@200": _both("metrics", "cs_at_200"),
    "CS@1000": _both("metrics", "cs_at_1000"),
    "C^q": _both("counts", "per_query"),
    "effective negatives": _both("counts", "effective"),
    "pull": _both("counts", "pull"),
    "texts without a gradient": lambda line: (
        100
        * line["counts"]["t2i_idle"]
        * line["counts"]["t2i_per_query"]
        / line["counts"]["t2i_in_batch"]
    ),
    "C^q at 0.001 over C^q": lambda line: (
        _both("counts", "per_query_at_0.001")(line) / _both("counts", "per_query")(line)
    ),
}
"""Metrics computed from others, by name. A metric without a direction is the mean of both
directions.
"""


# Tests: from the arguments of a claim to its result.


def higher(a: str, b: str, metric: str = "rsum") -> ClaimResult:
    """Whether runs a are above runs b."""
    pair = _pair(a, b, metric)
    return ClaimResult(
        _describe(pair, metric),
        _side(pair.interval, 0.0),
        pair.p or 1.0,
        (Comparison(_differences(a, b, metric)),),
    )


def lower(a: str, b: str, metric: str = "rsum") -> ClaimResult:
    """Whether runs a are below runs b."""
    pair = _pair(a, b, metric)
    return ClaimResult(
        _describe(pair, metric),
        _side(None if pair.interval is None else -pair.interval, 0.0),
        pair.p or 1.0,
        (Comparison(_differences(a, b, metric)),),
    )


def not_lower(a: str, b: str, allowed: float, metric: str = "rsum") -> ClaimResult:
    """Whether runs a are at most ``allowed`` below runs b."""
    pair = _pair(a, b, metric)
    differences = _differences(a, b, metric)
    return ClaimResult(
        f"{_describe(pair, metric)}. Differences down to −{allowed:g} count as no loss",
        _side(pair.interval, -allowed),
        _p_of_mean(differences, -allowed),
        (Comparison(differences, -allowed),),
    )


def same(a: str, b: str, allowed: float, metric: str = "rsum") -> ClaimResult:
    """Whether runs a and b are at most ``allowed`` apart."""
    pair = _pair(a, b, metric)
    interval = pair.interval or (
        Interval(pair.difference, pair.difference)
        if len(pair.seeds) > 1
        else Interval(-math.inf, math.inf)
    )
    inside = max(abs(interval.low), abs(interval.high)) < allowed
    outside = interval.low > allowed or interval.high < -allowed
    # Inside: both bounds are rejected. Outside: the nearer one is.
    bounds = (
        (-allowed, allowed)
        if abs(pair.difference) < allowed
        else (math.copysign(allowed, pair.difference),)
    )
    differences = _differences(a, b, metric)
    return ClaimResult(
        _describe(pair, metric),
        "holds" if inside else "does not hold" if outside else "undecided",
        max(_p_of_mean(differences, bound) for bound in bounds),
        tuple(Comparison(differences, bound) for bound in bounds),
    )


def best(a: str, among: Sequence[str], metric: str = "rsum") -> ClaimResult:
    """Whether runs a are above all others, corrected for their number."""
    others = {name: values(name, metric) for name in expanded(among) if name != a}
    pairs = paired_tests({a: values(a, metric), **others}, a)
    above = [pair for pair in pairs if pair.verdict == "higher"]
    below = [pair for pair in pairs if pair.verdict == "lower"]
    verdict: Verdict = (
        "does not hold" if above else "holds" if len(below) == len(pairs) else "undecided"
    )
    order = sorted(pairs, key=lambda pair: -pair.difference)
    interval = f" ({order[0].interval})" if order[0].interval else ""
    best_other = f"{_short(order[0].a)}, {label(metric)} {format_number(order[0].difference, signed=True)}{interval} compared with {_short(a)}"
    p = _p_of_all([(-pair.difference, pair.adjusted_p) for pair in pairs])
    return ClaimResult(
        f"significantly better than {len(below)} of {len(pairs)} others, significantly worse than "
        f"{len(above)}. Best other: {best_other}",
        verdict,
        p,
        _decisive([_differences(a, name, metric) for name in others]),
    )


def each(pairs: Sequence[Sequence[str]], metric: str = "rsum") -> ClaimResult:
    """Whether the first of every pair is above its second, corrected for their number."""
    tests = [paired_t_test(values(a, metric), values(b, metric), names=(a, b)) for a, b in pairs]
    adjusted = holm([1.0 if test.p is None else test.p for test in tests])
    significant = [
        test.difference if p <= 0.05 else 0.0 for test, p in zip(tests, adjusted, strict=True)
    ]
    verdict: Verdict = (
        "holds"
        if min(significant) > 0
        else "does not hold"
        if min(significant) < 0
        else "undecided"
    )
    differences = ", ".join(
        f"{_short(pair.a)} minus {_short(pair.b)} {format_number(pair.difference, signed=True)}"
        for pair in tests
    )
    positive = sum(value > 0 for value in significant)
    negative = sum(value < 0 for value in significant)
    return ClaimResult(
        f"{label(metric)} {differences}. Significantly positive: {positive}, negative: {negative}",
        verdict,
        _p_of_all([(pair.difference, p) for pair, p in zip(tests, adjusted, strict=True)]),
        _decisive([_differences(a, b, metric) for a, b in pairs]),
    )


def grows(
    series: Sequence[tuple[float, str, str]], metric: str = "rsum", *, falls: bool = False
) -> ClaimResult:
    """Whether the lead of one setting over another grows with the logarithm of x.

    Args:
        series: Tuples of x, the leading setting and the other setting.
        metric: The metric that is compared.
        falls: Test whether the lead shrinks instead.
    """
    leads = [
        (
            math.log(x),
            paired_t_test(values(a, metric), values(b, metric)),
            values(a, metric),
            values(b, metric),
        )
        for x, a, b in series
    ]
    seeds = set.intersection(*(set(a) & set(b) for _, _, a, b in leads))
    slopes = [
        float(np.polyfit([x for x, *_ in leads], [a[seed] - b[seed] for _, _, a, b in leads], 1)[0])
        for seed in sorted(seeds)
    ]
    interval = t_interval(slopes)
    leads_at_x = ", ".join(
        f"{format_number(pair.difference, signed=True)} at {x:,g}"
        for (x, *_), (_, pair, *_) in zip(series, leads, strict=True)
    )
    verdict = _side(-interval if falls and interval else interval, 0.0)
    return ClaimResult(
        f"{label(metric)} {leads_at_x}. Slope over ln x: {_mean(slopes)}",
        verdict,
        _p_of_mean(slopes, 0.0),
        (Comparison(tuple(slopes)),),
    )


def inner_peak(series: Sequence[str], metric: str = "rsum") -> ClaimResult:
    """Whether some inner point of a series is higher than both ends, corrected for the number of
    inner points.
    """
    rows = {name: values(name, metric) for name in series}
    means = {name: statistics.fmean(row.values()) for name, row in rows.items()}
    top = max(series[1:-1], key=means.__getitem__)
    ends = [paired_t_test(rows[top], rows[end]) for end in (series[0], series[-1])]
    adjusted = holm([min(1.0, (pair.p or 1.0) * (len(series) - 2)) for pair in ends])
    significant = [
        math.copysign(p <= 0.05, pair.difference) for pair, p in zip(ends, adjusted, strict=True)
    ]
    listed = ", ".join(f"{_short(name)}: {means[name]:.1f}" for name in series)
    verdict: Verdict = (
        "holds"
        if min(significant) > 0
        else "does not hold"
        if min(significant) < 0
        else "undecided"
    )
    return ClaimResult(
        f"{label(metric)} {listed}",
        verdict,
        _p_of_all([(pair.difference, p) for pair, p in zip(ends, adjusted, strict=True)]),
        _decisive(
            [_differences(top, end, metric) for end in (series[0], series[-1])], len(series) - 2
        ),
    )


def reaches(a: str, metric: str, at_least: float) -> ClaimResult:
    """Whether the mean of runs a is at least ``at_least``."""
    numbers = list(values(a, metric).values())
    interval = t_interval(numbers) or Interval(numbers[0], numbers[0])
    return ClaimResult(
        f"{label(metric)} {_mean(numbers)}",
        _side(interval, at_least),
        _p_of_mean(numbers, at_least),
        (Comparison(tuple(numbers), at_least),),
    )


def stays_below(a: str, metric: str, at_most: float) -> ClaimResult:
    """Whether the mean of runs a is below ``at_most``."""
    numbers = list(values(a, metric).values())
    interval = t_interval(numbers) or Interval(numbers[0], numbers[0])
    return ClaimResult(
        f"{label(metric)} {_mean(numbers)}",
        _side(-interval, -at_most),
        _p_of_mean(numbers, at_most),
        (Comparison(tuple(numbers), at_most),),
    )


def related(x: str, y: str, among: Sequence[str], sign: int, at_least: float = 0.0) -> ClaimResult:
    """Whether the means of two metrics are correlated over settings: Spearman's rho, bootstrapped
    over settings.

    Args:
        x: The first metric.
        y: The second metric.
        among: Settings.
        sign: 1 for a positive correlation, -1 for a negative one.
        at_least: Minimum of the correlation.
    """
    rows = [
        (statistics.fmean(values(name, x).values()), statistics.fmean(values(name, y).values()))
        for name in expanded(among)
    ]
    one, other = map(np.array, zip(*rows, strict=True))
    rho = float(_spearman(one, other))
    resampled = bootstrap(
        (one, other),
        _spearman,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=0,
        n_resamples=RESAMPLES,
    )
    interval = Interval(
        float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)
    )
    above = int((sign * resampled.bootstrap_distribution > at_least).sum())
    p = min(1.0, 2 * (min(above, RESAMPLES - above) + 1) / (RESAMPLES + 1))
    verdict = _side(interval if sign > 0 else -interval, at_least)
    return ClaimResult(
        f"rho {format_number(rho)} ({interval}) over {len(rows)} objectives", verdict, p
    )


TESTS: dict[str, Callable[..., ClaimResult]] = {
    test.__name__: test
    for test in (
        higher,
        lower,
        not_lower,
        same,
        best,
        each,
        grows,
        inner_peak,
        reaches,
        stays_below,
        related,
    )
}


def _spearman(one: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    """Spearman's rho of many samples at once. 0 for a constant sample."""
    ranks = [rankdata(sample, axis=axis) for sample in (one, other)]
    a, b = (rank - rank.mean(axis=axis, keepdims=True) for rank in ranks)
    return (a * b).sum(axis) / np.maximum(np.sqrt((a * a).sum(axis) * (b * b).sum(axis)), 1e-12)


def _p_of_mean(numbers: Sequence[float], bound: float) -> float:
    """Two-sided p-value of a t-test of a mean against a bound. Equal values are exact: 0, or 1 at
    the bound itself.
    """
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return float(numbers[0] == bound)
    test = paired_t_test(dict(enumerate(numbers)), dict.fromkeys(range(len(numbers)), bound))
    return 1.0 if test.p is None else test.p


def _differences(a: str, b: str, metric: str) -> tuple[float, ...]:
    """Differences of runs a and b, paired by seed."""
    one = values(a, metric)
    other = values(b, metric)
    return tuple(one[seed] - other[seed] for seed in sorted(one.keys() & other.keys()))


def _decisive(rows: Sequence[tuple[float, ...]], choices: int = 1) -> tuple[Comparison, ...]:
    """The comparisons that decide whether every mean is above 0, as ``_p_of_all`` does. By Holm's
    method, the level of the j-th smallest p-value is divided by the number of the rest.

    Args:
        rows: Differences by seed of each comparison.
        choices: Number of choices before the comparisons, by which the level is divided, too.
    """
    order = sorted(rows, key=lambda row: _p_of_mean(row, 0.0))
    if refuting := [row for row in order if statistics.fmean(row) < 0]:
        return (Comparison(refuting[0], tests=choices * len(rows)),)
    return tuple(
        Comparison(row, tests=choices * (len(rows) - place)) for place, row in enumerate(order)
    )


def _p_of_all(comparisons: Sequence[tuple[float, float | None]]) -> float:
    """p-value of a claim that every difference is above 0, from differences and corrected p-values.

    All of them decide that it holds, so the largest counts. One difference below 0 refutes it, so
    the smallest of those counts.
    """
    refuting = [1.0 if p is None else p for difference, p in comparisons if difference < 0]
    return min(refuting) if refuting else max(1.0 if p is None else p for _, p in comparisons)


def _side(interval: Interval | None, bound: float) -> Verdict:
    if interval is None:
        return "undecided"
    return (
        "holds"
        if interval.low > bound
        else "does not hold"
        if interval.high < bound
        else "undecided"
    )


def _pair(a: str, b: str, metric: str) -> PairedTest:
    return paired_t_test(values(a, metric), values(b, metric))


def _describe(pair: PairedTest, metric: str) -> str:
    return (
        f"{label(metric)} {format_number(pair.difference, signed=True)}"
        + (f" ({pair.interval})" if pair.interval else "")
        + f", {len(pair.seeds)} seeds"
    )


LABELS = {
    "i2t_per_moved_with_slope": "C^q image to text",
    "pull": "gradient weight of a positive",
    "texts without a gradient": "texts without a gradient, %:",
    "rsum": "RSUM",
    "i2t_r1": "R@1 image to text",
    "triplets at the start": "triplets that violate the margin at the start, %:",
    "C^q at 0.001 over C^q": "C^q at 0.001, divided by C^q at 0.01:",
    "most early similarity": "highest early similarity",
    "tau with the experts": "tau-b with the experts",
    "early gradient": "lowest gradient of the embeddings, % of the start:",
    "factor": "ln of the factor dx/dtheta",
    "factor growth": "growth of ln of the factor dx/dtheta",
}


def label(metric: str) -> str:
    """The name of a metric on the page."""
    return LABELS.get(metric, metric.replace(" less ", " minus "))


def _mean(numbers: Sequence[float]) -> str:
    interval = t_interval(numbers)
    return format_number(statistics.fmean(numbers)) + (f" ({interval})" if interval else "")


def _short(address: str) -> str:
    return address.split("/", 1)[1]


def expanded(among: Iterable[str]) -> list[str]:
    """Setting ids, with ``experiment/*`` expanded to all of its settings."""
    settings: list[str] = []
    for address in among:
        experiment, setting = address.split("/", 1)
        names = dict.fromkeys(
            line["setting"] for line in read_evidence(experiment) if "failure" not in line
        )
        settings += [f"{experiment}/{name}" for name in names] if setting == "*" else [address]
        if not names:
            raise Missing(experiment)
    return settings
