"""Items and vectors as Arrow tables: schema, conversion and filters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.retrieval.items import (
    ITEM_FIELDS,
    IndexItem,
    ItemFilter,
    metadata_tag,
    path_expression,
    tags_to_metadata,
)
from visavis.retrieval.stores.base import CHECKSUM, ItemVectors, VectorSets, row_checksum

if TYPE_CHECKING:
    import pyarrow as pa

NUM_VECTORS = "num_vectors"
"""Column of the number of vectors of an item, in tables of items with several vectors."""
# Finding one of a million keys takes 20 us by bisection. Hashing a million keys takes 0.5 s.
MAX_BISECTED_KEYS, MAX_BISECTED_SHARE = 64, 1 / 64
"""Keys that are found by bisection: at most this number, or this share of the table."""


def arrow_schema(width: int, *, several: bool, compressed: bool = False) -> pa.Schema:
    """Return the columns of a table of items and vectors.

    Args:
        width: Dimension of the vectors, or bytes of a row of codes.
        several: Whether an item has several vectors.
        compressed: Whether the vectors are codes.

    Returns:
        The schema.
    """
    import pyarrow as pa

    vector = pa.list_(pa.uint8() if compressed else pa.float32(), width)
    vectors = (
        [(NUM_VECTORS, pa.int64()), ("vector", pa.list_(vector))]
        if several
        else [("vector", vector)]
    )
    return pa.schema([*_item_schema(), *vectors])


def _item_schema() -> pa.Schema:
    """Columns of items and their checksums."""
    import pyarrow as pa

    texts = [
        pa.field(name, pa.string(), nullable=False)
        for name in ("key", "path", "kind", "content", "dhash")
    ]
    integers = [
        pa.field(name, pa.int64(), nullable=False) for name in ("size", "modified_ns", CHECKSUM)
    ]
    times = [pa.field(name, pa.float64()) for name in ("start", "end")]
    return pa.schema([*texts, *integers, *times, ("metadata", pa.list_(pa.string()))])


def table_from_rows(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Convert rows of a store to a table.

    Args:
        rows: Values of ``ITEM_FIELDS`` and ``CHECKSUM``, and possibly others, which are left out.

    Returns:
        Items and their checksums in the order of keys.
    """
    import pyarrow as pa

    ordered = sorted(rows, key=lambda row: row["key"])
    return pa.Table.from_pylist(
        [{**row, "metadata": list(row["metadata"] or ())} for row in ordered], schema=_item_schema()
    )


def arrow_table(index_id: str, items: Sequence[IndexItem], vectors: ItemVectors) -> pa.Table:
    """Convert items and their vectors to a table.

    Args:
        index_id: Id of the index in hex, for the checksums.
        items: The items.
        vectors: Their vectors.

    Returns:
        The table.
    """
    import pyarrow as pa

    several = isinstance(vectors, VectorSets)
    values = vectors.rows if isinstance(vectors, VectorSets) else vectors
    compressed = values.dtype == np.uint8
    schema = arrow_schema(values.shape[1], several=several, compressed=compressed)
    rows = [item.to_row() for item in items]
    rows = [
        row | {CHECKSUM: row_checksum(index_id, row, vector), NUM_VECTORS: len(vector)}
        for row, vector in zip(rows, vectors, strict=True)
    ]
    # The vectors are appended as one array, without a Python object per number.
    table = pa.Table.from_pylist(rows, schema=schema.remove(schema.get_field_index("vector")))
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    if isinstance(vectors, VectorSets):
        column = pa.ListArray.from_arrays(pa.array(vectors.offsets, pa.int32()), column)
    return table.append_column(schema.field("vector"), column)


def flat_values(column: pa.ChunkedArray) -> np.ndarray:
    """Read the numbers of a column of vectors.

    Args:
        column: One or several vectors per row.

    Returns:
        All numbers in their order, float32, or uint8 of codes.
    """
    import pyarrow as pa

    array = column.combine_chunks()
    while pa.types.is_nested(array.type):
        array = array.flatten()
    values: np.ndarray = array.to_numpy()
    return values


def matching_rows(
    table: pa.Table, item_filter: ItemFilter, times: Callable[[], np.ndarray] | None = None
) -> np.ndarray:
    """Apply a filter to a table.

    Args:
        table: Table of items.
        item_filter: Conditions on the items.
        times: Returns the times of the items by their clocks. None: they are read from the table.

    Returns:
        Whether each item matches, bool, shape ``[N]``.
    """
    import pyarrow.compute as pc

    from visavis.data.capture_time import time_us

    mask = np.ones(len(table), bool)
    times = times or partial(item_times, table)
    if item_filter.path:
        expression = f"^{path_expression(item_filter.path)}$"
        mask &= pc.match_substring_regex(table["path"], expression).to_numpy()
    if item_filter.kind is not None:
        mask &= pc.equal(table["kind"], item_filter.kind).to_numpy()
    for bound, holds in ((item_filter.after, np.greater_equal), (item_filter.before, np.less)):
        if bound is not None:
            clock = bound.tzinfo is None
            values = times() if clock else item_times(table, clock=False)
            mask &= holds(values, time_us(bound, clock=clock))
    if item_filter.metadata:
        tags = table["metadata"].combine_chunks()
        tag_rows = pc.list_parent_indices(tags).to_numpy()
        tag_texts = pc.list_flatten(tags)
        for name, value in item_filter.metadata.items():
            is_equal = pc.equal(tag_texts, metadata_tag(name, value))
            has_value = np.zeros(len(table), bool)
            has_value[tag_rows[is_equal.to_numpy(zero_copy_only=False)]] = True
            mask &= has_value
    return mask


def item_times(table: pa.Table, *, clock: bool = True) -> np.ndarray:
    """Return the time of each item: its capture time, or its modification time if it is not known.

    Args:
        table: Table of items.
        clock: Whether to return the time of the clock at the place, and not the instant.

    Returns:
        Microseconds as ``time_us``, int64, shape ``[N]``.
    """
    import pyarrow.compute as pc

    from visavis.data.capture_time import TAKEN, parse_time, time_us

    modified_ns = numbers(table["modified_ns"])
    times = modified_ns // 1000 + (_local_offsets_us(modified_ns) if clock else 0)
    tags = table["metadata"].combine_chunks()
    texts = pc.list_flatten(tags)
    positions = pc.indices_nonzero(pc.starts_with(texts, f"{TAKEN}="))
    if not len(positions):
        return times
    rows = np.from_dlpack(pc.list_parent_indices(tags).take(positions).cast("int64"))
    taken = [text.removeprefix(f"{TAKEN}=") for text in texts.take(positions).to_pylist()]
    times[rows] = [
        old if new is None else time_us(new, clock=clock)
        for old, new in zip(times[rows].tolist(), map(parse_time, taken), strict=True)
    ]
    return times


def _local_offsets_us(modified_ns: np.ndarray) -> np.ndarray:
    """Offset of the clock of this machine to UTC at each of some times, in microseconds."""
    from visavis.data.capture_time import modified_time

    # Clocks change at quarter hours, so that one time of each is converted.
    quarter_ns = 900 * 10**9
    quarters, rows = np.unique(modified_ns // quarter_ns, return_inverse=True)
    offsets = [modified_time(number * quarter_ns).utcoffset() for number in quarters.tolist()]
    return np.array(offsets, "timedelta64[us]").astype(np.int64)[rows]


def without_read_times(lists: pa.Array, is_dated: np.ndarray) -> pa.Array:
    """Remove the capture times that were read from files from lists of tags.

    Args:
        lists: Tags of each item.
        is_dated: Whether a table of the user contains the time of each item.

    Returns:
        As many lists.
    """
    import pyarrow.compute as pc

    from visavis.data.capture_time import READ_TIME, TAKEN, UNREADABLE_TIME

    texts = pc.list_flatten(lists)
    # Most items have few tags, and times of files have one form.
    matches = pc.match_substring_regex(texts, f"^({TAKEN}={READ_TIME}$|{UNREADABLE_TIME}=)")
    if not pc.any(matches).as_py():
        return lists
    parents = np.from_dlpack(pc.list_parent_indices(lists).cast("int64"))
    kept = np.flatnonzero(~matches.to_numpy(zero_copy_only=False) | is_dated[parents])
    rows = np.bincount(parents[kept], minlength=len(lists))
    return _lists_of(text_array(texts.take(row_indices(kept)).to_pylist()), rows)


def undated_files(table: pa.Table) -> dict[str, str]:
    """Find the files with a text in place of a capture time, in their metadata or a table.

    Args:
        table: Table of items.

    Returns:
        The text, by the path of the file.
    """
    import pyarrow.compute as pc

    from visavis.data.capture_time import TAKEN, UNREADABLE_TIME, parse_time

    tags = table["metadata"].combine_chunks()
    texts = pc.list_flatten(tags)
    pattern = f"^({TAKEN}|{UNREADABLE_TIME})="
    positions = pc.indices_nonzero(pc.match_substring_regex(texts, pattern))
    found = [text.partition("=")[2] for text in texts.take(positions).to_pylist()]
    is_undated = np.array([parse_time(text) is None for text in found], bool)
    chosen = positions.take(row_indices(np.flatnonzero(is_undated)))
    paths = table["path"].take(pc.list_parent_indices(tags).take(chosen)).to_pylist()
    values = (text.partition("=")[2] for text in texts.take(chosen).to_pylist())
    return dict(zip(paths, values, strict=True))


def items_from_table(table: pa.Table) -> list[IndexItem]:
    """Convert the rows of a table to items.

    Args:
        table: Table of items, possibly with other columns.

    Returns:
        One item per row.
    """
    *names, metadata = ITEM_FIELDS
    columns = [table[name].to_pylist() for name in names]
    metadata_column = [
        tags_to_metadata(tags) if tags else {} for tags in table[metadata].to_pylist()
    ]
    return list(map(IndexItem, *columns, metadata_column))


def metadata_names(table: pa.Table) -> set[str]:
    """Read the names of the metadata of all items.

    Args:
        table: Table of items.

    Returns:
        The names.
    """
    import pyarrow.compute as pc

    names = pc.replace_substring_regex(pc.unique(pc.list_flatten(table["metadata"])), "(?s)=.*", "")
    return set(tags_to_metadata(f"{name}=" for name in pc.unique(names).to_pylist()))


def equal_lists(first: pa.Array, second: pa.Array) -> np.ndarray:
    """Compare two columns of lists of texts, such as the metadata of items.

    Args:
        first: Lists. A null is an empty list.
        second: As many lists.

    Returns:
        Whether the lists of each row are equal, bool, shape ``[N]``.
    """
    import pyarrow.compute as pc

    counts, other_counts = (_filled(pc.list_value_length(lists), 0) for lists in (first, second))
    is_equal: np.ndarray = counts == other_counts
    compared = np.flatnonzero(is_equal)
    rows = np.repeat(compared, counts[is_equal])
    texts, others = (
        pc.list_flatten(lists.take(row_indices(compared))) for lists in (first, second)
    )
    is_equal[rows[np.from_dlpack(pc.indices_nonzero(pc.not_equal(texts, others)))]] = False
    return is_equal


def row_indices(rows: np.ndarray) -> pa.Array:
    """Convert row numbers for ``take``. pyarrow would import pandas to convert an array of numpy.

    Args:
        rows: Row numbers, shape ``[n]``.

    Returns:
        The same memory as int64.
    """
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])


def text_array(texts: Sequence[str]) -> pa.Array:
    """Convert texts to Arrow without ``pyarrow.array``, which imports pandas if it is installed.

    Args:
        texts: The texts, below 2 GiB in UTF-8.

    Returns:
        An array of strings.
    """
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def text_lists(lists: Sequence[Sequence[str]]) -> pa.Array:
    """Convert lists of texts to Arrow, as ``text_array``.

    Args:
        lists: The lists.

    Returns:
        An array of lists of strings.
    """
    texts = text_array([text for texts in lists for text in texts])
    return _lists_of(texts, np.array([*map(len, lists)], np.int64))


def _lists_of(texts: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Divide texts into lists of some lengths."""
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(pa.string()), len(lengths), buffers, children=[texts])


def index_in(values: pa.ChunkedArray, of: pa.Array) -> np.ndarray:
    """Find the positions of values in an array, also without pandas.

    Args:
        values: Values to find.
        of: Array of distinct values.

    Returns:
        Position of each value, -1 if it is missing, int64, shape ``[n]``.
    """
    import pyarrow.compute as pc

    return _filled(pc.index_in(values, value_set=of).combine_chunks(), -1)


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Read a column of numbers without ``to_numpy``, which imports pandas if it is installed.

    Args:
        column: Numbers without a null.

    Returns:
        The numbers, shape ``[N]``.
    """
    return np.from_dlpack(column.combine_chunks())


def _filled(integers: pa.Array, missing: int) -> np.ndarray:
    """Integers with a number in place of each null, int64."""
    scalar = row_indices(np.array([missing]))[0]
    return np.from_dlpack(integers.cast("int64").fill_null(scalar))


def find_keys(column: pa.Array, keys: Sequence[str]) -> np.ndarray:
    """Find keys in a sorted column.

    Args:
        column: Keys in ascending order.
        keys: Keys to find.

    Returns:
        Row of each key, -1 if it is missing, int64, shape ``[n]``.
    """
    import pyarrow as pa

    if len(keys) > max(MAX_BISECTED_KEYS, MAX_BISECTED_SHARE * len(column)):
        return index_in(pa.chunked_array([text_array(keys)]), column)
    rows = [
        bisect_left(range(len(column)), key, key=lambda row: column[row].as_py()) for key in keys
    ]
    is_found = [
        row < len(column) and column[row].as_py() == key
        for row, key in zip(rows, keys, strict=True)
    ]
    return np.where(is_found, rows, -1).astype(np.int64)


def newest_rows(table: pa.Table, count: int, item_filter: ItemFilter) -> np.ndarray:
    """Find the items with the latest times.

    Args:
        table: Table of items in the order of keys.
        count: Maximum number of items.
        item_filter: Conditions on the items.

    Returns:
        Their rows, newest first, equal times in the reverse order of keys.
    """
    rows = (
        np.flatnonzero(matching_rows(table, item_filter)) if item_filter else np.arange(len(table))
    )
    times = item_times(table)[rows]
    if count < len(rows):
        # Of the rows with the last of these times, the last ones are returned.
        limit = np.partition(times, -count)[-count]
        later = np.flatnonzero(times > limit)
        equal = np.flatnonzero(times == limit)
        chosen = np.concatenate([later, equal[len(later) - count :]])
        rows = rows[chosen]
        times = times[chosen]
    return rows[np.lexsort((rows, times))[::-1]]
