"""Listings of tables of captions: text, JSON lines, and Parquet or Arrow files.

- ``captions.jsonl``, ``captions.csv`` or ``captions.tsv`` describes your own images. A JSON line is
  ``{"filename": ..., "captions": [...]}`` or ``{"filename": ..., "caption": ...}``, repeated for
  more captions. A table has a header: ``filename,caption`` with a row per caption, or
  ``filename,caption,caption_2,...``. Both may have ``split``. Without it, images are assigned
  80/10/10 to train, val and test by a hash of their names, so that new images never change the
  split of others. ``file_name``, ``image`` (file) and ``text``, ``title``, ``sentence`` (caption)
  are accepted, too.
- ``data/train-00000-of-00004.parquet``, ``validation-00000-of-00001.parquet`` and so on, or a
  folder of ``save_to_disk``, has the images in the table, as Hugging Face ``datasets`` writes them.
  Tables in several files may also name image files.

Each kind of file has a source, which yields its rows: ``delimited_rows``, ``json_rows`` and
``arrow_rows``. ``list_tables`` makes a listing of the rows of any source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from visavis.data.file_names import find_split_files, split_in_name, splits_of_files
from visavis.data.formats.arrow_tables import ARROW_SUFFIXES, arrow_rows
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.listing import DatasetFormat, Listing
from visavis.data.formats.table_columns import TableRow
from visavis.data.formats.text_tables import delimited_rows, is_caption_table, json_rows

# Yields the rows of a file. It is given the file, the folder that must contain it, its name in
# findings, and the listing to which it adds problems.
RowSource = Callable[[Path, Path, str, Listing], Iterator[TableRow]]
# By suffix. Any other suffix is delimiter-separated text.
_SOURCES: dict[str, RowSource] = {
    ".jsonl": json_rows,
    **dict.fromkeys(ARROW_SUFFIXES, arrow_rows),
}
# Repeated paths of which the bytes are compared, to see whether rows of the same path are the same
# image.
_MAX_COMPARED_PATHS = 20


def list_tables(listing: Listing, folder: Path, files: Mapping[Path, str | None]) -> Listing:
    """Add tables in a folder to a listing, images in order of first mention. Each table has the
    split of all of its rows, or None.
    """

    def read_rows() -> Iterator[TableRow]:
        for path, split in files.items():
            source = _SOURCES.get(path.suffix, delimited_rows)
            # As in the folders of images of Hugging Face `datasets`, files are relative to their
            # table.
            is_relative = path.parent != folder and path.suffix not in ARROW_SUFFIXES
            # Tables of several folders may have the same name.
            for row in source(path, folder, path.relative_to(folder).as_posix(), listing):
                if row.name and is_relative:
                    row.name = f"{path.parent.name}/{row.name}"
                row.split = row.split or split
                yield row

    rows: Iterable[TableRow] = read_rows()
    if any(path.suffix in ARROW_SUFFIXES for path in files):
        # Names need all rows: a path that repeats with other bytes names no image.
        rows = list(rows)
        _name_images(listing, rows)
    for row in rows:
        is_new = row.name not in listing.by_name
        image = listing.add_row(row.name, row.captions, row.split, row.location)
        # Images of other tables are files.
        if row.default_name is None or image is None or not is_new:
            continue
        image.location = row.image
        if row.image is None:
            image.file = row.path
            if not row.path:
                message = "the row has no bytes of an image"
                listing.add_loss("missing image", row.location, message, image)
    return listing


def _name_images(listing: Listing, rows: list[TableRow]) -> None:
    """Name the images in a table that have no name by their path, unless different images have the
    same path, such as ``image.jpg``.
    """
    unnamed = [row for row in rows if row.name is None and row.default_name is not None]
    first_row_of: dict[str, TableRow] = {}
    repeated: dict[str, TableRow] = {}
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
        row.name = row.path if row.path and names_images else row.default_name


def list_captions(path: Path) -> Listing:
    """List the images and captions of one table of image files."""
    return list_tables(Listing(path), path.parent, {path: None})


def list_split_tables(folder: Path) -> Listing:
    """List the images and captions of ``train.csv``, ``val.csv`` and ``test.csv``, or of
    ``train/metadata.csv`` and so on.
    """
    suffixes = (".csv", ".tsv", ".jsonl")
    patterns = [pattern for suffix in suffixes for pattern in (f"*{suffix}", f"*/metadata{suffix}")]
    tables = [
        path
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if os.path.isfile(path)
    ]
    # Other tables of the folder, such as prices, have no split in their names.
    files = [path for path in tables if split_in_name(path.relative_to(folder))]
    return list_tables(Listing(folder), folder, splits_of_files(files, folder))


def list_image_tables(source: Path) -> Listing:
    """List the images and captions of a table with images in it, or of all tables of a folder."""
    folder = source if os.path.isdir(source) else source.parent
    # Tables that `datasets` has cached are not a part of the data set.
    files = (
        [
            path
            for path in find_split_files(folder, ARROW_SUFFIXES)
            if not path.name.startswith("cache-")
        ]
        if folder == source
        else [source]
    )
    listing = list_tables(Listing(source, folder=folder), folder, splits_of_files(files, folder))
    # Only tables that name files need a search of the folder.
    if any(image.usable and image.location is None for image in listing.images):
        attach_files(listing, folder, may_lack_pixels=False)
    return listing


CAPTION_TABLE = DatasetFormat(
    name="captions.csv",
    description="captions.csv or captions.tsv next to the images (a header filename,caption, then one row per caption)",
    patterns=("captions.csv", "captions.tsv", "metadata.csv"),
    suffixes=(".csv", ".tsv"),
    read=list_captions,
    image_files="required",
)
PUBLISHED_TABLE = DatasetFormat(
    name="Flickr30k table",
    description="results.csv or results_20130124.token of Flickr30k, captions.txt of Kaggle's Flickr8k, Flickr8k.token.txt",
    patterns=("captions.txt", "results.csv", "results_*.token", "Flickr8k.token.txt"),
    suffixes=("captions.txt", ".token", ".token.txt"),
    recognizes=is_caption_table,
    read=list_captions,
    image_files="required",
    fallback_level=1,
)
CAPTION_LINES = DatasetFormat(
    name="captions.jsonl",
    description='captions.jsonl next to the images (one line {"filename": ..., "captions": [...]} per image)',
    patterns=("captions.jsonl", "metadata.jsonl"),
    suffixes=(".jsonl",),
    read=list_captions,
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
IMAGE_TABLES = DatasetFormat(
    name="image tables",
    description="Parquet or Arrow tables with images in them (Hugging Face datasets), with the split in the file name or in a column",
    patterns=(
        *(
            f"{folder}*{suffix}"
            for suffix in ARROW_SUFFIXES
            for folder in ("", "data/", "train/", "test/", "data/train/")
        ),
        "dataset_dict.json",
    ),
    suffixes=ARROW_SUFFIXES,
    read=list_image_tables,
    image_files="none",
    reads_several_files=True,
    fallback_level=2,
)
