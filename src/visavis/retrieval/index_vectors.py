"""Vectors of the items of an index, on which a text side is trained.

The package registers this format of item vectors, so importing it is cheap.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from visavis.core.errors import RunError
from visavis.data.features.vector_formats import NamedVectors, VectorFormat
from visavis.retrieval.items import DATABASE


def read_index_vectors(folder: Path) -> NamedVectors:
    """Read the vectors of an index."""
    from visavis.retrieval.index_folder import open_index_store, read_manifest
    from visavis.retrieval.stores.base import VectorSets

    manifest = read_manifest(folder)
    if manifest.digest is None:
        raise RunError(
            f"{folder}: expected a complete index, got an unfinished one. Complete it with visavis "
            "index."
        )
    with closing(open_index_store(folder, manifest)) as store:
        items, vectors = store.all_items()
    if isinstance(vectors, VectorSets):
        raise RunError(
            f"{folder}: expected an index with one vector per item, got one of late interaction. "
            "Train on an index of another model."
        )
    # The key of an image or of a whole clip is its path.
    return NamedVectors(
        [item.key for item in items], vectors, [folder / DATABASE], manifest.fingerprint
    )


INDEX = VectorFormat(lambda path: os.path.isfile(path / DATABASE), read_index_vectors)
