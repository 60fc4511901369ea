"""Export of an index to a Parquet file, for other programs, and of its votes to JSON lines."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.errors import RunError, requires_extra
from visavis.core.memory_budget import chunk_slices
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Table
from visavis.data.feedback.records import Judgment
from visavis.data.feedback.sources import read_feedback, write_feedback
from visavis.retrieval.index_folder import open_index_store, read_manifest
from visavis.retrieval.stores.base import VectorSets

BATCH_ITEMS = 2**14
"""Items that are written at once, a row group of the file."""


@dataclass(frozen=True)
class ExportedIndex(Result):
    """A Parquet file with the items of an index.

    Attributes:
        file: The file.
        num_items: Number of items.
        embedding_dim: Dimension of the vectors.
    """

    file: str
    num_items: int
    embedding_dim: int

    def tables(self) -> list[Table]:
        """Return one sentence."""
        content = f"{self.num_items:,} items with vectors of {self.embedding_dim} numbers"
        return [Table(notes=(f"{self.file}: {content}.",))]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


def export_index(
    folder: Path, out: Path, store: str | Path | None, progress: Progress
) -> ExportedIndex:
    """Write the items of an index and their vectors to a new Parquet file."""
    with requires_extra("large", "a Parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    storage.require_new_file(out)
    manifest = read_manifest(folder)
    texts = ("key", "path", "kind", "content", "metadata")
    schema = pa.schema(
        [
            *((name, pa.string()) for name in texts),
            *((name, pa.int64()) for name in ("size", "modified_ns")),
            *((name, pa.float64()) for name in ("start", "end")),
            ("vector", pa.list_(pa.float32(), manifest.embedding_dim)),
        ]
    )
    with closing(open_index_store(folder, manifest, confirmed=store)) as opened:
        items, vectors = opened.all_items()
        if isinstance(vectors, VectorSets):
            raise RunError(
                f"{folder}: expected an index with one vector per item, got one of late interaction. "
                "Export an index of another model."
            )
        with storage.atomic_file(out) as part, pq.ParquetWriter(part, schema) as writer:
            for chunk in chunk_slices(len(items), BATCH_ITEMS):
                rows = [
                    {
                        **vars(item),
                        "metadata": json.dumps(dict(item.metadata), ensure_ascii=False),
                        "vector": vector,
                    }
                    for item, vector in zip(items[chunk], vectors[chunk], strict=True)
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema))
                progress.update("items", chunk.stop, len(items), 0.0)
    return ExportedIndex(str(out), len(items), manifest.embedding_dim)


@dataclass(frozen=True)
class ExportedVotes(Result):
    """A file with the votes of an index.

    Attributes:
        file: The file.
        num_votes: Number of votes, without undone ones.
        num_preferences: Number of choices between two indexes.
    """

    file: str
    num_votes: int
    num_preferences: int

    def tables(self) -> list[Table]:
        """Return one sentence."""
        content = f"{self.num_votes:,} votes and {self.num_preferences:,} preferences"
        return [Table(notes=(f"{self.file}: {content}.",))]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


def export_votes(folder: Path, out: Path) -> ExportedVotes:
    """Write the votes and preferences of an index to a new file."""
    storage.require_new_file(out)
    # Not by the manifest, so that the votes of a damaged index can be saved.
    records = read_feedback(folder)
    num_votes = sum(isinstance(record, Judgment) for record in records)
    write_feedback(out, records)
    return ExportedVotes(str(out), num_votes, len(records) - num_votes)
