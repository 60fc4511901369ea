"""Thousands of small shards: one cached record, and time that grows with their number alone."""

from __future__ import annotations

import io
import os
import time

import pytest
from PIL import Image

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data import shard_stream
from visavis.data.dataset_check import check_dataset
from visavis.data.formats import arrow_tables
from visavis.data.shard_stream import ShardStream

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
pq = pytest.importorskip("pyarrow.parquet")


def write_tables(folder, count):
    for number in range(count):
        content = io.BytesIO()
        Image.new("RGB", (4, 4), (number % 256, number // 256, 3)).save(content, "PNG")
        columns = {
            "image": [{"bytes": content.getvalue(), "path": f"{number}.png"}],
            "caption": [f"caption {number}"],
        }
        pq.write_table(pa.table(columns), folder / f"train-{number:05d}.parquet")


def test_counts_of_shards_are_one_record(tmp_path, monkeypatch):
    write_tables(tmp_path, 20)
    counted, done = [], []
    count_samples = shard_stream.count_samples
    monkeypatch.setattr(
        shard_stream,
        "count_samples",
        lambda file, **options: counted.append(file.name) or count_samples(file, **options),
    )
    before = (
        set(os.listdir(storage.cache_folder() / "checks"))
        if (storage.cache_folder() / "checks").exists()
        else set()
    )
    for _ in range(2):
        stream = ShardStream.open(
            str(tmp_path / "*.parquet"),
            max_open=2,
            on_progress=lambda *numbers: done.append(numbers),
        )
        assert [shard.name for shard in stream.shards] == [
            f"train-{number:05d}.parquet, row group 0" for number in range(20)
        ]
    assert sorted(counted) == [f"train-{number:05d}.parquet" for number in range(20)]
    assert done == [(number, 20) for number in range(1, 21)]
    assert len(set(os.listdir(storage.cache_folder() / "checks")) - before) == 1
    # A changed shard is counted again, and the counts before an error are kept.
    counted.clear()
    pq.write_table(
        pa.table({"image": [b"a", b"b"], "caption": ["a", "b"]}), tmp_path / "train-00007.parquet"
    )
    (tmp_path / "train-00012.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"train-00012\.parquet cannot be read"):
        ShardStream.open(str(tmp_path / "*.parquet"), max_open=2)
    assert sorted(counted) == ["train-00007.parquet", "train-00012.parquet"]
    (tmp_path / "train-00012.parquet").unlink()
    assert len(ShardStream.open(str(tmp_path / "*.parquet"), max_open=2)) == 20
    assert len(counted) == 2


def test_cached_row_groups_are_counted_exactly(tmp_path, monkeypatch):
    write_tables(tmp_path, 8)
    cache = arrow_tables._GroupCache()
    monkeypatch.setattr(arrow_tables, "_GROUPS", cache)
    monkeypatch.setattr(arrow_tables, "CACHED_BYTES", 400)
    assert check_dataset(tmp_path).ok
    assert cache.num_bytes == sum(column.nbytes for column in cache.columns.values()) <= 400
    assert len(cache.columns) > 1


@pytest.mark.slow
def test_three_thousand_tables_are_checked_in_seconds(tmp_path):
    write_tables(tmp_path, 3000)
    start = time.process_time()
    assert len(ShardStream.open(str(tmp_path / "*.parquet"), max_open=8)) == 3000
    assert time.process_time() - start < 6
    start = time.process_time()
    assert check_dataset(tmp_path).ok
    assert time.process_time() - start < 20
