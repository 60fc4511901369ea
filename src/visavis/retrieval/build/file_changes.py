"""Rules for the files of a source, from its list to the changes of an index.

Each file is decided by the first rule that holds for it:

==========================================  =====================================================
Rule                                        Where
==========================================  =====================================================
excluded by name or path                    ``Exclusion`` of ``data/formats/image_files.py``
link out of the folder, unreadable folder   ``scan_folder`` of the same module
neither image nor clip, no Unicode name     ``_Listed`` of ``source_files.py``
could not be decoded before                 ``known_problems``
part of another photo                       ``FileCollection.pair`` of ``source_files.py``
unchanged                                   ``_compare_with_items``
moved, copied or touched: known content     ``_find_contents``
changed or new: encoded                     ``IndexChanges.new_files``
absent, but may exist: kept                 ``_kept_paths``
absent: removed                             ``IndexChanges.missing_paths``
==========================================  =====================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from visavis.core.errors import DataError
from visavis.core.memory_budget import chunk_slices
from visavis.core.progress import Progress
from visavis.data.capture_time import TAKEN, file_times
from visavis.data.formats.image_files import path_and_parents
from visavis.data.parallel import map_in_order
from visavis.data.video import decoder_versions
from visavis.retrieval.build.encoding import read_file_times, read_source_times, with_file_times
from visavis.retrieval.index_folder import IndexManifest, SkippedFile
from visavis.retrieval.items import IndexItem
from visavis.retrieval.source_files import FileCollection, SourceFile
from visavis.retrieval.stores.base import VectorStore
from visavis.retrieval.stores.item_table import FileStates, ItemTable, StoredFile, tags_json

PROGRESS_EVERY = 1000
FILES_COMPARED_AT_ONCE = 1000
MISSING = ""
"""Place of kept files whose folder was read and does not contain them."""


@dataclass(frozen=True)
class IndexChanges:
    """Differences between the files and the stored items.

    Attributes:
        new_files: Files to encode.
        reused: Items of new or touched files whose content is in the index, with the keys of the
            vectors of that path.
        missing_paths: Absent paths whose items are deleted.
        moved_paths: Absent paths whose content is at another path.
        kept: The place because of which items of an absent file are kept, by the path of the file.
        num_unchanged: Number of unchanged files.
        skipped: Files that could not be decoded before.
        old_keys: Keys of the stored items of each path that is changed or absent.
        num_stored: Number of stored paths.
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


class _Comparison(NamedTuple):
    """Files of a source and their items: changed and new files, paths of items whose file is absent,
    the number of unchanged files, and the number of all files that have items.
    """

    changed: list[SourceFile]
    absent_paths: list[str]
    num_unchanged: int
    num_stored: int


def known_problems(manifest: IndexManifest, files: Sequence[SourceFile]) -> dict[str, SkippedFile]:
    """The files that these decoders could not decode before, and that have not changed since."""
    if not manifest.skipped or manifest.decoders != decoder_versions():
        return {}
    problems = ((file, manifest.skipped.get(file.path)) for file in files)
    return {
        file.path: (file.size, file.modified_ns, problem[2])
        for file, problem in problems
        if problem is not None and tuple(problem[:2]) == (file.size, file.modified_ns)
    }


def compare_files(
    store: VectorStore,
    source: FileCollection,
    known_problems: Mapping[str, SkippedFile],
    remove_missing: bool,
    progress: Progress,
) -> IndexChanges:
    """Compare the files of a source with the stored items."""
    table = store.table()
    comparison = _compare_with_items(table, source.files)
    changed = comparison.changed
    skipped = {
        file.path: known_problems[file.path] for file in changed if file.path in known_problems
    }
    candidates = [file for file in changed if file.path not in skipped]
    # Stored items of files that are changed, skipped or absent.
    old_keys = defaultdict[str, list[str]](list)
    old_contents = defaultdict[str, set[str]](set)
    old_paths = [*(file.path for file in changed), *comparison.absent_paths]
    for path, key, content in table.items_of_paths(old_paths):
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
    num_stored = comparison.num_stored
    kept = _kept_paths(set(absent) - set(skipped), moved_paths, num_stored, source, remove_missing)
    missing_paths = tuple(path for path in absent if path not in kept)
    return IndexChanges(
        tuple(new_files),
        tuple(reused),
        missing_paths,
        moved_paths.intersection(missing_paths),
        kept,
        comparison.num_unchanged,
        skipped,
        old_keys,
        num_stored,
    )


def _compare_with_items(table: ItemTable, files: Sequence[SourceFile]) -> _Comparison:
    """Compare files with their items. Unchanged files have items, all with their size, time and
    metadata.
    """
    unequal, rows = _unequal_files(table, files)
    listed = {file.path: file for file in unequal}
    stored = set[str]()
    # One changed item of a clip makes the whole file changed.
    changed = set[str]()
    absent = dict[str, None]()
    undated = set[str]()
    for path, size, modified_ns, tags, given_tags in rows:
        file = listed.get(path)
        if file is None:
            absent[path] = None
            continue
        stored.add(path)
        if file.modified_ns != modified_ns or file.size != size:
            changed.add(path)
            continue
        # The time of a table counts as given, also if it has the form of a time of a file.
        is_dated = bool(file.metadata) and TAKEN in file.metadata
        if tags_json(file.metadata) != (tags if is_dated else given_tags):
            changed.add(path)
        elif file.time_sources and not is_dated and f'"{TAKEN}=' not in tags:
            undated.add(path)
    unchanged = stored - changed
    # Files that have a capture time now, such as in a JSON file of Google Takeout that was added.
    sources = [listed[path] for path in sorted(undated & unchanged)]
    for file, times in zip(sources, map_in_order(read_source_times, sources), strict=True):
        if times:
            unchanged.remove(file.path)
    return _Comparison(
        [file for file in unequal if file.path not in unchanged],
        list(absent),
        num_unchanged=len(files) - len(unequal) + len(unchanged),
        num_stored=len(files) - len(unequal) + len(stored) + len(absent),
    )


def _unequal_files(
    table: ItemTable, files: Sequence[SourceFile]
) -> tuple[list[SourceFile], list[StoredFile]]:
    """The files that may differ from their items, in the order of paths, and the items of these and
    of absent files. ``files``: in this order.
    """
    rows = list(table.detailed_files())
    detailed = {path for path, *_ in rows}
    unequal = [
        file for file in files if file.metadata or file.time_sources or file.path in detailed
    ]
    plain = files
    if unequal:
        compared_in_full = {file.path for file in unequal}
        plain = [file for file in files if file.path not in compared_in_full]
    # Compared in blocks, because reading the rows of 1,000,000 items takes seconds.
    blocks = chunk_slices(len(plain), FILES_COMPARED_AT_ONCE) or [slice(0, 0)]
    # The first and the last block also cover items without a file before and after.
    starts = ["", *(plain[block.start].path for block in blocks[1:])]
    for block, start, end in zip(blocks, starts, [*starts[1:], None], strict=True):
        own = plain[block]
        states = FileStates.of(
            [file.path for file in own],
            [file.size for file in own],
            [file.modified_ns for file in own],
        )
        if states != table.plain_states(start, end):
            unequal += own
            rows += table.plain_files(start, end)
    return sorted(unequal, key=attrgetter("path")), rows


def _find_contents(
    table: ItemTable, files: Sequence[SourceFile], progress: Progress
) -> Iterator[tuple[SourceFile, list[IndexItem]]]:
    """Files with the stored items of the first path that has the same content and kind."""
    for number, file in enumerate(files, 1):
        found = list[IndexItem]()
        # The content is hashed only if a stored file has the same size.
        if table.has_size(file.size):
            with suppress(DataError):  # encoding reports an unreadable file
                file, found = file.read_unchanged(partial(_find_content, table))
        yield file, found
        if number % PROGRESS_EVERY == 0:
            progress.update("files", number, len(files), 0.0)


def _find_content(table: ItemTable, file: SourceFile) -> tuple[SourceFile, list[IndexItem]]:
    """A file with the stored items of its content."""
    found = table.items_of_content(file.location.content_hash, is_video=file.is_video)
    return file, found


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
            kept[path] = empty[0] if empty else MISSING
    return kept
