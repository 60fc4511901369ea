"""Scale of the scores of an index and match probabilities without labels: laws, simulated collections
with known relevance, and searches of an index.
"""

import importlib
import json
import shutil
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import RunError, SpecError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.retrieval.build import no_match
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.build.no_match import (
    MAX_CONTRADICTED,
    MIN_TEXTS,
    bank_texts,
    calibrate_without_labels,
    fit_null_scores,
)
from visavis.retrieval.calibrate.calibration import (
    MOMENTS,
    NO_MATCH,
    SCALE,
    Calibration,
    Moments,
    NullScores,
    ScoreScale,
    count_within,
)
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.items import NO_FILTER, ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.search_service import QueryKey, ServedIndex
from visavis.retrieval.stores.index_database import IndexDatabase

with pytest.MonkeyPatch.context() as context:
    context.syspath_prepend(Path(__file__).resolve().parents[2] / "studies")
    study = importlib.import_module("no_match")

# The share of irrelevant items above z is e^-z. Scores of unit vectors have a standard deviation of 0.1.
HAND = NullScores((0.0, -1.0, 0.0))
TEXTS, PLACES = bank_texts()


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fit_scores(scores):
    """Fit scores of texts with items: texts are rows, and items unit vectors of the axes."""
    return fit_null_scores(scores, PLACES, np.eye(scores.shape[1]))


def test_bank_texts_are_plain_and_unique():
    assert len(set(TEXTS)) == len(TEXTS) == len(PLACES) > 5 * MIN_TEXTS
    examples = {"a red star in the snow", "an orange car in the sky", "a cat reading in the park"}
    assert examples <= set(TEXTS)
    assert not any(text.startswith(("a o", "an r")) or " a a" in text for text in TEXTS)


def test_null_scores_ignore_rotation_and_scale():
    random = np.random.default_rng(1)
    rotation = np.linalg.qr(random.normal(size=(16, 16)))[0]
    texts, items = unit(random.normal(size=(len(TEXTS), 16))), unit(random.normal(size=(300, 16)))
    scores = np.linspace(0.9, 0.3, 12)[None]

    def probabilities(texts, items, scores):
        null, _ = fit_null_scores(texts, PLACES, items)
        (standardized,) = Moments.of(items).standardize(texts[:1], scores)
        return null.cautious_probabilities(standardized, 300)

    plain = probabilities(texts, items, scores)
    assert 0 < plain[0] < 1
    rotated = probabilities(texts @ rotation, items @ rotation, scores)
    scaled = probabilities(texts, 7 * items, 7 * scores)
    assert rotated == pytest.approx(plain, abs=1e-4)
    assert scaled == pytest.approx(plain, abs=1e-4)


def test_equal_items_are_no_matches():
    texts = unit(np.random.default_rng(5).normal(size=(len(TEXTS), 4)))
    item = texts.mean(0)
    items = np.tile(item, (200, 1))
    null, contradicted = fit_null_scores(texts, PLACES, items)
    (standardized,) = Moments.of(items).standardize(texts[:1], np.full((1, 5), texts[0] @ item))
    assert null.cautious_probabilities(standardized, 200).tolist() == [0.0] * 5
    assert np.isnan(contradicted), "no text has a result"


def test_null_scores_ignore_texts_with_many_matches():
    """Also if a text of each family describes 20 items."""
    random = np.random.default_rng(4)
    scores = random.normal(size=(len(TEXTS), 2000))
    plain, _ = fit_scores(scores)
    for family, text in enumerate(np.unique(PLACES[:, 0], return_index=True)[1]):
        scores[text, 20 * family : 20 * (family + 1)] += 9
    matched, _ = fit_scores(scores)
    standardized = np.array([4.5, 4.0, 3.0])
    expected = plain.cautious_probabilities(standardized, 2000)
    assert matched.cautious_probabilities(standardized, 2000) == pytest.approx(expected, abs=0.02)
    assert expected[0] > 0.9
    assert expected[2] == 0.0


def test_contradicted_results_are_counted():
    random = np.random.default_rng(3)
    noise = random.normal(size=(len(TEXTS), 400)) / 10
    fits, confused = noise.copy(), noise.copy()
    for item, text in enumerate(random.integers(0, len(TEXTS), 12)):
        fits[text, item] += 1
        # The model understands the row of a text only.
        confused[(PLACES[text] == PLACES)[:, :2].all(1), item] += 1
    assert fit_scores(fits)[1] < 0.05
    assert fit_scores(confused)[1] > MAX_CONTRADICTED


def test_study_area_of_hand_computed_values():
    # Of four pairs, three are in the right order, and one is equal.
    assert study.area(np.array([2.0, 3.0]), np.array([1.0, 2.0])) == 3.5 / 4


def test_study_half_pooled_scores_share_half_of_the_scale():
    random = np.random.default_rng(6)
    texts, items = random.normal(size=(3, 4)), random.normal(size=(50, 4)) + 1
    moments, scores = Moments.of(items), texts @ items.T
    pooled = study.HalfPooled(moments, texts[:1]).standardize(texts, scores)
    own = moments.standardize(texts, scores)
    assert pooled[0] == pytest.approx(own[0]), "the only text of the bank"
    (mean, other), (deviation, other_deviation) = scores[:2].mean(1), scores[:2].std(1)
    expected = (scores[1] - (mean + other) / 2) / np.sqrt(deviation * other_deviation)
    assert pooled[1] == pytest.approx(expected)


def test_study_limits_follow_the_relevant_images():
    random = np.random.default_rng(7)
    scores = random.normal(size=(200, 50))
    relevant = np.arange(50) == random.integers(0, 50, 200)[:, None]

    def areas(scores):
        found = study.limits(scores, scores, relevant, [("expected", HAND, scores)])
        return {name: study.area(*values) for name, values in found.items()}

    assert set(areas(scores)) == {"best score", "standardized", "gap", "expected"}
    matched = areas(np.where(relevant, 20.0, scores))
    assert list(matched.values()) == [1.0] * 4
    ignored = areas(np.where(relevant, -20.0, scores))
    assert list(ignored.values()) == [0.5] * 4, "the results are the same"


def set_scale(folder, **values):
    """Give an index a hand-made scale."""
    manifest = read_manifest(folder)
    dim = manifest.embedding_dim
    scale = ScoreScale(manifest.query_model.fingerprint, **values)
    with closing(IndexDatabase(folder)) as database:
        database.set_value(SCALE, json.dumps(asdict(scale)))
        database.set_value(MOMENTS, Moments(np.zeros(dim), 0.01 * np.eye(dim)).to_bytes())


@pytest.fixture(scope="module")
def index_folder(run, scenes, tmp_path_factory):
    """An index with a hand-made scale and no calibration by captions."""
    folder = tmp_path_factory.mktemp("no-match") / "index"
    build_index(run, scenes / "images", folder, progress=NoProgress())
    write_manifest(folder, replace(read_manifest(folder), calibration=None))
    set_scale(folder, tail=HAND.tail)
    return folder


def expected_probabilities(folder, text, results, item_filter=NO_FILTER, *, of_lists=False):
    """Probabilities of results by the hand-made scale, in which all items are rated."""
    with closing(open_index(folder)) as index:
        encoded = index.encode_query(SearchQuery.from_text(text))
        scores = [score for _, score in index.store.search(encoded, 70, item_filter)[0]]
    rate = HAND.cautious_probabilities if of_lists else HAND.match_probabilities
    rated = rate(10 * np.array(scores), len(scores))
    by_score = dict(zip(scores, rated.tolist(), strict=True))
    return [by_score[hit.score] for hit in results]


def test_search_shows_probabilities_and_ends_at_a_level(index_folder):
    text = "a red circle"
    plain = visavis.search(index_folder, text, top=20)
    expected = expected_probabilities(index_folder, text, plain)
    assert [hit.match_probability for hit in plain] == pytest.approx(expected, abs=1e-5)
    assert plain.no_match == (1 - expected[0] > NO_MATCH)
    of_lists = expected_probabilities(index_folder, text, plain, of_lists=True)
    assert plain.weaker == ()
    few = visavis.search(index_folder, text, top=3)
    assert [hit.match_probability for hit in few] == [hit.match_probability for hit in plain[:3]]
    for level in (0.0, 0.3, 0.6, 1.0):
        cut = visavis.search(index_folder, text, top=20, max_irrelevant=level)
        assert [hit.key for hit in (*cut.hits, *cut.weaker)] == [hit.key for hit in plain]
        assert len(cut.hits) == count_within(of_lists, level)
        assert bool(cut.message) == (not cut.hits)
        assert all(hit.irrelevant_share < level or level == 1 for hit in cut.hits)
    worst = visavis.search(index_folder, text, top=70)[-1]
    cut = visavis.search(index_folder, text, filter={"path": worst.name}, max_irrelevant=0.3)
    assert cut.no_match
    assert cut.message.startswith("Probably no match: even the best one is irrelevant")
    # With a filter, fewer irrelevant items are expected.
    found = visavis.search(index_folder, text, top=3, filter={"path": "*1.png"})
    assert [hit.match_probability for hit in found] == pytest.approx(
        expected_probabilities(index_folder, text, found, ItemFilter(path="*1.png")), abs=1e-5
    )


def test_search_command_prints_weaker_results(index_folder):
    def invoke(*options):
        arguments = ["search", str(index_folder), "a red circle", "--max-irrelevant", "0", *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        return result.output

    assert (
        "No result at this level: even the best one is irrelevant with probability 0." in invoke()
    )
    assert "5 weaker results. Show them with --all." in invoke()
    assert "Weaker results:\n 1  " in invoke("--all")
    assert '"weaker"' in invoke("--json")


def test_captions_collection_or_neither_give_the_probabilities(index_folder, run, tmp_path):
    text, folder = "a red circle", tmp_path / "index"
    shutil.copytree(index_folder, folder)
    # By the captions, which have 8 characters or more, nothing is a match.
    captions = Calibration((0.0, 1.0), (0.0, 0.0), 70, 20, 99.0, 0.9, min_length=8)
    write_manifest(folder, replace(read_manifest(folder), calibration=captions))

    def found(text):
        results = visavis.search(folder, text)
        return [hit.match_probability for hit in results], results.no_match

    by_collection = expected_probabilities(folder, text, visavis.search(folder, text))
    assert found(text)[0] == pytest.approx(by_collection, abs=1e-5), "the default"
    write_manifest(folder, replace(read_manifest(folder), probabilities="captions"))
    assert found(text) == ([0.0] * 5, True)
    assert not visavis.search(folder, text, max_irrelevant=0.9).hits
    assert found("a star")[0][0] > 0, "shorter than the captions"
    with closing(open_index(folder)) as index:
        hits = ServedIndex(index).search(QueryKey(text), None, 5, ItemFilter()).hits
    assert [hit.match_probability for hit in hits] == [0.0] * 5
    # Queries without match probabilities are answered as before.
    assert visavis.search(folder, like=visavis.search(folder, text)[0].item.key).hits
    assert visavis.indexes_calibrate(folder, "off") == "off"
    assert found(text) == ([None] * 5, None)
    with pytest.raises(VisavisError, match=r"they are off\. Turn them on with visavis indexes"):
        visavis.search(folder, text, max_irrelevant=0.5)
    # The hand-made scale is replaced, and 70 items are too few.
    for basis in ("captions", "collection"):
        assert visavis.indexes_calibrate(folder, basis) == basis
        assert found(text) == ([0.0] * 5, True)
    with pytest.raises(VisavisError, match="the text or the index is not like the captions, and"):
        visavis.search(folder, "a star", max_irrelevant=0.5)
    write_manifest(folder, replace(read_manifest(folder), calibration=None))
    with pytest.raises(VisavisError, match="the index has 70 items, and 100 are needed"):
        visavis.indexes_calibrate(folder, "collection")
    with pytest.raises(SpecError, match="captions"):
        visavis.indexes_calibrate(folder, "labels")
    with pytest.raises(RunError, match="expected an index"):
        visavis.indexes_calibrate(run, "collection")


def test_max_irrelevant_names_what_is_missing(index_folder, run, tmp_path):
    for level in (-0.1, 1.5, float("nan")):
        with pytest.raises(VisavisError, match="from 0 to 1"):
            visavis.search(index_folder, "a star", max_irrelevant=level)
    with pytest.raises(VisavisError, match="one text"):
        visavis.search(index_folder, "a star", without="red", max_irrelevant=0.1)
    with pytest.raises(VisavisError, match="need an index"):
        visavis.search(run, "a star", max_irrelevant=0.1)
    folder = tmp_path / "index"
    shutil.copytree(index_folder, folder)
    with closing(IndexDatabase(folder)) as database:
        other = json.loads(database.value(SCALE)) | {"fingerprint": "other"}
        database.set_value(SCALE, json.dumps(other))
    with pytest.raises(VisavisError, match=r"not calibrated for its model\. Run visavis indexes"):
        visavis.search(folder, "a star", max_irrelevant=0.1)
    assert visavis.search(folder, "a star")[0].match_probability is None


def test_update_renews_the_scale_after_many_changes(run, scenes, tmp_path):
    source, folder = tmp_path / "photos", tmp_path / "index"
    source.mkdir()
    images = sorted((scenes / "images").iterdir())

    def index(count):
        for image in images[:count]:
            (source / image.name).write_bytes(image.read_bytes())
        build_index(run, source, folder, progress=NoProgress())
        with closing(open_index(folder)) as opened:
            moments = opened.moments
            vectors = opened.store.all_vectors()
            is_new = np.allclose(moments.mean, vectors.mean(0), atol=1e-6)
            return is_new, opened.manifest.num_changed

    assert index(30) == (True, 0)
    assert index(30) == (True, 0)
    assert index(32) == (False, 2), "a few changes keep it"
    assert index(33) == (False, 3)
    assert index(34) == (True, 0), "4 of 34 are more than a tenth"


def test_late_interaction_has_the_scale_of_a_sample(late_run, scenes, tmp_path):
    folder = tmp_path / "index"
    build_index(late_run, scenes / "images", folder, progress=NoProgress())
    # Half of the scores are above the mean.
    captions = Calibration((-1.0, 0.0, 1.0), (0.0, 0.5, 1.0), 70, 20, -9.0, 0.0)
    write_manifest(folder, replace(read_manifest(folder), calibration=captions))
    results = visavis.search(folder, "a red circle", top=70, filter={"duplicates": "show"})
    scores = np.array([hit.score for hit in results])
    standardized = (scores - scores.mean()) / scores.std()
    assert [hit.match_probability for hit in results] == pytest.approx(
        np.interp(standardized, captions.scores, captions.probabilities), abs=1e-4
    )
    write_manifest(folder, replace(read_manifest(folder), calibration=None))
    with pytest.raises(VisavisError, match="items have several vectors"):
        visavis.search(folder, "a red circle", max_irrelevant=0.5)


class HashedTexts:
    """A model whose vector of a text depends on its letters alone, which counts calls."""

    fingerprint, calls = "hashed", 0
    known = staticmethod(lambda text: True)

    def unknown_words(self, text):
        return [] if self.known(text) else ["star"]

    def encode_texts(self, texts):
        self.calls += 1
        rows = [np.random.default_rng(list(text.encode())).standard_normal(64) for text in texts]
        return list(unit(np.array(rows)).astype(np.float32))


def items(count):
    """Items that texts of the bank describe."""
    return np.stack(HashedTexts().encode_texts(TEXTS[:count]))


def test_bank_is_encoded_once_for_each_model(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model = HashedTexts()
    first = calibrate_without_labels(model, items(150))
    assert calibrate_without_labels(model, items(150)) == first
    assert calibrate_without_labels(model, items(151)) != first
    assert model.calls == 1
    model.fingerprint = "other"
    calibrate_without_labels(model, items(150))
    assert model.calls == 2
    for file in (tmp_path / "checks").glob("bank-*"):
        file.write_bytes(b"damaged")
    assert calibrate_without_labels(model, items(150)) == first
    assert model.calls == 3, "a damaged file is replaced"
    calibrate_without_labels(model, items(150))
    assert model.calls == 3


def test_missing_probabilities_have_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model = HashedTexts()
    reason = calibrate_without_labels(model, items(99))
    assert reason == "the index has 99 items, and 100 are needed."
    monkeypatch.setattr(no_match, "MAX_CONTRADICTED", -1.0)
    reason = calibrate_without_labels(model, items(150))
    assert "of the results of test texts fit a contradicting text better" in reason
    monkeypatch.setattr(no_match, "MIN_CHECKED_TEXTS", 10_000)
    assert "hardly any test text finds an item" in calibrate_without_labels(model, items(150))
    model.known = lambda text: "star" not in text
    monkeypatch.setattr(no_match, "MIN_TEXTS", len(TEXTS))
    num_known = sum("star" not in text for text in TEXTS)
    reason = calibrate_without_labels(model, items(150))
    assert f"knows the words of {num_known} test texts only" in reason


def test_server_shows_probabilities(index_folder):
    index = open_index(index_folder)
    app = create_app([ServedIndex(index, needs_probabilities=True)], max_irrelevant=0.3)
    with TestClient(app, "http://localhost") as client:
        assert client.get("/api/info").json()["max_irrelevant"] == 0.3
        one, two = (
            client.get("/api/search", params={"text": text}).json()["sides"][0]["hits"]
            for text in ("a star", "a star -red")
        )
    found = visavis.search(index_folder, "a star", top=len(one))
    expected = [hit.match_probability for hit in found]
    assert [hit["match_probability"] for hit in one] == pytest.approx(expected, abs=1e-4)
    assert {hit["match_probability"] for hit in two} == {None}


def test_server_names_missing_probabilities_at_the_start(run, scenes, tmp_path):
    build_index(run, scenes / "images", tmp_path / "index", progress=NoProgress())
    served = ServedIndex(open_index(tmp_path / "index"), needs_probabilities=True)
    with pytest.raises(VisavisError, match="the index has 70 items, and 100 are needed"):
        served.warm_up()
    with pytest.raises(VisavisError, match="from 0 to 1"):
        visavis.serve(tmp_path / "index", max_irrelevant=2.0)


@pytest.mark.slow
def test_short_texts_with_matches_are_not_called_no_match(tmp_path):
    """A real model, of which about one of ten texts such as "a red star" may be."""
    scenes = write_synthetic_scenes(
        tmp_path / "scenes", num_train=2000, num_val=100, num_test=400, seed=5
    )
    run = tmp_path / "run"
    visavis.train(
        "demo",
        data=scenes,
        out=run,
        overrides=["phases.0.epochs=4", "seed=1", "training.threads=1"],
    )
    lines = map(json.loads, (scenes / "scenes.jsonl").read_text(encoding="utf-8").splitlines())
    things = {
        Path(line["filename"]).name: {
            f"a {thing['color']} {thing['shape']}" for thing in line["scene"]["things"]
        }
        for line in lines
        if line["split"] == "test"
    }
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in things:
        shutil.copy(scenes / "images" / name, photos / name)
    build_index(run, photos, tmp_path / "index", progress=NoProgress())
    with closing(open_index(tmp_path / "index")) as index:
        results = {
            text: search_collection(index, SearchQuery.from_text(text), max_irrelevant=0.3)
            for text in sorted(set().union(*things.values()))
            if sum(text in found for found in things.values()) >= 3
        }
    assert len(results) > 50
    assert np.mean([found.no_match for found in results.values()]) < 0.15
    listed = [text in things[hit.name] for text, found in results.items() for hit in found]
    assert len(listed) > 100
    assert np.mean(listed) > 0.6


def test_index_of_vectors_from_a_file_has_no_probabilities(tmp_path):
    """No model encodes the fixed texts."""
    (tmp_path / "photos").mkdir()
    names = [f"{number:03d}.png" for number in range(110)]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    np.save(tmp_path / "v.npy", np.random.default_rng(0).standard_normal((110, 4)))
    (tmp_path / "v.ids.txt").write_text("\n".join(names))
    visavis.index(tmp_path / "v.npy", tmp_path / "photos", out=tmp_path / "index")
    with closing(open_index(tmp_path / "index")) as opened:
        assert not opened.is_unfinished
        assert opened.scale.reason == "the index has no model for texts."


def test_interrupted_update_renews_the_scale(run, scenes, tmp_path):
    """The changes of the interrupted update are not counted."""
    source, folder = tmp_path / "photos", tmp_path / "index"
    source.mkdir()
    images = sorted((scenes / "images").iterdir())
    for image in images[:30]:
        shutil.copy(image, source)
    build_index(run, source, folder, progress=NoProgress())
    for image in images[30:60]:
        shutil.copy(image, source)
    with (
        patch("visavis.retrieval.build.index_builder.renew_scale", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        build_index(run, source, folder, progress=NoProgress())
    build_index(run, source, folder, progress=NoProgress())
    with closing(open_index(folder)) as opened:
        vectors = opened.store.all_vectors()
        assert len(vectors) == 60
        assert np.allclose(opened.moments.mean, vectors.mean(0), atol=1e-6)
