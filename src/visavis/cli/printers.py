"""Output of results that are not tables: findings, files, the catalog, search results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.markup import escape

from visavis.cli.console import print_markup, print_result, print_tables, standard_output
from visavis.cli.terminal import print_line
from visavis.core.encoded import DIRECTIONS
from visavis.core.environment import EnvironmentCheck, package_versions

if TYPE_CHECKING:
    from visavis.data.dataset_check import CheckReport
    from visavis.data.features.store import FeatureStore
    from visavis.evaluation.classification import ZeroShotResult
    from visavis.models.encoders.checkpoint_files import CheckpointConversion
    from visavis.papers.convert_features import ConversionReport
    from visavis.papers.relevance.estimator_quality import EstimatorQuality
    from visavis.research.audit.run_audit import Audit
    from visavis.retrieval.search import SearchResult, SearchResults


FINDINGS_PER_KIND = 5
"""Number of findings of one kind that are printed. ``--all`` and ``--json`` show the rest."""


def print_check(report: CheckReport, *, print_all: bool = False) -> None:
    """Print the findings of a check by kind, and the counts of each split.

    Args:
        report: Result of the check.
        print_all: Print every finding instead of the first of each kind.
    """
    by_kind: dict[str, list[str]] = {}
    for finding in sorted(report.findings, key=lambda finding: not finding.loses_data):
        by_kind.setdefault(("" if finding.loses_data else "note: ") + finding.kind, []).append(
            str(finding)
        )
    for kind, findings in by_kind.items():
        print_markup(f"[bold]{escape(kind)}[/bold] ({len(findings):,})")
        _print_examples(findings, print_all=print_all)
    for split, count in report.splits.items():
        print_line(f"{split}: {count.images:,} images, {count.captions:,} captions")
    min_captions, max_captions = report.captions_per_image
    sizes = ", ".join(
        f"{size} ({count:,})"
        for size, count in sorted(report.image_sizes.items(), key=lambda item: -item[1])[:5]
    )
    print_line(
        f"captions per image: {min_captions} to {max_captions}, duplicate captions: "
        f"{report.duplicate_captions:,}, image sizes: {sizes or 'no images'}"
    )
    verdict = "Training would lose data. Fix the data, or train with --skip-bad."
    if report.ok:
        verdict = (
            "OK: training uses all data."
            if "train" in report.splits
            else "OK for evaluation. Training needs images in split train."
        )
    print_line(f"{verdict} ({report.format_name}, {report.seconds:.1f} s)")


def print_audit(audit: Audit, *, print_all: bool = False) -> None:
    """Print the issues of an audit with counts, examples and fixes.

    Args:
        audit: Result of the audit.
        print_all: Print every example instead of the first of each issue.
    """
    for issue in audit.issues:
        mark = "[red]![/red] " if issue.serious else ""
        print_markup(
            f"{mark}[bold]{escape(issue.kind)}[/bold] ({issue.count:,}): "
            f"{escape(issue.description)}"
        )
        _print_examples(issue.examples, print_all=print_all)
        print_markup(f"  [cyan]{escape(issue.fix)}[/cyan]")
    for text in audit.skipped:
        print_line(f"left out: {text}")
    verdict = "No serious issue." if audit.ok else "Fix the issues marked with ! first."
    print_line(
        f"{verdict} ({audit.images:,} images, {audit.captions:,} captions, "
        f"{audit.reason.rstrip('.')}, {audit.seconds:.0f} s)"
    )


def _print_examples(examples: Sequence[str], *, print_all: bool) -> None:
    shown = examples if print_all else examples[:FINDINGS_PER_KIND]
    for example in shown:
        print_line(f"  {example}")
    if len(examples) > len(shown):
        print_line(f"  ... and {len(examples) - len(shown):,} more: --all lists them")


def print_converted(converted: ConversionReport) -> None:
    """Print the experts, caption features and split files that were written.

    Args:
        converted: Result of the conversion.
    """
    print_line(
        f"{converted.folder}: {converted.num_videos:,} videos, {converted.num_captions:,} captions"
    )
    for name, (dim, videos) in converted.experts.items():
        print_line(f"  experts/{name}: {dim:,} dimensions, {videos:,} videos")
    for name in (
        *(f"caption_features/{text}" for text in converted.caption_features),
        *converted.split_files,
    ):
        print_line(f"  {name}")


def print_scenes(folder: Path) -> None:
    """Print the folder of synthetic scenes.

    Args:
        folder: The new data set.
    """
    print_line(f"Data set: {folder}")


def print_feature_stores(stores: Iterable[FeatureStore]) -> None:
    """Print one line per feature store.

    Args:
        stores: Stores of images or captions.
    """
    for store in stores:
        print_line(
            f"{store.folder}: {len(store):,} rows, {store.description.granularity} features, "
            f"{store.embedding_dim} dimensions"
        )


def print_converted_model(converted: CheckpointConversion) -> None:
    """Print the recipe keys that start training from a converted checkpoint.

    Args:
        converted: Result of the conversion.
    """
    print_line(f"{converted.folder}: to train from it, add to a recipe")
    print_line(tomli_w.dumps(converted.to_recipe_sections()))


def print_environment(checks: Iterable[EnvironmentCheck], *, print_all: bool) -> None:
    """Print one line per check of the installation, with packages and extras in short.

    Args:
        checks: Results of ``visavis doctor``.
        print_all: Print each package and extra on a line of its own.
    """
    shown = [*checks] if print_all else _shorten_checks([*checks])
    width = max(len(check.name) for check in shown)
    for check in shown:
        mark = "[green]ok[/green]" if check.ok else "[red]! [/red]"
        fix = f" -> {check.fix}" if check.fix else ""
        print_markup(f"{mark}  {escape(f'{check.name:<{width}}  {check.value}{fix}')}")
    if not print_all:
        print_line("All packages and extras: visavis doctor --all")


_SHOWN_PACKAGES = ("visavis", "python", "torch")


def _shorten_checks(checks: Sequence[EnvironmentCheck]) -> list[EnvironmentCheck]:
    """The versions, installed and missing extras as one check each, then what depends on the
    machine.
    """
    values = {check.name: check.value for check in checks}
    extras = [check for check in checks if check.name.startswith("extra ")]
    # Extras of developers add nothing for a user.
    names = {
        check.name.removeprefix("extra "): not check.fix
        for check in extras
        if check.name not in ("extra dev", "extra docs")
    }
    packages = ", ".join(f"{name} {values[name].split(' ')[0]}" for name in _SHOWN_PACKAGES)
    installed = ", ".join(name for name, is_installed in names.items() if is_installed)
    missing = ", ".join(name for name, is_installed in names.items() if not is_installed)
    short = [
        EnvironmentCheck("versions", packages),
        EnvironmentCheck("extras", installed or "none"),
    ]
    if missing:
        short.append(EnvironmentCheck("missing", missing, fix="pip install 'visavis[NAME]'"))
    left_out = {*package_versions(), "git", "torchvision", *(check.name for check in extras)}
    return short + [check for check in checks if not check.ok or check.name not in left_out]


def print_catalog(entries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the entries of the catalogs by kind.

    Args:
        entries: Entries by kind.
    """
    for kind, rows in entries.items():
        print_markup(f"[bold]{kind}[/bold]")
        if kind == "recipes":
            _print_recipes(rows)
            continue
        for row in rows:
            (_, name), (_, summary), *details = row.items()
            print_markup(f"  [cyan]{escape(name)}[/cyan]")
            if summary:
                print_line(f"      {summary}")
            for label, value in details:
                if value:
                    # Dollars mark formulas for the documentation site.
                    print_line(f"      {label.replace('_', ' ')}: {value}".replace("$", ""))


def _print_recipes(entries: list[dict[str, Any]]) -> None:
    """One line per recipe and per paper's table, or one line per row if only table rows are listed."""
    files = [entry for entry in entries if "paper" not in entry]
    rows = [entry for entry in entries if "paper" in entry]
    for entry in files:
        first_clause = re.split(r"[:;.](?:\s|$)", entry["summary"])[0]
        variants = f" (variants: {', '.join(entry['variants'])})" if "variants" in entry else ""
        print_markup(f"  [cyan]{escape(entry['name'])}[/cyan]  {escape(first_clause + variants)}")
    if not files:
        _print_published_rows(rows)
        return
    for (paper, number, summary), group in groupby(
        rows, lambda row: (row["paper"], row["table"], row["summary"])
    ):
        command = f"{len(list(group))} rows: visavis papers list {paper}"
        print_markup(f"  [cyan]{paper}/{number}/ROW[/cyan]  {escape(summary)} {command}")


def _print_published_rows(rows: list[dict[str, Any]]) -> None:
    """One line per table row: its published results and requirements."""
    labels = {
        "cited": "cited",
        "not_trainable": "not trainable",
        "unreported": "settings not published",
        "substitutes": "with substitutes",
        "misprint": "misprint",
    }
    for row in rows:
        marks = [label for key, label in labels.items() if row[key]]
        packages = ", ".join([row["needs"].partition(",")[0], *row["encoders"]])
        needs = f"needs {packages}" if row["needs"] else f"no recipe: {row['not_trainable']}"
        results = _format_results(row["published"]) or "curve of a figure"
        line = escape(f"{results}  ({', '.join([*marks, needs])})")
        print_markup(f"  [cyan]{escape(row['name'])}[/cyan]  {line}")
    for text in dict.fromkeys(row["substitutes"] for row in rows if row["substitutes"]):
        print_line(f"  With substitutes: {text}.")


def _format_results(published: dict[str, float]) -> str:
    """All results of a row, grouped by direction."""
    from visavis.evaluation.published_row import format_metric, metric_label

    parts: dict[str, list[str]] = {}
    for key, mean in published.items():
        if not key.endswith("_std"):
            direction = DIRECTIONS.get(key.partition("_")[0], "")
            parts.setdefault(direction, []).append(
                f"{metric_label(key)} {format_metric(key, mean, published.get(f'{key}_std'))}"
            )
    return "; ".join(
        " ".join(filter(None, [direction, ", ".join(values)]))
        for direction, values in parts.items()
    )


def print_estimators(qualities: Sequence[EstimatorQuality]) -> None:
    """Print the correlation of relevance estimators with human ratings, and their speed.

    Args:
        qualities: One entry per estimator.
    """
    from visavis.papers.relevance.estimator_quality import estimator_table

    print_tables([estimator_table(qualities)])


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


def print_classification(result: list[tuple[str, float]] | ZeroShotResult) -> None:
    """Print the labels of an image with their scores, or the accuracies of a folder of classes.

    Args:
        result: Labels and scores, best first, or accuracies.
    """
    if isinstance(result, list):
        print_ranked_texts(result)
    else:
        print_result(result)
