"""Search for the files of listed images: in a folder and its subfolders, and in plain tar archives,
which are read in place.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import require
from visavis.data.file_names import (
    DATASET_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    VIDEO_SUFFIXES,
    VISUAL_SUFFIXES,
    describe_other_files,
    escape_name,
    fold_case,
    unescape_name,
)
from visavis.data.formats.listing import Listing, clean_name
from visavis.data.hub_files import hub_repository
from visavis.data.image_file import ByteRange

# Patterns of hidden names, and of the thumbnails, recycle bins, snapshots and resource forks of
# storage devices and operating systems.
EXCLUDED_NAMES = (
    ".*",
    "@eaDir",
    "@Recycle",
    "@Recently-Snapshot",
    "#recycle",
    "#snapshot",
    "$RECYCLE.BIN",
    "RECYCLER",
    "System Volume Information",
    "__MACOSX",
    "lost+found",
)


@dataclass(frozen=True)
class Exclusion:
    """Names that are not searched: ``EXCLUDED_NAMES``, and a user's patterns. Upper and lower case
    are equal.

    Attributes:
        patterns: A pattern without a slash matches the name of a file or folder, any other its path
            below the searched folder.
    """

    patterns: tuple[str, ...] = ()

    @cached_property
    def _expressions(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Expressions of names and of paths."""
        is_path = {pattern: "/" in pattern.rstrip("/") for pattern in self.patterns}
        names = [*EXCLUDED_NAMES, *(pattern for pattern in self.patterns if not is_path[pattern])]
        paths = [pattern.lstrip("/") for pattern in self.patterns if is_path[pattern]]
        return tuple(  # type: ignore[return-value]
            re.compile("|".join(fnmatch.translate(fold_case(text.rstrip("/"))) for text in texts))
            for texts in (names, paths)
        )

    def matches(self, path: str) -> bool:
        """Return whether a file or folder is excluded by itself, by its name or path."""
        names, paths = self._expressions
        path = fold_case(path)
        return bool(names.fullmatch(path.rpartition("/")[2]) or paths.fullmatch(path))

    def covers(self, path: str) -> bool:
        """Return whether a file is excluded, by itself or as a part of an excluded folder."""
        return any(place != "." and self.matches(place) for place in path_and_parents(path))


def path_and_parents(path: str) -> Iterator[str]:
    """Return a path and all folders above it, up to ``"."``.

    Args:
        path: Path below a folder with forward slashes.

    Yields:
        The paths.

    Example:
        >>> list(path_and_parents("2024/spring/a.png"))
        ['2024/spring/a.png', '2024/spring', '2024', '.']
    """
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield "."


NO_EXCLUSION = Exclusion()


@dataclass(frozen=True)
class FolderScan:
    """Content of a folder and its subfolders. Paths are below it, with forward slashes, and as
    ``escape_name`` writes them. ``"."`` is the folder itself.

    Attributes:
        folder: The folder.
        files: Regular files.
        unreadable: Problem of each file or folder that cannot be read now. All below it may still
            exist.
        skipped: Problem of each name that is neither a file nor a folder.
        excluded: Excluded folders, and excluded images and videos.
        empty: Folders without content, such as the place of a drive that is not mounted.
    """

    folder: Path
    files: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def problems(self) -> dict[str, str]:
        """Problem of each path that is not a file."""
        return self.unreadable | self.skipped

    def place(self, path: str) -> Path:
        """Return the place of a file or folder on the disk."""
        return self.folder / unescape_name(path)


def scan_folder(folder: Path, exclusion: Exclusion = NO_EXCLUSION) -> FolderScan:
    """Find all files under a folder, following links inside it and into ``VISAVIS_IMAGE_ROOTS``. A
    folder is not entered twice.
    """
    # A stack instead of recursion: folders can be nested deeper than the recursion limit.
    scan = FolderScan(folder)
    pending = [""]
    seen = set[tuple[int, int]]()
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(scan.place(parent)) as listed:
                # The order of a file system differs from one computer to another.
                entries = sorted(listed, key=lambda entry: entry.name)
            # A link may lead back to this folder.
            seen.add(_identity(os.stat(scan.place(parent))))
        except OSError as error:
            scan.unreadable[parent or "."] = (
                f"the folder cannot be read: {error.strerror}. Check its permissions and its drive"
            )
            continue
        subfolders = list[str]()
        is_empty = True
        for entry in entries:
            name = escape_name(entry.name)
            path = f"{parent}/{name}" if parent else name
            try:
                if exclusion.matches(path):
                    if entry.is_dir(follow_symlinks=False) or path.lower().endswith(
                        VISUAL_SUFFIXES
                    ):
                        scan.excluded.append(path)
                    continue
                is_empty = False
                if (identity := _add_entry(scan, entry, path)) is not None and identity not in seen:
                    seen.add(identity)
                    subfolders.append(path)
            except OSError as error:
                broken = "it is a broken link: {}. Restore its target, or remove it"
                unreadable = "it cannot be read: {}. Check its permissions and its drive"
                scan.unreadable[path] = (broken if entry.is_symlink() else unreadable).format(
                    error.strerror
                )
        if is_empty:
            scan.empty.append(parent or ".")
        # Reversed, because the last entry of the stack is visited first.
        pending += reversed(subfolders)
    return scan


def _add_entry(scan: FolderScan, entry: os.DirEntry[str], path: str) -> tuple[int, int] | None:
    """Add a file or a problem. Returns the identity of a folder to search."""
    # Links to other places and other kinds of files, such as sockets, are never opened.
    if entry.is_file(follow_symlinks=False):
        scan.files.append(path)
        return None
    status = os.stat(scan.place(path))
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        scan.skipped[path] = (
            f"it is {storage.file_kind(status.st_mode)}, expected a regular file. Replace or "
            "remove it"
        )
    elif entry.is_symlink() and not storage.is_inside(scan.place(path), scan.folder):
        # Its target may be readable again when VISAVIS_IMAGE_ROOTS is set.
        scan.unreadable[path] = (
            f"it is a link to a location outside {scan.folder}. Add this location to "
            f"{storage.IMAGE_ROOTS} to include it"
        )
    elif is_folder:
        return _identity(status)
    else:
        scan.files.append(path)
    return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_COMPRESSED_SUFFIXES = (".tgz", ".tbz", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_COMPRESSED_MAGIC_BYTES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
# Bytes of a header of a tar archive, including the long name of its member.
_MAX_HEADER_BYTES = 2**20
_COMPRESSED_ARCHIVE = "is a compressed archive, whose members cannot be read in place. Unpack it to a plain .tar or a folder"


@dataclass(frozen=True)
class ImageFiles:
    """All files under a folder and in its tar archives.

    Attributes:
        folder: The folder.
        by_path: Location of each file by its path in the folder or archive.
        by_clean_path: First path of each cleaned path.
        by_name: Paths by base name.
        unreadable: Reason why a path cannot be read.
        unreadable_names: The same by base name.
        unsearched: Each folder or archive that is not searched, with the reason.
        problems: Kind, location and message of each problem.
    """

    folder: Path
    by_path: dict[str, ByteRange] = field(default_factory=dict)
    by_clean_path: dict[str, str] = field(default_factory=dict)
    by_name: dict[str, list[str]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unreadable_names: dict[str, str] = field(default_factory=dict)
    unsearched: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, path: str, location: ByteRange) -> None:
        """Add a file. The first file of a path is used."""
        path = path_key(path)
        if path in self.by_path:
            first = self.by_path[path].path.relative_to(self.folder)
            message = f"it is in {first} and in {location.path.relative_to(self.folder)}, the first is used"
            self.problems.append(("duplicate name", path, message))
            return
        self.by_path[path] = location
        self.by_clean_path.setdefault(clean_name(path), path)
        self.by_name.setdefault(path.rpartition("/")[2], []).append(path)

    def find(self, file: str) -> str | None:
        """Find a listed file: by its path, or else by its base name if it is unique, or else in
        ``VISAVIS_IMAGE_ROOTS``. Returns a key of ``by_path``, or None.
        """
        # Files of folders that are not searched have the form of accents that their disk stores.
        spellings = dict.fromkeys(
            (
                file,
                *(
                    unicodedata.normalize(form, clean_name(path_key(file)))
                    for form in ("NFC", "NFD")
                ),
            )
        )
        file = path_key(file)
        if file in self.by_path:
            return file
        if problem := self.unreadable.get(file) or self.unreadable_names.get(file):
            raise DataError(f"the image cannot be read: {problem}")
        # Paths of Windows and surrounding spaces are cleaned if no file has the exact path.
        file = clean_name(file)
        if file in self.by_clean_path:
            return self.by_clean_path[file]
        matches = self.by_name.get(file.rpartition("/")[2], [])
        require(
            len(matches) <= 1,
            f"the image could be {' or '.join(matches[:3])}. List its folder, too",
        )
        if matches:
            return matches[0]
        # A name without a suffix may also name a video.
        suffixes = () if "." in file else VIDEO_SUFFIXES
        videos = [path for suffix in suffixes for path in self.by_name.get(file + suffix, [])]
        require(
            len(videos) <= 1,
            f"the video could be {' or '.join(videos[:3])}. List its suffix, too",
        )
        if videos:
            return videos[0]
        listed_path = next(
            (path for name in spellings if os.path.isfile(path := self.folder / name)), None
        )
        if listed_path is None:
            names = [part for name in spellings for part in (name, name.rpartition("/")[2])]
            for path in (Path(root) / name for root in storage.image_roots() for name in names):
                if os.path.isfile(path):
                    self.by_path[file] = ByteRange(path, root=Path(os.path.realpath(self.folder)))
                    return file
            if self.unsearched:
                raise DataError(
                    f"the image is missing, and a folder is not searched: {self.unsearched[0]}"
                )
            return None
        require(
            storage.is_inside(listed_path, self.folder),
            f"the image is outside {self.folder}. Move it there, or add its folder to "
            f"{storage.IMAGE_ROOTS}",
        )
        # An excluded file, such as a hidden one. find_files leaves them out.
        self.by_path[file] = ByteRange(listed_path, root=Path(os.path.realpath(self.folder)))
        return file

    @property
    def images(self) -> list[str]:
        """Paths of images and videos, also of photos that cannot be decoded."""
        return [
            path
            for path in self.by_path
            if path.lower().endswith(VISUAL_SUFFIXES + UNSUPPORTED_SUFFIXES)
        ]

    def has_no_images(self, listed: Iterable[str]) -> bool:
        """Return whether the folder lacks images: no listed file exists, and neither does an image
        or archive.
        """
        if (
            self.images
            or self.problems
            or any(path.lower().endswith(VISUAL_SUFFIXES) for path in self.unreadable)
        ):
            return False
        try:
            return not any(file in self.unreadable_names or self.find(file) for file in listed)
        except DataError:
            return False


def path_key(path: str) -> str:
    """Return a path as it is compared. File systems differ in the form of letters with accents."""
    return unicodedata.normalize("NFC", path).removeprefix("./")


def find_files(folder: Path) -> ImageFiles:
    """Find all files under a folder, except excluded ones. Headers of tar archives are read once."""
    files = ImageFiles(folder)
    root = Path(os.path.realpath(folder))
    scan = scan_folder(folder)
    for name, problem in scan.problems.items():
        path = path_key(unescape_name(name))
        files.unreadable[path] = problem
        files.unreadable_names.setdefault(path.rpartition("/")[2], problem)
        if name in scan.unreadable and (
            os.path.isdir(scan.place(name)) or os.path.splitext(name)[1] in ("", ".tar")
        ):
            files.unsearched.append(f"{name}: {problem}")
    suffixes = (".tar", *_COMPRESSED_SUFFIXES)
    for name in scan.files:
        if not name.endswith(suffixes):
            files.add(unescape_name(name), ByteRange(scan.place(name), root=root))
    # After all files, because the first file of a path is used.
    for archive in (scan.place(name) for name in scan.files if name.endswith(suffixes)):
        try:
            with storage.open_file(archive, root) as file:
                for member, location in archive_members(file, archive, root):
                    files.add(member, location)
        except DataError as error:
            files.problems.append(
                ("broken archive", archive.relative_to(folder).as_posix(), str(error))
            )
    return files


def archive_members(
    file: BinaryIO, archive: Path, root: Path | None = None
) -> Iterator[tuple[str, ByteRange]]:
    """Yield the name and location of each regular member of a tar archive. Damage is an error after
    the members before it.
    """
    try:
        yield from _headers(file, archive, root)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - absurd numbers in headers are errors of every kind
        raise DataError(
            f"the archive is truncated or not a tar archive: {storage.error_reason(error)}"
        ) from None


@dataclass(frozen=True)
class _HeaderFile:
    """A tar file of which headers are read. A long name is read at once, whatever size its header
    declares.
    """

    file: BinaryIO

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise DataError(
                f"the archive is damaged: expected a header of at most {_MAX_HEADER_BYTES:,} "
                f"bytes, got {size:,}"
            )
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _headers(file: BinaryIO, archive: Path, root: Path | None) -> Iterator[tuple[str, ByteRange]]:
    require(
        archive.name.endswith(".tar") and not file.read(6).startswith(_COMPRESSED_MAGIC_BYTES),
        _COMPRESSED_ARCHIVE,
    )
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with tarfile.open(fileobj=_HeaderFile(file), mode="r:") as tar:
        previous = -1
        for member in tar:
            # A damaged header can lead back to an earlier one, which would never end.
            if tar.offset <= previous or member.size < 0:
                raise DataError(
                    f"the archive is damaged: the header of {member.name} declares a size of "
                    f"{member.size:,}"
                )
            previous = tar.offset
            if (
                member.isreg()
                # The bytes of a sparse member are not its content.
                and not member.issparse()
                and member.offset_data + member.size <= size
            ):
                yield (
                    member.name.removeprefix("./"),
                    ByteRange(archive, member.offset_data, member.size, root),
                )
        # tarfile takes a damaged header for the end of the archive. A real end is a block of zeros.
        file.seek(tar.offset)
        require(
            not any(file.read(tarfile.BLOCKSIZE)),
            f"the archive is damaged: expected a header at byte {tar.offset}, the remaining "
            "content cannot be read",
        )


def containing_folder(folder: Path) -> Path:
    """Return the folder that must contain the files of a data set: the folder, or its repository in
    the cache of the Hugging Face Hub.
    """
    return hub_repository(folder) or Path(os.path.realpath(folder))


def attach_files(
    listing: Listing, folder: Path, *, may_lack_pixels: bool, needs_files: bool = True
) -> None:
    """Set the location of each listed image, and record missing images, captions without a file,
    and files that are not listed.
    """
    # With `may_lack_pixels`, a data set without any image file has captions only.
    files = find_files(folder)
    if may_lack_pixels and files.has_no_images(entry.file or "" for entry in listing.images):
        if listing.images:
            listing.add_note(
                "no pixels",
                listing.source.name,
                f"found no image file under {folder}, so the data set has only captions",
            )
        return
    # Listed path by file that is used.
    used = dict[str, str]()
    has_missing = False
    files_of_unusable = set[str | None]()
    listed = {path_key(entry.file) for entry in listing.images if entry.file}
    for entry in listing.images:
        if not entry.usable and entry.file is not None:
            with suppress(DataError):
                files_of_unusable.add(files.find(entry.file))
        if not entry.usable or entry.location is not None:
            continue
        if entry.file is None:
            listing.add_loss(
                "caption without image", entry.name, "the captions name no image file", entry
            )
            continue
        try:
            key = _find_distinct_file(files, entry.file, listed, used)
        except DataError as error:
            if not needs_files:
                continue
            has_missing = True
            listing.add_loss("missing image", entry.name, str(error), entry)
            # The file may exist where nothing can be read now.
            base_name = path_key(entry.file).rpartition("/")[2]
            has_broken_archive = any(kind == "broken archive" for kind, _, _ in files.problems)
            if base_name in files.unreadable_names or files.unsearched or has_broken_archive:
                listing.unreadable_files.append(entry.name)
        else:
            if used.get(key) == path_key(entry.file):
                message = f"its file {key} is already listed in another spelling, the first is used"
                listing.add_loss("duplicate name", entry.name, message, entry)
                continue
            entry.location = files.by_path[key]
            used[key] = path_key(entry.file)
    for kind, location, message in files.problems:
        # A missing image may be in a broken archive.
        is_loss = has_missing and kind == "broken archive"
        (listing.add_loss if is_loss else listing.add_note)(kind, location, message)
    for path, message in files.unreadable.items():
        listing.add_note("unreadable file", path, message)
    for path in files.images:
        if path not in used and path not in files_of_unusable:
            listing.add_note(
                "image without caption",
                path,
                f"the file is in the folder, but {listing.source.name} does not list it",
            )
    known = {*used, *files.images}
    others = (
        path
        for path in files.by_path
        if path not in known and not path.lower().endswith(DATASET_SUFFIXES)
    )
    if other_files := describe_other_files(others):
        listing.add_note("other files", listing.source.name, other_files)


def _find_distinct_file(
    files: ImageFiles, file: str, listed: set[str], used: dict[str, str]
) -> str:
    """Find the file of a listed image. A file of the same name in another folder may belong to
    another listed image.
    """
    key = files.find(file)
    path = path_key(file)
    problem = f"the image is missing: {file} is neither a file under {files.folder} nor in a tar archive there"
    fix = "Add the file, or remove the image from the list"
    if key is None:
        raise DataError(f"{problem}. {fix}")
    is_shared = key != path and (key in listed or used.get(key, path) != path)
    listed_path = files.folder / path
    # A link may lead from the listed path to the file that was found.
    is_same_file = os.path.exists(listed_path) and os.path.samefile(
        listed_path, files.by_path[key].path
    )
    if is_shared and not is_same_file:
        raise DataError(
            f"{problem}. The only file of this name, {key}, belongs to another listed image. {fix}"
        )
    return key
