"""Opening of data sets: find the path, recognize the format, list the content, and refuse to skip anything without permission.

To add a format, declare it in a module of ``visavis.data.formats`` and add it to ``FORMATS``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from visavis.data.dataset import Dataset
from visavis.data.formats.caption_table import CAPTION_LINES, CAPTION_TABLE
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.karpathy import KARPATHY
from visavis.data.formats.listing import DatasetFormat, Listing, escape_surrogates, is_valid_unicode, summarize_kinds
from visavis.data.formats.precomp import PRECOMP
from visavis.data.formats.video_lists import MSRVTT, MSVD
from visavis.errors import DataError, suggest_name

FORMATS: tuple[DatasetFormat, ...] = (CAPTION_TABLE, CAPTION_LINES, MSRVTT, KARPATHY, MSVD, PRECOMP)


def open_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    decode_images: bool = False,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Open the data set in a folder, or one list in it (``.json``, ``.jsonl``, ``.csv``, ``.tsv``).

    Args:
        path: The folder or file, or the name of a folder under ``VISAVIS_DATA``.
        skip_bad: Skip unusable items and list them in ``Dataset.skipped``, instead of raising DataError.
        decode_images: Also decode each image once, to find truncated images and copies in two splits. The result is cached.
        frames_per_second: Rate at which videos will be read, to find videos that are too long. 0: unknown.
        decode_all_frames: Decode all frames of a video and not only the first one.
        on_progress: Called with the number of decoded images and of all images.

    Returns:
        The data set.

    Raises:
        DataError: If the path or the format is unknown, or an item is unusable and ``skip_bad`` is not set.
    """
    listing = list_dataset(path)
    if decode_images:
        from visavis.data.image_validation import validate_images

        validate_images(listing, frames_per_second=frames_per_second, decode_all_frames=decode_all_frames, on_progress=on_progress)
    losses = listing.losses
    if losses and not skip_bad and any(image.usable for image in listing.images):
        examples = ", ".join(map(str, losses[:3])) + (", ..." if len(losses) > 3 else "")
        raise DataError(
            f"{listing.source}: unusable items ({summarize_kinds(losses)}): {examples}. Run `visavis data check {shlex.quote(str(path))}` "
            "for the whole list, or train with --skip-bad to skip them."
        )
    return listing.dataset()


def list_dataset(path: str | Path) -> Listing:
    """List the content of a data set, with findings about unusable items.

    Args:
        path: The folder or file, or the name of a folder under ``VISAVIS_DATA``.

    Returns:
        The listing.

    Raises:
        DataError: If the path or the format is unknown.
    """
    dataset_format, source = _locate(path)
    try:
        listing = dataset_format.read(source)
        if dataset_format.image_files != "none":
            folder = source if dataset_format.reads_whole_folder else source.parent
            attach_files(listing, folder, may_lack_pixels=dataset_format.image_files == "optional")
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror}.") from None
    listing.finalize()
    listing.format_name = dataset_format.name
    return listing


def find_source(path: str | Path) -> Path:
    """Find the list that describes a data set, or the folder if the format describes a whole folder.

    Args:
        path: The folder or file, or the name of a folder under ``VISAVIS_DATA``.

    Returns:
        The path of the list or folder.
    """
    return _locate(path)[1]


def data_folder() -> Path | None:
    """Return the folder in ``VISAVIS_DATA``, under which data sets are found by name.

    Returns:
        The folder. None if the variable is not set.
    """
    chosen = os.environ.get("VISAVIS_DATA")
    return Path(chosen) if chosen else None


def list_dataset_names(folder: Path) -> list[str]:
    """List the subfolders that contain a data set of a known format.

    Args:
        folder: The folder.

    Returns:
        Sorted names.
    """
    children = (child for child in folder.iterdir() if child.is_dir())
    return sorted(child.name for child in children if any(dataset_format.find_sources(child) for dataset_format in FORMATS))


def resolve_path(path: str | Path) -> Path:
    """Find a file or folder by its path, or by its name under ``VISAVIS_DATA``.

    Args:
        path: The path or name.

    Returns:
        An existing path.
    """
    return _find_path(path, "")


def path_exists(path: str | Path) -> bool:
    """Return whether ``resolve_path`` finds a path.

    Args:
        path: The path or name.

    Returns:
        Whether it exists.
    """
    path, root = Path(path).expanduser(), data_folder()
    return os.path.exists(path) or (root is not None and os.path.exists(root / path))


def _locate(path: str | Path) -> tuple[DatasetFormat, Path]:
    """Return the format of a data set and its source."""
    patterns = ", ".join(pattern for dataset_format in FORMATS for pattern in dataset_format.patterns)
    expected = f"one of {patterns} (`visavis catalog formats` describes them)"
    folder = _find_path(path, f" A data set is a folder with {expected}.")
    if folder.is_file():
        matches = [(dataset_format, source) for dataset_format in FORMATS if (source := dataset_format.source_for_file(folder)) is not None]
        if not matches:
            suffixes = ", ".join(suffix for dataset_format in FORMATS for suffix in dataset_format.suffixes)
            raise DataError(f"{folder} is not a list of images and captions: expected a folder, or a file that ends in {suffixes}.")
        return matches[0]
    matches = [(dataset_format, source) for dataset_format in FORMATS for source in dataset_format.find_sources(folder)]
    if not matches:
        raise DataError(f"{folder} contains no data set: expected {expected}.")
    if len(matches) > 1:
        names = ", ".join(dataset_format.patterns[0] if source == folder else source.name for dataset_format, source in matches)
        raise DataError(f"{folder} contains several lists ({names}). Name one of them instead of the folder.")
    return matches[0]


def _find_path(path: str | Path, expected: str) -> Path:
    path = Path(path).expanduser()
    if not is_valid_unicode(str(path)):
        raise DataError(f"the path {escape_surrogates(str(path))} is not UTF-8, which the files of a run require. Rename it.")
    if os.path.exists(path):
        return path
    root = data_folder()
    if root is None:
        raise DataError(f"{path} does not exist, and VISAVIS_DATA, where it is searched next, is not set.{expected}")
    if os.path.exists(root / path):
        return root / path
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    raise DataError(f"{path} does not exist, neither here nor under VISAVIS_DATA ({root}): {suggest_name(str(path), names)}{expected}")
