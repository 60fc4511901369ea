"""Opening and check of data sets: find the path, recognize the format, list the content, and skip
nothing without permission.

To add a format, declare it in a module of ``visavis.data.formats`` and add it to ``FORMATS``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from visavis.core.environment import quote_argument
from visavis.core.errors import SKIP_BAD_ADVICE, DataError, NoDataset, log_debug
from visavis.core.own_code import loaded_parts
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.dataset_cache import DatasetCache
from visavis.data.file_names import is_shard_pattern
from visavis.data.formats.arrow_tables import has_embedded_images
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.large_table import LARGE_TABLE
from visavis.data.formats.listing import DatasetFormat, Listing, summarize_kinds
from visavis.data.formats.published_lists import COCO, KARPATHY, MSRVTT, MSVD, PRECOMP
from visavis.data.formats.table_listing import (
    CAPTION_LINES,
    CAPTION_TABLE,
    IMAGE_TABLES,
    PUBLISHED_TABLE,
    SPLIT_TABLES,
)
from visavis.data.formats.webdataset import WEBDATASET

FORMATS: tuple[DatasetFormat, ...] = (
    CAPTION_TABLE,
    CAPTION_LINES,
    LARGE_TABLE,
    MSRVTT,
    COCO,
    KARPATHY,
    MSVD,
    PRECOMP,
    PUBLISHED_TABLE,
    SPLIT_TABLES,
    IMAGE_TABLES,
    WEBDATASET,
)


def known_formats() -> list[DatasetFormat]:
    """Return the formats of the user's own code, of installed packages and of visavis."""
    return [*loaded_parts(DatasetFormat, "formats"), *FORMATS]


# A larger CSV file is opened like a Parquet file, without a Python object per caption.
LARGE_FILE_BYTES = 256 * 2**20
# Findings that may end without a change of a file in the folder of the data set.
UNSETTLED_KINDS = {"missing image", "unreadable image", "broken archive"}


def open_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    needs_files: bool = True,
    validate: Callable[[Listing], object] | None = None,
    validated_by: Sequence[object] = (),
) -> Dataset:
    """Open the data set in a folder, or one file of it (``.json``, ``.jsonl``, ``.csv``, ``.tsv``,
    ``.parquet``, ``.arrow``, ``.tar``).

    Args:
        path: The folder or file, the name of a folder under ``VISAVIS_DATA``, a pattern of
            WebDataset shards, or ``hf:OWNER/NAME``.
        skip_bad: Skip unusable items and list them in ``Dataset.skipped``, instead of raising
            DataError.
        needs_files: Whether an image without a file is unusable.
        validate: Adds findings about the content to the listing, see ``open_valid_dataset``.
        validated_by: Settings on which these findings depend, for the cache of the result.

    Returns:
        The data set.

    Raises:
        DataError: If the path or the format is unknown, or an item is unusable and ``skip_bad`` is
            not set.
    """
    dataset_format, source = locate_dataset(path)
    log_debug(__name__, "%s: format %s", source, dataset_format.name)
    if dataset_format.open is not None:
        data = dataset_format.open(source)
        if data.skipped and not skip_bad:
            raise _unusable_items(source, path, data.skipped[0], data.skipped[1:])
        return replace(data, source=source)
    options = (skip_bad, needs_files, *validated_by)
    # The code of a user's own format may change.
    cache = DatasetCache.of(source, *options) if dataset_format in FORMATS else None
    if cache is not None and (stored := cache.read()) is not None:
        return replace(stored, source=source)
    listing = list_source(dataset_format, source, needs_files=needs_files)
    if validate is not None:
        validate(listing)
    losses = listing.losses
    if losses and not skip_bad and any(image.usable for image in listing.images):
        kinds = summarize_kinds(Counter(finding.kind for finding in losses))
        raise _unusable_items(listing.source, path, kinds, losses)
    data = listing.dataset()
    if cache is not None and UNSETTLED_KINDS.isdisjoint(finding.kind for finding in losses):
        folder = source if os.path.isdir(source) else source.parent
        cache.write(data, [folder, listing.folder or folder])
    return replace(data, source=source)


def _unusable_items(
    source: Path, path: str | Path, kinds: str, losses: Sequence[object]
) -> DataError:
    # Each finding has sentences of its own.
    examples = "; ".join(str(loss).rstrip(".") for loss in losses[:3]) + (
        "; ..." if len(losses) > 3 else ""
    )
    return DataError(
        f"{source}: unusable items ({kinds}): {examples}. Run `visavis data check "
        f"{quote_argument(path)}` "
        f"for the whole list, and correct it. {SKIP_BAD_ADVICE}"
    )


def list_dataset(path: str | Path) -> Listing:
    """List the content of a data set, with findings about unusable items."""
    return list_source(*locate_dataset(path))


def list_source(
    dataset_format: DatasetFormat, source: Path, *, needs_files: bool = True
) -> Listing:
    """List the content of a data set whose format is known. ``needs_files``: whether an image
    without a file is unusable.
    """
    try:
        listing = dataset_format.read(source)
        if dataset_format.image_files != "none":
            folder = listing.folder or (
                source if dataset_format.reads_whole_folder else source.parent
            )
            may_lack_pixels = dataset_format.image_files == "optional" or not needs_files
            attach_files(listing, folder, may_lack_pixels=may_lack_pixels, needs_files=needs_files)
    except OSError as error:
        raise DataError(
            f"{error.filename or source} cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from None
    listing.finalize()
    listing.format_name = listing.format_name or dataset_format.name
    return listing


def find_source(path: str | Path) -> Path:
    """Find the list or folder that describes a data set."""
    return locate_dataset(path)[1]


def list_dataset_names(folder: Path) -> list[str]:
    """List the subfolders that contain a data set of a known format."""
    children = (child for child in folder.iterdir() if os.path.isdir(child))
    return sorted(
        child.name
        for child in children
        if any(dataset_format.find_sources(child) for dataset_format in known_formats())
    )


def locate_dataset(path: str | Path) -> tuple[DatasetFormat, Path]:
    """Find the format of a data set, and its source: the list, or the folder if the format
    describes a whole folder. The path is as for ``open_dataset``.
    """
    patterns = ", ".join(
        pattern for dataset_format in known_formats() for pattern in dataset_format.patterns
    )
    expected = f"one of {patterns} (`visavis catalog formats` describes them)"
    folder = resolve_path(path, f" A data set is a folder with {expected}.")
    if is_shard_pattern(folder.name) and not os.path.exists(folder):
        return WEBDATASET, folder
    if os.path.isfile(folder):
        matches = [
            (dataset_format, source)
            for dataset_format in known_formats()
            if (source := dataset_format.source_for_file(folder)) is not None
        ]
        if not matches:
            suffixes = ", ".join(
                suffix for dataset_format in known_formats() for suffix in dataset_format.suffixes
            )
            raise DataError(
                f"{folder}: expected a folder, or a list of images and captions that ends in "
                f"{suffixes}, got another file. "
                "Pass the folder or list of a data set."
            )
        if (
            matches[0][0] in (CAPTION_TABLE, PUBLISHED_TABLE)
            and os.path.getsize(folder) > LARGE_FILE_BYTES
        ):
            return LARGE_TABLE, folder
        return _by_content(*matches[0])
    matches = [
        (dataset_format, source)
        for dataset_format in known_formats()
        for source in dataset_format.find_sources(folder)
    ]
    # A folder with captions.csv may also have tables of other formats, such as results.csv.
    level = min((dataset_format.fallback_level for dataset_format, _ in matches), default=0)
    matches = [match for match in matches if match[0].fallback_level == level]
    if not matches:
        raise NoDataset(
            f"{folder}: expected {expected}, got none of them. Add one, or pass another folder."
        )
    if len(matches) > 1:
        names = ", ".join(
            dataset_format.patterns[0] if source == folder else source.name
            for dataset_format, source in matches
        )
        raise DataError(
            f"{folder}: expected one list of images and captions, got {names}. Pass one of them "
            "instead of the folder."
        )
    dataset_format, source = matches[0]
    return (
        locate_dataset(source)
        if dataset_format in (CAPTION_TABLE, PUBLISHED_TABLE)
        else _by_content(dataset_format, source)
    )


def _by_content(dataset_format: DatasetFormat, source: Path) -> tuple[DatasetFormat, Path]:
    """The format of a source. One Parquet or Arrow file is a table of images or of file names."""
    # Both formats match the suffix .parquet. Their columns differ.
    if dataset_format in (LARGE_TABLE, IMAGE_TABLES) and os.path.isfile(source):
        return (IMAGE_TABLES if has_embedded_images(source) else LARGE_TABLE), source
    return dataset_format, source
