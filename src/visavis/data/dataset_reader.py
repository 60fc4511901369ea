"""Opening and check of data sets: find the path, recognize the format, list the content, and skip
nothing without permission.

To add a format, declare it in a module of ``visavis.data.formats`` and add it to ``FORMATS``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from visavis.core import storage
from visavis.core.environment import quote_argument
from visavis.core.errors import (
    MAX_LISTED_NAMES,
    SKIP_BAD_ADVICE,
    DataError,
    MissingExtra,
    NoDataset,
    closest_name,
    log_debug,
)
from visavis.core.own_code import loaded_parts
from visavis.core.result import Result
from visavis.data.dataset import Dataset, Image, ProgressCallback, require
from visavis.data.dataset_cache import DatasetCache
from visavis.data.file_names import split_priority
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
from visavis.data.formats.published_lists import COCO, KARPATHY, MSRVTT, MSVD, PRECOMP
from visavis.data.formats.webdataset import WEBDATASET, is_shard_pattern
from visavis.data.hub_files import DATASET_NAME, download_dataset
from visavis.data.images import ImageError, image_size
from visavis.data.parallel import map_in_order
from visavis.data.video import MAX_FRAMES_PER_VIDEO, VideoError, decoder_versions, frame_size

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
# A check of more images does not open them.
MAX_CHECKED_IMAGES = 1_000_000


def open_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    needs_files: bool = True,
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
        needs_files: Whether an image without a file is unusable.
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
    decoders = decoder_versions() if decode_images else ""
    options = (skip_bad, needs_files, decode_images, frames_per_second, decode_all_frames, decoders)
    # The code of a user's own format may change.
    cache = DatasetCache.of(source, *options) if dataset_format in FORMATS else None
    if cache is not None and (stored := cache.read()) is not None:
        return stored
    listing = _list(dataset_format, source, needs_files=needs_files)
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
    data = listing.dataset()
    if cache is not None and UNSETTLED_KINDS.isdisjoint(finding.kind for finding in losses):
        folder = source if os.path.isdir(source) else source.parent
        cache.write(data, [folder, listing.folder or folder])
    return data


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


def _list(dataset_format: DatasetFormat, source: Path, *, needs_files: bool = True) -> Listing:
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
class CheckReport(Result):
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
    start = time.perf_counter()
    dataset_format, source = _locate(path)
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


def resolve_path(path: str | Path, expected: str = "") -> Path:
    """Find a file or folder by its path, or by its name under ``VISAVIS_DATA``.

    Args:
        path: The path or name.
        expected: Sentence about the expected content, for the error.

    Returns:
        An existing path.

    Raises:
        DataError: If there is no such path.
    """
    path = Path(os.path.expanduser(path))
    require(
        is_valid_unicode(str(path)),
        f"{escape_surrogates(str(path))}: expected a path in UTF-8, which the files of a run "
        "require, got another. Rename it.",
    )
    if path.parts and path.parts[0].startswith("hf:") and not os.path.exists(path):
        return download_dataset(str(path))
    if os.path.exists(path):
        return path
    if is_shard_pattern(path.name):
        # The folder of a pattern exists, the pattern itself does not.
        return resolve_path(path.parent, expected) / path.name
    root = data_folder()
    names = [entry.name for entry in root.iterdir()] if root and os.path.isdir(root) else []
    close = _similar_name(path, names)
    if root is None:
        raise DataError(
            f"{path}: expected an existing path, got none, and VISAVIS_DATA, where it is searched "
            "next, is not set. "
            f"{f'Use {close}.' if close else 'Correct the path, or set VISAVIS_DATA.'}"
            f"{expected}"
        )
    if os.path.exists(root / path):
        return root / path
    listed = ", ".join(sorted(names))
    others = f", or use one of {listed}" if 0 < len(names) <= MAX_LISTED_NAMES else ""
    fix = f"Use {close}." if close else f"Correct the path{others}."
    raise DataError(
        f"{path}: expected an existing path, here or under VISAVIS_DATA ({root}), got none. "
        f"{fix}{expected}"
    )


def _similar_name(path: Path, names: Sequence[str]) -> str | None:
    """The most similar of the given names and the paths in the same folder."""
    neighbors = []
    with suppress(OSError):  # no folder, or one that cannot be read
        neighbors = sorted(str(path.parent / name) for name in os.listdir(path.parent))
    return closest_name(str(path), [*names, *neighbors])


def path_exists(path: str | Path) -> bool:
    """Return whether ``resolve_path`` finds a path.

    Args:
        path: The path or name.

    Returns:
        Whether it exists.
    """
    path = Path(os.path.expanduser(path))
    root = data_folder()
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


# Highest frame rate of common videos. Nobody samples frames at a higher rate.
COMMON_FRAMES_PER_SECOND = 25
# Frames per second at which a video yields a single frame, although all of its frames are decoded.
FIRST_FRAME_ONLY_RATE = 1e-6
# Maximum number of videos that are decoded as a sample, at equal distances in the list.
NUM_SAMPLED_VIDEOS = 16


def validate_images(
    listing: Listing,
    *,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    sample_videos: bool = False,
    on_progress: ProgressCallback | None = None,
    use_cache: bool = True,
) -> dict[str, int]:
    """Add problems of the images or of stored features to a listing.

    Args:
        listing: The listing.
        frames_per_second: Rate at which videos will be read. 0: unknown, and then the highest rate
            that the longest video allows is noted.
        decode_all_frames: Decode all frames of a video and not only the first one.
        sample_videos: Decode a sample of the videos, and read only the containers of the others,
            which hold the times of all frames.
        on_progress: Called with the number of decoded images and of all images.
        use_cache: Use the cached result of an earlier validation if no file has changed.

    Returns:
        Number of images of each size, such as ``"224x224"``.
    """
    path = (
        storage.cache_folder()
        / "checks"
        / f"{_cache_key(listing, frames_per_second, decode_all_frames, sample_videos)}.json"
    )
    result: ImageValidationResult | None = (
        storage.read_checksummed_json(path, ImageValidationResult) if use_cache else None
    )
    if result is None:
        result = _validate(
            listing, frames_per_second, decode_all_frames, sample_videos, on_progress
        )
        if not result.unreadable:
            storage.write_checksummed_json(path, asdict(result))
    for image, kind, message in (*result.errors, *result.unreadable):
        listing.add_loss(kind, listing.images[image].name, message, listing.images[image])
    for image, message in result.notes:
        listing.add_note("duplicate image", listing.images[image].name, message)
    image, seconds = result.longest_video or (0, 0.0)
    if not frames_per_second and seconds * COMMON_FRAMES_PER_SECOND >= MAX_FRAMES_PER_VIDEO:
        max_rate = math.floor(100 * (MAX_FRAMES_PER_VIDEO - 1) / seconds) / 100
        message = (
            f"the longest video has {seconds:,.0f} seconds and allows up to {max_rate:g} frames "
            "per second (visual.frames_per_second). "
            f"A higher rate yields more than {MAX_FRAMES_PER_VIDEO:,} frames, and training rejects it"
        )
        listing.add_note("long video", listing.images[image].name, message)
    return result.sizes


@dataclass(frozen=True)
class ImageValidationResult:
    """Result of a validation. Images are given by their index in the listing.

    Attributes:
        errors: Image, kind and message of each problem.
        notes: Image and message of each harmless oddity.
        sizes: Number of images of each size.
        unreadable: Image, kind and message where reading failed for a temporary reason. Such a
            result is not cached.
        longest_video: Image and seconds of the longest video.
    """

    errors: list[tuple[int, str, str]]
    notes: list[tuple[int, str]]
    sizes: dict[str, int]
    unreadable: list[tuple[int, str, str]]
    longest_video: tuple[int, float] | None = None


def _validate(
    listing: Listing,
    frames_per_second: float,
    decode_all_frames: bool,
    sample_videos: bool,
    on_progress: ProgressCallback | None,
) -> ImageValidationResult:
    """Decode all images, then find copies. Images of unreadable files are not compared."""
    errors: list[tuple[int, str, str]] = []
    if listing.find_nonfinite_features is not None:
        index_of = {entry.name: index for index, entry in enumerate(listing.images)}
        message = "the image's features contain NaN or infinity"
        errors += [
            (index_of[name], "features not finite", message)
            for name in listing.find_nonfinite_features()
        ]
    unreadable: list[tuple[int, str, str]] = []
    sizes: Counter[str] = Counter()
    # By the hash of their bytes, to find copies.
    images_of_hash: dict[str, list[int]] = {}
    durations: dict[int, float] = {}
    images = [
        Image(entry.name, "", entry.location if entry.usable else None) for entry in listing.images
    ]
    videos = [
        index for index, image in enumerate(images) if image.location is not None and image.is_video
    ]
    decoded_videos = set(videos)
    if sample_videos and len(videos) > NUM_SAMPLED_VIDEOS:
        decoded_videos = set(videos[:: math.ceil(len(videos) / NUM_SAMPLED_VIDEOS)])
        message = (
            f"{len(decoded_videos)} of {len(videos):,} videos were decoded, and only the "
            "containers of the others were read (decode all with --decode-videos)"
        )
        listing.add_note("videos not decoded", listing.source.name, message)

    # An error is a result, so that the images after it are decoded, too.
    def decode(index: int) -> _DecodedContent | DataError | None:
        try:
            return _decode(
                images[index], frames_per_second, decode_all_frames, index in decoded_videos
            )
        except DataError as error:
            return error
        except MissingExtra as error:
            # Of one photo among others. A model that reads clips needs their decoder.
            if images[index].is_video:
                raise
            return DataError(str(error))

    for index, decoded in enumerate(map_in_order(decode, range(len(images)))):
        if isinstance(decoded, ImageError):
            errors.append((index, decoded.kind, f"the image {decoded.problem}"))
        elif isinstance(decoded, VideoError):
            errors.append((index, "broken video", f"the video {decoded.problem}"))
        elif isinstance(decoded, DataError):
            # A file on a drive that is not mounted now may be intact.
            target = unreadable if storage.is_transient_error(decoded) else errors
            target.append((index, "unreadable image", str(decoded).removesuffix(".")))
        elif decoded is not None:
            digest, size, durations[index] = decoded
            images_of_hash.setdefault(digest, []).append(index)
            sizes[f"{size[0]}x{size[1]}"] += 1
        if on_progress:
            on_progress(index + 1, len(images))
    notes: list[tuple[int, str]] = []
    for group in images_of_hash.values():
        # The copy of the evaluation split is kept.
        first, *copies = sorted(
            group, key=lambda index: split_priority(listing.images[index].split)
        )
        original = listing.images[first]
        for index in copies:
            copy_split = listing.images[index].split
            same_bytes = f"has the same bytes as {original.name}"
            if original.split == copy_split:
                notes.append((index, f"the image {same_bytes} in the same split"))
            else:
                message = f"the image of {copy_split} {same_bytes} of {original.split}"
                errors.append((index, "image in two splits", message))
    longest = max(durations.items(), key=itemgetter(1), default=None)
    return ImageValidationResult(errors, notes, dict(sizes), unreadable, longest)


_DecodedContent = tuple[str, tuple[int, int], float]


def _decode(
    image: Image, frames_per_second: float, decode_all_frames: bool, decode_video: bool
) -> _DecodedContent | None:
    """Return a hash of an image's bytes, its size, and the seconds of a video. None for an image
    without a file.
    """
    if image.location is None:
        return None
    if not image.is_video:
        content = image.read()
        return hashlib.sha256(content).hexdigest(), image_size(content, image.name), 0.0
    # The container holds the times of all frames, so a truncated video is found without decoding.
    digest = image.location.sha256()
    seconds = image.duration()
    if frames_per_second:
        image.num_frames(frames_per_second)
    if not decode_video:
        with image.location.open() as file:
            return digest, frame_size(file, image.name), seconds
    return (
        digest,
        (image.frames(FIRST_FRAME_ONLY_RATE)[0] if decode_all_frames else image.preview()).size,
        seconds,
    )


def _cache_key(
    listing: Listing, frames_per_second: float, decode_all_frames: bool, sample_videos: bool
) -> str:
    """Return a key that changes with any entry, its split, the size or time of any file, the
    decoders, and the reading of videos.
    """
    # Another version may decode a file that this one cannot.
    digest = hashlib.sha256(decoder_versions().encode())
    paths = {entry.location.path for entry in listing.images if entry.location}
    stats = storage.file_stats(paths.union(listing.feature_files))
    digest.update(json.dumps(list(stats.values())).encode())
    for entry in listing.images:
        location = entry.location and [
            stats[entry.location.path][0],
            entry.location.offset,
            entry.location.size,
        ]
        digest.update(json.dumps([entry.name, entry.split, location, not entry.usable]).encode())
    if any(Image(entry.name, "", entry.location).is_video for entry in listing.images):
        digest.update(json.dumps([frames_per_second, decode_all_frames, sample_videos]).encode())
    return digest.hexdigest()[:32]
