"""Result of a comparison: the setting that validation selects, its test results, their certainty,
and the sweep of one number.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from visavis.core.fields import is_number
from visavis.core.own_code import CodeNotNamed
from visavis.core.result import Result
from visavis.core.spec import parse
from visavis.core.table import Column, Table
from visavis.core.table_formats import format_csv, format_latex, format_markdown
from visavis.evaluation.bootstrap import BootstrapSamples, bootstrap_images, bootstrap_queries
from visavis.evaluation.metrics.catalog import RSUM, own_metric_keys
from visavis.evaluation.query_ranks import read_query_ranks
from visavis.evaluation.statistics import (
    Interval,
    PairedTest,
    differences_from,
    paired_tests,
    spread_over_seeds,
)
from visavis.losses.auto_scale import is_auto
from visavis.losses.objectives import CATALOG, Objective
from visavis.research.experiments.feedback_test import FeedbackTest
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import RunOutcome
from visavis.research.experiments.model_costs import ModelCost
from visavis.research.experiments.regret import Finalist, Regret, estimate_regret
from visavis.research.experiments.screening import NUM_ROUNDS, ScreeningState
from visavis.research.experiments.setting_results import (
    CAPTION_COLUMNS,
    SettingResults,
    bounds_of,
    indistinguishable_rows,
)
from visavis.research.experiments.tuning import TunedRate
from visavis.training.runs.run_folder import RunFolder

# The feedback metric that is described in words.
FEEDBACK_METRIC, FEEDBACK_LABEL = "judged_r10", "feedback R@10"
SPLITS = ("validation", "test")
MIN_VALUES = 3
"""Minimum number of values of a curve."""
LIKELY_SHARE = 5.0
"""Probability in percent from which a dropped candidate is named as possibly the best."""


@dataclass(frozen=True)
class MeanRsum:
    """RSUM of one setting on one split.

    Attributes:
        mean: Mean RSUM over seeds.
        spread: 95 % t interval of RSUM, or its range below ``MIN_SEEDS``. None if the seeds show
            no spread.
        seeds: Number of seeds.
    """

    mean: float
    spread: Interval | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanRsum:
        """Compute the mean of the RSUM of each seed, and its spread."""
        spread = spread_over_seeds(values)
        on_scale = None if spread is None else spread.within(*bounds_of(RSUM.name))
        return cls(statistics.fmean(values), on_scale, len(values))


@dataclass(frozen=True)
class SweepPoint:
    """One value of the swept number.

    Attributes:
        value: The value.
        rsum: RSUM at this value.
    """

    value: float
    rsum: MeanRsum


@dataclass(frozen=True)
class Sweep:
    """RSUM as a function of one number, as in figure 5 of the Unified paper.

    The number is a recipe key, such as ``phases.0.optimizer.lr`` of a grid, or a parameter of the
    objective or model, such as ``margin`` of ``Unified(margin=0.1)``, ``Unified(margin=0.2)``, ...
    With several objectives, each has its own curve.

    Attributes:
        name: Name of the number.
        curves: Points on validation and on test, by what else differs between settings. The key is
            "" if nothing does.
        references: Validation and test of the settings that are on no curve of the comparison, by
            name.
    """

    name: str
    curves: Mapping[str, tuple[tuple[SweepPoint, ...], tuple[SweepPoint, ...]]]
    references: Mapping[str, tuple[MeanRsum, MeanRsum]]

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as a JSON object."""
        curves = [
            {"name": name}
            | {
                split: [{"value": point.value, **asdict(point.rsum)} for point in points]
                for split, points in zip(SPLITS, curve, strict=True)
            }
            for name, curve in self.curves.items()
        ]
        references = [
            {"name": name}
            | {split: asdict(rsum) for split, rsum in zip(SPLITS, rsums, strict=True)}
            for name, rsums in self.references.items()
        ]
        return {"name": self.name, "curves": curves, "references": references}


@dataclass(frozen=True)
class TimedChoice:
    """How a comparison chose its settings within a time.

    Attributes:
        minutes: The time.
        state: Decisions of the time, and the results of all candidates.
        costs: Cost of each setting's model at search time.
    """

    minutes: float
    state: ScreeningState
    costs: Mapping[str, ModelCost]

    @property
    def candidates(self) -> Table:
        """Best validation RSUM of each candidate in each round, best first."""
        columns = (
            Column("candidate", is_text=True),
            *(Column(f"round {number + 1}", ".1f", missing="-") for number in range(NUM_ROUNDS)),
        )
        best_first = sorted(
            self.state.screened,
            key=lambda one: (one.last_round, one.best_by_round[one.last_round]),
            reverse=True,
        )
        rows = tuple((one.name, *one.best_by_round) for one in best_first)
        assert self.state.schedule is not None
        shares = " %, ".join(f"{100 * share:.0f}" for share in self.state.schedule.round_shares)
        note = (
            "Validation RSUM at the best learning rate of each round. All trainings have the steps of a "
            "run, and the finalists are the best of all rounds."
            if self.state.schedule.is_whole
            else f"Validation RSUM at the best learning rate of each round, whose trainings have {shares} % "
            "of the steps of a run. Only the rows of one column can be compared. Dropped candidates "
            "in the last round are spot checks."
        )
        return Table(columns, rows, (note,))


@dataclass(frozen=True)
class Comparison(Result):
    """Runs of a comparison and what follows from them.

    Attributes:
        folder: Folder of the comparison.
        name: Name of the recipe.
        settings: Settings with at least one successful run, in the given order.
        outcomes: Outcomes of all runs, sorted by setting and seed.
        feedback: Judged text queries that every successful run was evaluated on.
        rates: Learning rates of the settings, selected on validation. Empty: not tuned.
        choice: How a time selected the settings. None: they were given.
    """

    folder: Path
    name: str
    settings: tuple[Setting, ...]
    outcomes: tuple[RunOutcome, ...]
    feedback: FeedbackTest | None = None
    rates: tuple[TunedRate, ...] = ()
    choice: TimedChoice | None = None

    def runs(self, setting: Setting) -> list[RunOutcome]:
        """Return the successful runs of a setting, by seed."""
        return [run for run in self.outcomes if run.setting == setting.name and not run.failure]

    @property
    def failures(self) -> list[RunOutcome]:
        """Failed runs."""
        return [run for run in self.outcomes if run.failure]

    def validation(self, setting: Setting) -> float:
        """Return the mean validation RSUM of a setting."""
        return statistics.fmean(run.validation_rsum for run in self.runs(setting))

    @property
    def draws_validation(self) -> bool:
        """Whether each seed draws its validation images."""
        return any(
            one.recipe_values["evaluation"].get("random_validation") for one in self.settings
        )

    def comparable_runs(self, setting: Setting) -> list[RunOutcome]:
        """Return the successful runs of a setting whose validation can be compared with all settings:
        if each seed draws its validation images, only seeds that all settings have. If there is none,
        all runs.
        """
        runs = self.runs(setting)
        if not self.draws_validation:
            return runs
        shared = set.intersection(*({run.seed for run in self.runs(one)} for one in self.settings))
        return [run for run in runs if run.seed in shared] or runs

    def comparable_validation(self, setting: Setting) -> float:
        """Return the mean validation RSUM of the comparable runs of a setting."""
        return statistics.fmean(run.validation_rsum for run in self.comparable_runs(setting))

    @cached_property
    def selected(self) -> tuple[Setting, ...]:
        """Best grid point of each choice by mean validation RSUM, among those with the most seeds.
        The choices are in the same order, best first.
        """
        choices: dict[str, list[Setting]] = {}  # grid points of each choice
        for setting in self.settings:
            choices.setdefault(setting.choice, []).append(setting)
        points = [max(points, key=self._selection_key) for points in choices.values()]
        return tuple(sorted(points, key=self._selection_key, reverse=True))

    @property
    def best(self) -> Setting:
        """Best choice by validation."""
        return self.selected[0]

    @property
    def results(self) -> SettingResults:
        """Test results of every choice. Raises RunError if the runs were measured under different
        conditions.
        """
        runs = {
            setting.name: [
                (run.measured_metrics, run.conditions)
                for run in self.runs(setting)
                if run.conditions is not None
            ]
            for setting in self.selected
        }
        return replace(
            SettingResults.from_runs(
                runs, f"Selected on validation, best first, measured on test. {self.tuning}"
            ),
            feedback=self.feedback,
            extra_metrics=self._extra_metrics,
        )

    @property
    def _extra_metrics(self) -> tuple[str, ...]:
        """Further metrics of the recipe that the table has no column for and that all runs have."""
        names = self.settings[0].recipe_values["evaluation"]["extra_metrics"]
        # An own metric, in a file of the user, may have several keys.
        keys = [key for name in names for key in (own_metric_keys(name) if ":" in name else [name])]
        known = {metric for group in CAPTION_COLUMNS for metric in group.labels}
        runs = [run.measured_metrics for setting in self.selected for run in self.runs(setting)]
        return tuple(
            key
            for key in dict.fromkeys(keys)
            if key not in known and all(key in metrics for metrics in runs)
        )

    def pairwise_tests(self, metric: str) -> list[PairedTest]:
        """Test all pairs of choices by seed, corrected for all of them, so that you may pick any
        choice afterwards.
        """
        return paired_tests(
            {
                setting.name: {run.seed: run.measured_metrics[metric] for run in self.runs(setting)}
                for setting in self.selected
            }
        )

    @cached_property
    def rsum_tests(self) -> list[PairedTest]:
        """``pairwise_tests`` of RSUM."""
        return self.pairwise_tests(RSUM.name)

    @property
    def differences_from_best(self) -> dict[str, PairedTest]:
        """The best minus every other choice, by name, smallest difference first."""
        tests = [
            test.swapped() for test in differences_from(self.rsum_tests, self.best.name).values()
        ]
        return {test.b: test for test in sorted(tests, key=lambda test: test.difference)}

    @cached_property
    def image_bootstrap(self) -> BootstrapSamples:
        """Bootstrap over test images of the runs of all choices."""
        protocol = self.results.conditions.protocol
        return bootstrap_images(
            {
                setting.name: {
                    run.seed: read_query_ranks(RunFolder(run.folder).ranks)[protocol]
                    for run in self.runs(setting)
                }
                for setting in self.selected
            }
        )

    @cached_property
    def query_bootstrap(self) -> BootstrapSamples:
        """Bootstrap over judged text queries of the runs of all choices. Only with feedback."""
        return bootstrap_queries(
            {
                setting.name: {
                    run.seed: run.feedback.answers for run in self.runs(setting) if run.feedback
                }
                for setting in self.selected
            }
        )

    def feedback_differences_from_best(self, metric: str) -> dict[str, PairedTest]:
        """Return the best minus every other choice in a feedback metric, in the order of
        ``differences_from_best``.
        """
        tests = differences_from(self.pairwise_tests(metric), self.best.name)
        return {name: tests[name].swapped() for name in self.differences_from_best}

    @cached_property
    def regret(self) -> Regret | None:
        """Expected regret of the best setting against all candidates. None if the settings were
        given, or have too few seeds.
        """
        if self.choice is None:
            return None
        factors = {rate.setting: rate.factor for rate in self.rates}
        finalists = {
            setting.name: Finalist(
                factors.get(setting.name, 1.0),
                {run.seed: run.validation_rsum for run in self.runs(setting)},
                {run.seed: run.measured_metrics[RSUM.name] for run in self.runs(setting)},
            )
            for setting in self.settings
        }
        failed = {run.setting for run in self.failures} - finalists.keys()
        state = self.choice.state
        screened = [one for one in state.screened if one.name not in failed]
        assert state.schedule is not None
        return estimate_regret(finalists, self.best.name, screened, state.schedule)

    @property
    def frontier(self) -> Table | None:
        """Quality of each setting against the cost of its model at search time. None if the settings
        were given.
        """
        if self.choice is None:
            return None
        costs = self.choice.costs
        means = {row.name: row.mean(RSUM.name) for row in self.results.rows}

        def values(name: str) -> tuple[float, float, float, float]:
            cost = costs[name]
            return -means[name], cost.parameters, cost.query_ms, cost.item_bytes

        def is_dominated(name: str) -> bool:
            own = values(name)
            return any(
                other != own and all(a <= b for a, b in zip(other, own, strict=True))
                for other in map(values, means)
            )

        columns = (
            Column("setting", is_text=True),
            Column("RSUM", ".1f"),
            Column("parameters", ","),
            Column("ms per query", ".2f"),
            Column("bytes per item", ",.0f"),
            Column("frontier", is_text=True),
        )
        rows = tuple(
            (
                name,
                rsum,
                costs[name].parameters,
                costs[name].query_ms,
                costs[name].item_bytes,
                "" if is_dominated(name) else "yes",
            )
            for name, rsum in means.items()
        )
        images = next(iter(costs.values())).images
        note = (
            f"Frontier: no other setting is at least as good in all four columns. A query is one text "
            f"scored with {images:,} images, measured on this machine. Parameters of frozen encoders "
            "are not counted."
        )
        return Table(columns, rows, (note,))

    @property
    def _unlikely(self) -> list[str]:
        """Settings with too few seeds for a test that are hardly better than the choice, by the spread
        of all finalists.
        """
        excluded = () if self.regret is None else self.regret.excluded
        return [name for name in self._not_distinguishable if name in excluded]

    @property
    def _not_distinguishable(self) -> list[str]:
        """Settings that a test does not distinguish from the best."""
        tests = self.differences_from_best.values()
        return [test.b for test in tests if test.verdict == "not distinguishable"]

    @property
    def choice_findings(self) -> list[str]:
        """How the time was spent, and how much the choice may be off. Empty if the settings were
        given.
        """
        if self.choice is None:
            return []
        state = self.choice.state
        assert state.schedule is not None
        share = state.schedule.run_share
        length = (
            ""
            if share == 1
            else f" Each run has {share:.0%} of the recipe's steps. Longer runs may prefer others."
        )
        count = len(state.screened)
        fewest = min(len(self.runs(setting)) for setting in self.settings)
        seeds = f"{fewest} to {state.seeds}" if fewest < state.seeds else f"{state.seeds}"
        most = f" More than {state.seeds} seeds are not trained." if state.has_most_seeds else ""
        sentences = [
            (
                f"{count} candidate{'s' * (count > 1)} screened, {len(self.settings)} confirmed with "
                f"{seeds} fresh seed{'s' * (state.seeds > 1)} in {state.elapsed_s / 60:.1f} of "
                f"{self.choice.minutes:g} minutes.{most}{length}"
            )
        ]
        if self.draws_validation:
            sentences.append(
                "Each seed drew its validation images from those of training and validation."
            )
        regret = self.regret
        if regret is None:
            sentences.append(
                "Too few candidates and seeds were trained in whole to estimate the regret of the "
                "choice. A new comparison with more --minutes can."
            )
        else:
            sentences.append(
                f"{self.best.name} may be {regret.expected:.1f} RSUM below the best of all "
                f"candidates and learning rates ({regret.interval.kind} {regret.interval}). With as "
                f"many seeds again, this expected regret is {regret.with_twice_the_seeds:.1f}."
            )
        unlikely = self._unlikely
        if similar := [name for name in self._not_distinguishable if name not in unlikely]:
            sentences.append(f"Not distinguishable from it: {'; '.join(similar)}.")
        if unlikely:
            sentences.append(
                "Better with a probability below 2.5 % by the spread of all finalists, but with too few "
                f"seeds for a test of their own: {'; '.join(unlikely)}."
            )
        by_candidate = regret.by_candidate if regret is not None else {}
        confirmed = {setting.name for setting in self.settings}
        dropped = [
            name
            for name, percent in by_candidate.items()
            if percent >= LIKELY_SHARE and name not in confirmed
        ]
        if dropped:
            sentences.append(
                f"Dropped early, but possibly the best: {'; '.join(dropped)}. Compare them with "
                "--objective."
            )
        if (percent := by_candidate.get(self.best.name, 0.0)) >= LIKELY_SHARE:
            sentences.append(
                f"Another learning rate of {self.best.name} is the best with a probability of "
                f"{percent:.0f} %. Compare its rates with --grid."
            )
        sentences += [
            f"{one.name} failed in the screening: {one.failure}"
            for one in state.screened
            if one.failure
        ]
        return sentences

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        """Curves over each number that varies while everything else is equal."""
        return find_sweeps([(setting, self.comparable_runs(setting)) for setting in self.settings])

    def selected_values(self, setting: Setting) -> str:
        """Describe what validation selected for a setting."""
        rates = [
            f"learning rate {rate.learning_rate:.3g}, the best of {rate.rates}"
            for rate in self.rates
            if rate.setting == setting.name
        ]
        return ", ".join(filter(None, (setting.grid_point, *rates)))

    @property
    def tuning(self) -> str:
        """Learning rates of the selected settings and how they were selected, without a period."""
        selected = [
            rate
            for rate in self.rates
            if any(rate.setting == setting.name for setting in self.selected)
        ]
        if selected:
            rates = ", ".join(f"{rate.setting} {rate.learning_rate:.3g}" for rate in selected)
            counts = sorted({len(rate.tries) for rate in selected})
            tries = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
            return f"Learning rates tuned on validation, {tries} tries for each setting, with other seeds: {rates}"
        points = {point for setting in self.settings for point in setting.grid_point.split(", ")}
        if sum("optimizer.lr" in point for point in points) > 1:
            return "At the learning rates of the grid, selected on validation"
        return "At the recipe's learning rate, not tuned"

    @property
    def is_at_chance(self) -> bool:
        """Whether the test results of all choices are those of a random ranking."""
        results = self.results
        limit = results.conditions.highest_chance_rsum
        return all(row.mean(RSUM.name) <= limit for row in results.rows)

    @property
    def findings(self) -> list[str]:
        """Findings in sentences."""
        best = self.best.name
        seeds = len(self.runs(self.best))
        seeds_text = "one seed" if seeds == 1 else f"{seeds} seeds"
        sentences = [
            (
                f"{self.tuning}. Best on validation: {best}, mean RSUM "
                f"{self.validation(self.best):.1f} over {seeds_text}."
            )
        ]
        if self.is_at_chance:
            limit = self.results.conditions.highest_chance_rsum
            sentences = [
                (
                    f"At chance: no setting has a mean test RSUM above {limit:.1f}, which a random "
                    "ranking can reach. No setting is better than another. Use more images, more "
                    "epochs or a pretrained encoder."
                ),
                f"{self.tuning}.",
            ]
        sentences += [
            f"{rate.setting}: the selected learning rate {rate.learning_rate:.3g} is the "
            f"{rate.edge} tried. A better one may be beyond it."
            for rate in self.rates
            if rate.edge
        ]
        sentences += [
            test.describe("test RSUM")
            for test in self.differences_from_best.values()
            if test.b not in self._unlikely
        ]
        for nearest in [*self.differences_from_best][:1]:
            estimate = self.image_bootstrap.difference(best, nearest)
            sentences.append(f"{best} minus {nearest}. {estimate.describe('test RSUM')}")
            if self.feedback is not None:
                test = self.feedback_differences_from_best(FEEDBACK_METRIC)[nearest]
                estimate = self.query_bootstrap.difference(best, nearest, FEEDBACK_METRIC)
                sentences += [
                    test.describe(FEEDBACK_LABEL),
                    f"{best} minus {nearest}. {estimate.describe(FEEDBACK_LABEL)}",
                ]
        return (
            sentences[:1]
            + self.choice_findings
            + sentences[1:]
            + [f"{run.setting}, seed {run.seed} failed: {run.failure}" for run in self.failures]
        )

    def tables(self) -> list[Table]:
        """Return the results and the findings."""
        results = self.results
        report = f"Report: {self.folder / 'report.html'}"
        return [
            results.table(row_notes=results.spread_kinds),
            *([self.frontier] if self.frontier is not None else []),
            Table(notes=(*self.findings, report)),
        ]

    def markdown(self) -> str:
        """Format the table of the test split and the findings."""
        table = format_markdown(self.results.table("setting"))
        return table + "".join(f"\n- {sentence}" for sentence in self.findings) + "\n"

    def csv(self) -> str:
        """Format a line for each choice and metric, compared with the best choice."""
        results = self.results
        tests = {
            metric: differences_from(self.pairwise_tests(metric), self.best.name)
            for metric in results.metrics
        }
        bootstraps = [self.image_bootstrap, *([self.query_bootstrap] if self.feedback else [])]
        return format_csv(results.statistics_table(tests, bootstraps))

    def latex(self) -> str:
        """Format the table, with a dagger for choices that are not distinguishable from the best of
        a column.
        """
        results = self.results
        similar = {
            metric: indistinguishable_rows(
                differences_from(self.pairwise_tests(metric), results.best(metric).name)
            )
            for metric in results.metrics
        }
        return format_latex(results.table(similar=similar), "comparison")

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each choice: means over seeds, and their standard deviations."""
        results = self.results
        validation = {
            setting.name: self.comparable_validation(setting) for setting in self.selected
        }
        return [
            {
                "setting": row.name,
                "seeds": len(row.metrics),
                "validation_rsum": validation[row.name],
            }
            | {metric: row.mean(metric) for metric in results.metrics}
            | {f"{metric}_std": row.std(metric) for metric in results.metrics}
            for row in results.rows
        ]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "comparison": str(self.folder),
            "recipe": self.name,
            "best": self.best.name,
            "choice": self.choice
            and {
                "minutes": self.choice.minutes,
                "state": asdict(self.choice.state),
                "costs": {name: asdict(cost) for name, cost in self.choice.costs.items()},
                "regret": self.regret and asdict(self.regret),
            },
            "tuning": [asdict(rate) | {"edge": rate.edge} for rate in self.rates] or None,
            "table": self.results.to_json(),
            "differences_from_best": [
                test.to_json()
                | {"image_bootstrap": asdict(self.image_bootstrap.difference(test.a, test.b))}
                for test in self.differences_from_best.values()
            ],
            "rsum_tests": [test.to_json() for test in self.rsum_tests],
            "feedback": self.feedback
            and {
                "queries": len(self.feedback.labeled_queries),
                "images": len(self.feedback.images),
                "skipped": dict(self.feedback.pairs.skipped),
                "differences_from_best": {
                    metric: [
                        test.to_json()
                        | {
                            "query_bootstrap": asdict(
                                self.query_bootstrap.difference(test.a, test.b, metric)
                            )
                        }
                        for test in self.feedback_differences_from_best(metric).values()
                    ]
                    for metric in self.feedback.labels
                },
            },
            "sweeps": [sweep.to_json() for sweep in self.sweeps],
            "settings": [
                {
                    "name": setting.name,
                    "choice": setting.choice,
                    "grid_point": setting.grid_point,
                    "chosen": setting in self.selected,
                    "validation_rsum": self.comparable_validation(setting),
                    "seeds": [run.seed for run in self.runs(setting)],
                    "seconds": statistics.fmean(run.seconds for run in self.runs(setting)),
                }
                for setting in self.settings
            ],
            "runs": [run.to_json() for run in self.outcomes],
        }

    def _selection_key(self, setting: Setting) -> tuple[int, float]:
        # Settings with failed runs come after all others.
        return len(self.runs(setting)), self.validation(setting)


def find_sweeps(runs: Sequence[tuple[Setting, Sequence[RunOutcome]]]) -> tuple[Sweep, ...]:
    """Find the numbers that vary while everything else is equal, with at least `MIN_VALUES` values."""
    # Objectives are parsed, so that their parameters are keys of their own.
    values = [_flatten(setting.recipe_values) for setting, _ in runs]
    columns = {
        key: tuple(row.get(key) for row in values)
        for key in sorted({key for row in values for key in row})
    }
    # Keys that always vary together have equal columns and count as one.
    varying = {column: key for key, column in reversed(columns.items()) if len(set(column)) > 1}
    # Values in ascending order with the indices of their settings, by key and by what else differs.
    indices_by_key: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for column, key in sorted(varying.items(), key=lambda item: item[1]):
        # A number can be absent from some settings, such as the margin from an objective without
        # one.
        if not all(value is None or is_number(value) for value in column):
            continue
        others = [
            (other_key.rpartition(".")[2], other)
            for other, other_key in reversed(list(varying.items()))
            if other != column
        ]
        groups = defaultdict[str, list[tuple[float, int]]](list)
        for index, value in enumerate(column):
            if value is not None:
                label = ", ".join(
                    f"{name}={other[index]}" for name, other in others if other[index] is not None
                )
                groups[label].append((value, index))
        curves = {label: sorted(at) for label, at in groups.items() if len(at) >= MIN_VALUES}
        if curves:
            indices_by_key[key] = curves
    on_curve = {
        index for curves in indices_by_key.values() for at in curves.values() for _, index in at
    }
    # RSUM of each setting on validation and on test.
    rsums = [
        (
            MeanRsum.of([run.validation_rsum for run in outcomes]),
            MeanRsum.of([run.measured_metrics[RSUM.name] for run in outcomes]),
        )
        for _, outcomes in runs
    ]
    # Settings on no curve are references of every sweep.
    references = {
        setting.name: rsums[index]
        for index, (setting, _) in enumerate(runs)
        if index not in on_curve
    }
    return tuple(
        Sweep(
            key.partition(".objective.")[2] or key,
            {
                label: (
                    tuple(SweepPoint(value, rsums[index][0]) for value, index in at),
                    tuple(SweepPoint(value, rsums[index][1]) for value, index in at),
                )
                for label, at in curves.items()
            },
            references,
        )
        for key, curves in indices_by_key.items()
    )


def _flatten(content: Any, name: str = "") -> dict[str, Any]:
    """Values of a recipe by dotted key, with the parameters of objectives."""
    if isinstance(content, Mapping):
        entries: Iterable[tuple[Any, Any]] = content.items()
    elif isinstance(content, list | tuple):
        entries = enumerate(content)
    elif name.endswith(".objective"):
        try:
            objective = parse(content, CATALOG, Objective, "objectives")
        except CodeNotNamed:
            return {name: content}
        parameters = {
            # A measured number is on no curve.
            f"{name}.{key}": value
            if is_number(value)
            else None
            if is_auto(key, value)
            else repr(value)
            for key, value in vars(objective).items()
        }
        return {name: type(objective).__name__} | parameters
    else:
        return {name: content}
    flat: dict[str, Any] = {}
    for key, value in entries:
        flat |= _flatten(value, f"{name}.{key}".lstrip("."))
    return flat
