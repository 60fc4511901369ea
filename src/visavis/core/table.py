"""Tables of results: values, and how each column formats them. Every output draws the same table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Value: TypeAlias = str | float | None
"""A value of a table. None and NaN are missing values."""
SIMILAR_MARK = "†"
"""Mark of values that are not distinguishable from the best of their column."""


@dataclass(frozen=True)
class Cell:
    """A value with its uncertainty, a mark or small print.

    Attributes:
        value: The value.
        spread: Bounds of an interval, or one number such as a standard deviation. Empty: none.
        mark: "best" for the best value of a column, "similar" for one that is not distinguishable
            from it.
        note: Small print. In a row whose first cell has a note, a terminal draws the note and the
            spreads on a second line.
    """

    value: Value = None
    spread: tuple[float, ...] = ()
    mark: Literal["", "best", "similar"] = ""
    note: str = ""


Row: TypeAlias = tuple[Value | Cell, ...]
"""Values or cells of a row. A row of one value is a heading of the rows below it."""


@dataclass(frozen=True)
class Column:
    """A column, with the format of its values.

    Attributes:
        title: Title.
        format: Format specification of numbers, such as ``".1f"``. Default: five digits.
        unit: Text after each number, such as ``" %"``.
        is_text: Whether the column is aligned to the left. Numbers are aligned to the right.
        group: Title that neighboring columns share.
        missing: Text of missing values.
        spread: Template of a spread after its value, such as ``"±{}"``.
        short_format: Format of a spread on a line of its own. Default: ``format``.
        key: Name in CSV. Default: the title.
    """

    title: str = ""
    format: str = ""
    unit: str = ""
    is_text: bool = False
    group: str = ""
    missing: str = ""
    spread: str = " ({}–{})"
    short_format: str = ""
    key: str = ""

    def value_text(self, cell: Cell) -> str:
        """Format the value of a cell.

        Args:
            cell: Cell of the column.

        Returns:
            The text, with the unit.
        """
        value = cell.value
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return self.missing
        if isinstance(value, int | float) and not isinstance(value, bool):
            default = ",.5g" if isinstance(value, float) else ","
            return f"{value:{self.format or default}}{self.unit}"
        return str(value)

    def spread_text(self, cell: Cell, *, short: bool = False) -> str:
        """Format the spread of a cell. Equal bounds of a range become one.

        Args:
            cell: Cell of the column.
            short: Use ``short_format``.

        Returns:
            The text. Empty without a spread.
        """
        if not cell.spread or (isinstance(cell.value, float) and math.isnan(cell.value)):
            return ""
        form = (short and self.short_format) or self.format
        bounds = [f"{bound:{form}}" for bound in cell.spread]
        is_one = len({*bounds}) == 1
        return (self.spread.replace("{}–{}", "{}") if is_one else self.spread).format(*bounds)

    def small_spread(self, cell: Cell, *, short: bool = False) -> str:
        """Format the spread of a cell for small print or a line of its own.

        Args:
            cell: Cell of the column.
            short: Use ``short_format``.

        Returns:
            The text of ``spread_text`` without parentheses.
        """
        return self.spread_text(cell, short=short).strip(" ()")


@dataclass(frozen=True)
class Table:
    """A table of values. Without columns, it is a list of notes.

    Attributes:
        columns: Columns.
        rows: Rows.
        notes: Sentences below the table.
        title: Title. Empty: none.
        last_rows: Rows below a rule, such as reference values.
        images: Address of an image of each row, such as a data URI, which HTML shows. Empty: none.
    """

    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    title: str = ""
    last_rows: tuple[Row, ...] = ()
    images: tuple[str, ...] = ()


def as_cells(row: Row) -> list[Cell]:
    """Wrap the values of a row."""
    return [value if isinstance(value, Cell) else Cell(value) for value in row]
