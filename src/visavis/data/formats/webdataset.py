"""Shards of WebDataset as an ordinary data set: tar files with ``KEY.jpg`` and ``KEY.txt`` or ``KEY.json``, which are read in place.

The source is a folder of shards, one shard, or a pattern such as ``train-{000..003}.tar``. Members of the same key are a sample. ``KEY.json`` is
a text, a list of texts, or an object with the columns of ``captions.csv``. The split is in the name of the shard or in ``KEY.json``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from visavis import storage
from visavis.data.dataset import ByteRange
from visavis.data.formats.image_files import IMAGE_SUFFIXES, archive_members, containing_folder
from visavis.data.formats.listing import DatasetFormat, ListedImage, Listing
from visavis.data.formats.table_columns import CAPTION_NAMES, parse_captions
from visavis.data.splits import normalize_split_name, split_folders, splits_of_files
from visavis.errors import DataError, MissingExtra

TAR_SUFFIX = ".tar"
TEXT_SUFFIXES = (".txt", ".caption")
# The extensions of a sample in WebDataset begin at the first dot of the file name.
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)$")


@dataclass(frozen=True)
class TarSamples:
    """Samples of a tar file.

    Attributes:
        name: Name of the file, for errors.
        samples: First byte and size of each member by its extension, by the key of the sample.
        damage: Damage of the file, after which no sample is read. "": none.
    """

    name: str
    samples: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    damage: str = ""

    @classmethod
    def read(cls, path: Path, name: str, root: Path | None = None) -> TarSamples:
        """Read the headers of a tar file.

        Args:
            path: The file.
            name: Name for errors.
            root: Folder that must contain the file, as for ``ByteRange``.

        Returns:
            The samples before any damage.
        """
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        damage = ""
        try:
            for member, location in archive_members(path, root):
                if match := _KEY.fullmatch(member):
                    samples.setdefault(match[1], {})[match[2].lower()] = (location.offset, location.num_bytes)
            with storage.open_file(path, root) as file:
                file.seek(-min(512, os.path.getsize(path)), os.SEEK_END)
                if any(file.read()):
                    damage = "the shard is cut short: it has no end of archive"
        except DataError as error:
            damage = str(error)
        return cls(name, samples, damage)

    def _find(self, key: str, suffixes: tuple[str, ...], content: str) -> str:
        """The extension of a member, with the preferred suffix."""
        for suffix in suffixes:
            for extension in self.samples[key]:
                if f".{extension}".endswith(suffix):
                    return extension
        raise DataError(f"{self.name}: {key}: expected one {content} ({', '.join(suffixes[:4])}), got {', '.join(self.samples[key])}.")

    def find_image(self, key: str) -> str:
        """Find the image of a sample.

        Args:
            key: Key of the sample.

        Returns:
            The extension of the member.

        Raises:
            DataError: If the sample has no image.
        """
        return self._find(key, IMAGE_SUFFIXES, "image")

    def read_member(self, file: BinaryIO, key: str, extension: str) -> bytes:
        """Read a member of a sample.

        Args:
            file: The open tar file.
            key: Key of the sample.
            extension: Extension of the member.

        Returns:
            Its content.
        """
        offset, size = self.samples[key][extension]
        return os.pread(file.fileno(), size, offset)

    def read_text(self, file: BinaryIO, key: str) -> tuple[list[str], Any]:
        """Read the captions of a sample.

        Args:
            file: The open tar file.
            key: Key of the sample.

        Returns:
            The captions, and the split in its JSON or None.

        Raises:
            DataError: If it has no caption.
        """
        extension = self._find(key, (*TEXT_SUFFIXES, ".json"), "caption")
        try:
            value: Any = self.read_member(file, key, extension).decode()
            if extension.endswith("json"):
                value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.name}: {key}.{extension} is not readable: {error}") from None
        entry: Mapping[str, Any] = value if isinstance(value, dict) else {"caption": value}
        value = next((entry[name] for name in CAPTION_NAMES if name in entry), None)
        captions = [text for text in parse_captions(value) or () if text.strip()]
        if not captions:
            raise DataError(f"{self.name}: {key}: expected a caption, got {value!r:.40}.")
        return captions, entry.get("split")


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern of shards.

    Args:
        pattern: Such as ``train-{000..039}.tar``.

    Returns:
        One path per shard.

    Raises:
        MissingExtra: If ``braceexpand`` is not installed.
    """
    try:
        from braceexpand import braceexpand
    except ImportError:
        raise MissingExtra("braceexpand", "large", "a pattern of shards") from None
    return list(braceexpand(pattern))


def is_shard_pattern(name: str) -> bool:
    """Return whether the name of a file is a pattern of shards.

    Args:
        name: The name.

    Returns:
        Whether it is.
    """
    return name.endswith(TAR_SUFFIX) and re.search(r"\{.+\}|[*?[]", name) is not None


def find_shards(source: Path) -> list[Path]:
    """Find the shards of a source.

    Args:
        source: A folder, a shard, or a pattern in the name of a file.

    Returns:
        The shards, sorted by name or in the order of the braces.

    Raises:
        DataError: If a shard is missing, or no shard matches.
    """
    if os.path.isdir(source):
        return sorted(path for folder in split_folders(source) for path in folder.glob(f"*{TAR_SUFFIX}") if os.path.isfile(path))
    if os.path.isfile(source):
        return [source]
    shards = list[Path]()
    for name in expand_braces(source.name) if "{" in source.name else [source.name]:
        is_pattern = any(sign in name for sign in "*?[")
        found = sorted(filter(os.path.isfile, source.parent.glob(name) if is_pattern else [source.parent / name]))
        if not found:
            raise DataError(
                f"{source.parent / name}: expected an existing shard, got none. Check the pattern of the shards, {source.name}."
            )
        shards += found
    return shards


def list_webdataset(source: Path) -> Listing:
    """List the images and captions of shards.

    Args:
        source: A folder, a shard, or a pattern in the name of a file.

    Returns:
        The listing. Samples of the same key are captions of one image, unless each shard numbers its samples from the same key.
    """
    folder = source if os.path.isdir(source) else source.parent
    listing, root = Listing(source, folder=folder), containing_folder(folder)
    splits = splits_of_files(find_shards(source), folder)
    shards = [TarSamples.read(path, path.relative_to(folder).as_posix(), root) for path in splits]
    first_keys = [next(iter(shard.samples)) for shard in shards if shard.samples]
    has_local_keys = len(set(first_keys)) < len(first_keys)
    for shard, (path, split) in zip(shards, splits.items(), strict=True):
        if shard.damage:
            listing.add_loss("broken archive", shard.name, f"{shard.damage.removesuffix('.')}, the samples before are used")
        with storage.open_file(path, root) as file:
            for key in shard.samples:
                image = _add_sample(listing, shard, file, key, split, f"{shard.name.removesuffix(TAR_SUFFIX)}/" if has_local_keys else "")
                if image is not None:
                    offset, size = shard.samples[key][shard.find_image(key)]
                    image.location = ByteRange(path, offset, size, root)
    return listing


def _add_sample(listing: Listing, shard: TarSamples, file: BinaryIO, key: str, split: str | None, prefix: str) -> ListedImage | None:
    """Add a sample. Returns its image if it is new."""
    place = f"{shard.name}: {key}"
    try:
        extension = shard.find_image(key)
    except DataError as error:
        listing.add_loss("missing image", place, str(error).removesuffix("."))
        return None
    name = f"{prefix}{key}.{extension}"
    known = listing.by_name.get(name)
    captions, own_split = list[str](), None
    try:
        captions, own_split = shard.read_text(file, key)
        problem = ""
    except DataError as error:
        problem = str(error).removesuffix(".")
    image = listing.add_row(name, captions, normalize_split_name(own_split) or split, place)
    if problem:
        listing.add_loss("image without caption", place, problem, None if image is known else image)
    return None if image is known else image


WEBDATASET = DatasetFormat(
    name="WebDataset",
    description="Shards of WebDataset: *.tar with KEY.jpg and KEY.txt or KEY.json, with the split in the file name",
    patterns=tuple(f"{folder}*{TAR_SUFFIX}" for folder in ("", "data/", "train/", "data/train/")),
    suffixes=(TAR_SUFFIX,),
    read=list_webdataset,
    image_files="none",
    reads_several_files=True,
    is_fallback=True,
)
