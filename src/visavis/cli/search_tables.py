"""Tables about an index and about search results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from visavis.cli.console import print_table, standard_output
from visavis.cli.terminal import print_line

if TYPE_CHECKING:
    from visavis.evaluation.feedback_metrics import FeedbackEvaluation
    from visavis.retrieval.compression import CompressionReport
    from visavis.retrieval.index_builder import IndexReport
    from visavis.retrieval.index_queries import QueryModels
    from visavis.retrieval.search import SearchResult, SearchResults

MAX_LISTED_LINES = 5
"""Number of removed, excluded and skipped files that are printed."""


def print_index_report(report: IndexReport | QueryModels) -> None:
    """Print the counts of encoded, unchanged, moved, removed and kept files, and all that is left
    out. Or print the query models of an index.

    Args:
        report: Result of indexing, or query models.
    """
    from visavis.retrieval.index_queries import QueryModels

    if isinstance(report, QueryModels):
        _print_query_models(report)
        return
    num_moved = min(report.num_moved, len(report.moved_from))
    counts = {
        "encoded": report.num_encoded,
        "unchanged": report.num_unchanged,
        "moved": num_moved,
        "with known content": report.num_moved - num_moved,
        "removed": report.num_removed,
        "kept without their file": report.num_kept,
    }
    changes = (
        ", ".join(f"{count:,} {change}" for change, count in counts.items() if count)
        or "no changes"
    )
    print_line(
        f"{report.num_items:,} items in the index. Files: {changes}. {report.seconds:.0f} s."
    )
    for title, lines in (
        ("Removed", report.removed),
        ("Excluded", report.excluded),
        ("Left out", report.skipped),
    ):
        if lines:
            print_line(f"{title}, {len(lines):,}:")
        for text in lines[:MAX_LISTED_LINES]:
            print_line(f"  {text}")
        if len(lines) > MAX_LISTED_LINES:
            print_line(f"  ... and {len(lines) - MAX_LISTED_LINES:,} more: --json lists all.")
    parts = {
        "indexed": "indexed",
        "companions": "part of another photo",
        "skipped": "left out",
        "other": "neither images nor videos",
    }
    counted = ", ".join(
        f"{report.files[name]:,} {text}" for name, text in parts.items() if report.files.get(name)
    )
    print_line(f"{sum(report.files.values()):,} files in the source: {counted}.")
    if report.other_files is not None:
        print_line(f"{report.other_files}.")
    if report.undated:
        path, text = next(iter(report.undated.items()))
        print_line(
            f"{len(report.undated):,} files with an unreadable capture time, such as {text!r} of "
            f"{path}. Their modification time counts."
        )
    if report.compression is not None:
        print_compression(report.compression)
    if report.correction is not None:
        print_line(f"Correction: {report.correction}")
    print_line(f"Index: {report.folder}")


def _print_query_models(models: QueryModels) -> None:
    """Print the query models of an index."""
    rows = []
    for model in models.to_json()["models"]:
        state = "active" if model["active"] else "previous" if model["previous"] else ""
        rows.append([model["queries"], model["items"], state, model["model"]])
    print_table(["queries", "items", "", "model"], rows)
    print_line(f"Index: {models.folder}")


def print_compression(report: CompressionReport) -> None:
    """Print recall, bytes and latency of compressed vectors.

    Args:
        report: Measurements of an index.
    """
    has_captions = any(encoding.caption_recall_at_10 is not None for encoding in report.encodings)
    rows = []
    for encoding in report.encodings:
        recalls = [
            f"{recall:.1f}"
            for recall in (encoding.recall_at_10, encoding.caption_recall_at_10)
            if recall is not None
        ]
        rescored = f"{encoding.rescored:,}" if encoding.rescored else "-"
        sizes = f"{encoding.scanned_bytes:,.0f}", f"{encoding.stored_bytes:,.0f}"
        rows.append([encoding.name, *sizes, rescored, *recalls, f"{encoding.milliseconds:.3g}"])
    recall_columns = ["recall@10", "caption@10"] if has_captions else ["recall@10"]
    print_table(["vectors", "bytes", "stored", "rescored", *recall_columns, "ms per query"], rows)
    captions = (
        " caption@10: captions whose own item is among the first 10, in percent."
        if has_captions
        else ""
    )
    print_line(
        f"{report.num_items:,} items, {report.num_queries:,} queries: {report.query_source}. "
        "bytes: per item, read by the first pass. "
        "stored: per item, in total. recall@10: share of the true top 10 by float32 vectors, in "
        f"percent.{captions} "
        "ms per query: median of single queries."
    )
    print_line(report.recommendation)


def print_results(results: SearchResults, *, print_all: bool = False) -> None:
    """Print the results of a search, with thumbnails on a terminal with 24-bit color.

    Args:
        results: Results, best first.
        print_all: Whether to print the results after the level of irrelevant ones, too.
    """
    if not results.hits:
        print_line(results.message)
    elif results.no_match:
        print_line("Probably no match. Nearest results:")
    _print_hits(results.hits, 1)
    if results.weaker and print_all:
        print_line("Weaker results:")
        _print_hits(results.weaker, len(results.hits) + 1)
    elif results.weaker:
        print_line(f"{len(results.weaker):,} weaker results. Show them with --all.")
    if results.correction:
        print_line(f"Scores are corrected: {results.correction}.")


def _print_hits(hits: Iterable[SearchResult], first: int) -> None:
    console = standard_output()
    for rank, hit in enumerate(hits, first):
        match = (
            "" if hit.match_probability is None else f"  match {100 * hit.match_probability:3.0f} %"
        )
        duplicates = f"  (and {len(hit.duplicates)} similar)" if hit.duplicates else ""
        print_line(f"{rank:2d}  {hit.score:.3f}{match}  {hit.item.key}{duplicates}")
        if (
            hit.image is not None
            and hit.image.location is not None
            and console.is_terminal
            and console.color_system == "truecolor"
        ):
            console.print(_thumbnail(hit.image.preview()))


def print_feedback_evaluation(result: FeedbackEvaluation) -> None:
    """Print recall and pairwise accuracy on relevance judgments.

    Args:
        result: Evaluation of an index.
    """
    recalls = ", ".join(f"R@{k} {value:.1f} %" for k, value in result.recall.items())
    print_line(f"{result.queries:,} judged queries, {result.candidates:,} items: {recalls}.")
    if result.pairwise_accuracy is not None:
        accuracy = f"{result.pairwise_accuracy:.1f} % of {result.pairs:,} pairs"
        print_line(f"{accuracy} of a relevant and an irrelevant item are in the correct order.")
    if result.correction:
        print_line(f"Scores are corrected: {result.correction}.")
    if result.skipped:
        print_line(
            f"Left out: {result.skipped:,} judgments of image queries, of queries with excluded "
            "texts, or of missing items."
        )


def print_ranked_texts(texts: Iterable[tuple[str, float]]) -> None:
    """Print labels with their scores.

    Args:
        texts: Labels and scores, best first.
    """
    for rank, (text, score) in enumerate(texts, 1):
        print_line(f"{rank:2d}  {score:.3f}  {text}")


def _thumbnail(image: Any, width: int = 32) -> Any:
    """An image in half-block characters: two pixels per character cell."""
    from rich.text import Text

    small = image.convert("RGB").resize(
        (width, max(2, width * image.height // image.width // 2 * 2))
    )
    text = Text()
    for y in range(0, small.height, 2):
        for x in range(small.width):
            upper = small.getpixel((x, y))
            lower = small.getpixel((x, y + 1))
            text.append(
                "▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})"
            )
        text.append("\n")
    return text
