"""Schedule of the runs of a comparison: all seeds of all settings, successive halving, and a time
budget.

With successive halving (Karnin et al. 2013, Jamieson and Talwalkar 2016) all settings start with
one seed. After each round the better half by mean validation RSUM continues with twice as many
seeds, until two settings are left or the time is over. All remaining settings have the same seeds,
so that they are compared in pairs. The test split decides nothing.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from visavis.core.errors import VisavisError
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import RunOutcome

Round = list[tuple[Setting, int]]
"""Settings and seeds to train."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_budget(text: str) -> float:
    """Parse a time.

    Args:
        text: Time such as "90s", "30m" or "1.5h".

    Returns:
        Seconds.

    Raises:
        VisavisError: If the text is not a time.

    Example:
        >>> parse_budget("30m")
        1800.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) == 0:
        raise VisavisError(
            f"budget: expected a time such as 90s, 30m or 1.5h, got {text!r}. Pass a number with a "
            "unit."
        )
    return float(match[1]) * _UNITS[match[2]]


def all_runs(settings: Sequence[Setting], seeds: int) -> Round:
    """List every setting with every seed.

    Args:
        settings: Settings.
        seeds: Number of seeds, from 1.

    Returns:
        The runs. The first seed of all settings comes first, so that an interrupted comparison is
        still a comparison.
    """
    return [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]


def halving_rounds(
    settings: Sequence[Setting], seeds: int, outcomes: Callable[[], Sequence[RunOutcome]]
) -> Iterator[Round]:
    """Generate the rounds of successive halving.

    Args:
        settings: Settings.
        seeds: Number of seeds of the last round.
        outcomes: Returns all outcomes so far.

    Yields:
        Runs of the next round.
    """
    trained_seeds, remaining = 0, list(settings)
    while trained_seeds < seeds:
        next_seeds = min(max(2 * trained_seeds, 1), seeds) if len(remaining) > 2 else seeds
        yield [
            (setting, seed)
            for seed in range(trained_seeds + 1, next_seeds + 1)
            for setting in remaining
        ]
        trained_seeds = next_seeds
        remaining = better_half(remaining, outcomes())


def better_half(settings: Sequence[Setting], outcomes: Sequence[RunOutcome]) -> list[Setting]:
    """Select the better half of the settings by mean validation RSUM over their common seeds.

    Args:
        settings: Settings.
        outcomes: Outcomes of runs.

    Returns:
        At least two settings. Settings without a successful run come last.
    """
    rsum_by_seed: dict[str, dict[int, float]] = {setting.name: {} for setting in settings}
    for run in outcomes:
        if run.setting in rsum_by_seed and not run.failure:
            rsum_by_seed[run.setting][run.seed] = run.validation_rsum
    seeds_of_settings = [set(by_seed) for by_seed in rsum_by_seed.values() if by_seed]
    common_seeds = set.intersection(*seeds_of_settings) if seeds_of_settings else set()

    def mean_rsum(setting: Setting) -> float:
        values = [rsum for seed, rsum in rsum_by_seed[setting.name].items() if seed in common_seeds]
        return statistics.fmean(values) if values else float("-inf")

    best_first = sorted(settings, key=mean_rsum, reverse=True)
    selected = {setting.name for setting in best_first[: max(2, math.ceil(len(settings) / 2))]}
    return [setting for setting in settings if setting.name in selected]


class TimeBudget:
    """Time budget, with the duration of a run estimated from the runs so far.

    Attributes:
        seconds: Budget. None: no limit.
        started: Start time, of ``time.monotonic``.
        runs: Finished runs.
    """

    def __init__(self, seconds: float | None):
        self.seconds, self.started, self.runs = seconds, time.monotonic(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def runs_within_budget(self, runs: Round) -> Round:
        """Select the seeds of a round that end within the budget.

        Args:
            runs: Runs of the round.

        Returns:
            Runs of the first seeds of the round, with all settings. Before the first run, all of
            them.
        """
        if self.seconds is None or not self.runs:
            return runs
        seconds_per_run = self.elapsed / self.runs
        affordable = (self.seconds - self.elapsed) / seconds_per_run
        seeds = sorted({seed for _, seed in runs})
        runs_per_seed = len(runs) / len(seeds)
        return [
            (setting, seed)
            for setting, seed in runs
            if runs_per_seed * (1 + seeds.index(seed)) <= affordable
        ]
