"""Feature stores: round trip, resuming after a kill, and errors."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RefusedOverwrite
from visavis.data.dataset import Dataset
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.features.store import FeatureStore, FeatureWriter, StoreDescription
from visavis.data.image_file import Image

POOLED = StoreDescription("visual", "pooled", "encoder", "0" * 16, (3,), 4, "data")
KEYS = ["a", "b", "c", "d"]
VALUES = torch.arange(12.0).view(4, 3)


def dataset(count: int = 4) -> Dataset:
    return Dataset(
        "tiny",
        tuple(Image(f"{i}.jpg", "test" if i % 2 else "train") for i in range(count)),
        (),
        np.empty(0, np.int64),
    )


def write(
    folder: Path,
    description: StoreDescription,
    keys: list[str],
    items: list[Encoded],
    lengths: np.ndarray | None = None,
) -> FeatureStore:
    writer = FeatureWriter.open(folder, description, keys, lengths)
    for item in items:
        writer.append(item)
    return writer.finish()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (10, 3), (10, 2, 3)])
def test_feature_store_reads_rows_in_given_order(tmp_path, shape):
    values = torch.randn(4, *shape).half().float()
    store = write(
        tmp_path / "store",
        replace(POOLED, shape=shape),
        KEYS,
        [Encoded(values[:3]), Encoded(values[3:])],
    )
    assert len(store) == 4
    assert store.embedding_dim == 3
    rows = store.rows(["d", "a", "d"])
    assert torch.equal(store.read(rows).vectors, values[[3, 0, 3]])
    assert store.read(torch.tensor([1])).vectors.dtype == torch.float32


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_feature_store_round_trip_of_words(lengths, batch, data):
    words = [torch.randn(length, 2).half().float() for length in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    items = [
        Encoded(padded[i : i + batch], mask[i : i + batch]) for i in range(0, len(words), batch)
    ]
    description = replace(
        POOLED, modality="text", granularity="words", shape=(2,), num_items=len(words)
    )
    rows = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=8))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        store = write(
            Path(folder) / "store",
            description,
            [str(i) for i in range(len(words))],
            items,
            np.array(lengths),
        )
        read = store.read(np.array(rows, dtype=np.int64))
    assert read.mask.sum(1).tolist() == [lengths[row] for row in rows]
    assert read.vectors.shape[1] == max((lengths[row] for row in rows), default=0)
    for row, vectors, held in zip(rows, read.vectors, read.mask, strict=True):
        assert torch.equal(vectors[held], words[row])
        assert not vectors[~held].any()


def test_feature_writer_resumes_after_kill(tmp_path):
    killed = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    killed.append(Encoded(VALUES[:2]))
    killed.save()
    killed.append(Encoded(torch.full((1, 3), 7.0)))  # written, but not noted: computed again
    del killed
    with pytest.raises(DataError, match=r"is unfinished: expected 4 rows, got 2\."):
        FeatureStore.open(tmp_path / "store")
    resumed = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    assert resumed.rows_written == 2
    resumed.append(Encoded(VALUES[2:]))
    resumed.finish()
    write(tmp_path / "whole", POOLED, KEYS, [Encoded(VALUES)])
    for name in ("features.json", "keys.json", "vectors.npy"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "store" / name).read_bytes()


def test_feature_writer_never_overwrites_other_features(tmp_path):
    FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    with pytest.raises(
        RefusedOverwrite, match=r'contains other features: its encoder is "encoder", not "other"'
    ):
        FeatureWriter.open(tmp_path / "store", replace(POOLED, encoder="other"), KEYS)
    with pytest.raises(RefusedOverwrite, match=r"contains features of other images or captions"):
        FeatureWriter.open(tmp_path / "store", POOLED, KEYS[::-1])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RefusedOverwrite, match=r"already exists"):
        FeatureWriter.open(tmp_path / "mine", POOLED, KEYS)


def test_feature_writer_ignores_package_versions(tmp_path):
    FeatureWriter.open(
        tmp_path / "store",
        replace(POOLED, preprocessing={"crop": (2, 2)}, versions={"torch": "1"}),
        KEYS,
    )
    FeatureWriter.open(
        tmp_path / "store",
        replace(POOLED, preprocessing={"crop": [2, 2]}, versions={"torch": "2"}),
        KEYS,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
def test_feature_writer_refuses_values_beyond_float16(tmp_path, bad):
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    with pytest.raises(
        DataError, match=r"encoder: features near row 0 of .* are not finite in float16"
    ):
        writer.append(Encoded(torch.full((1, 3), bad)))


def test_feature_store_errors(tmp_path):
    store = write(tmp_path / "store", POOLED, KEYS, [Encoded(VALUES)])
    with pytest.raises(DataError, match=r"has no features of 'e'"):
        store.rows(["a", "e"])
    with pytest.raises(DataError, match=r"is not a feature store: expected a file features.json"):
        FeatureStore.open(tmp_path)
    (tmp_path / "features.json").write_text("{}")
    with pytest.raises(DataError, match=r"does not describe a feature store of this version"):
        FeatureStore.open(tmp_path)


def test_array_features_use_rows_of_whole_data(tmp_path):
    np.save(tmp_path / "array.npy", VALUES.numpy().astype(np.float16))
    whole = ArrayFeatures.open(tmp_path / "array.npy", dataset())
    assert (len(whole), whole.embedding_dim) == (4, 3)
    assert torch.equal(whole.read(whole.rows(["3.jpg", "0.jpg"])).vectors, VALUES[[3, 0]])
    part = ArrayFeatures.open(tmp_path / "array.npy", dataset().split("test"))
    assert part.rows(["1.jpg", "3.jpg"]).tolist() == [1, 3]
    with pytest.raises(DataError, match=r"has no features of '0.jpg'"):
        part.rows(["0.jpg"])


def test_array_features_refuse_other_data(tmp_path):
    np.save(tmp_path / "array.npy", VALUES.numpy())
    with pytest.raises(
        DataError,
        match=r"expected 5 rows of features, one for each image of tiny in its order, got shape \(4, 3\)",
    ):
        ArrayFeatures.open(tmp_path / "array.npy", dataset(5))
    with pytest.raises(DataError, match=r"expected at least 6 rows"):
        ArrayFeatures.open(tmp_path / "array.npy", dataset(6).split("test"))
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(DataError, match=r"is not a readable .npy of numbers"):
        ArrayFeatures.open(tmp_path / "text.npy", dataset())
