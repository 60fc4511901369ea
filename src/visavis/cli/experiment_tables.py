"""Tables about comparisons, reproductions and graded relevance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from visavis.cli.console import print_markup, print_table
from visavis.cli.terminal import print_line
from visavis.core.encoded import DIRECTIONS

if TYPE_CHECKING:
    from visavis.papers.relevance.estimator_quality import EstimatorQuality, RelevanceDistribution
    from visavis.papers.relevance.fine_tuning import FineTunedModel
    from visavis.papers.relevance.human_agreement import HumanAgreement, RankCorrelation
    from visavis.papers.relevance.ranked_lists import RankedListComparison


RATING_NAMES = {
    "expert": "expert judgments",
    "crowd": "crowd judgments",
    "cxc": "ratings of Crisscrossed Captions",
}
"""Titles of the kinds of human judgments."""
RATER_DESCRIPTIONS = {
    "expert": "each expert with the mean of the other two",
    "crowd": "one answer with the others",
}
"""How the agreement between people is measured."""


def print_agreement(agreements: Iterable[HumanAgreement]) -> None:
    """Print the correlations of runs with human judgments.

    Args:
        agreements: Correlations for each kind of judgment.
    """
    for result in agreements:
        measures = {"sampled_spearman": "Spearman, sampled"} if result.judgments == "cxc" else {}
        measures |= {"kendall": "Kendall tau-b", "spearman": "Spearman"}
        rows = (
            [(f"people ({RATER_DESCRIPTIONS[result.judgments]})", result.annotators)]
            if result.annotators
            else []
        )
        rows += [
            *result.runs.items(),
            *((f"{run} minus the first", values) for run, values in result.differences.items()),
        ]
        including = "with" if result.includes_own_captions else "without"
        counts = f"{result.pairs:,} pairs, {result.images:,} images"
        print_markup(
            f"[bold]{RATING_NAMES[result.judgments]}[/bold], {including} own captions: {counts}"
        )
        cells = [
            [name, *(_format_correlation(measure, values[measure]) for measure in measures)]
            for name, values in rows
        ]
        print_table(["", *measures.values()], cells)
    print_line("Intervals: 95 % of 1,000 bootstrap samples of the images, the same for all.")
    if result.judgments == "cxc":
        print_line(
            "Sampled: mean ± standard deviation over 1,000 samples of half of the captions, each "
            "with one of its images."
        )


def _format_correlation(measure: str, correlation: RankCorrelation) -> str:
    if math.isnan(correlation.value):
        return "undefined (equal values)"
    if measure == "sampled_spearman":
        return f"{correlation.value:.3f} ± {correlation.std:.3f}"
    low, high = correlation.interval
    return f"{correlation.value:.3f} [{low:.3f}, {high:.3f}]"


def print_coherence(result: RankedListComparison) -> None:
    """Print the number of totally irrelevant items and the coherence score of each run.

    Args:
        result: Statistics of the ranked lists.
    """
    from visavis.papers.relevance.ranked_lists import DIRECTION_ORDER

    rows = []
    for index, ranker in enumerate(result.rankers):
        cells = []
        for statistics in (result.statistics[direction][index] for direction in DIRECTION_ORDER):
            for mean, digits in ((statistics.irrelevant, 2), (statistics.full_list_coherence, 3)):
                cells.append(f"{mean.mean:.{digits}f}±{mean.half_width:.{digits}f}")
        rows.append([ranker.name, *cells])
    print_table(
        (
            "totally irrelevant",
            *(title for direction in DIRECTION_ORDER for title in (DIRECTIONS[direction], "CS")),
        ),
        rows,
    )
    print_line(
        f"Totally irrelevant items in the top {result.top}, mean over all queries of split "
        f"{result.split} with 95 % intervals: items no more "
        f"relevant than {100 * result.bands.irrelevant_share:.4g} % of all candidates, by "
        f"{result.estimator!r}. "
        "CS: coherence score of the whole list."
    )
    rows = []
    for index, ranker in enumerate(result.rankers):
        cells = []
        for statistics in (result.statistics[direction][index] for direction in DIRECTION_ORDER):
            for mean in (statistics.no_match, statistics.no_match_difference):
                is_first = index == 0 and mean is statistics.no_match_difference
                cells.append("" if is_first else f"{mean.mean:.3f}±{mean.half_width:.3f}")
        rows.append([ranker.name, *cells])
    first = f"minus {result.rankers[0].name}"
    columns = [each for way in DIRECTION_ORDER for each in (DIRECTIONS[way], first)]
    print_line("")
    print_table(("without a match, nDCG@10", *columns), rows)
    print_line(
        "Order by relevance where the query's own items are not among the candidates (long-tail "
        "queries)."
    )
    print_line(f"Report: {result.folder / 'report.html'}")


def print_estimator_evaluation(rows: Sequence[EstimatorQuality]) -> None:
    """Print the correlation of relevance estimators with human ratings, and their speed.

    Args:
        rows: One entry per estimator.
    """
    from visavis.papers.relevance.estimator_quality import PUBLISHED_CORRELATIONS

    cells = []
    for row in rows:
        correlations = [
            "-" if r is None else f"{r:.3f} / {row.spearman[name]:.3f}"
            for name, r in row.pearson.items()
        ]
        speeds = f"{row.captions_per_s:,.0f}", f"{row.million_pairs_s:.3g}"
        cells.append(
            [
                row.estimator,
                *correlations,
                f"{row.mean:.2f}",
                f"{row.share_above_threshold:.1%}",
                *speeds,
            ]
        )
    print_table(("", *rows[0].pearson, "mean", "> 0.63", "captions/s", "s/million pairs"), cells)
    published = "; ".join(f"{name} {value}" for name, value in PUBLISHED_CORRELATIONS.items())
    print_line(
        "Pearson / Spearman with human ratings. Mean and share above 0.63 of random pairs of COCO "
        "captions."
    )
    print_line(f"Pearson in the paper: {published}.")
    for note in dict.fromkeys(f"{row.estimator}: {note}" for row in rows for note in row.notes):
        print_line(note)


def print_distributions(rows: Sequence[RelevanceDistribution]) -> None:
    """Print the distribution of relevance over random pairs and the suggested thresholds.

    Args:
        rows: One entry per estimator.
    """
    from visavis.papers.relevance.estimator_quality import TAIL_SHARES

    for row in rows:
        shares = ", ".join(
            f"{share:.0%} above {value:.3f}"
            for share, value in zip(TAIL_SHARES, row.quantiles, strict=True)
        )
        print_markup(
            f"[bold]{escape(row.estimator)}[/bold]: {row.pairs:,} random training pairs of "
            f"{escape(row.data)}"
        )
        print_line(
            f"  mean {row.mean:.3f}, {row.share_above_threshold:.1%} above the paper's 0.63, "
            f"{shares}"
        )
        for level, ladder in enumerate(row.ladder_specs, start=2):
            print_line(f"  L = {level}: {ladder}")
        for note in row.notes:
            print_line(f"  {note}")
        if len(row.ladder_specs) < len(TAIL_SHARES):
            print_line(
                f"  no thresholds for L >= {len(row.ladder_specs) + 2}: too many pairs have the "
                "same relevance."
            )


def print_fitted(fitted: FineTunedModel) -> None:
    """Print the correlation of a fine-tuned sentence model with human ratings.

    Args:
        fitted: Fine-tuned model.
    """
    curve = ", ".join(f"{value:.3f}" for value in fitted.dev)
    print_line(
        f"Pearson on STS-B dev: {curve} (the first before training). Best epoch on test: "
        f"{fitted.test:.3f}."
    )
    print_line(fitted.estimator)
