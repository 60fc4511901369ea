"""Check every image of a listing: each is decoded and hashed once; the result is cached until a file changes."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import itemgetter

import PIL

from visavis import storage
from visavis.data.clips import MAX_FRAMES, BrokenClip
from visavis.data.dataset import Image
from visavis.data.finite import file_marks
from visavis.data.listing import Listing, evaluation_first
from visavis.data.pictures import BrokenPicture, known_formats, picture_size
from visavis.errors import DataError

Progress = Callable[[int, int], None]
USUAL_RATE = 25
"""Pictures a second that nobody exceeds: those of the films themselves."""
ALMOST_NEVER = 1e-6
"""Pictures a second of which a clip gives one alone, though all of its frames are decoded."""


def check_pixels(
    listing: Listing, *, rate: float = 0.0, whole: bool = False, on_progress: Progress | None = None, remembered: bool = True
) -> dict[str, int]:
    """Add what is wrong with the images (or stored features) to a listing; returns the number of images of each size ``"224x224"``.

    rate: pictures a second at which clips are read; 0: not known, then the rate that the longest one allows is noted. whole: decode every
    frame of a clip. remembered: use the cached result of an earlier check if no file has changed since.
    """
    path = storage.cache_folder() / "checks" / f"{_key(listing, rate, whole)}.json"
    seen: Seen | None = storage.kept(path, Seen) if remembered else None
    if seen is None:
        seen = _look(listing, rate, whole, on_progress)
        if not seen.unread:
            storage.keep(path, asdict(seen))
    for image, kind, what in (*seen.faults, *seen.unread):
        listing.lose(kind, listing.entries[image].name, what, image=image)
    for image, what in seen.notes:
        listing.note("image twice", listing.entries[image].name, what)
    if not rate and seen.longest and seen.longest[1] * USUAL_RATE >= MAX_FRAMES:
        image, seconds = seen.longest
        most = math.floor(100 * (MAX_FRAMES - 1) / seconds) / 100
        what = (
            f"the longest video, {seconds:,.0f} seconds, is read at up to {most:g} pictures a second (visual.frames_per_second): more would"
        )
        listing.note("long video", listing.entries[image].name, f"{what} give above {MAX_FRAMES:,}, and training refuses it")
    return seen.sizes


@dataclass(frozen=True)
class Seen:
    """What was seen of the images of a listing, by their indices. faults: kind and what. notes: what. sizes: how many of each.

    unread: kind and what of images that could not be read at the moment; with any of these, nothing is remembered. longest: the longest
    clip, and its seconds.
    """

    faults: list[tuple[int, str, str]]
    notes: list[tuple[int, str]]
    sizes: dict[str, int]
    unread: list[tuple[int, str, str]]
    longest: tuple[int, float] | None = None


def _look(listing: Listing, rate: float, whole: bool, on_progress: Progress | None) -> Seen:
    faults: list[tuple[int, str, str]] = []
    unread: list[tuple[int, str, str]] = []
    sizes: Counter[str] = Counter()
    copies: dict[str, list[int]] = {}
    lengths: dict[int, float] = {}
    if listing.find_broken_features is not None:
        places = {entry.name: index for index, entry in enumerate(listing.entries)}
        what = "the image's features hold NaN or infinity"
        faults = [(places[name], "features not finite", what) for name in listing.find_broken_features()]
    for index, entry in enumerate(listing.entries):
        if entry.bytes is not None and index not in listing.lost_images:
            try:
                digest, (width, height), lengths[index] = _seen(Image(entry.name, "", entry.bytes), rate, whole)
                copies.setdefault(digest, []).append(index)
                sizes[f"{width}x{height}"] += 1
            except BrokenPicture as error:
                faults.append((index, error.kind, f"the image {error.what}"))
            except BrokenClip as error:
                faults.append((index, "broken video", f"the video {error.what}"))
            except DataError as error:
                (unread if storage.momentary(error) else faults).append((index, "unreadable image", str(error).removesuffix(".")))
        if on_progress:
            on_progress(index + 1, len(listing.entries))
    notes = []
    for group in copies.values():
        first, *others = sorted(group, key=lambda index: evaluation_first(listing.entries[index].split))
        for other in others:
            kept, copy = listing.entries[first], listing.entries[other]
            if kept.split == copy.split:
                notes.append((other, f"the image has the very bytes of {kept.name} in the same split"))
            else:
                faults.append(
                    (other, "image in two splits", f"the image of {copy.split} has the very bytes of {kept.name} of {kept.split}")
                )
    return Seen(faults, notes, dict(sizes), unread, max(lengths.items(), key=itemgetter(1), default=None))


def _seen(image: Image, rate: float, whole: bool) -> tuple[str, tuple[int, int], float]:
    """A hash of an image's bytes, its size, and the seconds of a clip: of a picture when all of it was decoded, of a clip when its first
    frame was, or with ``whole`` all of them.
    """
    assert image.bytes is not None
    if not image.is_clip:
        content = image.bytes.read()
        return hashlib.sha256(content).hexdigest(), picture_size(content, image.name), 0.0
    alone = image.bytes.size is None
    digest = storage.content_hash(image.bytes.path) if alone else hashlib.sha256(image.bytes.read()).hexdigest()
    seconds = image.seconds()
    if rate:
        image.num_frames(rate)
    return digest, (image.frames(ALMOST_NEVER)[0] if whole else image.preview()).size, seconds


def _key(listing: Listing, rate: float, whole: bool) -> str:
    """A key of the cache that changes with any entry, its split, the size or time of any file, the decoders, and how clips are looked at."""
    digest = hashlib.sha256(json.dumps([PIL.__version__, known_formats()]).encode())
    paths = {entry.bytes.path for entry in listing.entries if entry.bytes}
    marks = file_marks(paths.union(listing.feature_files))
    digest.update(json.dumps(list(marks.values())).encode())
    for index, entry in enumerate(listing.entries):
        place = entry.bytes and [marks[entry.bytes.path][0], entry.bytes.offset, entry.bytes.size]
        digest.update(json.dumps([entry.name, entry.split, place, index in listing.lost_images]).encode())
    if any(Image(entry.name, "", entry.bytes).is_clip for entry in listing.entries):
        digest.update(json.dumps([rate, whole]).encode())
    return digest.hexdigest()[:32]
