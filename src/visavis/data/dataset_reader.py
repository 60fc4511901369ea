"""Opening and check of data sets: find the path, recognize the format, list the content, and skip
nothing without permission.

To add a format, declare it in a module of ``visavis.data.formats`` and add it to ``FORMATS``.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from visavis.core.errors import (
    MAX_LISTED_NAMES,
    SKIP_BAD_ADVICE,
    DataError,
    NoDataset,
    closest_name,
    log_debug,
)
from visavis.core.notebook import NotebookTable
from visavis.core.own_code import loaded_parts
from visavis.data.dataset import Dataset, ProgressCallback
from visavis.data.formats.caption_table import (
    CAPTION_LINES,
    CAPTION_TABLE,
    PUBLISHED_TABLE,
    SPLIT_TABLES,
)
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.image_tables import IMAGE_TABLES, has_embedded_images
from visavis.data.formats.large_table import LARGE_TABLE, table_problems
from visavis.data.formats.listing import (
    DatasetFormat,
    Finding,
    Listing,
    escape_surrogates,
    is_valid_unicode,
    summarize_kinds,
)
from visavis.data.formats.precomp import PRECOMP
from visavis.data.formats.published_lists import COCO, KARPATHY, MSRVTT, MSVD
from visavis.data.formats.webdataset import WEBDATASET, is_shard_pattern
from visavis.data.hub_files import DATASET_NAME, download_dataset
from visavis.data.image_validation import validate_images

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
# A check of more images does not open them.
MAX_CHECKED_IMAGES = 1_000_000


def open_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    decode_images: bool = False,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Dataset:
    """Open the data set in a folder, or one file of it (``.json``, ``.jsonl``, ``.csv``, ``.tsv``,
    ``.parquet``, ``.arrow``, ``.tar``).

    Args:
        path: The folder or file, the name of a folder under ``VISAVIS_DATA``, a pattern of
            WebDataset shards, or ``hf:OWNER/NAME``.
        skip_bad: Skip unusable items and list them in ``Dataset.skipped``, instead of raising
            DataError.
        decode_images: Also decode each image once, to find truncated images and copies in two
            splits. The result is cached. Images of a large table are not decoded.
        frames_per_second: Rate at which videos will be read, to find videos that are too long. 0:
            unknown.
        decode_all_frames: Decode all frames of a video and not only the first one.
        on_progress: Called with the number of decoded images and of all images.

    Returns:
        The data set.

    Raises:
        DataError: If the path or the format is unknown, or an item is unusable and ``skip_bad`` is
            not set.
    """
    dataset_format, source = _locate(path)
    log_debug(__name__, "%s: format %s", source, dataset_format.name)
    if dataset_format.open is not None:
        data = dataset_format.open(source)
        if data.skipped and not skip_bad:
            raise _unusable_items(source, path, data.skipped[0], data.skipped[1:])
        return data
    listing = _list(dataset_format, source)
    if decode_images:
        validate_images(
            listing,
            frames_per_second=frames_per_second,
            decode_all_frames=decode_all_frames,
            on_progress=on_progress,
        )
    losses = listing.losses
    if losses and not skip_bad and any(image.usable for image in listing.images):
        kinds = summarize_kinds(Counter(finding.kind for finding in losses))
        raise _unusable_items(listing.source, path, kinds, losses)
    return listing.dataset()


def _unusable_items(
    source: Path, path: str | Path, kinds: str, losses: Sequence[object]
) -> DataError:
    # Each finding has sentences of its own.
    examples = "; ".join(str(loss).rstrip(".") for loss in losses[:3]) + (
        "; ..." if len(losses) > 3 else ""
    )
    return DataError(
        f"{source}: unusable items ({kinds}): {examples}. Run `visavis data check "
        f"{shlex.quote(str(path))}` "
        f"for the whole list, and correct it. {SKIP_BAD_ADVICE}"
    )


def list_dataset(path: str | Path) -> Listing:
    """List the content of a data set, with findings about unusable items.

    Args:
        path: The folder or file, the name of a folder under ``VISAVIS_DATA``, a pattern of
            WebDataset shards, or ``hf:OWNER/NAME``.

    Returns:
        The listing.

    Raises:
        DataError: If the path or the format is unknown.
    """
    return _list(*_locate(path))


def _list(dataset_format: DatasetFormat, source: Path) -> Listing:
    try:
        listing = dataset_format.read(source)
        if dataset_format.image_files != "none":
            folder = listing.folder or (
                source if dataset_format.reads_whole_folder else source.parent
            )
            attach_files(listing, folder, may_lack_pixels=dataset_format.image_files == "optional")
    except OSError as error:
        raise DataError(
            f"{error.filename or source} cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from None
    listing.finalize()
    listing.format_name = listing.format_name or dataset_format.name
    return listing


@dataclass(frozen=True)
class SplitCounts:
    """Usable images and captions of a split.

    Attributes:
        images: Number of images.
        captions: Number of captions.
    """

    images: int
    captions: int


@dataclass(frozen=True)
class CheckReport(NotebookTable):
    """Content and problems of a data set.

    Attributes:
        path: The list or folder that was read.
        format_name: Name of its format.
        findings: All problems.
        splits: Usable images and captions by split.
        captions_per_image: Smallest and largest number of captions per image.
        image_sizes: Number of images of each size, such as ``"640x480"``.
        duplicate_captions: Number of captions whose exact text occurs earlier.
        seconds: Duration of the check.
    """

    ROWS: ClassVar[str] = "findings"

    path: Path
    format_name: str
    findings: tuple[Finding, ...]
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    captions_per_image: tuple[int, int] = (0, 0)
    image_sizes: dict[str, int] = field(default_factory=dict)
    duplicate_captions: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether training would use all items."""
        return not any(finding.loses_data for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data.

        Returns:
            All fields by name, and ``ok``.
        """
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


def check_dataset(
    path: str | Path, *, decode_videos: bool = False, on_progress: ProgressCallback | None = None
) -> CheckReport:
    """Read everything, and decode all images and a sample of the videos.

    Args:
        path: The folder or file, the name of a folder under ``VISAVIS_DATA``, a pattern of
            WebDataset shards, or ``hf:OWNER/NAME``.
        decode_videos: Decode all frames of all videos, and not only of a sample of 16.
        on_progress: Called with the number of decoded images and of all images.

    Returns:
        The report.

    Raises:
        DataError: If there is nothing to read at ``path``.
    """
    start, (dataset_format, source) = time.perf_counter(), _locate(path)
    try:
        data = dataset_format.open(source) if dataset_format.open is not None else None
        if data is not None and len(data.images) > MAX_CHECKED_IMAGES:
            note = f"{len(data.images):,} images are not opened: expected at most {MAX_CHECKED_IMAGES:,}"
            findings = (
                *table_problems(source),
                Finding("images not checked", source.name, note, loses_data=False),
            )
            return _with_counts(CheckReport(source, dataset_format.name, findings), data, start)
        listing = _list(dataset_format, source)
    except DataError as error:
        return CheckReport(
            source,
            "unknown",
            (Finding("unreadable", source.name, str(error)),),
            seconds=time.perf_counter() - start,
        )
    sizes = validate_images(
        listing,
        decode_all_frames=True,
        sample_videos=not decode_videos,
        on_progress=on_progress,
        use_cache=False,
    )
    report = CheckReport(source, listing.format_name, tuple(listing.findings), image_sizes=sizes)
    if not any(image.usable for image in listing.images):
        return replace(report, seconds=time.perf_counter() - start)
    return _with_counts(report, listing.dataset(), start)


def _with_counts(report: CheckReport, data: Dataset, start: float) -> CheckReport:
    counts = data.captions_of.counts
    splits = {name: data.split(name) for name in data.splits}
    return replace(
        report,
        splits={
            name: SplitCounts(len(split.images), len(split.captions))
            for name, split in splits.items()
        },
        captions_per_image=(int(counts.min()), int(counts.max())),
        duplicate_captions=0 if data.is_lazy else len(data.captions) - len(set(data.captions)),
        seconds=time.perf_counter() - start,
    )


def find_source(path: str | Path) -> Path:
    """Find the list that describes a data set, or the folder if the format describes a whole
    folder.

    Args:
        path: The folder or file, the name of a folder under ``VISAVIS_DATA``, a pattern of
            WebDataset shards, or ``hf:OWNER/NAME``.

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
    children = (child for child in folder.iterdir() if os.path.isdir(child))
    return sorted(
        child.name
        for child in children
        if any(dataset_format.find_sources(child) for dataset_format in known_formats())
    )


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
    path, root = Path(os.path.expanduser(path)), data_folder()
    return (
        os.path.exists(path)
        or (root is not None and os.path.exists(root / path))
        or DATASET_NAME.fullmatch(str(path)) is not None
    )


def _locate(path: str | Path) -> tuple[DatasetFormat, Path]:
    """Return the format of a data set and its source."""
    patterns = ", ".join(
        pattern for dataset_format in known_formats() for pattern in dataset_format.patterns
    )
    expected = f"one of {patterns} (`visavis catalog formats` describes them)"
    folder = _find_path(path, f" A data set is a folder with {expected}.")
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
        _locate(source)
        if dataset_format in (CAPTION_TABLE, PUBLISHED_TABLE)
        else _by_content(dataset_format, source)
    )


def _by_content(dataset_format: DatasetFormat, source: Path) -> tuple[DatasetFormat, Path]:
    """The format of a source. One Parquet or Arrow file is a table of images or of file names."""
    # Both formats match the suffix .parquet. Their columns differ.
    if dataset_format in (LARGE_TABLE, IMAGE_TABLES) and os.path.isfile(source):
        return (IMAGE_TABLES if has_embedded_images(source) else LARGE_TABLE), source
    return dataset_format, source


def _find_path(path: str | Path, expected: str) -> Path:
    path = Path(os.path.expanduser(path))
    if not is_valid_unicode(str(path)):
        raise DataError(
            f"{escape_surrogates(str(path))}: expected a path in UTF-8, which the files of a run "
            "require, got another. Rename it."
        )
    if path.parts and path.parts[0].startswith("hf:") and not os.path.exists(path):
        return download_dataset(str(path))
    if os.path.exists(path):
        return path
    if is_shard_pattern(path.name):
        # The folder of a pattern exists, the pattern itself does not.
        return _find_path(path.parent, expected) / path.name
    root = data_folder()
    if root is None:
        raise DataError(
            f"{path}: expected an existing path, got none, and VISAVIS_DATA, where it is searched "
            "next, is not set. "
            f"Correct the path, or set VISAVIS_DATA.{expected}"
        )
    if os.path.exists(root / path):
        return root / path
    names = [entry.name for entry in root.iterdir()] if os.path.isdir(root) else []
    close, names = closest_name(str(path), names), sorted(names)
    others = f", or use one of {', '.join(names)}" if 0 < len(names) <= MAX_LISTED_NAMES else ""
    fix = f"Use {close}." if close else f"Correct the path{others}."
    raise DataError(
        f"{path}: expected an existing path, here or under VISAVIS_DATA ({root}), got none. "
        f"{fix}{expected}"
    )
