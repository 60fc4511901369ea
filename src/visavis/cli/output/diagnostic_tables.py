"""Tables of diagnostics: contributing samples, capability tests, objective profiles and attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.types import DIRECTIONS

if TYPE_CHECKING:
    from visavis.diagnostics.attention_maps import AttentionMap
    from visavis.diagnostics.contribution_analysis import ContributionAnalysis
    from visavis.diagnostics.objective_profile import ObjectiveProfiles
    from visavis.robustness import ProbeReport


def print_diagnosis(result: ContributionAnalysis) -> None:
    """Print counts and weights of contributing samples for each objective and direction.

    Args:
        result: Analysis of a run.
    """
    from visavis.diagnostics.contribution_analysis import MEASURES

    table = Table(box=None, pad_edge=False)
    for column in ("", *MEASURES.values()):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for count in result.counts:
        released = "" if count.semantics == "paper" else ", as in the released code"
        epsilon = f", epsilon {count.epsilon:g}" if len(result.epsilons) > 1 else ""
        table.add_row(f"[bold]{escape(count.objective.partition('(')[0])}[/bold]{epsilon}{released}")
        for direction, title in DIRECTIONS.items():
            cells = (_mean_and_std(count.mean[f"{direction}_{name}"], count.std[f"{direction}_{name}"]) for name in MEASURES)
            table.add_row(f"  {title}", *cells)
    console = standard_output()
    console.width = max(console.width, 120)  # a line that is too wide is better than a truncated one
    console.print(table)
    epsilons = ", ".join(f"{epsilon:g}" for epsilon in result.epsilons)
    console.print(
        f"C^q: negatives with weight above {epsilons}, mean over queries that have one, then over all. C^B: those of all queries of a batch. "
        "C^0: queries without any. W-, W+: summed weights of these negatives and of positives. effective: effective number of negatives, for any epsilon.",
        soft_wrap=True,
    )
    objectives = ", ".join(dict.fromkeys(count.objective for count in result.counts))
    console.print(
        f"{_checkpoint_title(result)}, frozen. Mean ± standard deviation over {result.batches:,} training batches of {result.images:,} images "
        f"and {result.texts:,} texts. {escape(objectives)}.",
        soft_wrap=True,
    )
    if result.published:
        _print_published_counts(console, result)


def _checkpoint_title(result: ContributionAnalysis) -> str:
    title = {"best": "Best model", "last": "Last model", "start": "Untrained model"}.get(result.checkpoint, "Checkpoint")
    return f"{title}, step {result.step:,}"


def _print_published_counts(console: Console, result: ContributionAnalysis) -> None:
    """Published and measured counts, by the definition of the paper and by that of its released code."""
    from visavis.diagnostics.contribution_analysis import DEFAULT_EPSILON, MEASURES

    count, published = result.counts[0], result.published_counts
    if published is None:
        console.print(escape(f"{result.published} has no counts for {count.objective}."), soft_wrap=True)
        return
    released = next((other for other in result.counts if (other.objective, other.semantics) == (count.objective, "reference")), None)
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "published", "reached", "reached, as in the released code"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for key, (mean, std) in published.values.items():
        direction, _, measure = key.partition("_")
        by_code = _mean_and_std(released.mean[key], released.std[key]) if released else "-" if published.code_difference else "the same"
        cells = _mean_and_std(mean, std or 0.0), _mean_and_std(count.mean[key], count.std[key]), by_code
        table.add_row(DIRECTIONS[direction], MEASURES[measure], *cells)
    console.print()
    console.print(table)
    console.print(
        f"Published: {escape(published.id)}, number {published.experiment_id}: {escape(published.source)}. "
        f"Reached: {escape(result.model)}, {escape(result.data)}.",
        soft_wrap=True,
    )
    if result.epsilon != DEFAULT_EPSILON:
        console.print(f"Published with epsilon {DEFAULT_EPSILON}, reached with epsilon {result.epsilon:g}.", soft_wrap=True)
    if published.code_difference:
        console.print(f"Published as counted by the released code: {published.code_difference}.", soft_wrap=True)


def _mean_and_std(mean: float, std: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.2f}±{std:.2f}"


def print_explanation(explanation: AttentionMap) -> None:
    """Print the score and the best region of each word.

    Args:
        explanation: Attention of a text to an image.
    """
    table = Table(box=None, pad_edge=False)
    for column in ("word", "score", "best region", "attention"):
        table.add_column(column, justify="left" if column == "word" else "right", overflow="fold")
    for word, score, best, weights in zip(
        explanation.words, explanation.scores, explanation.best_regions, explanation.weights, strict=True
    ):
        region = str(best + 1)
        if explanation.grid is not None:
            row, column_index = divmod(best, explanation.grid[1])
            region = f"row {row + 1}, column {column_index + 1}"
        table.add_row(escape(word), f"{score:.3f}", region, f"{100 * weights[best]:.0f} %")
    standard_output().print(table)
    standard_output().print(f"{explanation.model}, score {explanation.score:.4f}. Image: {escape(str(explanation.file))}", soft_wrap=True)


def print_probes(result: ProbeReport) -> None:
    """Print the accuracy for each kind of edit, and the changes of recall.

    Args:
        result: Result of the capability tests.
    """
    console = standard_output()
    console.width = max(console.width, 100)  # a line that is too wide is better than a truncated one
    table = Table(box=None, pad_edge=False)
    for column in ("edit", "cases", "correct", "95 %", "ties"):
        table.add_column(column, justify="left" if column == "edit" else "right", no_wrap=True)
    for accuracy in result.results:
        interval = f"{accuracy.low:.1f} to {accuracy.high:.1f}"
        table.add_row(accuracy.title, str(accuracy.num_pairs), f"{accuracy.percent:.1f} %", interval, str(accuracy.num_ties))
    console.print(table)
    console.print(
        "correct: the true caption scores above the edited one. A tie is not correct. Chance is 50 %. * the same words in another order, "
        f"which a bag of words cannot distinguish. Edited captions are false by {escape(result.source)}.",
        soft_wrap=True,
    )
    if result.recall_changes:
        console.print(_recall_changes(result))
        console.print(
            "Recall in percent before and after the edit, and the 95 % interval of the difference, paired over images.", soft_wrap=True
        )
    for text in result.skipped:
        console.print(escape(text), soft_wrap=True)
    console.print(f"{escape(result.model)}, {result.images:,} images of {escape(result.data)}.", soft_wrap=True)


def _recall_changes(result: ProbeReport) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("edit", "", "R@K", "before", "after", "difference, 95 %"):
        table.add_column(column, justify="left" if column in ("edit", "", "R@K") else "right", no_wrap=True)
    for change in result.recall_changes:
        difference = f"{change.difference:+.1f} ({change.low:+.1f} to {change.high:+.1f})"
        table.add_row(change.edit, DIRECTIONS[change.direction], f"R@{change.k}", f"{change.before:.1f}", f"{change.after:.1f}", difference)
    return table


def print_objective_profiles(result: ObjectiveProfiles) -> None:
    """Print the tangent norms of a query, its positive and four negatives for each objective.

    Args:
        result: Profiles of the objectives.
    """
    from visavis.diagnostics.objective_profile import INITIAL_ANGLES, VECTOR_NAMES

    table = Table(box=None, pad_edge=False)
    table.add_column("tangent norm on", overflow="fold")
    for name, angle in zip(VECTOR_NAMES, INITIAL_ANGLES, strict=True):
        table.add_column(f"{name.removeprefix('negative ')} {angle:g}°", justify="right")
    for profile in result.profiles:
        table.add_row(escape(profile.name), *(f"{norm:.3f}" for norm in profile.rotation.norm.tolist()))
    standard_output().print(table)
    report = escape(str(result.folder / "report.html"))
    standard_output().print(
        f"A query, its positive and four negatives on a circle. Triplets and weights of pairs: {report}",
        soft_wrap=True,
    )
