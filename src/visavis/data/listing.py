"""Everything a reader finds in a source: its images and captions, also unusable ones, and what is wrong with them.

A Listing keeps every image and caption at its position in the source, so that the rows of stored features still match;
``dataset()`` returns the usable ones. Captions stay in the order of the source.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from visavis.data.dataset import Bytes, Dataset, Image
from visavis.data.source_text import is_unicode, printable
from visavis.errors import DataError

LONGEST_CAPTION = 20_000
"""Characters; a batch is as wide as its longest caption."""
SPLITS = ("train", "val", "test")
_SPLIT_NAMES = {
    **dict.fromkeys(["restval", "training"], "train"),
    **dict.fromkeys(["dev", "valid", "validate", "validation"], "val"),
    "testing": "test",
}


@dataclass(frozen=True)
class Finding:
    """A problem or an oddity: its kind, where (file, file:line or image name), what, and whether training would lose something."""

    kind: str
    where: str
    what: str
    loses: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Entry:
    """One image as listed. file: the path that the source gives (None: it gives none)."""

    name: str
    split: str | None
    file: str | None = None
    bytes: Bytes | None = None


@dataclass
class Listing:
    """Images and captions as listed in ``source``, with findings; filled by a reader, finished by ``finish``.

    layout: the name of the layout that the source was read as.
    image_of and places ``[captions]``: the index of the caption's image (-1: none), and its position (file and line, or image).
    feature_files: the files of stored features, where the layout has these instead of pixels. find_broken_features: reads all of them
    and returns the names of the images whose features are not finite.
    """

    source: Path
    layout: str = ""
    entries: list[Entry] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    image_of: list[int] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    lost_images: set[int] = field(default_factory=set)
    lost_captions: set[int] = field(default_factory=set)
    feature_files: tuple[Path, ...] = ()
    find_broken_features: Callable[[], list[str]] | None = None

    def note(self, kind: str, where: str, what: str) -> None:
        """Record an oddity; training loses nothing by it."""
        self.findings.append(Finding(kind, printable(where), printable(what), loses=False))

    def lose(self, kind: str, where: str, what: str, *, image: int | None = None, caption: int | None = None) -> None:
        """Record a problem for which training would lose an image, a caption, or a line of the source."""
        self.findings.append(Finding(kind, printable(where), printable(what)))
        if image is not None:
            self.lost_images.add(image)
        if caption is not None:
            self.lost_captions.add(caption)

    def add_caption(self, caption: str, image: int, place: str) -> int:
        """Append a caption; its index."""
        self.captions.append(caption)
        self.image_of.append(image)
        self.places.append(place)
        return len(self.captions) - 1

    def finish(self) -> None:
        """Assign missing splits, then find the problems any layout can have: broken texts, images without captions, empty splits."""
        self._assign_splits()
        self.check_texts()
        described = {self.image_of[i] for i in range(len(self.captions)) if i not in self.lost_captions}
        listed = set(self.image_of)
        for index, entry in enumerate(self.entries):
            if index not in described and index not in self.lost_images:
                what = "the image has no usable caption" if index in listed else "the image is listed without a caption"
                self.lose("image without caption", entry.name, f"{what}; give it one or take it out", image=index)
        if not self.entries:
            self.lose("no images", self.source.name, "it lists no image")
            return
        present = {entry.split for index, entry in enumerate(self.entries) if index not in self.lost_images}
        if absent := [split for split in SPLITS if split not in present]:
            self.note("empty split", self.source.name, f"no image in split {' or '.join(absent)}")

    def _assign_splits(self) -> None:
        none_given = all(entry.split is None for entry in self.entries)
        for index, entry in enumerate(self.entries):
            if entry.split is None and not none_given and index not in self.lost_images:
                self.lose("image without split", entry.name, "the image has no split, although others have one", image=index)
            entry.split = entry.split or assigned_split(entry.name)

    def check_texts(self) -> None:
        """Find names, splits and captions that are not UTF-8, and captions that are empty, endless or repeated."""
        for index, entry in enumerate(self.entries):
            for what, text in (("name", entry.name), ("split", entry.split or "")):
                if index not in self.lost_images and not is_unicode(text):
                    self.lose("broken UTF-8", entry.name, f"the image's {what} is not UTF-8", image=index)
        seen: set[tuple[int, str]] = set()
        for index, (caption, image) in enumerate(zip(self.captions, self.image_of, strict=True)):
            if index in self.lost_captions:
                continue
            if not caption.strip():
                self.lose("empty caption", self.places[index], "the caption is empty", caption=index)
            elif len(caption) > LONGEST_CAPTION:
                what = f"the caption has {len(caption):,} characters, expected at most {LONGEST_CAPTION:,}: it is no caption of one image"
                self.lose("caption too long", self.places[index], what, caption=index)
            elif not is_unicode(caption):
                self.lose("broken UTF-8", self.places[index], f"the caption {caption!r} is not UTF-8; save it as UTF-8", caption=index)
            elif (image, caption) in seen:
                self.note("caption twice", self.places[index], f"the image has the caption {caption!r} already")
            seen.add((image, caption))

    def dataset(self) -> Dataset:
        """The usable images and captions. Raises DataError if there is no usable image."""
        kept = [index for index in range(len(self.entries)) if index not in self.lost_images]
        place = np.full(len(self.entries) + 1, -1)  # the last one is that of captions without an image
        place[kept] = np.arange(len(kept))
        image_of = place[np.array(self.image_of, dtype=np.int64)]
        captions = [index for index in np.flatnonzero(image_of >= 0).tolist() if index not in self.lost_captions]
        if not kept:
            raise DataError(f"{self.source} holds no image that can be used ({count_kinds(self.losses)}): {self.losses[0]}.")
        whole = len(kept) == len(self.entries) and len(captions) == len(self.captions)
        return Dataset(
            name=dataset_name(self.source),
            images=tuple(Image(self.entries[i].name, self.entries[i].split or "", self.entries[i].bytes) for i in kept),
            captions=tuple(self.captions[i] for i in captions),
            image_of=image_of[captions],
            origin=None if whole else np.array(kept),
            caption_origin=None if whole else np.array(captions, dtype=np.int64),
            skipped=self._skipped(len(kept), len(captions)),
        )

    @property
    def losses(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.loses]

    def _skipped(self, images: int, captions: int) -> tuple[str, ...]:
        if not self.losses:
            return ()
        total = f"{len(self.entries) - images} of {len(self.entries)} images and "
        total += f"{len(self.captions) - captions} of {len(self.captions)} captions of {self.source.name} ({count_kinds(self.losses)})"
        return (total, *map(str, self.losses))


def count_kinds(findings: list[Finding]) -> str:
    """``"2 x missing image, 1 x empty caption"``."""
    return ", ".join(f"{number} x {kind}" for kind, number in Counter(finding.kind for finding in findings).items())


def dataset_name(source: Path) -> str:
    return source.name if source.is_dir() else source.resolve().parent.name


def split_name(given: object) -> str | None:
    """The standard name of a split as a source names it (``restval`` and ``training`` are train, ``dev`` is val); None where it names none."""
    name = given.strip() if isinstance(given, str) else ""
    return _SPLIT_NAMES.get(name, name) or None


def evaluation_first(split: str | None) -> int:
    """The order in which copies of an image are kept: a result on test must not come from training on it."""
    return {"test": 0, "val": 1}.get(split or "", 2)


def assigned_split(name: str) -> str:
    """The split of an image that has none: 80 % train, 10 % val, 10 % test by a hash of its name, whatever else is in the folder."""
    hundredth = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]) % 100
    return "train" if hundredth < 80 else "val" if hundredth < 90 else "test"
