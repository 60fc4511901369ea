"""Tables about comparisons, reproductions and graded relevance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.cli.terminal import print_line

if TYPE_CHECKING:
    from visavis.experiments.comparison_result import Comparison
    from visavis.experiments.reproduction import Reproduction
    from visavis.graded.estimator_quality import EstimatorQuality, RelevanceDistribution
    from visavis.graded.fine_tuning import FineTunedModel
    from visavis.graded.human_agreement import HumanAgreement, RankCorrelation
    from visavis.graded.ranked_lists import RankedListComparison


def print_comparison(comparison: Comparison) -> None:
    """Print the table and the findings of a comparison.

    Args:
        comparison: Finished comparison.
    """
    table = comparison.table
    print_line(table.text())
    _print_lines([table.caption(), "", *comparison.findings, f"Report: {comparison.folder / 'report.html'}"])


def print_reproduction(reproduction: Reproduction) -> None:
    """Print published and reached results for each row of a table.

    Args:
        reproduction: Finished reproduction.
    """
    from visavis.experiments.reproduction import table_cells

    if reproduction.base:
        _print_lines([reproduction.substitution, ""])
    table = Table(box=None, pad_edge=False)
    for column in ("", "metric", "published", "reached", "difference"):
        table.add_column(column, justify="left" if column in ("", "metric") else "right", no_wrap=True)
    for value in reproduction.values:
        table.add_row(*map(escape, table_cells(value)))
    console = standard_output()
    console.width = max(console.width, 120)  # a line that is too wide is better than a truncated one
    console.print(table)
    _print_lines([*reproduction.remarks, f"Table: {reproduction.folder}"])


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        standard_output().print(escape(line), soft_wrap=True)


RATING_NAMES = {"expert": "expert judgments", "crowd": "crowd judgments", "cxc": "ratings of Crisscrossed Captions"}
"""Titles of the kinds of human judgments."""
RATER_DESCRIPTIONS = {"expert": "each expert with the mean of the other two", "crowd": "one answer with the others"}
"""How the agreement between people is measured."""


def print_agreement(agreements: Iterable[HumanAgreement]) -> None:
    """Print the correlations of runs with human judgments.

    Args:
        agreements: Correlations for each kind of judgment.
    """
    console = standard_output()
    console.width = max(console.width, 120)
    for result in agreements:
        measures = {"sampled_spearman": "Spearman, sampled"} if result.judgments == "cxc" else {}
        measures |= {"kendall": "Kendall tau-b", "spearman": "Spearman"}
        table = Table(box=None, pad_edge=False)
        for column in ("", *measures.values()):
            table.add_column(column, no_wrap=bool(column), overflow="fold")
        rows = [(f"people ({RATER_DESCRIPTIONS[result.judgments]})", result.annotators)] if result.annotators else []
        rows += [*result.runs.items(), *((f"{run} minus the first", values) for run, values in result.differences.items())]
        for name, values in rows:
            table.add_row(escape(name), *(_format_correlation(measure, values[measure]) for measure in measures))
        including = "with" if result.includes_own_captions else "without"
        console.print(
            f"[bold]{RATING_NAMES[result.judgments]}[/bold], {including} own captions: {result.pairs:,} pairs, {result.images:,} images",
            soft_wrap=True,
        )
        console.print(table)
    console.print("Intervals: 95 % of 1,000 bootstrap samples of the images, the same for all.", soft_wrap=True)
    if result.judgments == "cxc":
        console.print(
            "Sampled: mean ± standard deviation over 1,000 samples of half of the captions, each with one of its images.", soft_wrap=True
        )


def _format_correlation(measure: str, correlation: RankCorrelation) -> str:
    if measure == "sampled_spearman":
        return f"{correlation.value:.3f} ± {correlation.std:.3f}"
    low, high = correlation.interval
    return f"{correlation.value:.3f} [{low:.3f}, {high:.3f}]"


def print_coherence(result: RankedListComparison) -> None:
    """Print the number of totally irrelevant items and the coherence score of each run.

    Args:
        result: Statistics of the ranked lists.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("totally irrelevant")
    for title in ("text to image", "CS", "image to text", "CS"):
        table.add_column(title, justify="right", no_wrap=True)
    for index, ranker in enumerate(result.rankers):
        cells = []
        for statistics in (result.statistics["t2i"][index], result.statistics["i2t"][index]):
            for mean, digits in ((statistics.irrelevant, 2), (statistics.full_list_coherence, 3)):
                cells.append(f"{mean.mean:.{digits}f}±{mean.half_width:.{digits}f}")
        table.add_row(escape(ranker.name), *cells)
    console = standard_output()
    console.print(table)
    console.print(
        f"Totally irrelevant items in the top {result.top}, mean over all queries of split {result.split} with 95 % intervals: items no more "
        f"relevant than {100 * result.bands.irrelevant_share:.4g} % of all candidates, by {escape(repr(result.estimator))}. "
        "CS: coherence score of the whole list.",
        soft_wrap=True,
    )
    console.print(f"Report: {escape(str(result.folder / 'report.html'))}", soft_wrap=True)


def print_estimator_evaluation(rows: Sequence[EstimatorQuality]) -> None:
    """Print the correlation of relevance estimators with human ratings, and their speed.

    Args:
        rows: One entry per estimator.
    """
    from visavis.graded.estimator_quality import PUBLISHED_CORRELATIONS

    table = Table(box=None, pad_edge=False)
    for column in ("", *rows[0].pearson, "mean", "> 0.63", "captions/s", "s/million pairs"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        correlations = ["-" if r is None else f"{r:.3f} / {row.spearman[name]:.3f}" for name, r in row.pearson.items()]
        table.add_row(
            escape(row.estimator),
            *correlations,
            f"{row.mean:.2f}",
            f"{row.share_above_threshold:.1%}",
            f"{row.captions_per_s:,.0f}",
            f"{row.million_pairs_s:.3g}",
        )
    console = standard_output()
    console.width = max(console.width, 150)  # a line that is too wide is better than a truncated one
    console.print(table)
    published = "; ".join(f"{name} {value}" for name, value in PUBLISHED_CORRELATIONS.items())
    console.print("Pearson / Spearman with human ratings. Mean and share above 0.63 of random pairs of COCO captions.", soft_wrap=True)
    console.print(f"Pearson in the paper: {published}.", soft_wrap=True)
    for note in dict.fromkeys(f"{row.estimator}: {note}" for row in rows for note in row.notes):
        console.print(escape(note), soft_wrap=True)


def print_distributions(rows: Sequence[RelevanceDistribution]) -> None:
    """Print the distribution of relevance over random pairs and the suggested thresholds.

    Args:
        rows: One entry per estimator.
    """
    from visavis.graded.estimator_quality import TAIL_SHARES

    for row in rows:
        shares = ", ".join(f"{share:.0%} above {value:.3f}" for share, value in zip(TAIL_SHARES, row.quantiles, strict=True))
        lines = [
            f"[bold]{escape(row.estimator)}[/bold]: {row.pairs:,} random training pairs of {escape(row.data)}",
            f"  mean {row.mean:.3f}; {row.share_above_threshold:.1%} above the paper's 0.63; {shares}",
            *(f"  L = {level}: {escape(ladder)}" for level, ladder in enumerate(row.ladder_specs, start=2)),
            *(f"  {escape(note)}" for note in row.notes),
        ]
        if len(row.ladder_specs) < len(TAIL_SHARES):
            lines.append(f"  no thresholds for L >= {len(row.ladder_specs) + 2}: too many pairs have the same relevance.")
        for line in lines:
            standard_output().print(line, soft_wrap=True)


def print_fitted(fitted: FineTunedModel) -> None:
    """Print the correlation of a fine-tuned sentence model with human ratings.

    Args:
        fitted: Fine-tuned model.
    """
    console = standard_output()
    curve = ", ".join(f"{value:.3f}" for value in fitted.dev)
    console.print(f"Pearson on STS-B dev: {curve} (the first before training). Best epoch on test: {fitted.test:.3f}.", soft_wrap=True)
    console.print(escape(fitted.estimator), soft_wrap=True)
