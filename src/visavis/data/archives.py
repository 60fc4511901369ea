"""Finds the files of listed images: in a folder and its subfolders, or in plain tar archives there, read in place."""

from __future__ import annotations

import os
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from visavis import storage
from visavis.data.clips import VIDEO_SUFFIXES
from visavis.data.dataset import Bytes
from visavis.data.listing import Listing
from visavis.data.walking import files_under
from visavis.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
VISUAL_SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES
_COMPRESSED_SUFFIXES = (".tgz", ".tbz", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_COMPRESSED_BEGINNINGS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_UNPACK = "is a compressed archive, whose members cannot be read in place; unpack it to a plain .tar or a folder"


@dataclass(frozen=True)
class ImageFiles:
    """All files under a folder and in its tar archives, by their path (in the folder, in the archive) and by base name.

    broken: why what lies at a path is no file that can be read; broken_names: the same by base name.
    """

    folder: Path
    by_path: dict[str, Bytes] = field(default_factory=dict)
    by_name: dict[str, list[str]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    broken_names: dict[str, str] = field(default_factory=dict)
    troubles: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, path: str, place: Bytes) -> None:
        path = unicodedata.normalize("NFC", path)
        if path in self.by_path:
            first = self.by_path[path].path.relative_to(self.folder)
            what = f"it lies in {first} and in {place.path.relative_to(self.folder)}; the first is used"
            self.troubles.append(("name twice", path, what))
            return
        self.by_path[path] = place
        self.by_name.setdefault(path.rpartition("/")[2], []).append(path)

    def add_broken(self, path: str, trouble: str) -> None:
        path = unicodedata.normalize("NFC", path)
        self.broken[path] = trouble
        self.broken_names.setdefault(path.rpartition("/")[2], trouble)

    def find(self, file: str) -> str | None:
        """The key of a listed file: its path as listed, else the one path with its base name; a name without an ending may be that of a video.

        Raises DataError if that is several or no file.
        """
        file = unicodedata.normalize("NFC", file).removeprefix("./")
        if file in self.by_path:
            return file
        if trouble := self.broken.get(file) or self.broken_names.get(file):
            raise DataError(f"the image cannot be read: {trouble}")
        places = self.by_name.get(file.rpartition("/")[2], [])
        if len(places) > 1:
            raise DataError(f"the image could be {' or '.join(places[:3])}; list it with its folder")
        if places:
            return places[0]
        videos = [] if "." in file else [path for ending in VIDEO_SUFFIXES for path in self.by_name.get(file + ending, [])]
        if len(videos) > 1:
            raise DataError(f"the video could be {' or '.join(videos[:3])}; list it with its ending")
        if videos:
            return videos[0]
        outside = self.folder / file
        if os.path.isfile(outside):  # hidden, absolute or above the folder
            self.by_path[file] = Bytes(outside)
            return file
        return None

    @property
    def images(self) -> list[str]:
        return [path for path in self.by_path if path.lower().endswith(VISUAL_SUFFIXES)]

    def without_pixels(self, listed: Iterable[str]) -> bool:
        """Whether there is no image at all: none of the listed files, and nothing that is or might hold one."""
        if self.images or self.troubles or any(path.lower().endswith(VISUAL_SUFFIXES) for path in self.broken):
            return False
        return not any(file in self.broken_names or self.find(file) for file in listed)


def find_files(folder: Path) -> ImageFiles:
    """Everything under ``folder``, hidden files and folders left out; tar headers are read once."""
    files, archives = ImageFiles(folder), []
    for path, trouble in files_under(folder):
        name = path.relative_to(folder).as_posix()
        if trouble is not None:
            files.add_broken(name, trouble)
        elif name.endswith((".tar", *_COMPRESSED_SUFFIXES)):
            archives.append(path)
        else:
            files.add(name, Bytes(path))
    for archive in archives:
        try:
            for member, place in _members(archive):
                files.add(member, place)
        except DataError as error:
            files.troubles.append(("broken archive", archive.relative_to(folder).as_posix(), str(error)))
    return files


def _members(archive: Path) -> Iterator[tuple[str, Bytes]]:
    """The regular members and where they lie. Raises DataError where the archive ends too soon or a header is damaged."""
    try:
        with storage.regular_file(archive), open(archive, "rb") as file:
            yield from _headers(file, archive)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - absurd numbers in headers are errors of every kind
        raise DataError(f"the archive is truncated or no tar archive: {str(error) or type(error).__name__}") from None


def _headers(file: BinaryIO, archive: Path) -> Iterator[tuple[str, Bytes]]:
    if file.read(6).startswith(_COMPRESSED_BEGINNINGS) or not archive.name.endswith(".tar"):
        raise DataError(_UNPACK)
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = -1
        for member in tar:
            if tar.offset <= before or member.size < 0:
                raise DataError(f"the archive is damaged: the header of {member.name} says that its size is {member.size:,}")
            before = tar.offset
            if member.isreg() and not member.issparse() and member.offset_data + member.size <= size:
                yield member.name.removeprefix("./"), Bytes(archive, member.offset_data, member.size)
        file.seek(tar.offset)
        if any(file.read(tarfile.BLOCKSIZE)):
            raise DataError(f"the archive is damaged: no header at byte {tar.offset}; what follows cannot be read")


def attach_files(listing: Listing, folder: Path, *, may_lack_pixels: bool) -> None:
    """Give every entry its bytes, and find missing images, captions that name no file, and files that nothing lists.

    may_lack_pixels: a data set without any image file counts as text only, instead of as one with missing images.
    """
    files = find_files(folder)
    if may_lack_pixels and files.without_pixels(entry.file or "" for entry in listing.entries):
        if listing.entries:
            listing.note("no pixels", listing.source.name, f"no image file lies under {folder}, so only texts are here")
        return
    used, missing = set(), False
    for index, entry in enumerate(listing.entries):
        if index in listing.lost_images:
            continue
        if entry.file is None:
            listing.lose("caption without image", entry.name, "the captions name no image file", image=index)
            continue
        try:
            key = files.find(entry.file)
            what = f"the image is missing: {entry.file} is neither a file under {folder} nor in a tar archive there"
        except DataError as error:
            key, what = None, str(error)
        if key is None:
            missing = True
            listing.lose("missing image", entry.name, what, image=index)
        else:
            entry.bytes = files.by_path[key]
            used.add(key)
    for kind, where, what in files.troubles:
        (listing.lose if missing and kind == "broken archive" else listing.note)(kind, where, what)
    for path, what in files.broken.items():
        listing.note("unreadable file", path, what)
    for path in files.images:
        if path not in used:
            listing.note("image without caption", path, f"the file lies in the folder, but {listing.source.name} does not list it")
