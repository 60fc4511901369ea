"""Power of the tests of claims: how many seeds would decide the undecided ones, and what these cost.

The numbers are computed from the stored runs. If the measured differences and standard deviations
are true, the test of a claim decides with a probability of 80 % with these seeds. The cost is of
new runs of all seeds: a run that is repeated on another processor has other last bits, and
training amplifies them (``studies/drift.py``), so new and stored runs are not paired.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from scipy.stats import false_discovery_control
from study import read_evidence
from verdicts import ClaimResult, Comparison, Verdict, expanded, label

from visavis.evaluation.statistics import (
    MAX_MORE_SEEDS,
    POWER,
    SIGNIFICANCE_LEVEL,
    format_number,
    holm,
    power_of_paired_test,
    t_interval,
)

OTHER_SETTINGS = "W"
"""First letter of claims that repeat others in other settings."""
ADDRESS_KEYS = ("a", "b", "among", "pairs", "series")
"""Keys of a claim that name settings."""


class Row(Protocol):
    """What this module needs of a claim with its results."""

    @property
    def claim(self) -> Mapping[str, Any]: ...
    @property
    def result(self) -> ClaimResult: ...
    @property
    def verdicts(self) -> tuple[Verdict, Verdict, Verdict]: ...


@dataclass(frozen=True)
class Plan:
    """Seeds that an undecided claim needs.

    Attributes:
        name: Name of the claim.
        settings: Its settings.
        seeds: Seeds that its test has.
        alone: Seeds that decide it alone. None: more than 100 more than now.
        corrected: Seeds that decide it after the correction for all claims.
    """

    name: str
    settings: tuple[str, ...]
    seeds: int
    alone: int | None
    corrected: int | None


def seeds_needed(comparisons: Sequence[Comparison], level: float) -> int | None:
    """Number of seeds with which every comparison rejects with a probability of 80 %.

    By Bonferroni's inequality, the probability is at least 1 minus the sum of the misses. None if
    100 more seeds than now do not suffice.
    """
    now = min(len(comparison.values) for comparison in comparisons)
    seeds = np.arange(2, now + MAX_MORE_SEEDS + 1)
    missed = np.zeros(len(seeds))
    for comparison in comparisons:
        distance = statistics.fmean(comparison.values) - comparison.bound
        std = statistics.stdev(comparison.values)
        if std:
            power = power_of_paired_test(distance / std, seeds, level / comparison.tests)
            missed += 1 - power
    enough = missed <= 1 - POWER
    return int(seeds[enough.argmax()]) if enough.any() else None


def settings_of(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings whose runs a claim compares."""

    def addresses(value: Any) -> list[str]:
        if isinstance(value, list):
            return [address for part in value for address in addresses(part)]
        return [value] if isinstance(value, str) and "/" in value else []

    named = [address for key in ADDRESS_KEYS for address in addresses(claim.get(key, []))]
    return tuple(dict.fromkeys(expanded(named)))


@cache
def stored_seconds(setting: str) -> list[float]:
    """The seconds of the stored runs of a setting."""
    experiment, name = setting.split("/", 1)
    return [
        line["seconds"]
        for line in read_evidence(experiment)
        if line["setting"] == name and "seconds" in line
    ]


def core_seconds(settings: Sequence[str], seeds: int, planned: Mapping[str, int]) -> float:
    """Seconds of the runs for a number of seeds of each setting, beyond those already planned."""
    return sum(
        statistics.fmean(stored_seconds(setting)) * max(0, seeds - planned.get(setting, 0))
        for setting in settings
    )


def by_cost(plans: Sequence[Plan]) -> list[tuple[Plan, float]]:
    """The plans, the cheapest next one first, with the core-seconds of all up to each. Claims share
    runs, so the cost of the rest falls.
    """
    planned: dict[str, int] = {}
    rest = [plan for plan in plans if plan.corrected is not None]
    ordered = []
    total = 0.0
    while rest:
        costs = [core_seconds(plan.settings, plan.corrected or 0, planned) for plan in rest]
        cheapest = costs.index(min(costs))
        plan = rest.pop(cheapest)
        total += costs[cheapest]
        for setting in plan.settings:
            planned[setting] = max(planned.get(setting, 0), plan.corrected or 0)
        ordered.append((plan, total))
    return ordered


def plan_of(row: Row, tested: int) -> Plan:
    """The seeds that an undecided claim needs."""
    comparisons = row.result.decisive
    return Plan(
        row.claim["name"],
        settings_of(row.claim),
        min(len(comparison.values) for comparison in comparisons),
        seeds_needed(comparisons, SIGNIFICANCE_LEVEL),
        seeds_needed(comparisons, SIGNIFICANCE_LEVEL / tested),
    )


def power_section(rows: Sequence[Row]) -> list[str]:
    """The section of the page: costs, differences that are too small, and the correction."""
    tested = [row for row in rows if row.result.verdict != "not run"]
    undecided = [row for row in tested if row.verdicts[1] == "undecided"]
    over_seeds = [row for row in undecided if row.result.decisive]
    over_settings = [row for row in undecided if not row.result.decisive]
    plans = {row.claim["name"]: plan_of(row, len(tested)) for row in over_seeds}
    ordered = by_cost(list(plans.values()))
    small = [row for row in over_seeds if plans[row.claim["name"]].corrected is None]
    return [
        "## Power of the tests",
        "",
        f"Corrected for all claims, {len(undecided)} claims are undecided. The table has the number of seeds with which the test of a claim decides it, with a",
        "probability of 80 % if the measured difference and its standard deviation are true. With three seeds, the standard deviation is rough, and so is",
        "the estimate. The corrected level is 5 % divided by the number of claims.",
        "",
        "The cost is of new runs of all seeds of all settings of a claim, which are then tested on their own. Repeated runs differ from the stored ones in the",
        "last bits on another processor, and training amplifies them (`python studies/drift.py`). So new and stored runs are not mixed. Claims share runs, and",
        "the core-hours are the sum up to each line. A run takes the mean time of the stored ones, on one core. The new tests have",
        "an error of their own, again 5 %.",
        "",
        *_cost_table(ordered, over_seeds),
        "",
        *_target(undecided, ordered),
        f"- **More seeds do not help:** {_names(over_settings)}. Their interval is over objectives, not over seeds, so only more objectives narrow it.",
        f"- **Too small a difference for {MAX_MORE_SEEDS} more seeds:** {len(small)} claims. Their 95 % intervals exclude larger differences:",
        "",
        *_small_table(small),
        "",
        *_procedures(tested),
    ]


def _cost_table(ordered: Sequence[tuple[Plan, float]], rows: Sequence[Row]) -> list[str]:
    alone = {row.claim["name"]: row.verdicts[0] for row in rows}
    lines = [
        "| claim | seeds now | seconds of a run | seeds, alone | seeds, corrected | core-hours, sum |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for plan, total in ordered:
        seconds = statistics.fmean(
            [statistics.fmean(stored_seconds(setting)) for setting in plan.settings]
        )
        seeds_alone = (
            "decided"
            if alone[plan.name] != "undecided"
            else "more"
            if plan.alone is None
            else str(plan.alone)
        )
        lines.append(
            f"| {plan.name} | {plan.seeds} | {seconds:.0f} | {seeds_alone} | {plan.corrected} | "
            f"{total / 3600:.2f} |"
        )
    return lines


def _target(undecided: Sequence[Row], ordered: Sequence[tuple[Plan, float]]) -> list[str]:
    """The cost of a third fewer undecided claims."""
    missing = math.ceil(len(undecided) / 3)
    start = f"- **A third fewer undecided claims:** {missing} of {len(undecided)}."
    runs = math.ceil(missing / POWER)
    if runs > len(ordered):
        return [f"{start} {MAX_MORE_SEEDS} more seeds do not suffice."]
    hours = ordered[runs - 1][1] / 3600
    return [
        f"{start} With a power of 80 %, {runs} claims must be tested. The cheapest {runs} of the table cost {hours:.2f} core-hours."
    ]


def _small_table(rows: Sequence[Row]) -> list[str]:
    """The mean that is hardest to decide of each claim, and the differences that are excluded."""
    lines = [
        "| claim | metric | difference | 95 % interval | excluded above |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        comparison = row.result.decisive[-1]
        interval = t_interval(comparison.values)
        if interval is None:
            continue
        metric = "slope" if row.claim["test"] == "grows" else label(row.claim.get("metric", "rsum"))
        mean = format_number(statistics.fmean(comparison.values), signed=True)
        limit = format_number(max(abs(interval.low), abs(interval.high)))
        lines.append(
            f"| {row.claim['name']} | {metric.rstrip(':')} | {mean} | {interval} | {limit} |"
        )
    return lines


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.claim["name"] for row in rows) or "none"


def decided_by(rows: Sequence[Row]) -> dict[str, int]:
    """Number of decided claims by each correction of the p-values."""
    p_values = np.array([row.result.p for row in rows])
    letters = np.array([row.claim["name"][0] for row in rows])
    families = [p_values[letters == letter] for letter in dict.fromkeys(letters)]

    def found(p: Sequence[float] | np.ndarray, level: float = SIGNIFICANCE_LEVEL) -> int:
        return int((np.array(p) <= level).sum())

    main = p_values[letters != OTHER_SETTINGS]
    found_in_main = found(holm(main.tolist()))
    # The claims in other settings are tested only after all of the main ones are decided.
    gate = found(holm(p_values[letters == OTHER_SETTINGS].tolist()))
    return {
        "Holm": found(holm(p_values.tolist())),
        "shared": sum(
            found(holm(family.tolist()), SIGNIFICANCE_LEVEL * len(family) / len(p_values))
            for family in families
        ),
        "gate": found_in_main + (gate if found_in_main == len(main) else 0),
        "each paper": sum(found(holm(family.tolist())) for family in families),
        "papers": len(families),
        "BH": found(false_discovery_control(p_values)),
        "BY": found(false_discovery_control(p_values, method="by")),
    }


def _procedures(rows: Sequence[Row]) -> list[str]:
    found = decided_by(rows)
    whole_page = round(100 * SIGNIFICANCE_LEVEL * found["papers"])
    return [
        "### Choice of the correction",
        "",
        "| correction | at most 5 % | decided |",
        "|---|---|---:|",
        f"| Holm over all claims | any wrong verdict on this page | {found['Holm']} |",
        f"| Holm by section, error shared by number of claims | any wrong verdict on this page | {found['shared']} |",
        f"| Other settings (W) after all other claims | any wrong verdict on this page | {found['gate']} |",
        f"| Holm by section, 5 % each | any wrong verdict in one section | {found['each paper']} |",
        f"| Benjamini and Hochberg | share of wrong verdicts | {found['BH']} |",
        f"| Benjamini and Yekutieli | share of wrong verdicts, any dependence | {found['BY']} |",
        "",
        "The columns of this page were chosen by these arguments, not by the last column:",
        "",
        "- **Holm over all claims stays.** It was fixed before the results, holds for every dependence of the tests, and answers whether any verdict of the",
        "  page is wrong.",
        "- **Shared error and weights** are valid only if they are fixed before the results. The results are known, and none is better for all results.",
        "- **A fixed order** tests the claims in other settings only after all other claims are decided. The papers do not give such an order.",
        f"- **5 % for each section** is another error: up to {whole_page} % for the page.",
        "- **Resampling** uses the dependence of the tests. Three seeds have only four sign patterns up to a reversal, so no p-value is below 0.25.",
        "- **Benjamini and Hochberg** is the last column, for readers who search for promising claims and accept a few wrong ones. It assumes independent or",
        "  positively dependent tests. Claims share runs, so some are negatively dependent. In simulations with shared runs, the share stays below 5 %",
        "  (`tests/test_claims.py`). The variant of Benjamini and Yekutieli holds for every dependence.",
    ]
