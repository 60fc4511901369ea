"""A folder of one's own: images and a table ``captions.jsonl``, ``captions.csv`` or ``captions.tsv`` that describes them.

A JSON line is ``{"filename": ..., "captions": [...]}`` or ``{"filename": ..., "caption": ...}``, repeated for more captions.
A table has a header: ``filename,caption`` with a row per caption, or ``filename,caption,caption_2,...``. Both may have
``split``; without it, images are assigned 80/10/10 to train, val and test by a hash of their names, so that new images never
change the split of old ones. ``file_name``, ``image`` (file) and ``text``, ``title``, ``sentence`` (caption) are understood, too.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.archives import attach_files
from visavis.data.layout import Layout
from visavis.data.listing import Entry, Listing, split_name
from visavis.data.source_text import RepeatedKey, decode, parse_json, printable, shown
from visavis.errors import DataError

FILE_NAMES = ("filename", "file_name", "image", "image_name", "file", "path")
CAPTION_NAMES = ("captions", "caption", "text", "title", "sentence")

CaptionRow = tuple[int, str | None, list[str], str | None]
"""Line, file name, captions, split."""


def list_caption_table(path: Path) -> Listing:
    """All images and captions of a table, images in order of first mention. Raises DataError if its header cannot be understood."""
    return _list_rows(Listing(path), _table_rows)


def list_caption_lines(path: Path) -> Listing:
    """All images and captions of a file of JSON lines, images in order of first mention."""
    return _list_rows(Listing(path), _json_rows)


def _list_rows(listing: Listing, rows: Callable[[str, Listing], Iterator[CaptionRow]]) -> Listing:
    path = listing.source
    places: dict[str, int] = {}
    splits: dict[str, str] = {}
    for line, file, captions, split in rows(decode(storage.read_bytes(path)), listing):
        place = f"{path.name}:{line}"
        if not file:
            indices = [listing.add_caption(caption, -1, place) for caption in captions]
            listing.lost_captions.update(indices)
            listing.lose("caption without image", place, "the row names no image file")
            continue
        image = places.setdefault(file, len(listing.entries))
        if image == len(listing.entries):
            listing.entries.append(Entry(file, split, file))
        for caption in captions:
            listing.add_caption(caption, image, place)
        if split and splits.setdefault(file, split) != split:
            what = f"{file} is put in split {split}, but in {splits[file]} before"
            listing.lose("image in two splits", place, what, image=image)
        listing.entries[image].split = splits.get(file)
    attach_files(listing, path.parent, may_lack_pixels=False)
    listing.finish()
    return listing


def _json_rows(text: str, listing: Listing) -> Iterator[CaptionRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{listing.source.name}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            listing.lose("malformed line", place, f"the line is not JSON: {error}")
            continue
        if not isinstance(row, dict) or isinstance(row, RepeatedKey):
            expected = "an object with filename and captions" + ", each once" * isinstance(row, dict)
            listing.lose("malformed line", place, f"expected {expected}, found {line:.60}")
            continue
        file = next((row[name] for name in FILE_NAMES if name in row), None)
        captions: Any = next((row[name] for name in CAPTION_NAMES if name in row), [])
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            listing.lose("malformed line", place, "the captions are neither a text nor a list of texts")
        elif not isinstance(row.get("split", ""), str | None):
            listing.lose("malformed line", place, f"the split is {shown(row['split'])}, expected a text")
        else:
            yield number, file if isinstance(file, str) else None, captions, split_name(row.get("split"))


def _table_rows(text: str, listing: Listing) -> Iterator[CaptionRow]:
    first, _, body = text.partition("\n")
    delimiter, header = _header(printable(first), listing.source)
    file_column, caption_columns = _columns(header, listing.source)
    split_column = header.index("split") if "split" in header else None
    if unread := [name for i, name in enumerate(header) if i not in (file_column, split_column, *caption_columns)]:
        listing.note("column not read", f"{listing.source.name}:1", f"the columns {', '.join(unread)} are not read")
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 2
        place = f"{listing.source.name}:{line}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = f"the row that begins here is malformed, and {reader.line_num - line + 2} lines cannot be read: {error}; mind its quotes"
            listing.lose("malformed line", place, what)
            continue
        if not row:
            continue
        if len(row) != len(header):
            what = f"the row has {len(row)} columns, expected {len(header)}; put captions that hold {delimiter!r} in double quotes"
            listing.lose("wrong width", place, what)
            continue
        captions = [row[column] for column in caption_columns]
        while len(captions) > 1 and not captions[-1]:
            captions.pop()
        yield line, row[file_column], captions, split_name(row[split_column]) if split_column is not None else None


def _header(first: str, path: Path) -> tuple[str, list[str]]:
    """The delimiter of the first line, found by its column for the file, and the names of the columns in lower case."""
    for delimiter in (",", "\t", ";"):
        header = [name.strip().strip('"').lower() for name in first.split(delimiter)]
        if set(header) & set(FILE_NAMES) and len(header) > 1:
            return delimiter, header
    raise DataError(f"{path} has no header with filename and caption: its first line is {first!r:.80}.")


def _columns(header: list[str], path: Path) -> tuple[int, list[int]]:
    files = [index for index, name in enumerate(header) if name in FILE_NAMES]
    kinds: dict[str, list[int]] = {}
    for index, name in enumerate(header):
        if match := re.fullmatch(rf"({'|'.join(CAPTION_NAMES)})[ _-]?\d*", name):
            kinds.setdefault(match[1], []).append(index)
    if len(files) != 1:
        raise DataError(
            f"{path} has {len(files)} columns that could name the image file ({', '.join(header):.80}): call one of them filename."
        )
    captions = kinds.get("caption") or kinds.get("captions") or (next(iter(kinds.values())) if len(kinds) == 1 else None)
    if captions is None:
        raise DataError(f"{path} has {len(kinds)} columns that could be the caption ({', '.join(header):.80}): call one of them caption.")
    return files[0], captions


CAPTION_TABLE = Layout(
    name="captions.csv",
    files="captions.csv or captions.tsv beside the images (a header filename,caption, then a row a caption)",
    patterns=("captions.csv", "captions.tsv", "metadata.csv"),
    endings=(".csv", ".tsv"),
    read=list_caption_table,
)
CAPTION_LINES = Layout(
    name="captions.jsonl",
    files='captions.jsonl beside the images (a line {"filename": ..., "captions": [...]} an image)',
    patterns=("captions.jsonl", "metadata.jsonl"),
    endings=(".jsonl",),
    read=list_caption_lines,
)
