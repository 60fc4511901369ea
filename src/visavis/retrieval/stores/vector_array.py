"""An array in a ``.npy`` file to which rows are appended.

The database of the index names the number of its rows. Rows beyond are the rest of a killed append,
and the next one overwrites them, so that readers never see a part of a change.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.memory_budget import chunk_slices

HASHED_BYTES = 2**24
"""Bytes that are hashed at once."""


@dataclass(frozen=True)
class VectorArray:
    """The file of an array.

    Attributes:
        path: The file.
        width: Numbers of a row. None: rows are single numbers.
        dtype: Type of the numbers.
    """

    path: Path
    width: int | None
    dtype: str

    def _shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if self.width is None else (num_rows, self.width)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return np.dtype(self.dtype).itemsize * (1 if self.width is None else self.width)

    def num_bytes(self, num_rows: int) -> int:
        """Return the size of the file with some rows."""
        return len(self._header(num_rows)) + num_rows * self.row_bytes

    def _header(self, num_rows: int) -> bytes:
        """Header of the file, which has the same length for any number of rows."""
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file,
            {
                "descr": np.dtype(self.dtype).str,
                "fortran_order": False,
                "shape": self._shape(num_rows),
            },
        )
        return file.getvalue()

    def append(self, num_rows: int, values: np.ndarray) -> None:
        """Write rows after the first rows, and flush them to the disk."""
        values = np.ascontiguousarray(values, self.dtype)
        with storage.storage_errors(self.path):
            is_new = not os.path.exists(self.path)
            storage.create_folder(self.path.parent, flush=is_new)
            disk = storage.current_disk()
            # Not "ab", which cannot overwrite the rest of a killed append.
            with disk.open(self.path, "w+b" if is_new else "r+b") as file:
                header = self._header(num_rows + len(values))
                file.seek(len(header) + num_rows * self.row_bytes)
                file.write(values.data if values.size else b"")
                disk.sync_file(file)
                # Our readers do not need the header. Other programs open the file by it.
                file.seek(0)
                file.write(header)
                disk.sync_file(file)
            if is_new:
                # The name of the file, before a transaction refers to it.
                disk.sync_path(self.path.parent)

    def map(self, num_rows: int) -> np.ndarray:
        """Map the first rows of the file."""
        if not num_rows:
            return np.empty(self._shape(0), self.dtype)
        with storage.storage_errors(self.path):
            return np.memmap(
                self.path, self.dtype, "r", len(self._header(num_rows)), self._shape(num_rows)
            )

    def content_hash(self, first: int, stop: int) -> str:
        """Hash some rows."""
        digest = hashlib.sha256()
        rows = self.map(stop)[first:]
        for chunk in chunk_slices(len(rows), max(HASHED_BYTES // self.row_bytes, 1)):
            digest.update(rows[chunk].data)
        return digest.hexdigest()

    def stat(self) -> tuple[int, int]:
        """Return size in bytes and time of change in ns."""
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns
