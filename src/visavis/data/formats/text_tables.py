"""Tables as text: values between delimiters, and JSON lines.

``parse_table`` is the only reader of captions, attributes, ratings and judgments in
delimiter-separated text. It reads what spreadsheets, pandas, R and published data sets write: UTF-8
and UTF-16, comma, semicolon, tab, ``|`` and R's space, a first line ``sep=;``, quotes that are
doubled or escaped by a backslash, spaces after delimiters, empty rows, row names without a header,
and ``name.jpg#0<TAB>caption`` without a header, as in the published tables of Flickr8k and
Flickr30k.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import require
from visavis.data.file_names import escape_surrogates
from visavis.data.formats.listing import Listing, clean_name, read_list
from visavis.data.formats.published_lists import DuplicateKeyObject, parse_json
from visavis.data.formats.table_columns import (
    FILE_NAMES,
    OTHER_FILE_NAMES,
    TableColumns,
    TableRow,
    normalize_column,
)

ALL_FILE_NAMES = (*FILE_NAMES, *OTHER_FILE_NAMES)
EXPECTED_HEADER = "filename and caption"
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
        """Find the layout of a table by its first lines. The header has one of the names, in lower
        case. ``expected`` describes it for the error.
        """
        stream = io.StringIO(text, newline="")
        first = stream.readline()
        num_lines = 1
        delimiters = list(_DELIMITERS)
        while first and not first.strip():
            first = stream.readline()
            num_lines += 1
        if separator := _SEPARATOR_LINE.fullmatch(first):
            delimiters = [separator[1]]
            first = stream.readline()
            num_lines += 1
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
                reader = csv.reader(
                    io.StringIO(rows, newline=""), delimiter=delimiter, skipinitialspace=has_spaces
                )
                first_rows = list[list[str]]()
                with suppress(csv.Error):
                    first_rows += [row for row, _ in zip(reader, range(2), strict=False)]
                # R writes the numbers of the rows without a column.
                numbered = [(str(i + 1), len(columns) + 1) for i in range(len(first_rows))]
                found = [("".join(row[:1]), len(row)) for row in first_rows]
                has_row_names = found == numbered != []
                return replace(layout, columns=("", *columns)) if has_row_names else layout
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


@dataclass(frozen=True)
class TableContent:
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
        """Return the line and cells of each row, for tables of which every row is needed. Columns
        without a name are left out.
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
) -> TableContent:
    """Parse a whole table. Names and ``expected`` are as for ``TableLayout.find``."""
    layout = TableLayout.find(text, path, names, expected)
    layout = replace(layout, has_quotes=has_quotes and layout.has_quotes)
    # The usual reading first. If it has malformed rows, the quoting that other programs write is
    # tried, if the text has its signs. The reading with the fewest malformed rows is used.
    readings = [layout]
    if layout.has_quotes:
        if f'{layout.delimiter} "' in text and not layout.has_spaces:
            readings.append(replace(layout, has_spaces=True))
        if '\\"' in text:
            readings.append(replace(layout, has_escapes=True))
        if layout.delimiter in "\t|" and '"' in text:
            readings.append(replace(layout, has_quotes=False))
    best: TableContent | None = None
    for reading in readings:
        table = _read_table(text, reading)
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
    """Find the layout of a file and its codec by its first lines."""
    with storage.open_file(path) as file:
        content = file.read(_MAX_HEADER_BYTES)
    encoding = storage.text_encoding(content)
    text = content.decode(encoding, "replace")
    require(
        re.search(r"[\r\n]", text),
        f"{path}: expected a first line with the names of columns, got {len(content):,} bytes "
        "without an end. Add a header line.",
    )
    # The last line is incomplete, and its cells would look malformed.
    if len(content) == _MAX_HEADER_BYTES:
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    return parse_table(text, path, names, expected).layout, encoding


def _read_table(text: str, layout: TableLayout) -> TableContent:
    if layout.has_escapes:
        # Doubled quotes instead of quotes after a backslash. Other backslashes, as in paths of
        # Windows, stay.
        text = _BACKSLASHES_BEFORE_QUOTE.sub(
            lambda match: "\\" * (len(match[1]) // 2) + '"' * (1 + len(match[1]) % 2), text
        )
    stream = io.StringIO(text, newline="")
    table = TableContent(layout, [], [])
    width = len(layout.columns)
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


def is_caption_table(path: Path) -> bool:
    """Whether a file has the columns of a table of captions. Names such as ``results.csv`` are
    common.
    """
    try:
        layout, _ = read_layout(path, ALL_FILE_NAMES, EXPECTED_HEADER)
        TableColumns.of_table(layout.header, path)
    except DataError:
        return False
    return True


def delimited_rows(
    path: Path, folder: Path, table_name: str, listing: Listing
) -> Iterator[TableRow]:
    """Yield the rows of delimiter-separated text, and add its problems to a listing."""
    table = parse_table(read_list(path, folder), path, ALL_FILE_NAMES, EXPECTED_HEADER)
    header = table.layout.header
    columns = TableColumns.of_table(header, path)
    assert columns.file is not None
    file_index = header.index(columns.file)
    # Two columns may have the same name, so they are found by position.
    caption_indices = [index for index, name in enumerate(header) if name in columns.captions]
    split_index = None if columns.split is None else header.index(columns.split)
    used = (file_index, split_index, *caption_indices)
    # A column without a name holds the row names of pandas or R.
    if unread := [
        name
        for i, name in enumerate(table.layout.columns)
        if i not in used and name not in ("", "Unnamed: 0")
    ]:
        listing.add_note(
            "column not read",
            f"{table_name}:{table.layout.num_lines}",
            f"the columns {', '.join(unread)} are not read",
        )
    for line, kind, problem in table.malformed:
        listing.add_loss(kind, f"{table_name}:{line}", problem)
    for line, cells in table.rows:
        name = clean_name(cells[file_index])
        if table.layout.has_numbered_names:
            name = NAME_NUMBER.sub("", name)
        split = None if split_index is None else cells[split_index]
        captions = [cells[index] for index in caption_indices]
        row = columns.parse_row(f"{table_name}:{line}", name, captions, split)
        # A row of empty cells of a spreadsheet.
        if row.name or any(map(str.strip, row.captions)):
            yield row


def json_rows(path: Path, folder: Path, table_name: str, listing: Listing) -> Iterator[TableRow]:
    """Yield the objects of a file with one on each line, and add its problems to a listing."""
    for number, line in enumerate(read_list(path, folder).split("\n"), 1):
        if not line.strip():
            continue
        location = f"{table_name}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            listing.add_loss("malformed line", location, f"the line is not JSON: {error}")
            continue
        if not isinstance(row, dict) or isinstance(row, DuplicateKeyObject):
            expected = "an object with filename and captions" + ", each once" * isinstance(
                row, dict
            )
            listing.add_loss("malformed line", location, f"expected {expected}, got {line:.60}")
            continue
        columns = TableColumns.of_object(tuple(row))
        captions = [row[name] for name in columns.captions]
        try:
            yield columns.parse_row(
                location, row.get(columns.file), captions, row.get(columns.split)
            )
        except DataError as error:
            listing.add_loss("malformed line", location, str(error))
