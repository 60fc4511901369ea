"""Output about data sets, feature stores, converted checkpoints, the installation and the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.markup import escape
from rich.table import Table

from visavis.cli.console import print_markup, standard_output
from visavis.cli.terminal import print_line
from visavis.core.environment import EnvironmentCheck, package_versions

if TYPE_CHECKING:
    from visavis.data.dataset_reader import CheckReport
    from visavis.data.features.store import FeatureStore
    from visavis.models.encoders.checkpoint_files import CheckpointConversion
    from visavis.papers.convert_features import ConversionReport
    from visavis.research.audit.run_audit import Audit


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
    checks = list(checks)
    if not print_all:
        _print_short_environment(checks)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]![/red]"
        table.add_row(mark, escape(check.name), escape(check.value), escape(check.fix))
    standard_output().print(table)


_SHOWN_PACKAGES = ("visavis", "python", "torch")


def _print_short_environment(checks: Sequence[EnvironmentCheck]) -> None:
    """Print the versions on one line, installed and missing extras on one each, then what depends
    on the machine.
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
        *(
            [EnvironmentCheck("missing", missing, fix="pip install 'visavis[NAME]'")]
            if missing
            else []
        ),
    ]
    left_out = {*package_versions(), "git", *(check.name for check in extras)}
    short += [
        check for check in checks if not check.ok or check.name not in left_out | {"torchvision"}
    ]
    width = max(len(check.name) for check in short)
    for check in short:
        mark = "[green]ok[/green]" if check.ok else "[red]! [/red]"
        fix = f" -> {check.fix}" if check.fix else ""
        print_markup(f"{mark}  {escape(f'{check.name:<{width}}  {check.value}{fix}')}")
    print_line("All packages and extras: visavis doctor --all")


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
        from visavis.cli.run_tables import print_published_rows

        print_published_rows(rows)
        return
    for (paper, number, summary), group in groupby(
        rows, lambda row: (row["paper"], row["table"], row["summary"])
    ):
        command = f"{len(list(group))} rows: visavis papers list {paper}"
        print_markup(f"  [cyan]{paper}/{number}/ROW[/cyan]  {escape(summary)} {command}")
