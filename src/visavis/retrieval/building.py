"""Make an index, or bring one up to date: what is new or changed is encoded, what moved keeps its vectors, what is gone goes."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.memory import Memory
from visavis.models.retriever import Retriever
from visavis.progress import Progress
from visavis.retrieval.curve import Curve
from visavis.retrieval.encoding import content_of
from visavis.retrieval.engines import Engine, shards
from visavis.retrieval.index import Manifest, check_model, is_index, of_width, read_manifest, store_uri, write_manifest
from visavis.retrieval.item import Item
from visavis.retrieval.sources import File, Source, open_source
from visavis.retrieval.store import VectorStore
from visavis.retrieval.stores import open_store

STORE = "items.lance"
MOMENTS_S = 4.0


@dataclass(frozen=True)
class Built:
    """What was done: files that were encoded, kept as they were, found elsewhere and taken along, removed, and that cannot be read.

    items: pictures, clips and moments in the index now. skipped: a sentence for each file that is left out. curve: where it was asked for.
    """

    folder: str
    items: int
    encoded: int
    kept: int
    moved: int
    removed: int
    skipped: tuple[str, ...]
    seconds: float
    curve: Curve | None = None

    def to_json(self) -> dict[str, Any]:
        told = asdict(self)
        return told if self.curve else {key: value for key, value in told.items() if key != "curve"}


def build_index(
    model: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    store: str | None = None,
    moments_s: float | None = None,
    width: int | None = None,
    engine: Engine = "local",
    workers: int = 2,
    device: str | None = None,
    memory: Memory = None,
    progress: Progress,
) -> Built:
    """Index a folder or data set with a model into a folder; an index that is there is brought up to date.

    store: a URI of LanceDB or Milvus, or a path; default: LanceDB, beside the manifest. moments_s: the seconds of a moment of a clip; default 4.
    width: how many first numbers of the vectors are kept, of a model that was trained for it; None: all, or as the index has them.
    engine, workers: "local", or "ray" and so many processes. A process that dies leaves what it finished: the next call goes on.
    Raises RefusedOverwrite for a folder that holds something else, RunError for an index of another model or source.
    """
    folder, started = Path(out), time.perf_counter()
    if moments_s is not None and moments_s <= 0:
        raise VisavisError(
            f"moments is {moments_s:g}, expected the seconds of a moment of a clip, a number above 0, such as {MOMENTS_S:g}."
        )
    if not is_index(folder) and folder.exists() and any(not name.name.endswith(".lock") for name in folder.iterdir()):
        raise RefusedOverwrite(f"{folder} holds something that is no index: name a new folder with --out, or an index to bring up to date.")
    if store and "://" not in store:
        store = os.path.abspath(os.path.expanduser(store))
    retriever = Retriever.load(model, device=device, memory=memory)
    if width is not None:
        retriever = retriever.narrowed(width)
    files = open_source(source)
    with storage.alone(folder / "index", wait=False):
        manifest = _manifest(folder, model, retriever, files, store, moments_s, width)
        retriever = of_width(retriever, manifest.width)
        vectors = open_store(store_uri(folder, manifest), manifest.width, memory)
        try:
            changes = _changes(vectors, files, manifest, progress)
            bad = _apply(vectors, changes, manifest, model, retriever, engine, workers, progress)
            skipped = changes.skipped | bad
            write_manifest(folder, replace(manifest, skipped=skipped))
            count = vectors.count()
        finally:
            vectors.close()
    told = (*files.skipped, *(sentence for _, _, sentence in skipped.values()))
    return Built(
        folder=str(folder),
        items=count,
        encoded=len(changes.new) - len(bad),
        kept=changes.kept,
        moved=len({item.path for item, _ in changes.moved}),
        removed=len(changes.gone),
        skipped=told,
        seconds=time.perf_counter() - started,
    )


def _manifest(
    folder: Path,
    model: str | Path,
    retriever: Retriever,
    source: Source,
    store: str | None,
    moments_s: float | None,
    width: int | None,
) -> Manifest:
    """That of the index that is there, once it is clear that it is of this model and source; a new one, written before any vector."""
    named = str(Path(model).absolute()) if Path(model).exists() else str(model)
    if not is_index(folder):
        numbers = retriever.encode_texts([_any_word(retriever)]).shape[1]
        made = Manifest(
            named, retriever.fingerprint, numbers, str(source.root), store or STORE, moments_s or MOMENTS_S, is_dataset=source.is_dataset
        )
        write_manifest(folder, made)
        return made
    manifest = read_manifest(folder)
    check_model(folder, manifest, str(model), retriever)
    for what, asked, there in (
        ("source", str(source.root), manifest.source),
        ("store", store, manifest.store),
        ("moments of a clip", moments_s, manifest.moments_s),
        ("width", width, manifest.width),
    ):
        if asked not in (None, there):
            raise RunError(f"the {what} of the index {folder} is {there}, found {asked}: make another index with --out.")
    return replace(manifest, model=named)


def _any_word(model: Retriever) -> str:
    words = model.processor.vocabulary
    return words.words[-1] if words is not None else "a"


@dataclass(frozen=True)
class _Changes:
    """What the files are beside what is stored. moved: items under their new place, with the keys that hold their vectors now."""

    new: tuple[File, ...]
    moved: tuple[tuple[Item, str], ...]
    gone: tuple[str, ...]
    kept: int
    skipped: dict[str, tuple[int, int, str]]
    stored: dict[str, list[Item]]


def _changes(store: VectorStore, source: Source, manifest: Manifest, progress: Progress) -> _Changes:
    stored, by_size = defaultdict[str, list[Item]](list), defaultdict[int, dict[str, str]](dict)
    for item in store.items():
        stored[item.path].append(item)
        by_size[item.size].setdefault(item.content, item.path)
    new, moved, skipped = list[File](), list[tuple[Item, str]](), dict[str, tuple[int, int, str]]()
    kept = 0
    for number, file in enumerate(source.files):
        there, mark = stored.get(file.path), (file.size, file.modified_ns)
        known = manifest.skipped.get(file.path)
        if there and all(mark == (item.size, item.modified_ns) and item.metadata == file.metadata for item in there):
            kept += 1
        elif known is not None and tuple(known[:2]) == mark:
            skipped[file.path] = tuple(known)  # type: ignore[assignment]
        elif file.size in by_size and (content := _content(file)) in by_size[file.size]:
            path = by_size[file.size][content]
            moved += [(_placed(item, file), item.key) for item in stored[path] if item.content == content]
        else:
            new.append(file)
        if number % 1000 == 999:
            progress.work("files", number + 1, len(source.files), 0.0)
    present = {file.path for file in source.files} - set(skipped)
    gone = tuple(path for path in stored if path not in present)
    return _Changes(tuple(new), tuple(moved), gone, kept, skipped, stored)


def _content(file: File) -> str:
    """The hash of its content; empty for a file that cannot be read: encoding says why."""
    try:
        return content_of(file)
    except DataError:
        return ""


def _placed(item: Item, file: File) -> Item:
    return replace(item, key=file.path + item.key[len(item.path) :], path=file.path, modified_ns=file.modified_ns, metadata=file.metadata)


def _apply(
    store: VectorStore,
    changes: _Changes,
    manifest: Manifest,
    model_name: str | Path,
    model: Retriever,
    engine: Engine,
    workers: int,
    progress: Progress,
) -> dict[str, tuple[int, int, str]]:
    """Bring the store to what the files are; what could not be read, with the sentence that says why."""
    moved = [item for item, _ in changes.moved]
    if moved:  # all are read before any is written: two files may have changed places
        store.add(moved, store.vectors([key for _, key in changes.moved]))
        _drop(store, (item for path in {item.path for item in moved} for item in changes.stored.get(path, [])), moved)
    bad = dict[str, tuple[int, int, str]]()
    done, started, by_path = 0, time.perf_counter(), {file.path: file for file in changes.new}
    for files, shard in shards(engine, workers, str(model_name), model, changes.new, manifest.moments_s):
        if shard.items:
            store.add(shard.items, shard.vectors)
        _drop(store, (item for file in files for item in changes.stored.get(file.path, [])), shard.items)
        bad |= {path: (by_path[path].size, by_path[path].modified_ns, sentence) for path, sentence in shard.bad.items()}
        done += len(files)
        progress.work("files", done, len(changes.new), done / (time.perf_counter() - started))
    _drop(store, (item for path in changes.gone for item in changes.stored[path]), ())
    return bad


def _drop(store: VectorStore, old: Iterable[Item], instead: Sequence[Item]) -> None:
    """Delete items that nothing took the place of."""
    staying = {item.key for item in instead}
    if keys := [item.key for item in old if item.key not in staying]:
        store.delete(keys)
