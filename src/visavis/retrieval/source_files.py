"""Files to index: the images and clips of a folder, or of a data set in any format."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from visavis.core import storage
from visavis.core.errors import DataError, MissingExtra, NoDataset
from visavis.data.data_paths import path_exists, resolve_path
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.file_names import (
    IMAGE_SUFFIXES,
    RAW_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    VISUAL_SUFFIXES,
    describe_other_files,
    is_valid_unicode,
    is_video,
    unescape_name,
    unsupported_problem,
)
from visavis.data.formats.image_files import (
    NO_EXCLUSION,
    Exclusion,
    FolderScan,
    path_and_parents,
    path_key,
    scan_folder,
)
from visavis.data.formats.listing import clean_name
from visavis.data.formats.table_columns import find_file_column
from visavis.data.formats.text_tables import ALL_FILE_NAMES, parse_table
from visavis.data.image_file import ByteRange
from visavis.data.live_photos import (
    LIVE_SUFFIXES,
    MAX_LIVE_PHOTO_BYTES,
    is_live_pair,
    photo_names,
    stem_of,
)
from visavis.data.parallel import map_in_order
from visavis.data.photo_decoder import format_of_suffix, is_installed
from visavis.retrieval.items import COMPANIONS, caption_metadata

# Stores hold times as int64 ns: up to the year 2262. File systems may report later times.
MAX_TIME_NS = 2**63 - 1
MAX_READS = 2
"""Number of times that a file is read which changes meanwhile."""
CLOCK_TICK_NS = 10**7
"""Coarsest clock of the times that a kernel sets. Two changes in one tick have the same time."""
NO_METADATA: Mapping[str, str] = {}
NO_PAIRS: Mapping[str, bool] = {}
ATTRIBUTES_FILE = "attributes.csv"
"""Table in an indexed folder: a column ``filename``, and one column per attribute."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An image or clip to index.

    Attributes:
        path: Path below the root with forward slashes, as ``escape_name`` writes it, or the name
            in a data set.
        place: Where the bytes are. A text is the path of a whole file, because a million
            ``ByteRange`` take seconds to make.
        root: Folder that must contain a whole file.
        size: Size in bytes.
        modified_ns: Modification time in ns since the epoch, of the file or of the archive that
            contains it.
        metadata: Values for filters, such as the split, and captions.
        time_sources: Files that have the capture time if this one has none, best first: a raw
            companion, and JSON of Google Takeout.
    """

    path: str
    place: ByteRange | str
    root: Path | None
    size: int
    modified_ns: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    time_sources: tuple[ByteRange, ...] = ()

    @property
    def location(self) -> ByteRange:
        """Where the bytes are."""
        if isinstance(self.place, str):
            return ByteRange(Path(self.place), root=self.root)
        return self.place

    @property
    def is_video(self) -> bool:
        """Whether the file is a clip, by its suffix."""
        return is_video(self.path) or (
            self.location.size is None and is_video(self.location.path.name)
        )

    def read_unchanged(self, read: Callable[[SourceFile], T]) -> T:
        """Call a function that reads the bytes, with the file as it is now, again if it changes."""
        for _ in range(MAX_READS):
            before = self._status()
            if before and 0 <= time.time_ns() - before.st_mtime_ns < CLOCK_TICK_NS:
                # A later change could have the same time.
                time.sleep(CLOCK_TICK_NS / 1e9)
            try:
                value = read(self._at(before))
            except DataError:
                if _state(self._status()) == _state(before):
                    raise
            else:
                if _state(self._status()) == _state(before):
                    return value
        raise DataError(
            f"{self.path}: expected a file at rest, got one that changes while it is read. Run "
            "visavis index again when it is complete."
        )

    def _status(self) -> os.stat_result | None:
        """Status of the file or archive. None: it cannot be read, which its reader reports."""
        try:
            return os.stat(self.place if isinstance(self.place, str) else self.place.path)
        except OSError:
            return None

    def _at(self, status: os.stat_result | None) -> SourceFile:
        """This file with another size and time. The place of a part belongs to the listed time."""
        if status is None or self.location.size is not None:
            return self
        return replace(self, size=status.st_size, modified_ns=_modified_ns(status))


@dataclass(frozen=True)
class FileCollection:
    """The files of a source.

    Attributes:
        root: Absolute path of the folder or data set.
        files: Files in the order of their paths.
        unreadable: Problem of each file or folder that cannot be read now, by its path below the
            root or its name in a data set.
        empty: Folders without content.
        skipped: One sentence for each file, link or folder that is skipped, unreadable ones
            included.
        excluded: Excluded folders and files.
        exclusion: The names that are excluded.
        is_dataset: Whether the list of a data set is needed to find the files.
        other_files: Number and suffixes of the files that are neither images nor videos. None:
            there are none.
        companions: Path of the photo that each companion belongs to: of the clip of a Live Photo,
            and of a raw image with a developed one.
        num_skipped: Number of files that are skipped, without sentences about anything else.
        num_other: Number of the files that are neither images nor videos.
        listed: The files and the companions, in the order of their paths.
        photos_of: Photos that each file may belong to, best first.
        live_pairs: Whether a clip belongs to a photo, by ``_pair_key``.
        undecided: Clips and photos of ``photos_of`` that cannot be compared now. These clips are
            items.
    """

    root: Path
    files: tuple[SourceFile, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    empty: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    exclusion: Exclusion = NO_EXCLUSION
    is_dataset: bool = False
    other_files: str | None = None
    companions: Mapping[str, str] = field(default_factory=dict)
    num_skipped: int = 0
    num_other: int = 0
    listed: tuple[SourceFile, ...] = ()
    photos_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    live_pairs: Mapping[str, bool] = field(default_factory=dict)
    undecided: frozenset[tuple[str, str]] = frozenset()

    def pair(self, unreadable: Container[str] = ()) -> FileCollection:
        """Make files a part of their photos. The companions of unreadable photos are items."""
        companions = dict[str, str]()
        for path, photos in self.photos_of.items():
            known = (
                photo
                for photo in photos
                if photo not in unreadable and (path, photo) not in self.undecided
            )
            if photo := next(known, None):
                companions[path] = photo
        parts = defaultdict[str, list[str]](list)
        for path in sorted(companions):
            # A clip of a raw image with a developed one belongs to the developed one.
            companions[path] = companions.get(companions[path], companions[path])
            parts[companions[path]].append(path)
        if not companions:
            return replace(self, files=self.listed, companions={})
        by_path = {file.path: file for file in self.listed if file.path in companions}
        files = tuple(
            _with_parts(file, [by_path[path] for path in parts[file.path]])
            if file.path in parts
            else file
            for file in self.listed
            if file.path not in companions
        )
        return replace(self, files=files, companions=companions)

    def problem_of(self, place: str) -> str:
        """Describe an unreadable place."""
        return f"{self.root if place == '.' else repr(place)}: {self.unreadable[place]}."


def _modified_ns(status: os.stat_result) -> int:
    """Modification time in the range of the stores."""
    return min(max(storage.modified_ns(status), -MAX_TIME_NS), MAX_TIME_NS)


def _state(status: os.stat_result | None) -> tuple[int, ...] | None:
    """Values that differ if a file was changed or replaced."""
    if status is None:
        return None
    return (
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def _with_parts(photo: SourceFile, parts: Sequence[SourceFile]) -> SourceFile:
    """A photo with its companions."""
    text = ", ".join(PurePosixPath(part.path).name for part in parts)
    raw = [part.location for part in parts if not part.is_video]
    return replace(
        photo,
        metadata={COMPANIONS: text, **photo.metadata},
        time_sources=(*raw, *photo.time_sources),
    )


def list_source_files(
    path: str | Path, exclude: Sequence[str] = (), live_pairs: Mapping[str, bool] = NO_PAIRS
) -> FileCollection:
    """List the files of a data set or of any folder."""
    collection = _list_source(path, Exclusion(tuple(exclude)), live_pairs)
    if not collection.files:
        problems = collection.skipped
        first = f" The first of {len(problems):,} problems: {problems[0]}" if problems else ""
        raise DataError(
            f"{path}: expected images or videos, got none that can be read. Pass a folder that "
            f"contains some, or a data set.{first}"
        )
    return collection


def list_readable_files(
    path: str | Path, exclude: Sequence[str] = (), live_pairs: Mapping[str, bool] = NO_PAIRS
) -> FileCollection:
    """List the files of a source that can be read now, as ``list_source_files`` does. The source
    may be missing or empty.
    """
    exclusion = Exclusion(tuple(exclude))
    try:
        return _list_source(path, exclusion, live_pairs)
    except DataError as error:
        root = source_root(path)
        problem = str(error).removesuffix(".")
        if not os.path.exists(root):
            problem = (
                "the folder does not exist. Mount its drive, or pass its new place to visavis "
                "indexes move"
            )
        elif not storage.is_transient_error(error):
            raise
        # The whole source is unreadable, so that an update of its index keeps the items.
        return FileCollection(
            root, unreadable={".": problem}, skipped=(f"{root}: {problem}.",), exclusion=exclusion
        )


def source_root(path: str | Path) -> Path:
    """Return the absolute path of a source, which may be given by its name under ``VISAVIS_DATA``
    or on the Hugging Face Hub.
    """
    return (resolve_path(path) if path_exists(path) else Path(os.path.expanduser(path))).absolute()


@dataclass
class _Listed:
    """Files by their paths or names, and problems, while a source is listed."""

    files: dict[str, SourceFile] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    skipped_files: set[str] = field(default_factory=set)
    photos_of: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, name: str, sentence: str) -> None:
        """Leave a file out."""
        self.skipped.append(f"{name!r}: {sentence}")
        self.skipped_files.add(name)

    def add(
        self,
        name: str,
        place: ByteRange | str,
        root: Path | None = None,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> None:
        """Add a file with its size and time."""
        part_size = None if isinstance(place, str) else place.size
        try:
            status = os.stat(place if isinstance(place, str) else place.path)
        except FileNotFoundError:
            self.skip(name, "the file does not exist.")
        except OSError as error:
            self.unreadable[name] = (
                f"it cannot be read: {error.strerror}. Check its permissions and its drive"
            )
        else:
            size = status.st_size if part_size is None else part_size
            self.files[name] = SourceFile(name, place, root, size, _modified_ns(status), metadata)

    def add_dataset(self, dataset: Dataset, exclusion: Exclusion) -> None:
        """Add the images of a data set, with their split and captions."""
        self.skipped += dataset.skipped[1:]  # the first sentence counts the others
        for name in dataset.unreadable_files:
            if not any(place in self.unreadable for place in path_and_parents(name)):
                self.unreadable[name] = (
                    "it is listed, but its folder or archive cannot be read. Check its permissions "
                    "and its drive"
                )
        for image, captions in zip(dataset.images, dataset.captions_of, strict=True):
            if image.location is not None and not exclusion.covers(image.name):
                texts = [dataset.captions[row] for row in captions]
                metadata = {"split": image.split, **caption_metadata(texts)}
                self.add(image.name, image.location, metadata=metadata)
        for image in dataset.unpaired_images:
            if image.location is not None and not exclusion.covers(image.name):
                self.add(image.name, image.location, metadata={"split": image.split})

    def add_folder(self, scan: FolderScan) -> None:
        """Add the files of a folder that no data set lists."""
        root = Path(os.path.realpath(scan.folder))
        listed = {
            str(file.location.path) for file in self.files.values() if file.location.size is None
        }
        folder = f"{scan.folder}{os.sep}"
        indexed = VISUAL_SUFFIXES + UNSUPPORTED_SUFFIXES
        unlisted = list[str]()
        for name in scan.files:
            lower = name.lower()
            place = folder + unescape_name(name).replace("/", os.sep)
            if not lower.endswith(indexed) or place in listed:
                continue
            problem = None
            if lower.endswith(UNSUPPORTED_SUFFIXES):
                problem = unsupported_problem(name)
            if not problem and not is_valid_unicode(name):
                problem = "expected a Unicode name. Rename the file"
            elif not problem and name in self.files:
                other = self.files[name].location.path
                problem = (
                    f"expected a new name, got that of {other} in the list of captions. Rename the "
                    "file"
                )
            if problem:
                self.skip(name, f"{problem}.")
            else:
                self.add(name, place, root)
                unlisted.append(name)
        # Such as links to a location outside, which the server must not serve, unless
        # ``VISAVIS_IMAGE_ROOTS`` lists it.
        for name, problem in scan.skipped.items():
            if name.lower().endswith(VISUAL_SUFFIXES):
                self.skip(name, f"{problem}.")
        unlisted = [name for name in unlisted if name in self.files]
        self._find_photos(unlisted)
        self._find_takeout(unlisted, scan, root)

    def _find_photos(self, unlisted: Sequence[str]) -> None:
        """Find the photos that a clip or a raw image may belong to, with the same name in the same
        folder. Files that a data set lists stay items.
        """
        readable = tuple(
            suffix
            for suffix in IMAGE_SUFFIXES
            if (kind := format_of_suffix(suffix)) is None or is_installed(kind)
        )
        photos = defaultdict[str, list[str]](list)
        for name in self.files:
            if name.lower().endswith(readable):
                photos[stem_of(name)].append(name)
                photos[name.casefold()].append(name)
        # Raw images first, because a clip of a raw image belongs to the photo of this one.
        for name in sorted(unlisted, key=is_video):
            if name.lower().endswith(RAW_SUFFIXES):
                found = [
                    photo
                    for photo in photos[stem_of(name)]
                    if not photo.lower().endswith(RAW_SUFFIXES)
                ]
            elif (
                name.lower().endswith(LIVE_SUFFIXES)
                and self.files[name].size <= MAX_LIVE_PHOTO_BYTES
            ):
                found = [photo for stem in photo_names(name) for photo in photos.get(stem, ())]
            else:
                continue
            # A developed image, before a raw one.
            found.sort(key=lambda photo: (photo.lower().endswith(RAW_SUFFIXES), photo))
            if found:
                self.photos_of[name] = found

    def _find_takeout(self, unlisted: Sequence[str], scan: FolderScan, root: Path) -> None:
        """Find the JSON files of Google Takeout, which may have the time of a photo."""
        tables = {name for name in scan.files if name.endswith(".json")}
        if not tables:
            return
        for name in unlisted:
            found = [table for table in _takeout_names(name) if table in tables]
            if found:
                places = tuple(ByteRange(scan.place(table), root=root) for table in found)
                self.files[name] = replace(self.files[name], time_sources=places)


def _takeout_names(path: str) -> Iterator[str]:
    """Paths that the JSON file of a photo may have."""
    folder, slash, name = path.rpartition("/")
    # The number of a copy is written behind the other suffixes.
    match = re.fullmatch(r"(.*)(\(\d+\))(\.[^.]+)", name)
    base = match[1] + match[3] if match else name
    copy = match[2] if match else ""
    for text in (base, f"{base}.supplemental-metadata"):
        # Takeout cuts long names.
        yield f"{folder}{slash}{text[:46]}{copy}.json"


def _list_source(
    path: str | Path, exclusion: Exclusion, live_pairs: Mapping[str, bool]
) -> FileCollection:
    if not path_exists(path):
        # Its error does not list the formats of data sets, because any folder can be indexed.
        resolve_path(path)
    root = source_root(path)
    # Of a folder, all images and clips are listed, also if it is a data set. A data set that is
    # given by its list or its name contains only the listed files.
    takes_all = os.path.isdir(os.path.expanduser(path))
    # Also for a data set, whose list does not distinguish an unreadable folder from an empty one.
    scan = scan_folder(root if os.path.isdir(root) else root.parent, exclusion)
    listed = _Listed(unreadable=dict(scan.unreadable))
    other_files = None
    others = list[str]()
    try:
        dataset = open_dataset(root if takes_all else path, skip_bad=True)
    except DataError as error:
        if not takes_all:
            raise
        if storage.is_transient_error(error):
            # Images in an archive, and images with other names, may exist. Only the list contains
            # them.
            listed.unreadable["."] = f"the captions cannot be read: {str(error).removesuffix('.')}"
        elif not isinstance(error, NoDataset):
            listed.skipped.append(f"The folder is indexed without its captions. {error}")
    else:
        listed.add_dataset(dataset, exclusion)
        if not takes_all and not (listed.files or listed.unreadable):
            raise DataError(
                f"{path}: expected a data set with images, got captions or features only. Add the "
                "images of this data set."
            )
        if not takes_all:
            unlisted = (
                "expected it in the list of the data set, got no entry. Add it with a caption."
            )
            for name in dataset.unlisted_files:
                listed.skip(name, unlisted)
        other_files = dataset.other_files
    # The list is needed for ranges of archives and for names that are not paths below the root.
    is_dataset = any(
        file.location.size is not None or file.location.path != root / unescape_name(file.path)
        for file in listed.files.values()
    )
    if takes_all:
        listed.add_folder(scan)
        # Unsupported photos are listed as skipped, and not among the other files.
        others = [
            name
            for name in scan.files
            if not name.lower().endswith(VISUAL_SUFFIXES + UNSUPPORTED_SUFFIXES)
        ]
        other_files = other_files or describe_other_files(
            name for name in others if name != ATTRIBUTES_FILE
        )
    files = tuple(sorted(listed.files.values(), key=lambda file: file.path))
    empty = frozenset(scan.empty)
    excluded = tuple(scan.excluded)
    collection = FileCollection(
        root,
        files,
        listed.unreadable,
        empty,
        (),
        excluded,
        exclusion,
        is_dataset,
        other_files,
        photos_of={name: tuple(photos) for name, photos in listed.photos_of.items()},
        num_skipped=len(listed.skipped_files) + len(listed.unreadable),
        num_other=len(others),
    )
    collection = _with_attributes(
        replace(
            collection, skipped=(*map(collection.problem_of, listed.unreadable), *listed.skipped)
        )
    )
    return _check_clips(replace(collection, listed=collection.files), live_pairs).pair()


def _check_clips(collection: FileCollection, known: Mapping[str, bool]) -> FileCollection:
    """Keep the photos that their clips belong to, or may belong to."""
    files = {file.path: file for file in collection.listed}
    keys = {
        (path, photo): _pair_key(files[photo], files[path])
        for path, photos in collection.photos_of.items()
        if files[path].is_video
        for photo in photos
    }
    unknown = [pair for pair, key in keys.items() if key not in known]
    checked = map_in_order(_is_pair, [(files[photo], files[path]) for path, photo in unknown])
    found = {pair: known.get(key) for pair, key in keys.items()}
    found |= zip(unknown, checked, strict=True)
    photos_of = {
        path: tuple(photo for photo in photos if found.get((path, photo)) is not False)
        for path, photos in collection.photos_of.items()
    }
    return replace(
        collection,
        photos_of=photos_of,
        # Files that cannot be compared are opened again next time.
        live_pairs={keys[pair]: value for pair, value in found.items() if value is not None},
        undecided=frozenset(pair for pair, value in found.items() if value is None),
    )


def _pair_key(photo: SourceFile, clip: SourceFile) -> str:
    """Hash of a photo and a clip, without opening them."""
    values = [(file.path, file.size, file.modified_ns) for file in (photo, clip)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _is_pair(pair: tuple[SourceFile, SourceFile]) -> bool | None:
    """Whether a clip belongs to a photo. None: a file cannot be read, or PyAV is not installed."""
    photo, clip = pair
    try:
        return is_live_pair(photo.location, photo.path, clip.location, clip.path)
    except (DataError, MissingExtra):
        return None


def _with_attributes(collection: FileCollection) -> FileCollection:
    """Add the attributes of the files as metadata. Rows of other files are listed as skipped."""
    table = collection.root / ATTRIBUTES_FILE
    if not os.path.isfile(table):
        return collection
    parsed = parse_table(storage.read_text(table), table, ALL_FILE_NAMES, "filename and attributes")
    file_column = find_file_column([name for name in parsed.layout.columns if name], table)
    attributes = dict[str, dict[str, str]]()
    names = dict[str, str]()
    for line, row in parsed.require_rows(table):
        name = clean_name(row.pop(file_column))
        if (first := names.setdefault(path_key(name), name)) in attributes:
            raise DataError(
                f"{table}: line {line}: expected one row for each file, got a second one of "
                f"{first!r}. Remove one."
            )
        attributes[name] = {key: value for key, value in row.items() if value}
    listed = {
        file.path: names.pop(path_key(clean_name(file.path)), "") for file in collection.files
    }
    files = tuple(
        replace(file, metadata={**attributes.get(listed[file.path], {}), **file.metadata})
        for file in collection.files
    )
    unknown = tuple(
        f"{name!r}: listed in {ATTRIBUTES_FILE}, but not among the images."
        for name in names.values()
    )
    return replace(collection, files=files, skipped=(*collection.skipped, *unknown))
