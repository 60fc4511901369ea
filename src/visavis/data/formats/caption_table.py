"""Your own images with a table ``captions.jsonl``, ``captions.csv`` or ``captions.tsv`` that
describes them.

A JSON line is ``{"filename": ..., "captions": [...]}`` or ``{"filename": ..., "caption": ...}``,
repeated for more captions. A table has a header: ``filename,caption`` with a row per caption, or
``filename,caption,caption_2,...``. Both may have ``split``. Without it, images are assigned
80/10/10 to train, val and test by a hash of their names, so that new images never change the split
of others. ``file_name``, ``image`` (file) and ``text``, ``title``, ``sentence`` (caption) are
accepted, too. Tables of spreadsheets, pandas and R, and the published tables of Flickr8k and
Flickr30k are read by ``delimited_text``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from visavis.core.errors import DataError
from visavis.data.formats.delimited_text import NAME_NUMBER, parse_table, read_layout
from visavis.data.formats.listing import DatasetFormat, Listing, clean_name, read_list, shorten
from visavis.data.formats.published_lists import DuplicateKeyObject, parse_json
from visavis.data.formats.table_columns import (
    CAPTION_NAMES,
    FILE_NAMES,
    OTHER_CAPTION_NAMES,
    OTHER_FILE_NAMES,
    find_caption_columns,
    find_file_column,
    named_columns,
    split_caption_list,
)
from visavis.data.splits import MISSING_TEXTS, normalize_split_name, split_in_name, splits_of_files

ALL_FILE_NAMES = (*FILE_NAMES, *OTHER_FILE_NAMES)
EXPECTED_HEADER = "filename and caption"
# Line number, file name, captions, split.
CaptionRow = tuple[int, str | None, list[str], str | None]


def list_captions(
    path: Path, read_rows: Callable[[str, Path, Listing], Iterator[CaptionRow]]
) -> Listing:
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
    """List the images and captions of ``train.csv``, ``val.csv`` and ``test.csv``, or of
    ``train/metadata.csv`` and so on.

    Args:
        folder: The folder.

    Returns:
        The listing.
    """
    listing, readers = (
        Listing(folder),
        {".csv": _table_rows, ".tsv": _table_rows, ".jsonl": _json_rows},
    )
    patterns = [pattern for suffix in readers for pattern in (f"*{suffix}", f"*/metadata{suffix}")]
    tables = [
        path
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if os.path.isfile(path)
    ]
    files = [path for path in tables if split_in_name(path.relative_to(folder))]
    for path, split in splits_of_files(files, folder).items():
        _add_rows(listing, path, split, readers[path.suffix])
    return listing


def _add_rows(
    listing: Listing,
    path: Path,
    file_split: str | None,
    read_rows: Callable[[str, Path, Listing], Iterator[CaptionRow]],
) -> None:
    folder, table_name = (
        listing.source if os.path.isdir(listing.source) else path.parent,
        _table_name(listing, path),
    )
    for line, file, captions, split in read_rows(read_list(path, folder), path, listing):
        # As in the folders of images of Hugging Face `datasets`, files are relative to their table.
        if file and path.parent != folder:
            file = f"{path.parent.name}/{file}"
        listing.add_row(file, captions, split or file_split, f"{table_name}:{line}")


def _table_name(listing: Listing, path: Path) -> str:
    """Name of a table in findings. Tables of several folders may have the same name."""
    return (
        path.relative_to(listing.source).as_posix() if os.path.isdir(listing.source) else path.name
    )


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
            expected = "an object with filename and captions" + ", each once" * isinstance(
                row, dict
            )
            listing.add_loss("malformed line", location, f"expected {expected}, got {line:.60}")
            continue
        file = next((row[name] for name in named_columns(row, FILE_NAMES, OTHER_FILE_NAMES)), None)
        captions: Any = next(
            (row[name] for name in named_columns(row, CAPTION_NAMES, OTHER_CAPTION_NAMES)), []
        )
        captions = split_caption_list(captions) if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not all(
            isinstance(caption, str) for caption in captions
        ):
            listing.add_loss(
                "malformed line", location, "the captions are neither a text nor a list of texts"
            )
        elif not isinstance(row.get("split", ""), str | None):
            listing.add_loss(
                "malformed line", location, f"split: expected a text, got {shorten(row['split'])}"
            )
        else:
            yield (
                number,
                file if isinstance(file, str) else None,
                captions,
                normalize_split_name(row.get("split")),
            )


def _table_rows(text: str, path: Path, listing: Listing) -> Iterator[CaptionRow]:
    table_name = _table_name(listing, path)
    table = parse_table(text, path, ALL_FILE_NAMES, EXPECTED_HEADER)
    header = table.layout.header
    file_column, caption_names = (
        header.index(find_file_column(header, path)),
        find_caption_columns(header, path),
    )
    caption_columns = [index for index, name in enumerate(header) if name in caption_names]
    split_column = header.index("split") if "split" in header else None
    used = (file_column, split_column, *caption_columns)
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
    for line, row in table.rows:
        captions = [
            caption for column in caption_columns for caption in split_caption_list(row[column])
        ]
        # Rows have as many cells as the longest. An empty first caption is a finding, the others
        # are not.
        while len(captions) > 1 and (not captions[-1] or captions[-1] in MISSING_TEXTS):
            captions.pop()
        name = clean_name(row[file_column])
        if table.layout.has_numbered_names:
            name = NAME_NUMBER.sub("", name)
        # A row of empty cells of a spreadsheet.
        if not name and not any(map(str.strip, captions)):
            continue
        yield (
            line,
            name,
            captions,
            normalize_split_name(row[split_column]) if split_column is not None else None,
        )


def _is_caption_table(path: Path) -> bool:
    """Whether a file has the columns of a table of captions. Names such as ``results.csv`` are
    common.
    """
    try:
        header = read_layout(path, ALL_FILE_NAMES, EXPECTED_HEADER)[0].header
        find_file_column(header, path)
        find_caption_columns(header, path)
    except DataError:
        return False
    return True


CAPTION_TABLE = DatasetFormat(
    name="captions.csv",
    description="captions.csv or captions.tsv next to the images (a header filename,caption, then one row per caption)",
    patterns=("captions.csv", "captions.tsv", "metadata.csv"),
    suffixes=(".csv", ".tsv"),
    read=partial(list_captions, read_rows=_table_rows),
    image_files="required",
)
PUBLISHED_TABLE = DatasetFormat(
    name="Flickr30k table",
    description="results.csv or results_20130124.token of Flickr30k, captions.txt of Kaggle's Flickr8k, Flickr8k.token.txt",
    patterns=("captions.txt", "results.csv", "results_*.token", "Flickr8k.token.txt"),
    suffixes=("captions.txt", ".token", ".token.txt"),
    recognizes=_is_caption_table,
    read=partial(list_captions, read_rows=_table_rows),
    image_files="required",
    fallback_level=1,
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
    patterns=(
        "train*.csv",
        "train*.tsv",
        "train*.jsonl",
        "train/metadata.csv",
        "train/metadata.jsonl",
    ),
    suffixes=(),
    read=list_split_tables,
    image_files="required",
    reads_whole_folder=True,
    fallback_level=2,
)
