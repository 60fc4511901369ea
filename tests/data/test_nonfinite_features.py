"""Scan of stored features for NaN and infinity, and its cache."""

from __future__ import annotations

import os

import numpy as np
import pytest

from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features import arrays
from visavis.data.features.arrays import ROWS_PER_READ, ArrayFeatures, first_nonfinite_row
from visavis.data.image_file import Image

ITEMS = ROWS_PER_READ + 7


@pytest.fixture
def reads(monkeypatch):
    """Number of rows that were read of stored features."""
    counts = []
    read = arrays._read_rows
    monkeypatch.setattr(arrays, "SCAN_BYTES", 0)  # more than one read
    monkeypatch.setattr(
        arrays, "_read_rows", lambda array, rows: counts.append(len(rows)) or read(array, rows)
    )
    return counts


def write(kind, folder, values):
    """Stored features of n images, opened as in a new process."""
    if kind == "array":
        np.save(folder / "features.npy", values)
        images = tuple(Image(f"{i}.jpg", "train") for i in range(len(values)))
        return ArrayFeatures.open(
            folder / "features.npy",
            Dataset("d", images, ("x",) * len(values), np.arange(len(values))),
        )
    np.save(folder / "train_ims.npy", values[:-3])
    np.save(folder / "dev_ims.npy", values[-3:])
    (folder / "train_caps.txt").write_text("x\n" * (len(values) - 3))
    (folder / "dev_caps.txt").write_text("x\n" * 3)
    assert len(open_dataset(folder).images) == len(values)
    return ArrayFeatures.open_precomp(folder)


@pytest.mark.parametrize("kind", ["array", "precomp"])
def test_first_nonfinite_row_is_cached_until_a_change(kind, tmp_path, reads):
    values = np.ones((ITEMS, 2), np.float32)
    assert first_nonfinite_row(write(kind, tmp_path, values)) is None
    assert sum(reads) == ITEMS
    features = write(kind, tmp_path, values)
    times = {file: file.stat().st_mtime_ns for file in features.files}
    assert first_nonfinite_row(features) is None
    assert sum(reads) == 2 * ITEMS, "written again: another time"
    assert first_nonfinite_row(features) is None
    assert sum(reads) == 2 * ITEMS
    values[ITEMS - 1, 1] = np.nan
    features = write(kind, tmp_path, values)
    for file, time in times.items():
        os.utime(file, ns=(time, time + 1))
    assert first_nonfinite_row(features) == ITEMS - 1
    assert sum(reads) == 3 * ITEMS
    assert first_nonfinite_row(features) == ITEMS - 1, "what is broken is remembered, too"
    assert sum(reads) == 3 * ITEMS


def test_first_nonfinite_row_detects_changed_size(tmp_path, reads):
    first_nonfinite_row(write("array", tmp_path, np.ones((5, 2), np.float32)))
    time = (tmp_path / "features.npy").stat().st_mtime_ns
    features = write("array", tmp_path, np.full((6, 2), np.inf, np.float32))
    os.utime(tmp_path / "features.npy", ns=(time, time))
    assert first_nonfinite_row(features) == 0
    assert reads == [5, 6]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_first_nonfinite_row_reads_every_dtype(tmp_path, dtype, value):
    values = np.ones((9, 2), dtype)
    with np.errstate(over="ignore"):
        values[4, 1] = value  # 1e300 is infinite in float32, which models read
    assert first_nonfinite_row(write("array", tmp_path, values)) == 4
