"""The curve of an index: what other forms of its vectors cost and find; and indexes of the first numbers of vectors."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.errors import RunError
from visavis.progress import Silent
from visavis.retrieval.bits import Bits, _ones
from visavis.retrieval.building import build_index
from visavis.retrieval.curve import Form, advice, curve_of
from visavis.retrieval.engines import _Encoder
from visavis.retrieval.index import Index
from visavis.retrieval.learning import scores_of
from visavis.retrieval.searching import Query, search
from visavis.runs.folder import open_run, recipe_of


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors():
    """Rows and queries whose first numbers tell most; every query is near one row."""
    random = np.random.default_rng(2)
    rows = unit(random.standard_normal((900, 96)) * 0.97 ** np.arange(96))
    return rows, unit(rows[:40] + 0.3 * unit(random.standard_normal((40, 96)))), list(range(40))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_bits_are_signs_about_the_mean_and_the_nearest_have_the_fewest_others(width):
    random = np.random.default_rng(width)
    rows, query = random.standard_normal((300, width)).astype(np.float32), random.standard_normal(width).astype(np.float32)
    bits = Bits(rows)
    apart = ((rows > rows.mean(0, dtype=np.float64).astype(np.float32)) != (query > 0)).sum(1)
    for most in (1, 7, 300, 999):
        assert bits.nearest(query, most).tolist() == np.argsort(apart, kind="stable")[:most].tolist()
    assert bits.bytes == 8 * -(-width // 64)


def test_bits_are_counted_the_same_without_the_counting_of_newer_numpy(monkeypatch):
    numbers = np.random.default_rng(0).integers(2**63, size=50, dtype=np.uint64) * 2 + 1
    expected = [int(number).bit_count() for number in numbers]
    assert _ones(numbers).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert _ones(numbers).tolist() == expected


def test_exact_forms_find_all_and_what_the_others_find_is_what_numpy_finds(vectors):
    rows, queries, own = vectors
    curve = curve_of(rows, queries, (4, 64), own=own)
    forms = {form.name: form for form in curve.forms}
    scores = queries.astype(np.float64) @ rows.T.astype(np.float64)
    true = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    for form in curve.forms:
        assert form.ms > 0
        if form.width == 96 and not form.rescored:
            assert form.recall_at_10 == 100
            assert form.own_at_10 == 100 * np.mean([row in best for row, best in zip(own, true, strict=True)])
    for width in (4, 64):
        short = np.argsort(-(queries[:, :width].astype(np.float64) @ unit(rows[:, :width]).T.astype(np.float64)), axis=1, kind="stable")
        found = [len({*best} & {*near[:10]}) / 10 for best, near in zip(true.tolist(), short.tolist(), strict=True)]
        assert forms[f"first {width} alone"].recall_at_10 == pytest.approx(100 * np.mean(found))
        [again] = [form for name, form in forms.items() if name.startswith(f"first {width},")]
        found = [len({*best} & {*near[: again.rescored]}) / 10 for best, near in zip(true.tolist(), short.tolist(), strict=True)]
        assert again.recall_at_10 == pytest.approx(100 * np.mean(found))
        assert again.recall_at_10 >= 98
        assert forms[f"first {width} alone"].bytes in (4 * width, 5 * width)
    assert forms["first 64 alone"].recall_at_10 > forms["first 4 alone"].recall_at_10
    assert forms["1 bit"].first_bytes == 16
    assert forms["1 bit"].recall_at_10 >= 98


def test_a_collection_of_fewer_than_ten_is_measured_too(vectors):
    rows, queries, _ = vectors
    assert {form.recall_at_10 for form in curve_of(rows[:3], queries, (64,)).forms} == {100}


PLAIN = Form("float32", 512, 2048, 2048, 0, 100.0, None, 10.0)
EIGHT = replace(PLAIN, name="8 bits", first_bytes=512, bytes=2560, ms=4.0)
BIT = replace(PLAIN, name="1 bit", first_bytes=64, bytes=2112, rescored=64, recall_at_10=98.5, ms=1.0)
SHORT = replace(PLAIN, name="first 64 alone", width=64, first_bytes=256, bytes=256, recall_at_10=60.0, ms=1.0)


@pytest.mark.parametrize(
    ("forms", "sentence"),
    [
        ([PLAIN, replace(EIGHT, ms=11.0)], "Leave it as it is: float32, 10 ms a query, always the true top 10; no form finds 98 % of them faster."),
        ([PLAIN, EIGHT, replace(BIT, recall_at_10=97.9)], "Leave it as it is: 8 bits, 4 ms a query, always the true top 10; no form finds "),
        ([PLAIN, EIGHT, BIT], "Leave it as it is: 8 bits, 4 ms a query, always the true top 10. Certainty costs 3 ms of that: 1 bit, with 64 "),
        ([PLAIN, EIGHT, BIT, SHORT], "Leave it as it is: 8 bits"),
        ([PLAIN, EIGHT, replace(SHORT, recall_at_10=98.0)], "An index with --width 64: 98.0 % of the true top 10, where whole vectors find 100.0 %, by 256 "),
        (
            [replace(PLAIN, own_at_10=50.0), replace(SHORT, own_at_10=49.5), replace(SHORT, width=128, bytes=512, own_at_10=51.0)],
            "An index with --width 64: 49.5 % of the captions' own items among the first 10, where whole vectors find 50.0 %, by 256 bytes ",
        ),
    ],
)  # fmt: skip
def test_the_advice_follows_from_the_numbers(forms, sentence):
    assert advice(forms).startswith(sentence)


@pytest.fixture(scope="module")
def short(tmp_path_factory, scenes):
    """A run whose vectors serve at 16 numbers too."""
    from .conftest import RECIPE

    folder = tmp_path_factory.mktemp("short")
    (folder / "short.toml").write_text(RECIPE)
    return visavis.train(folder / "short.toml", data=scenes, out=folder / "run", overrides={"widths": [16], "phases.0.epochs": 3}).folder


def test_an_index_of_the_first_numbers_finds_by_them_and_goes_on_with_them(short, scenes, tmp_path):
    built = build_index(short, scenes, tmp_path / "index", width=16, progress=Silent())
    index = Index.open(tmp_path / "index")
    keys = sorted(index.items)
    rows, model = index.store.rows(), visavis.load(short)
    whole = model.encode_images([index.locate(index.items[key]).path for key in keys]).numpy()
    assert rows.shape == (70, 16) == (built.items, index.model.encode_texts(["a red circle"]).shape[1])
    assert np.abs(rows - unit(whole[:, :16])).max() < 1e-5
    [best] = search(index, Query(like=((1.0, keys[5]),)), top=1)
    assert best.item.key == keys[5]
    index.store.close()
    assert build_index(short, scenes, tmp_path / "index", progress=Silent()).kept == 70
    with pytest.raises(RunError, match=r"^the width of the index .* is 16, found 64: make another index with --out\.$"):
        build_index(short, scenes, tmp_path / "index", width=64, progress=Silent())


def test_what_is_learned_for_an_index_and_what_other_processes_encode_is_of_its_width(short):
    model, (scores, relevant) = visavis.load(short).narrowed(16), scores_of(short, "train", 16)
    captions = open_run(short, recipe_of(short), Silent())[0].data.split("train").captions
    whole, _ = scores_of(short, "train", 64)
    assert scores.shape == relevant.shape == (len(captions), 60)
    assert not np.allclose(scores, whole, atol=1e-3)
    assert (scores.abs() <= 1 + 1e-5).all()
    assert model.encode_texts(captions[:3]).shape == (3, 16)
    assert _Encoder(str(short), 16, 4.0).model.width == 16
    assert _Encoder(str(short), None, 4.0).model.width is None


def test_only_widths_that_a_model_was_trained_for_are_cut(short, run, scenes, tmp_path):
    with pytest.raises(
        RunError, match=r"^width is 20, but the vectors of this model were trained to serve by their first 16, 64 numbers: "
    ):
        build_index(short, scenes, tmp_path / "index", width=20, progress=Silent())
    with pytest.raises(
        RunError, match=r"were trained to serve as a whole alone: take one of these, or train a model with widths=\[16\]\.$"
    ):
        build_index(run, scenes, tmp_path / "index", width=16, progress=Silent())
    assert not (tmp_path / "index").exists()


def test_the_command_line_shows_the_curve_of_captions_or_of_vectors_with_noise(short, scenes, tmp_path):
    told = CliRunner().invoke(app, ["index", str(short), str(scenes), "--out", str(tmp_path / "set"), "--curve", "--json"])
    assert told.exit_code == 0, told.output
    curve = json.loads(told.stdout)["curve"]
    assert (curve["items"], curve["queries"], curve["asked"]) == (70, 70, "captions of its own items")
    assert {"float32", "1 bit", "first 16 alone"} <= {form["name"] for form in curve["forms"]}
    assert all(0 <= form["own_at_10"] <= 100 for form in curve["forms"])
    shown = CliRunner().invoke(
        app, ["index", str(short), str(scenes / "images"), "--out", str(tmp_path / "photos"), "--width", "16", "--curve"]
    )
    assert shown.exit_code == 0, shown.output
    assert "its own vectors with noise of length 0.3" in shown.output
    assert "first 16" not in shown.output
    assert "own@10" not in shown.output
    assert "curve" not in build_index(short, scenes, tmp_path / "set", progress=Silent()).to_json()
