"""What there is to index: the pictures and clips of a folder, or of a data set in any layout (tar shards too)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from visavis.data import Dataset, open_dataset
from visavis.data.archives import VISUAL_SUFFIXES
from visavis.data.clips import is_video
from visavis.data.dataset import Bytes
from visavis.data.walking import files_under
from visavis.errors import DataError

LATEST = 2**63 - 1
"""The last time that stores can hold, in the year 2262; later ones are taken for it."""


@dataclass(frozen=True)
class File:
    """A picture or a clip at its place. path: below the root, with slashes, or its name in a data set. size: in bytes. modified_ns: the
    last change of the file, or of the archive that it lies in.
    """

    path: str
    bytes: Bytes
    size: int
    modified_ns: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        return is_video(self.path) or (self.bytes.size is None and is_video(self.bytes.path.name))


@dataclass(frozen=True)
class Source:
    """Files in the order of their paths, and sentences about what is left out."""

    root: Path
    files: tuple[File, ...]
    skipped: tuple[str, ...] = ()
    is_dataset: bool = False


def open_source(path: str | Path) -> Source:
    """The files of a data set, with their split and first caption as metadata, or of any folder. Raises DataError where there are none."""
    root = Path(path).expanduser()
    try:
        dataset = open_dataset(path, skip_bad=True)
    except DataError:
        if not root.is_dir():
            raise
    else:
        if files := tuple(_of_dataset(dataset)):
            return Source(root.absolute(), files, dataset.skipped, is_dataset=True)
        raise DataError(f"{path} is a data set without pictures: only its captions or features are here, and an index needs pictures.")
    found, skipped, within, outside = list[File](), list[str](), _Within(root), Counter[str]()
    for file, trouble in files_under(root):
        if file.suffix.lower() not in VISUAL_SUFFIXES:
            continue
        name = file.relative_to(root).as_posix()
        if link := within.link_out(file):
            outside[link] += 1
            continue
        if trouble is None and not _is_text(name):
            trouble = "its name is not Unicode: rename it"
        if trouble is None and (entry := _entry(name, Bytes(file), {})) is not None:
            found.append(entry)
        else:
            skipped.append(f"{name!r}: {trouble or 'it vanished while the folder was read'}.")
    skipped += [
        f"{link!r} is a link that leads out of {root}, and nothing outside is shown: its pictures and videos ({count:,}) are left out; "
        "index the place that it leads to."
        for link, count in outside.items()
    ]
    if not found:
        raise DataError(f"{path} holds no pictures and no videos that can be read: name a folder with some in it, or a data set.")
    return Source(root.absolute(), tuple(sorted(found, key=lambda entry: entry.path)), tuple(skipped))


class _Within:
    """What lies in a folder, and what is only reached from it through links."""

    def __init__(self, root: Path):
        self.root, self.real = root, {root: root.resolve()}

    def link_out(self, file: Path) -> str:
        """The first link on the way to a file after which it is outside of the folder; empty for one that lies inside."""
        for place in (*reversed(file.relative_to(self.root).parents[:-1]), file.relative_to(self.root)):
            if not self._resolved(self.root / place).is_relative_to(self.real[self.root]):
                return place.as_posix()
        return ""

    def _resolved(self, place: Path) -> Path:
        """The place itself, links followed; that of a folder is found once."""
        if place in self.real:
            return self.real[place]
        real = place.resolve() if place.is_symlink() else self._resolved(place.parent) / place.name
        if place.is_dir():
            self.real[place] = real
        return real


def _of_dataset(dataset: Dataset) -> Iterator[File]:
    for image, captions in sorted(zip(dataset.images, dataset.captions_of, strict=True), key=lambda pair: pair[0].name):
        if image.bytes is None:
            continue
        caption = {"caption": dataset.captions[captions[0]]} if len(captions) else {}
        if (entry := _entry(image.name, image.bytes, {"split": image.split, **caption})) is not None:
            yield entry


def _entry(name: str, place: Bytes, metadata: Mapping[str, str]) -> File | None:
    try:
        status = place.path.stat()
    except OSError:
        return None
    modified_ns = min(max(status.st_mtime_ns, -LATEST), LATEST)
    return File(name, place, status.st_size if place.size is None else place.size, modified_ns, metadata)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
