"""Tables of results, which each output draws in its own way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        columns: Titles of the columns.
        rows: Cells of each row.
        notes: Sentences below the table.
        text_columns: Number of columns at the start that are aligned to the left. The others are
            aligned to the right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: int = 1
