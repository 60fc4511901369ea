"""Result of a comparison: the setting that validation selects, its test results, and their certainty."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from visavis.errors import RunError
from visavis.evaluation.results import read_query_ranks
from visavis.experiments.bootstrap import BootstrapSamples, bootstrap_images, bootstrap_queries
from visavis.experiments.grid import Setting
from visavis.experiments.jobs import RunOutcome
from visavis.experiments.results_table import (
    ResultRow,
    ResultTable,
    csv_table,
    indistinguishable_rows,
    latex_table,
)
from visavis.experiments.statistics import PairedTest, differences_from, paired_tests
from visavis.experiments.sweep import Sweep, find_sweep
from visavis.feedback.evaluate_feedback import FeedbackTest
from visavis.metrics.recall import RSUM
from visavis.runs.run_folder import RunFolder

# The feedback metric that is described in words.
FEEDBACK_METRIC, FEEDBACK_LABEL = "judged_r10", "feedback R@10"


@dataclass(frozen=True)
class Comparison:
    """Runs of a comparison and what follows from them.

    Attributes:
        folder: Folder of the comparison.
        name: Name of the recipe.
        settings: Settings with at least one successful run, in the given order.
        outcomes: Outcomes of all runs, sorted by setting and seed.
        feedback: Judged text queries that every successful run was evaluated on.
    """

    folder: Path
    name: str
    settings: tuple[Setting, ...]
    outcomes: tuple[RunOutcome, ...]
    feedback: FeedbackTest | None = None

    def runs(self, setting: Setting) -> list[RunOutcome]:
        """Return the successful runs of a setting.

        Args:
            setting: Setting.

        Returns:
            The outcomes, by seed.
        """
        return [one for one in self.outcomes if one.setting == setting.name and not one.failure]

    @property
    def failures(self) -> list[RunOutcome]:
        """Failed runs."""
        return [one for one in self.outcomes if one.failure]

    def validation(self, setting: Setting) -> float:
        """Return the mean validation RSUM of a setting.

        Args:
            setting: Setting.

        Returns:
            The mean over seeds, in percent.
        """
        return statistics.fmean(one.validation_rsum for one in self.runs(setting))

    @cached_property
    def selected(self) -> tuple[Setting, ...]:
        """Best grid point of each choice by mean validation RSUM, among those with the most seeds."""
        choices: dict[str, list[Setting]] = {}
        for setting in self.settings:
            choices.setdefault(setting.choice, []).append(setting)
        return tuple(max(points, key=self._selection_key) for points in choices.values())

    @property
    def best(self) -> Setting:
        """Best choice by validation."""
        return max(self.selected, key=self._selection_key)

    @property
    def table(self) -> ResultTable:
        """Test results of every choice. Raises RunError if the runs were measured under different conditions."""
        tested = {setting.name: self.runs(setting) for setting in self.selected}
        conditions = {one.conditions for runs in tested.values() for one in runs if one.conditions is not None}
        if len(conditions) != 1:
            raise RunError(
                f"{self.folder}: expected runs with one protocol and data set, got {' / '.join(map(str, conditions))}. Compare on one of them."
            )
        rows = tuple(ResultRow(name, tuple(one.measured_metrics for one in runs)) for name, runs in tested.items())
        return ResultTable(rows, conditions.pop(), "Selected on validation, measured on test", self.feedback)

    def pairwise_tests(self, metric: str) -> list[PairedTest]:
        """Test all pairs of choices by seed, corrected for all of them, so that you may pick any choice afterwards.

        Args:
            metric: Key of a test metric.

        Returns:
            The paired tests.
        """
        return paired_tests({s.name: {one.seed: one.measured_metrics[metric] for one in self.runs(s)} for s in self.selected})

    @cached_property
    def rsum_tests(self) -> list[PairedTest]:
        """``pairwise_tests`` of RSUM."""
        return self.pairwise_tests(RSUM.name)

    @property
    def differences_from_best(self) -> dict[str, PairedTest]:
        """The best minus every other choice, by name, smallest difference first."""
        tests = [test.swapped() for test in differences_from(self.rsum_tests, self.best.name).values()]
        return {test.b: test for test in sorted(tests, key=lambda test: test.difference)}

    @cached_property
    def image_bootstrap(self) -> BootstrapSamples:
        """Bootstrap over test images of the runs of all choices."""
        protocol = self.table.conditions.protocol
        return bootstrap_images(
            {s.name: {one.seed: read_query_ranks(RunFolder(one.folder).ranks)[protocol] for one in self.runs(s)} for s in self.selected}
        )

    @cached_property
    def query_bootstrap(self) -> BootstrapSamples:
        """Bootstrap over judged text queries of the runs of all choices. Only with feedback."""
        return bootstrap_queries({s.name: {one.seed: one.feedback.answers for one in self.runs(s) if one.feedback} for s in self.selected})

    def feedback_differences_from_best(self, metric: str) -> dict[str, PairedTest]:
        """Return the best minus every other choice in a feedback metric.

        Args:
            metric: Key of a feedback metric.

        Returns:
            The paired tests, in the order of ``differences_from_best``.
        """
        tests = differences_from(self.pairwise_tests(metric), self.best.name)
        return {name: tests[name].swapped() for name in self.differences_from_best}

    @cached_property
    def sweep(self) -> Sweep | None:
        """Curve over one number, if the settings differ in nothing else."""
        return find_sweep([(setting, self.runs(setting)) for setting in self.settings])

    @property
    def findings(self) -> list[str]:
        """Findings in sentences."""
        best, seeds = self.best.name, len(self.runs(self.best))
        seeds_text = "one seed" if seeds == 1 else f"{seeds} seeds"
        sentences = [f"Best on validation: {best}, mean RSUM {self.validation(self.best):.1f} over {seeds_text}."]
        sentences += [test.describe("test RSUM") for test in self.differences_from_best.values()]
        if self.differences_from_best:
            nearest = next(iter(self.differences_from_best))
            pair = f"{best} minus {nearest}."
            sentences.append(f"{pair} {self.image_bootstrap.difference(best, nearest).describe('test RSUM')}")
            if self.feedback is not None:
                sentences.append(self.feedback_differences_from_best(FEEDBACK_METRIC)[nearest].describe(FEEDBACK_LABEL))
                sentences.append(f"{pair} {self.query_bootstrap.difference(best, nearest, FEEDBACK_METRIC).describe(FEEDBACK_LABEL)}")
        return sentences + [f"{one.setting}, seed {one.seed} failed: {one.failure}" for one in self.failures]

    def markdown(self) -> str:
        """Format the table of the test split and the findings.

        Returns:
            Markdown.
        """
        return self.table.markdown() + "".join(f"\n- {sentence}" for sentence in self.findings) + "\n"

    def csv(self) -> str:
        """Format a line for each choice and metric, compared with the best choice.

        Returns:
            CSV.
        """
        table = self.table
        tests = {metric: differences_from(self.pairwise_tests(metric), self.best.name) for metric in table.metrics}
        return csv_table(table, tests, [self.image_bootstrap, *([self.query_bootstrap] if self.feedback else [])])

    def latex(self) -> str:
        """Format the table, with a dagger for choices that are not distinguishable from the best of a column.

        Returns:
            LaTeX.
        """
        table = self.table
        daggers = {
            metric: indistinguishable_rows(differences_from(self.pairwise_tests(metric), table.best(metric).name))
            for metric in table.metrics
        }
        return latex_table(table, daggers)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            The table of the test split, the differences, the settings and every run.
        """
        return {
            "comparison": str(self.folder),
            "recipe": self.name,
            "best": self.best.name,
            "table": self.table.to_json(),
            "differences_from_best": [
                test.to_json() | {"image_bootstrap": asdict(self.image_bootstrap.difference(test.a, test.b))}
                for test in self.differences_from_best.values()
            ],
            "rsum_tests": [test.to_json() for test in self.rsum_tests],
            "feedback": self._feedback_to_json(),
            "sweep": self.sweep and self.sweep.to_json(),
            "settings": [
                {
                    "name": setting.name,
                    "choice": setting.choice,
                    "grid_point": setting.grid_point,
                    "chosen": setting in self.selected,
                    "validation_rsum": self.validation(setting),
                    "seeds": [one.seed for one in self.runs(setting)],
                    "seconds": statistics.fmean(one.seconds for one in self.runs(setting)),
                }
                for setting in self.settings
            ],
            "runs": [one.to_json() for one in self.outcomes],
        }

    def _feedback_to_json(self) -> dict[str, Any] | None:
        if self.feedback is None:
            return None
        return {
            "queries": len(self.feedback.labeled_queries),
            "images": len(self.feedback.images),
            "skipped": dict(self.feedback.pairs.skipped),
            "differences_from_best": {
                metric: [
                    test.to_json() | {"query_bootstrap": asdict(self.query_bootstrap.difference(test.a, test.b, metric))}
                    for test in self.feedback_differences_from_best(metric).values()
                ]
                for metric in self.feedback.labels
            },
        }

    def _selection_key(self, setting: Setting) -> tuple[int, float]:
        # Successive halving drops settings: those with fewer seeds come after all others.
        return len(self.runs(setting)), self.validation(setting)
