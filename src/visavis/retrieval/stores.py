"""Which store a URI names."""

from __future__ import annotations

import re
from pathlib import Path

from visavis.errors import DataError
from visavis.memory import Memory
from visavis.retrieval.store import VectorStore


def open_store(uri: str | Path, width: int | None = None, memory: Memory = None) -> VectorStore:
    """A folder or ``s3://BUCKET/PATH`` is a table of LanceDB; ``FILE.db`` and ``http(s)://HOST:PORT[/COLLECTION]`` are Milvus.

    width: of the vectors of a store that is made where none is; None: one is expected. Raises DataError for a URI that is none of
    these, and as the stores do.
    """
    from visavis.retrieval.lance import LanceStore
    from visavis.retrieval.milvus import COLLECTION, MilvusStore

    text = str(uri)
    if served := re.fullmatch(r"(https?://[^/?#]+)(?:/(\w*))?", text):
        return MilvusStore(served[1], served[2] or COLLECTION, width, memory)
    if re.fullmatch(r"s3://[^/?#]+(/[^?#]+)?", text) or ("://" not in text and text and not text.endswith(".db")):
        if "://" not in text and Path(text).exists() and not Path(text).is_dir():
            raise DataError(f"{text} is a file, expected the folder of an index, or a name that ends in .db for Milvus.")
        return LanceStore(text, width, memory)
    if "://" not in text and text:
        return MilvusStore(text, COLLECTION, width, memory)
    raise DataError(f"{text!r} names no store: expected a folder, s3://BUCKET/PATH, FILE.db or http(s)://HOST:PORT[/COLLECTION].")
