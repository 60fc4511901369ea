"""Vector stores: LanceDB for folders and object storage, Milvus for clusters."""

from __future__ import annotations

import os
import re
from pathlib import Path

from visavis.errors import DataError
from visavis.memory_budget import MemoryLimit
from visavis.retrieval.stores.base import VectorStore


def open_store(uri: str | Path, embedding_dim: int | None = None, memory: MemoryLimit = None, *, index_id: str = "") -> VectorStore:
    """Open the store of a URI, or create it if ``embedding_dim`` is given.

    Args:
        uri: A folder or ``s3://BUCKET/PATH`` (LanceDB), ``FILE.db`` or ``http(s)://HOST:PORT[/COLLECTION]`` (Milvus).
        embedding_dim: Dimension of the vectors of a new store. None: the store must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex. A store that is opened for an index and must exist keeps its version.

    Returns:
        The store.

    Raises:
        DataError: If the URI is invalid, or the store does not exist and ``embedding_dim`` is None.
        ShapeError: If the store has vectors of another dimension.
        StorageError: If the store cannot be read or written.
        MissingExtra: If the library of the store is not installed.
    """
    from visavis.retrieval.stores.lancedb_store import LanceStore
    from visavis.retrieval.stores.milvus_store import COLLECTION, MilvusStore

    text = str(uri)
    if server := re.fullmatch(r"(https?://[^/?#]+)(?:/(\w*))?", text):
        return MilvusStore(server[1], server[2] or COLLECTION, embedding_dim, memory, index_id=index_id)
    if re.fullmatch(r"s3://[^/?#]+(/[^?#]+)?", text):
        return LanceStore(text, embedding_dim, memory, index_id=index_id)
    if not text or "://" in text:
        raise DataError(f"store: expected a folder, s3://BUCKET/PATH, FILE.db or http(s)://HOST:PORT[/COLLECTION], got {text!r}.")
    if text.endswith(".db"):
        return MilvusStore(text, COLLECTION, embedding_dim, memory, index_id=index_id)
    if os.path.exists(text) and not os.path.isdir(text):
        raise DataError(f"{text}: expected the folder of a store, got a file. Pass a folder, or a file name ending in .db for Milvus.")
    return LanceStore(text, embedding_dim, memory, index_id=index_id)
