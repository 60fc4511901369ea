"""Validation of the images of a data set: each is decoded once, and copies are found."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

from visavis.core import storage
from visavis.core.errors import DataError, MissingExtra
from visavis.data.dataset import Dataset, ProgressCallback
from visavis.data.dataset_reader import open_dataset
from visavis.data.file_names import split_priority
from visavis.data.formats.listing import Listing
from visavis.data.image_file import Image
from visavis.data.images import ImageError, image_size
from visavis.data.parallel import map_in_order
from visavis.data.video import MAX_FRAMES_PER_VIDEO, VideoError, decoder_versions, frame_size

# Highest frame rate of common videos. Nobody samples frames at a higher rate.
COMMON_FRAMES_PER_SECOND = 25
# Frames per second at which a video yields a single frame, although all of its frames are decoded.
FIRST_FRAME_ONLY_RATE = 1e-6
# Maximum number of videos that are decoded as a sample, at equal distances in the list.
NUM_SAMPLED_VIDEOS = 16


def open_valid_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    needs_files: bool = True,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Dataset:
    """Open a data set as ``open_dataset``, and decode each image once, to find truncated images and
    copies in two splits. Images of a large table are not decoded. ``frames_per_second``: rate at
    which videos will be read, to find too long ones. ``on_progress``: receives the number of decoded
    images and of all.
    """
    return open_dataset(
        path,
        skip_bad=skip_bad,
        needs_files=needs_files,
        validate=partial(
            validate_images,
            frames_per_second=frames_per_second,
            decode_all_frames=decode_all_frames,
            on_progress=on_progress,
        ),
        validated_by=(frames_per_second, decode_all_frames, decoder_versions()),
    )


def validate_images(
    listing: Listing,
    *,
    frames_per_second: float = 0.0,
    decode_all_frames: bool = False,
    sample_videos: bool = False,
    on_progress: ProgressCallback | None = None,
    use_cache: bool = True,
) -> dict[str, int]:
    """Add problems of the images or of stored features to a listing. Returns the number of images
    of each size, such as ``"224x224"``.
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
    # Rate 0 is unknown. Then the highest rate that the longest video allows is noted.
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
