"""Tables about data sets, feature stores, converted checkpoints, the installation and the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.cli.output.run_tables import print_published_rows
from visavis.cli.terminal import print_line

if TYPE_CHECKING:
    from visavis.audit.run_audit import Audit
    from visavis.data.conversion.convert_features import ConversionReport
    from visavis.data.dataset_reader import CheckReport
    from visavis.data.features.store import FeatureStore
    from visavis.environment import EnvironmentCheck
    from visavis.models.checkpoint_conversion import CheckpointConversion


FINDINGS_PER_KIND = 5
"""Number of findings of one kind that are printed. ``--all`` and ``--json`` show the rest."""


def print_check(report: CheckReport, *, print_all: bool = False) -> None:
    """Print the findings of a check by kind, and the counts of each split.

    Args:
        report: Result of the check.
        print_all: Print every finding instead of the first of each kind.
    """
    console = standard_output()
    by_kind: dict[str, list[str]] = {}
    for finding in sorted(report.findings, key=lambda finding: not finding.loses_data):
        by_kind.setdefault(("" if finding.loses_data else "note: ") + finding.kind, []).append(str(finding))
    for kind, findings in by_kind.items():
        console.print(f"[bold]{escape(kind)}[/bold] ({len(findings):,})")
        _print_examples(console, findings, print_all=print_all)
    for split, count in report.splits.items():
        console.print(f"{split}: {count.images:,} images, {count.captions:,} captions")
    fewest, most = report.captions_per_image
    sizes = ", ".join(f"{size} ({count:,})" for size, count in sorted(report.image_sizes.items(), key=lambda item: -item[1])[:5])
    console.print(
        f"captions per image: {fewest} to {most}, duplicate captions: {report.duplicate_captions:,}, image sizes: {sizes or 'no images'}"
    )
    verdict = "OK: training uses all data." if report.ok else "Training would lose data. Fix the data, or train with --skip-bad."
    console.print(f"{verdict} ({report.format_name}, {report.seconds:.1f} s)")


def print_audit(audit: Audit, *, print_all: bool = False) -> None:
    """Print the issues of an audit with counts, examples and fixes.

    Args:
        audit: Result of the audit.
        print_all: Print every example instead of the first of each issue.
    """
    console = standard_output()
    for issue in audit.issues:
        mark = "[red]![/red] " if issue.serious else ""
        console.print(f"{mark}[bold]{escape(issue.kind)}[/bold] ({issue.count:,}): {escape(issue.description)}", soft_wrap=True)
        _print_examples(console, issue.examples, print_all=print_all)
        console.print(f"  [cyan]{escape(issue.fix)}[/cyan]", soft_wrap=True)
    for text in audit.skipped:
        console.print(f"left out: {escape(text)}", soft_wrap=True)
    verdict = "No serious issue." if audit.ok else "Fix the issues marked with ! first."
    console.print(
        f"{verdict} ({audit.images:,} images, {audit.captions:,} captions, {escape(audit.reason.rstrip('.'))}, {audit.seconds:.0f} s)",
        soft_wrap=True,
    )


def _print_examples(console: Console, examples: Sequence[str], *, print_all: bool) -> None:
    shown = examples if print_all else examples[:FINDINGS_PER_KIND]
    for example in shown:
        console.print(f"  {escape(example)}", soft_wrap=True)
    if len(examples) > len(shown):
        console.print(f"  ... and {len(examples) - len(shown):,} more: --all lists them")


def print_converted(converted: ConversionReport) -> None:
    """Print the experts, caption features and split files that were written.

    Args:
        converted: Result of the conversion.
    """
    console = standard_output()
    console.print(f"{escape(str(converted.folder))}: {converted.num_videos:,} videos, {converted.num_captions:,} captions", soft_wrap=True)
    for name, (dim, videos) in converted.experts.items():
        console.print(f"  experts/{escape(name)}: {dim:,} dimensions, {videos:,} videos", soft_wrap=True)
    for name in (*(f"caption_features/{text}" for text in converted.caption_features), *converted.split_files):
        console.print(f"  {escape(name)}", soft_wrap=True)


def print_scenes(folder: Path) -> None:
    """Print the folder of synthetic scenes.

    Args:
        folder: The new data set.
    """
    print_line(f"Data set: {folder}")


def feature_store_summary(store: FeatureStore) -> dict[str, Any]:
    """Return the properties of a feature store.

    Args:
        store: Store of images or captions.

    Returns:
        Folder, number of rows, embedding dimension and granularity.
    """
    return {
        "folder": str(store.folder),
        "rows": len(store),
        "embedding_dim": store.embedding_dim,
        "granularity": store.description.granularity,
    }


def print_feature_stores(stores: Iterable[FeatureStore]) -> None:
    """Print one line per feature store.

    Args:
        stores: Stores of images or captions.
    """
    for store in map(feature_store_summary, stores):
        print_line(f"{store['folder']}: {store['rows']:,} rows, {store['granularity']} features, {store['embedding_dim']} dimensions")


def print_converted_model(converted: CheckpointConversion) -> None:
    """Print the recipe keys that start training from a converted checkpoint.

    Args:
        converted: Result of the conversion.
    """
    standard_output().print(f"{escape(str(converted.folder))}: to train from it, add to a recipe", soft_wrap=True)
    standard_output().print(escape(tomli_w.dumps(converted.to_recipe_sections())), soft_wrap=True)


def print_environment(checks: Iterable[EnvironmentCheck]) -> None:
    """Print one line per check of the installation.

    Args:
        checks: Results of ``visavis doctor``.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]![/red]"
        table.add_row(mark, escape(check.name), escape(check.value), escape(check.fix))
    standard_output().print(table)


def print_catalog(entries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the entries of the catalogs by kind.

    Args:
        entries: Entries by kind.
    """
    console = standard_output()
    for kind, rows in entries.items():
        console.print(f"[bold]{kind}[/bold]")
        if kind == "recipes":
            print_recipe_list(console, rows)
            continue
        for row in rows:
            (_, name), (_, summary), *rest = row.items()
            console.print(f"  [cyan]{escape(name)}[/cyan]", soft_wrap=True)
            for text in filter(None, [summary, *(f"{label.replace('_', ' ')}: {value}" for label, value in rest if value)]):
                console.print(f"      {escape(text)}", soft_wrap=True)


def print_recipe_list(console: Console, entries: list[dict[str, Any]]) -> None:
    """Print one line per recipe and per paper's table, or one line per row if only table rows are listed.

    Args:
        console: Console to print to.
        entries: Entries of the catalog of recipes.
    """
    files = [entry for entry in entries if "paper" not in entry]
    rows = [entry for entry in entries if "paper" in entry]
    for entry in files:
        console.print(recipe_line(entry), soft_wrap=True, highlight=False)
    if not files:
        print_published_rows(rows)
        return
    for (paper, number, summary), group in groupby(rows, lambda row: (row["paper"], row["table"], row["summary"])):
        count = len(list(group))
        line = f"  [cyan]{paper}/{number}/ROW[/cyan]  {escape(summary)} {count} rows: visavis catalog recipes --paper {paper}"
        console.print(line, soft_wrap=True, highlight=False)


def recipe_line(entry: dict[str, Any]) -> str:
    """Return a recipe as one line: its name, the first clause of its summary, and its variants.

    Args:
        entry: Entry of the catalog of recipes.
    """
    summary = re.split(r"[:;.](?:\s|$)", entry["summary"])[0]
    variants = f" (variants: {escape(', '.join(entry['variants']))})" if "variants" in entry else ""
    return f"  [cyan]{escape(entry['name'])}[/cyan]  {escape(summary)}{variants}"
