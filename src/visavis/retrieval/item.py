"""What an index holds: one item for each picture, clip or moment of a clip, and which of them a search may find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["image", "video", "moment"]


@dataclass(frozen=True)
class Item:
    """A picture, a clip, or a moment of a clip.

    key: unique in its index: the path below the root, for a moment with ``#t=START,END`` after it. path: below the root, with slashes.
    content: a hash of the file's bytes. size: of the file, in bytes. modified_ns: its time of last change. start, end: of a moment, in
    seconds. look: a perceptual hash of the picture, of a clip that of its middle frame. metadata: what else is known of it, such as its
    split and its first caption in a data set.
    """

    key: str
    path: str
    kind: Kind
    content: str
    size: int
    modified_ns: int
    start: float | None = None
    end: float | None = None
    look: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def tags(self) -> list[str]:
        """The metadata as "name=value", sorted: how stores keep and filter it."""
        return [tag(name, value) for name, value in sorted(self.metadata.items())]


@dataclass(frozen=True)
class Where:
    """Which items a search may find; what is left empty does not restrict.

    path: a pattern of the whole path, in which ``*`` stands for anything (slashes too) and ``?`` for one character. kind: pictures, clips
    or moments alone. after, before: times of last change in ns, the first included, the second not. metadata: values that an item must have.
    """

    path: str = ""
    kind: Kind | None = None
    after: int | None = None
    before: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != EVERYTHING

    def allows(self, item: Item) -> bool:
        """Whether an item may be found."""
        return (
            (not self.path or fnmatchcase(item.path, self.path.replace("[", "[[]")))
            and self.kind in (None, item.kind)
            and (self.after is None or item.modified_ns >= self.after)
            and (self.before is None or item.modified_ns < self.before)
            and all(item.metadata.get(name) == value for name, value in self.metadata.items())
        )


EVERYTHING = Where()


def tag(name: str, value: str) -> str:
    """One name and value of metadata as a text that no other pair is written as.

    >>> tag("camera", "X=1"), tag("f=", "2%")
    ('camera=X=1', 'f%3D=2%')
    """
    return f"{name.replace('%', '%25').replace('=', '%3D')}={value}"


def tags_to_metadata(tags: Iterable[str]) -> dict[str, str]:
    """The inverse of ``Item.tags``.

    >>> tags_to_metadata(["camera=X=1", "place=", "f%3D=2%"])
    {'camera': 'X=1', 'place': '', 'f=': '2%'}
    """
    pairs = (text.split("=", 1) for text in tags)
    return {name.replace("%3D", "=").replace("%25", "%"): value for name, value in pairs}
