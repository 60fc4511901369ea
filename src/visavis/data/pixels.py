"""Check every image of a listing: each is decoded and hashed once; the result is cached until a file changes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import PIL

from visavis import storage
from visavis.data.clips import BrokenClip
from visavis.data.dataset import Image
from visavis.data.finite import file_marks
from visavis.data.listing import Listing, evaluation_first
from visavis.data.pictures import BrokenPicture, known_formats, picture_size
from visavis.errors import DataError

Progress = Callable[[int, int], None]


def check_pixels(listing: Listing, *, on_progress: Progress | None = None, remembered: bool = True) -> dict[str, int]:
    """Add what is wrong with the images (or stored features) to a listing; returns the number of images of each size ``"224x224"``.

    remembered: use the cached result of an earlier check if no file has changed since.
    """
    path = storage.cache_folder() / "checks" / f"{_key(listing)}.json"
    seen: Seen | None = storage.kept(path, Seen) if remembered else None
    if seen is None:
        seen = _look(listing, on_progress)
        if not seen.unread:
            storage.keep(path, asdict(seen))
    for image, kind, what in (*seen.faults, *seen.unread):
        listing.lose(kind, listing.entries[image].name, what, image=image)
    for image, what in seen.notes:
        listing.note("image twice", listing.entries[image].name, what)
    return seen.sizes


@dataclass(frozen=True)
class Seen:
    """What was seen of the images of a listing, by their indices. faults: kind and what. notes: what. sizes: how many of each.

    unread: kind and what of images that could not be read at the moment; with any of these, nothing is remembered.
    """

    faults: list[tuple[int, str, str]]
    notes: list[tuple[int, str]]
    sizes: dict[str, int]
    unread: list[tuple[int, str, str]]


def _look(listing: Listing, on_progress: Progress | None) -> Seen:
    faults: list[tuple[int, str, str]] = []
    unread: list[tuple[int, str, str]] = []
    sizes: Counter[str] = Counter()
    copies: dict[str, list[int]] = {}
    if listing.find_broken_features is not None:
        places = {entry.name: index for index, entry in enumerate(listing.entries)}
        what = "the image's features hold NaN or infinity"
        faults = [(places[name], "features not finite", what) for name in listing.find_broken_features()]
    for index, entry in enumerate(listing.entries):
        if entry.bytes is not None and index not in listing.lost_images:
            try:
                digest, (width, height) = _seen(Image(entry.name, "", entry.bytes))
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
    return Seen(faults, notes, dict(sizes), unread)


def _seen(image: Image) -> tuple[str, tuple[int, int]]:
    """A hash of an image's bytes, and its size: of a picture when all of it was decoded, of a clip when its first frame was."""
    assert image.bytes is not None
    if not image.is_clip:
        content = image.bytes.read()
        return hashlib.sha256(content).hexdigest(), picture_size(content, image.name)
    whole = image.bytes.size is None
    digest = storage.content_hash(image.bytes.path) if whole else hashlib.sha256(image.bytes.read()).hexdigest()
    image.num_frames(1.0)
    return digest, image.preview().size


def _key(listing: Listing) -> str:
    """A key of the cache that changes with any entry, its split, the size or time of any file, and the decoders."""
    digest = hashlib.sha256(json.dumps([PIL.__version__, known_formats()]).encode())
    paths = {entry.bytes.path for entry in listing.entries if entry.bytes}
    marks = file_marks(paths.union(listing.feature_files))
    digest.update(json.dumps(list(marks.values())).encode())
    for index, entry in enumerate(listing.entries):
        place = entry.bytes and [marks[entry.bytes.path][0], entry.bytes.offset, entry.bytes.size]
        digest.update(json.dumps([entry.name, entry.split, place, index in listing.lost_images]).encode())
    return digest.hexdigest()[:32]
