"""Parquet and Arrow tables with the images in them, as Hugging Face ``datasets`` writes them, in
one file or several.

``data/train-00000-of-00004.parquet``, ``validation-00000-of-00001.parquet`` and so on, or a folder
of ``save_to_disk``. The image is a column of bytes or of ``{"bytes", "path"}``. Images are read in
place: from an uncompressed Arrow file by their byte range, and from a Parquet file by their row
group. Tables in several files may also name image files.
"""

from __future__ import annotations

import io
import mmap
import os
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
from visavis.data.dataset import ByteRange, require
from visavis.data.file_names import find_split_files, splits_of_files
from visavis.data.formats.image_files import attach_files, containing_folder
from visavis.data.formats.listing import DatasetFormat, Listing
from visavis.data.formats.table_columns import TableColumns

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".arrow")
# Row groups that are kept in memory.
CACHED_BYTES = 2**28
# Larger row groups make random access slow, because each image reads its whole group.
_LARGE_GROUP_BYTES = 2**25
# Repeated paths of which the bytes are compared, to see whether rows of the same path are the same
# image.
_MAX_COMPARED_PATHS = 20


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
        """Open the bytes as a file. The row group stays in memory for the next images.

        Args:
            limit: Not used.

        Yields:
            The file.

        Raises:
            DataError: If the table cannot be read now, or lies outside ``root``.
        """
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
    """Return whether a table has a column with images, by its schema.

    Args:
        path: Parquet or Arrow file.

    Returns:
        Whether it has. False for a file that cannot be read, which ``open_table`` reports.
    """
    try:
        with storage.open_file(path) as file:
            return (
                TableColumns.of_schema(_TableFile(path, file).schema, str(path)).image is not None
            )
    except DataError:
        return False


def list_image_tables(source: Path) -> Listing:
    """List the images and captions of a table, or of all tables of a folder.

    Args:
        source: The file, or a folder with tables, with a folder ``data`` of tables, or of
            ``save_to_disk``.

    Returns:
        The listing. Rows of the same name are captions of one image.

    Raises:
        DataError: If a file cannot be read, or a column is missing.
    """
    folder = source if os.path.isdir(source) else source.parent
    # Tables that `datasets` has cached are not a part of the data set.
    files = (
        [path for path in find_split_files(folder, SUFFIXES) if not path.name.startswith("cache-")]
        if folder == source
        else [source]
    )
    listing = Listing(source, folder=folder)
    rows = list[_Row]()
    for file, split in splits_of_files(files, folder).items():
        rows += _read_rows(
            listing, file, split, containing_folder(folder), file.relative_to(folder).as_posix()
        )
    # Names need all rows: a path that repeats with other bytes names no image.
    _check_paths(listing, rows)
    for row in rows:
        is_new = row.name not in listing.by_name
        image = listing.add_row(row.name, row.captions, row.split, row.location)
        if image is None or not is_new:
            continue
        image.location = row.image
        if row.has_bytes and row.image is None:
            image.file = row.path
            if not row.path:
                message = "the row has no bytes of an image"
                listing.add_loss("missing image", row.location, message, image)
    # Only tables that name files need a search of the folder.
    if any(image.usable and image.location is None for image in listing.images):
        attach_files(listing, folder, may_lack_pixels=False)
    return listing


@dataclass
class _Row:
    """A row of a table: its name, the path of its struct, and its image as bytes or file."""

    location: str
    row_name: str
    name: str | None
    path: str | None
    captions: list[str]
    split: str | None
    image: ByteRange | None
    has_bytes: bool


def _read_rows(
    listing: Listing, path: Path, file_split: str | None, root: Path, file: str
) -> Iterator[_Row]:
    """Yield the rows of a file, without the bytes of its images."""
    with storage.open_file(path, root) as opened:
        table = _TableFile(path, opened)
        first_row = 0
        num_large_groups = 0
        columns = TableColumns.of_schema(table.schema, str(path))
        image = columns.image
        is_struct = image is not None and table.pa.types.is_struct(table.schema.field(image).type)
        has_path = is_struct and table.schema.field(image).type.get_field_index("path") >= 0
        names = [
            name
            for name in (
                *columns.captions,
                columns.file,
                columns.split,
                f"{image}.path" if has_path else None,
            )
            if name
        ]
        for number in range(table.num_groups):
            group = table.read_group(number, list(dict.fromkeys(names)))
            locations = (
                [None] * len(group)
                if image is None
                else table.locations(number, image, first_row, root)
            )
            require(
                len(locations) == len(group),
                f"{path} cannot be read as a table: row group {number} has columns of "
                "different lengths. Copy the file again.",
            )
            struct_paths = (
                table.pa.compute.struct_field(group.column(image), "path").to_pylist()
                if has_path
                else [None] * len(group)
            )
            values = {
                name: group.column(name).to_pylist() for name in names if name in group.column_names
            }
            num_bytes = sum(
                location.size or 0 for location in locations if isinstance(location, EmbeddedImage)
            )
            num_large_groups += num_bytes > _LARGE_GROUP_BYTES
            for row, (location, struct_path) in enumerate(
                zip(locations, struct_paths, strict=True)
            ):
                row_number = first_row + row + 1
                row_location = f"{file}, row {row_number}"
                row_name = f"{os.path.splitext(file)[0]}/{row_number}"
                # A column that the table lacks has no name and no cell.
                cells: dict[str | None, Any] = {
                    name: column[row] for name, column in values.items()
                }
                try:
                    parsed = columns.parse_row(
                        cells.get(columns.file),
                        [cells[name] for name in columns.captions],
                        cells.get(columns.split),
                    )
                except DataError as error:
                    listing.add_loss("malformed line", row_location, str(error))
                    continue
                struct_path = struct_path if isinstance(struct_path, str) else None
                yield _Row(
                    row_location,
                    row_name,
                    parsed.name,
                    struct_path,
                    parsed.captions,
                    parsed.split or file_split,
                    location,
                    image is not None,
                )
            first_row += len(group)
        if num_large_groups:
            size = f"more than {_LARGE_GROUP_BYTES >> 20} MiB"
            message = f"{num_large_groups} row groups have {size}. A random image reads a whole group. Write groups of 100 rows"
            listing.add_note("large row group", file, message)


def _check_paths(listing: Listing, rows: list[_Row]) -> None:
    """Name images without a name by the path of their struct, unless different images have the same
    path, such as ``image.jpg``.
    """
    unnamed = [row for row in rows if row.name is None and row.has_bytes]
    first_row_of: dict[str, _Row] = {}
    repeated: dict[str, _Row] = {}
    for row in unnamed:
        is_first = not row.path or first_row_of.setdefault(row.path, row) is row
        if row.path and not is_first and len(repeated) < _MAX_COMPARED_PATHS:
            repeated.setdefault(row.path, row)
    names_images = True
    for path, row in repeated.items():
        first = first_row_of[path]
        if first.image and row.image and first.image.read() != row.image.read():
            message = f"{path} is the path of different images, so each row is an image of its own. Add a column filename"
            listing.add_note("repeated path", row.location, message)
            names_images = False
            break
    for row in unnamed:
        row.name = row.path if row.path and names_images else row.row_name


IMAGE_TABLES = DatasetFormat(
    name="image tables",
    description="Parquet or Arrow tables with images in them (Hugging Face datasets), with the split in the file name or in a column",
    patterns=(
        *(
            f"{folder}*{suffix}"
            for suffix in SUFFIXES
            for folder in ("", "data/", "train/", "test/", "data/train/")
        ),
        "dataset_dict.json",
    ),
    suffixes=SUFFIXES,
    read=list_image_tables,
    image_files="none",
    reads_several_files=True,
    fallback_level=2,
)
