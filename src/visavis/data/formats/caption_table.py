"""Your own images with a table ``captions.jsonl``, ``captions.csv`` or ``captions.tsv`` that describes them.

A JSON line is ``{"filename": ..., "captions": [...]}`` or ``{"filename": ..., "caption": ...}``, repeated for more captions.
A table has a header: ``filename,caption`` with a row per caption, or ``filename,caption,caption_2,...``. Both may have
``split``. Without it, images are assigned 80/10/10 to train, val and test by a hash of their names, so that new images never
change the split of others. ``file_name``, ``image`` (file) and ``text``, ``title``, ``sentence`` (caption) are accepted, too.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.formats.json_lists import DuplicateKeyObject, parse_json
from visavis.data.formats.listing import (
    DatasetFormat,
    Listing,
    decode_utf8,
    escape_surrogates,
    shorten,
)
from visavis.data.formats.table_columns import (
    CAPTION_NAMES,
    FILE_NAMES,
    OTHER_FILE_NAMES,
    find_caption_columns,
    find_file_column,
    named_columns,
)
from visavis.data.splits import normalize_split_name, split_in_name, splits_of_files
from visavis.errors import DataError

CSV_SUFFIXES = (".csv", ".tsv")
# Columns of a CSV file whose cells may be lists, as in the annotations of Flickr30k on the Hugging Face Hub.
LIST_NAMES = ("captions", "sentences", "texts", "raw")
# Line number, file name, captions, split.
CaptionRow = tuple[int, str | None, list[str], str | None]


def list_captions(path: Path, read_rows: Callable[[str, Path, Listing], Iterator[CaptionRow]]) -> Listing:
    """List the images and captions of a table, images in order of first mention.

    Args:
        path: The file.
        read_rows: Reads the rows of the text, and adds problems to the listing.

    Returns:
        The listing.
    """
    listing = Listing(path)
    _add_rows(listing, path, None, read_rows)
    return listing


def list_split_tables(folder: Path) -> Listing:
    """List the images and captions of ``train.csv``, ``val.csv`` and ``test.csv``, or of ``train/metadata.csv`` and so on.

    Args:
        folder: The folder.

    Returns:
        The listing.
    """
    listing, readers = Listing(folder), {".csv": _table_rows, ".tsv": _table_rows, ".jsonl": _json_rows}
    patterns = [pattern for suffix in readers for pattern in (f"*{suffix}", f"*/metadata{suffix}")]
    tables = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if os.path.isfile(path)]
    files = [path for path in tables if split_in_name(path.relative_to(folder))]
    for path, split in splits_of_files(files, folder).items():
        _add_rows(listing, path, split, readers[path.suffix])
    return listing


def _add_rows(
    listing: Listing, path: Path, file_split: str | None, read_rows: Callable[[str, Path, Listing], Iterator[CaptionRow]]
) -> None:
    folder, table_name = listing.source if os.path.isdir(listing.source) else path.parent, _table_name(listing, path)
    for line, file, captions, split in read_rows(decode_utf8(storage.read_bytes(path, folder)), path, listing):
        # As in the folders of images of Hugging Face `datasets`, files are relative to their table.
        if file and path.parent != folder:
            file = f"{path.parent.name}/{file}"
        listing.add_row(file, captions, split or file_split, f"{table_name}:{line}")


def _table_name(listing: Listing, path: Path) -> str:
    """Name of a table in findings. Tables of several folders may have the same name."""
    return path.relative_to(listing.source).as_posix() if os.path.isdir(listing.source) else path.name


def _json_rows(text: str, path: Path, listing: Listing) -> Iterator[CaptionRow]:
    table_name = _table_name(listing, path)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        location = f"{table_name}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            listing.add_loss("malformed line", location, f"the line is not JSON: {error}")
            continue
        if not isinstance(row, dict) or isinstance(row, DuplicateKeyObject):
            expected = "an object with filename and captions" + ", each once" * isinstance(row, dict)
            listing.add_loss("malformed line", location, f"expected {expected}, got {line:.60}")
            continue
        file = next((row[name] for name in named_columns(row, FILE_NAMES, OTHER_FILE_NAMES)), None)
        captions: Any = next((row[name] for name in CAPTION_NAMES if name in row), [])
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            listing.add_loss("malformed line", location, "the captions are neither a text nor a list of texts")
        elif not isinstance(row.get("split", ""), str | None):
            listing.add_loss("malformed line", location, f"split: expected a text, got {shorten(row['split'])}")
        else:
            yield number, file if isinstance(file, str) else None, captions, normalize_split_name(row.get("split"))


def _table_rows(text: str, path: Path, listing: Listing) -> Iterator[CaptionRow]:
    table_name = _table_name(listing, path)
    first, _, body = text.partition("\n")
    delimiter, header = parse_header(escape_surrogates(first), path)
    file_column, caption_names = header.index(find_file_column(header, path)), find_caption_columns(header, path)
    caption_columns = [index for index, name in enumerate(header) if name in caption_names]
    split_column = header.index("split") if "split" in header else None
    if unread := [name for i, name in enumerate(header) if i not in (file_column, split_column, *caption_columns)]:
        listing.add_note("column not read", f"{table_name}:1", f"the columns {', '.join(unread)} are not read")
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 2
        location = f"{table_name}:{line}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            message = (
                f"the row that begins here is malformed ({error}), and {reader.line_num - line + 2} lines are skipped. Check its quotes"
            )
            listing.add_loss("malformed line", location, message)
            continue
        if not row:
            continue
        if len(row) != len(header):
            message = f"expected {len(header)} columns, got {len(row)}. Put captions that contain {delimiter!r} in double quotes"
            listing.add_loss("wrong column count", location, message)
            continue
        captions = [caption for column in caption_columns for caption in parse_cell(header[column], row[column])]
        while len(captions) > 1 and not captions[-1]:
            captions.pop()
        yield line, row[file_column], captions, normalize_split_name(row[split_column]) if split_column is not None else None


def parse_cell(name: str, cell: str) -> list[str]:
    """Read the captions of a cell of a CSV file: a text, or a JSON list of texts in one of ``LIST_NAMES``.

    Args:
        name: Name of the column.
        cell: The cell.

    Returns:
        The captions.
    """
    if name in LIST_NAMES and cell.startswith("["):
        try:
            captions = json.loads(cell)
        except (ValueError, RecursionError):
            return [cell]
        if captions and all(isinstance(caption, str) for caption in captions):
            return list(captions)
    return [cell]


def parse_header(first: str, path: Path) -> tuple[str, list[str]]:
    """Read the first line of a CSV file. The delimiter is recognized by a column for the file.

    Args:
        first: The line.
        path: The file, for the error.

    Returns:
        The delimiter, and the names of the columns in lower case.

    Raises:
        DataError: If no column names the file.
    """
    for delimiter in (",", "\t", ";"):
        header = [name.strip().strip('"').lower() for name in first.split(delimiter)]
        if set(header) & {*FILE_NAMES, *OTHER_FILE_NAMES} and len(header) > 1:
            return delimiter, header
    raise DataError(f"{path}: expected a header with filename and caption, got {first!r:.80}. Add a header line.")


CAPTION_TABLE = DatasetFormat(
    name="captions.csv",
    description="captions.csv or captions.tsv next to the images (a header filename,caption, then one row per caption)",
    patterns=("captions.csv", "captions.tsv", "metadata.csv"),
    suffixes=(".csv", ".tsv"),
    read=partial(list_captions, read_rows=_table_rows),
    image_files="required",
)
CAPTION_LINES = DatasetFormat(
    name="captions.jsonl",
    description='captions.jsonl next to the images (one line {"filename": ..., "captions": [...]} per image)',
    patterns=("captions.jsonl", "metadata.jsonl"),
    suffixes=(".jsonl",),
    read=partial(list_captions, read_rows=_json_rows),
    image_files="required",
)
SPLIT_TABLES = DatasetFormat(
    name="train.csv",
    description="train.csv, val.csv and test.csv (or .tsv, .jsonl, train/metadata.csv) next to the images, with the columns of captions.csv",
    patterns=("train*.csv", "train*.tsv", "train*.jsonl", "train/metadata.csv", "train/metadata.jsonl"),
    suffixes=(),
    read=list_split_tables,
    image_files="required",
    reads_whole_folder=True,
    is_fallback=True,
)
