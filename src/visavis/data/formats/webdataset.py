"""Shards of WebDataset as an ordinary data set: tar files with ``KEY.jpg`` and ``KEY.txt`` or
``KEY.json``, which are read in place.

The source is a folder of shards, one shard, or a pattern such as ``train-{000..003}.tar``. Members
of the same key are a sample. ``KEY.json`` is a text, a list of texts, or an object with the columns
of ``captions.csv``. The split is in the name of the shard or in ``KEY.json``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.data.dataset import require
from visavis.data.file_names import (
    IMAGE_SUFFIXES,
    TAR_SUFFIX,
    escape_surrogates,
    find_split_files,
    normalize_split_name,
    splits_of_files,
)
from visavis.data.formats.image_files import archive_members, containing_folder
from visavis.data.formats.listing import DatasetFormat, Listing
from visavis.data.formats.table_columns import MAX_TEXT_BYTES, TableColumns, parse_captions
from visavis.data.image_file import MAX_IMAGE_BYTES, ByteRange

TEXT_SUFFIXES = (".txt", ".caption")
# The extensions of a sample in WebDataset begin at the first dot of the file name.
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)$")


@dataclass(frozen=True)
class TarSamples:
    """Samples of a tar file.

    Attributes:
        name: Name of the file, for errors.
        samples: First byte and size of each member by its extension, by the key of the sample.
        repeated: Keys of samples with two members of the same extension, of which the last is used.
        damage: Damage of the file, after which no sample is read. "": none.
    """

    name: str
    samples: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    damage: str = ""
    repeated: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: BinaryIO, path: Path, name: str) -> TarSamples:
        """Read the headers of a tar file, up to any damage. ``name`` is for errors."""
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        damage = ""
        repeated = dict[str, None]()
        try:
            for member, location in archive_members(file, path):
                if match := _KEY.fullmatch(member):
                    members = samples.setdefault(match[1], {})
                    extension = match[2].lower()
                    if extension in members:
                        repeated[match[1]] = None
                    members[extension] = (location.offset, location.num_bytes)
            # An archive ends with blocks of zeros. A shard that was cut between two members has
            # none.
            file.seek(-min(512, os.fstat(file.fileno()).st_size), os.SEEK_END)
            if any(file.read()):
                damage = "the shard is cut short: it has no end of archive"
        except DataError as error:
            damage = str(error)
        return cls(name, samples, damage, tuple(repeated))

    def find(self, key: str, suffixes: Sequence[str], content: str) -> str:
        """Return the extension of a member of a sample. The first suffix is the preferred one."""
        for suffix in suffixes:
            for extension in self.samples[key]:
                if f".{extension}".endswith(suffix):
                    return extension
        found = escape_surrogates(", ".join(self.samples[key]))
        raise DataError(
            f"{self.location(key)}: expected one {content} ({', '.join(suffixes[:4])}), got "
            f"{found:.200}. Add it to the sample."
        )

    def location(self, key: str) -> str:
        """Name a sample in errors, in valid Unicode."""
        return f"{self.name}: {escape_surrogates(key):.200}"

    def read_member(
        self, file: BinaryIO, key: str, extension: str, max_bytes: int = MAX_IMAGE_BYTES
    ) -> bytes:
        """Read a member of a sample."""
        offset, size = self.samples[key][extension]
        if size > max_bytes:
            raise DataError(
                f"{self.location(key)}.{extension:.20}: expected at most {max_bytes:,} bytes, got "
                f"{size:,}. Shorten the member."
            )
        return storage.read_at(file, size, offset)

    def _read_text(self, file: BinaryIO, key: str, extension: str) -> Any:
        """The text of a member, or the value of a JSON member."""
        content = self.read_member(file, key, extension, MAX_TEXT_BYTES)
        try:
            text = content.decode(storage.text_encoding(content)).replace("\r\n", "\n")
            return json.loads(text) if extension.endswith("json") else text
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.location(key)}.{extension:.20} is not readable: {error}. Write the member "
                "again."
            ) from None

    def read_captions(self, file: BinaryIO, key: str) -> list[str]:
        """Read the captions of a sample. None are found without a text, or with an empty one."""
        suffixes = (*TEXT_SUFFIXES, ".json")
        if not any(f".{extension}".endswith(suffixes) for extension in self.samples[key]):
            return []
        value = self._read_text(file, key, self.find(key, suffixes, "caption"))
        if isinstance(value, dict):
            columns = TableColumns.of_object(tuple(value))
            value = next((value[name] for name in columns.captions), None)
        captions = parse_captions(value)
        if captions is None:
            raise DataError(
                f"{self.location(key)}: expected a caption, got {value!r:.40}. Add it to the "
                "sample."
            )
        return [text for text in captions if text.strip()]

    def read_split(self, file: BinaryIO, key: str) -> str | None:
        """Read the standard name of the split in the JSON of a sample. None: it gives none."""
        value = self._read_text(file, key, "json") if "json" in self.samples[key] else None
        return normalize_split_name(value.get("split")) if isinstance(value, dict) else None


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern of shards, such as ``train-{000..039}.tar``."""
    with requires_extra("large", "a pattern of shards"):
        from braceexpand import braceexpand
    try:
        return list(braceexpand(pattern))
    # Its UnbalancedBracesError.
    except ValueError:
        raise DataError(
            f"{pattern}: expected balanced braces, got unbalanced ones. Correct the pattern of the "
            "shards."
        ) from None


def find_shards(source: Path) -> list[Path]:
    """Find the shards of a folder, file or pattern, sorted by name or in the order of the braces."""
    if os.path.isdir(source):
        return find_split_files(source, [TAR_SUFFIX])
    if os.path.isfile(source):
        return [source]
    shards = list[Path]()
    for name in expand_braces(source.name) if "{" in source.name else [source.name]:
        is_pattern = any(sign in name for sign in "*?[")
        paths = source.parent.glob(name) if is_pattern else [source.parent / name]
        matches = sorted(filter(os.path.isfile, paths))
        require(
            matches,
            f"{source.parent / name}: expected an existing shard, got none. Check the pattern "
            f"of the shards, {source.name}.",
        )
        shards += matches
    return shards


def list_webdataset(source: Path) -> Listing:
    """List the images and captions of a folder, file or pattern of shards."""
    folder = source if os.path.isdir(source) else source.parent
    listing = Listing(source, folder=folder)
    root = containing_folder(folder)
    splits = splits_of_files(find_shards(source), folder)
    shards = list[TarSamples]()
    for path in splits:
        with storage.open_file(path, root) as file:
            shards.append(TarSamples.read(file, path, path.relative_to(folder).as_posix()))
    # Some tools number the samples of each shard from 0. Such keys are names within a shard.
    first_keys = [next(iter(shard.samples)) for shard in shards if shard.samples]
    has_local_keys = len(set(first_keys)) < len(first_keys)
    for shard, (path, split) in zip(shards, splits.items(), strict=True):
        if shard.damage:
            listing.add_loss(
                "broken archive",
                shard.name,
                f"{shard.damage.removesuffix('.')}. Copy the shard again. The samples before are "
                "used",
            )
        for key in shard.repeated:
            listing.add_loss(
                "duplicate name",
                f"{shard.name}: {key}",
                "the shard has a member of this sample twice, the last is used",
            )
        prefix = f"{shard.name.removesuffix(TAR_SUFFIX)}/" if has_local_keys else ""
        with storage.open_file(path, root) as file:
            for key in shard.samples:
                _add_sample(listing, shard, file, key, split, prefix, ByteRange(path, root=root))
    return listing


def _add_sample(
    listing: Listing,
    shard: TarSamples,
    file: BinaryIO,
    key: str,
    split: str | None,
    prefix: str,
    shard_file: ByteRange,
) -> None:
    location = f"{shard.name}: {key}"
    try:
        extension = shard.find(key, IMAGE_SUFFIXES, "image")
    except DataError as error:
        listing.add_loss("missing image", location, str(error).removesuffix("."))
        return
    name = f"{prefix}{key}.{extension}"
    captions = list[str]()
    own_split = None
    problem = ""
    is_new = name not in listing.by_name
    try:
        captions = shard.read_captions(file, key)
        own_split = shard.read_split(file, key)
    except DataError as error:
        problem = str(error).removesuffix(".")
    image = listing.add_row(name, captions, own_split or split, location)
    if problem:
        listing.add_loss("image without caption", location, problem, image if is_new else None)
    if image is not None and is_new:
        offset, size = shard.samples[key][extension]
        image.location = replace(shard_file, offset=offset, size=size)


WEBDATASET = DatasetFormat(
    name="WebDataset",
    description="Shards of WebDataset: *.tar with KEY.jpg and KEY.txt or KEY.json, with the split in the file name",
    patterns=tuple(f"{folder}*{TAR_SUFFIX}" for folder in ("", "data/", "train/", "data/train/")),
    suffixes=(TAR_SUFFIX,),
    read=list_webdataset,
    image_files="none",
    reads_several_files=True,
    fallback_level=2,
)
