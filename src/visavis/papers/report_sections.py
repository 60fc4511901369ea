"""Sections that the papers add to the report of a comparison. Entry points of the group
``visavis.report_sections`` name the classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from visavis.core.progress import NoProgress
from visavis.core.table import Cell, Column, Row, Table
from visavis.papers.diagnostics.contribution_analysis import ContributionAnalysis, diagnose_run
from visavis.papers.probes import ProbeReport, probe_run
from visavis.research.reports.comparison_sections import ReportSection

DIAGNOSED_BATCHES = 8
"""Training batches over which contributing samples are counted."""
PROBED_IMAGES = 100
"""Test images for the capability tests."""
REPORTED_MEASURES = {
    "in_batch": "pushing negatives of all queries in a batch of 128",
    "idle": "queries without a pushing negative, of 128",
    "push": "summed weight of a query's negatives",
    "pull": "summed weight of a query's positives",
}
"""Measures of contributing samples in the report, as means of both directions."""


class ContributionSection(ReportSection):
    """Contributing samples of the objective of each setting."""

    TITLE: ClassVar[str] = "Contributing samples"

    def measure(self, run: Path) -> ContributionAnalysis:
        """Count over some training batches. See `ReportSection.measure`."""
        return diagnose_run(run, [], DIAGNOSED_BATCHES, NoProgress())

    def table(self, results: Mapping[str, ContributionAnalysis]) -> Table:
        """Return a row for each setting. See `ReportSection.table`."""
        # The first count is of the run's own objective.
        rows: list[Row] = [
            (
                name,
                *(diagnosis.counts[0].mean_of_directions(measure) for measure in REPORTED_MEASURES),
            )
            for name, diagnosis in results.items()
        ]
        batches = next(iter(results.values())).batches
        note = (
            f"First seed of each setting, best weights, frozen, over {batches} training batches. "
            "With few pushing negatives a loss has little left to learn. With many it may also "
            "train on pairs that are already correct. Details: visavis papers diagnose RUN."
        )
        measures = (Column(title, ".2f") for title in REPORTED_MEASURES.values())
        return Table((Column("objective", is_text=True), *measures), tuple(rows), (note,))


class ProbeSection(ReportSection):
    """Capability tests of the model of each setting."""

    TITLE: ClassVar[str] = "Capability tests"

    def measure(self, run: Path) -> ProbeReport:
        """Test some images. See `ReportSection.measure`."""
        return probe_run(
            run, images=PROBED_IMAGES, progress=NoProgress(), with_edits=False, shared_inputs={}
        )

    def table(self, results: Mapping[str, ProbeReport]) -> Table:
        """Return a row for each kind of edit, with the accuracy of each setting. See
        `ReportSection.table`.
        """
        # Cells by kind of edit and setting. The model of a setting may lack a kind.
        accuracies = defaultdict[str, dict[str, Cell]](dict)
        for name, report in results.items():
            for result in report.results:
                cell = Cell(result.percent, (result.low, result.high))
                accuracies[f"{result.title}, {result.num_pairs} cases"][name] = cell
        first = next(iter(results.values()))
        note = (
            "Each case compares a true caption with the same caption after one edit that makes it "
            "false. The table gives the share of cases in which the first seed scores the true "
            "caption higher, with 95 % interval. Chance is 50 %, and a tie is not correct. * marks "
            f"edits that only change the order of words. {first.images:,} test images. Edited "
            f"captions are false according to {first.source}. Details: visavis papers probe RUN."
        )
        rows = [
            (kind, *(cells.get(name) for name in results)) for kind, cells in accuracies.items()
        ]
        columns = (
            Column(name, ".0f", unit=" %", missing="-", spread=" ({} to {})") for name in results
        )
        return Table((Column("edit", is_text=True), *columns), tuple(rows), (note,))
