"""Several kinds of features ("experts") of each item on disk, of unequal widths and lengths, some of them missing.

A store is a folder: ``experts.json`` (names and widths of experts, the items in their order, a checksum) and for each expert a flat
array ``NAME.npy`` ``[total, D]``, memory-mapped, with ``NAME.offsets.npy`` ``[N + 1]``: item i has the vectors from ``offsets[i]`` to
``offsets[i + 1]``, none where the expert is missing.

    with new_experts(folder, {"appearance": 2048, "sound": 128}) as store:
        store.append("video7", {"appearance": frames, "sound": None})
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from visavis import storage
from visavis.data.clips import video_name
from visavis.data.features import look_up
from visavis.data.finite import file_marks
from visavis.data.ragged import read_ragged
from visavis.data.store_files import HASHED_AT_OPENING, damage
from visavis.errors import DataError, nearest
from visavis.types import Encoded

CONTENTS = "experts.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
"""What stored features may be called: it is part of the name of a file."""
_PART = 2**20  # vectors that are hashed at once


@dataclass(frozen=True)
class _Contents:
    """The file ``experts.json``. sha256: of items, widths, offsets and vectors."""

    widths: dict[str, int]
    items: list[str]
    sha256: str


@dataclass(frozen=True)
class _Expert:
    vectors: np.ndarray
    offsets: np.ndarray

    def digest(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, len(self.vectors), _PART):
            digest.update(self.vectors[start : start + _PART].tobytes())
        digest.update(self.offsets.astype(np.int64).tobytes())
        return digest.hexdigest()


class ExpertStore:
    """A store of experts; reads any items as named, padded and masked parts.

    Of a sequence longer than ``longest`` it reads vectors evenly spaced. Differs from: CE, whose code reads the first ones, and MMT, whose
    code draws them at random.

    >>> store = ExpertStore.open(folder, longest=30)                                  # doctest: +SKIP
    >>> store.read(store.rows(["video7", "video8"])).vectors["appearance"].shape      # doctest: +SKIP
    torch.Size([2, 30, 2048])
    """

    def __init__(self, folder: Path, contents: _Contents, experts: dict[str, _Expert], longest: int):
        self.folder, self.items, self.sha256, self.longest = folder, contents.items, contents.sha256, longest
        self._experts = experts
        self._row = {item: row for row, item in enumerate(self.items)}

    @classmethod
    def open(cls, folder: str | Path, names: Sequence[str] = (), *, longest: int = 0) -> ExpertStore:
        """The store in a folder.

        names: of the experts that are read, all if empty. longest: vectors an item and expert that are read, evenly spaced in a longer
        sequence; 0: all. Raises DataError if there is no such store or expert, storage.Damaged if it is not as it was written.
        """
        folder = Path(folder)
        if not (folder / CONTENTS).exists():
            raise DataError(f"{folder} is no store of experts: it has no {CONTENTS}; make one with visavis data convert.")
        with damage():
            contents = storage.read_json(folder / CONTENTS, _Contents)
            if wrong := next((name for name in contents.widths if not NAME.fullmatch(name)), None):
                raise storage.Damaged(f"{folder / CONTENTS} names the expert {wrong!r}, which cannot be the name of a file")
            experts = {name: _open(folder, name, width, len(contents.items)) for name, width in contents.widths.items()}
        _verify(folder, contents, experts)
        if unknown := [name for name in names if name not in experts]:
            raise DataError(f"{folder} has no expert {unknown[0]!r}: {nearest(unknown[0], experts)}")
        return cls(folder, contents, {name: experts[name] for name in names or experts}, longest)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def names(self) -> tuple[str, ...]:
        """The experts, in their order."""
        return tuple(self._experts)

    @property
    def widths(self) -> dict[str, int]:
        """The width of each expert's vectors."""
        return {name: int(expert.vectors.shape[1]) for name, expert in self._experts.items()}

    @property
    def width(self) -> int:
        """That of all experts together."""
        return sum(self.widths.values())

    def lengths(self, name: str) -> np.ndarray:
        """``[N]``: how many vectors of an expert each item has, 0 where it is missing."""
        return np.diff(self._experts[name].offsets)

    def rows(self, items: Iterable[str]) -> np.ndarray:
        """The row of each item by its name, by that without the ending of its file, or by that without folder and ending.

        Raises DataError naming the first unknown one.
        """
        return look_up(self._row, map(self._key, items), self.folder)

    def refuse_shared(self, items: Iterable[str]) -> None:
        """Raise DataError for two different items of a data set that would read one row."""
        own: dict[str, str] = {}
        for item in items:
            if (first := own.setdefault(key := self._key(item), item)) != item:
                raise DataError(
                    f"{first} and {item} would both read what {self.folder} holds of {key!r}: give features of each by its own name, with its "
                    "folder, or take one of them out of the data."
                )

    def _key(self, item: str) -> str:
        return next((key for key in (item, video_name(item), PurePath(item).stem) if key in self._row), item)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Rows, in the given order: by expert ``[n, L, D]`` as float32 with a mask ``[n, L]``, all false where the expert is missing.

        L is at least 1, so that an expert which none of the rows has is still a tensor with a place to mask.
        """
        index = np.asarray(rows)
        parts = {
            name: read_ragged(expert.vectors, expert.offsets, index, longest=self.longest, least=1)
            for name, expert in self._experts.items()
        }
        return Encoded({name: part for name, (part, _) in parts.items()}, {name: mask for name, (_, mask) in parts.items()})


class ExpertWriter:
    """Takes items one after another; ``new_experts`` makes one."""

    def __init__(self, folder: Path, widths: Mapping[str, int], files: Mapping[str, BinaryIO]):
        self._folder, self._widths, self._files = folder, dict(widths), files
        self._lengths: dict[str, list[int]] = {name: [] for name in widths}
        self._digests: dict[str, Any] = {name: hashlib.sha256() for name in widths}
        self._items: dict[str, None] = {}

    def append(self, item: str, experts: Mapping[str, np.ndarray | None]) -> None:
        """The next item: for each expert ``[L, D]``, or ``[D]`` for one vector; None, or nothing at all, where it is missing.

        Raises DataError for an item that is there already, an unknown expert, another width, values that are not finite in float32.
        """
        if item in self._items:
            raise DataError(f"the item {item!r} comes twice: expected the experts of each item once.")
        if unknown := [name for name in experts if name not in self._widths]:
            raise DataError(f"{item} has an expert {unknown[0]!r} that the store was not told of: {nearest(unknown[0], self._widths)}")
        checked = {name: _checked(experts.get(name), item, name, width) for name, width in self._widths.items()}
        for name, vectors in checked.items():
            self._files[name].write(vectors.data)
            self._digests[name].update(vectors.data)
            self._lengths[name].append(len(vectors))
        self._items[item] = None

    def finish(self) -> None:
        """Write what is known only at the end: how long everything is, names and checksum."""
        digests = {}
        for name, width in self._widths.items():
            offsets = np.concatenate([[0], np.cumsum(self._lengths[name], dtype=np.int64)])
            self._files[name].seek(0)
            _write_header(self._files[name], int(offsets[-1]), width)
            storage.write_array(self._folder / f"{name}.offsets.npy", offsets)
            self._digests[name].update(offsets.tobytes())
            digests[name] = self._digests[name].hexdigest()
        items = list(self._items)
        storage.write_json(self._folder / CONTENTS, asdict(_Contents(self._widths, items, _checksum(items, self._widths, digests))))


@contextmanager
def new_experts(folder: str | Path, widths: Mapping[str, int]) -> Iterator[ExpertWriter]:
    """A new store, written in this block; the folder appears as a whole at its end, or not at all.

    widths: of each expert's vectors, by its name. Raises RefusedOverwrite if the folder holds anything, DataError for a name that cannot
    be that of a file, StorageError for a full disk.
    """
    folder = Path(folder)
    for name, width in widths.items():
        if not NAME.fullmatch(name) or name.endswith(".offsets") or width < 1:
            raise DataError(
                f"the expert {name!r} of width {width} cannot be stored: expected letters, digits, . _ - and a width of 1 or more."
            )
    if folder.exists():
        storage.new_folder(folder, replaced=True)
    with storage.replacing_folder(folder) as part, ExitStack() as opened:
        files = {name: opened.enter_context(open(part / f"{name}.npy", "w+b")) for name in widths}
        for name, file in files.items():
            _write_header(file, 0, widths[name])
        writer = ExpertWriter(part, widths, files)
        yield writer
        writer.finish()


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    """Of ``.npy``; numpy leaves room in it for any number of rows, so that it can be written again."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})


def _checked(vectors: np.ndarray | None, item: str, name: str, width: int) -> np.ndarray:
    if vectors is None:
        return np.empty((0, width), np.float32)
    if vectors.ndim not in (1, 2) or vectors.shape[-1] != width or vectors.dtype.kind not in "fiu":
        raise DataError(
            f"{item}: the expert {name} is {vectors.dtype} of shape {list(vectors.shape)}, expected numbers of shape [length, {width}]."
        )
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(vectors.reshape(-1, width), np.float32)
    if not np.isfinite(single).all():
        raise DataError(f"{item}: the expert {name} holds values that are not finite, expected numbers, or no vectors where it is missing.")
    return single


def _open(folder: Path, name: str, width: int, items: int) -> _Expert:
    """Raises storage.Damaged if the files of an expert do not fit what ``experts.json`` says."""
    for file in (folder / f"{name}.npy", folder / f"{name}.offsets.npy"):
        if not file.exists():
            raise storage.Damaged(
                f"{folder} lacks {file.name} of the expert {name}: bring back a whole copy of the folder, or convert anew."
            )
    vectors = storage.read_array(folder / f"{name}.npy", dimensions=2, mapped=True)
    offsets = storage.read_array(folder / f"{name}.offsets.npy", dimensions=1, kinds="i")
    rising = len(offsets) == items + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if not rising or vectors.shape != (offsets[-1], width) or vectors.dtype != np.float32:
        raise storage.Damaged(
            f"{folder / name}.npy holds {vectors.dtype} of shape {list(vectors.shape)}, which does not fit {CONTENTS} and its offsets"
        )
    return _Expert(vectors, offsets)


def _checksum(items: list[str], widths: Mapping[str, int], digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([items, dict(widths), dict(digests)]).encode()).hexdigest()


def _verify(folder: Path, contents: _Contents, experts: dict[str, _Expert]) -> None:
    """Compare the content with its checksum if that costs little or was not done yet. Raises storage.Damaged."""
    marks = file_marks(folder / f"{name}{ending}" for name in experts for ending in (".npy", ".offsets.npy"))
    mark = hashlib.sha256(json.dumps([list(marks.values()), contents.sha256]).encode()).hexdigest()[:32]
    record = storage.cache_folder() / "checks" / f"experts-{mark}.json"
    small = sum(expert.vectors.nbytes for expert in experts.values()) <= HASHED_AT_OPENING
    if not small and storage.kept(record, str) == contents.sha256:
        return
    if _checksum(contents.items, contents.widths, {name: expert.digest() for name, expert in experts.items()}) != contents.sha256:
        raise storage.Damaged(f"the experts in {folder} do not have their checksum: bring back a whole copy of it, or convert anew.")
    if not small:
        storage.keep(record, contents.sha256)
