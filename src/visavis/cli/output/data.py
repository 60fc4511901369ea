"""Tables about data, machine and catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.cli.output.published import print_rows

if TYPE_CHECKING:
    from visavis.auditing.running import Audit
    from visavis.data.check import CheckReport
    from visavis.data.conversion import Converted
    from visavis.environment import Fact
    from visavis.models.checkpoints import ConvertedModel


FIRST = 5
"""How many findings of one kind are printed; ``--all`` and ``--json`` show the rest."""


def print_check(report: CheckReport, *, every: bool = False) -> None:
    """Counts, and the first findings of each kind, or all of them."""
    console = standard_output()
    by_kind: dict[str, list[Any]] = {}
    for finding in sorted(report.findings, key=lambda finding: not finding.loses):
        by_kind.setdefault(("" if finding.loses else "note: ") + finding.kind, []).append(finding)
    for kind, findings in by_kind.items():
        console.print(f"[bold]{escape(kind)}[/bold] ({len(findings):,})")
        shown = findings if every else findings[:FIRST]
        for finding in shown:
            console.print(f"  {escape(str(finding))}", soft_wrap=True)
        if len(findings) > len(shown):
            console.print(f"  ... and {len(findings) - len(shown):,} more: --all lists them")
    for split, count in report.splits.items():
        console.print(f"{split}: {count.images:,} images, {count.captions:,} captions")
    fewest, most = report.captions_per_image
    sizes = ", ".join(f"{size} ({count:,})" for size, count in sorted(report.image_sizes.items(), key=lambda item: -item[1])[:5])
    console.print(
        f"captions an image: {fewest} to {most}; duplicate captions: {report.duplicate_captions:,}; image sizes: {sizes or 'no images'}"
    )
    verdict = "All is well: training loses nothing." if report.ok else "Training would lose something: mend it, or train with --skip-bad."
    console.print(f"{verdict} ({report.layout}, {report.seconds:.1f} s)")


def print_audit(audit: Audit, *, every: bool = False) -> None:
    """Each kind of thing that was found with its numbers, what to do, and the worst of it, or all of it."""
    console = standard_output()
    for concern in audit.concerns:
        mark = "[red]![/red] " if concern.alarm else ""
        console.print(f"{mark}[bold]{escape(concern.kind)}[/bold] ({concern.count:,}): {escape(concern.what)}", soft_wrap=True)
        shown = concern.examples if every else concern.examples[:FIRST]
        for example in shown:
            console.print(f"  {escape(example)}", soft_wrap=True)
        if len(concern.examples) > len(shown):
            console.print(f"  ... and {len(concern.examples) - len(shown):,} more: --all lists them")
        console.print(f"  [cyan]{escape(concern.remedy)}[/cyan]", soft_wrap=True)
    for sentence in audit.left_out:
        console.print(f"left out: {escape(sentence)}", soft_wrap=True)
    verdict = "Nothing alarming." if audit.ok else "Mend what is marked with ! first."
    console.print(
        f"{verdict} ({audit.images:,} images, {audit.captions:,} captions; {escape(audit.why.rstrip('.'))}; {audit.seconds:.0f} s)",
        soft_wrap=True,
    )


def print_converted(converted: Converted) -> None:
    """What was written, and how to train on it."""
    console = standard_output()
    console.print(f"{escape(str(converted.folder))}: {converted.videos:,} videos, {converted.captions:,} captions", soft_wrap=True)
    for name, (width, videos) in converted.experts.items():
        console.print(f"  experts/{escape(name)}: {width:,} wide, of {videos:,} videos", soft_wrap=True)
    for name in (*(f"texts/{text}" for text in converted.texts), *converted.lists):
        console.print(f"  {escape(name)}", soft_wrap=True)


def print_converted_model(converted: ConvertedModel) -> None:
    """The sections of a recipe that begins with it."""
    standard_output().print(f"{escape(str(converted.folder))}: to begin with it, a recipe says", soft_wrap=True)
    standard_output().print(escape(tomli_w.dumps(converted.to_json())), soft_wrap=True)


def print_findings(findings: Iterable[Fact]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]![/red]"
        table.add_row(mark, escape(finding.name), escape(finding.value), escape(finding.remedy))
    standard_output().print(table)


def print_catalog(entries: dict[str, list[dict[str, Any]]]) -> None:
    console = standard_output()
    for kind, rows in entries.items():
        console.print(f"[bold]{kind}[/bold]")
        if kind == "recipes":
            print_recipes(console, rows)
            continue
        for row in rows:
            (_, name), (_, what), *rest = row.items()
            console.print(f"  [cyan]{escape(name)}[/cyan]", soft_wrap=True)
            for text in filter(None, [what, *(f"{label}: {value}" for label, value in rest if value)]):
                console.print(f"      {escape(text)}", soft_wrap=True)


def print_recipes(console: Console, entries: list[dict[str, Any]]) -> None:
    """Each recipe or grid on a line, then each table of a paper; where there are rows of tables alone, each of them."""
    files, rows = ([entry for entry in entries if ("paper" in entry) == of_table] for of_table in (False, True))
    for entry in files:
        console.print(recipe_line(entry), soft_wrap=True, highlight=False)
    if not files:
        print_rows(rows)
        return
    for table, group in groupby(rows, lambda row: (row["paper"], row["table"], row["what"])):
        (paper, number, what), count = table, len(list(group))
        line = f"  [cyan]{paper}/{number}/ROW[/cyan]  {escape(what)} {count} rows: visavis catalog recipes --paper {paper}"
        console.print(line, soft_wrap=True, highlight=False)


def recipe_line(entry: dict[str, Any]) -> str:
    """A recipe in one line: its name, the first clause of what it is, and the rows of a grid."""
    what = re.split(r"[:;.](?:\s|$)", entry["what"])[0]
    rows = f" (rows: {escape(', '.join(entry['rows']))})" if "rows" in entry else ""
    return f"  [cyan]{escape(entry['name'])}[/cyan]  {escape(what)}{rows}"
