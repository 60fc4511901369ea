"""Items of an index (images, clips and moments of clips), and filters over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


ItemKind = Literal["image", "video", "moment"]
ITEM_FIELDS = ("key", "path", "kind", "content", "size", "modified_ns", "start", "end", "dhash", "metadata")
"""Fields of an item, which are the columns of every store."""


@dataclass(frozen=True)
class IndexItem:
    """An image, a clip, or a moment of a clip.

    Attributes:
        key: Unique key in the index: the path, followed by ``#t=START,END`` for a moment.
        path: Path below the indexed folder with forward slashes, or the name in a data set.
        kind: ``"image"``, ``"video"`` (a whole clip) or ``"moment"``.
        content: Hash of the bytes of the file.
        size: Size of the file in bytes.
        modified_ns: Modification time of the file in ns since the epoch.
        start: Start of a moment in seconds. None for other kinds.
        end: End of a moment in seconds. None for other kinds.
        dhash: Perceptual hash of the image, or of the middle frame of a clip or moment, in hex.
        metadata: Other values, such as the split and the first caption in a data set.
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

    def tags(self) -> list[str]:
        """Convert the metadata to tags, the form in which stores keep and filter it.

        Returns:
            Texts ``name=value``, sorted by name.
        """
        return [metadata_tag(name, value) for name, value in sorted(self.metadata.items())]


@dataclass(frozen=True)
class ItemFilter:
    """Conditions on the items that a search may return. An empty field does not restrict.

    Attributes:
        path: Pattern of the whole path. ``*`` matches any text (slashes too), ``?`` one character.
        kind: Kind of the items.
        after: Earliest modification time in ns since the epoch, inclusive.
        before: Latest modification time in ns since the epoch, exclusive.
        metadata: Values that an item must have.
    """

    path: str = ""
    kind: ItemKind | None = None
    after: int | None = None
    before: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != NO_FILTER

    def matches(self, item: IndexItem) -> bool:
        """Check whether an item satisfies all conditions.

        Args:
            item: Item to check.

        Returns:
            Whether a search may return the item.
        """
        return (
            (not self.path or fnmatchcase(item.path, self.path.replace("[", "[[]")))
            and self.kind in (None, item.kind)
            and (self.after is None or item.modified_ns >= self.after)
            and (self.before is None or item.modified_ns < self.before)
            and all(item.metadata.get(name) == value for name, value in self.metadata.items())
        )


NO_FILTER = ItemFilter()


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


def tags_to_metadata(tags: Iterable[str]) -> dict[str, str]:
    """Convert tags back to metadata, the inverse of ``IndexItem.tags``.

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


def matching_rows(table: pa.Table, item_filter: ItemFilter) -> np.ndarray:
    """Find the rows of an Arrow table that a filter matches.

    Args:
        table: Items with the columns ``ITEM_FIELDS``.
        item_filter: Conditions.

    Returns:
        Boolean mask of the rows, shape ``[N]``.
    """
    import pyarrow.compute as pc

    mask = np.ones(len(table), bool)
    if item_filter.path:
        mask &= pc.match_like(table["path"], glob_to_like(item_filter.path)).to_numpy()
    if item_filter.kind is not None:
        mask &= pc.equal(table["kind"], item_filter.kind).to_numpy()
    if item_filter.after is not None:
        mask &= table["modified_ns"].to_numpy() >= item_filter.after
    if item_filter.before is not None:
        mask &= table["modified_ns"].to_numpy() < item_filter.before
    if item_filter.metadata:
        tags = table["metadata"].combine_chunks()
        tag_rows, tag_texts = pc.list_parent_indices(tags).to_numpy(), pc.list_flatten(tags)
        for name, value in item_filter.metadata.items():
            has_value = np.zeros(len(table), bool)
            has_value[tag_rows[pc.equal(tag_texts, metadata_tag(name, value)).to_numpy(zero_copy_only=False)]] = True
            mask &= has_value
    return mask


def glob_to_like(pattern: str) -> str:
    r"""Convert a path pattern to a pattern of SQL's LIKE with backslash escapes.

    Args:
        pattern: Pattern of ``ItemFilter.path``.

    Returns:
        Pattern for LIKE.

    Example:
        >>> print(glob_to_like("a_b/*.jp?g"))
        a\_b/%.jp_g
    """
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")


def sql_quoted(text: str) -> str:
    """Quote a text for SQL.

    Args:
        text: Any text.

    Returns:
        The text as a SQL string literal.

    Example:
        >>> sql_quoted("it's")
        "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def sql_condition(item_filter: ItemFilter) -> str:
    """Write a filter as a SQL condition for Lance.

    Args:
        item_filter: Conditions.

    Returns:
        The condition, empty if the filter does not restrict.

    Example:
        >>> sql_condition(ItemFilter(kind="video", metadata={"camera": "X"}))
        "kind = 'video' AND array_has(metadata, 'camera=X')"
    """
    conditions = []
    if item_filter.path:
        conditions.append(f"path LIKE {sql_quoted(glob_to_like(item_filter.path))} ESCAPE '\\'")
    if item_filter.kind is not None:
        conditions.append(f"kind = {sql_quoted(item_filter.kind)}")
    if item_filter.after is not None:
        conditions.append(f"modified_ns >= {clamp_int64(item_filter.after)}")
    if item_filter.before is not None:
        conditions.append(f"modified_ns < {clamp_int64(item_filter.before)}")
    conditions += [f"array_has(metadata, {sql_quoted(metadata_tag(name, value))})" for name, value in item_filter.metadata.items()]
    return " AND ".join(conditions)


def clamp_int64(number: int) -> int:
    """Clamp an integer to the range that stores can compare with.

    Args:
        number: Any integer.

    Returns:
        The nearest integer whose magnitude is below 2**63.
    """
    return max(-(2**63) + 1, min(number, 2**63 - 1))
