"""Vectors of the items of an index, on which a text side is trained."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from visavis.core.errors import RunError
from visavis.retrieval.index_folder import open_index_store, read_manifest
from visavis.retrieval.stores.base import VectorSets


def read_index_vectors(folder: Path) -> tuple[list[str], np.ndarray, str]:
    """Read the vectors of an index.

    Args:
        folder: Folder of the index.

    Returns:
        The path of each image or clip (the key of a moment), the vectors, shape ``[N, D]``, and the
        fingerprint of the model that made them.

    Raises:
        RunError: If the index cannot be read, is unfinished, or has several vectors per item.
    """
    manifest = read_manifest(folder)
    if manifest.digest is None:
        raise RunError(
            f"{folder}: expected a complete index, got an unfinished one. Complete it with visavis "
            "index."
        )
    with closing(open_index_store(folder, manifest)) as store:
        vectors, keys = store.all_vectors(), store.table()["key"].to_pylist()
    if isinstance(vectors, VectorSets):
        raise RunError(
            f"{folder}: expected an index with one vector per item, got one of late interaction. "
            "Train on an index of another model."
        )
    # The key of an image or of a whole clip is its path.
    return keys, vectors, manifest.fingerprint
