"""Corrections of the text search of an index: exact results, updates, and the check."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.core.errors import DataError, RunError, SpecError, VisavisError
from visavis.losses.corrections import CATALOG, CandidateBias, parse_correction
from visavis.retrieval.build.correction_builder import BANK_FILE, bank_scores
from visavis.retrieval.calibrate.index_correction import read_correction_file, write_correction_file
from visavis.retrieval.index_folder import CORRECTION_FILE
from visavis.retrieval.items import NO_FILTER, ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.stores.base import VectorSets

from ..matching import mentions

TEXTS = ["a red circle", "a blue star above a square", "two green triangles"]


@pytest.fixture(scope="module")
def built(run, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "index"
    visavis.index(run, scenes / "images", out=folder)
    visavis.indexes_correct(folder, "CSLS(k=3)")
    return folder


@pytest.fixture
def index(built, tmp_path):
    """An index with a correction over training captions that is on, whatever the check reports."""
    return switch_on(shutil.copytree(built, tmp_path / "index"))


@pytest.fixture
def update(run, scenes, index):
    return partial(visavis.index, run, scenes / "images", out=index)


def switch_on(folder):
    for name in (CORRECTION_FILE, BANK_FILE):
        arrays, settings = read_correction_file(folder / name)
        write_correction_file(folder / name, replace(settings, is_on=True), arrays)
    return folder


def found(folder, text, item_filter=NO_FILTER, top=10):
    index = open_index(folder)
    query = SearchQuery.from_text(text)
    results = search_collection(index, query, top, item_filter, group_duplicates=False)
    return [(hit.key, hit.score) for hit in results]


def expected(folder, text, spec, end="", top=10):
    """Results from the whole matrix of bank and items whose keys have an end."""
    index = open_index(folder)
    arrays, _ = read_correction_file(folder / BANK_FILE)
    items = torch.from_numpy(np.array(index.store.all_vectors()))
    bias = parse_correction(spec).fit([torch.from_numpy(arrays["rows"]) @ items.T])
    keys = index.store.table().keys()
    rows = [row for row, key in enumerate(keys) if key.endswith(end)]
    hubs = None if bias.is_hub is None else bias.is_hub[rows]
    scores = torch.from_numpy(np.stack(index.model.encode_texts([text]))) @ items[rows].T
    scores = CandidateBias(bias.bias[rows], hubs).correct(scores)[0]
    order = scores.argsort(descending=True).tolist()[:top]
    return [(keys[rows[i]], scores[i].item()) for i in order]


def check_equal(results, reference):
    assert [key for key, _ in results] == [key for key, _ in reference]
    np.testing.assert_allclose(
        *([score for _, score in each] for each in (results, reference)), atol=1e-6
    )


@pytest.mark.parametrize("kind", CATALOG)
def test_search_equals_the_corrected_matrix(index, kind):
    spec = repr(kind())
    report = visavis.indexes_correct(index, kind())
    assert report.correction.startswith(f"{spec} over 120 captions of train (fixed-bank): o")
    switch_on(index)
    for text in TEXTS:
        for top in (1, 10, 100):
            check_equal(found(index, text, top=top), expected(index, text, spec, top=top))
        check_equal(found(index, text, ItemFilter("*1.png")), expected(index, text, spec, "1.png"))


def test_deep_results_reach_the_top(index):
    """A large bias of all first results must not hide an item far below them."""
    arrays, settings = read_correction_file(index / CORRECTION_FILE)
    last = found(index, TEXTS[0], top=100)[-1][0]
    keys = open_index(index).store.table().keys()
    bias = np.full(len(keys), 5.0)
    bias[keys.index(last)] = -5
    write_correction_file(index / CORRECTION_FILE, settings, arrays | {"bias": bias})
    assert found(index, TEXTS[0], top=1)[0][0] == last


def test_only_single_texts_are_corrected(index):
    opened = open_index(index)
    queries = {
        "text": SearchQuery.from_text(TEXTS[0]),
        "excluded": SearchQuery(texts=((1.0, TEXTS[0]), (-0.5, "a star"))),
        "like": SearchQuery(like=((1.0, found(index, TEXTS[0])[0][0]),)),
    }
    results = {name: search_collection(opened, query) for name, query in queries.items()}
    assert [name for name, result in results.items() if result.correction] == ["text"]
    assert "fixed-bank" in results["text"].to_json()["correction"]
    assert any("fixed-bank" in note for note in results["text"].tables()[0].notes)


def test_corrected_scores_have_no_match_probability(index):
    assert open_index(index).manifest.calibration is not None
    with pytest.raises(VisavisError, match="the scores are corrected"):
        open_index(index).match_scale(None)
    results = search_collection(open_index(index), SearchQuery.from_text(TEXTS[0]))
    assert results.no_match is None
    assert {hit.match_probability for hit in results} == {None}


def test_update_computes_biases_of_new_items(run, index, scenes, tmp_path):
    shutil.copytree(scenes / "images", tmp_path / "images")
    first = min((tmp_path / "images").iterdir())
    first.rename(first.with_name("moved.png"))
    Image.new("RGB", (48, 48), "red").save(tmp_path / "images" / "new.png")
    before = read_correction_file(index / CORRECTION_FILE)[0]
    report = visavis.indexes_move(index, tmp_path / "images")
    assert report.correction.startswith("CSLS(k=3) over 120 captions of train (fixed-bank): on.")
    after = read_correction_file(index / CORRECTION_FILE)[0]
    assert len(after["bias"]) == len(before["bias"]) + 1
    for text in TEXTS:
        check_equal(found(index, text), expected(index, text, "CSLS(k=3)"))


def test_unchanged_index_keeps_its_biases(update, index):
    before = (index / CORRECTION_FILE).stat().st_mtime_ns
    assert update().correction is not None
    assert (index / CORRECTION_FILE).stat().st_mtime_ns == before


def test_stale_biases_are_not_used(index, caplog):
    """As after an update that was killed between the items and their biases."""
    arrays, settings = read_correction_file(index / CORRECTION_FILE)
    arrays["digest"][1] += 1
    write_correction_file(index / CORRECTION_FILE, settings, arrays)
    assert open_index(index).correction is None
    assert "does not cover all items" in caplog.text
    settings = replace(settings, fingerprint="other")
    write_correction_file(index / CORRECTION_FILE, settings, arrays)
    assert open_index(index).correction is None
    assert "another query model" in caplog.text


def test_lost_biases_are_computed_again(update, index):
    (index / CORRECTION_FILE).write_bytes(b"damaged")
    with pytest.raises(RunError, match=CORRECTION_FILE):
        found(index, TEXTS[0])
    update()
    check_equal(found(index, TEXTS[0]), expected(index, TEXTS[0], "CSLS(k=3)"))


def test_none_removes_a_correction(index):
    report = visavis.indexes_correct(index, "none")
    assert report.correction is None
    assert not (index / CORRECTION_FILE).exists()
    assert not (index / BANK_FILE).exists()
    assert open_index(index).match_scale(None) is not None


def test_harmful_bank_is_off(index, tmp_path):
    """One query a hundred times: the images that fit it best lose all their queries."""
    (tmp_path / "bank.txt").write_text("a red circle\n" * 100)
    report = visavis.indexes_correct(index, "InvertedSoftmax", bank=tmp_path / "bank.txt")
    assert "over 100 texts (fixed-bank): off. Text to image, 120 captions of train: -" in (
        report.correction
    )
    assert open_index(index).correction is None
    results = search_collection(open_index(index), SearchQuery.from_text(TEXTS[0]))
    assert results.correction == ""


@pytest.mark.slow
def test_correction_of_pretrained_model_needs_captions(dual_encoders, scenes, tmp_path):
    """Without captions nothing shows whether it helps, so it stays off."""
    (tmp_path / "bank.txt").write_text("a red circle\na blue star\n")
    bank = tmp_path / "bank.txt"
    model = dual_encoders / "clip"
    visavis.index(model, scenes / "images", out=tmp_path / "index")
    with pytest.raises(RunError, match=mentions("--bank", "pretrained", ".txt")):
        visavis.indexes_correct(tmp_path / "index", "CSLS")
    report = visavis.indexes_correct(tmp_path / "index", "CSLS", bank=bank)
    assert "(fixed-bank): off. Its effect cannot be checked" in report.correction
    # With captions, the check ranks all items for them.
    bank.write_text("a red circle\na blue star\n")
    visavis.index(model, write_captioned(tmp_path, scenes), out=tmp_path / "captioned")
    report = visavis.indexes_correct(tmp_path / "captioned", "CSLS", bank=bank)
    assert "Text to image, 120 captions of items: " in report.correction


def write_captioned(tmp_path, scenes):
    """120 items with captions: each image twice, under other names."""
    folder = tmp_path / "captioned images"
    folder.mkdir()
    lines = ["image,caption"]
    for number, file in enumerate(sorted((scenes / "images").iterdir())[:60]):
        for copy in "ab":
            shutil.copy(file, folder / f"{copy}-{file.name}")
            lines.append(f"{copy}-{file.name},a caption of number {number} {copy}")
    (folder / "captions.csv").write_text("\n".join(lines))
    return folder / "captions.csv"


def test_late_interaction_is_corrected(late_run, scenes, tmp_path):
    folder = tmp_path / "index"
    visavis.index(late_run, scenes / "images", out=folder)
    visavis.indexes_correct(folder, "CSLS(k=3)")
    switch_on(folder)
    index = open_index(folder)
    items = index.store.all_vectors()
    bank = index.model.encode_texts(["a red circle", "a star"])
    [block] = bank_scores(items, VectorSets.from_arrays(bank), index.manifest.late_interaction)
    for text, scores in zip(["a red circle", "a star"], block.tolist(), strict=True):
        [plain] = index.store.search(index._encode_parts(SearchQuery.from_text(text), None), 100)
        keys = index.store.table().keys()
        expected_scores = dict(zip(keys, scores, strict=True))
        assert dict(plain) == pytest.approx(expected_scores, abs=1e-6)
    bias = read_correction_file(folder / CORRECTION_FILE)[0]["bias"]
    corrected = dict(zip(keys, (np.array(scores) - bias).tolist(), strict=True))
    assert dict(found(folder, "a star", top=100)) == pytest.approx(corrected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"correction": "CSL"}, SpecError, ["CSLS"]),
        ({"correction": "none", "bank": "train"}, VisavisError, ["--bank", "correction"]),
        (
            {"correction": "CSLS", "bank": "empty.txt"},
            DataError,
            ["empty.txt", "one text per line"],
        ),
    ],
)
def test_index_rejects_wrong_corrections(tmp_path, monkeypatch, options, kind, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(kind, match=mentions(*words)):
        visavis.indexes_correct("index", **options)


def test_report_of_an_index_names_its_correction(update):
    report = update()
    assert "fixed-bank" in json.dumps(report.to_json()["correction"])
