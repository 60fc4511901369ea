"""Output of the results of a search."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from visavis.cli.terminal import escape_line, print_line

if TYPE_CHECKING:
    from visavis.cli.safe_console import SafeConsole
    from visavis.retrieval.search import NamedResult, SearchResult, SearchResults


def print_results(results: SearchResults, *, print_all: bool = False) -> None:
    """Print the results of a search, with thumbnails on a terminal with 24-bit color."""
    if results.named:
        print_line("Found by name or caption:")
        _print_named(results.named)
        if results.hits:
            print_line("Found by content:")
    if not results.hits:
        print_line(escape_line(results.message))
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


def _print_named(named: Iterable[NamedResult]) -> None:
    console = _color_console()
    for found in named:
        caption = f"  {found.text}" if found.found_by == "caption" else ""
        print_line(f"    {found.item.key}{caption}")
        if found.image is not None and found.image.location is not None and console is not None:
            console.print(_thumbnail(found.image.preview()))


def _print_hits(hits: Iterable[SearchResult], first: int) -> None:
    console = _color_console()
    for rank, hit in enumerate(hits, first):
        match = (
            "" if hit.match_probability is None else f"  match {100 * hit.match_probability:3.0f} %"
        )
        duplicates = f"  (and {len(hit.duplicates)} similar)" if hit.duplicates else ""
        line = f"{rank:2d}  {hit.score:.3f}{match}  {hit.item.key}{duplicates}"
        print_line(escape_line(line))
        if hit.image is not None and hit.image.location is not None and console is not None:
            console.print(_thumbnail(hit.image.preview()))


def _color_console() -> SafeConsole | None:
    """A console for a terminal with 24-bit color, which shows images. None: stdout is another."""
    # Only for a terminal, because the import of rich takes a tenth of a search.
    if not sys.stdout.isatty():
        return None
    from visavis.cli.console import standard_output

    console = standard_output()
    return console if console.color_system == "truecolor" else None


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
