"""Learning rates of a comparison: each setting gets the same number of tries on validation before
its runs.

Objectives differ in the size of their gradients by orders of magnitude, so one learning rate suits
some of them and not others. A try trains for a part of the steps, with its whole schedule, and a
seed that no run of the comparison uses. The test split is not read.

Five short tries, a factor of 4 apart, find the region. Short tries prefer smaller rates than whole
trainings do, so four longer tries, a factor of 2 apart, climb from the best of them: it, its two
neighbors, and the next rate on the better side. The best two train once more, for as many steps as
a run of the comparison if it has five seeds or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from visavis.core.progress import Progress
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import MAX_RUNS, Job, JobRunner

COARSE_FACTORS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Factors of the recipe's learning rate that are tried first."""
LONGER_TRIES = 4
"""Longer tries: the best coarse factor, its two neighbors, and the next on the better side."""
FINALISTS = 2
"""Rates that are tried again at the end."""
COARSE_SHARE, LONGER_SHARE, FINAL_SHARE = 0.02, 0.12, 0.2
"""Steps of a try as a share of the steps of the comparison's own runs of all seeds, and at most
the steps of one run.

The tries of five seeds take 0.98 times the steps of the runs, and less time, because they do not
read the test split.
"""
MIN_STEPS = 5
"""Minimum number of steps of a try. Validation after fewer steps does not rank learning rates."""


@dataclass(frozen=True)
class Try:
    """One training with one learning rate.

    Attributes:
        factor: Factor of the recipe's learning rate.
        steps: Number of steps.
        seed: Seed.
        validation_rsum: Best validation RSUM. None if the training failed.
    """

    factor: float
    steps: int
    seed: int
    validation_rsum: float | None


@dataclass(frozen=True)
class TunedRate:
    """Learning rate of a setting, selected on validation.

    Attributes:
        setting: Name of the setting.
        factor: Factor of the recipe's learning rate, for all phases.
        learning_rate: Learning rate of the first phase.
        tries: All tries.
    """

    setting: str
    factor: float
    learning_rate: float
    tries: tuple[Try, ...]

    @property
    def rates(self) -> int:
        """Number of different learning rates that were tried."""
        return len({one.factor for one in self.tries})

    @property
    def edge(self) -> str:
        """The end of the tried range at which the selected rate is: smallest, largest, or empty."""
        factors = [one.factor for one in self.tries]
        if self.rates == 1:
            return ""
        return (
            "smallest"
            if self.factor == min(factors)
            else "largest"
            if self.factor == max(factors)
            else ""
        )


def with_rate(setting: Setting, factor: float) -> Setting:
    """Multiply the learning rates of all phases. Factors between parts of the model stay."""
    values = deepcopy(setting.recipe_values)
    for phase in values["phases"]:
        phase["optimizer"]["lr"] *= factor
    return replace(setting, recipe_values=values)


def tune_learning_rates(
    settings: Sequence[Setting],
    batches: Mapping[str, int],
    seeds: int,
    folder: Path,
    run_jobs: JobRunner,
    progress: Progress,
    *,
    threads: int = 1,
) -> tuple[TunedRate, ...]:
    """Select the learning rate of each setting on validation. Finished tries in the folder are not
    repeated. Empty if the runs of a setting have too few steps.
    """
    searches = [
        _RateSearch(number, setting, batches[setting.name], seeds, folder, threads)
        for number, setting in enumerate(settings)
    ]
    # The coarse tries may take at most a quarter of the steps of the runs.
    if any(4 * MIN_STEPS * len(COARSE_FACTORS) > search.run_steps for search in searches):
        progress.message(
            "Learning rates are not tuned: the runs have too few steps. Add epochs or seeds, or "
            "compare rates with --grid."
        )
        return ()
    num_tries = len(COARSE_FACTORS) + LONGER_TRIES + FINALISTS
    total = len(searches) * num_tries
    progress.message(
        f"Tuning the learning rate of {len(searches)} settings on validation, {num_tries} tries "
        "each. --no-tune keeps the recipe's rates."
    )
    # A round has the jobs of all settings.
    rounds = zip(*(search.rounds() for search in searches), strict=True)
    done = 0
    for jobs_of_searches in rounds:
        search_of_folder = {
            job.folder: search
            for search, jobs in zip(searches, jobs_of_searches, strict=True)
            for job in jobs
        }
        for outcome in run_jobs([job for jobs in jobs_of_searches for job in jobs]):
            failed = outcome.failure or math.isnan(outcome.validation_rsum)
            search_of_folder[outcome.folder].results[outcome.folder] = (
                None if failed else outcome.validation_rsum
            )
            progress.update("learning rates", done := done + 1, total, 0)
    tuned = tuple(search.result() for search in searches)
    for rate in tuned:
        progress.message(
            f"{rate.setting}: learning rate {rate.learning_rate:.3g}, {rate.factor:g} times the "
            "recipe's"
        )
    return tuned


class _RateSearch:
    """Search of the learning rate of one setting, in rounds of jobs."""

    def __init__(
        self, number: int, setting: Setting, batches: int, seeds: int, folder: Path, threads: int
    ):
        self.setting = setting
        self.batches = batches
        self.threads = threads
        self.stem = folder.absolute() / f"{number + 1:02d}-{setting.slug}-rate"
        self.steps = batches * sum(phase["epochs"] for phase in setting.recipe_values["phases"])
        self.run_steps = seeds * self.steps
        self.tries = dict[Path, Try]()
        self.results = dict[Path, float | None]()

    def rounds(self) -> Iterator[list[Job]]:
        """Yield the jobs of each round. The results of a round are set before the next one."""
        # Seeds that no run of the comparison uses, another one for each stage.
        seed = MAX_RUNS + 1
        yield self._jobs(COARSE_FACTORS, COARSE_SHARE, seed)
        best = self._best_factors()[0]
        yield self._jobs([best / 2, best, best * 2], LONGER_SHARE, seed + 1)
        yield self._jobs([next_factor(self._best_factors())], LONGER_SHARE, seed + 1)
        yield self._jobs(self._best_factors()[:FINALISTS], FINAL_SHARE, seed + 2)

    def result(self) -> TunedRate:
        """The rate with the best validation in the last round."""
        tries = tuple(
            replace(one, validation_rsum=self.results[path]) for path, one in self.tries.items()
        )
        factor = self._best_factors()[0]
        return TunedRate(
            self.setting.name,
            factor,
            self.setting.recipe_values["phases"][0]["optimizer"]["lr"] * factor,
            tries,
        )

    def _best_factors(self) -> list[float]:
        """Factors of the last seed from best to worst. Failed ones come last, and of equal ones
        those closer to the recipe first.
        """
        # The newest stage decides.
        last_seed = max(one.seed for one in self.tries.values())
        rsum = {
            one.factor: self.results[path]
            for path, one in self.tries.items()
            if one.seed == last_seed
        }
        return sorted(
            rsum,
            key=lambda factor: (
                -math.inf if (value := rsum[factor]) is None else value,
                -abs(math.log(factor)),
            ),
            reverse=True,
        )

    def _jobs(self, factors: Sequence[float], share: float, seed: int) -> list[Job]:
        values = shortened(
            self.setting.recipe_values,
            self.batches,
            min(1.0, max(share * self.run_steps, MIN_STEPS) / self.steps),
        )
        epochs = sum(phase["epochs"] for phase in values["phases"])
        num_steps = epochs * min(self.batches, values["training"]["batches_per_epoch"])
        jobs = list[Job]()
        for factor in factors:
            # With more seeds, tries have more steps. A resumed tuning must not mix them.
            path = Path(f"{self.stem}-{factor:g}-steps-{num_steps}-seed-{seed}")
            short = with_rate(replace(self.setting, recipe_values=values), factor).recipe_values
            short = as_try(short, seed, self.threads)
            jobs.append(Job(self.setting.name, seed, short, path, keeps_model=False))
            self.tries[path] = Try(factor, num_steps, seed, None)
        return jobs


def next_factor(best_first: Sequence[float]) -> float:
    """Choose the next factor of a climb.

    Args:
        best_first: Tried factors from best to worst, neighbors a factor of 2 apart.

    Returns:
        The factor beyond the end that is nearer to the best one. In the middle, the end on the side
        of its better neighbor.

    Example:
        >>> next_factor([4.0, 2.0, 1.0])
        8.0
        >>> next_factor([2.0, 1.0, 4.0])
        0.5
    """
    smallest = min(best_first)
    largest = max(best_first)
    # Negative below the middle of the tried range, positive above it.
    position = 2 * math.log2(best_first[0]) - math.log2(smallest) - math.log2(largest)
    upward = (
        best_first.index(2 * best_first[0]) < best_first.index(best_first[0] / 2)
        if position == 0
        else position > 0
    )
    return largest * 2 if upward else smallest / 2


def shortened(recipe_values: Mapping[str, Any], batches: int, share: float) -> dict[str, Any]:
    """Shorten a training with some batches per epoch to a share of its steps in (0, 1]. Each phase
    keeps its whole schedule.
    """
    values = deepcopy(dict(recipe_values))
    steps = share * batches * sum(phase["epochs"] for phase in values["phases"])
    for phase in values["phases"]:
        epochs = max(1, round(phase["epochs"] * share))
        # Milestones and warmup keep their place in the schedule.
        ratio = epochs / phase["epochs"]
        phase["epochs"] = epochs
        phase["schedule"]["milestones"] = [
            max(1, round(epoch * ratio)) for epoch in phase["schedule"]["milestones"]
        ]
        phase["loss_warmup_epochs"] *= ratio
    per_epoch = max(1, round(steps / sum(phase["epochs"] for phase in values["phases"])))
    values["training"] |= {"batches_per_epoch": min(batches, per_epoch), "evaluate_every": 0}
    return values


def as_try(recipe_values: Mapping[str, Any], seed: int, threads: int) -> dict[str, Any]:
    """Make a training a try: its curves are not read, and the test split neither."""
    values = deepcopy(dict(recipe_values))
    values["seed"] = seed
    values["training"] |= {
        "threads": values["training"]["threads"] or threads,
        "metric_batches": 1,
        "track": [],
    }
    values["evaluation"] |= {"test": "", "forgetting": "", "sections": []}
    return values
