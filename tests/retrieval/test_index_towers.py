"""Text towers of an index: written with it, shared with the cache, and removed with their models."""

import json
import logging
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

import visavis
from visavis.core.errors import RunError, VisavisError
from visavis.models import text_tower_export
from visavis.models.text_tower import (
    CONFIG_FILE,
    GRAPH_FILE,
    REASON_FILE,
    WEIGHTS_FILE,
    TextTower,
    missing_reason,
    tower_folder,
    verify_tower,
)
from visavis.models.text_tower_export import SWITCH
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.search_service import ServedIndex

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module", autouse=True)
def text_towers(tmp_path_factory):
    """Text towers are on, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SWITCH)
        patch.setenv("VISAVIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def original(few_scenes, tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "index"
    visavis.index(tiny_run, few_scenes, out=folder)
    return folder


@pytest.fixture
def index(original, tmp_path):
    return shutil.copytree(original, tmp_path / "index")


def tower_of(index):
    return tower_folder(index, read_manifest(index).query_model.fingerprint)


def test_index_has_the_text_tower_of_its_model(index, tiny_run):
    model = visavis.load(tiny_run, device="cpu")
    [vector] = TextTower.open(tower_of(index)).encode_texts(["a red circle"])
    np.testing.assert_allclose(vector, model.encode_texts(["a red circle"])[0], atol=1e-6)
    assert missing_reason(index, model.fingerprint) == ""


def test_update_writes_a_lost_or_damaged_tower_again(index, tiny_run, few_scenes):
    folder = tower_of(index)
    for name in os.listdir(folder):
        (folder / name).unlink()
        visavis.index(tiny_run, few_scenes, out=index)
        verify_tower(folder)
    shutil.rmtree(folder)
    visavis.index(tiny_run, few_scenes, out=index)
    verify_tower(folder)


def test_variable_turns_text_towers_off(tiny_run, few_scenes, tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    visavis.index(tiny_run, few_scenes, out=tmp_path / "index")
    folder = tower_of(tmp_path / "index")
    assert not folder.exists()
    assert "was not written yet" in missing_reason(tmp_path / "index", folder.name)


def test_query_models_have_towers_while_the_index_has_them(index, few_scenes, tmp_path_factory):
    first = tower_of(index)
    runs = tmp_path_factory.mktemp("runs")
    data = shutil.copytree(few_scenes, runs / "scenes")
    # New words start at random.
    captions = data / "captions.jsonl"
    captions.write_text(captions.read_text().replace(" red ", " rouge "))
    towers = []
    for seed in (1, 2):
        # A run that was trained again in its folder takes the place of the earlier one.
        shutil.rmtree(runs / "words", ignore_errors=True)
        visavis.train(
            data=data,
            index=index,
            out=runs / "words",
            overrides={"epochs": 1, "seed": seed},
        )
        visavis.indexes_use_queries(index, runs / "words")
        towers.append(tower_of(index))
        verify_tower(towers[-1])
    assert towers[0] != towers[1]
    assert sorted(os.listdir(first.parent)) == sorted([first.name, towers[1].name])
    model = visavis.load(runs / "words", device="cpu")
    [vector] = TextTower.open(towers[1]).encode_texts(["a red circle"])
    np.testing.assert_allclose(vector, model.encode_texts(["a red circle"])[0], atol=1e-6)
    visavis.indexes_restore_queries(index)
    assert tower_of(index) == first
    verify_tower(towers[1])
    shutil.rmtree(towers[1])
    visavis.indexes_use_queries(index, towers[1].name)
    verify_tower(towers[1])
    shutil.rmtree(towers[1])
    visavis.index(read_manifest(index).model, read_manifest(index).source, out=index)
    verify_tower(towers[1])
    # A refusal leaves the query model as it is.
    visavis.indexes_restore_queries(index)
    before = read_manifest(index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_tower_export, "_quantize", lambda _: 1 / 0)
        with pytest.raises(VisavisError, match=r"convert to 8 bits, got an error \(division"):
            visavis.indexes_use_queries(index, towers[1].name, int8=True)
    assert read_manifest(index) == before


def test_tower_in_index_is_the_file_of_the_cache(original):
    folder = tower_of(original)
    cached = tower_folder(visavis.core.storage.cache_folder(), folder.name)
    assert os.path.samefile(folder / WEIGHTS_FILE, cached / WEIGHTS_FILE)


def test_doctor_verifies_the_text_tower(index):
    check = visavis.doctor(index)[-1]
    assert check.ok
    assert check.value.endswith("verified by their checksums, and so is the text tower")
    file = tower_of(index) / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    check = visavis.doctor(index)[-1]
    assert not check.ok
    assert f"checksum mismatch of {WEIGHTS_FILE}" in check.value


def test_doctor_names_the_reason_without_a_text_tower(index):
    folder = tower_of(index)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / REASON_FILE).write_text('"VSE++: expected a graph. The model encodes the texts."')
    check = visavis.doctor(index)[-1]
    assert check.ok
    assert "without a text tower: VSE++: expected a graph." in check.value
    # The model itself is used.
    assert open_index(index).model.tower is None


def test_refused_weights_of_8_bits_leave_the_text_tower(index, monkeypatch):
    folder = tower_of(index)
    before = (folder / GRAPH_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(text_tower_export, "MIN_INT8_COSINE", 1.1)
        with pytest.raises(VisavisError, match=r"cosines of at least 1.1 are needed"):
            visavis.indexes_use_queries(index, "items", int8=True)
    assert (folder / GRAPH_FILE).read_bytes() == before
    monkeypatch.setattr(text_tower_export, "MIN_INT8_COSINE", 0.9)
    visavis.indexes_use_queries(index, "items", int8=True)
    verify_tower(folder)
    assert (folder / GRAPH_FILE).read_bytes() != before
    assert os.listdir(folder.parent) == [folder.name]


def test_tower_of_another_model_is_refused(index):
    config = tower_of(index) / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"fingerprint": "0" * 16}))
    with pytest.raises(RunError, match=r"got a damaged or foreign one \(of the model 0{16}\)"):
        open_index(index)


@pytest.mark.parametrize("fingerprint", ["../../elsewhere", "0" * 15, "G" * 16, "0" * 17])
def test_fingerprints_are_16_digits(fingerprint, index):
    write_manifest(index, replace(read_manifest(index), fingerprint=fingerprint))
    with pytest.raises(RunError, match="fingerprint: expected a valid value"):
        read_manifest(index)


def test_served_index_keeps_its_model_after_an_update(index, caplog):
    shutil.rmtree(tower_of(index))
    with caplog.at_level(logging.DEBUG):
        served = ServedIndex(open_index(index))
    assert "no text tower, the model encodes texts: it was not written yet" in caplog.text
    write_manifest(index, replace(served.index.manifest, num_changed=1))
    # Another model would not be found.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visavis.retrieval.open_index._load_model", None)
        newer = served.newer()
    assert newer.index.model is served.index.model
    newer.index.close()
    served.index.close()
