"""Validation of all images of a listing: each is decoded and hashed once, and the result is cached until a file changes."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import itemgetter

import PIL

from visavis import storage
from visavis.data.dataset import ByteRange, Image, ProgressCallback
from visavis.data.formats.listing import Listing, split_priority
from visavis.data.images import ImageError, image_size, supported_formats
from visavis.data.video import MAX_FRAMES_PER_VIDEO, VideoError
from visavis.errors import DataError

# Highest frame rate of common videos. Nobody samples frames at a higher rate.
COMMON_FRAMES_PER_SECOND = 25
# Frames per second at which a video yields a single frame, although all of its frames are decoded.
FIRST_FRAME_ONLY_RATE = 1e-6


def validate_images(
    listing: Listing,
    *,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    on_progress: ProgressCallback | None = None,
    use_cache: bool = True,
) -> dict[str, int]:
    """Add problems of the images or of stored features to a listing.

    Args:
        listing: The listing.
        frames_per_second: Rate at which videos will be read. 0: unknown, and then the highest rate that the longest video allows is noted.
        decode_all_frames: Decode all frames of a video and not only the first one.
        on_progress: Called with the number of decoded images and of all images.
        use_cache: Use the cached result of an earlier validation if no file has changed.

    Returns:
        Number of images of each size, such as ``"224x224"``.
    """
    path = storage.cache_folder() / "checks" / f"{_cache_key(listing, frames_per_second, decode_all_frames)}.json"
    result: ImageValidationResult | None = storage.read_checksummed_json(path, ImageValidationResult) if use_cache else None
    if result is None:
        result = _validate(listing, frames_per_second, decode_all_frames, on_progress)
        if not result.unreadable:
            storage.write_checksummed_json(path, asdict(result))
    for image, kind, message in (*result.errors, *result.unreadable):
        listing.add_loss(kind, listing.images[image].name, message, listing.images[image])
    for image, message in result.notes:
        listing.add_note("duplicate image", listing.images[image].name, message)
    if not frames_per_second and result.longest_video:
        _note_long_video(listing, *result.longest_video)
    return result.sizes


def _note_long_video(listing: Listing, image: int, seconds: float) -> None:
    if seconds * COMMON_FRAMES_PER_SECOND < MAX_FRAMES_PER_VIDEO:
        return
    max_rate = math.floor(100 * (MAX_FRAMES_PER_VIDEO - 1) / seconds) / 100
    message = (
        f"the longest video has {seconds:,.0f} seconds and allows up to {max_rate:g} frames per second (visual.frames_per_second). "
        f"A higher rate yields more than {MAX_FRAMES_PER_VIDEO:,} frames, and training rejects it"
    )
    listing.add_note("long video", listing.images[image].name, message)


@dataclass(frozen=True)
class ImageValidationResult:
    """Result of a validation. Images are given by their index in the listing.

    Attributes:
        errors: Image, kind and message of each problem.
        notes: Image and message of each harmless oddity.
        sizes: Number of images of each size.
        unreadable: Image, kind and message where reading failed for a temporary reason. Such a result is not cached.
        longest_video: Image and seconds of the longest video.
    """

    errors: list[tuple[int, str, str]]
    notes: list[tuple[int, str]]
    sizes: dict[str, int]
    unreadable: list[tuple[int, str, str]]
    longest_video: tuple[int, float] | None = None


def _validate(
    listing: Listing, frames_per_second: float, decode_all_frames: bool, on_progress: ProgressCallback | None
) -> ImageValidationResult:
    """Decode all images, then find copies. Images of unreadable files are not compared."""
    errors: list[tuple[int, str, str]] = []
    unreadable: list[tuple[int, str, str]] = []
    sizes: Counter[str] = Counter()
    images_of_hash: dict[str, list[int]] = {}
    durations: dict[int, float] = {}
    if listing.find_nonfinite_features is not None:
        index_of = {entry.name: index for index, entry in enumerate(listing.images)}
        message = "the image's features contain NaN or infinity"
        errors = [(index_of[name], "features not finite", message) for name in listing.find_nonfinite_features()]
    for index, entry in enumerate(listing.images):
        if entry.location is not None and entry.usable:
            try:
                image = Image(entry.name, "", entry.location)
                digest, (width, height), durations[index] = _decode(image, entry.location, frames_per_second, decode_all_frames)
                images_of_hash.setdefault(digest, []).append(index)
                sizes[f"{width}x{height}"] += 1
            except ImageError as error:
                errors.append((index, error.kind, f"the image {error.problem}"))
            except VideoError as error:
                errors.append((index, "broken video", f"the video {error.problem}"))
            except DataError as error:
                target = unreadable if storage.is_transient_error(error) else errors
                target.append((index, "unreadable image", str(error).removesuffix(".")))
        if on_progress:
            on_progress(index + 1, len(listing.images))
    copies, notes = _compare_copies(listing, images_of_hash.values())
    longest = max(durations.items(), key=itemgetter(1), default=None)
    return ImageValidationResult(errors + copies, notes, dict(sizes), unreadable, longest)


def _compare_copies(listing: Listing, groups: Iterable[list[int]]) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]]]:
    """Return errors for copies in different splits and notes for copies in one split. The copy of the evaluation split is kept."""
    errors, notes = [], []
    for group in groups:
        first, *others = sorted(group, key=lambda index: split_priority(listing.images[index].split))
        for other in others:
            kept, copy = listing.images[first], listing.images[other]
            if kept.split == copy.split:
                notes.append((other, f"the image has the same bytes as {kept.name} in the same split"))
            else:
                message = f"the image of {copy.split} has the same bytes as {kept.name} of {kept.split}"
                errors.append((other, "image in two splits", message))
    return errors, notes


def _decode(image: Image, location: ByteRange, frames_per_second: float, decode_all_frames: bool) -> tuple[str, tuple[int, int], float]:
    """Return a hash of an image's bytes, its size, and the seconds of a video."""
    if not image.is_video:
        content = location.read()
        return hashlib.sha256(content).hexdigest(), image_size(content, image.name), 0.0
    digest, seconds = location.sha256(), image.duration()
    if frames_per_second:
        image.num_frames(frames_per_second)
    return digest, (image.frames(FIRST_FRAME_ONLY_RATE)[0] if decode_all_frames else image.preview()).size, seconds


def _cache_key(listing: Listing, frames_per_second: float, decode_all_frames: bool) -> str:
    """Return a key that changes with any entry, its split, the size or time of any file, the decoders, and the reading of videos."""
    digest = hashlib.sha256(json.dumps([PIL.__version__, supported_formats()]).encode())
    paths = {entry.location.path for entry in listing.images if entry.location}
    stats = storage.file_stats(paths.union(listing.feature_files))
    digest.update(json.dumps(list(stats.values())).encode())
    for entry in listing.images:
        location = entry.location and [stats[entry.location.path][0], entry.location.offset, entry.location.size]
        digest.update(json.dumps([entry.name, entry.split, location, not entry.usable]).encode())
    if any(Image(entry.name, "", entry.location).is_video for entry in listing.images):
        digest.update(json.dumps([frames_per_second, decode_all_frames]).encode())
    return digest.hexdigest()[:32]
