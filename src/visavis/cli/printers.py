"""Output of results that are not tables: findings, files, the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from visavis.cli.console import print_markup, print_result, print_tables
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


SHOWN_PACKAGES = ("visavis", "python", "torch")
"""Packages whose versions ``visavis doctor`` prints in short."""
FINDINGS_PER_KIND = 5
"""Number of findings of one kind that are printed. ``--all`` and ``--json`` show the rest."""


def print_check(report: CheckReport, *, print_all: bool = False) -> None:
    """Print the findings of a check by kind, and the counts of each split."""
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
    """Print the issues of an audit with counts, examples and fixes."""
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
    """Print the experts, caption features and split files that were written."""
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
    """Print the folder of synthetic scenes."""
    print_line(f"Data set: {folder}")


def print_feature_stores(stores: Iterable[FeatureStore]) -> None:
    """Print one line per feature store."""
    for store in stores:
        print_line(
            f"{store.folder}: {len(store):,} rows, {store.description.granularity} features, "
            f"{store.embedding_dim} dimensions"
        )


def print_converted_model(converted: CheckpointConversion) -> None:
    """Print the recipe keys that start training from a converted checkpoint."""
    print_line(f"{converted.folder}: to train from it, add to a recipe")
    import tomli_w

    print_line(tomli_w.dumps(converted.to_recipe_sections()))


def print_environment(checks: Iterable[EnvironmentCheck], *, print_all: bool) -> None:
    """Print one line per check of the installation, with packages and extras in short."""
    shown = [*checks]
    if not print_all:
        # The versions, installed and missing extras as one check each, then checks that depend on
        # the machine.
        values = {check.name: check.value for check in shown}
        extras = [check for check in shown if check.name.startswith("extra ")]
        # Extras of developers add nothing for a user.
        names = {
            check.name.removeprefix("extra "): not check.fix
            for check in extras
            if check.name not in ("extra dev", "extra docs")
        }
        packages = ", ".join(f"{name} {values[name].split(' ')[0]}" for name in SHOWN_PACKAGES)
        installed = ", ".join(name for name, is_installed in names.items() if is_installed)
        missing = ", ".join(name for name, is_installed in names.items() if not is_installed)
        left_out = {*package_versions(), "git", "torchvision", *(check.name for check in extras)}
        shown = [
            EnvironmentCheck("versions", packages),
            EnvironmentCheck("extras", installed or "none"),
            *(
                [EnvironmentCheck("missing", missing, fix="pip install 'visavis[NAME]'")]
                if missing
                else []
            ),
            *(check for check in shown if not check.ok or check.name not in left_out),
        ]
    width = max(len(check.name) for check in shown)
    for check in shown:
        mark = "[green]ok[/green]" if check.ok else "[red]! [/red]"
        fix = f" -> {check.fix}" if check.fix else ""
        print_markup(f"{mark}  {escape(f'{check.name:<{width}}  {check.value}{fix}')}")
    if not print_all:
        print_line("All packages and extras: visavis doctor --all")


def print_catalog(entries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the entries of the catalogs by kind."""
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
    """Print the correlation of relevance estimators with human ratings, and their speed."""
    from visavis.papers.relevance.estimator_quality import estimator_table

    print_tables([estimator_table(qualities)])


def print_classification(result: list[tuple[str, float]] | ZeroShotResult) -> None:
    """Print the labels of an image with their scores, or the accuracies of a folder of classes."""
    if isinstance(result, list):
        for rank, (text, score) in enumerate(result, 1):
            print_line(f"{rank:2d}  {score:.3f}  {text}")
    else:
        print_result(result)
