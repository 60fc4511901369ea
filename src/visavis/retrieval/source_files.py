"""Files to index: the images and clips of a folder, or of a data set in any format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from visavis import storage
from visavis.data import Dataset, open_dataset
from visavis.data.dataset import ByteRange
from visavis.data.dataset_reader import path_exists, resolve_path
from visavis.data.formats.caption_table import ALL_FILE_NAMES
from visavis.data.formats.delimited_text import parse_table
from visavis.data.formats.image_files import files_under, path_key
from visavis.data.formats.listing import clean_name, is_valid_unicode
from visavis.data.formats.table_columns import find_file_column
from visavis.data.suffixes import UNSUPPORTED_SUFFIXES, VISUAL_SUFFIXES, describe_other_files, unsupported_problem
from visavis.data.video import is_video
from visavis.errors import DataError, NoDataset

# Stores hold times as int64 ns: up to the year 2262. File systems may report later times.
MAX_TIME_NS = 2**63 - 1
ATTRIBUTES_FILE = "attributes.csv"
"""Table in an indexed folder: a column ``filename``, and one column per attribute."""


@dataclass(frozen=True)
class SourceFile:
    """An image or clip to index.

    Attributes:
        path: Path below the root with forward slashes, or the name in a data set.
        location: Where the bytes are.
        size: Size in bytes.
        modified_ns: Modification time in ns since the epoch, of the file or of the archive that contains it.
        metadata: Values for filters, such as the split and the first caption.
    """

    path: str
    location: ByteRange
    size: int
    modified_ns: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        """Whether the file is a clip, by its suffix."""
        return is_video(self.path) or (self.location.size is None and is_video(self.location.path.name))


@dataclass(frozen=True)
class FileCollection:
    """The files of a source.

    Attributes:
        root: Absolute path of the folder or data set.
        files: Files in the order of their paths.
        skipped: One sentence for each file or link that is skipped.
        is_dataset: Whether the source is a data set.
        other_files: Number and suffixes of the files that are neither images nor videos. None: there are none.
    """

    root: Path
    files: tuple[SourceFile, ...]
    skipped: tuple[str, ...] = ()
    is_dataset: bool = False
    other_files: str | None = None


def list_source_files(path: str | Path) -> FileCollection:
    """List the files of a data set or of any folder.

    Files of a data set have their split and first caption as metadata. The columns of ``attributes.csv`` are added. Links to a location
    outside are skipped, because the server must not serve it, unless ``VISAVIS_IMAGE_ROOTS`` lists it.

    Args:
        path: A data set, or a folder with images and clips.

    Returns:
        The files and the skipped files.

    Raises:
        DataError: If the source contains neither images nor clips, or the table of attributes is invalid.
    """
    root = Path(os.path.expanduser(path))
    if not path_exists(path):
        resolve_path(path)  # its error does not list the formats of data sets, because any folder can be indexed
    try:
        dataset = open_dataset(path, skip_bad=True)
    except DataError as error:
        if not os.path.isdir(root):
            raise
        collection = _with_attributes(_list_folder(root))
        if isinstance(error, NoDataset):
            return collection
        return replace(collection, skipped=(f"The folder is indexed without its captions. {error}", *collection.skipped))
    files = tuple(_dataset_files(dataset))
    if not files:
        raise DataError(f"{path}: expected a data set with images, got captions or features only. Add the images of this data set.")
    # The first sentence counts the others.
    unlisted = (
        f"{name!r}: expected it in the list of the data set, got no entry. Add it with a caption." for name in dataset.unlisted_files
    )
    return _with_attributes(
        FileCollection(source_root(path), files, (*dataset.skipped[1:], *unlisted), is_dataset=True, other_files=dataset.other_files)
    )


def source_root(path: str | Path) -> Path:
    """Return the absolute path of a source, which may be given by its name under ``VISAVIS_DATA`` or on the Hugging Face Hub.

    Args:
        path: A data set, or a folder with images and clips.

    Returns:
        The path. It may not exist.
    """
    return (resolve_path(path) if path_exists(path) else Path(os.path.expanduser(path))).absolute()


def _list_folder(root: Path) -> FileCollection:
    files, skipped, others, resolved = list[SourceFile](), list[str](), list[str](), Path(os.path.realpath(root))
    for file, problem in files_under(root):
        name, suffix = file.relative_to(root).as_posix(), file.suffix.lower()
        if suffix not in VISUAL_SUFFIXES + UNSUPPORTED_SUFFIXES and not (problem and os.path.islink(file)):
            others += [name] if problem is None and name != ATTRIBUTES_FILE else []
            continue
        problem = problem or unsupported_problem(name)
        if problem is None and not is_valid_unicode(name):
            problem = "expected a Unicode name. Rename the file"
        if problem is None and (source_file := _source_file(name, ByteRange(file, root=resolved), {})) is not None:
            files.append(source_file)
        else:
            skipped.append(f"{name!r}: {problem or 'the file was removed while the folder was listed'}.")
    if not files:
        raise DataError(f"{root}: expected images or videos, got none that can be read. Pass a folder that contains some, or a data set.")
    paths = tuple(sorted(files, key=lambda file: file.path))
    return FileCollection(root.absolute(), paths, tuple(skipped), other_files=describe_other_files(others))


def _dataset_files(dataset: Dataset) -> Iterator[SourceFile]:
    for image, captions in sorted(zip(dataset.images, dataset.captions_of, strict=True), key=lambda pair: pair[0].name):
        if image.location is None:
            continue
        caption = {"caption": dataset.captions[captions[0]]} if len(captions) else {}
        if (source_file := _source_file(image.name, image.location, {"split": image.split, **caption})) is not None:
            yield source_file


def _with_attributes(collection: FileCollection) -> FileCollection:
    """Add the attributes of the files as metadata. Rows of other files are listed as skipped."""
    table = collection.root / ATTRIBUTES_FILE
    if not os.path.isfile(table):
        return collection
    parsed = parse_table(storage.read_text(table), table, ALL_FILE_NAMES, "filename and attributes")
    file_column = find_file_column([name for name in parsed.layout.columns if name], table)
    attributes, names = dict[str, dict[str, str]](), dict[str, str]()
    for line, row in parsed.require_rows(table):
        name = clean_name(row.pop(file_column))
        if (first := names.setdefault(path_key(name), name)) in attributes:
            raise DataError(f"{table}: line {line}: expected one row for each file, got a second one of {first!r}. Remove one.")
        attributes[name] = {key: value for key, value in row.items() if value}
    listed = {file.path: names.pop(path_key(clean_name(file.path)), "") for file in collection.files}
    files = tuple(replace(file, metadata={**attributes.get(listed[file.path], {}), **file.metadata}) for file in collection.files)
    unknown = tuple(f"{name!r}: listed in {ATTRIBUTES_FILE}, but not among the images." for name in names.values())
    return replace(collection, files=files, skipped=(*collection.skipped, *unknown))


def _source_file(name: str, location: ByteRange, metadata: Mapping[str, str]) -> SourceFile | None:
    """A file with its size and time. None if it does not exist any more."""
    try:
        status = location.path.stat()
    except OSError:
        return None
    modified_ns = min(max(status.st_mtime_ns, -MAX_TIME_NS), MAX_TIME_NS)
    return SourceFile(name, location, status.st_size if location.size is None else location.size, modified_ns, metadata)
