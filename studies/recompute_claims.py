"""Recompute every claim from the raw numbers of the study, and compare it with
``docs/papers/claims.md``.

    python studies/recompute_claims.py

This script shares no code with the ones that write the page. It reads the recalls, similarities and
counts of each run, and uses SciPy for all tests and for the seeds of the power table. A figure of
the page may differ in its last printed digit. Bootstrapped values use other random numbers: their
verdicts must agree.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

DOCS = Path(__file__).parents[1] / "docs"
ALPHA, RESAMPLES = 0.05, 4000
HOLDS = "holds"
FAILS = "does not hold"
OPEN = "undecided"
DIRECTIONS = ("i2t", "t2i")


@dataclass
class Result:
    """Verdict and p-value of a claim, the figures that its page must contain, and whether they come
    from a bootstrap.
    """

    verdict: str
    p: float
    figures: list[float]
    sampled: bool = False


def metric_of_gradients(records: dict[str, list[float]], name: str) -> float:
    """A metric of recorded gradients, from their norms by step."""
    by_place = {place: np.array(norms) for place, norms in records.items()}

    def squares(place: str) -> np.ndarray:
        return by_place[f"visual_{place}"] ** 2 + by_place[f"text_{place}"] ** 2

    if name == "early gradient":
        share = np.sqrt(squares("tangent")) / by_place["scores"]
        return float(100 * np.min(share / share[0]))
    logarithm = 0.5 * np.log(squares("parameters") / squares("embedding"))
    if name == "factor":
        return float(np.mean(logarithm))
    assert name == "factor growth"
    return float(np.mean(logarithm[by_place["step"] >= 80]) - logarithm[0])


def metric_of(run: dict[str, Any], name: str) -> float:
    """Compute a metric of a run from its raw numbers."""
    if " less " in name:
        first, second = name.split(" less ")
        return metric_of(run, first) - metric_of(run, second)
    if "gradients" in run:
        return metric_of_gradients(run["gradients"], name)
    metrics = run["metrics"]
    counts = run["counts"]
    epochs = run["epochs"]
    hardest = [np.mean([epoch[f"hardest_{side}_mean"] for side in DIRECTIONS]) for epoch in epochs]
    if name == "rsum":
        return sum(metrics[f"{side}_r{k}"] for side in DIRECTIONS for k in (1, 5, 10))
    if name == "gap":
        return epochs[-1]["positive_mean"] - hardest[-1]
    if name == "steps to 95 %":
        return min(
            epoch["step"] for epoch in epochs if epoch["rsum"] >= 0.95 * run["validation_rsum"]
        )
    if name == "most early similarity":
        return max(
            min(epoch["positive_mean"], other)
            for epoch, other in zip(epochs[1:], hardest[1:], strict=True)
        )
    if name == "triplets at the start":
        return float(np.mean([counts[f"{side}_per_query_at_start"] for side in DIRECTIONS]))
    if name == "C^q at 0.001 over C^q":
        many, few = (
            sum(counts[f"{side}_{key}"] for side in DIRECTIONS)
            for key in ("per_query_at_0.001", "per_query")
        )
        return many / few
    if match := re.fullmatch(r"CS@(\d+)", name):
        return float(np.mean([metrics[f"{side}_cs_at_{match[1]}"] for side in DIRECTIONS]))
    if name == "mAP@5 by hits":
        return float(np.mean([metrics[f"{side}_map_at_5_hits"] for side in DIRECTIONS]))
    if name in ("C^q", "effective negatives"):
        key = {"C^q": "per_query", "effective negatives": "effective"}[name]
        return float(np.mean([counts[f"{side}_{key}"] for side in DIRECTIONS]))
    if name == "pull":
        return float(np.mean([counts[f"{side}_pull"] for side in DIRECTIONS]))
    if name == "texts without a gradient":
        num_texts = counts["t2i_in_batch"] / counts["t2i_per_query"]
        return 100 * counts["t2i_idle"] / num_texts
    return next(numbers[name] for numbers in (metrics, counts, run) if name in numbers)


@cache
def runs_of(experiment: str) -> list[dict[str, Any]]:
    """The finished runs of an experiment."""
    lines = map(
        json.loads, (DOCS / "evidence" / "study" / f"{experiment}.jsonl").read_text().splitlines()
    )
    return [run for run in lines if "failure" not in run]


def column(address: str, name: str) -> dict[int, float]:
    """A metric of a setting by seed."""
    experiment, setting = address.split("/", 1)
    return {
        run["seed"]: metric_of(run, name)
        for run in runs_of(experiment)
        if run["setting"] == setting
    }


def settings_of(addresses: list[str]) -> list[str]:
    """Setting ids, with a star expanded."""
    expanded = list[str]()
    for address in addresses:
        experiment, setting = address.split("/", 1)
        expanded += (
            dict.fromkeys(f"{experiment}/{run['setting']}" for run in runs_of(experiment))
            if setting == "*"
            else [address]
        )
    return expanded


def differences(a: str, b: str, name: str) -> np.ndarray:
    """Differences of two settings, paired by seed."""
    first = column(a, name)
    second = column(b, name)
    return np.array([first[seed] - second[seed] for seed in sorted(set(first) & set(second))])


def p_value(values: np.ndarray, bound: float = 0.0) -> float:
    """Two-sided p-value of a mean against a bound. Equal values are exact."""
    return (
        float(stats.ttest_1samp(values, bound).pvalue)
        if np.ptp(values)
        else float(values[0] == bound)
    )


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of a mean. Equal values are exact."""
    if not np.ptp(values):
        return values[0], values[0]
    ends = stats.ttest_1samp(values, 0).confidence_interval(1 - ALPHA)
    return float(ends.low), float(ends.high)


def holm(p_values: list[float]) -> np.ndarray:
    """Holm's corrected p-values."""
    order = np.argsort(p_values)
    corrected = np.array(p_values)[order] * np.arange(len(order), 0, -1)
    result = np.empty(len(order))
    result[order] = np.minimum(np.maximum.accumulate(corrected), 1)
    return result


def one_sided(values: np.ndarray, bound: float, sign: int = 1) -> Result:
    """A mean on one side of a bound."""
    low, high = sorted(sign * end for end in interval(values))
    verdict = HOLDS if low > sign * bound else FAILS if high < sign * bound else OPEN
    return Result(
        verdict,
        p_value(values, bound),
        [values.mean(), *(interval(values) if np.ptp(values) else ())],
    )


def all_above(rows: list[np.ndarray], factor: int = 1) -> Result:
    """All means above 0, corrected for their number. ``factor`` counts earlier choices."""
    means = np.array([row.mean() for row in rows])
    corrected = holm([min(1.0, factor * p_value(row)) for row in rows])
    below = corrected[means < 0]
    verdict = (
        HOLDS if all((corrected <= ALPHA) & (means > 0)) else FAILS if any(below <= ALPHA) else OPEN
    )
    return Result(verdict, float(below.min() if len(below) else corrected.max()), [])


def recompute(claim: dict[str, Any]) -> Result:
    """Verdict, p-value and figures of a claim."""
    test = claim["test"]
    name = claim.get("metric", "rsum")
    if test in ("higher", "lower"):
        return one_sided(
            differences(claim["a"], claim["b"], name), 0.0, 1 if test == "higher" else -1
        )
    if test == "not_lower":
        return one_sided(differences(claim["a"], claim["b"], name), -claim["allowed"])
    if test in ("reaches", "stays_below"):
        values = np.array(list(column(claim["a"], name).values()))
        return one_sided(
            values,
            claim["at_least" if test == "reaches" else "at_most"],
            1 if test == "reaches" else -1,
        )
    if test == "same":
        values = differences(claim["a"], claim["b"], name)
        allowed = claim["allowed"]
        low, high = interval(values)
        verdict = (
            HOLDS
            if -allowed < low and high < allowed
            else FAILS
            if low > allowed or high < -allowed
            else OPEN
        )
        return Result(
            verdict, max(p_value(values, bound) for bound in (-allowed, allowed)), [values.mean()]
        )
    if test == "best":
        others = [one for one in settings_of(claim["among"]) if one != claim["a"]]
        rows = [differences(claim["a"], other, name) for other in others]
        result = all_above(rows)
        result.figures = [-min(row.mean() for row in rows)]
        return result
    if test == "each":
        rows = [differences(a, b, name) for a, b in claim["pairs"]]
        result = all_above(rows)
        result.figures = [row.mean() for row in rows]
        return result
    if test == "grows":
        logs = np.log([x for x, _, _ in claim["series"]])
        rows = [differences(a, b, name) for _, a, b in claim["series"]]
        # All settings count seeds from 1, so the first rows of each have the same seeds.
        leads = np.array([row[: min(map(len, rows))] for row in rows])
        slopes = np.array([stats.linregress(logs, lead).slope for lead in leads.T])
        result = one_sided(slopes, 0.0, -1 if claim.get("falls") else 1)
        result.figures += [lead.mean() for lead in leads]
        return result
    if test == "inner_peak":
        means = {one: float(np.mean(list(column(one, name).values()))) for one in claim["series"]}
        first, *inner, last = claim["series"]
        top = max(inner, key=means.__getitem__)
        result = all_above([differences(top, end, name) for end in (first, last)], len(inner))
        result.figures = list(means.values())
        return result
    assert test == "related", test
    among = settings_of(claim["among"])
    x, y = (
        np.array([np.mean(list(column(one, metric).values())) for one in among])
        for metric in (claim["x"], claim["y"])
    )
    draws = np.random.default_rng(7).integers(len(x), size=(RESAMPLES, len(x)))
    ranks = [stats.zscore(stats.rankdata(values[draws], axis=1), axis=1) for values in (x, y)]
    samples = claim["sign"] * (ranks[0] * ranks[1]).mean(1)
    low, high = np.quantile(samples, (ALPHA / 2, 1 - ALPHA / 2))
    bound = claim.get("at_least", 0.0)
    above = int((samples > bound).sum())
    p = min(1.0, 2 * (min(above, RESAMPLES - above) + 1) / (RESAMPLES + 1))
    return Result(
        HOLDS if low > bound else FAILS if high < bound else OPEN,
        p,
        [stats.spearmanr(x, y).statistic],
        sampled=True,
    )


def benjamini_hochberg(p_values: list[float]) -> np.ndarray:
    """p-values corrected for the share of wrong ones."""
    order = np.argsort(p_values)[::-1]
    ranks = np.arange(len(order), 0, -1)
    result = np.empty(len(order))
    result[order] = np.minimum.accumulate(np.array(p_values)[order] * len(order) / ranks)
    return np.minimum(result, 1)


def seeds_in_all(claim: dict[str, Any], tests: int) -> int | None:
    """Number of seeds with which a single comparison with 0 rejects with a probability of 80 %."""
    values = differences(claim["a"], claim["b"], claim.get("metric", "rsum"))
    for seeds in range(2, len(values) + 101):
        bound = stats.t.isf(ALPHA / tests / 2, seeds - 1)
        shift = abs(values.mean()) / values.std(ddof=1) * np.sqrt(seeds)
        if 1 - stats.nct.cdf(bound, seeds - 1, shift) >= 0.8:
            return seeds
    return None


def mistakes_of_power(page: str, claims: list[dict[str, Any]]) -> list[str]:
    """Each claim of two settings whose seeds of the power table differ by more than 1."""
    rows = dict(re.findall(r"^\| (\w+) \| \d+ \| \d+ \| \w+ \| (\d+) \|", page, re.MULTILINE))
    found = []
    for claim in claims:
        if claim["name"] in rows and claim["test"] in ("higher", "lower"):
            needed = seeds_in_all(claim, len(claims))
            if needed is None or abs(needed - int(rows[claim["name"]])) > 1:
                found.append(
                    f"{claim['name']}: {rows[claim['name']]} seeds on the page, {needed} recomputed"
                )
    return found


def with_new_runs(claim: dict[str, Any]) -> dict[str, Any]:
    """A claim with the new runs of its settings."""
    return dict(json.loads(re.sub(r'"(\w[\w-]*)/', r'"\1-again/', json.dumps(claim))))


def mistakes_of_new_tests(page: str, claims: list[dict[str, Any]]) -> list[str]:
    """Each new test whose verdict or p-value on the page differs."""
    rows = {
        name: (float(p), verdict)
        for name, p, verdict in re.findall(
            r"^\| (\w+) \| [a-z ]+ \| .* \| ([\d.e-]+) \| ([a-z ]+) \|$", page, re.MULTILINE
        )
    }
    planned = tomllib.loads((DOCS / "evidence" / "confirmation.toml").read_text())["seeds"]
    new = [claim for claim in claims if claim["name"] in planned]
    results = [recompute(with_new_runs(claim)) for claim in new]
    found = [] if rows.keys() == planned.keys() else [f"new tests of {', '.join(rows)}"]
    for claim, result, p in zip(new, results, holm([one.p for one in results]), strict=True):
        given, verdict = rows.get(claim["name"], (math.nan, ""))
        expected = result.verdict if p <= ALPHA else OPEN
        if verdict != expected or not near(given, p, 0.06):
            found.append(f"{claim['name']}: {verdict}, p {given:g}, recomputed {expected}, {p:.2g}")
    return found


def near(value: float, other: float, relative: float) -> bool:
    """Whether two values agree up to a relative or a rounding difference."""
    return abs(value - other) <= max(relative * max(abs(value), abs(other)), 1e-9)


def mistakes() -> list[str]:
    """Each difference between the page and the recomputed claims."""
    page = (DOCS / "papers" / "claims.md").read_text()
    entries = {
        match[1]: match
        for match in re.finditer(
            r"### (\w+): .*\n\n.*\n.*\n- \*\*Study\.\*\* (.*)\n- \*\*Verdict\.\*\* (.*)\n", page
        )
    }
    claims = tomllib.loads((DOCS / "evidence" / "claims.toml").read_text())["claims"]
    tested = [claim for claim in claims if "test" in claim]
    results = [recompute(claim) for claim in tested]
    p_values = [result.p for result in results]
    corrections = zip(holm(p_values), benjamini_hochberg(p_values), strict=True)
    found = mistakes_of_power(page, tested) + mistakes_of_new_tests(page, tested)
    found += [
        f"{claim['name']}: not on the page" for claim in claims if claim["name"] not in entries
    ]
    for claim, result, corrected in zip(tested, results, corrections, strict=True):
        _, study, verdict = entries[claim["name"]].groups()
        numbers = [
            float(one)
            for one in re.findall(
                r"-?\d+(?:\.\d+)?(?:e-?\d+)?", study.replace("−", "-").replace(",", "")
            )
        ]
        missing = [
            value
            for value in result.figures
            if not any(near(value, number, 6e-3) for number in numbers)
        ]
        found += [f"{claim['name']}: {value:.4g} is not in {study!r}" for value in missing]
        match = re.fullmatch(
            r"(.*) \(p (.*)\)\. Corrected for all claims: (.*) \(p (.*)\)\. False discovery rate 5 %: "
            r"(.*) \(p (.*)\)\. Left out: .*",
            verdict,
        )
        assert match is not None, verdict
        expected = (result.verdict, *(result.verdict if p <= ALPHA else OPEN for p in corrected))
        if match.groups()[::2] != expected:
            found.append(
                f"{claim['name']}: {', '.join(match.groups()[::2])} on the page, "
                f"{', '.join(expected)} recomputed"
            )
        for given, value in zip(
            map(float, match.groups()[1::2]), (result.p, *corrected), strict=True
        ):
            if not near(given, value, 0.06) and not result.sampled:
                found.append(f"{claim['name']}: p {given:g} on the page, {value:.2g} recomputed")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(mistakes()) or None)
