"""Store of several kinds of features ("experts") per item, of different dimensions and lengths,
some of them missing.

A store is a folder: ``experts.json`` (names and dimensions of experts, the items in order, a
checksum), and for each expert a flat array ``NAME.npy`` ``[total, D]``, memory-mapped, with
``NAME.offsets.npy`` ``[N + 1]``. Item i has the vectors from ``offsets[i]`` to ``offsets[i + 1]``,
and none if the expert is missing. An expert with known times has them in ``NAME.seconds.npy``
``[total]``, -1 where unknown.

Example:
    >>> with create_expert_store(folder, {"appearance": 2048, "sound": 128}) as store:    # doctest: +SKIP
    ...     store.append("video7", {"appearance": frames, "sound": None})

Features of regions by image id, any number per image, are ``.tsv`` of bottom-up-attention, or a
folder with a ``.npy`` or ``.npz`` per image. They are converted once into a store in the cache.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded, seconds_part
from visavis.core.errors import DataError, suggest_name
from visavis.core.ragged import RaggedRows, are_offsets, offsets_from_counts
from visavis.data.dataset import ProgressCallback, require
from visavis.data.features.arrays import look_up_rows
from visavis.data.features.store import raise_as_damaged
from visavis.data.video import video_id

EXPERTS_FILE = "experts.json"
# Fix of a damaged store. The warning about a damaged cache of region features leaves it out.
RESTORE_STORE = " Restore a complete copy of the folder, or convert again."
# Names of stored features. They are parts of file names.
EXPERT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
# Vectors that are hashed at once.
_HASH_BLOCK_ROWS = 2**20


@dataclass(frozen=True)
class _Contents:
    """Content of ``experts.json``. The checksum covers items, dimensions, offsets, vectors and
    times.
    """

    embedding_dims: dict[str, int]
    items: list[str]
    sha256: str
    timed_experts: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Expert:
    """Vectors ``[total, D]`` of an expert, and the second of each, ``[total]``, if they are known."""

    vectors: RaggedRows[np.ndarray]
    seconds: np.ndarray | None

    def digest(self) -> str:
        digest = hashlib.sha256()
        rows = self.vectors.rows
        for start in range(0, len(rows), _HASH_BLOCK_ROWS):
            digest.update(rows[start : start + _HASH_BLOCK_ROWS].tobytes())
        digest.update(self.vectors.offsets.astype(np.int64).tobytes())
        if self.seconds is not None:
            digest.update(self.seconds.tobytes())
        return digest.hexdigest()


class ExpertStore:
    """A store of experts.

    Of a sequence longer than ``max_length``, evenly spaced vectors are read. Differs from CE, whose
    code reads the first ones, and from MMT, whose code samples them at random.

    Args:
        folder: The folder.
        contents: Content of ``experts.json``.
        experts: Vectors and offsets of each expert.
        max_length: Number of vectors that are read of a longer sequence. 0: all.

    Example:
        >>> store = ExpertStore.open(folder, max_length=30)                               # doctest: +SKIP
        >>> store.read(store.rows(["video7", "video8"])).vectors["appearance"].shape      # doctest: +SKIP
        torch.Size([2, 30, 2048])
    """

    def __init__(
        self, folder: Path, contents: _Contents, experts: dict[str, _Expert], max_length: int
    ):
        self.folder = folder
        self.items = contents.items
        self.sha256 = contents.sha256
        self.max_length = max_length
        self._experts = experts
        self._row = {item: row for row, item in enumerate(self.items)}

    @classmethod
    def open(
        cls, folder: str | Path, names: Sequence[str] = (), *, max_length: int = 0
    ) -> ExpertStore:
        """Open a store to read some experts, by default all, and at most ``max_length`` vectors of a
        sequence.
        """
        folder = Path(folder)
        require(
            os.path.exists(folder / EXPERTS_FILE),
            f"{folder} is not a store of experts: expected a file {EXPERTS_FILE}. Create one with "
            "visavis data convert.",
        )
        with raise_as_damaged():
            contents = storage.read_json(folder / EXPERTS_FILE, _Contents)
            for name in contents.embedding_dims:
                _require_intact(
                    EXPERT_NAME.fullmatch(name),
                    f"{folder / EXPERTS_FILE} has the expert {name!r}, which is not allowed as a "
                    "file name",
                )
            experts = {
                name: _open_expert(folder, name, contents) for name in contents.embedding_dims
            }
        _verify(folder, contents, experts)
        if unknown := [name for name in names if name not in experts]:
            raise DataError(
                f"{folder} has no expert {unknown[0]!r}: {suggest_name(unknown[0], experts)}"
            )
        return cls(folder, contents, {name: experts[name] for name in names or experts}, max_length)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the experts, in order."""
        return tuple(self._experts)

    @property
    def embedding_dims(self) -> dict[str, int]:
        """Dimension of each expert."""
        return {name: expert.vectors.rows.shape[1] for name, expert in self._experts.items()}

    @property
    def embedding_dim(self) -> int:
        """Sum of the dimensions of all experts."""
        return sum(self.embedding_dims.values())

    def lengths(self, name: str) -> np.ndarray:
        """Return the number of vectors of an expert for each item, 0 if it is missing, ``[N]``."""
        return self._experts[name].vectors.counts

    def rows(self, items: Iterable[str]) -> np.ndarray:
        """Look up items by their name, by their name without a video suffix, or without folder and
        suffix.
        """
        return look_up_rows(self._row, map(self._key, items), self.folder)

    def check_distinct_rows(self, items: Iterable[str]) -> None:
        """Check that no two items of a data set would read the same row."""
        item_of: dict[str, str] = {}
        for item in items:
            key = self._key(item)
            first = item_of.setdefault(key, item)
            require(
                first == item,
                f"{first} and {item} would both read the features {key!r} of {self.folder}. Store "
                "features of each by its full name, with its folder, or remove one of them from "
                "the data.",
            )

    def _key(self, item: str) -> str:
        return next(
            (key for key in (item, video_id(item), PurePath(item).stem) if key in self._row), item
        )

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Read rows: of each expert float32 vectors ``[n, L, D]`` with a mask ``[n, L]``. L is at
        least 1. Known times are ``[n, L, 1]``, in the part ``seconds_part(name)``.
        """
        parts = {name: expert.vectors for name, expert in self._experts.items()}
        for name, expert in self._experts.items():
            if expert.seconds is not None:
                # Padded as the vectors, in one dimension.
                seconds = expert.seconds[:, None]
                parts[seconds_part(name)] = RaggedRows(seconds, expert.vectors.offsets)
        index = np.asarray(rows)
        vectors: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        for name, part in parts.items():
            # A missing expert is one masked vector.
            vectors[name], masks[name] = part.padded(
                index, max_length=self.max_length, min_length=1
            )
        return Encoded(vectors, masks)


class ExpertWriter:
    """Writes items one after another. ``create_expert_store`` makes one.

    Args:
        folder: The folder.
        embedding_dims: Dimension of each expert.
        files: Open file of each expert.
    """

    def __init__(
        self, folder: Path, embedding_dims: Mapping[str, int], files: Mapping[str, BinaryIO]
    ):
        self._folder = folder
        self._embedding_dims = dict(embedding_dims)
        self._files = files
        self._lengths: dict[str, list[int]] = {name: [] for name in embedding_dims}
        self._seconds: dict[str, list[np.ndarray]] = {name: [] for name in embedding_dims}
        self._digests: dict[str, Any] = {name: hashlib.sha256() for name in embedding_dims}
        self._items: dict[str, None] = {}

    def append(
        self,
        item: str,
        experts: Mapping[str, np.ndarray | None],
        seconds: Mapping[str, np.ndarray] | None = None,
        *,
        location: str = "",
    ) -> None:
        """Write the next item: the vectors of each expert, ``[L, D]`` or ``[D]``, or None if it is
        missing, and the seconds ``[L]`` if they are known. Errors name the location.
        """
        seconds = seconds or {}
        location = location or item
        require(
            item not in self._items,
            f"{location}: duplicate item {item!r}: expected the features of each item once. "
            "Remove the copy.",
        )
        if unknown := [name for name in experts if name not in self._embedding_dims]:
            raise DataError(
                f"{location}: unknown expert {unknown[0]!r}: "
                f"{suggest_name(unknown[0], self._embedding_dims)}"
            )
        # All experts are checked before any is written: an error leaves no half of an item.
        checked: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, embedding_dim in self._embedding_dims.items():
            vectors = experts.get(name)
            times = seconds.get(name)
            if vectors is None and times is None:
                checked[name] = np.empty((0, embedding_dim), np.float32), np.empty(0, np.float32)
                continue
            vectors = np.empty((0, embedding_dim), np.float32) if vectors is None else vectors
            # Not require: the messages would take longer than the checks.
            if (
                vectors.ndim not in (1, 2)
                or vectors.shape[-1] != embedding_dim
                or vectors.dtype.kind not in "fiu"
            ):
                raise DataError(
                    f"{location}: expert {name}: expected numbers of shape [length, "
                    f"{embedding_dim}], got {vectors.dtype} of shape {list(vectors.shape)}. "
                    "Correct its vectors."
                )
            # A value that float32 cannot hold becomes infinite, which the next check reports.
            with np.errstate(over="ignore"):
                vectors = np.ascontiguousarray(vectors.reshape(-1, embedding_dim), np.float32)
            require(
                np.isfinite(vectors).all(),
                f"{location}: expert {name}: expected finite values, got NaN or infinity. Compute "
                "them again, or pass None if the expert is missing.",
            )
            if times is None:
                checked[name] = vectors, np.full(len(vectors), -1, np.float32)
                continue
            if (
                times.shape != (len(vectors),)
                or times.dtype.kind not in "fiu"
                or not (np.abs(times) < np.finfo(np.float32).max).all()
            ):
                raise DataError(
                    f"{location}: seconds of expert {name}: expected a finite number for each of "
                    f"{len(vectors)} vectors, got {times.dtype} of shape {list(times.shape)}. "
                    "Correct its times."
                )
            checked[name] = vectors, times.astype(np.float32)
        for name, (vectors, times) in checked.items():
            self._seconds[name].append(times)
            self._files[name].write(vectors.data)
            self._digests[name].update(vectors.data)
            self._lengths[name].append(len(vectors))
        self._items[item] = None

    def finish(self) -> None:
        """Write lengths, names and the checksum, which are known only at the end."""
        digests = {}
        timed = []
        for name, embedding_dim in self._embedding_dims.items():
            offsets = offsets_from_counts(self._lengths[name])
            # The header with the number of vectors, which is known only now, overwrites the first
            # one.
            self._files[name].seek(0)
            _write_header(self._files[name], int(offsets[-1]), embedding_dim)
            storage.write_array(self._folder / f"{name}.offsets.npy", offsets)
            self._digests[name].update(offsets.tobytes())
            if (
                self._seconds[name]
                and ((all_seconds := np.concatenate(self._seconds[name])) >= 0).any()
            ):
                timed.append(name)
                storage.write_array(self._folder / f"{name}.seconds.npy", all_seconds)
                self._digests[name].update(all_seconds.tobytes())
            digests[name] = self._digests[name].hexdigest()
        items = list(self._items)
        contents = _Contents(
            self._embedding_dims, items, _checksum(items, self._embedding_dims, digests), timed
        )
        storage.write_json(self._folder / EXPERTS_FILE, asdict(contents))


@contextmanager
def create_expert_store(
    folder: str | Path, embedding_dims: Mapping[str, int]
) -> Iterator[ExpertWriter]:
    """Create a store. The folder appears as a whole at the end of the block, or not at all."""
    folder = Path(folder)
    for name, embedding_dim in embedding_dims.items():
        # The name is a part of the names of files.
        require(
            EXPERT_NAME.fullmatch(name)
            and not name.endswith((".offsets", ".seconds"))
            and embedding_dim > 0,
            f"expert {name!r}: expected a name of letters, digits, . _ - and a dimension >= 1, got "
            f"dimension {embedding_dim}. Rename it, or correct its dimension.",
        )
    if os.path.exists(folder):
        storage.prepare_empty_folder(folder, will_be_replaced=True)
    with storage.atomic_folder(folder) as part, ExitStack() as opened:
        files = {
            name: opened.enter_context(storage.current_disk().open(part / f"{name}.npy", "w+b"))
            for name in embedding_dims
        }
        for name, file in files.items():
            _write_header(file, 0, embedding_dims[name])
        writer = ExpertWriter(part, embedding_dims, files)
        yield writer
        writer.finish()


def _write_header(file: BinaryIO, rows: int, embedding_dim: int) -> None:
    """Write a ``.npy`` header. numpy reserves space for any number of rows, so that it can be
    overwritten.
    """
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": (rows, embedding_dim)}
    )


def _open_expert(folder: Path, name: str, contents: _Contents) -> _Expert:
    """Open the files of an expert and check them against ``experts.json``."""
    is_timed = name in contents.timed_experts
    for file in (f"{name}.npy", f"{name}.offsets.npy", *[f"{name}.seconds.npy"] * is_timed):
        _require_intact(
            os.path.exists(folder / file), f"{folder} lacks {file} of the expert {name}"
        )
    vectors = storage.read_array(folder / f"{name}.npy", dimensions=2, memory_map=True)
    offsets = storage.read_array(folder / f"{name}.offsets.npy", dimensions=1, kinds="i")
    _require_intact(
        are_offsets(offsets, len(contents.items))
        and vectors.shape == (offsets[-1], contents.embedding_dims[name])
        and vectors.dtype == np.float32,
        f"{folder / name}.npy has {vectors.dtype} of shape {list(vectors.shape)}, which does not "
        f"match {EXPERTS_FILE} and its offsets",
    )
    ragged = RaggedRows(vectors, offsets)
    if not is_timed:
        return _Expert(ragged, None)
    seconds = storage.read_array(folder / f"{name}.seconds.npy", dimensions=1, kinds="f")
    _require_intact(
        seconds.shape == vectors.shape[:1] and seconds.dtype == np.float32,
        f"{folder / name}.seconds.npy has {seconds.dtype} of shape {list(seconds.shape)}, which "
        f"does not match {name}.npy",
    )
    return _Expert(ragged, seconds)


def _require_intact(condition: object, problem: str) -> None:
    """Raise DamagedCacheError about the content of a store unless a condition holds."""
    if not condition:
        raise storage.DamagedCacheError(f"{problem}.{RESTORE_STORE}")


def _checksum(
    items: list[str], embedding_dims: Mapping[str, int], digests: Mapping[str, str]
) -> str:
    return hashlib.sha256(
        json.dumps([items, dict(embedding_dims), dict(digests)]).encode()
    ).hexdigest()


def _verify(folder: Path, contents: _Contents, experts: dict[str, _Expert]) -> None:
    """Verify the checksum of a store."""
    endings = {
        name: (".npy", ".offsets.npy", ".seconds.npy")[: 3 if name in contents.timed_experts else 2]
        for name in experts
    }
    files = (folder / f"{name}{ending}" for name in experts for ending in endings[name])

    def verify() -> None:
        digests = {name: expert.digest() for name, expert in experts.items()}
        _require_intact(
            _checksum(contents.items, contents.embedding_dims, digests) == contents.sha256,
            f"checksum mismatch of the experts in {folder}",
        )

    storage.verify_once(
        "experts",
        files,
        contents.sha256,
        sum(expert.vectors.rows.nbytes for expert in experts.values()),
        verify,
    )


# Bytes of a float32 in a ``.tsv``.
BYTES_PER_VALUE = 4
MAX_LINE_BYTES = 2**27
MEGABYTE = 2**20
# Names of the array in an ``.npz``.
NPZ_KEYS = ("features", "feat", "x")


def find_region_files(path: Path) -> list[Path]:
    """Find the files of region features: one ``.tsv``, or all files of one kind in a folder."""
    if os.path.isfile(path):
        return [path]
    for patterns in (("*.tsv", "*.tsv.[0-9]*"), ("*.npy", "*.npz")):
        if files := sorted(file for pattern in patterns for file in path.glob(pattern)):
            return files
    raise DataError(
        f"{path} has no region features: expected .tsv of bottom-up-attention, or ID.npy or ID.npz "
        "for each image. Add these files."
    )


def read_regions(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Read the features ``[R, D]`` of each image with its id and its location in the files. Progress
    is in megabytes of ``.tsv``, or in files.
    """
    embedding_dim = 0
    reader = _read_tsv if ".tsv" in files[0].name else _read_arrays
    for item, location, features in reader(files, on_progress):
        embedding_dim = embedding_dim or (features.shape[-1] if features.ndim else 0)
        require(
            features.ndim == 2 and features.shape[1] == embedding_dim and len(features),
            f"{location}: expected numbers of shape [regions, {embedding_dim}], got "
            f"{features.dtype} of shape {list(features.shape)}. Correct the features of this image.",
        )
        yield item, location, features


def _read_tsv(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Read lines of bottom-up-attention: the id is first, and the number of boxes, boxes and
    features are last, in base64.
    """
    total = sum(file.stat().st_size for file in files)
    done = 0
    for path in files:
        with storage.reading_regular_file(path), open(path, "rb") as file:
            # Not the iteration over the file: a line of a damaged file may have any length.
            lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
            for number, line in enumerate(lines, 1):
                location = f"{path}, line {number}"
                columns = line.rstrip(b"\r\n").split(b"\t")
                require(
                    len(columns) > 5,
                    f"{location}: expected the tab-separated columns id, width, height, number of "
                    f"boxes, boxes and features, got {len(columns)} columns. Use a file of "
                    "bottom-up-attention.",
                )
                item = columns[0].decode(errors="replace")
                boxes = columns[-3]
                try:
                    numbers = base64.b64decode(columns[-1], validate=True)
                except binascii.Error:
                    raise DataError(
                        f"{location}: expected the features of image {item} as base64 in the last "
                        "column. The line may be truncated."
                    ) from None
                regions = int(boxes) if boxes.isdigit() else 0
                require(
                    regions and numbers and len(numbers) % (BYTES_PER_VALUE * regions) == 0,
                    f"{location}: {len(numbers):,} bytes of features do not match "
                    f"{boxes.decode(errors='replace')!r} boxes. The line may be truncated.",
                )
                yield item, location, np.frombuffer(numbers, "<f4").reshape(regions, -1)
                done += len(line)
                on_progress(done // MEGABYTE, total // MEGABYTE)


def _read_arrays(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    for number, path in enumerate(files, 1):
        if path.suffix == ".npy":
            yield path.stem, str(path), storage.read_array(path, kinds="fiu")
        else:
            # NumPy leaves a file that it has opened itself open after an error.
            with storage.open_file(path) as file:
                try:
                    with np.load(file, allow_pickle=False) as archive:
                        name = next((name for name in NPZ_KEYS if name in archive), None)
                        array: Any = None if name is None else archive[name]
                except Exception as error:  # noqa: BLE001 - zip files and their compression raise errors of every kind on damaged bytes
                    raise DataError(
                        f"{path} is not a readable .npz of numbers: {storage.error_reason(error)}. "
                        "Save the array again with numpy.savez."
                    ) from None
            require(
                array is not None,
                f"{path} has no features: expected an array named {' or '.join(NPZ_KEYS)}. Rename "
                "its array.",
            )
            yield path.stem, str(path), array
        on_progress(number, len(files))


REGIONS_EXPERT = "regions"
COCO_FILE_NAME = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})")


class RegionFeatures:
    """Features ``[R, D]`` of each image. They are found by its name, its name without folder and
    suffix, or its number.

    The number is that of an MS-COCO file name (``COCO_val2014_000000000042.jpg`` is 42), or a name
    that consists of digits.

    Args:
        path: The file or folder of the features.
        store: Their converted store.
    """

    def __init__(self, path: Path, store: ExpertStore):
        self.path = path
        self.store = store
        # Without leading zeros. The id itself has precedence over the number.
        numbers = {str(int(item)): row for row, item in enumerate(store.items) if item.isdecimal()}
        self._row = numbers | {item: row for row, item in enumerate(store.items)}
        self.has_variable_length = len(set(store.lengths(REGIONS_EXPERT).tolist())) > 1

    @classmethod
    def open(cls, path: str | Path, on_progress: ProgressCallback) -> RegionFeatures:
        """Open the features of a file or folder. They are converted at the first call and when a
        file has changed.
        """
        path = Path(path)
        files = find_region_files(path)
        folder = storage.cache_folder() / "regions" / f"{path.name}-{storage.stat_hash(files)}"
        # Several processes of a training open the features at once.
        with storage.folder_lock(folder, wait=True):
            if not os.path.exists(folder):
                _convert(files, folder, on_progress)
            try:
                return cls(path, ExpertStore.open(folder))
            except storage.DamagedCacheError as reason:
                damage = str(reason).removesuffix(RESTORE_STORE)
            # After the error is handled: it refers to mapped files, which Windows does not remove.
            storage.remove_damaged(
                folder, [file for file in folder.iterdir() if os.path.isfile(file)], damage
            )
            _convert(files, folder, on_progress)
            return cls(path, ExpertStore.open(folder))

    def __len__(self) -> int:
        return len(self.store)

    @property
    def sha256(self) -> str:
        """Checksum of all ids and features."""
        return self.store.sha256

    @property
    def embedding_dim(self) -> int:
        """Dimension of a region."""
        return self.store.embedding_dim

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images."""
        names = list(keys)
        rows = [
            next((self._row[key] for key in _keys(name) if key in self._row), -1) for name in names
        ]
        if missing := [name for name, row in zip(names, rows, strict=True) if row < 0]:
            tried = " or ".join(dict.fromkeys(_keys(missing[0])))
            raise DataError(
                f"{self.path} has no features of {len(missing):,} of {len(names):,} images, such "
                f"as {missing[0]} (searched for {tried}). "
                f"Its ids look like {self.store.items[0]}. Add the missing features."
            )
        return np.array(rows, dtype=np.int64)

    def read(self, rows: Sequence[int] | np.ndarray) -> Encoded:
        """Read rows: ``[n, R, D]``, with a mask if images have different numbers of regions."""
        stored: Any = self.store.read(rows)
        mask = stored.mask[REGIONS_EXPERT] if self.has_variable_length else None
        return Encoded(stored.vectors[REGIONS_EXPERT], mask)


def _keys(name: str) -> Iterable[str]:
    """Yield the ids under which the features of an image may be stored, the most specific first."""
    path = Path(name)
    yield from (name, path.name, path.stem)
    if (number := COCO_FILE_NAME.fullmatch(path.stem)) or path.stem.isdecimal():
        yield str(int(number[1] if number else path.stem))


def _convert(files: list[Path], folder: Path, on_progress: ProgressCallback) -> None:
    images = read_regions(files, on_progress)
    # The first image gives the dimension of the store.
    first = next(images, None)
    if first is None:
        raise DataError(
            f"{files[0]} is empty: expected region features, one image per line. Download it again."
        )
    with create_expert_store(folder, {REGIONS_EXPERT: first[2].shape[1]}) as store:
        for item, location, features in chain([first], images):
            store.append(item, {REGIONS_EXPERT: features}, location=f"{location}: image {item}")
