"""Tables of diagnostics: contributing samples, capability tests, objective profiles and attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.text import Text

from visavis.cli.console import print_table
from visavis.cli.terminal import print_line
from visavis.core.encoded import DIRECTIONS

if TYPE_CHECKING:
    from visavis.papers.diagnostics.contribution_analysis import ContributionAnalysis
    from visavis.papers.diagnostics.objective_profile import ObjectiveProfiles
    from visavis.papers.probes import ProbeReport
    from visavis.research.attention_maps import AttentionMap


def print_diagnosis(result: ContributionAnalysis) -> None:
    """Print counts and weights of contributing samples for each objective and direction.

    Args:
        result: Analysis of a run.
    """
    from visavis.evaluation.published_row import MEASURES

    rows: list[list[str | Text]] = []
    for count in result.counts:
        released = "" if count.semantics == "paper" else ", as in the released code"
        epsilon = f", epsilon {count.epsilon:g}" if len(result.epsilons) > 1 else ""
        rows.append(
            [Text(count.objective.partition("(")[0], "bold") + Text(f"{epsilon}{released}")]
        )
        for direction, title in DIRECTIONS.items():
            keys = [f"{direction}_{name}" for name in MEASURES]
            rows.append(
                [f"  {title}", *(_mean_and_std(count.mean[key], count.std[key]) for key in keys)]
            )
    print_table(["", *MEASURES.values()], rows)
    epsilons = ", ".join(f"{epsilon:g}" for epsilon in result.epsilons)
    print_line(
        f"C^q: negatives with weight above {epsilons}, mean over queries that have one, then over "
        "all. C^B: sum over a batch. "
        "C^0: queries without any. W-, W+: summed weights of these negatives and of positives. "
        "effective: effective number of negatives, for any epsilon."
    )
    if result.with_slope:
        print_line("SmoothAP: triplets by eqs. 12 and 13 of COCOS, with the factor 1/tau.")
    checkpoint = {"best": "Best model", "last": "Last model", "start": "Untrained model"}.get(
        result.checkpoint, "Checkpoint"
    )
    objectives = ", ".join(dict.fromkeys(count.objective for count in result.counts))
    print_line(
        f"{checkpoint}, step {result.step:,}, frozen. Mean ± standard deviation over "
        f"{result.batches:,} training batches of {result.images:,} images "
        f"and {result.texts:,} texts. {objectives}."
    )
    if result.published:
        _print_published_counts(result)
    if result.gradients:
        _print_gradients(result)


def _print_gradients(result: ContributionAnalysis) -> None:
    """First, lowest and last norm of the gradients at each place, for each objective."""
    from visavis.research.reports.gradient_flow import flow_panels, flow_table

    rows: list[list[str | Text]] = []
    for label, *norms in flow_table(result.gradients):
        name, _, value = label.rpartition(", ")
        if value == "first":
            rows.append([Text(name, "bold")])
        rows.append([f"  {value}", *norms])
    # Two lines, so that the table fits into 80 columns.
    titles = [title.replace(" ", "\n") for title in flow_panels(result.gradients).values()]
    print_line("")
    print_table(["gradient norm\n", *titles], rows)
    print_line(
        "Recorded during training (training.gradients_every). raw: before normalization. --out "
        "plots the norms over the steps."
    )


def _print_published_counts(result: ContributionAnalysis) -> None:
    """Published and measured counts, by the definitions of the paper and of its released code."""
    from visavis.evaluation.published_row import MEASURES
    from visavis.papers.diagnostics.contribution_analysis import DEFAULT_EPSILON

    count = result.counts[0]
    published = result.published_counts
    if published is None:
        print_line(f"{result.published} has no counts for {count.objective}.")
        return
    released = next(
        (
            other
            for other in result.counts
            if (other.objective, other.semantics) == (count.objective, "reference")
        ),
        None,
    )
    rows = []
    for key, (mean, std) in published.values.items():
        direction, _, measure = key.partition("_")
        by_code = (
            _mean_and_std(released.mean[key], released.std[key])
            if released
            else "-"
            if published.code_difference
            else "the same"
        )
        reached = _mean_and_std(count.mean[key], count.std[key])
        rows.append(
            [
                DIRECTIONS[direction],
                MEASURES[measure],
                _mean_and_std(mean, std or 0.0),
                reached,
                by_code,
            ]
        )
    print_line("")
    print_table(
        ("", "", "published", "reached", "reached, as in the released code"), rows, text_columns=2
    )
    print_line(
        f"Published: {published.id}, number {published.experiment_id}: {published.source}. "
        f"Reached: {result.model}, {result.data}."
    )
    if result.epsilon != DEFAULT_EPSILON:
        print_line(
            f"Published with epsilon {DEFAULT_EPSILON}, reached with epsilon {result.epsilon:g}."
        )
    if published.code_difference:
        print_line(f"Published as counted by the released code: {published.code_difference}.")


def _mean_and_std(mean: float, std: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.2f}±{std:.2f}"


def print_explanation(explanation: AttentionMap) -> None:
    """Print the score and the best region of each word.

    Args:
        explanation: Attention of a text to an image.
    """
    rows = []
    for word, score, best, weights in zip(
        explanation.words,
        explanation.scores,
        explanation.best_regions,
        explanation.weights,
        strict=True,
    ):
        region = str(best + 1)
        if explanation.grid is not None:
            row, column = divmod(best, explanation.grid[1])
            region = f"row {row + 1}, column {column + 1}"
        rows.append([word, f"{score:.3f}", region, f"{100 * weights[best]:.0f} %"])
    print_table(("word", "score", "best region", "attention"), rows)
    print_line(f"{explanation.model}, score {explanation.score:.4f}. Image: {explanation.file}")


def print_probes(result: ProbeReport) -> None:
    """Print the accuracy for each kind of edit, and the changes of recall.

    Args:
        result: Result of the capability tests.
    """
    accuracies = [
        [
            edit.title,
            str(edit.num_pairs),
            f"{edit.percent:.1f} %",
            f"{edit.low:.1f} to {edit.high:.1f}",
            str(edit.num_ties),
        ]
        for edit in result.results
    ]
    print_table(("edit", "cases", "correct", "95 %", "ties"), accuracies)
    print_line(
        "correct: the true caption scores above the edited one. A tie is not correct. Chance is 50 "
        "%. * the same words in another order, "
        f"which a bag of words cannot distinguish. Edited captions are false by {result.source}."
    )
    if result.recall_changes:
        changes = [
            [
                change.edit,
                DIRECTIONS[change.direction],
                f"R@{change.k}",
                f"{change.before:.1f}",
                f"{change.after:.1f}",
                f"{change.difference:+.1f} ({change.low:+.1f} to {change.high:+.1f})",
            ]
            for change in result.recall_changes
        ]
        print_table(
            ("edit", "", "R@K", "before", "after", "difference, 95 %"), changes, text_columns=3
        )
        print_line(
            "Recall in percent before and after the edit, and the 95 % interval of the difference, "
            "paired over images."
        )
    for text in result.skipped:
        print_line(text)
    print_line(f"{result.model}, {result.images:,} images of {result.data}.")


def print_objective_profiles(result: ObjectiveProfiles) -> None:
    """Print the tangent norms of a query, its positive and four negatives for each objective.

    Args:
        result: Profiles of the objectives.
    """
    from visavis.papers.diagnostics.objective_profile import INITIAL_ANGLES, VECTOR_NAMES

    vectors = [
        f"{name.removeprefix('negative ')} {angle:g}°"
        for name, angle in zip(VECTOR_NAMES, INITIAL_ANGLES, strict=True)
    ]
    rows = [
        [profile.name, *(f"{norm:.3f}" for norm in profile.rotation.norm.tolist())]
        for profile in result.profiles
    ]
    print_table(["tangent norm on", *vectors], rows)
    report = result.folder / "report.html"
    print_line(
        "A query, its positive and four negatives on a circle. Triplets and weights of pairs: "
        f"{report}"
    )
