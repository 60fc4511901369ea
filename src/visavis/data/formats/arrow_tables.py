"""Tables that ``pyarrow`` reads: Parquet and Arrow files, which may have images in them, and large
tables of any kind in record batches.

An image is a value of bytes or of ``{"bytes", "path"}``, as Hugging Face ``datasets`` writes it.
Images are read in place: from an uncompressed Arrow file by their byte range, and from a Parquet
file by their row group.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.columns import import_pyarrow
from visavis.data.dataset import require
from visavis.data.formats.image_files import containing_folder
from visavis.data.formats.listing import Listing
from visavis.data.formats.table_columns import TableColumns, TableRow
from visavis.data.formats.text_tables import (
    ALL_FILE_NAMES,
    EXPECTED_HEADER,
    TableLayout,
    read_layout,
)
from visavis.data.image_file import ByteRange

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_SUFFIXES = (".parquet", ".arrow")
# Row groups that are kept in memory.
CACHED_BYTES = 2**28
# Larger row groups make random access slow, because each image reads its whole group.
_LARGE_GROUP_BYTES = 2**25
# Bytes of a text file that are searched for quotes at once.
_SEARCHED_BYTES = 2**24
# Suffixes of delimiter-separated text.
_TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".token")


@dataclass(frozen=True)
class EmbeddedImage(ByteRange):
    """An image in a row of a table. ``offset`` is its row in the file, and ``size`` the mean size
    of the images of its row group.

    Attributes:
        column: Column of the image.
        group: Row group of a Parquet file, or record batch of an Arrow file.
        row: Row in the group.
    """

    column: str = ""
    group: int = 0
    row: int = 0

    @contextmanager
    def open(self, limit: int | None = None) -> Iterator[io.BytesIO]:
        """Open the bytes as a file. The row group stays in memory for the next images."""
        try:
            content = _GROUPS.read(self)[self.row].as_py()
        except (IndexError, KeyError):
            content = None
        if content is None:
            raise DataError(
                f"{self.path}, row {self.offset + 1}: expected the bytes of an image, got none. "
                "The file has changed: start again."
            )
        yield io.BytesIO(content)


class _GroupCache:
    """Image columns of the row groups that were used last."""

    def __init__(self) -> None:
        self.columns = OrderedDict[tuple[Any, ...], Any]()
        self.lock = threading.Lock()
        self.num_bytes = 0

    def read(self, image: EmbeddedImage) -> pa.ChunkedArray:
        """Return the bytes of all images of a row group."""
        with storage.open_file(image.path, image.root) as file:
            status = os.fstat(file.fileno())
            # The identity of the opened file: a path may lead to another file now.
            identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
            key = (*identity, image.column, image.group)
            with self.lock:
                column = self.columns.pop(key, None)
                if column is None:
                    group = _TableFile(image.path, file).read_group(image.group, [image.column])
                    column = _image_bytes(group.column(image.column))
                    self.num_bytes += column.nbytes
                self.columns[key] = column
                while len(self.columns) > 1 and self.num_bytes > CACHED_BYTES:
                    self.num_bytes -= self.columns.popitem(last=False)[1].nbytes
        return column


_GROUPS = _GroupCache()


class _TableFile:
    """An open Parquet or Arrow file.

    Args:
        path: The file, for errors.
        file: The open file.

    Attributes:
        schema: Names and types of the columns.
        num_groups: Number of row groups or record batches.
    """

    def __init__(self, path: Path, file: Any):
        self.pa = import_pyarrow()
        self.path = path
        self.parquet: Any = None
        with self._errors():
            if path.suffix == ".parquet":
                self.parquet = self.pa.parquet.ParquetFile(file)
                self.schema = self.parquet.schema_arrow
                self.num_groups = self.parquet.num_row_groups
            else:
                # The opened file is mapped and not its path, which may have been replaced by a link
                # to another place.
                self.buffer = self.pa.py_buffer(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                )
                try:
                    reader = self.pa.ipc.open_file(self.buffer)
                    # A batch of a compressed file is decompressed when it is read.
                    self.num_groups = reader.num_record_batches
                    self._read_batch = reader.get_batch
                except self.pa.ArrowInvalid:
                    # `save_to_disk` writes the format of streams.
                    reader = self.pa.ipc.open_stream(self.buffer)
                    batches = list(reader)
                    self.num_groups = len(batches)
                    self._read_batch = batches.__getitem__
                self.schema = reader.schema
            # PyArrow decodes names when they are read. Names that are not UTF-8 raise the error
            # here.
            _field_names(self.schema)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self.pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be read as a table: {storage.error_reason(error)}. Copy the "
                "file again."
            ) from None

    def read_group(self, number: int, columns: list[str]) -> pa.Table:
        """Read columns of a row group. A column may be ``COLUMN.FIELD``."""
        with self._errors():
            if self.parquet is not None:
                # The caller has threads of its own.
                table = self.parquet.read_row_group(number, columns=columns, use_threads=False)
            else:
                names = dict.fromkeys(
                    column if column in self.schema.names else column.rpartition(".")[0]
                    for column in columns
                )
                batch = self.pa.Table.from_batches([self._read_batch(number)], schema=self.schema)
                table = batch.select(list(names))
            # Damaged offsets would be read outside the file.
            table.validate(full=True)
            return table

    def locations(
        self, number: int, column: str, first_row: int, root: Path
    ) -> list[ByteRange | None]:
        """Locations of the images of a row group. None: a row has no bytes."""
        with self._errors():
            if self.parquet is None:
                content = _image_bytes(self.read_group(number, [column]).column(column)).chunk(0)
                ranges = self._byte_ranges(content, root)
                if ranges is not None:
                    return ranges
                size = content.nbytes
                has_bytes = content.is_valid().to_pylist()
            else:
                group = self.parquet.metadata.row_group(number)
                chunks = (group.column(position) for position in range(group.num_columns))
                chunk = next(
                    (
                        chunk
                        for chunk in chunks
                        if chunk.path_in_schema in (column, f"{column}.bytes")
                    ),
                    None,
                )
                if chunk is None:
                    raise ValueError(f"row group {number} has no column {column}")
                size = chunk.total_uncompressed_size
                has_bytes = [True] * group.num_rows
                # The statistics show whether each row has bytes. Without them, the column is read.
                statistics = chunk.statistics
                if statistics is None or not statistics.has_null_count or statistics.null_count:
                    has_bytes = (
                        _image_bytes(self.read_group(number, [column]).column(column))
                        .is_valid()
                        .to_pylist()
                    )
        mean_size = size // max(1, len(has_bytes))
        return [
            EmbeddedImage(self.path, first_row + row, mean_size, root, column, number, row)
            if valid
            else None
            for row, valid in enumerate(has_bytes)
        ]

    def _byte_ranges(self, content: pa.Array, root: Path) -> list[ByteRange | None] | None:
        """Byte ranges in the file of an array of bytes. None if the array is compressed."""
        _, offsets_buffer, bytes_buffer = content.buffers()
        if (
            bytes_buffer is None
            or not self.buffer.address
            <= bytes_buffer.address
            < self.buffer.address + self.buffer.size
        ):
            return None
        kind = np.int64 if self.pa.types.is_large_binary(content.type) else np.int32
        # A slice of a batch shares the buffers of the whole batch.
        offsets = np.frombuffer(
            offsets_buffer, kind, len(content) + 1, content.offset * np.dtype(kind).itemsize
        ).astype(np.int64)
        # The file is mapped, so an address in memory is a position in the file.
        start = bytes_buffer.address - self.buffer.address
        return [
            ByteRange(self.path, start + first, last - first, root) if valid else None
            for first, last, valid in zip(
                offsets[:-1].tolist(),
                offsets[1:].tolist(),
                content.is_valid().to_pylist(),
                strict=True,
            )
        ]


def _field_names(fields: Iterable[Any]) -> list[str]:
    """The names of fields and of their fields."""
    fields = list(fields)
    nested = [
        field.type.field(number) for field in fields for number in range(field.type.num_fields)
    ]
    return [*(field.name for field in fields), *_field_names(nested)] if fields else []


def _image_bytes(column: Any) -> Any:
    """The bytes of a column of images."""
    pa = import_pyarrow()
    return pa.compute.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column


def has_embedded_images(path: Path) -> bool:
    """Return whether a table has a column with images, by its schema."""
    try:
        with storage.open_file(path) as file:
            return (
                TableColumns.of_schema(_TableFile(path, file).schema, str(path)).image is not None
            )
    except DataError:
        return False


def arrow_rows(path: Path, folder: Path, table_name: str, listing: Listing) -> Iterator[TableRow]:
    """Yield the rows of a Parquet or Arrow file without the bytes of its images, and add its
    problems to a listing.
    """
    root = containing_folder(folder)
    with storage.open_file(path, root) as opened:
        table = _TableFile(path, opened)
        first_row = 0
        num_large_groups = 0
        columns = TableColumns.of_schema(table.schema, str(path))
        image = columns.image
        is_struct = image is not None and table.pa.types.is_struct(table.schema.field(image).type)
        has_path = is_struct and table.schema.field(image).type.get_field_index("path") >= 0
        path_column = f"{image}.path" if has_path else None
        used = (*columns.captions, columns.file, columns.split, path_column)
        names = list(dict.fromkeys(filter(None, used)))
        for number in range(table.num_groups):
            group = table.read_group(number, names)
            missing: list[Any] = [None] * len(group)
            images = missing if image is None else table.locations(number, image, first_row, root)
            require(
                len(images) == len(group),
                f"{path} cannot be read as a table: row group {number} has columns of "
                "different lengths. Copy the file again.",
            )
            paths = (
                table.pa.compute.struct_field(group.column(image), "path").to_pylist()
                if has_path
                else missing
            )
            files, splits = (
                missing if column is None else group.column(column).to_pylist()
                for column in (columns.file, columns.split)
            )
            captions = zip(
                *(group.column(column).to_pylist() for column in columns.captions), strict=True
            )
            num_bytes = sum(
                location.size or 0 for location in images if isinstance(location, EmbeddedImage)
            )
            num_large_groups += num_bytes > _LARGE_GROUP_BYTES
            values = zip(files, captions, splits, images, paths, strict=True)
            for row_number, (file, texts, split, location, struct_path) in enumerate(
                values, first_row + 1
            ):
                row_location = f"{table_name}, row {row_number}"
                try:
                    row = columns.parse_row(row_location, file, texts, split)
                except DataError as error:
                    listing.add_loss("malformed line", row_location, str(error))
                    continue
                if image is not None:
                    row.image = location
                    row.path = struct_path if isinstance(struct_path, str) else None
                    row.default_name = f"{os.path.splitext(table_name)[0]}/{row_number}"
                yield row
            first_row += len(group)
        if num_large_groups:
            size = f"more than {_LARGE_GROUP_BYTES >> 20} MiB"
            message = f"{num_large_groups} row groups have {size}. A random image reads a whole group. Write groups of 100 rows"
            listing.add_note("large row group", table_name, message)


class TableScan:
    """Record batches of a table of any size, read in several threads.

    Args:
        path: Delimiter-separated text, Parquet or Arrow file.

    Attributes:
        layout: Layout of a text file. None: a Parquet or Arrow file.
        columns: Columns of the images, captions and split.
    """

    def __init__(self, path: Path):
        self.path = path
        self.pa = import_pyarrow()
        self.layout: TableLayout | None = None
        if path.suffix == ".parquet":
            file_format = self.pa.dataset.ParquetFileFormat()
        elif path.suffix not in _TEXT_SUFFIXES:
            file_format = self.pa.dataset.IpcFileFormat()
        else:
            layout, encoding = read_layout(path, ALL_FILE_NAMES, EXPECTED_HEADER)
            self.layout = layout
            _check_quotes(path, layout, encoding)
            # Names are unique in Arrow.
            header = [name or f"unnamed {number}" for number, name in enumerate(layout.header)]
            file_format = self.pa.dataset.CsvFileFormat(
                parse_options=self.pa.csv.ParseOptions(
                    delimiter=layout.delimiter,
                    quote_char='"' if layout.has_quotes else False,
                    newlines_in_values=layout.has_quotes,
                ),
                read_options=self.pa.csv.ReadOptions(
                    column_names=header,
                    skip_rows=layout.num_lines,
                    # Arrow removes a byte order mark of UTF-8.
                    encoding="utf8" if encoding == "utf-8-sig" else encoding,
                ),
                # A caption in a text file is never null.
                convert_options=self.pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(header, self.pa.string()),
                    strings_can_be_null=False,
                ),
            )
        with self._errors():
            names = file_format.inspect(str(path), self.pa.fs.LocalFileSystem()).names
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise DataError(
                    f"{path}: expected one column {repeated}, got {names.count(repeated)}. Rename "
                    "the others."
                )
            self._table = self.pa.dataset.dataset(path, format=file_format)
        self.columns = TableColumns.of_table(names, path)

    def batches(self, columns: list[str], num_rows: int) -> Iterator[tuple[int, Any]]:
        """Yield columns of the table in batches of up to ``num_rows``, with the number of rows
        before each.
        """
        first_row = 0
        with self._errors():
            for batch in self._table.to_batches(
                columns=columns, batch_size=num_rows, use_threads=True
            ):
                yield first_row, batch
                first_row += len(batch)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self.pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            fix = "Copy the file again."
            if isinstance(error, UnicodeDecodeError):
                fix = "Save it as UTF-8."
            elif self.layout is not None:
                fix = f"Correct this row. Texts that contain {self.layout.delimiter!r} or line breaks need double quotes."
            raise DataError(
                f"{self.path} cannot be read as a table: {storage.error_reason(error)}. {fix}"
            ) from None


def _check_quotes(path: Path, layout: TableLayout, encoding: str) -> None:
    r"""Refuse quotes that Arrow reads in another way than ``csv``: after spaces, or escaped by a
    backslash.
    """
    if not layout.has_quotes:
        return
    # Each sign, the letters that may follow it, and its name. A quote between a backslash and an
    # ordinary character, as in `"a \"big\" dog"`, is never part of a cell with doubled quotes.
    signs = {'\\"': (f'"{layout.delimiter}\r\n', "quotes that are escaped by a backslash")}
    if layout.has_spaces:
        signs[f'{layout.delimiter} "'] = ("", "quotes after a space")
    codec = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(
        encoding, encoding
    )
    width = len("x".encode(codec))
    num_lines = 0
    content = b""
    with storage.open_file(path) as file:
        while block := file.read(_SEARCHED_BYTES):
            # A sign with the letter after it may be in two blocks.
            num_lines += content[: -4 * width].count(b"\n")
            content = content[-4 * width :] + block
            for sign, (allowed, problem) in signs.items():
                if sign.encode(codec) not in content:
                    continue
                ends = b"|".join(re.escape(letter.encode(codec)) for letter in allowed)
                expression = (
                    re.escape(sign.encode(codec))
                    + (b"(?!" + ends + b")" if ends else b"")
                    + b"." * width
                )
                if found := re.search(expression, content, re.DOTALL):
                    line = num_lines + content[: found.start()].count(b"\n") + 1
                    raise DataError(
                        f"{path}, line {line:,}: expected doubled quotes, got {problem}, which a "
                        "table of this size cannot have. "
                        "Write it with doubled quotes, or as captions.parquet."
                    )
