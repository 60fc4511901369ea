"""Base class of results: plain values, tables, and a pandas frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from visavis.core.errors import MissingExtra
from visavis.core.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

MAX_HTML_ROWS = 60


class Result:
    """Base class of results. Every output draws their tables, in a terminal or a notebook.

    Attributes:
        ROWS: Dotted key of the list of rows in ``to_json()``. Empty: the object is one row.
    """

    ROWS: ClassVar[str] = ""

    def to_json(self) -> Mapping[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of ``to_pandas``. Default: from ``to_json``.

        Returns:
            Values by column. Nested objects have dotted columns. Lists of objects are left out.
        """
        content: Any = self.to_json()
        for key in filter(None, self.ROWS.split(".")):
            content = content[key]
        return [flat_record(row) for row in (content if self.ROWS else [content])]

    def tables(self) -> Sequence[Table]:
        """Return the tables to show. Default: one of the records."""
        return [record_table(self.records())]

    def to_pandas(self) -> pd.DataFrame:
        """Convert to a pandas frame.

        Returns:
            One row for each part of the result, such as a setting, a protocol or a hit.

        Raises:
            MissingExtra: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtra("pandas", "notebook", "to_pandas()") from None
        return pd.DataFrame(self.records())

    def _repr_html_(self) -> str:
        title = f"<p><strong>{escape(type(self).__name__)}</strong></p>"
        return title + "".join(map(_notebook_html, self.tables()))


def record_table(records: Sequence[Mapping[str, Any]], images: Sequence[str] = ()) -> Table:
    """Make a table of records."""
    names = list(dict.fromkeys(name for record in records for name in record))
    # A single record is easier to read as names and values.
    if len(records) == 1 and not images:
        columns = (Column(is_text=True), Column(is_text=True))
        return Table(columns, tuple((name, records[0][name]) for name in names))
    rows = [tuple(record.get(name) for name in names) for record in records]
    is_text = [
        any(isinstance(row[index], str | bool) for row in rows) for index in range(len(names))
    ]
    return Table(
        tuple(Column(name, is_text=text) for name, text in zip(names, is_text, strict=True)),
        tuple(rows),
        () if rows else ("No entries.",),
        images=tuple(images),
    )


def flat_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten an object to one record.

    Args:
        values: Plain values, with objects of any depth.

    Returns:
        Values by dotted key. Lists of plain values become one text, other lists are left out.

    Example:
        >>> flat_record({"name": "a", "mean": {"rsum": 297.3}, "seeds": [1, 2], "runs": [{"seed": 1}]})
        {'name': 'a', 'mean.rsum': 297.3, 'seeds': '1, 2'}
    """
    record = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, Mapping):
            record |= {f"{key}.{name}": inner for name, inner in flat_record(value).items()}
        elif not isinstance(value, list | tuple):
            record[str(key)] = value
        elif not any(isinstance(part, Mapping | list | tuple) for part in value):
            record[str(key)] = ", ".join(map(str, value))
    return record


def _notebook_html(table: Table) -> str:
    """A table with its title above and its notes below. Long tables are cut."""
    # Only here, because the command line draws no HTML.
    from visavis.core.table_html import format_html

    notes = [*table.notes]
    if len(table.rows) > MAX_HTML_ROWS:
        notes.append(f"{len(table.rows) - MAX_HTML_ROWS:,} more rows: to_pandas() has all.")
    shown = replace(
        table, rows=table.rows[:MAX_HTML_ROWS], images=table.images[:MAX_HTML_ROWS], notes=()
    )
    return (
        (f"<p>{escape(table.title)}</p>" if table.title else "")
        + (format_html(shown) if table.rows else "")
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )
