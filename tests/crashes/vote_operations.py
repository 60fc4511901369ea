"""Operations on votes, and exports of an index."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from tests.crashes.index_commands import QUERY
from tests.crashes.index_operations import View, make_index, same, view
from tests.crashes.operations import OPERATIONS, Operation

import visavis
from visavis.data.feedback.records import Judgment
from visavis.data.feedback.sources import read_feedback
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.vote_store import new_vote, open_votes

MADE = 4
"""Votes that a command makes or undoes."""


def _votes(folder: Path) -> list[str]:
    """Names of the votes in an index."""
    return [each.vote for each in read_feedback(folder) if isinstance(each, Judgment)]


@dataclass
class VoteCase:
    """Votes in some indexes, one after the other, each of which is acknowledged.

    Attributes:
        names: Names of the indexes. All of them get each vote.
        undoes: Whether earlier votes are undone, instead of new ones made.
    """

    names: tuple[str, ...]
    undoes: bool = False
    earlier: list[str] = field(default_factory=list, init=False)
    index: View = field(default_factory=dict, init=False)

    def _folders(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.names]

    def prepare(self, folder: Path) -> None:
        """Make the indexes, and votes in them."""
        index = make_index(folder)
        opened = open_index(index)
        judgments = [
            new_vote("index", QUERY, item, relevant=True) for item in opened.items.values()
        ][:MADE]
        opened.close()
        for name in self.names[1:]:
            shutil.copytree(index, folder / name)
        for each in self._folders(folder):
            with open_votes(each) as votes:
                for judgment in judgments:
                    votes.add(judgment)
        self.earlier = [judgment.vote for judgment in judgments]
        self.index = view(index)

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        folders = list(map(str, self._folders(folder)))
        words = ["undo", *self.earlier, "--", *folders] if self.undoes else ["vote", *folders]
        return ["python", "-m", "tests.crashes.index_commands", *words]

    def check(self, folder: Path, acknowledged: str) -> None:
        """Each acknowledged vote is in all indexes, and at most one more is in some of them."""
        answered = acknowledged.split()
        for each in self._folders(folder):
            stored = _votes(each)
            if self.undoes:
                left = [self.earlier[done:] for done in (len(answered), len(answered) + 1)]
                assert stored in left, f"expected one of {left}, got {stored}"
            else:
                assert stored[:MADE] == self.earlier, "an earlier vote is lost"
                new = stored[MADE:]
                assert new[: len(answered)] == answered, f"lost: {answered} became {new}"
                assert len(new) <= len(answered) + 1, "a vote that nobody made"
            with open_votes(each) as votes:
                item = next(iter(self.index["items"]))
                vote = Judgment("", "index", QUERY, item, "", relevant=False, vote="next")
                votes.add(vote)
                assert votes.of_query(QUERY)[item] is False
            assert same(view(each), self.index), "the index itself has changed"


@dataclass
class ExportCase:
    """A new file with the content of an index.

    Attributes:
        name: Name of the file.
        make: Makes the index.
        words: Words of the command.
        read: Reads the file.
        again: Makes a file by the function of the command.
    """

    name: str
    make: Callable[[Path], object]
    words: tuple[str, ...]
    read: Callable[[Path], object]
    again: Callable[[Path, Path], object]

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        return ["visavis", *self.words, str(folder / "index"), "--out", str(folder / self.name)]

    def check(self, folder: Path, acknowledged: str) -> None:
        """The file is complete, or was not acknowledged and is absent. Then it can be made."""
        file = folder / self.name
        assert file.exists() or not acknowledged.strip(), "an acknowledged file is lost"
        expected = folder / f"again-{self.name}"
        self.again(folder / "index", expected)
        if not file.exists():
            self.again(folder / "index", file)
        assert self.read(file) == self.read(expected), "the file differs from a new one"


def _index_with_votes(folder: Path) -> None:
    VoteCase(("index",)).prepare(folder)


def _add(name: str, case: VoteCase) -> None:
    OPERATIONS.append(Operation(name, case.prepare, case.command, case.check))


_add("votes: add", VoteCase(("index",)))
_add("votes: add to two indexes", VoteCase(("index", "other")))
_add("votes: undo", VoteCase(("index",), undoes=True))
for case in (
    ExportCase(
        "items.parquet",
        make_index,
        ("indexes", "export"),
        lambda file: pq.read_table(file).to_pylist(),
        lambda index, file: visavis.indexes_export(index, out=file),
    ),
    ExportCase(
        "votes.jsonl",
        _index_with_votes,
        ("indexes", "export-votes"),
        read_feedback,
        lambda index, file: visavis.indexes_export_votes(index, out=file),
    ),
):
    OPERATIONS.append(Operation(f"export: {case.name}", case.make, case.command, case.check))
