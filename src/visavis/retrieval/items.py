"""Items of an index (images, clips and moments of clips), and filters over them.

This module imports neither torch nor a store, so a server can use it before it opens an index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from visavis.core.errors import DataError, VisavisError
from visavis.data.file_names import INDEX_DATABASE

DATABASE = INDEX_DATABASE
REMEDY = (
    "To repair it, run visavis index again. If that fails, save votes with visavis indexes "
    "export-votes, and delete the folder of the index first."
)
"""Fix that errors of the store of an index name."""
Basis = Literal["captions", "collection", "off"]
"""Origin of match probabilities."""
ItemKind = Literal["image", "video", "moment"]
COMPANIONS = "companions"
"""Name of the files that belong to a photo in its metadata."""
ITEM_FIELDS = (
    "key",
    "path",
    "kind",
    "content",
    "size",
    "modified_ns",
    "start",
    "end",
    "dhash",
    "metadata",
)
"""Fields of an item, which are the columns of every store."""
OTHER_CAPTIONS = "other_captions"
"""Name of all captions but the first in the metadata, one per line. It is not filtered by."""
CHECKSUM = "checksum"
"""Column of the checksums of the rows."""


@dataclass(frozen=True)
class IndexItem:
    r"""An image, a clip, or a moment of a clip.

    Attributes:
        key: Unique key in the index: the path, followed by ``#t=START,END`` for a moment.
        path: Path below the indexed folder with forward slashes, with bytes that are not UTF-8 as
            ``\xe9``, or the name in a data set.
        kind: ``"image"``, ``"video"`` (a whole clip) or ``"moment"``.
        content: Hash of the bytes of the file.
        size: Size of the file in bytes.
        modified_ns: Modification time of the file in ns since the epoch.
        start: Start of a moment in seconds. None for other kinds.
        end: End of a moment in seconds. None for other kinds.
        dhash: Perceptual hash of the image, or of the middle frame of a clip or moment, in hex.
        metadata: Other values, such as the split and the first caption in a data set, and the
            capture time as ``taken``.
    """

    key: str
    path: str
    kind: ItemKind
    content: str
    size: int
    modified_ns: int
    start: float | None = None
    end: float | None = None
    dhash: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The first caption in a data set, else the name of the file."""
        return self.metadata.get("caption") or self.path.rpartition("/")[2]

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions in a data set."""
        return item_captions(self.metadata)

    @property
    def time(self) -> datetime:
        """Capture time, or the modification time if it is not known."""
        return item_time(self.metadata, self.modified_ns)

    def to_row(self) -> dict[str, Any]:
        """Convert to a row of a store, which keeps and filters the metadata as tags."""
        return vars(self) | {"metadata": metadata_tags(self.metadata)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> IndexItem:
        """Convert from a row of a store, the inverse of ``to_row``."""
        return cls(
            **{name: row[name] for name in ITEM_FIELDS}
            | {"metadata": tags_to_metadata(row["metadata"])}
        )


def caption_metadata(captions: Sequence[str]) -> dict[str, str]:
    """Write captions as metadata: the first one, and all others."""
    first = {"caption": captions[0]} if captions else {}
    # On one line each. None of the words is lost.
    others = "\n".join(" ".join(caption.split()) for caption in captions[1:])
    return first | ({OTHER_CAPTIONS: others} if others else {})


def item_captions(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Read the captions in metadata."""
    first = metadata.get("caption")
    others = metadata.get(OTHER_CAPTIONS)
    return (*((first,) if first else ()), *(others.split("\n") if others else ()))


def item_time(metadata: Mapping[str, str], modified_ns: int) -> datetime:
    """Return the capture time, or the modification time if it is not known."""
    from visavis.data.capture_time import TAKEN, modified_time, parse_time

    taken = parse_time(metadata.get(TAKEN, ""))
    return modified_time(modified_ns) if taken is None else taken


@dataclass(frozen=True)
class ItemFilter:
    """Conditions on the items that a search may return. An empty field does not restrict.

    Attributes:
        path: Pattern of the whole path. ``*`` matches any text (slashes too), ``?`` one character.
            Upper and lower case are equal, as cameras and file systems write suffixes in any case.
        kind: Kind of the items.
        after: Earliest time (``IndexItem.time``), inclusive. Without a time zone, the clock at the
            place of the item is compared, otherwise the instant.
        before: Latest time, exclusive.
        metadata: Values that an item must have.
    """

    path: str = ""
    kind: ItemKind | None = None
    after: datetime | None = None
    before: datetime | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != NO_FILTER

    def __hash__(self) -> int:
        conditions = self.path, self.kind, self.after, self.before
        return hash((*conditions, *sorted(self.metadata.items())))

    def matches(self, item: IndexItem) -> bool:
        """Check whether an item satisfies all conditions.

        Args:
            item: Item to check.

        Returns:
            Whether a search may return the item.
        """
        return (
            (not self.path or re.fullmatch(path_expression(self.path), item.path) is not None)
            and self.kind in (None, item.kind)
            and (self.after is None or not _is_earlier(item, self.after))
            and (self.before is None or _is_earlier(item, self.before))
            and all(item.metadata.get(name) == value for name, value in self.metadata.items())
        )


@lru_cache(maxsize=64)
def path_expression(pattern: str) -> str:
    """Convert the pattern of a path to a regular expression of the whole path."""
    from visavis.data.file_names import any_case_expression

    wildcards = {"*": ".*", "?": "."}
    parts = re.split(r"([*?])", pattern)
    text = "".join(wildcards.get(part) or any_case_expression(part) for part in parts)
    return f"(?s:{text})"


def _is_earlier(item: IndexItem, bound: datetime) -> bool:
    """Whether the time of an item lies before a time of a filter."""
    from visavis.data.capture_time import time_us

    clock = bound.tzinfo is None
    return time_us(item.time, clock=clock) < time_us(bound, clock=clock)


NO_FILTER = ItemFilter()


def parse_filter_time(text: str | None) -> datetime | None:
    """Parse a time for a filter. A year, month or date counts from its start."""
    from visavis.data.capture_time import parse_time

    if text is None:
        return None
    time = parse_time(text)
    if time is None:
        raise DataError(
            "time: expected a year or date such as 2024, 2024-05-31 or 2024-05-31T18:30, got "
            f"{text!r}. Pass a date of the calendar."
        )
    return time


def metadata_tag(name: str, value: str) -> str:
    """Write a metadata name and value as one text. Different pairs have different texts.

    Args:
        name: Name of the value.
        value: Value.

    Returns:
        The tag ``name=value`` with ``%`` and ``=`` of the name escaped.

    Example:
        >>> metadata_tag("camera", "X=1"), metadata_tag("f=", "2%")
        ('camera=X=1', 'f%3D=2%')
    """
    return f"{name.replace('%', '%25').replace('=', '%3D')}={value}"


def metadata_tags(metadata: Mapping[str, str]) -> list[str]:
    """Write metadata as tags, the inverse of ``tags_to_metadata``."""
    # Sorted, because the checksum of a row depends on the order of its tags.
    return [metadata_tag(name, value) for name, value in sorted(metadata.items())]


def tags_to_metadata(tags: Iterable[str]) -> dict[str, str]:
    """Convert tags back to metadata.

    Args:
        tags: Texts of ``metadata_tag``.

    Returns:
        Values by name.

    Example:
        >>> tags_to_metadata(["camera=X=1", "place=", "f%3D=2%"])
        {'camera': 'X=1', 'place': '', 'f=': '2%'}
    """
    pairs = (tag.split("=", 1) for tag in tags)
    return {name.replace("%3D", "=").replace("%25", "%"): value for name, value in pairs}


def index_names(folders: Sequence[Path]) -> dict[str, Path]:
    """Name indexes by the last parts of their paths, as many as distinguish them."""
    paths = [Path(os.path.realpath(folder)) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise VisavisError(
                f"index: expected different folders, got {path} twice. Pass each index once."
            )
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, folders, strict=True))
