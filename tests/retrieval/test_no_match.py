"""Match probabilities without labels: laws, hand-computed values, simulated collections with known
relevance, and searches of an index.
"""

import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.retrieval import no_match
from visavis.retrieval.index_builder import build_index
from visavis.retrieval.index_folder import Index, read_manifest, write_manifest
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.no_match import (
    MAX_CONTRADICTED,
    MIN_TEXTS,
    bank_texts,
    calibrate_without_labels,
    fit_null_scores,
    recall_null_scores,
)
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import Calibration, NullScores, count_within, irrelevant_shares
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.search_service import QueryKey, ServedIndex
from visavis.retrieval.stores.base import StoreDigest

# The share of irrelevant items above z is e^-z. Scores of unit vectors have a standard deviation of 0.1.
HAND = NullScores(np.zeros(1), np.full((1, 1), 0.01), (0.0, -1.0, 0.0))
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


def test_null_scores_of_hand_computed_values():
    (standardized,) = HAND.standardize(np.array([[2.0]]), np.array([[0.4, 0.2, -0.4]]))
    assert standardized == pytest.approx([2.0, 1.0, -2.0])
    assert HAND.share_above(standardized) == pytest.approx([np.exp(-2), np.exp(-1), 1.0])
    # The normal distribution is the least: 0.0013499 is its share above 3.
    low = replace(HAND, tail=(-50.0, 0.0, 0.0))
    assert low.share_above(np.array([3.0])) == pytest.approx([0.0013499], rel=1e-4)
    # 0.01, 0.2 and 2 irrelevant items are expected above the results.
    standardized = np.log(100 / np.array([0.01, 0.2, 2.0]))
    first, second = (np.e * p * np.log(1 / p) for p in (0.01, 0.2))
    probabilities = HAND.match_probabilities(standardized, 100).tolist()
    assert probabilities == pytest.approx([3 / (3 + first), 3 / (3 + second), 0.0])
    assert probabilities == pytest.approx([0.9599, 0.7742, 0.0], abs=1e-4)
    assert irrelevant_shares(probabilities) == pytest.approx([0.0401, 0.1329, 0.4220], abs=1e-4)
    assert [count_within(probabilities, level) for level in (0.04, 0.12, 0.2, 0.5)] == [0, 1, 2, 3]


def test_match_probability_falls_with_rank_and_size():
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = np.sort(random.uniform(-2, 12, 30))[::-1]
        small, large = (HAND.match_probabilities(scores, count).tolist() for count in (50, 5000))
        assert small == sorted(small, reverse=True)
        assert all(0 <= b <= a <= 1 for a, b in zip(small, large, strict=True))
        # Later results do not change earlier ones, so that pages agree.
        assert HAND.match_probabilities(scores[:7], 50).tolist() == small[:7]
        assert count_within(small, 0) == 0
        assert count_within(small, 1) == 30
        counts = [count_within(small, level) for level in np.linspace(0, 1, 21)]
        assert counts == sorted(counts)


def test_null_scores_ignore_rotation_and_scale():
    random = np.random.default_rng(1)
    rotation = np.linalg.qr(random.normal(size=(16, 16)))[0]
    texts, items = unit(random.normal(size=(len(TEXTS), 16))), unit(random.normal(size=(300, 16)))
    scores = np.linspace(0.9, 0.3, 12)[None]

    def probabilities(texts, items, scores):
        null, _ = fit_null_scores(texts, PLACES, items)
        return null.match_probabilities(null.standardize(texts[:1], scores), 300)

    plain = probabilities(texts, items, scores)
    rotated = probabilities(texts @ rotation, items @ rotation, scores)
    scaled = probabilities(texts, 7 * items, 7 * scores)
    assert rotated == pytest.approx(plain, abs=1e-4)
    assert scaled == pytest.approx(plain, abs=1e-4)
    null, _ = fit_null_scores(texts, PLACES, items)
    shifted = null.standardize(texts[:1], texts[:1] @ items.T)
    assert (shifted.mean(), shifted.std()) == pytest.approx((0, 1), abs=1e-4)


def test_equal_items_are_no_matches():
    texts = unit(np.random.default_rng(5).normal(size=(len(TEXTS), 4)))
    item = texts.mean(0)
    null, contradicted = fit_null_scores(texts, PLACES, np.tile(item, (200, 1)))
    standardized = null.standardize(texts[:1], np.full((1, 5), texts[0] @ item))
    assert null.match_probabilities(standardized, 200).tolist() == [[0.0] * 5]
    assert np.isnan(contradicted), "no text has a result"


@pytest.mark.parametrize("matches", [1, 5])
def test_cut_off_keeps_its_level_in_a_simulation(matches):
    """Items that match score 7 standard deviations higher."""
    random = np.random.default_rng(2)
    null, _ = fit_scores(random.normal(size=(len(TEXTS), 2000)))
    irrelevant, kept, empty = [], [], []
    for _ in range(1000):
        scores = random.normal(size=2000)
        found = np.sort(scores)[::-1][:50]
        empty.append(count_within(null.match_probabilities(found, 2000).tolist(), 0.1) == 0)
        scores[:matches] += 7
        best = np.argsort(-scores)[:50]
        length = count_within(null.match_probabilities(scores[best], 2000).tolist(), 0.1)
        kept.append((best[:length] < matches).sum() / matches)
        if length:
            irrelevant.append((best[:length] >= matches).mean())
    assert np.mean(irrelevant) <= 0.1
    assert np.mean(kept) > 0.9
    assert np.mean(empty) > 0.9


def test_null_scores_ignore_texts_with_many_matches():
    """Also if a text of each family describes 20 items."""
    random = np.random.default_rng(4)
    scores = random.normal(size=(len(TEXTS), 2000))
    plain, _ = fit_scores(scores)
    for family, text in enumerate(np.unique(PLACES[:, 0], return_index=True)[1]):
        scores[text, 20 * family : 20 * (family + 1)] += 9
    matched, _ = fit_scores(scores)
    standardized = np.array([4.5, 4.0, 3.0])
    expected = plain.match_probabilities(standardized, 2000)
    assert matched.match_probabilities(standardized, 2000) == pytest.approx(expected, abs=0.02)
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


@pytest.fixture(scope="module")
def index_folder(run, scenes, tmp_path_factory):
    """An index with hand-made null scores and no calibration by captions."""
    folder = tmp_path_factory.mktemp("no-match") / "index"
    build_index(run, scenes / "images", folder, progress=NoProgress())
    write_manifest(folder, replace(read_manifest(folder), calibration=None))
    return folder


@pytest.fixture
def hand_scores(index_folder, monkeypatch):
    dim = read_manifest(index_folder).embedding_dim
    monkeypatch.setattr(
        Index, "null_scores", replace(HAND, mean=np.zeros(dim), covariance=0.01 * np.eye(dim))
    )


@pytest.mark.usefixtures("hand_scores")
def test_search_ends_at_share_of_irrelevant_results(index_folder):
    text = "a red circle"
    plain = visavis.search(index_folder, text, top=20)
    assert plain.no_match is None
    assert {hit.match_probability for hit in plain} == {None}, "only on request"
    standardized = 10 * np.array([hit.score for hit in plain])
    expected = HAND.match_probabilities(standardized, 70).tolist()
    every = visavis.search(index_folder, text, top=20, max_irrelevant=1.0)
    assert [hit.match_probability for hit in every] == pytest.approx(expected, abs=1e-5)
    assert plain.weaker == ()
    for level in (0.0, 0.3, 0.6, 1.0):
        cut = visavis.search(index_folder, text, top=20, max_irrelevant=level)
        assert [hit.key for hit in (*cut.hits, *cut.weaker)] == [hit.key for hit in plain]
        assert len(cut.hits) == count_within(expected, level)
        assert bool(cut.message) == (not cut.hits)
        assert cut.no_match == (expected[0] < 0.5)
        assert all(hit.irrelevant_share < level or level == 1 for hit in cut.hits)
    worst = visavis.search(index_folder, text, top=70)[-1]
    cut = visavis.search(index_folder, text, filter={"path": worst.name}, max_irrelevant=0.3)
    assert cut.no_match
    assert cut.message.startswith("Probably no match: even the best one is irrelevant")
    # With a filter, fewer irrelevant items are expected.
    with closing(open_index(index_folder)) as index:
        count = index.count(ItemFilter(path="*1.png"))
    assert 0 < count < 70
    best = visavis.search(index_folder, text, top=1, filter={"path": "*1.png"}, max_irrelevant=1.0)[
        0
    ]
    (expected,) = HAND.match_probabilities(np.array([10 * best.score]), count)
    assert best.match_probability == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("hand_scores")
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


@pytest.mark.usefixtures("hand_scores")
def test_search_can_ignore_captions(index_folder, run, tmp_path):
    text, folder = "a red circle", tmp_path / "index"
    shutil.copytree(index_folder, folder)
    # By the captions, nothing is a match.
    captions = Calibration((0.0, 1.0), (0.0, 0.0), 70, 20, 2.0, 0.0)
    write_manifest(folder, replace(read_manifest(folder), calibration=captions))
    assert visavis.search(folder, text).no_match
    with pytest.raises(RunError, match="expected an index"):
        visavis.indexes_calibrate(run, "collection")
    assert not visavis.search(folder, text, max_irrelevant=0.9).hits
    assert visavis.indexes_calibrate(folder, "collection") == "collection"
    for level in (0.3, 0.6, None):
        expected = visavis.search(index_folder, text, max_irrelevant=level or 1.0)
        found = visavis.search(folder, text, max_irrelevant=level)
        assert found.to_json() == expected.to_json()
    assert found.hits
    # Queries without match probabilities are answered as before.
    assert visavis.search(folder, like=found[0].item.key).hits
    with closing(open_index(folder)) as index:
        served = ServedIndex(index)
        hits = served.search(QueryKey(text), None, 5, ItemFilter()).hits
    assert [hit.match_probability for hit in hits] == [hit.match_probability for hit in found]
    assert visavis.indexes_calibrate(folder, "captions") == "captions"
    assert visavis.search(folder, text).no_match


def test_max_irrelevant_names_what_is_missing(index_folder, run, scenes):
    for level in (-0.1, 1.5, float("nan")):
        with pytest.raises(VisavisError, match="from 0 to 1"):
            visavis.search(index_folder, "a star", max_irrelevant=level)
    with pytest.raises(VisavisError, match="one text"):
        visavis.search(index_folder, "a star", without="red", max_irrelevant=0.1)
    with pytest.raises(VisavisError, match="need an index"):
        visavis.search(run, "a star", max_irrelevant=0.1)


def test_null_scores_follow_the_items(run, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(no_match, "MIN_ITEMS", 8)
    monkeypatch.setattr(
        no_match, "fit_null_scores", lambda _, __, items: (replace(HAND, mean=items.mean(0)), 0.0)
    )
    source, folder = tmp_path / "photos", tmp_path / "index"
    source.mkdir()
    images = sorted((scenes / "images").iterdir())

    def index(count):
        for image in images[:count]:
            (source / image.name).write_bytes(image.read_bytes())
        build_index(run, source, folder, progress=NoProgress())
        with closing(open_index(folder)) as opened:
            return opened.null_scores.mean.tolist()

    first = index(8)
    assert index(8) == first
    assert index(9) != first


class HashedTexts:
    """A model whose vector of a text depends on its letters alone, which counts calls."""

    fingerprint, embedding_dim, calls = "hashed", None, 0
    known = staticmethod(lambda text: True)

    def unknown_words(self, text):
        return [] if self.known(text) else ["star"]

    def encode_texts(self, texts):
        self.calls += 1
        rows = [np.random.default_rng(list(text.encode())).standard_normal(64) for text in texts]
        return torch.nn.functional.normalize(torch.tensor(np.array(rows), dtype=torch.float32))


class Items:
    """Items that texts of the bank describe."""

    num_items = 150

    def all_vectors(self):
        return HashedTexts().encode_texts(TEXTS[: self.num_items]).numpy()

    def digest(self):
        return StoreDigest(self.num_items, "0")


def recall(model, items, owner="model"):
    return recall_null_scores(model, items, owner)


def test_bank_is_scored_once_for_each_model_and_content(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model, items = HashedTexts(), Items()
    first, cached = recall(model, items), recall(model, items)
    calibrated = calibrate_without_labels(model, items)
    assert model.calls == 2
    for other in (cached, calibrated):
        assert (other.mean == first.mean).all()
        assert (other.covariance == first.covariance).all()
        assert other.tail == first.tail
    recall(model, items, "other")
    assert model.calls == 3
    items.num_items = 151
    assert recall(model, items).tail != first.tail
    for file in (tmp_path / "checks").glob("no-match-*"):
        file.write_bytes(b"damaged")
    recall(model, items)
    assert model.calls == 5, "a damaged file is replaced"
    recall(model, items)
    assert model.calls == 5


def test_missing_probabilities_have_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model, items = HashedTexts(), Items()
    items.num_items = 99
    with pytest.raises(VisavisError, match="the index has 99 items, and 100 are needed"):
        recall(model, items)
    items.num_items = 150
    monkeypatch.setattr(no_match, "MAX_CONTRADICTED", -1.0)
    with pytest.raises(VisavisError, match="of test texts fit a contradicting text better"):
        recall(model, items)
    monkeypatch.setattr(no_match, "MIN_CHECKED_TEXTS", 10_000)
    with pytest.raises(VisavisError, match="hardly any test text finds an item"):
        recall(model, items)
    model.known = lambda text: "star" not in text
    monkeypatch.setattr(no_match, "MIN_TEXTS", len(TEXTS))
    with pytest.raises(VisavisError, match="knows the words of 948 test texts only"):
        recall(model, items)
    assert not (tmp_path / "checks").exists(), "only distributions are cached"


@pytest.mark.usefixtures("hand_scores")
def test_server_shows_probabilities_without_captions(index_folder):

    index = open_index(index_folder)
    app = create_app([ServedIndex(index, has_probabilities=True)], max_irrelevant=0.3)
    with TestClient(app, "http://localhost") as client:
        assert client.get("/api/info").json()["max_irrelevant"] == 0.3
        one, two = (
            client.get("/api/search", params={"text": text}).json()["sides"][0]["hits"]
            for text in ("a star", "a star -red")
        )
    expected = HAND.match_probabilities(10 * np.array([hit["score"] for hit in one]), 70)
    assert [hit["match_probability"] for hit in one] == pytest.approx(expected, abs=1e-4)
    assert {hit["match_probability"] for hit in two} == {None}


def test_server_names_missing_probabilities_at_the_start(index_folder):
    served = ServedIndex(open_index(index_folder), has_probabilities=True)
    with pytest.raises(VisavisError, match="the index has 70 items, and 100 are needed"):
        served.warm_up()
    with pytest.raises(VisavisError, match="from 0 to 1"):
        visavis.serve(index_folder, max_irrelevant=2.0)
