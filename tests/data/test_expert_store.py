"""Expert stores: round trip, padding and masks, and errors for malformed vectors."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch

from visavis.core.encoded import concatenate, seconds_part
from visavis.core.errors import DataError, RefusedOverwrite
from visavis.core.storage import DamagedCacheError
from visavis.data.features import expert_store as experts_file
from visavis.data.features.expert_store import ExpertStore, create_expert_store

WIDTHS = {"appearance": 3, "sound": 2}


@pytest.fixture
def items(generator):
    """Two experts of different lengths. The second item has no sound, the third has one vector of
    it.
    """

    def draw(*shape):
        return torch.randn(*shape, generator=generator).numpy()

    return {
        "a": {"appearance": draw(4, 3), "sound": draw(2, 2)},
        "b": {"appearance": draw(1, 3), "sound": None},
        "c": {"appearance": draw(7, 3), "sound": draw(2)},
        "d": {"appearance": draw(2, 3)},
    }


@pytest.fixture
def folder(tmp_path, items):
    folder = tmp_path / "store"
    with create_expert_store(folder, WIDTHS) as store:
        for name, parts in items.items():
            store.append(name, parts)
    return folder


def test_expert_store_round_trip(folder, items):
    store = ExpertStore.open(folder)
    assert (len(store), store.names, store.embedding_dims, store.embedding_dim) == (
        4,
        ("appearance", "sound"),
        WIDTHS,
        5,
    )
    assert store.lengths("appearance").tolist() == [4, 1, 7, 2]
    assert store.lengths("sound").tolist() == [2, 0, 1, 0]
    read = store.read(store.rows(["c", "b", "a"]))
    assert read.vectors["appearance"].shape == (3, 7, 3)
    assert read.mask["appearance"].sum(1).tolist() == [7, 1, 4]
    assert read.mask["sound"].sum(1).tolist() == [1, 0, 2]
    for row, name in enumerate(["c", "b", "a"]):
        for expert, width in WIDTHS.items():
            given, mask = items[name][expert], read.mask[expert][row]
            stored = np.empty((0, width)) if given is None else given.reshape(-1, width)
            assert np.array_equal(read.vectors[expert][row][mask].numpy(), stored)
            assert not read.vectors[expert][row][~mask].any()


@pytest.fixture
def timed(tmp_path, items):
    """The same store with times of two items."""
    with create_expert_store(tmp_path / "timed", WIDTHS) as store:
        for name, parts in items.items():
            store.append(
                name,
                parts,
                {"appearance": np.arange(len(parts["appearance"])) + 0.5} if name in "ac" else None,
            )
    return tmp_path / "timed"


def test_expert_store_reads_seconds_of_the_vectors_it_reads(timed, folder):
    store = ExpertStore.open(timed, max_length=3)
    read = store.read(store.rows(["c", "b"]))
    assert list(read.vectors) == ["appearance", "sound", seconds_part("appearance")]
    assert read.vectors[seconds_part("appearance")][..., 0].tolist() == [
        [0.5, 2.5, 4.5],
        [-1, 0, 0],
    ]
    assert torch.equal(read.mask[seconds_part("appearance")], read.mask["appearance"])
    plain = ExpertStore.open(folder)
    assert list(plain.read([0]).vectors) == ["appearance", "sound"]
    assert plain.sha256 != store.sha256


def test_expert_store_of_earlier_version_opens(folder):
    """Its experts.json has no timed_experts, and its checksum is the same."""
    contents = json.loads((folder / "experts.json").read_text())
    assert contents.pop("timed_experts") == []
    (folder / "experts.json").write_text(json.dumps(contents))
    assert ExpertStore.open(folder).sha256 == contents["sha256"]


def test_expert_store_detects_changed_seconds(timed):
    file = timed / "appearance.seconds.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCacheError, match="checksum mismatch"):
        ExpertStore.open(timed)
    file.unlink()
    with pytest.raises(DamagedCacheError, match=r"lacks appearance\.seconds\.npy"):
        ExpertStore.open(timed)


@pytest.mark.parametrize(
    "seconds", [np.zeros(3), np.array([0.0, np.nan]), np.array(["a", "b"]), np.array([0.0, 1e300])]
)
def test_expert_writer_reports_malformed_seconds(tmp_path, seconds):
    with (
        pytest.raises(
            DataError,
            match="x: seconds of expert sound: expected a finite number for each of 2 vectors",
        ),
        create_expert_store(tmp_path / "store", WIDTHS) as store,
    ):
        store.append("x", {"sound": np.zeros((2, 2))}, {"sound": seconds})


def test_expert_store_finds_items_by_file_name(folder):
    store = ExpertStore.open(folder)
    assert store.rows(["clips/c.mp4", "b"]).tolist() == [2, 1]


def test_expert_store_read_of_missing_expert_has_length_one(folder):
    store = ExpertStore.open(folder)
    parts = store.read(store.rows(["b", "d"]))
    assert parts.vectors["sound"].shape == (2, 1, 2)
    assert not parts.mask["sound"].any()
    joined = concatenate([parts, store.read(store.rows(["a"]))])
    assert joined.mask["sound"].sum(1).tolist() == [0, 0, 2]


def test_expert_store_max_length_reads_evenly_spaced_vectors(folder, items):
    store = ExpertStore.open(folder, ["appearance"], max_length=3)
    read = store.read(store.rows(["c", "a", "b"]))
    assert list(read.vectors) == ["appearance"]
    assert store.embedding_dim == 3
    assert read.mask["appearance"].sum(1).tolist() == [3, 3, 1]
    assert np.array_equal(
        read.vectors["appearance"][0].numpy(), items["c"]["appearance"][[0, 2, 4]]
    )


def test_expert_store_reports_unknown_items_and_experts(folder):
    with pytest.raises(DataError, match=r"no features of 'z'"):
        ExpertStore.open(folder).rows(["z"])
    with pytest.raises(DataError, match=r"has no expert 'sounds': did you mean sound\?"):
        ExpertStore.open(folder, ["sounds"])


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (
            {"sound": np.zeros((2, 3))},
            (
                r"x: expert sound: expected numbers of shape \[length, 2\], got float64 of shape \[2, "
                r"3\]\."
            ),
        ),
        ({"sound": np.array(["a", "b"])}, r"got <U1 of shape \[2\]"),
        ({"sound": np.array([[1.0, np.nan]])}, "x: expert sound: expected finite values"),
        ({"sound": np.array([[1.0, 1e300]])}, "x: expert sound: expected finite values"),
        ({"sond": np.zeros((2, 2))}, r"x: unknown expert 'sond': did you mean sound\?"),
    ],
)
def test_expert_writer_reports_malformed_vectors(tmp_path, parts, sentence):
    with (
        pytest.raises(DataError, match=sentence),
        create_expert_store(tmp_path / "store", WIDTHS) as store,
    ):
        store.append("x", parts)
    assert not list(tmp_path.iterdir())


def test_expert_writer_refuses_duplicate_items(tmp_path):
    with (
        pytest.raises(DataError, match="duplicate item 'x'"),
        create_expert_store(tmp_path / "store", WIDTHS) as store,
    ):
        store.append("x", {})
        store.append("x", {})


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a.offsets", "a\0"])
def test_expert_writer_refuses_invalid_names(tmp_path, name):
    with (
        pytest.raises(DataError, match="expected a name of letters"),
        create_expert_store(tmp_path / "store", {name: 2}),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_expert_writer_never_overwrites(folder, items):
    with (
        pytest.raises(RefusedOverwrite, match="already exists"),
        create_expert_store(folder, WIDTHS),
    ):
        pass
    assert ExpertStore.open(folder).items == list(items)


def test_expert_store_reports_other_folders(tmp_path):
    with pytest.raises(
        DataError, match=r"is not a store of experts: expected a file experts\.json"
    ):
        ExpertStore.open(tmp_path)


@pytest.mark.parametrize("file", ["experts.json", "sound.npy", "sound.offsets.npy"])
def test_expert_store_detects_flipped_byte(folder, file):
    content = bytearray((folder / file).read_bytes())
    content[-3 if file == "experts.json" else -1] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(DamagedCacheError):
        ExpertStore.open(folder)


def test_large_expert_store_is_hashed_again_after_a_change(folder, monkeypatch):
    monkeypatch.setattr("visavis.core.storage.cache.MAX_BYTES_HASHED_AT_OPEN", 0)
    ExpertStore.open(folder)
    hashed = []
    digest = experts_file._Expert.digest
    monkeypatch.setattr(
        experts_file._Expert, "digest", lambda self: hashed.append(1) or digest(self)
    )
    ExpertStore.open(folder)
    assert not hashed
    os.utime(folder / "sound.npy", ns=(1, 1))
    ExpertStore.open(folder)
    assert len(hashed) == 2
    copied = shutil.copytree(folder, folder.parent / "copy")
    content = bytearray((copied / "sound.npy").read_bytes())
    content[-1] ^= 1
    (copied / "sound.npy").write_bytes(content)
    with pytest.raises(DamagedCacheError, match="checksum mismatch"):
        ExpertStore.open(copied)


def test_expert_store_of_only_missing_experts(tmp_path):
    with create_expert_store(tmp_path / "store", WIDTHS) as store:
        store.append("x", {})
    assert not ExpertStore.open(tmp_path / "store").read([0]).mask["appearance"].any()


def test_expert_writer_reports_full_disk(small_disk):
    from visavis.core.errors import StorageError

    with (
        pytest.raises(StorageError, match="cannot be written"),
        create_expert_store(small_disk / "store", {"a": 100_000}) as store,
    ):
        for number in range(100):
            store.append(str(number), {"a": np.zeros((1, 100_000))})


def test_expert_store_refuses_shared_rows(tmp_path):
    with create_expert_store(tmp_path / "store", {"face": 2}) as store:
        for number, item in enumerate(("sub/c0", "3", "clip.mp4")):
            store.append(item, {"face": np.full((1, 2), number)})
    store = ExpertStore.open(tmp_path / "store")
    assert store.rows(["sub/c0.mp4", "other/3.mp4", "clip.mp4"]).tolist() == [0, 1, 2]
    with pytest.raises(
        DataError, match=r"a/3\.mp4 and b/3\.mp4 would both read the features '3' of .*store"
    ):
        store.check_distinct_rows(["clip.mp4", "a/3.mp4", "a/3.mp4", "b/3.mp4"])
