"""Tables of diagnostics: contributing samples, capability tests, objective profiles and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visavis.cli.console import print_table
from visavis.cli.terminal import print_line
from visavis.core.encoded import DIRECTIONS

if TYPE_CHECKING:
    from visavis.papers.probes import ProbeReport
    from visavis.research.attention_maps import AttentionMap


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
