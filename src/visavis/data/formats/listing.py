"""The images, captions and problems that a reader finds in a source, and the declaration of a data
set format.

A ``Listing`` keeps unusable images and captions at their position in the source, so that rows of
stored features still match. ``Listing.dataset`` returns the usable ones.
"""

from __future__ import annotations

import fnmatch
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, without_captions
from visavis.data.file_names import (
    MISSING_TEXTS,
    SPLITS,
    escape_surrogates,
    is_valid_unicode,
    split_by_hash,
)
from visavis.data.formats.table_columns import is_list_text
from visavis.data.hub_files import hub_repository
from visavis.data.image_file import ByteRange, Image
from visavis.data.vocabulary import MULTILINGUAL_ADVICE
from visavis.data.words import has_unspaced_script

# Files that `datasets` writes next to its tables. A pattern such as "dataset*.json" does not match
# them.
_METADATA_FILES = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json")
# A batch of captions is as long as its longest caption.
MAX_CAPTION_CHARS = 20_000
# Characters around the name of a file in a table that are not a part of it.
NAME_PADDING = " \t\xa0"
# Kind and message of problems that tables of any size have.
NAMELESS_ROW = "caption without image", "the row names no image file"
UNSPLIT_IMAGE = "image without split", "the image has no split, although others have one"
UNCAPTIONED = "It is a candidate of evaluations, and training ignores it"
SHOW_PROBLEMS = "Run visavis data check for the whole list of problems."


@dataclass(frozen=True)
class Finding:
    """A problem or a harmless oddity of a data set.

    Attributes:
        kind: Kind of the finding, such as "missing image".
        location: File, file and line, or image name.
        message: The problem.
        loses_data: Whether training would have to skip something.
    """

    kind: str
    location: str
    message: str
    loses_data: bool = True

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


@dataclass(eq=False, slots=True)
class ListedImage:
    """An image as listed.

    Attributes:
        name: Name of the image.
        split: Its split. None if the source gives none.
        file: Path of its file in the source. None if the source gives none.
        location: Location of its bytes. None if they were not found.
        usable: Whether it has no problem that loses it.
        has_caption: Whether a caption of it may be usable. Without, it is only a candidate of
            evaluations.
    """

    name: str
    split: str | None
    file: str | None = None
    location: ByteRange | None = None
    usable: bool = True
    has_caption: bool = True


@dataclass(eq=False, slots=True)
class ListedCaption:
    """A caption as listed.

    Attributes:
        text: Its text.
        image: Its image. None if the source gives none.
        location: Location in the source: file and line, or image name.
        usable: Whether it has no problem that loses it.
    """

    text: str
    image: ListedImage | None
    location: str
    usable: bool = True


@dataclass
class Listing:
    """Images and captions of a source, with findings.

    A reader adds images, captions and findings. ``list_dataset`` then finds their files and calls
    ``finalize``.

    Attributes:
        source: The file or folder.
        format_name: Name of its format.
        images: All images.
        captions: All captions.
        findings: Problems and oddities.
        folder: Folder of the image files. None: the source, or the folder of the source.
        feature_files: Files of stored features, if the format has features instead of pixels.
        find_nonfinite_features: Reads all features and returns the names of images with NaN or
            infinity.
        unreadable_files: Names of images without a file that may have one in a folder or archive
            that cannot be read now.
        by_name: First image of each name that was added by ``add_image``.
    """

    source: Path
    format_name: str = ""
    images: list[ListedImage] = field(default_factory=list)
    captions: list[ListedCaption] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    folder: Path | None = None
    feature_files: tuple[Path, ...] = ()
    find_nonfinite_features: Callable[[], list[str]] | None = None
    unreadable_files: list[str] = field(default_factory=list)
    by_name: dict[str, ListedImage] = field(default_factory=dict)

    def add_image(self, name: str, split: str | None) -> ListedImage:
        """Add an image that is found by its name. A second image of the same name is unusable.

        Args:
            name: Name of the image, which is also its file.
            split: Its split.

        Returns:
            The image.
        """
        image = ListedImage(name, split, name)
        self.images.append(image)
        # The copy stays in the list, unusable: rows of stored features count it.
        if (first := self.by_name.setdefault(name, image)) is not image:
            kind = "duplicate name" if first.split == split else "image in two splits"
            self.add_loss(
                kind,
                name,
                f"already listed in {first.split or 'the same file'}, the first is used",
                image,
            )
        return image

    def add_row(
        self, name: str | None, captions: Sequence[str], split: str | None, location: str
    ) -> ListedImage | None:
        """Add the captions of a row of a table, and its image if it is new.

        Args:
            name: Name of the image. None or empty: the row names none.
            captions: Captions of the row.
            split: Split of the image. None: the row gives none.
            location: Location of the row.

        Returns:
            The image. None if the row names none.
        """
        if not name:
            for caption in captions:
                self.add_caption(caption, None, location).usable = False
            self.add_loss(NAMELESS_ROW[0], location, NAMELESS_ROW[1])
            return None
        image = self.by_name.get(name) or self.add_image(name, split)
        for caption in captions:
            self.add_caption(caption, image, location)
        image.split = image.split or split
        if split and image.split != split:
            message = f"{name} has split {split} here and {image.split} in an earlier line"
            self.add_loss("image in two splits", location, message, image)
        return image

    def add_caption(self, text: str, image: ListedImage | None, location: str) -> ListedCaption:
        """Add a caption.

        Args:
            text: Its text, which is normalized to NFC.
            image: Its image. None: the source gives none.
            location: Its location in the source.

        Returns:
            The caption.
        """
        self.captions.append(ListedCaption(unicodedata.normalize("NFC", text), image, location))
        return self.captions[-1]

    def add_note(self, kind: str, location: str, message: str) -> None:
        """Record a harmless oddity.

        Args:
            kind: Kind of the finding.
            location: Where it is.
            message: The observation.
        """
        self.findings.append(
            Finding(kind, escape_surrogates(location), escape_surrogates(message), loses_data=False)
        )

    def add_loss(
        self,
        kind: str,
        location: str,
        message: str,
        lost: ListedImage | ListedCaption | None = None,
    ) -> None:
        """Record a problem because of which an image, a caption or a line is skipped.

        Args:
            kind: Kind of the finding.
            location: Where it is.
            message: The problem.
            lost: The image or caption that is unusable.
        """
        self.findings.append(Finding(kind, escape_surrogates(location), escape_surrogates(message)))
        if lost is not None:
            lost.usable = False

    def finalize(self) -> None:
        """Assign missing splits, and find problems that any format can have: broken texts, images
        without captions, empty splits.
        """
        no_splits = all(image.split is None for image in self.images)
        for image in self.images:
            if image.split is None and not no_splits and image.usable:
                self.add_loss(UNSPLIT_IMAGE[0], image.name, UNSPLIT_IMAGE[1], image)
            image.split = image.split or split_by_hash(image.name)
        # An image whose captions are all empty is one without captions. In a split without any
        # caption, it is a mistake.
        filled = {caption.image for caption in self.captions if caption.text.strip()}
        captioned_splits = {image.split for image in filled if image is not None}
        for image in self.images:
            image.has_caption = image in filled or image.split not in captioned_splits
        # After splits, whose texts are checked, too.
        self.check_texts()
        well_captioned = {caption.image for caption in self.captions if caption.usable}
        for image in self.images:
            if image.usable and not image.has_caption:
                self.add_note(
                    "uncaptioned image", image.name, f"the image has no caption. {UNCAPTIONED}"
                )
            elif image.usable and image not in well_captioned:
                problem = (
                    "the image has no usable caption"
                    if image in filled
                    else "the image is listed without a caption"
                )
                self.add_loss(
                    "image without caption",
                    image.name,
                    f"{problem}. Add one, or remove the image",
                    image,
                )
        if not self.images:
            self.add_loss("no images", self.source.name, "no image is listed")
            return
        nonempty = {image.split for image in self.images if image.usable}
        if empty := [split for split in SPLITS if split not in nonempty]:
            self.add_note(
                "empty split", self.source.name, f"no image in split {' or '.join(empty)}"
            )

    def check_texts(self) -> None:
        """Find names and splits that are not UTF-8, and captions that are unusable or repeated."""
        for image in self.images:
            for attribute, text in (("name", image.name), ("split", image.split or "")):
                if image.usable and not is_valid_unicode(text):
                    self.add_loss(
                        "broken UTF-8", image.name, f"the image's {attribute} is not UTF-8", image
                    )
        seen: set[tuple[ListedImage | None, str]] = set()
        for caption in self.captions:
            if not caption.usable:
                continue
            text = caption.text
            location = caption.location
            if caption.image is not None and not caption.image.has_caption:
                caption.usable = False
            elif (problem := caption_problem(text)) is not None:
                self.add_loss(problem[0], location, problem[1], caption)
            elif (caption.image, text) in seen:
                self.add_note(
                    "duplicate caption", location, f"the image already has the caption {text!r}"
                )
            seen.add((caption.image, text))
        if unspaced := sum(has_unspaced_script(caption.text) for caption in self.captions):
            message = f"{unspaced:,} of {len(self.captions):,} captions have a script without spaces. {MULTILINGUAL_ADVICE}"
            self.add_note("script without spaces", self.source.name, message)

    def dataset(self) -> Dataset:
        """Build a data set of the usable images and captions.

        Returns:
            The data set.

        Raises:
            DataError: If no image is usable.
        """
        image_rows = [
            row for row, image in enumerate(self.images) if image.usable and image.has_caption
        ]
        unpaired_rows = [
            row for row, image in enumerate(self.images) if image.usable and not image.has_caption
        ]
        # Images are keys by identity (eq=False), because two may have the same name.
        index_of: dict[ListedImage | None, int] = {
            self.images[row]: index for index, row in enumerate(image_rows)
        }
        caption_rows = [
            row
            for row, caption in enumerate(self.captions)
            if caption.usable and caption.image in index_of
        ]
        losses = self.losses
        counts = Counter(finding.kind for finding in losses)
        if not image_rows:
            raise no_usable_image(self.source, counts, losses[0])
        num_images = len(image_rows), len(self.images)
        num_captions = len(caption_rows), len(self.captions)
        num_listed = sum(
            caption.image is None or caption.image.has_caption for caption in self.captions
        )
        # Stored features have a row for each listed item. A data set without all of them has the
        # rows of its own.
        has_all_items = num_images[0] == num_images[1] and num_captions[0] == num_captions[1]
        captions = [self.captions[row] for row in caption_rows]

        def images(rows: Sequence[int]) -> tuple[Image, ...]:
            listed = (self.images[row] for row in rows)
            return tuple(Image(image.name, image.split or "", image.location) for image in listed)

        return Dataset(
            name=self.name,
            images=images(image_rows),
            captions=tuple(caption.text for caption in captions),
            image_of=np.array([index_of[caption.image] for caption in captions], dtype=np.int64),
            image_origin=None if has_all_items else np.array(image_rows),
            caption_origin=None if has_all_items else np.array(caption_rows, dtype=np.int64),
            skipped=describe_skipped(
                self.source,
                (len(image_rows) + len(unpaired_rows), len(self.images)),
                (len(caption_rows), num_listed),
                counts,
                losses,
            ),
            unlisted_files=tuple(
                note.location
                for note in self.findings
                if note.kind == "image without caption" and not note.loses_data
            ),
            unreadable_files=tuple(self.unreadable_files),
            other_files=next(
                (note.message for note in self.findings if note.kind == "other files"), None
            ),
            unpaired=(without_captions(self.name, images(unpaired_rows), np.array(unpaired_rows)),)
            if unpaired_rows
            else (),
        )

    @property
    def name(self) -> str:
        """Name of the data set: the name of its folder, or of its repository in the cache of the
        Hugging Face Hub.
        """
        folder = self.folder or self.source
        if (repository := hub_repository(folder)) is not None:
            return repository.name.rpartition("--")[2]
        return (folder if os.path.isdir(folder) else Path(os.path.realpath(folder)).parent).name

    @property
    def losses(self) -> list[Finding]:
        """Findings because of which something is skipped."""
        return [finding for finding in self.findings if finding.loses_data]


def read_list(path: Path, folder: Path | None) -> str:
    """Read the text of a list or table. Bytes that are not UTF-8 become surrogates, so that the
    items that have them are found one by one.
    """
    return storage.decode_text(storage.read_bytes(path, folder), path, "surrogateescape")


def summarize_kinds(counts: Mapping[str, int]) -> str:
    """Describe the number of findings of each kind: ``2 x missing image, 1 x empty caption``."""
    return ", ".join(f"{number:,} x {kind}" for kind, number in counts.items())


def no_usable_image(source: Path, counts: Mapping[str, int], example: object) -> DataError:
    """Make the error of a data set without a usable image."""
    return DataError(
        f"{source} has no usable image ({summarize_kinds(counts)}): {example}. {SHOW_PROBLEMS}"
    )


def describe_skipped(
    source: Path,
    images: tuple[int, int],
    captions: tuple[int, int],
    counts: Mapping[str, int],
    problems: Sequence[Finding],
) -> tuple[str, ...]:
    """Describe what a reader skipped, for ``Dataset.skipped``. Images and captions are given by the
    number of usable ones and of all.
    """
    if not counts:
        return ()
    lost_images, lost_captions = (
        f"{total - usable:,} of {total:,}" for usable, total in (images, captions)
    )
    total = f"{lost_images} images and {lost_captions} captions of {source.name} ({summarize_kinds(counts)})"
    return (total, *map(str, problems))


@dataclass(frozen=True, kw_only=True)
class DatasetFormat:
    """A format of data sets. The reader, ``visavis doctor``, the catalog and the reference are
    derived from it.

    Attributes:
        name: Name in ``visavis data check``.
        description: Content of a folder of this format.
        patterns: Patterns of the files by which a folder is recognized.
        suffixes: Suffixes of files that may be given instead of a folder, or patterns of their
            names.
        read: Lists the content of a source. Raises DataError if the source cannot be parsed at all.
        image_files: Whether image files must be next to the list, may be absent as a whole, or are
            not a part of the format.
        reads_whole_folder: Whether the source is the folder and not one list in it.
        reads_several_files: Whether the source is the folder if the folder is given, and one file
            if a file is given.
        fallback_level: A folder is of this format only if it has no list of a format of a lower
            level.
        recognizes: Whether a file that matches a pattern has the content of the format. None: the
            name is sufficient.
        open: Opens the usable items of a source lazily, for millions of captions. None: through
            ``read``.
    """

    name: str
    description: str
    patterns: tuple[str, ...]
    suffixes: tuple[str, ...]
    read: Callable[[Path], Listing] = field(repr=False)
    image_files: Literal["required", "optional", "none"]
    reads_whole_folder: bool = field(default=False, repr=False)
    reads_several_files: bool = field(default=False, repr=False)
    fallback_level: int = field(default=0, repr=False)
    recognizes: Callable[[Path], bool] | None = field(default=None, repr=False)
    open: Callable[[Path], Dataset] | None = field(default=None, repr=False)

    def find_sources(self, folder: Path) -> list[Path]:
        """Find the sources of this format in a folder.

        Args:
            folder: The folder.

        Returns:
            Lists in the order of the patterns, or the folder itself.
        """
        lists = [
            path
            for pattern in self.patterns
            for path in sorted(filter(os.path.isfile, folder.glob(pattern)))
            if (path.name not in _METADATA_FILES or path.name == pattern)
            and (self.recognizes is None or self.recognizes(path))
        ]
        return (
            [folder] if (self.reads_whole_folder or self.reads_several_files) and lists else lists
        )

    def source_for_file(self, file: Path) -> Path | None:
        """Return the source to which a file belongs.

        Args:
            file: The file.

        Returns:
            The file or its folder. None if it is not of this format.
        """
        source = file.parent if self.reads_whole_folder else file
        return (
            source
            if any(fnmatch.fnmatchcase(file.name, f"*{suffix}") for suffix in self.suffixes)
            else None
        )


def require_captions(captions: Sequence[str], location: str) -> list[str]:
    """Return the captions of a sample of a stream without empty ones. None left is an error."""
    filled = [text for text in captions if text.strip()]
    if not filled:
        raise DataError(
            f"{escape_surrogates(location)}: expected a caption, got none or an empty one. Add it "
            "to the sample."
        )
    for text in filled:
        if (problem := caption_problem(text)) is not None:
            raise DataError(f"{escape_surrogates(location)}: {problem[1]}. Correct the sample.")
    return filled


def clean_name(name: str) -> str:
    """Return the name of a file with forward slashes and without surrounding spaces."""
    return name.strip(NAME_PADDING).replace("\\", "/")


def caption_problem(text: str) -> tuple[str, str] | None:
    """Find the kind and message of the problem because of which a text is not a usable caption.
    None: it is usable.
    """
    if not text.strip():
        return "empty caption", "the caption is empty"
    if text in MISSING_TEXTS:
        return (
            "missing caption",
            f"the caption is {text!r}, the text of a missing value. Write a caption, or remove it",
        )
    if len(text) > MAX_CAPTION_CHARS:
        return (
            "caption too long",
            f"the caption has {len(text):,} characters, expected at most {MAX_CAPTION_CHARS:,}",
        )
    if is_list_text(text):
        fix = "Write it as ['first caption', 'second caption'], or one caption per row"
        return (
            "malformed list",
            f"the caption is a list that cannot be read: {escape_surrogates(text):.60}. {fix}",
        )
    if not is_valid_unicode(text):
        return (
            "broken UTF-8",
            f"the caption {text!r} is not UTF-8. Save it as UTF-8 (Excel: CSV UTF-8)",
        )
    return None
