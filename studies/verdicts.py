"""Tests of claims on the study's runs: each finds a number with its interval, and whether the claim holds, does not hold or can't be told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import bootstrap, spearmanr
from study import read_evidence

from visavis.comparison.statistics import Interval, Paired, compared, holm, number, paired_by_seed, t_interval

Verdict = Literal["holds", "does not hold", "can't be told", "not run"]


@dataclass(frozen=True)
class Found:
    """What the study says of a claim, in numbers and in a word."""

    ours: str
    verdict: Verdict


class Missing(Exception):
    """Runs, or a metric of them, that a claim needs and the study does not have yet."""


def runs(address: str) -> dict[int, dict[str, Any]]:
    """The runs of ``experiment/setting`` by seed."""
    experiment, setting = address.split("/", 1)
    found = {line["seed"]: line for line in read_evidence(experiment) if line["setting"] == setting and "failure" not in line}
    if len(found) < 2:
        raise Missing(address)
    return found


def values(address: str, metric: str) -> dict[int, float]:
    """A metric of the runs of ``experiment/setting`` by seed."""
    return {seed: measured(line, metric) for seed, line in runs(address).items()}


def measured(line: dict[str, Any], metric: str) -> float:
    """A metric of a run, by its key or by its name in ``DERIVED``; of two with "less" between them, the difference."""
    if " less " in metric:
        one, other = metric.split(" less ")
        return measured(line, one) - measured(line, other)
    try:
        return DERIVED[metric](line) if metric in DERIVED else {**line, **line["counts"], **line["metrics"]}[metric]
    except KeyError:
        raise Missing(f"{metric} of {line['setting']}") from None


def _hardest(epoch: dict[str, float]) -> float:
    return (epoch["hardest_i2t_mean"] + epoch["hardest_t2i_mean"]) / 2


def _steps_to_95(line: dict[str, Any]) -> float:
    return next(epoch["step"] for epoch in line["epochs"] if epoch["rsum"] >= 0.95 * line["validation_rsum"])


def _both(part: str, name: str) -> Callable[[dict[str, Any]], float]:
    """The mean of both directions."""
    return lambda line: (line[part][f"i2t_{name}"] + line[part][f"t2i_{name}"]) / 2


DERIVED: dict[str, Callable[[dict[str, Any]], float]] = {
    "gap": lambda line: line["epochs"][-1]["positive_mean"] - _hardest(line["epochs"][-1]),
    "steps to 95 %": _steps_to_95,
    "most early similarity": lambda line: max(min(epoch["positive_mean"], _hardest(epoch)) for epoch in line["epochs"][1:]),
    "moved at the start": lambda line: 100 * min(line["epochs"][0]["gradient_i2t"], line["epochs"][0]["gradient_t2i"]),
    "R@1": _both("metrics", "r1"),
    "mAP@5 by hits": _both("metrics", "map_at_5_hits"),
    "CS@100": _both("metrics", "cs_at_100"),
    "CS@200": _both("metrics", "cs_at_200"),
    "CS@1000": _both("metrics", "cs_at_1000"),
    "C^q": _both("counts", "per_query"),
    "effective negatives": _both("counts", "effective"),
    "C^q at 0.1": _both("counts", "per_query_at_0.1"),
}
"""Metrics that are made of others: by their names here. Without a direction: the mean of both."""


# Tests: the arguments of a claim -> what was found


def higher(a: str, b: str, metric: str = "rsum") -> Found:
    """Runs a above runs b."""
    pair = _pair(a, b, metric)
    return Found(_told(pair, metric), _side(pair.interval, 0.0))


def lower(a: str, b: str, metric: str = "rsum") -> Found:
    """Runs a below runs b."""
    pair = _pair(a, b, metric)
    return Found(_told(pair, metric), _side(None if pair.interval is None else -pair.interval, 0.0))


def not_lower(a: str, b: str, allowed: float, metric: str = "rsum") -> Found:
    """Runs a at most ``allowed`` below runs b."""
    pair = _pair(a, b, metric)
    return Found(f"{_told(pair, metric)}; up to −{allowed:g} is no loss", _side(pair.interval, -allowed))


def same(a: str, b: str, allowed: float, metric: str = "rsum") -> Found:
    """Runs a and b at most ``allowed`` apart."""
    pair = _pair(a, b, metric)
    interval = pair.interval or (Interval(pair.difference, pair.difference) if len(pair.seeds) > 1 else Interval(-math.inf, math.inf))
    inside = max(abs(interval.low), abs(interval.high)) < allowed
    outside = interval.low > allowed or interval.high < -allowed
    return Found(_told(pair, metric), "holds" if inside else "does not hold" if outside else "can't be told")


def best(a: str, among: Sequence[str], metric: str = "rsum") -> Found:
    """Runs a above all others, corrected for their number."""
    others = {name: values(name, metric) for name in _spread(among) if name != a}
    pairs = compared({a: values(a, metric), **others}, a)
    above = [pair for pair in pairs if pair.verdict == "higher"]
    below = [pair for pair in pairs if pair.verdict == "lower"]
    verdict: Verdict = "does not hold" if above else "holds" if len(below) == len(pairs) else "can't be told"
    order = sorted(pairs, key=lambda pair: -pair.difference)
    nearest = f"{_short(order[0].a)} {metric} {number(order[0].difference, signed=True)}" + (
        f" ({order[0].interval})" if order[0].interval else ""
    )
    return Found(f"surely above {len(below)} of {len(pairs)}, surely below {len(above)}; the best other: {nearest}", verdict)


def each(pairs: Sequence[Sequence[str]], metric: str = "rsum") -> Found:
    """The first of every pair above its second, corrected for their number."""
    found = [paired_by_seed(values(a, metric), values(b, metric), names=(a, b)) for a, b in pairs]
    adjusted = holm([1.0 if pair.p is None else pair.p for pair in found])
    sure = [pair.difference if p <= 0.05 else 0.0 for pair, p in zip(found, adjusted, strict=True)]
    verdict: Verdict = "holds" if min(sure) > 0 else "does not hold" if min(sure) < 0 else "can't be told"
    told = "; ".join(f"{_short(pair.a)} {number(pair.difference, signed=True)}" for pair in found)
    return Found(f"{metric} {told}; sure of {sum(value > 0 for value in sure)} up, {sum(value < 0 for value in sure)} down", verdict)


def grows(series: Sequence[tuple[float, str, str]], metric: str = "rsum", *, falls: bool = False) -> Found:
    """The lead of one over the other grows with the logarithm of x; ``falls``: shrinks. series: x, the one, the other."""
    leads = [
        (math.log(x), paired_by_seed(values(a, metric), values(b, metric)), values(a, metric), values(b, metric)) for x, a, b in series
    ]
    seeds = set.intersection(*(set(a) & set(b) for _, _, a, b in leads))
    slopes = [float(np.polyfit([x for x, *_ in leads], [a[seed] - b[seed] for _, _, a, b in leads], 1)[0]) for seed in sorted(seeds)]
    interval = t_interval(slopes)
    told = ", ".join(f"{number(pair.difference, signed=True)} at {x:,g}" for (x, *_), (_, pair, *_) in zip(series, leads, strict=True))
    return Found(f"{metric} {told}; per e-fold {_mean(slopes)}", _side(-interval if falls and interval else interval, 0.0))


def inner_peak(series: Sequence[str], metric: str = "rsum") -> Found:
    """Somewhere inside a series it is higher than at both ends, corrected for the places inside."""
    rows = {name: values(name, metric) for name in series}
    means = {name: statistics.fmean(row.values()) for name, row in rows.items()}
    top = max(series[1:-1], key=means.__getitem__)
    ends = [paired_by_seed(rows[top], rows[end]) for end in (series[0], series[-1])]
    ps = [min(1.0, (pair.p or 1.0) * (len(series) - 2)) for pair in ends]
    sure = [math.copysign(p <= 0.05, pair.difference) for pair, p in zip(ends, holm(ps), strict=True)]
    told = ", ".join(f"{_short(name)}: {means[name]:.1f}" for name in series)
    return Found(f"{metric} {told}", "holds" if min(sure) > 0 else "does not hold" if min(sure) < 0 else "can't be told")


def reaches(a: str, metric: str, at_least: float) -> Found:
    """The mean of runs a is that much, at least."""
    own = list(values(a, metric).values())
    interval = t_interval(own) or Interval(own[0], own[0])
    return Found(f"{metric} {_mean(own)}", _side(interval, at_least))


def stays_below(a: str, metric: str, at_most: float) -> Found:
    """The mean of runs a is below that."""
    own = list(values(a, metric).values())
    interval = t_interval(own) or Interval(own[0], own[0])
    return Found(f"{metric} {_mean(own)}", _side(-interval, -at_most))


def related(x: str, y: str, among: Sequence[str], sign: int, at_least: float = 0.0) -> Found:
    """Over settings, the means of two metrics go together (sign 1) or against one another (-1): Spearman's rho, bootstrapped over settings.
    at_least: how closely.
    """
    rows = [(statistics.fmean(values(name, x).values()), statistics.fmean(values(name, y).values())) for name in _spread(among)]
    one, other = map(np.array, zip(*rows, strict=True))
    rho = float(spearmanr(one, other).statistic)
    drawn = bootstrap(
        (one, other), lambda a, b: np.nan_to_num(spearmanr(a, b).statistic), paired=True, vectorized=False, method="percentile", rng=0,
        n_resamples=4000,
    ).confidence_interval  # fmt: skip
    interval = Interval(float(drawn.low), float(drawn.high))
    return Found(f"rho {number(rho)} ({interval}) over {len(rows)} objectives", _side(interval if sign > 0 else -interval, at_least))


TESTS: dict[str, Callable[..., Found]] = {
    test.__name__: test for test in (higher, lower, not_lower, same, best, each, grows, inner_peak, reaches, stays_below, related)
}


def _side(interval: Interval | None, bound: float) -> Verdict:
    if interval is None:
        return "can't be told"
    return "holds" if interval.low > bound else "does not hold" if interval.high < bound else "can't be told"


def _pair(a: str, b: str, metric: str) -> Paired:
    return paired_by_seed(values(a, metric), values(b, metric))


def _told(pair: Paired, metric: str) -> str:
    return (
        f"{metric} {number(pair.difference, signed=True)}" + (f" ({pair.interval})" if pair.interval else "") + f", {len(pair.seeds)} seeds"
    )


def _mean(own: Sequence[float]) -> str:
    interval = t_interval(own)
    return number(statistics.fmean(own)) + (f" ({interval})" if interval else "")


def _short(address: str) -> str:
    return address.split("/", 1)[1]


def _spread(among: Iterable[str]) -> list[str]:
    """Addresses, ``experiment/*`` as all of its settings."""
    found: list[str] = []
    for address in among:
        experiment, setting = address.split("/", 1)
        names = dict.fromkeys(line["setting"] for line in read_evidence(experiment) if "failure" not in line)
        found += [f"{experiment}/{name}" for name in names] if setting == "*" else [address]
        if not names:
            raise Missing(experiment)
    return found
