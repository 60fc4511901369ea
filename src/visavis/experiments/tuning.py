"""Learning rates of a comparison: each setting gets the same number of tries on validation before its runs.

Objectives differ in the size of their gradients by orders of magnitude, so one learning rate suits some of them and not others. A try
trains for a part of the steps, with its whole schedule, and a seed that no run of the comparison uses. The test split is not read. Five
coarse rates come first, then rates next to the best, beyond it if it is the smallest or the largest. The best three train longer, and
then the best two. The first step of successive halving (Jamieson and Talwalkar 2016) is coarse, because most rates fail early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from visavis.experiments.grid import Setting
from visavis.experiments.jobs import MAX_RUNS, Job, JobRunner
from visavis.progress import Progress

COARSE_FACTORS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""Factors of the recipe's learning rate that are tried first."""
FINE_TRIES = 3
"""Tries next to the best coarse factor."""
LATER_TRIES = (3, 2)
"""Rates that are tried again in the later rounds."""
ROUND_SHARE = 0.24
"""Steps of a round as a share of the steps of the comparison's own runs. Three rounds and the starts of their runs take less than these."""
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
        return "smallest" if self.factor == min(factors) else "largest" if self.factor == max(factors) else ""


def with_rate(setting: Setting, factor: float) -> Setting:
    """Multiply the learning rates of all phases. Factors between parts of the model stay.

    Args:
        setting: Setting.
        factor: Factor.

    Returns:
        The setting with the other learning rates, under the same name.
    """
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
    """Select the learning rate of each setting on validation.

    Args:
        settings: Settings.
        batches: Batches of an epoch by the name of the setting.
        seeds: Number of seeds of the comparison, which bounds the steps of all tries.
        folder: Folder of the tries. Finished tries are not repeated.
        run_jobs: Runs jobs.
        progress: Receives progress and the selected rates.
        threads: CPU threads of a try.

    Returns:
        The rate of each setting. Empty if the runs of a setting have too few steps.

    Raises:
        Stopped: After a signal, when everything is saved.
    """
    searches = [_RateSearch(number, setting, batches[setting.name], seeds, folder, threads) for number, setting in enumerate(settings)]
    num_tries = min((search.num_tries for search in searches), default=0)
    if not num_tries:
        progress.message("Learning rates are not tuned: the runs have too few steps. Add epochs or seeds, or compare rates with --grid.")
        return ()
    total = len(searches) * (num_tries + sum(LATER_TRIES))
    progress.message(
        f"Tuning the learning rate of {len(searches)} settings on validation, {num_tries} rates each. --no-tune keeps the recipe's rates."
    )
    rounds = zip(*(search.rounds(num_tries) for search in searches), strict=True)
    done = 0
    for jobs_of_searches in rounds:
        search_of_folder = {job.folder: search for search, jobs in zip(searches, jobs_of_searches, strict=True) for job in jobs}
        for outcome in run_jobs([job for jobs in jobs_of_searches for job in jobs]):
            failed = outcome.failure or math.isnan(outcome.validation_rsum)
            search_of_folder[outcome.folder].results[outcome.folder] = None if failed else outcome.validation_rsum
            progress.update("learning rates", done := done + 1, total, 0)
    tuned = tuple(search.result() for search in searches)
    for rate in tuned:
        progress.message(f"{rate.setting}: learning rate {rate.learning_rate:.3g}, {rate.factor:g} times the recipe's")
    return tuned


class _RateSearch:
    """Search of the learning rate of one setting, in rounds of jobs."""

    def __init__(self, number: int, setting: Setting, batches: int, seeds: int, folder: Path, threads: int):
        self.number, self.setting, self.batches, self.folder, self.threads = number, setting, batches, folder, threads
        self.steps = batches * sum(phase["epochs"] for phase in setting.recipe_values["phases"])
        self.round_steps = ROUND_SHARE * seeds * self.steps
        self.tries = dict[Path, Try]()
        self.results = dict[Path, float | None]()

    @property
    def num_tries(self) -> int:
        """Number of rates that the steps of a round allow: with fine ones, coarse ones only, or 0."""
        most = len(COARSE_FACTORS) + FINE_TRIES
        return next((count for count in (most, len(COARSE_FACTORS)) if self.round_steps >= count * MIN_STEPS), 0)

    def rounds(self, num_tries: int) -> Iterator[list[Job]]:
        """Yield the jobs of each round. The results of a round are set before the next one."""
        steps, seed = self.round_steps / num_tries, MAX_RUNS + 1
        yield self._jobs(COARSE_FACTORS, steps, seed)
        if num_tries > len(COARSE_FACTORS):
            yield self._jobs(fine_factors(self._best_factors()), steps, seed)
        for later, count in enumerate(LATER_TRIES, 1):
            yield self._jobs(self._best_factors()[:count], self.round_steps / count, seed + later)

    def result(self) -> TunedRate:
        """The rate with the best validation in the last round."""
        tries = tuple(replace(one, validation_rsum=self.results[path]) for path, one in self.tries.items())
        factor = self._best_factors()[0]
        return TunedRate(self.setting.name, factor, self.setting.recipe_values["phases"][0]["optimizer"]["lr"] * factor, tries)

    def _best_factors(self) -> list[float]:
        """Factors of the last round from best to worst. Failed ones come last, and of equal ones those closer to the recipe first."""
        last_seed = max(one.seed for one in self.tries.values())
        rsum = {one.factor: self.results[path] for path, one in self.tries.items() if one.seed == last_seed}
        return sorted(
            rsum, key=lambda factor: (-math.inf if (value := rsum[factor]) is None else value, -abs(math.log(factor))), reverse=True
        )

    def _jobs(self, factors: Sequence[float], steps: float, seed: int) -> list[Job]:
        values = shortened(self.setting.recipe_values, self.batches, min(1.0, max(steps, MIN_STEPS) / self.steps))
        jobs, num_steps = list[Job](), _num_steps(values, self.batches)
        for factor in factors:
            # With more seeds, tries have more steps. A resumed tuning must not mix them.
            path = self.folder / f"{self.number + 1:02d}-{self.setting.slug}-rate-{factor:g}-steps-{num_steps}-seed-{seed}"
            recipe_values = with_rate(replace(self.setting, recipe_values=values), factor).recipe_values
            recipe_values |= {"seed": seed}
            recipe_values["training"] |= {"threads": recipe_values["training"]["threads"] or self.threads}
            jobs.append(Job(self.setting.name, seed, recipe_values, path.absolute(), keeps_model=False))
            self.tries[path.absolute()] = Try(factor, num_steps, seed, None)
        return jobs


def fine_factors(best_first: Sequence[float]) -> list[float]:
    """Choose the factors to try after the coarse ones.

    Args:
        best_first: Coarse factors from best to worst.

    Returns:
        Three new factors: both neighbors of the best and the one next to its better side, or three beyond the range if the best is
        at its end.

    Example:
        >>> fine_factors([1.0, 4.0, 0.25, 16.0, 0.0625])
        [0.5, 2.0, 8.0]
        >>> fine_factors([16.0, 4.0, 1.0, 0.25, 0.0625])
        [8.0, 32.0, 64.0]
    """
    best = best_first[0]
    if best == max(best_first):
        return [best / 2, best * 2, best * 4]
    if best == min(best_first):
        return [best * 2, best / 2, best / 4]
    larger_is_better = best_first.index(best * 4) < best_first.index(best / 4)
    return [best / 2, best * 2, best * 8 if larger_is_better else best / 8]


def shortened(recipe_values: Mapping[str, Any], batches: int, share: float) -> dict[str, Any]:
    """Shorten a training to a share of its steps. Each phase keeps its whole schedule, and the test split is not read.

    Args:
        recipe_values: Plain values of a recipe.
        batches: Batches of an epoch.
        share: Share of the steps, in (0, 1].

    Returns:
        The values of the shorter recipe.
    """
    values = deepcopy(dict(recipe_values))
    steps = share * batches * sum(phase["epochs"] for phase in values["phases"])
    for phase in values["phases"]:
        epochs = max(1, round(phase["epochs"] * share))
        ratio, phase["epochs"] = epochs / phase["epochs"], epochs
        phase["schedule"]["milestones"] = [max(1, round(epoch * ratio)) for epoch in phase["schedule"]["milestones"]]
        phase["loss_warmup_epochs"] *= ratio
    per_epoch = max(1, round(steps / sum(phase["epochs"] for phase in values["phases"])))
    values["training"] |= {"batches_per_epoch": min(batches, per_epoch), "evaluate_every": 0, "track": []}
    values["evaluation"] |= {"test": "", "forgetting": "", "relevance": ""}
    return values


def _num_steps(recipe_values: Mapping[str, Any], batches: int) -> int:
    epochs = sum(phase["epochs"] for phase in recipe_values["phases"])
    return epochs * min(batches, recipe_values["training"]["batches_per_epoch"] or batches)
