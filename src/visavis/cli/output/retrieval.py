"""What was indexed, and what was found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output

if TYPE_CHECKING:
    from visavis.retrieval.building import Built
    from visavis.retrieval.curve import Curve
    from visavis.retrieval.judged import JudgedEvaluation
    from visavis.retrieval.searching import Results

SHOWN = 5
"""Sentences about files that cannot be read."""


def print_built(built: Built) -> None:
    console = standard_output()
    counts = {"encoded": built.encoded, "as before": built.kept, "moved or copied": built.moved, "removed": built.removed}
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing to do"
    console.print(f"{built.items:,} items in the index; files: {told}; {built.seconds:.0f} s.", soft_wrap=True)
    if built.skipped:
        console.print(f"Left out, {len(built.skipped):,}:")
    for sentence in built.skipped[:SHOWN]:
        console.print(f"  {escape(sentence)}", soft_wrap=True)
    if len(built.skipped) > SHOWN:
        console.print(f"  ... and {len(built.skipped) - SHOWN:,} more: --json lists all.")
    if built.curve is not None:
        print_curve(built.curve)
    console.print(f"Index: {escape(built.folder)}", soft_wrap=True)


def print_curve(curve: Curve) -> None:
    table = Table(box=None, pad_edge=False)
    own = any(form.own_at_10 is not None for form in curve.forms)
    columns = ["vectors", "bytes", "in all", "scored again", "recall@10", *(["own@10"] if own else []), "ms a query"]
    for column in columns:
        table.add_column(column, justify="left" if column == "vectors" else "right")
    for form in curve.forms:
        found = [f"{form.recall_at_10:.1f}", *([f"{form.own_at_10:.1f}"] if form.own_at_10 is not None else [])]
        again = f"{form.rescored:,}" if form.rescored else "-"
        table.add_row(form.name, f"{form.first_bytes:,.0f}", f"{form.bytes:,.0f}", again, *found, f"{form.ms:.3g}")
    console = standard_output()
    console.print(table)
    told = "; own@10: of the captions, those whose own item is among the first 10" if own else ""
    console.print(
        f"{curve.items:,} items; {curve.queries:,} queries: {curve.asked}. Bytes: of a vector that the first pass reads, and that are kept in "
        f"all; recall@10: of the true top 10 by whole vectors in float32, percent{told}; ms: the median of one query at a time.",
        soft_wrap=True,
    )
    console.print(escape(curve.advice), soft_wrap=True)


def print_results(results: Results) -> None:
    console = standard_output()
    if not results.hits:
        console.print("Nothing in the index passes the filters.")
        return
    if results.nothing_fits:
        console.print("Probably nothing here fits; the nearest:")
    for rank, hit in enumerate(results.hits, 1):
        match = "" if hit.match is None else f"  fits {100 * hit.match:3.0f} %"
        more = f"  (and {len(hit.duplicates)} like it)" if hit.duplicates else ""
        console.print(f"{rank:2d}  {hit.score:.3f}{match}  {escape(hit.item.key)}{more}", soft_wrap=True)
        if hit.image is not None and hit.image.bytes is not None and console.is_terminal and console.color_system == "truecolor":
            console.print(_thumbnail(hit.image.preview()))


def print_judgements(judged: JudgedEvaluation) -> None:
    console = standard_output()
    recalls = ", ".join(f"{value:.1f} % among the first {k}" for k, value in judged.r.items())
    console.print(
        f"{judged.queries:,} judged sentences among {judged.candidates:,} items: something that fits is {recalls}.", soft_wrap=True
    )
    if judged.ordered is not None:
        console.print(f"Of {judged.pairs:,} pairs of a fitting and an unfitting item {judged.ordered:.1f} % are in order.", soft_wrap=True)
    if judged.left_out:
        console.print(
            f"Left out: {judged.left_out:,} judgements of pictures, of queries with a minus, or of items that are gone.", soft_wrap=True
        )


def print_texts(texts: Iterable[tuple[str, float]]) -> None:
    for rank, (text, score) in enumerate(texts, 1):
        standard_output().print(f"{rank:2d}  {score:.3f}  {escape(text)}", soft_wrap=True)


def _thumbnail(picture: Any, width: int = 32) -> Any:
    """A picture in half-block characters: two pixels per character cell."""
    from rich.text import Text

    small = picture.convert("RGB").resize((width, max(2, width * picture.height // picture.width // 2 * 2)))
    text = Text()
    for y in range(0, small.height, 2):
        for x in range(small.width):
            upper, lower = small.getpixel((x, y)), small.getpixel((x, y + 1))
            text.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
        text.append("\n")
    return text
