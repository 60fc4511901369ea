"""The images, captions and problems that a reader finds in a source, and the declaration of a data set format.

A ``Listing`` keeps unusable images and captions at their position in the source, so that rows of stored features still match.
``Listing.dataset`` returns the usable ones.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.dataset import ByteRange, Dataset, Image
from visavis.errors import DataError

# A batch of captions is as long as its longest caption.
MAX_CAPTION_CHARS = 20_000
SPLITS = ("train", "val", "test")
_SPLIT_NAMES = {
    **dict.fromkeys(["restval", "training"], "train"),
    **dict.fromkeys(["dev", "valid", "validate", "validation"], "val"),
    "testing": "test",
}


@dataclass(frozen=True)
class Finding:
    """A problem or a harmless oddity of a data set.

    Attributes:
        kind: Kind of the finding, such as "missing image".
        location: File, file and line, or image name.
        message: What is wrong.
        loses_data: Whether training would have to skip something.
    """

    kind: str
    location: str
    message: str
    loses_data: bool = True

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


@dataclass
class ListedImage:
    """An image as listed.

    Attributes:
        name: Name of the image.
        split: Its split. None if the source gives none.
        file: Path of its file in the source. None if the source gives none.
        location: Location of its bytes. None if they were not found.
    """

    name: str
    split: str | None
    file: str | None = None
    location: ByteRange | None = None


@dataclass
class Listing:
    """Images and captions of a source, with findings.

    A reader adds images, captions and findings, and then calls ``finalize``.

    Attributes:
        source: The file or folder.
        format_name: Name of its format.
        images: All images.
        captions: All captions.
        image_of: Index of the image of each caption. -1: none.
        caption_locations: Location of each caption: file and line, or image name.
        findings: Problems and oddities.
        unusable_images: Indices of unusable images.
        unusable_captions: Indices of unusable captions.
        feature_files: Files of stored features, if the format has features instead of pixels.
        find_nonfinite_features: Reads all features and returns the names of images with NaN or infinity.
        index_of: Index of the first image of each name.
    """

    source: Path
    format_name: str = ""
    images: list[ListedImage] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    image_of: list[int] = field(default_factory=list)
    caption_locations: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unusable_images: set[int] = field(default_factory=set)
    unusable_captions: set[int] = field(default_factory=set)
    feature_files: tuple[Path, ...] = ()
    find_nonfinite_features: Callable[[], list[str]] | None = None
    index_of: dict[str, int] = field(default_factory=dict)

    def add_image(self, name: str, split: str | None) -> None:
        """Add an image that is found by its name. A second image of the same name is unusable.

        Args:
            name: Name of the image, which is also its file.
            split: Its split.
        """
        index = len(self.images)
        self.images.append(ListedImage(name, split, name))
        first = self.images[self.index_of.setdefault(name, index)]
        if first is not self.images[index]:
            kind = "duplicate name" if first.split == split else "image in two splits"
            self.add_loss(kind, name, f"already listed in {first.split or 'the same file'}, the first is used", image=index)

    def add_note(self, kind: str, location: str, message: str) -> None:
        """Record a harmless oddity.

        Args:
            kind: Kind of the finding.
            location: Where it is.
            message: What is odd.
        """
        self.findings.append(Finding(kind, escape_surrogates(location), escape_surrogates(message), loses_data=False))

    def add_loss(self, kind: str, location: str, message: str, *, image: int | None = None, caption: int | None = None) -> None:
        """Record a problem because of which an image, a caption or a line is skipped.

        Args:
            kind: Kind of the finding.
            location: Where it is.
            message: What is wrong.
            image: Index of the unusable image.
            caption: Index of the unusable caption.
        """
        self.findings.append(Finding(kind, escape_surrogates(location), escape_surrogates(message)))
        if image is not None:
            self.unusable_images.add(image)
        if caption is not None:
            self.unusable_captions.add(caption)

    def add_caption(self, caption: str, image: int, location: str) -> int:
        """Add a caption.

        Args:
            caption: Its text.
            image: Index of its image. -1: none.
            location: Its location in the source.

        Returns:
            The index of the caption.
        """
        self.captions.append(caption)
        self.image_of.append(image)
        self.caption_locations.append(location)
        return len(self.captions) - 1

    def finalize(self) -> None:
        """Assign missing splits, and find problems that any format can have: broken texts, images without captions, empty splits."""
        self._assign_splits()
        self.check_texts()
        with_usable_caption = {self.image_of[i] for i in range(len(self.captions)) if i not in self.unusable_captions}
        with_caption = set(self.image_of)
        for index, entry in enumerate(self.images):
            if index not in with_usable_caption and index not in self.unusable_images:
                problem = "the image has no usable caption" if index in with_caption else "the image is listed without a caption"
                self.add_loss("image without caption", entry.name, f"{problem}, add one or remove the image", image=index)
        if not self.images:
            self.add_loss("no images", self.source.name, "no image is listed")
            return
        nonempty = {entry.split for index, entry in enumerate(self.images) if index not in self.unusable_images}
        if empty := [split for split in SPLITS if split not in nonempty]:
            self.add_note("empty split", self.source.name, f"no image in split {' or '.join(empty)}")

    def _assign_splits(self) -> None:
        no_splits = all(entry.split is None for entry in self.images)
        for index, entry in enumerate(self.images):
            if entry.split is None and not no_splits and index not in self.unusable_images:
                self.add_loss("image without split", entry.name, "the image has no split, although others have one", image=index)
            entry.split = entry.split or split_by_hash(entry.name)

    def check_texts(self) -> None:
        """Find names, splits and captions that are not UTF-8, and captions that are empty, too long or repeated."""
        for index, entry in enumerate(self.images):
            for attribute, text in (("name", entry.name), ("split", entry.split or "")):
                if index not in self.unusable_images and not is_valid_unicode(text):
                    self.add_loss("broken UTF-8", entry.name, f"the image's {attribute} is not UTF-8", image=index)
        seen: set[tuple[int, str]] = set()
        for index, (caption, image) in enumerate(zip(self.captions, self.image_of, strict=True)):
            if index in self.unusable_captions:
                continue
            location = self.caption_locations[index]
            if not caption.strip():
                self.add_loss("empty caption", location, "the caption is empty", caption=index)
            elif len(caption) > MAX_CAPTION_CHARS:
                problem = f"the caption has {len(caption):,} characters, expected at most {MAX_CAPTION_CHARS:,}"
                self.add_loss("caption too long", location, problem, caption=index)
            elif not is_valid_unicode(caption):
                self.add_loss("broken UTF-8", location, f"the caption {caption!r} is not UTF-8, save it as UTF-8", caption=index)
            elif (image, caption) in seen:
                self.add_note("duplicate caption", location, f"the image already has the caption {caption!r}")
            seen.add((image, caption))

    def dataset(self) -> Dataset:
        """Build a data set of the usable images and captions.

        Returns:
            The data set.

        Raises:
            DataError: If no image is usable.
        """
        kept = [index for index in range(len(self.images)) if index not in self.unusable_images]
        new_index = np.full(len(self.images) + 1, -1)  # index -1, of captions without an image, is the last element
        new_index[kept] = np.arange(len(kept))
        image_of = new_index[np.array(self.image_of, dtype=np.int64)]
        captions = [index for index in np.flatnonzero(image_of >= 0).tolist() if index not in self.unusable_captions]
        if not kept:
            raise DataError(f"{self.source} has no usable image ({summarize_kinds(self.losses)}): {self.losses[0]}.")
        is_whole = len(kept) == len(self.images) and len(captions) == len(self.captions)
        return Dataset(
            name=dataset_name(self.source),
            images=tuple(Image(self.images[i].name, self.images[i].split or "", self.images[i].location) for i in kept),
            captions=tuple(self.captions[i] for i in captions),
            image_of=image_of[captions],
            image_origin=None if is_whole else np.array(kept),
            caption_origin=None if is_whole else np.array(captions, dtype=np.int64),
            skipped=self._skipped(len(kept), len(captions)),
        )

    @property
    def losses(self) -> list[Finding]:
        """Findings because of which something is skipped."""
        return [finding for finding in self.findings if finding.loses_data]

    def _skipped(self, images: int, captions: int) -> tuple[str, ...]:
        if not self.losses:
            return ()
        total = f"{len(self.images) - images} of {len(self.images)} images and "
        total += f"{len(self.captions) - captions} of {len(self.captions)} captions of {self.source.name} ({summarize_kinds(self.losses)})"
        return (total, *map(str, self.losses))


def summarize_kinds(findings: list[Finding]) -> str:
    """Count findings by kind.

    Args:
        findings: The findings.

    Returns:
        A text such as ``"2 x missing image, 1 x empty caption"``.
    """
    return ", ".join(f"{number} x {kind}" for kind, number in Counter(finding.kind for finding in findings).items())


def dataset_name(source: Path) -> str:
    """Return the name of a data set: the name of its folder.

    Args:
        source: The folder, or a list in it.

    Returns:
        The name.
    """
    return source.name if source.is_dir() else source.resolve().parent.name


def normalize_split_name(raw_name: object) -> str | None:
    """Return the standard name of a split: ``restval`` and ``training`` are train, ``dev`` and ``validation`` are val.

    Args:
        raw_name: Name in the source.

    Returns:
        The standard name. None if the source gives none.
    """
    name = raw_name.strip() if isinstance(raw_name, str) else ""
    return _SPLIT_NAMES.get(name, name) or None


def split_priority(split: str | None) -> int:
    """Return the order in which copies of an image are kept, because a result on test must not come from training on it.

    Args:
        split: Name of a split.

    Returns:
        0 for test, 1 for val, 2 for others.
    """
    return {"test": 0, "val": 1}.get(split or "", 2)


def split_by_hash(name: str) -> str:
    """Assign a split by a hash of the name: 80 % train, 10 % val, 10 % test. New images never change the split of others.

    Args:
        name: Name of the image.

    Returns:
        Name of the split.
    """
    hundredth = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]) % 100
    return "train" if hundredth < 80 else "val" if hundredth < 90 else "test"


@dataclass(frozen=True, kw_only=True)
class DatasetFormat:
    """A format of data sets. The reader, ``visavis doctor``, the catalog and the reference are derived from it.

    Attributes:
        name: Name in ``visavis data check``.
        description: What a folder of this format contains.
        patterns: Patterns of the files by which a folder is recognized.
        suffixes: Suffixes of files that may be given instead of a folder.
        read: Lists the content of a source. Raises DataError if the source cannot be parsed at all.
        reads_whole_folder: Whether the source is the folder and not one list in it.
    """

    name: str
    description: str
    patterns: tuple[str, ...]
    suffixes: tuple[str, ...]
    read: Callable[[Path], Listing] = field(repr=False)
    reads_whole_folder: bool = field(default=False, repr=False)

    def find_sources(self, folder: Path) -> list[Path]:
        """Find the sources of this format in a folder.

        Args:
            folder: The folder.

        Returns:
            Lists in the order of the patterns, or the folder itself.
        """
        lists = [path for pattern in self.patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        return [folder] if self.reads_whole_folder and lists else lists

    def source_for_file(self, file: Path) -> Path | None:
        """Return the source to which a file belongs.

        Args:
            file: The file.

        Returns:
            The file or its folder. None if it is not of this format.
        """
        if not file.name.endswith(self.suffixes):
            return None
        return file.parent if self.reads_whole_folder else file


class DuplicateKeyObject(dict[str, Any]):
    """A JSON object with a duplicate key. It has the last value of the key."""


def decode_utf8(content: bytes) -> str:
    """Decode UTF-8 without its byte order mark. Invalid bytes become lone surrogates, which ``is_valid_unicode`` detects.

    Args:
        content: Content of a file.

    Returns:
        The text.
    """
    return content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")


def parse_json(text: str) -> Any:
    """Parse JSON. Texts may have lone surrogates, and objects may be a ``DuplicateKeyObject``.

    Args:
        text: The JSON text.

    Returns:
        The value.

    Raises:
        ValueError: If the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_detect_duplicate_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_valid_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, so that it has no lone surrogates.

    Args:
        text: The text.

    Returns:
        Whether it is valid.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_surrogates(text: str) -> str:
    """Format a text on one line, with lone surrogates as escaped bytes.

    Args:
        text: The text.

    Returns:
        Valid Unicode.
    """
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate without a byte, from a JSON escape
        content = text.encode(errors="surrogatepass")
    return " ".join(content.decode(errors="backslashreplace").splitlines())


def shorten(value: Any) -> str:
    """Format the beginning of a value of any size and depth.

    Args:
        value: The value.

    Returns:
        At most 60 characters.
    """
    return f"{reprlib.repr(value):.60}"


def _detect_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else DuplicateKeyObject(value)
