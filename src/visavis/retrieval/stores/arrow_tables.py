"""Items and vectors as Arrow tables: schema, conversion and filters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from visavis.retrieval.items import IndexItem, ItemFilter, metadata_tag
from visavis.retrieval.stores.base import CHECKSUM, row_checksum
from visavis.retrieval.stores.vector_sets import ItemVectors, VectorSets

if TYPE_CHECKING:
    import pyarrow as pa

NUM_VECTORS = "num_vectors"
"""Column of the number of vectors of an item, in tables of items with several vectors."""


def arrow_schema(embedding_dim: int, *, several: bool) -> pa.Schema:
    """Return the columns of a table of items.

    Args:
        embedding_dim: Dimension of the vectors.
        several: Whether an item has several vectors.

    Returns:
        The schema.
    """
    import pyarrow as pa

    texts = [pa.field(name, pa.string(), nullable=False) for name in ("key", "path", "kind", "content", "dhash")]
    integers = [pa.field(name, pa.int64(), nullable=False) for name in ("size", "modified_ns", CHECKSUM)]
    times = [pa.field(name, pa.float64()) for name in ("start", "end")]
    vector = pa.list_(pa.float32(), embedding_dim)
    vectors = [(NUM_VECTORS, pa.int64()), ("vector", pa.list_(vector))] if several else [("vector", vector)]
    return pa.schema([*texts, *integers, *times, ("metadata", pa.list_(pa.string())), *vectors])


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
    schema = arrow_schema(values.shape[1], several=several)
    rows = [item.to_row() for item in items]
    rows = [
        row | {CHECKSUM: row_checksum(index_id, row, vector), NUM_VECTORS: len(vector)} for row, vector in zip(rows, vectors, strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema=schema.remove(schema.get_field_index("vector")))
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    if isinstance(vectors, VectorSets):
        column = pa.ListArray.from_arrays(pa.array(vectors.offsets, pa.int32()), column)
    return table.append_column(schema.field("vector"), column)


def flat_values(column: pa.Array) -> np.ndarray:
    """Read the numbers of a column of vectors.

    Args:
        column: One or several vectors per row.

    Returns:
        All numbers in their order, float32.
    """
    import pyarrow as pa

    while pa.types.is_nested(column.type):
        column = column.flatten()
    values: np.ndarray = column.to_numpy()
    return values


def matching_rows(table: pa.Table, item_filter: ItemFilter) -> np.ndarray:
    """Apply a filter to a table.

    Args:
        table: Table of items.
        item_filter: Conditions on the items.

    Returns:
        Whether each item matches, bool, shape ``[N]``.
    """
    import pyarrow.compute as pc

    mask = np.ones(len(table), bool)
    if item_filter.path:
        escaped = re.sub(r"([\\%_])", r"\\\1", item_filter.path)
        mask &= pc.match_like(table["path"], escaped.replace("*", "%").replace("?", "_")).to_numpy()
    if item_filter.kind is not None:
        mask &= pc.equal(table["kind"], item_filter.kind).to_numpy()
    if item_filter.after is not None:
        mask &= table["modified_ns"].to_numpy() >= item_filter.after
    if item_filter.before is not None:
        mask &= table["modified_ns"].to_numpy() < item_filter.before
    if item_filter.metadata:
        tags = table["metadata"].combine_chunks()
        tag_rows, tag_texts = pc.list_parent_indices(tags).to_numpy(), pc.list_flatten(tags)
        for name, value in item_filter.metadata.items():
            has_value = np.zeros(len(table), bool)
            has_value[tag_rows[pc.equal(tag_texts, metadata_tag(name, value)).to_numpy(zero_copy_only=False)]] = True
            mask &= has_value
    return mask
