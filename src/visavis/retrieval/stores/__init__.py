"""Vector stores: LanceDB for folders and object storage, Milvus for clusters."""

from __future__ import annotations

import os
import re
from pathlib import Path

from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import DataError
from visavis.core.memory_budget import MemoryLimit
from visavis.retrieval.stores.base import VectorStore


def open_store(
    uri: str | Path,
    embedding_dim: int | None = None,
    memory: MemoryLimit = None,
    *,
    index_id: str = "",
    late_interaction: MaxSimDirection | None = None,
    verify_files: bool = False,
) -> VectorStore:
    """Open the store of a URI, or create it if ``embedding_dim`` is given.

    Args:
        uri: A folder or ``s3://BUCKET/PATH`` (LanceDB), ``FILE.db`` or
            ``http(s)://HOST:PORT[/COLLECTION]`` (Milvus).
        embedding_dim: Dimension of the vectors of a new store. None: the store must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex. A store that is opened for an index and must exist keeps
            its version.
        late_interaction: Which means of MaxSim a score contains, for items with several vectors in
            LanceDB. None: one vector per item.
        verify_files: Whether to verify the snapshot of LanceDB by checksums, instead of by the
            sizes and times of its files.

    Returns:
        The store.

    Raises:
        DataError: If the URI is invalid, the store does not exist and ``embedding_dim`` is None, or
            Milvus is to store several vectors per item.
        ShapeError: If the store has vectors of another dimension.
        StorageError: If the store cannot be read or written.
        MissingExtra: If the library of the store is not installed.
    """
    from visavis.retrieval.stores.lancedb_store import LanceStore
    from visavis.retrieval.stores.milvus_store import COLLECTION, MilvusStore

    text = str(uri)
    if late_interaction is not None:
        refuse_milvus(text)
    if server := re.fullmatch(r"(https?://[^/?#]+)(?:/(\w*))?", text):
        return MilvusStore(
            server[1], server[2] or COLLECTION, embedding_dim, memory, index_id=index_id
        )
    if re.fullmatch(r"s3://[^/?#]+(/[^?#]+)?", text):
        return LanceStore(
            text,
            embedding_dim,
            memory,
            index_id=index_id,
            late_interaction=late_interaction,
            verify_files=verify_files,
        )
    if not text or "://" in text:
        raise DataError(
            "store: expected a folder, s3://BUCKET/PATH, FILE.db or "
            f"http(s)://HOST:PORT[/COLLECTION], got {text!r}. Pass one of these."
        )
    if text.endswith(".db"):
        return MilvusStore(text, COLLECTION, embedding_dim, memory, index_id=index_id)
    if os.path.exists(text) and not os.path.isdir(text):
        raise DataError(
            f"{text}: expected the folder of a store, got a file. Pass a folder, or a file name "
            "ending in .db for Milvus."
        )
    return LanceStore(
        text,
        embedding_dim,
        memory,
        index_id=index_id,
        late_interaction=late_interaction,
        verify_files=verify_files,
    )


def refuse_milvus(uri: str) -> None:
    """Check that the store of a late-interaction model is not Milvus.

    Args:
        uri: Location of the store, see ``open_store``.

    Raises:
        DataError: If it is Milvus.
    """
    if uri.endswith(".db") or uri.startswith(("http://", "https://")):
        raise DataError(
            f"{uri}: expected a folder or s3://BUCKET/PATH for a model with several vectors per "
            "item, got Milvus. Use LanceDB."
        )
