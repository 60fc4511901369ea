"""Build or update an index: encode new and changed files, keep the vectors of moved ones, and
delete missing ones.

A file is gone if its folder was read and does not contain it. Items of files that may still exist
are kept, with a warning: in a folder that cannot be read, in a folder that is empty as if its drive
were not mounted, and all of them if more than half of the files are missing.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from visavis.core.errors import RefusedOverwrite, RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import OTHER_STAGE, BarsOnly, NoProgress, Progress, StageClock
from visavis.core.result import Result
from visavis.core.stopping import kept_if_stopped
from visavis.core.table import Table
from visavis.data.features.item_vectors import holds_item_vectors
from visavis.data.parallel import Engine
from visavis.data.video import decoder_versions
from visavis.data.workers import validate_workers
from visavis.models.retriever import Retriever
from visavis.models.text_tower import missing_reason
from visavis.models.text_tower_export import add_text_tower
from visavis.retrieval.build.compression import CompressionReport, measure_compression
from visavis.retrieval.build.encoding import (
    EncodedShard,
    UnreadableFile,
    encode_in_shards,
)
from visavis.retrieval.build.file_changes import (
    MISSING,
    IndexChanges,
    compare_files,
    known_problems,
)
from visavis.retrieval.build.given_vectors import VectorFile
from visavis.retrieval.build.index_compression import check_item_bytes, compress_index
from visavis.retrieval.build.no_match import renew_scale
from visavis.retrieval.calibrate.calibration import Calibration, fit_calibration
from visavis.retrieval.index_folder import (
    CORRECTION_FILE,
    OWN_STORE,
    VECTOR_SUFFIXES,
    Index,
    IndexManifest,
    SkippedFile,
    index_lock,
    is_free_folder,
    is_index,
    open_index_store,
    read_manifest,
    relative_store,
    write_manifest,
)
from visavis.retrieval.items import IndexItem
from visavis.retrieval.open_index import check_model, open_query_encoder
from visavis.retrieval.query_encoder import QueryEncoder
from visavis.retrieval.run_data import OpenRunData, RunData, no_run_data
from visavis.retrieval.source_files import (
    NO_PAIRS,
    FileCollection,
    SourceFile,
    list_readable_files,
    list_source_files,
    source_root,
)
from visavis.retrieval.stores.base import VectorStore
from visavis.retrieval.stores.catalog import find_store_kind

MOMENT_SECONDS = 4.0
STAGES = {
    "model": "loading the model",
    "listing": "listing files",
    "comparing": "comparing files",
    "reading": "reading photos",
    "encoding": "encoding",
    "writing": "writing",
    "text_model": "writing the text tower",
    "calibration": "calibrating",
    "compression": "compressing",
    "correction": "correcting",
    OTHER_STAGE: "other",
}
"""Stages of an update, as ``IndexReport.times`` has them and as they are printed."""
FILE_STAGES = ("reading", "encoding", "writing")
"""Stages whose time grows with the number of encoded files."""
MIN_SHOWN_SHARE = 0.05
"""Share of the duration below which a stage is not printed by itself."""
MAX_WARNINGS = 5
"""Number of folders and files that are named in warnings. The report contains all."""
MAX_LISTED_LINES = 5
"""Number of removed, excluded and skipped files that are printed."""
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
        times: Seconds of each stage, which add up to ``seconds``. Photos are decoded ahead while
            others are encoded: ``reading`` is the time in which the model waits for them. Clips are
            decoded while they are encoded.
        files_per_second: Encoded files per second of reading, encoding and writing. None: no file
            was encoded.
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
    times: Mapping[str, float] = field(default_factory=dict)
    files_per_second: float | None = None

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
        files = f"Files: {changes or 'no changes'}. {self._duration()}."
        sentences = [f"{self.num_items:,} items in the index. {files}"]
        lists = {"Removed": self.removed, "Excluded": self.excluded, "Left out": self.skipped}
        for title, lines in lists.items():
            sentences += [f"{title}, {len(lines):,}:"] if lines else []
            # The name of a file may have a newline.
            sentences += ["  " + text.replace("\n", "\\n") for text in lines[:MAX_LISTED_LINES]]
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

    def _duration(self) -> str:
        """Duration with the speed, and the stages that take most of it."""
        total = f"{self.seconds:.0f} s"
        if self.files_per_second is not None:
            total += f", {self.files_per_second:,.{int(self.files_per_second < 10)}f} files/s"
        shown = {
            name: seconds
            for name, seconds in self.times.items()
            if name != OTHER_STAGE and seconds >= MIN_SHOWN_SHARE * self.seconds
        }
        if self.seconds < 1 or not shown:
            return total
        longest = sorted(shown, key=lambda name: -shown[name])
        parts = [f"{shown[name]:.1f} s {STAGES[name]}" for name in longest]
        rest = self.seconds - sum(shown.values())
        parts += [f"{rest:.1f} s other"] if rest >= MIN_SHOWN_SHARE * self.seconds else []
        return f"{total}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, without fields that are None."""
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
    """Build an index of a folder or data set, or update an existing index. A setting of None is the
    value of the existing index, else the default.
    """
    folder = Path(out)
    clock = StageClock()
    validate_workers(workers)
    _check_request(folder, moment_seconds)
    previous = read_manifest(folder) if is_index(folder) else None
    with clock.stage("model"), progress.activity("loading the model"):
        full_decoding = full_decoding or (previous is not None and previous.full_decoding)
        retriever = _with_settings(_open_model(model, device, memory), full_decoding, embedding_dim)
        check_item_bytes(item_bytes, retriever.matcher.late_interaction, previous)
    exclude = tuple(filter(None, exclude)) if exclude or previous is None else previous.exclude
    with clock.stage("listing"), progress.activity("listing files"):
        collection = _with_vectors(_list_files(source, exclude, previous), retriever)
    # Without waiting: a second update of the same files would only repeat the first.
    with index_lock(folder):
        # The manifest is read again under the lock. Another update may have ended since.
        manifest = _open_or_create_manifest(
            folder, model, retriever, collection, store, moment_seconds, embedding_dim, moved
        )
        encoder = retriever.truncated_to(manifest.embedding_dim)
        with clock.stage("text_model"):
            queries = _open_queries(folder, manifest, encoder, device, memory)
        with closing(
            open_index_store(folder, manifest, memory, confirmed=store, create=True)
        ) as vectors:
            _report_lost_items(folder, manifest, vectors, progress)
            skipped = known_problems(manifest, collection.listed)

            def pair(unreadable: Container[str]) -> FileCollection:
                return _with_vectors(collection.pair(unreadable), retriever)

            with clock.stage("comparing"):
                changes = compare_files(vectors, pair(skipped), skipped, remove_missing, progress)
            _check_moved(moved, manifest, collection, changes)
            manifest = replace(
                manifest,
                source=str(collection.root),
                is_dataset=collection.is_dataset or (manifest.is_dataset and not collection.files),
                exclude=exclude,
            )
            if changes.new_files or changes.reused or changes.missing_paths:
                # Without a digest, the index is marked as unfinished.
                write_manifest(folder, replace(manifest, digest=None))

            def encode(files: Sequence[SourceFile]) -> Iterator[_Shard]:
                seconds = manifest.moment_seconds
                return encode_in_shards(
                    engine, workers, str(model), encoder, files, seconds, progress, clock
                )

            # A killed process loses the shards in progress: one, or more on a Ray cluster. The next
            # call continues.
            with clock.stage("encoding"):
                update = _apply_changes(vectors, changes, encode, pair, progress, clock)
            # Changes of an interrupted update are not counted, so that they count as many.
            num_changed = vectors.count() if manifest.digest is None else update.num_changed
            digest = vectors.digest()
            manifest = replace(
                manifest,
                skipped=changes.skipped | update.damaged,
                decoders=decoder_versions(),
                live_pairs=collection.live_pairs,
                digest=digest,
            )
            index = Index(folder, manifest, queries, vectors, list_readable_files)
            with (
                clock.stage("calibration"),
                kept_if_stopped(lambda: "All files are in the index."),
            ):
                manifest = _calibrate(index, open_data, num_changed, progress)
            write_manifest(folder, manifest)
            undated = vectors.table().undated()
            with clock.stage("compression"):
                measured = measure_compression(index, memory) if compression else None
        with clock.stage("compression"):
            compress_index(folder, item_bytes, memory, progress)
        with clock.stage("text_model"):
            _add_text_towers(folder, manifest, encoder, queries, progress)
        with clock.stage("correction"):
            correction = _refresh_correction(folder, queries, store, memory, progress)
    report = IndexReport(
        folder=str(folder),
        num_items=digest.num_items,
        compression=measured,
        correction=correction,
        undated=undated,
        **update.summarize(),
        **_durations(clock, update),
    )
    _log_warnings(source, report.warnings)
    return report


def _list_files(
    source: str | Path, exclude: Sequence[str], previous: IndexManifest | None
) -> FileCollection:
    """The files of a source, which may be missing now if it has an index."""
    is_known = previous is not None and previous.source == str(source_root(source))
    live_pairs = previous.live_pairs if previous is not None else NO_PAIRS
    return (list_readable_files if is_known else list_source_files)(source, exclude, live_pairs)


def _report_lost_items(
    folder: Path, manifest: IndexManifest, store: VectorStore, progress: Progress
) -> None:
    """Print a message if the store of an index is empty and was not."""
    if manifest.digest and manifest.digest.num_items and not store.count():
        progress.message(f"{folder}: the items of the store are lost. All files are encoded again.")


def _with_settings(model: Retriever, full_decoding: bool, embedding_dim: int | None) -> Retriever:
    """The model with the settings of an index."""
    model = model.with_full_decoding() if full_decoding else model
    return model if embedding_dim is None else model.with_embedding_dim(embedding_dim)


def _check_moved(
    is_moved: bool, manifest: IndexManifest, collection: FileCollection, changes: IndexChanges
) -> None:
    """Check that a folder has the files of an index that moved there."""
    if is_moved and MISSING in changes.kept.values():
        raise RunError(
            f"{collection.root}: expected the files of {manifest.source}, got "
            f"{len(changes.kept):,} missing ones. Pass the folder to which they were moved, or "
            "--remove-missing if they were deleted."
        )


def _durations(clock: StageClock, update: _Update) -> dict[str, Any]:
    """Durations of the report."""
    times = clock.read()
    seconds = sum(times.get(stage, 0.0) for stage in FILE_STAGES)
    speed = update.num_encoded / seconds if update.num_encoded else None
    return {"seconds": sum(times.values()), "times": times, "files_per_second": speed}


def _open_queries(
    folder: Path,
    manifest: IndexManifest,
    encoder: Retriever,
    device: str | None,
    memory: MemoryLimit,
) -> QueryEncoder:
    """The model of the queries, which may be the model of the items."""
    if manifest.query_model.fingerprint == manifest.fingerprint:
        return QueryEncoder.of(encoder)
    return open_query_encoder(folder, manifest, device, memory)


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


def _add_text_towers(
    folder: Path,
    manifest: IndexManifest,
    model: Retriever,
    queries: QueryEncoder,
    progress: Progress,
) -> None:
    """Add the text towers of the models of items and queries, or the reasons why they have none."""
    with kept_if_stopped(lambda: "All files are in the index."):
        if not isinstance(model, VectorFile):
            add_text_tower(folder, model, progress)
        if manifest.query_model.fingerprint != manifest.fingerprint:
            add_query_tower(folder, manifest, queries, progress)


def add_query_tower(
    folder: Path, manifest: IndexManifest, queries: QueryEncoder, progress: Progress
) -> None:
    """Add the text tower of the query model of an index, if it has none and is a model."""
    active = manifest.query_model
    if missing_reason(folder, active.fingerprint) and not active.model.endswith(VECTOR_SUFFIXES):
        add_text_tower(folder, queries.whole, progress)


def _refresh_correction(
    folder: Path, model: QueryEncoder, store: str | None, memory: MemoryLimit, progress: Progress
) -> str | None:
    """Compute the correction of the complete index for its new items, if it has one."""
    if not os.path.exists(folder / CORRECTION_FILE):
        return None
    # Only here, because most indexes have none.
    from visavis.retrieval.build.correction_builder import refresh_correction

    manifest = read_manifest(folder)
    with (
        closing(open_index_store(folder, manifest, memory, confirmed=store)) as vectors,
        kept_if_stopped(lambda: "All files are in the index."),
    ):
        return refresh_correction(
            Index(folder, manifest, model, vectors, list_readable_files), memory, progress
        )


def _log_warnings(source: str | Path, warnings: Sequence[str]) -> None:
    for warning in warnings[:MAX_WARNINGS]:
        log.warning("%s: %s", source, warning)
    if len(warnings) > MAX_WARNINGS:
        log.warning("%s: ... and %d more warnings", source, len(warnings) - MAX_WARNINGS)


def _warnings(changes: IndexChanges, source: FileCollection) -> Iterator[str]:
    """A sentence for each place whose items are kept."""
    for place, count in Counter(changes.kept.values()).items():
        if place == MISSING:
            yield f"{count:,} of {changes.num_stored:,} files are missing. The index keeps them. {_IF_DELETED}"
        elif place in source.unreadable:
            yield f"{source.problem_of(place)} The index keeps {count:,} of its files."
        else:
            name = source.root if place == "." else repr(place)
            yield f"{name}: the folder is empty. The index keeps {count:,} of its files. {_IF_DELETED}"


def recorded_model(model: str | Path) -> str:
    """Return the location of a model as in a manifest: an absolute path, or a hub name."""
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
        find_store_kind(store or OWN_STORE, late_interaction)
        manifest = IndexManifest(
            model=model_name,
            fingerprint=retriever.fingerprint,
            embedding_dim=vector_length(retriever),
            source=str(source.root),
            store=store or OWN_STORE,
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
    """Return the number of dimensions of the vectors of a model."""
    if isinstance(model, VectorFile):
        return model.vectors.embedding_dim
    [vector] = model.item_vectors(model.encode_text([model.processor.known_text]))
    return vector.shape[-1]


_Shard = tuple[Sequence[SourceFile], EncodedShard]


def _in_place_of(source: FileCollection, unindexed: Container[str]) -> dict[str, str]:
    """A sentence for each photo that cannot be read and whose companions are items in its place."""
    items = defaultdict[str, list[str]](list)
    for path, photos in sorted(source.photos_of.items()):
        if path not in source.companions and path not in unindexed:
            for photo in photos:
                if photo in unindexed:
                    items[photo].append(path)
    return {photo: f" Indexed in its place: {', '.join(paths)}." for photo, paths in items.items()}


@dataclass(frozen=True)
class _Update:
    """Result of applying changes.

    ``files``: all files that were decoded. ``unreadable``: those that cannot be read.
    ``collection``: the files and companions. ``missing_paths``: paths whose items were deleted.
    ``num_new_items``: items of the decoded files.
    """

    changes: IndexChanges
    files: list[SourceFile]
    unreadable: dict[str, UnreadableFile]
    collection: FileCollection
    missing_paths: list[str]
    num_new_items: int

    @cached_property
    def damaged(self) -> dict[str, SkippedFile]:
        """The files that are not decoded again until they change."""
        return {
            file.path: (file.size, file.modified_ns, self.unreadable[file.path].problem)
            for file in self.files
            if file.path in self.unreadable and self.unreadable[file.path].is_damaged
        }

    @property
    def num_changed(self) -> int:
        """Number of new and of removed items."""
        removed = (self.changes.old_keys.get(path, []) for path in self.missing_paths)
        return self.num_new_items + sum(map(len, removed))

    @property
    def num_encoded(self) -> int:
        """Number of the files that were encoded."""
        return len(self.files) - len(self.unreadable)

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
            "num_encoded": self.num_encoded,
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
    changes: IndexChanges,
    encode: Callable[[Sequence[SourceFile]], Iterator[_Shard]],
    pair: Callable[[Container[str]], FileCollection],
    progress: Progress,
    clock: StageClock,
) -> _Update:
    """Update the store. The companions of photos that cannot be decoded become items."""
    if changes.reused:
        items = [item for item, _ in changes.reused]
        with clock.stage("writing"):
            # Read all vectors before the first write: two files may have swapped their paths.
            store.add(items, store.vectors([key for _, key in changes.reused]))
            # Here and below, new items are written first, so that a killed process loses none.
            _delete_old_items(store, changes, {item.path for item in items}, items)
    unreadable = dict[str, UnreadableFile]()
    num_done = 0
    num_new_items = 0
    started = time.perf_counter()
    collection = pair(changes.skipped)
    tried = list[SourceFile]()
    new_files: Sequence[SourceFile] = changes.new_files
    with kept_if_stopped(lambda: f"The index keeps {num_done:,} of {len(tried):,} new files."):
        while new_files:
            tried += new_files
            for files, shard in encode(new_files):
                # A file that cannot be read now, but may be intact, keeps its items.
                kept = {
                    path for path, problem in shard.unreadable.items() if not problem.is_damaged
                }
                paths = [file.path for file in files if file.path not in kept]
                with clock.stage("writing"):
                    if shard.items:
                        store.add(shard.items, shard.vectors)
                    _delete_old_items(store, changes, paths, shard.items)
                unreadable |= shard.unreadable
                num_done += len(files)
                num_new_items += len(shard.items)
                per_second = num_done / (time.perf_counter() - started)
                progress.update("files", num_done, len(tried), per_second)
            without_items = {
                path
                for path, problem in unreadable.items()
                if problem.is_damaged or path not in changes.old_keys
            }
            if not without_items:
                break
            before = {file.path for file in collection.files}
            collection = pair({*changes.skipped, *without_items})
            # The companions of photos that turned out to be damaged.
            new_files = [file for file in collection.files if file.path not in before]
    # Last: the vectors of a moved file are read from its old path above.
    decoded = {file.path for file in tried}
    missing_paths = [path for path in changes.missing_paths if path not in decoded]
    with clock.stage("writing"):
        _delete_old_items(store, changes, missing_paths, ())
        store.prepare_search()
    return _Update(changes, tried, unreadable, collection, missing_paths, num_new_items)


def _delete_old_items(
    store: VectorStore, changes: IndexChanges, paths: Iterable[str], new_items: Sequence[IndexItem]
) -> None:
    """Delete the stored items of some paths, except those that new items have overwritten."""
    # A clip that became shorter has fewer moments. Its other keys were overwritten.
    overwritten = {item.key for item in new_items}
    old_keys = (key for path in paths for key in changes.old_keys.get(path, []))
    if keys := [key for key in old_keys if key not in overwritten]:
        store.delete(keys)


def _calibrate(
    index: Index, open_data: OpenRunData, num_changed: int, progress: Progress
) -> IndexManifest:
    """Calibrate the scores of an index after an update, and return its new manifest."""
    manifest = index.manifest
    # Fitted once: it depends on the model and its validation data, not on the items.
    calibration = manifest.calibration or calibrate_index(
        open_data(Path(manifest.model)), manifest.embedding_dim, progress
    )
    num_changed = renew_scale(index, num_changed, progress)
    return replace(manifest, calibration=calibration, num_changed=num_changed)


def calibrate_index(
    data: RunData | None, embedding_dim: int, progress: Progress
) -> Calibration | None:
    """Fit match probabilities on the validation split of a run. None: they are not available."""
    if data is None:  # the model is not a run
        return None
    try:
        split = data.validation_split
        with progress.activity("calibrating match probabilities"):
            scores, relevant = data.scores(split, embedding_dim, BarsOnly(progress))
            return fit_calibration(data.captions(split, NoProgress()), scores, relevant)
    except VisavisError as error:
        progress.message(f"Match probabilities by captions are not available: {error}")
        return None


def move_model(folder: Path, model: str | Path, progress: Progress) -> None:
    """Record the new location of the model of the items of an index."""
    with index_lock(folder):
        manifest = read_manifest(folder)
        with progress.activity("loading the model"):
            check_model(folder, manifest.fingerprint, str(model), _open_model(model, None, None))
        write_manifest(folder, replace(manifest, model=recorded_model(model)))
