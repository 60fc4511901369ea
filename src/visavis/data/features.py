"""Features of frozen encoders on disk: computed once, memory-mapped, read by rows.

A store is a folder: ``features.json`` (what the features are), ``keys.json`` (the image names or caption texts, one
a row), ``progress.json`` (rows written so far) and float16 arrays: ``vectors.npy`` ``[N, D]``, ``[N, R, D]`` for
grids, with a crop axis after ``N`` where there are several crops; for words ``words.npy`` ``[total, D]`` and
``offsets.npy`` ``[N + 1]``. Equal captions share a row. Writing an unfinished store continues where it was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.data.precomp import PRECOMP, feature_files, precomp_features, precomp_splits
from visavis.errors import DataError, RefusedOverwrite
from visavis.types import Encoded

Side = Literal["visual", "text"]
View = Literal["pooled", "grid", "words"]


@dataclass(frozen=True)
class Description:
    """What a store holds, and how it was made.

    side: images or captions. tower and weights: the encoder's name and a checksum of its parameters. shape: of one
    item, ``(D,)``, ``(R, D)`` or, for words, ``(D,)`` a word; with several crops their number comes first.
    fingerprint: of the data set. precision: in which the encoder ran. versions: of the packages; not compared.
    """

    side: Side
    view: View
    tower: str
    weights: str
    shape: tuple[int, ...]
    count: int
    fingerprint: str
    crops: int = 1
    precision: str = "float32"
    preprocessing: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def width(self) -> int:
        return self.shape[-1]

    def difference(self, other: Description) -> str | None:
        """The first field in which two stores differ, versions aside, as part of a sentence; None if they agree."""
        facts = [(name, *(json.dumps(getattr(store, name)) for store in (self, other))) for name in asdict(self)]
        return next(
            (f"{name} is {mine}, not {its}" for name, mine, its in facts if mine != its and name not in ("versions", "complete")), None
        )


class FeatureStore:
    """A finished store; reads any rows as float32.

    >>> store = FeatureStore.open(folder)                           # doctest: +SKIP
    >>> store.read(store.rows(["a.jpg", "b.jpg"])).vectors.shape    # doctest: +SKIP
    torch.Size([2, 1280])
    """

    def __init__(self, folder: Path, description: Description):
        self.folder = folder
        self.description = description
        self.keys: list[str] = storage.read_json(folder / "keys.json")
        self._row = {key: row for row, key in enumerate(self.keys)}
        ragged = description.view == "words"
        self._offsets = np.load(folder / "offsets.npy") if ragged else None
        self._vectors = _map(folder / ("words.npy" if ragged else "vectors.npy"))

    @classmethod
    def open(cls, folder: str | Path) -> FeatureStore:
        """The store in a folder. Raises DataError if there is none, or if it is unfinished."""
        folder = Path(folder)
        description = read_description(folder)
        if not description.complete:
            raise DataError(
                f"{folder} is unfinished: {_rows_written(folder):,} of {description.count:,} rows are there; cache it again and it goes on."
            )
        return cls(folder, description)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        return self.description.width

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name or caption text. Raises DataError naming the first unknown one."""
        return _look_up(self._row, keys, self.folder)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Rows, in the given order, as float32; words are padded ``[n, L, D]`` with a mask."""
        if self._offsets is None:
            return Encoded(self._vectors[torch.as_tensor(rows)].float())
        rows = np.asarray(rows)
        starts, lengths = self._offsets[rows], self._offsets[rows + 1] - self._offsets[rows]
        place = np.arange(lengths.max(initial=0))
        mask = place < lengths[:, None]
        vectors = torch.zeros(*mask.shape, self.width)
        vectors[torch.from_numpy(mask)] = self._vectors[torch.from_numpy((starts[:, None] + place)[mask])].float()
        return Encoded(vectors, torch.from_numpy(mask))


class ArrayFeatures:
    """A bare ``.npy`` with one row (a vector, or a grid of regions) per image, in the order of the whole data set."""

    def __init__(self, path: Path, vectors: Tensor, row: dict[str, int]):
        self.path, self._vectors, self._row = path, vectors, row

    @classmethod
    def open(cls, path: str | Path, dataset: Dataset) -> ArrayFeatures:
        """The array of a data set or of a part of it. Raises DataError if the rows do not fit its images."""
        path = Path(path)
        vectors, rows = _map(path), dataset.image_rows
        if vectors.dim() < 2 or (len(vectors) != len(rows) if dataset.origin is None else rows.max(initial=-1) >= len(vectors)):
            expected = f"{len(rows)} rows" if dataset.origin is None else f"at least {rows.max() + 1} rows"
            raise DataError(
                f"{path} is of shape {tuple(vectors.shape)}, expected {expected} of features: one for each image of {dataset.name}, in its order."
            )
        return cls(path, vectors, {image.name: int(row) for image, row in zip(dataset.images, rows, strict=True)})

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def files(self) -> list[Path]:
        """What is read."""
        return [self.path]

    @property
    def width(self) -> int:
        return self._vectors.shape[-1]

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name. Raises DataError naming the first unknown one."""
        return _look_up(self._row, keys, self.path)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Rows, in the given order, as float32."""
        return Encoded(self._vectors[torch.as_tensor(rows)].float())


class PrecompFeatures:
    """The stored features of a whole set in the layout of the VSE++ family, read by rows. Raises DataError where there are none."""

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        if not self.files:
            raise DataError(f'{path} holds no features of its own, which "precomp" stands for: expected {PRECOMP.files}.')
        self._arrays = {split: precomp_features(path, split) for split in precomp_splits(path)}
        self._first = dict(zip(self._arrays, np.cumsum([0, *map(len, self._arrays.values())]), strict=False))

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    @property
    def files(self) -> list[Path]:
        """What is read."""
        return feature_files(self.folder)

    @property
    def width(self) -> int:
        return int(next(iter(self._arrays.values())).shape[-1])

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name ``<split>-<i>``."""
        parts = (key.rsplit("-", 1) for key in keys)
        return np.array([self._first[split] + int(index) for split, index in parts], dtype=np.int64)

    def read(self, rows: np.ndarray) -> Encoded:
        """Rows, in the given order, as float32."""
        values = np.empty((len(rows), *next(iter(self._arrays.values())).shape[1:]), np.float32)
        for split, array in self._arrays.items():
            in_split = (rows >= self._first[split]) & (rows < self._first[split] + len(array))
            values[in_split] = array[rows[in_split] - self._first[split]]
        return Encoded(torch.from_numpy(values))


class FeatureWriter:
    """Writes a store from its first row to its last; saved rows survive if the process is killed."""

    def __init__(self, folder: Path, description: Description):
        self.folder, self.description = folder, description
        self.done = _rows_written(folder)
        ragged = description.view == "words"
        self._offsets = np.load(folder / "offsets.npy") if ragged else np.arange(description.count + 1)
        self._vectors = np.lib.format.open_memmap(folder / ("words.npy" if ragged else "vectors.npy"), mode="r+")

    @classmethod
    def open(cls, folder: str | Path, description: Description, keys: Sequence[str], lengths: np.ndarray | None = None) -> FeatureWriter:
        """Start a store, or continue an unfinished one of the same description and keys.

        lengths ``[N]``: the number of words of each key, for words. Raises RefusedOverwrite if the folder holds anything else.
        """
        folder = Path(folder)
        if not (folder / "features.json").exists():
            _create(folder, description, keys, lengths)
            return cls(folder, description)
        if difference := read_description(folder).difference(description):
            raise RefusedOverwrite(f"{folder} holds other features: its {difference}; remove it or name another folder.")
        if storage.read_json(folder / "keys.json") != list(keys):
            raise RefusedOverwrite(f"{folder} holds features of other images or captions; remove it or name another folder.")
        return cls(folder, description)

    def append(self, items: Encoded) -> None:
        """Write the next rows. Raises DataError for values that float16 cannot hold."""
        assert isinstance(items.vectors, Tensor)
        values = items.vectors.float()
        if self.description.view == "words":
            values = values[items.mask]  # type: ignore[index]
        if not values.abs().max() < torch.finfo(torch.float16).max:
            raise DataError(f"{self.description.tower} gives features that float16 cannot hold, near row {self.done} of {self.folder}.")
        start, end = self._offsets[self.done], self._offsets[self.done + len(items)]
        self._vectors[start:end] = values.cpu().numpy()
        self.done += len(items)

    def save(self) -> None:
        """Flush all rows to disk, then record their number."""
        self._vectors.flush()
        storage.write_json(self.folder / "progress.json", {"done": self.done})

    def finish(self) -> FeatureStore:
        """Save, mark the store as complete and open it."""
        assert self.done == self.description.count
        self.save()
        storage.write_json(self.folder / "features.json", asdict(replace(self.description, complete=True)))
        return FeatureStore.open(self.folder)


def side_of(name: str) -> Side:
    """A side by its name in a file; older files call the visual side "vision"."""
    return "visual" if name == "vision" else name  # type: ignore[return-value]


def read_description(folder: Path) -> Description:
    """What the store in a folder holds. Raises DataError if it is no store of this version."""
    if not (folder / "features.json").exists():
        raise DataError(f"{folder} is not a feature store: it has no features.json; make one with visavis features.")
    content = storage.read_json(folder / "features.json")
    try:
        return Description(**{**content, "side": side_of(content["side"]), "shape": tuple(content["shape"])})
    except (KeyError, TypeError):
        raise DataError(
            f"{folder / 'features.json'} does not describe a feature store of this version; make it anew with visavis features."
        ) from None


def _create(folder: Path, description: Description, keys: Sequence[str], lengths: np.ndarray | None) -> None:
    """Create all files of an empty store in one step, so that a killed process leaves none or all of them."""
    if folder.exists():
        storage.new_folder(folder)
    with storage.replacing_folder(folder) as part:
        storage.write_json(part / "features.json", asdict(description))
        storage.write_json(part / "keys.json", list(keys))
        storage.write_json(part / "progress.json", {"done": 0})
        if description.view == "words":
            assert lengths is not None
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            storage.write_array(part / "offsets.npy", offsets)
            storage.create_array(part / "words.npy", shape=(int(offsets[-1]), description.width), dtype="float16")
        else:
            storage.create_array(part / "vectors.npy", shape=(description.count, *description.shape), dtype="float16")


def _rows_written(folder: Path) -> int:
    return storage.read_json(folder / "progress.json")["done"]


def _map(path: Path) -> Tensor:
    """A ``.npy`` as a memory-mapped tensor; changes stay in memory (copy on write)."""
    try:
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a readable .npy of numbers: {error}.") from None


def _look_up(row: dict[str, int], keys: Iterable[str], where: Path) -> np.ndarray:
    try:
        return np.array([row[key] for key in keys], dtype=np.int64)
    except KeyError as missing:
        raise DataError(
            f"{where} holds no features of {missing.args[0]!r}: they were computed for other data; compute them for this data set."
        ) from None
