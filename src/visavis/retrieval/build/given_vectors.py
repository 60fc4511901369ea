"""Index of vectors that another program has computed. No image goes through a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError, RunError
from visavis.data.features.item_vectors import ItemVectors
from visavis.models.retriever import Retriever
from visavis.retrieval.source_files import FileCollection, SourceFile

MIN_SIDE = 64
"""Shorter side to which images without a model are decoded, in pixels."""


class VectorFile(Retriever):
    """Vectors of a file, in place of the model that encodes the items of an index.

    Args:
        path: Parquet file, or ``.npy`` array with its ids, see ``ItemVectors``.
    """

    def __init__(self, path: str | Path):
        self.file = str(path)
        self.vectors = ItemVectors.open_items(Path(path))
        # Vectors are compared by their cosines.
        self.matcher: Any = SimpleNamespace(
            late_interaction=None, matryoshka_dims=(), score_is_cosine=True, rerank_top_k=0
        )
        # Files are decoded for their perceptual hashes only.
        visual = SimpleNamespace(crops=1, full_decoding=False)
        self.processor: Any = SimpleNamespace(
            visual_spec=visual, converts_single_images=False, min_side=MIN_SIDE, items=None
        )

    @property
    def device(self) -> torch.device:
        """The CPU, as nothing is encoded."""
        return torch.device("cpu")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the vectors."""
        return self.vectors.fingerprint

    def unknown_words(self, text: str) -> list[str]:
        """Raise RunError, as a file of vectors has no model."""
        raise RunError(f"{self.file}: expected a model of texts, got a file of vectors.")

    def with_full_decoding(self) -> Retriever:
        """Raise RunError, as no image is encoded."""
        raise RunError(
            f"--full-decoding: expected none, because {self.file} holds the vectors, and no image "
            "is encoded. Remove it."
        )

    def vectors_of(self, files: Sequence[SourceFile]) -> list[Tensor]:
        """Read the unit vectors of files that have one, ``[D]`` each."""
        rows = self.vectors.rows(file.path for file in files)
        vectors = self.vectors.read(rows).vectors
        assert isinstance(vectors, Tensor)
        # A search finds by directions. Zero has none.
        has_direction = vectors.isfinite().all(1) & vectors.any(1)
        if not has_direction.all():
            row = int((~has_direction).nonzero()[0, 0])
            got = "zero" if bool(vectors[row].isfinite().all()) else "a value that is not"
            raise DataError(
                f"{self.file}: expected vectors of finite float32 values other than zero, got "
                f"{got} for {files[row].path}. Write its vector again, or leave it out."
            )
        return list(unit_rows(vectors))

    def keep_files(self, source: FileCollection) -> FileCollection:
        """Leave out the files of a source that have no vector, with a sentence in ``skipped``."""
        missing = [file.path for file in source.files if file.path not in self.vectors]
        if source.files and len(missing) == len(source.files):
            raise DataError(
                f"{self.file}: expected ids that are paths below {source.root}, such as "
                f"{missing[0]!r}, got others, such as {self.vectors.first_name!r}. Pass the "
                "folder that the ids are relative to."
            )
        return replace(
            source,
            files=tuple(file for file in source.files if file.path in self.vectors),
            listed=tuple(
                file
                for file in source.listed
                if file.path in self.vectors or file.path in source.companions
            ),
            skipped=(*source.skipped, *(f"{path}: no vector in {self.file}." for path in missing)),
            num_skipped=source.num_skipped + len(missing),
        )
