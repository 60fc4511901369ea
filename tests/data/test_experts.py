"""Experts on disk: what goes in comes out, padded and masked; what does not fit is one sentence."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from visavis.data import experts as experts_file
from visavis.data.experts import ExpertStore, new_experts
from visavis.errors import DataError, RefusedOverwrite
from visavis.storage import Damaged
from visavis.types import concatenate

WIDTHS = {"appearance": 3, "sound": 2}


@pytest.fixture
def items(generator):
    """Two experts of unequal lengths; the second item has no sound, the third one vector of it."""

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
    with new_experts(folder, WIDTHS) as store:
        for name, parts in items.items():
            store.append(name, parts)
    return folder


def test_what_went_in_comes_out(folder, items):
    store = ExpertStore.open(folder)
    assert (len(store), store.names, store.widths, store.width) == (4, ("appearance", "sound"), WIDTHS, 5)
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


def test_an_item_is_known_by_the_name_of_its_file_too(folder):
    store = ExpertStore.open(folder)
    assert store.rows(["clips/c.mp4", "b"]).tolist() == [2, 1]


def test_an_expert_that_no_row_has_keeps_a_place_to_mask(folder):
    store = ExpertStore.open(folder)
    parts = store.read(store.rows(["b", "d"]))
    assert parts.vectors["sound"].shape == (2, 1, 2)
    assert not parts.mask["sound"].any()
    joined = concatenate([parts, store.read(store.rows(["a"]))])
    assert joined.mask["sound"].sum(1).tolist() == [0, 0, 2]


def test_a_bound_on_length_keeps_evenly_spaced_vectors(folder, items):
    store = ExpertStore.open(folder, ["appearance"], longest=3)
    read = store.read(store.rows(["c", "a", "b"]))
    assert list(read.vectors) == ["appearance"]
    assert store.width == 3
    assert read.mask["appearance"].sum(1).tolist() == [3, 3, 1]
    assert np.array_equal(read.vectors["appearance"][0].numpy(), items["c"]["appearance"][[0, 2, 4]])


def test_unknown_items_and_experts_are_named(folder):
    with pytest.raises(DataError, match=r"no features of 'z'"):
        ExpertStore.open(folder).rows(["z"])
    with pytest.raises(DataError, match=r"has no expert 'sounds': did you mean sound\?"):
        ExpertStore.open(folder, ["sounds"])


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"sound": np.zeros((2, 3))}, r"x: the expert sound is float64 of shape \[2, 3\], expected numbers of shape \[length, 2\]\."),
        ({"sound": np.array(["a", "b"])}, r"x: the expert sound is <U1 of shape \[2\]"),
        ({"sound": np.array([[1.0, np.nan]])}, "x: the expert sound holds values that are not finite"),
        ({"sound": np.array([[1.0, 1e300]])}, "x: the expert sound holds values that are not finite"),
        ({"sond": np.zeros((2, 2))}, r"x has an expert 'sond' that the store was not told of: did you mean sound\?"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(tmp_path, parts, sentence):
    with pytest.raises(DataError, match=sentence), new_experts(tmp_path / "store", WIDTHS) as store:
        store.append("x", parts)
    assert not list(tmp_path.iterdir())


def test_an_item_comes_once(tmp_path):
    with pytest.raises(DataError, match="'x' comes twice"), new_experts(tmp_path / "store", WIDTHS) as store:
        store.append("x", {})
        store.append("x", {})


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a.offsets", "a\0"])
def test_an_expert_is_named_as_a_file_can_be(tmp_path, name):
    with pytest.raises(DataError, match="cannot be stored"), new_experts(tmp_path / "store", {name: 2}):
        pass
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(folder, items):
    with pytest.raises(RefusedOverwrite, match="already exists"), new_experts(folder, WIDTHS):
        pass
    assert ExpertStore.open(folder).items == list(items)


def test_a_folder_without_experts_says_so(tmp_path):
    with pytest.raises(DataError, match=r"is no store of experts: it has no experts\.json"):
        ExpertStore.open(tmp_path)


@pytest.mark.parametrize("file", ["experts.json", "sound.npy", "sound.offsets.npy"])
def test_a_flipped_byte_is_found(folder, file):
    content = bytearray((folder / file).read_bytes())
    content[-3 if file == "experts.json" else -1] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(Damaged):
        ExpertStore.open(folder)


def test_a_missing_file_is_named(folder):
    (folder / "sound.npy").unlink()
    with pytest.raises(
        DataError, match=r"store lacks sound\.npy of the expert sound: bring back a whole copy of the folder, or convert anew\."
    ):
        ExpertStore.open(folder)


def test_a_large_store_is_hashed_once_and_again_when_a_file_changed(folder, monkeypatch):
    monkeypatch.setattr(experts_file, "HASHED_AT_OPENING", 0)
    ExpertStore.open(folder)
    hashed = []
    digest = experts_file._Expert.digest
    monkeypatch.setattr(experts_file._Expert, "digest", lambda self: hashed.append(1) or digest(self))
    ExpertStore.open(folder)
    assert not hashed
    os.utime(folder / "sound.npy", ns=(1, 1))
    ExpertStore.open(folder)
    assert len(hashed) == 2
    copied = shutil.copytree(folder, folder.parent / "copy")
    content = bytearray((copied / "sound.npy").read_bytes())
    content[-1] ^= 1
    (copied / "sound.npy").write_bytes(content)
    with pytest.raises(Damaged, match="do not have their checksum"):
        ExpertStore.open(copied)


def test_a_store_of_missing_experts_only_can_be_read(tmp_path):
    with new_experts(tmp_path / "store", WIDTHS) as store:
        store.append("x", {})
    assert not ExpertStore.open(tmp_path / "store").read([0]).mask["appearance"].any()


def test_a_full_disk_is_said(small_disk):
    from visavis.errors import StorageError

    with pytest.raises(StorageError, match="cannot be written"), new_experts(small_disk / "store", {"a": 100_000}) as store:
        for number in range(100):
            store.append(str(number), {"a": np.zeros((1, 100_000))})


def test_items_go_by_their_names_with_folders_and_no_two_share_a_row(tmp_path):
    with new_experts(tmp_path / "store", {"face": 2}) as store:
        for number, item in enumerate(("sub/c0", "3", "clip.mp4")):
            store.append(item, {"face": np.full((1, 2), number)})
    store = ExpertStore.open(tmp_path / "store")
    assert store.rows(["sub/c0.mp4", "other/3.mp4", "clip.mp4"]).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"a/3\.mp4 and b/3\.mp4 would both read what .*store holds of '3': give features of each"):
        store.refuse_shared(["clip.mp4", "a/3.mp4", "a/3.mp4", "b/3.mp4"])
