"""Build or update an index: encode new and changed files, keep the vectors of moved ones, and
delete missing ones.

A file is gone if its folder was read and does not contain it. Items of files that may still exist
are kept, with a warning: in a folder that cannot be read, in a folder that is empty as if its drive
were not mounted, and all of them if more than half of the files are missing.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import BarsOnly, Progress
from visavis.core.result import Result
from visavis.core.stopping import kept_if_stopped
from visavis.core.table import Table
from visavis.data.capture_time import TAKEN, file_times
from visavis.data.features.item_vectors import holds_item_vectors
from visavis.data.formats.image_files import path_and_parents
from visavis.data.parallel import Engine, map_in_order
from visavis.data.video import decoder_versions
from visavis.data.workers import validate_workers
from visavis.models.default_model import default_model
from visavis.models.retriever import Retriever
from visavis.retrieval.compression import CompressionReport, measure_compression
from visavis.retrieval.encoding import (
    EncodedShard,
    UnreadableFile,
    encode_in_shards,
    read_file_times,
    read_source_times,
    with_file_times,
)
from visavis.retrieval.given_vectors import VectorFile
from visavis.retrieval.index_compression import check_item_bytes, compress_index
from visavis.retrieval.index_folder import (
    CORRECTION_FILE,
    STORE_FOLDER,
    VECTOR_SUFFIXES,
    Index,
    IndexManifest,
    SkippedFile,
    is_free_folder,
    is_index,
    open_index_store,
    read_manifest,
    relative_store,
    write_manifest,
)
from visavis.retrieval.items import IndexItem, metadata_tags
from visavis.retrieval.open_index import check_model, open_index_model
from visavis.retrieval.query_model import record_text_queries
from visavis.retrieval.run_data import OpenRunData, RunData, no_run_data
from visavis.retrieval.search import Calibration, fit_calibration
from visavis.retrieval.source_files import (
    NO_PAIRS,
    FileCollection,
    SourceFile,
    list_readable_files,
    list_source_files,
    source_root,
)
from visavis.retrieval.stores.arrow_tables import (
    equal_lists,
    index_in,
    items_from_table,
    numbers,
    row_indices,
    text_array,
    text_lists,
    undated_files,
    without_read_times,
)
from visavis.retrieval.stores.base import VectorStore
from visavis.retrieval.stores.catalog import find_store_kind

if TYPE_CHECKING:
    import pyarrow as pa


MOMENT_SECONDS = 4.0
PROGRESS_EVERY = 1000
MAX_WARNINGS = 5
"""Number of folders and files that are named in warnings. The report contains all."""
MAX_LISTED_LINES = 5
"""Number of removed, excluded and skipped files that are printed."""
_MISSING = ""
"""Place of kept files whose folder was read and does not contain them."""
_KEPT_FILE = "The index keeps its earlier content."
_IF_DELETED = "Mount the drive if it is not mounted. If the files were deleted, run visavis indexes prune INDEX."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexReport(Result):
    """Result of building or updating an index.

    Attributes:
        folder: Folder of the index.
        num_items: Number of images, clips and moments in the index.
        num_encoded: Number of files that were encoded.
        num_unchanged: Number of files that did not change.
        num_moved: Number of files with known content, such as moved, copied or touched files, which
            kept their vectors.
        num_removed: Number of paths that were removed, without the old paths of moved files.
        num_kept: Number of files that cannot be read or are missing, and whose items are kept
            because they may still exist.
        removed: The removed paths.
        moved_from: The old paths of moved files.
        warnings: One sentence for each reason to keep items.
        skipped: One sentence for each file that is skipped.
        excluded: Excluded folders and files.
        seconds: Duration of the update in seconds.
        compression: Measured vector encodings, if requested.
        correction: Correction of text queries, whether it is on, and the result of its check. None:
            there is none.
        other_files: Number and suffixes of the files that are neither images nor videos. None:
            there are none.
        files: Number of the files of the source: ``indexed``, ``companions`` (a part of another
            item), ``skipped`` and ``other`` (neither images nor videos).
        companions: Photo that each companion belongs to.
        undated: Text of each file that is in place of a capture time and is not a time.
    """

    folder: str
    num_items: int
    num_encoded: int
    num_unchanged: int
    num_moved: int
    num_removed: int
    skipped: tuple[str, ...]
    seconds: float
    num_kept: int = 0
    removed: tuple[str, ...] = ()
    moved_from: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    compression: CompressionReport | None = None
    correction: str | None = None
    other_files: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    companions: Mapping[str, str] = field(default_factory=dict)
    undated: Mapping[str, str] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        """Return the changes and all that is left out in sentences, and measured compression."""
        compression = [] if self.compression is None else [self.compression.table()]
        last = [f"Correction: {self.correction}"] if self.correction is not None else []
        last.append(f"Index: {self.folder}")
        if not compression:
            return [Table(notes=(*self._sentences(), *last))]
        return [Table(notes=self._sentences()), *compression, Table(notes=tuple(last))]

    def _sentences(self) -> tuple[str, ...]:
        """Changes of the index, files that are left out, and files of the source."""
        num_moved = min(self.num_moved, len(self.moved_from))
        changes = _listed(
            {
                "encoded": self.num_encoded,
                "unchanged": self.num_unchanged,
                "moved": num_moved,
                "with known content": self.num_moved - num_moved,
                "removed": self.num_removed,
                "kept without their file": self.num_kept,
            }
        )
        files = f"Files: {changes or 'no changes'}. {self.seconds:.0f} s."
        sentences = [f"{self.num_items:,} items in the index. {files}"]
        lists = {"Removed": self.removed, "Excluded": self.excluded, "Left out": self.skipped}
        for title, lines in lists.items():
            sentences += [f"{title}, {len(lines):,}:"] if lines else []
            sentences += [f"  {text}" for text in lines[:MAX_LISTED_LINES]]
            if len(lines) > MAX_LISTED_LINES:
                more = len(lines) - MAX_LISTED_LINES
                sentences.append(f"  ... and {more:,} more: --json lists all.")
        parts = {
            "indexed": "indexed",
            "companions": "part of another photo",
            "skipped": "left out",
            "other": "neither images nor videos",
        }
        counted = _listed({text: self.files.get(name, 0) for name, text in parts.items()})
        sentences.append(f"{sum(self.files.values()):,} files in the source: {counted}.")
        if self.other_files is not None:
            sentences.append(f"{self.other_files}.")
        if self.undated:
            path, text = next(iter(self.undated.items()))
            sentences.append(
                f"{len(self.undated):,} files with an unreadable capture time, such as {text!r} of "
                f"{path}. Their modification time counts."
            )
        return tuple(sentences)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object, without ``compression`` if it was not measured, and without
            ``correction`` and ``other_files`` if there are none.
        """
        return {name: value for name, value in asdict(self).items() if value is not None}


def _listed(counts: Mapping[str, int]) -> str:
    """Counts that are not zero, with what they count."""
    return ", ".join(f"{count:,} {text}" for text, count in counts.items() if count)


def build_index(
    model: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    store: str | None = None,
    moment_seconds: float | None = None,
    embedding_dim: int | None = None,
    full_decoding: bool = False,
    exclude: Sequence[str] = (),
    remove_missing: bool = False,
    moved: bool = False,
    compression: bool = False,
    item_bytes: int | None = None,
    open_data: OpenRunData = no_run_data,
    engine: Engine = "local",
    workers: int | None = None,
    device: str | None = None,
    memory: MemoryLimit = None,
    progress: Progress,
) -> IndexReport:
    """Build an index of a folder or data set, or update an existing index.

    A killed process loses the shards in progress: one, or more on a Ray cluster. The next call
    continues.

    Args:
        model: Run folder of a model with one vector per item or of a MaxSim model, or the folder or
            hub name of a dual encoder.
        source: Folder or data set.
        out: Folder of the index.
        store: URI or path of a LanceDB or Milvus store. Default: LanceDB in ``out``.
        moment_seconds: Length of a moment of a clip in seconds. Default: 4, or that of the existing
            index.
        embedding_dim: Matryoshka dimension of the vectors. Default: all dimensions, or those of the
            existing index.
        full_decoding: Whether to decode JPEG files in full. An existing index keeps its setting.
        exclude: Patterns of names and paths that are not indexed. Default: the recorded patterns of
            an existing index.
        remove_missing: Whether to remove items of missing files also if more than half are missing,
            or their folder is empty.
        moved: Whether ``source`` is the new place of the source of an existing index.
        compression: Whether to measure other encodings of the vectors.
        item_bytes: Maximum bytes per item, for a late-interaction model. An existing index keeps
            its value. None: vectors in float32.
        open_data: Opens the data of the model, which calibrate scores. Default: no data.
        engine: ``"local"`` or ``"ray"``.
        workers: Number of Ray processes, or of processes that read images. Default: 2 Ray
            processes, else as ``choose_readers``.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
        memory: Memory limit of searches.
        progress: Receives progress and messages.

    Returns:
        Counts of the update.

    Raises:
        RefusedOverwrite: If ``out`` contains something else.
        RunError: If the index was made with another model, source or setting.
        VisavisError: If the length of a moment or the number of workers is invalid.
        DataError: If there are no files to index.
    """
    folder = Path(out)
    started = time.perf_counter()
    validate_workers(workers)
    _check_request(folder, moment_seconds)
    previous = read_manifest(folder) if is_index(folder) else None
    with progress.activity("loading the model"):
        retriever = _open_model(model, device, memory)
        if full_decoding or (previous is not None and previous.full_decoding):
            retriever = retriever.with_full_decoding()
        if embedding_dim is not None:
            retriever = retriever.with_embedding_dim(embedding_dim)
        check_item_bytes(item_bytes, retriever.matcher.late_interaction, previous)
    exclude = tuple(filter(None, exclude)) if exclude or previous is None else previous.exclude
    is_known = previous is not None and previous.source == str(source_root(source))
    with progress.activity("listing files"):
        collection = (list_readable_files if is_known else list_source_files)(
            source, exclude, previous.live_pairs if previous is not None else NO_PAIRS
        )
        collection = _with_vectors(collection, retriever)
    # Without waiting: a second update of the same files would only repeat the first.
    with storage.folder_lock(folder / "index", wait=False, subject=folder):
        # The manifest is read again under the lock. Another update may have ended since.
        manifest = _open_or_create_manifest(
            folder, model, retriever, collection, store, moment_seconds, embedding_dim, moved
        )
        encoder = retriever.truncated_to(manifest.embedding_dim)
        record_text_queries(str(model), manifest.fingerprint, encoder)
        queries = _open_queries(folder, manifest, encoder, device, memory)
        with closing(
            open_index_store(folder, manifest, memory, confirmed=store, create=True)
        ) as vectors:
            if manifest.digest and manifest.digest.num_items and not vectors.count():
                progress.message(
                    f"{folder}: the items of the store are lost. All files are encoded again."
                )
            skipped = _known_problems(manifest, collection.listed)

            def pair(unreadable: Container[str]) -> FileCollection:
                return _with_vectors(collection.pair(unreadable), retriever)

            changes = _compare_files(vectors, pair(skipped), skipped, remove_missing, progress)
            if moved and _MISSING in changes.kept.values():
                raise RunError(
                    f"{collection.root}: expected the files of {manifest.source}, got "
                    f"{len(changes.kept):,} missing ones. "
                    "Pass the folder to which they were moved, or --remove-missing if they were "
                    "deleted."
                )
            is_dataset = collection.is_dataset or (manifest.is_dataset and not collection.files)
            manifest = replace(
                manifest, source=str(collection.root), is_dataset=is_dataset, exclude=exclude
            )
            if changes.new_files or changes.reused or changes.missing_paths:
                # Without a digest, the index is marked as unfinished.
                write_manifest(folder, replace(manifest, digest=None))

            def encode(files: Sequence[SourceFile]) -> Iterator[_Shard]:
                seconds = manifest.moment_seconds
                return encode_in_shards(
                    engine, workers, str(model), encoder, files, seconds, progress
                )

            update = _apply_changes(vectors, changes, encode, pair, progress)
            digest = vectors.digest()
            with kept_if_stopped(lambda: "All files are in the index."):
                # Fitted once: it depends on the model and its validation data, not on the items.
                calibration = manifest.calibration or calibrate_index(
                    open_data(Path(model)), manifest.embedding_dim, progress
                )
            manifest = replace(
                manifest,
                skipped=changes.skipped | update.damaged,
                decoders=decoder_versions(),
                live_pairs=collection.live_pairs,
                digest=digest,
                calibration=calibration,
            )
            write_manifest(folder, manifest)
            report = IndexReport(
                folder=str(folder),
                num_items=digest.num_items,
                seconds=time.perf_counter() - started,
                compression=measure_compression(Index(folder, manifest, queries, vectors), memory)
                if compression
                else None,
                undated=undated_files(vectors.table()),
                **update.summarize(),
            )
        compress_index(folder, item_bytes, memory, progress)
        if os.path.exists(folder / CORRECTION_FILE):
            correction = _refresh_correction(folder, queries, store, memory, progress)
            report = replace(report, correction=correction)
    _log_warnings(source, report.warnings)
    return report


def _open_queries(
    folder: Path,
    manifest: IndexManifest,
    encoder: Retriever,
    device: str | None,
    memory: MemoryLimit,
) -> Retriever:
    """The model of text queries, which may be the model of the items."""
    if manifest.query_model.fingerprint == manifest.fingerprint:
        return encoder
    return open_index_model(folder, manifest, device, memory)


def _check_request(folder: Path, moment_seconds: float | None) -> None:
    """Check the length of a moment, and that the folder is new or an index."""
    if moment_seconds is not None and not 0 < moment_seconds < math.inf:
        raise VisavisError(
            f"moment_seconds: expected a number > 0, got {moment_seconds:g}. Pass a length such as "
            f"{MOMENT_SECONDS:g}."
        )
    if not is_index(folder) and not is_free_folder(folder):
        raise RefusedOverwrite(
            f"{folder}: expected a new folder or an index, got other files. Pass another folder "
            "with --out."
        )


def _with_vectors(collection: FileCollection, model: Retriever) -> FileCollection:
    """The files that can be indexed: of vectors of a file, those with a vector."""
    return model.keep_files(collection) if isinstance(model, VectorFile) else collection


def _open_model(model: str | Path, device: str | None, memory: MemoryLimit) -> Retriever:
    """The model of the items, or the file of their vectors."""
    # Search recognizes a file of vectors by its suffix, also after the file was removed.
    if str(model).endswith(VECTOR_SUFFIXES) and os.path.isfile(model) and holds_item_vectors(model):
        return VectorFile(model)
    return Retriever.load(model, device=device, memory=memory)


def _refresh_correction(
    folder: Path, model: Retriever, store: str | None, memory: MemoryLimit, progress: Progress
) -> str | None:
    """Compute the correction of the complete index for its new items."""
    # Only here, because most indexes have none.
    from visavis.retrieval.correction_builder import refresh_correction

    manifest = read_manifest(folder)
    with (
        closing(open_index_store(folder, manifest, memory, confirmed=store)) as vectors,
        kept_if_stopped(lambda: "All files are in the index."),
    ):
        return refresh_correction(Index(folder, manifest, model, vectors), memory, progress)


def _log_warnings(source: str | Path, warnings: Sequence[str]) -> None:
    for warning in warnings[:MAX_WARNINGS]:
        log.warning("%s: %s", source, warning)
    if len(warnings) > MAX_WARNINGS:
        log.warning("%s: ... and %d more warnings", source, len(warnings) - MAX_WARNINGS)


def _warnings(changes: _IndexChanges, source: FileCollection) -> Iterator[str]:
    """A sentence for each place whose items are kept."""
    for place, count in Counter(changes.kept.values()).items():
        if place == _MISSING:
            yield f"{count:,} of {changes.num_stored:,} files are missing. The index keeps them. {_IF_DELETED}"
        elif place in source.unreadable:
            yield f"{source.problem_of(place)} The index keeps {count:,} of its files."
        else:
            name = source.root if place == "." else repr(place)
            yield f"{name}: the folder is empty. The index keeps {count:,} of its files. {_IF_DELETED}"


def recorded_model(model: str | Path) -> str:
    """Return the location of a model as in a manifest.

    Args:
        model: Folder or hub name.

    Returns:
        An absolute path, or the hub name.
    """
    return str(Path(model).absolute()) if os.path.exists(model) else str(model)


def _open_or_create_manifest(
    folder: Path,
    model: str | Path,
    retriever: Retriever,
    source: FileCollection,
    store: str | None,
    moment_seconds: float | None,
    embedding_dim: int | None,
    moved: bool,
) -> IndexManifest:
    """The manifest of an index of this model and source. A new one is written before any vector."""
    model_name = recorded_model(model)
    store = relative_store(folder, store) if store else None
    if not is_index(folder):
        late_interaction = retriever.matcher.late_interaction
        find_store_kind(store or STORE_FOLDER, late_interaction)
        manifest = IndexManifest(
            model=model_name,
            fingerprint=retriever.fingerprint,
            embedding_dim=vector_length(retriever),
            source=str(source.root),
            store=store or STORE_FOLDER,
            moment_seconds=moment_seconds or MOMENT_SECONDS,
            # Rows of another index have other checksums, also with the same files and model.
            index_id=secrets.token_hex(16),
            is_dataset=source.is_dataset,
            late_interaction=late_interaction,
            full_decoding=retriever.processor.visual_spec.full_decoding,
        )
        write_manifest(folder, manifest)
        return manifest
    manifest = read_manifest(folder)
    if "://" not in manifest.store:
        # An earlier version wrote absolute paths.
        manifest = replace(manifest, store=relative_store(folder, folder / manifest.store))
    settings = {
        "source": None if moved else str(source.root),
        "store": store,
        "moment_seconds": moment_seconds,
        "embedding_dim": embedding_dim,
        "full_decoding": retriever.processor.visual_spec.full_decoding,
    }
    for name, value in settings.items():
        expected = getattr(manifest, name)
        if value not in (None, expected):
            fix = (
                f" If the folder was moved, run visavis indexes move {folder} {source.root}."
                if name == "source"
                else ""
            )
            raise RunError(
                f"{folder}: {name}: expected {expected}, the value of this index, got {value}. "
                f"Make another index with --out.{fix}"
            )
    check_model(folder, manifest.fingerprint, str(model), retriever)
    return replace(manifest, model=model_name)


def vector_length(model: Retriever) -> int:
    """Return the number of dimensions of the vectors of a model.

    Args:
        model: The model.

    Returns:
        The number.
    """
    if isinstance(model, VectorFile):
        return model.vectors.embedding_dim
    [vector] = model.item_vectors(model.encode_text([model.processor.known_text]))
    return vector.shape[-1]


@dataclass(frozen=True)
class _IndexChanges:
    """Differences between the files and the stored items.

    ``reused``: items of new or touched files whose content is in the index, with the keys of the
    vectors of that path. ``kept``: the place because of which items of an absent file are kept, by
    the path of the file. ``moved_paths``: absent paths whose content is at another path.
    ``old_keys``: keys of the stored items of each path that is changed or absent. ``num_stored``:
    number of stored paths.
    """

    new_files: tuple[SourceFile, ...]
    reused: tuple[tuple[IndexItem, str], ...]
    missing_paths: tuple[str, ...]
    moved_paths: set[str]
    kept: dict[str, str]
    num_unchanged: int
    skipped: dict[str, SkippedFile]
    old_keys: dict[str, list[str]]
    num_stored: int


_Shard = tuple[Sequence[SourceFile], EncodedShard]


def _known_problems(manifest: IndexManifest, files: Sequence[SourceFile]) -> dict[str, SkippedFile]:
    """The files that these decoders could not decode before, and that have not changed since."""
    if manifest.decoders != decoder_versions():
        return {}
    problems = ((file, manifest.skipped.get(file.path)) for file in files)
    return {
        file.path: (file.size, file.modified_ns, problem[2])
        for file, problem in problems
        if problem is not None and tuple(problem[:2]) == (file.size, file.modified_ns)
    }


def _in_place_of(source: FileCollection, unindexed: Container[str]) -> dict[str, str]:
    """A sentence for each photo that cannot be read and whose companions are items in its place."""
    items = defaultdict[str, list[str]](list)
    for path, photos in sorted(source.photos_of.items()):
        if path not in source.companions and path not in unindexed:
            for photo in photos:
                if photo in unindexed:
                    items[photo].append(path)
    return {photo: f" Indexed in its place: {', '.join(paths)}." for photo, paths in items.items()}


def _compare_files(
    store: VectorStore,
    source: FileCollection,
    known_problems: Mapping[str, SkippedFile],
    remove_missing: bool,
    progress: Progress,
) -> _IndexChanges:
    import pyarrow.compute as pc

    # Columns instead of an object per item: of a million items, usually few have changed.
    table = store.table()
    files = source.files
    is_unchanged, file_of = _unchanged_files(table, files)
    is_unchanged[_newly_dated_files(table, files, file_of, is_unchanged)] = False
    changed = [files[number] for number in np.flatnonzero(~is_unchanged)]
    skipped = {
        file.path: known_problems[file.path] for file in changed if file.path in known_problems
    }
    candidates = [file for file in changed if file.path not in skipped]
    # Stored items of files that are changed, skipped or absent.
    is_old = file_of < 0
    is_old[~is_old] = ~is_unchanged[file_of[~is_old]]
    old = table.select(["key", "path", "content"])
    old = old.take(row_indices(np.flatnonzero(is_old))).to_pydict()
    old_keys = defaultdict[str, list[str]](list)
    old_contents = defaultdict[str, set[str]](set)
    for key, path, content in zip(*old.values(), strict=True):
        old_keys[path].append(key)
        old_contents[path].add(content)
    new_files = list[SourceFile]()
    reused = list[tuple[IndexItem, str]]()
    moved_contents = set[str]()
    for file, items in _find_contents(table, candidates, progress):
        if not items:
            new_files.append(file)
            continue
        # Equal content has an equal time, unless a table contained another one.
        times: Mapping[str, str] = file_times(items[0].metadata)
        if TAKEN not in times:
            times = read_file_times(file)
        for item in items:
            moved = replace(
                item,
                # The end of the key is the time of a moment.
                key=file.path + item.key[len(item.path) :],
                path=file.path,
                modified_ns=file.modified_ns,
                metadata=with_file_times(file.metadata, times),
            )
            reused.append((moved, item.key))
        # The content was not at this path before, so that it came from another one.
        if items[0].content not in old_contents.get(file.path, ()):
            moved_contents.add(items[0].content)
    not_absent = {file.path for file in candidates}
    absent = [path for path in old_keys if path not in not_absent]
    moved_paths = {path for path in absent if old_contents[path] <= moved_contents}
    num_stored = pc.count_distinct(table["path"]).as_py()
    kept = _kept_paths(set(absent) - set(skipped), moved_paths, num_stored, source, remove_missing)
    missing_paths = tuple(path for path in absent if path not in kept)
    return _IndexChanges(
        tuple(new_files),
        tuple(reused),
        missing_paths,
        moved_paths.intersection(missing_paths),
        kept,
        int(is_unchanged.sum()),
        skipped,
        old_keys,
        num_stored,
    )


def _unchanged_files(table: pa.Table, files: Sequence[SourceFile]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each file has items, all with its size, time and metadata, bool ``[F]``, and the file
    of each item, -1 if it is absent, int64 ``[N]``.
    """
    paths = text_array([file.path for file in files])
    file_of = index_in(table["path"], paths)
    # An absent file has index -1, the last entry, which equals no item.
    sizes = np.array([*(file.size for file in files), -1], np.int64)
    times = np.array([*(file.modified_ns for file in files), -1], np.int64)
    is_equal = (numbers(table["size"]) == sizes[file_of]) & (
        numbers(table["modified_ns"]) == times[file_of]
    )
    tags = text_lists([metadata_tags(file.metadata) if file.metadata else () for file in files])
    rows = np.flatnonzero(is_equal)
    is_dated = np.array([*(TAKEN in file.metadata for file in files), False])
    is_equal[rows] = equal_lists(
        without_read_times(
            table["metadata"].combine_chunks().take(row_indices(rows)), is_dated[file_of[rows]]
        ),
        tags.take(row_indices(file_of[rows])),
    )
    is_unchanged = np.bincount(file_of[file_of >= 0], minlength=len(files)) > 0
    # One changed item of a clip makes the whole file changed.
    is_unchanged[file_of[(file_of >= 0) & ~is_equal]] = False
    return is_unchanged, file_of


def _newly_dated_files(
    table: pa.Table, files: Sequence[SourceFile], file_of: np.ndarray, is_unchanged: np.ndarray
) -> list[int]:
    """Unchanged files whose stored items have no capture time, and of which another file has it now, such as
    a JSON file of Google Takeout that was added.
    """
    import pyarrow.compute as pc

    has_sources = np.array(
        [bool(file.time_sources) and TAKEN not in file.metadata for file in files], bool
    )
    has_sources &= is_unchanged
    if not has_sources.any():
        return []
    tags = table["metadata"].combine_chunks()
    is_time = pc.starts_with(pc.list_flatten(tags), f"{TAKEN}=")
    dated_rows = pc.list_parent_indices(tags).filter(is_time).to_numpy()
    has_sources[file_of[dated_rows[file_of[dated_rows] >= 0]]] = False
    undated = np.flatnonzero(has_sources).tolist()
    times = map_in_order(read_source_times, [files[number] for number in undated])
    return [number for number, found in zip(undated, times, strict=True) if found]


def _find_contents(
    table: pa.Table, files: Sequence[SourceFile], progress: Progress
) -> Iterator[tuple[SourceFile, list[IndexItem]]]:
    """Files with the stored items of the first path that has the same content and kind."""
    # The content is hashed only if a stored file has the same size.
    sizes = np.array([file.size for file in files], np.int64)
    rows = np.flatnonzero(np.isin(numbers(table["size"]), sizes))
    similar = table.take(row_indices(rows))
    columns = (similar[name].to_pylist() for name in ("size", "kind", "content", "path"))
    # Path and rows of the first path with a content, by size, kind and content.
    stored = defaultdict[tuple[int, bool], dict[str, tuple[str, list[int]]]](dict)
    for row, (size, kind, content, path) in enumerate(zip(*columns, strict=True)):
        first_path, found = stored[size, kind != "image"].setdefault(content, (path, []))
        if path == first_path:
            found.append(row)
    for number, file in enumerate(files, 1):
        found = []
        if contents := stored.get((file.size, file.is_video)):
            with suppress(DataError):  # encoding reports an unreadable file
                _, found = contents.get(file.location.content_hash, ("", []))
        yield file, items_from_table(similar.take(row_indices(np.array(found)))) if found else []
        if number % PROGRESS_EVERY == 0:
            progress.update("files", number, len(files), 0.0)


def _kept_paths(
    absent: set[str], moved: set[str], num_stored: int, source: FileCollection, remove_missing: bool
) -> dict[str, str]:
    """Absent files that may still exist, each with the place because of which this is unknown."""
    # Excluded files and companions were left out, so that their absence is known.
    absent = {
        path
        for path in absent
        if path not in source.companions and not source.exclusion.covers(path)
    }
    kept = dict[str, str]()
    for path in sorted(absent):
        # The file or a folder above it. Without one, the folder of the file was read, so that the
        # file is gone.
        unreadable = [place for place in path_and_parents(path) if place in source.unreadable]
        if unreadable:
            kept[path] = unreadable[0]
    # A moved file is not missing: its content is elsewhere.
    missing = [] if remove_missing else sorted(absent - kept.keys() - moved)
    are_most_missing = 2 * len(missing) > num_stored
    for path in missing:
        empty = [place for place in path_and_parents(path) if place in source.empty]
        if empty or are_most_missing:
            kept[path] = empty[0] if empty else _MISSING
    return kept


@dataclass(frozen=True)
class _Update:
    """Result of applying changes.

    ``files``: all files that were decoded. ``unreadable``: those that cannot be read.
    ``collection``: the files and companions. ``missing_paths``: paths whose items were deleted.
    """

    changes: _IndexChanges
    files: list[SourceFile]
    unreadable: dict[str, UnreadableFile]
    collection: FileCollection
    missing_paths: list[str]

    @cached_property
    def damaged(self) -> dict[str, SkippedFile]:
        """The files that are not decoded again until they change."""
        return {
            file.path: (file.size, file.modified_ns, self.unreadable[file.path].problem)
            for file in self.files
            if file.path in self.unreadable and self.unreadable[file.path].is_damaged
        }

    def summarize(self) -> dict[str, Any]:
        """Counts and sentences of the report."""
        changes = self.changes
        source = self.collection
        old_keys = changes.old_keys
        kept_files = [
            path for path in self.unreadable if path not in self.damaged and path in old_keys
        ]
        problems = {path: problem for path, (_, _, problem) in changes.skipped.items()}
        problems |= {
            path: each.problem for path, each in self.unreadable.items() if path not in kept_files
        }
        in_place = _in_place_of(source, problems.keys())
        kept_places = {
            source.problem_of(place)
            for place in changes.kept.values()
            if place in source.unreadable
        }
        removed = (
            *(path for path in self.missing_paths if path not in changes.moved_paths),
            *(path for path in self.damaged if path in old_keys),
        )
        return {
            "num_encoded": len(self.files) - len(self.unreadable),
            "num_unchanged": changes.num_unchanged,
            "num_moved": len({item.path for item, _ in changes.reused}),
            "num_removed": len(removed),
            "num_kept": len(changes.kept) + len(kept_files),
            "removed": removed,
            "moved_from": tuple(sorted(changes.moved_paths)),
            "warnings": (
                *_warnings(changes, source),
                *(f"{self.unreadable[path].problem} {_KEPT_FILE}" for path in kept_files),
            ),
            "skipped": (
                *(problem for problem in source.skipped if problem not in kept_places),
                *(f"{problem}{in_place.get(path, '')}" for path, problem in problems.items()),
            ),
            "excluded": source.excluded,
            "other_files": source.other_files,
            "files": {
                "indexed": len(source.files) - len(problems),
                "companions": len(source.companions),
                "skipped": source.num_skipped + len(problems),
                "other": source.num_other,
            },
            "companions": source.companions,
        }


def _apply_changes(
    store: VectorStore,
    changes: _IndexChanges,
    encode: Callable[[Sequence[SourceFile]], Iterator[_Shard]],
    pair: Callable[[Container[str]], FileCollection],
    progress: Progress,
) -> _Update:
    """Update the store. The companions of photos that cannot be decoded become items.

    New items are written before old ones are deleted, so that a killed process loses none.
    """
    if changes.reused:
        items = [item for item, _ in changes.reused]
        # Read all vectors before the first write: two files may have swapped their paths.
        store.add(items, store.vectors([key for _, key in changes.reused]))
        _delete_old_items(store, changes, {item.path for item in items}, items)
    unreadable = dict[str, UnreadableFile]()
    num_done = 0
    started = time.perf_counter()
    collection = pair(changes.skipped)
    tried = list[SourceFile]()
    new_files: Sequence[SourceFile] = changes.new_files
    with kept_if_stopped(lambda: f"The index keeps {num_done:,} of {len(tried):,} new files."):
        while new_files:
            tried += new_files
            for files, shard in encode(new_files):
                if shard.items:
                    store.add(shard.items, shard.vectors)
                # A file that cannot be read now, but may be intact, keeps its items.
                kept = {
                    path for path, problem in shard.unreadable.items() if not problem.is_damaged
                }
                paths = [file.path for file in files if file.path not in kept]
                _delete_old_items(store, changes, paths, shard.items)
                unreadable |= shard.unreadable
                num_done += len(files)
                per_second = num_done / (time.perf_counter() - started)
                progress.update("files", num_done, len(tried), per_second)
            without_items = {
                path
                for path, problem in unreadable.items()
                if problem.is_damaged or path not in changes.old_keys
            }
            before = {file.path for file in collection.files}
            collection = pair({*changes.skipped, *without_items})
            new_files = [file for file in collection.files if file.path not in before]
    # Last: the vectors of a moved file are read from its old path above.
    decoded = {file.path for file in tried}
    missing_paths = [path for path in changes.missing_paths if path not in decoded]
    _delete_old_items(store, changes, missing_paths, ())
    return _Update(changes, tried, unreadable, collection, missing_paths)


def _delete_old_items(
    store: VectorStore, changes: _IndexChanges, paths: Iterable[str], new_items: Sequence[IndexItem]
) -> None:
    """Delete the stored items of some paths, except those that new items have overwritten."""
    # A clip that became shorter has fewer moments. Its other keys were overwritten.
    overwritten = {item.key for item in new_items}
    old_keys = (key for path in paths for key in changes.old_keys.get(path, []))
    if keys := [key for key in old_keys if key not in overwritten]:
        store.delete(keys)


def calibrate_index(
    data: RunData | None, embedding_dim: int, progress: Progress
) -> Calibration | None:
    """Fit match probabilities on the validation split of a run.

    Args:
        data: Data of the run. None: the model is not a run.
        embedding_dim: Dimension of the vectors of the index.
        progress: Receives progress, and a message if a run has no validation data.

    Returns:
        The calibration. None if it is not available.
    """
    if data is None:
        return None
    try:
        split = data.validation_split
        with progress.activity("calibrating match probabilities"):
            return fit_calibration(*data.scores(split, embedding_dim, BarsOnly(progress)))
    except VisavisError as error:
        progress.message(f"Match probabilities by captions are not available: {error}")
        return None


INDEXES_FOLDER = Path("indexes")


def default_index_folder(source: str | Path, model: str | Path | None = None) -> Path:
    """Return the folder of the index of a source: the first of ``indexes/NAME``,
    ``indexes/NAME-2``, ... that is its index or new.

    Args:
        source: Folder of images and videos, or a data set.
        model: Model of the index. None: any model.

    Returns:
        The folder. It may not exist yet.
    """
    root = source_root(source)
    name = Path(os.path.realpath(os.path.expanduser(source))).name or "root"
    recorded = None if model is None else recorded_model(model)
    # Two sources of the same name in different folders have numbered indexes.
    for number in itertools.count(1):
        folder = INDEXES_FOLDER / (name if number == 1 else f"{name}-{number}")
        if not is_index(folder):
            if is_free_folder(folder):
                break
            continue
        manifest = read_manifest(folder)
        if manifest.source == str(root) and recorded in (None, manifest.model):
            break
    return folder


def index_source(
    source: str | Path,
    out: str | Path | None,
    model: str | Path | None,
    progress: Progress,
    **options: Any,
) -> IndexReport:
    """Index a source without a run, or update its index. An existing index keeps its model.

    Args:
        source: Folder of images and videos, or a data set.
        out: Folder of the index. None: ``default_index_folder``.
        model: Run, or folder or hub name of a dual encoder. None: the model of the index, else the
            default model.
        progress: Receives progress and messages.
        **options: Further arguments of ``build_index``.

    Returns:
        Counts of the update.

    Raises:
        DataError: If the source has no files to index, or no model is available.
        RunError: If ``out`` is an index of another model, source or setting.
    """
    folder = default_index_folder(source, model) if out is None else Path(out)
    if model is None and is_index(folder):
        return update_index(folder, progress, source=source, **options)
    if not is_index(folder):
        # A wrong folder is reported before a model is downloaded.
        list_source_files(source, options.get("exclude", ()))
    with default_model(model, progress) as name:
        progress.message(f"Indexing {source} with {name} into {folder}.")
        return build_index(name, source, folder, progress=progress, **options)


def update_index(
    folder: Path, progress: Progress, *, source: str | Path | None = None, **options: Any
) -> IndexReport:
    """Update an index with its model.

    Args:
        folder: Folder of the index.
        progress: Receives progress and messages.
        source: Folder of images and videos, or a data set. None: the source of the index.
        **options: Further arguments of ``build_index``.

    Returns:
        Counts of the update.

    Raises:
        RunError: If there is no index, or it is of another source or setting.
    """
    manifest = read_manifest(folder)
    return build_index(
        manifest.model, source or manifest.source, folder, progress=progress, **options
    )


def move_model(folder: Path, model: str | Path, progress: Progress) -> None:
    """Record the new location of the model of the items of an index.

    Args:
        folder: Folder of the index.
        model: Run folder, or folder or hub name of a pretrained model.
        progress: Receives progress.

    Raises:
        RunError: If there is no index, or the model is another one.
    """
    with storage.folder_lock(folder / "index", wait=False, subject=folder):
        manifest = read_manifest(folder)
        with progress.activity("loading the model"):
            check_model(folder, manifest.fingerprint, str(model), _open_model(model, None, None))
        write_manifest(folder, replace(manifest, model=recorded_model(model)))


def update_default_index(
    source: str | Path, model: str | Path | None, progress: Progress, **options: Any
) -> Path:
    """Index a source at its default place before a search, or update its index. Files that are left
    out are reported.

    Args:
        source: Folder of images and videos, or a data set.
        model: Folder or hub name of a dual encoder. None: the model of the index, else the default
            model.
        progress: Receives progress and messages.
        **options: Further arguments of ``build_index``.

    Returns:
        Folder of the index.

    Raises:
        DataError: If the source has no files to index and no index, or no model is available.
    """
    report = index_source(source, None, model, progress, **options)
    if report.skipped:
        progress.message(
            f"Left out, {len(report.skipped):,}: {report.skipped[0]} List all with visavis index "
            f"{source}."
        )
    if report.other_files is not None:
        progress.message(f"{report.other_files}.")
    return Path(report.folder)


def index_if_images(
    folder: str | Path, model: str | Path | None, progress: Progress, **options: Any
) -> Path:
    """Index a folder of images without a run. An index, a run, a model and a folder without images
    are returned as they are.

    Args:
        folder: Any folder, or the missing source of an index at its default place.
        model: Folder or hub name of a dual encoder. None: the default model.
        progress: Receives progress and messages.
        **options: Further arguments of ``build_index``.

    Returns:
        Folder of the index, or the folder itself.
    """
    if is_index(folder) or any(
        os.path.exists(Path(folder) / name) for name in ("run.toml", "config.json")
    ):
        return Path(folder)
    if not is_index(default_index_folder(folder, model)):
        if not os.path.isdir(folder):
            return Path(folder)
        try:
            list_source_files(folder)
        except DataError:
            return Path(folder)
    return update_default_index(folder, model, progress, **options)
