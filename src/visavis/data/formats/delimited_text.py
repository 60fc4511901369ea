"""Tables as delimiter-separated text: the only reader of captions, attributes, ratings and
judgments in such files.

It reads what spreadsheets, pandas, R and published data sets write: UTF-8 and UTF-16, comma,
semicolon, tab, ``|`` and R's space, a first line ``sep=;``, quotes that are doubled or escaped by a
backslash, spaces after delimiters, empty rows, row names without a header, and
``name.jpg#0<TAB>caption`` without a header.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.formats.listing import escape_surrogates
from visavis.data.formats.table_columns import normalize_column

# Maximum length of the first lines.
_MAX_HEADER_BYTES = 2**16
_DELIMITERS = (",", "\t", ";", "|")
# R's write.table separates quoted names by spaces.
_R_HEADER = re.compile(r'"[^"]*"(?: "[^"]*")+\s*')
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)
# A line of results_20130124.token or Flickr8k.token.txt. The number counts the captions of an
# image.
_NUMBERED_LINE = re.compile(r"[^\t]+#\d+\t.*", re.DOTALL)
NAME_NUMBER = re.compile(r"#\d+$")
_BACKSLASHES_BEFORE_QUOTE = re.compile(r'(\\+)"')


@dataclass(frozen=True)
class TableLayout:
    """Layout of a table, as its first lines show it.

    Attributes:
        delimiter: One character.
        columns: Names of the columns as written, without surrounding spaces. "": no name.
        num_lines: Number of lines before the first row.
        has_quotes: Whether cells may be in double quotes.
        has_spaces: Whether spaces follow the delimiters.
        has_escapes: Whether quotes in cells are escaped by a backslash, and not doubled.
        has_numbered_names: Whether names of images end with the number of their caption, such as
            ``#0``.
    """

    delimiter: str
    columns: tuple[str, ...]
    num_lines: int
    has_quotes: bool = True
    has_spaces: bool = False
    has_escapes: bool = False
    has_numbered_names: bool = False

    @property
    def header(self) -> list[str]:
        """Names of the columns in lower case, with underscores for spaces."""
        return [normalize_column(name) for name in self.columns]

    @classmethod
    def find(cls, text: str, path: object, names: Collection[str], expected: str) -> TableLayout:
        """Find the layout of a table.

        Args:
            text: The table, or its first lines.
            path: The file, for the error.
            names: Column names in lower case. The header has one of them.
            expected: Description of the header, for the error.

        Returns:
            The layout.

        Raises:
            DataError: If there is no such header.
        """
        stream = io.StringIO(text, newline="")
        first, num_lines, delimiters = stream.readline(), 1, list(_DELIMITERS)
        while first and not first.strip():
            first, num_lines = stream.readline(), num_lines + 1
        if separator := _SEPARATOR_LINE.fullmatch(first):
            delimiters = [separator[1]]
            first, num_lines = stream.readline(), num_lines + 1
        if _R_HEADER.fullmatch(first):
            delimiters.append(" ")
        for delimiter in delimiters:
            columns = tuple(name.strip().strip("\"'").strip() for name in first.split(delimiter))
            if len(columns) > 1 and {normalize_column(name) for name in columns} & set(names):
                rows = stream.read(_MAX_HEADER_BYTES)
                quote_after_space = re.compile(
                    rf'[^"{re.escape(delimiter)}]*{re.escape(delimiter)} +"'
                )
                has_spaces = delimiter != " " and (
                    f"{delimiter} " in first.strip() or quote_after_space.match(rows) is not None
                )
                # As in results.csv of Flickr30k.
                layout = cls(
                    delimiter,
                    columns,
                    num_lines,
                    has_quotes=not (has_spaces and delimiter == "|"),
                    has_spaces=has_spaces,
                )
                return (
                    replace(layout, columns=("", *columns))
                    if layout._has_row_names(rows)
                    else layout
                )
        if _NUMBERED_LINE.fullmatch(first) and "filename" in names:
            return cls(
                "\t",
                ("filename", "caption"),
                num_lines - 1,
                has_quotes=False,
                has_numbered_names=True,
            )
        raise DataError(
            f"{path}: expected a header with {expected}, got {escape_surrogates(first)!r:.80}. "
            f"Add a header line, or rename a column to {expected.split(maxsplit=1)[0]}."
        )

    def _has_row_names(self, text: str) -> bool:
        """Whether the first rows begin with numbers that have no column, as R writes them."""
        rows = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=self.delimiter,
            skipinitialspace=self.has_spaces,
        )
        try:
            first_rows = [row for row, _ in zip(rows, range(2), strict=False)]
        except csv.Error:
            return False
        expected = [
            (str(number), len(self.columns) + 1) for number in range(1, len(first_rows) + 1)
        ]
        return bool(first_rows) and [(row[0], len(row)) for row in first_rows if row] == expected


@dataclass(frozen=True)
class Table:
    """A table that was read.

    Attributes:
        layout: Its layout.
        rows: Number of the first line and cells of each row that is not empty.
        malformed: Line, kind and problem of each row that cannot be read.
    """

    layout: TableLayout
    rows: list[tuple[int, list[str]]]
    malformed: list[tuple[int, str, str]]

    def require_rows(self, path: object) -> list[tuple[int, dict[str, str]]]:
        """Return the rows by column, for tables of which every row is needed.

        Args:
            path: The file, for the error.

        Returns:
            Line and cells of each row. Columns without a name are left out.

        Raises:
            DataError: If a row cannot be read.
        """
        for line, _, problem in self.malformed:
            raise DataError(f"{path}: line {line}: {problem}.")
        return [
            (
                line,
                {name: cell for name, cell in zip(self.layout.columns, row, strict=True) if name},
            )
            for line, row in self.rows
        ]


def parse_table(
    text: str, path: object, names: Collection[str], expected: str, *, has_quotes: bool = True
) -> Table:
    """Parse a table.

    If rows are malformed, the quoting that other programs write is tried. The reading with the
    fewest malformed rows is used.

    Args:
        text: The whole table.
        path: The file, for errors.
        names: Column names in lower case. The header has one of them.
        expected: Description of the header, for errors.
        has_quotes: Whether cells may be in double quotes.

    Returns:
        The table.

    Raises:
        DataError: If there is no such header.
    """
    layout = TableLayout.find(text, path, names, expected)
    best: Table | None = None
    for reading in _readings(text, replace(layout, has_quotes=has_quotes and layout.has_quotes)):
        table = _read_rows(text, reading)
        # Without quotes every row can be read. Cells in quotes show that the table has them.
        if (
            best is not None
            and not reading.has_quotes
            and any(
                len(cell) > 1 and cell[0] == cell[-1] == '"'
                for _, row in table.rows
                for cell in row
            )
        ):
            continue
        if best is None or len(table.malformed) < len(best.malformed):
            best = table
        if not best.malformed:
            break
    assert best is not None
    return best


def read_layout(path: Path, names: Collection[str], expected: str) -> tuple[TableLayout, str]:
    """Find the layout of a file by its first lines.

    Args:
        path: The file.
        names: Column names in lower case. The header has one of them.
        expected: Description of the header, for errors.

    Returns:
        The layout, and the codec of the encoding.

    Raises:
        DataError: If the file cannot be read, its first line has no end, or there is no such
            header.
    """
    with storage.open_file(path) as file:
        content = file.read(_MAX_HEADER_BYTES)
    encoding = storage.text_encoding(content)
    text = content.decode(encoding, "replace")
    if not re.search(r"[\r\n]", text):
        raise DataError(
            f"{path}: expected a first line with the names of columns, got {len(content):,} bytes "
            "without an end. Add a header line."
        )
    # The last line is incomplete, and its cells would look malformed.
    if len(content) == _MAX_HEADER_BYTES:
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    return parse_table(text, path, names, expected).layout, encoding


def _readings(text: str, layout: TableLayout) -> Iterator[TableLayout]:
    """Possible layouts of a table, the usual one first."""
    yield layout
    if not layout.has_quotes:
        return
    # Other readings are only tried if the text has their signs.
    if f'{layout.delimiter} "' in text and not layout.has_spaces:
        yield replace(layout, has_spaces=True)
    if '\\"' in text:
        yield replace(layout, has_escapes=True)
    if layout.delimiter in "\t|" and '"' in text:
        yield replace(layout, has_quotes=False)


def _read_rows(text: str, layout: TableLayout) -> Table:
    if layout.has_escapes:
        # Doubled quotes instead of quotes after a backslash. Other backslashes, as in paths of
        # Windows, stay.
        text = _BACKSLASHES_BEFORE_QUOTE.sub(
            lambda match: "\\" * (len(match[1]) // 2) + '"' * (1 + len(match[1]) % 2), text
        )
    stream = io.StringIO(text, newline="")
    table, width = Table(layout, [], []), len(layout.columns)
    for _ in range(layout.num_lines):
        stream.readline()
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if layout.has_quotes else csv.QUOTE_NONE
    reader = csv.reader(
        stream,
        delimiter=layout.delimiter,
        skipinitialspace=layout.has_spaces,
        quoting=quoting,
        strict=True,
    )
    while True:
        line = reader.line_num + layout.num_lines + 1
        try:
            row = next(reader)
        except StopIteration:
            return table
        except csv.Error as error:
            lines = reader.line_num + layout.num_lines + 1 - line
            problem = f"the row that begins here is malformed ({error}), and {lines} lines are skipped. Check its quotes"
            table.malformed.append((line, "malformed line", problem))
            continue
        # Spreadsheets write rows of empty cells.
        if not any(map(str.strip, row)):
            continue
        # Spreadsheets also write empty cells at the end of a row.
        if len(row) > width and not any(map(str.strip, row[width:])):
            row = row[:width]
        if len(row) != width:
            quotes = f"Put texts that contain {layout.delimiter!r} in double quotes"
            fix = quotes if len(row) > width else f"Add the missing {layout.delimiter!r}"
            table.malformed.append(
                (line, "wrong column count", f"expected {width} columns, got {len(row)}. {fix}")
            )
            continue
        table.rows.append((line, row))
