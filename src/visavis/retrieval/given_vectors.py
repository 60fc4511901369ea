"""Index of vectors that another program has computed. No image goes through a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError
from visavis.data.features.item_vectors import ItemVectors
from visavis.retrieval.query_model import GivenVectors
from visavis.retrieval.source_files import FileCollection, SourceFile


class VectorFile(GivenVectors):
    """Vectors of a file, in place of the model that encodes the items of an index.

    Args:
        path: Parquet file, or ``.npy`` array with its ids, see ``ItemVectors``.
    """

    def __init__(self, path: str | Path):
        self.vectors = ItemVectors.open_items(Path(path))
        super().__init__(str(path), self.vectors.fingerprint)

    def vectors_of(self, files: Sequence[SourceFile]) -> list[Tensor]:
        """Read the vectors of files.

        Args:
            files: Files that have a vector.

        Returns:
            Unit vectors, shape ``[D]`` each.

        Raises:
            DataError: Naming a file whose vector is zero, or has a value that float32 cannot hold.
        """
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
        """Leave out the files of a source that have no vector.

        Args:
            source: Files of a source.

        Returns:
            The files with a vector. ``skipped`` has a sentence for each of the others.

        Raises:
            DataError: If no file has a vector.
        """
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
