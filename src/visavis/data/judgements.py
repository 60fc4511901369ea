"""What people said of queries and the items found for them: a file of JSON lines that only ever grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from visavis import storage
from visavis.errors import DataError


@dataclass(frozen=True)
class Asked:
    """A query as a person asked it; what is empty was not part of it.

    text: as it was typed, in which ``-word`` and ``-"several words"`` say what must not be there. like: the key of an item, for "more
    like this". picture: the SHA-256 of the content of a picture that was brought along.
    """

    text: str = ""
    like: str = ""
    picture: str = ""

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def sentence(self) -> str:
        """The words of a query of words alone; empty for one with a picture, an item or a minus."""
        words = self.text.split()
        return "" if self.like or self.picture or any(word.startswith("-") for word in words) else " ".join(words)


NOTHING = Asked()


@dataclass(frozen=True)
class Judgement:
    """Whether an item fits a query. fits: None takes an earlier answer back. content: the hash of the item's file, by which it is known
    where it was moved. at: when it was said, in UTC.
    """

    at: str
    index: str
    query: Asked
    item: str
    content: str
    fits: bool | None
    kind: Literal["fits"] = "fits"


@dataclass(frozen=True)
class Preference:
    """Which of two indexes answered a query better, said without knowing which is which. preferred: None where neither did."""

    at: str
    query: Asked
    left: str
    right: str
    preferred: str | None
    kind: Literal["prefers"] = field(default="prefers")


Line: TypeAlias = Judgement | Preference

_BEGIN = b'{"at": "'


class JudgementFile:
    """A file of judgements that is being written; ``open_judgements`` makes one."""

    def __init__(self, path: Path, lines: list[Line]):
        self.path, self.lines = path, lines

    def add(self, line: Line) -> None:
        """Append a line; it is on the disk when this returns. Raises StorageError."""
        storage.append_json_line(self.path, asdict(line), durable=True)


@contextmanager
def open_judgements(path: str | Path) -> Iterator[JudgementFile]:
    """The file of judgements at a path, new or to be continued; one process at a time writes to it.

    A last line that a crash cut short is taken out. Raises DataError for a file of another kind, which is left as it is, RunError
    where another process writes to it, and StorageError where nothing can be written.
    """
    path = Path(path)
    with storage.alone(path, wait=False):
        if path.exists():
            lines = read_judgements(path)
            storage.cut_last_line(path)
        else:
            lines = []
            storage.write_bytes(path, b"")
        yield JudgementFile(path, lines)
    storage.remove_lock(path)


def read_judgements(path: str | Path) -> list[Line]:
    """All lines of a file of judgements, in the order in which they were said, but for a last one that a crash cut short.

    Raises DataError for a file of another kind.
    """
    lines: list[Line] = storage.read_json_lines(path, Line)
    tail = storage.read_bytes(path).rpartition(b"\n")[2]
    if not tail.startswith(_BEGIN[: len(tail)]):
        raise DataError(f"{path} ends with {tail[:40]!r}, which is no judgement: name another file.")
    return lines


def last_words(lines: Iterable[Line]) -> dict[tuple[Asked, str], Judgement]:
    """The last judgement of each query and item, without those that were taken back."""
    last = {(line.query, line.item): line for line in lines if isinstance(line, Judgement)}
    return {pair: line for pair, line in last.items() if line.fits is not None}
