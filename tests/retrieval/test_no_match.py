"""Match probabilities without labels: laws, hand-computed values, simulated collections with known
relevance, and searches of an index.
"""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.retrieval.index_builder import build_index
from visavis.retrieval.index_folder import Index, read_manifest, write_manifest
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.no_match import (
    MIN_TEXTS,
    bank_texts,
    calibrate_without_labels,
    fit_null_scores,
    recall_null_scores,
)
from visavis.retrieval.search import NullScores, count_within, irrelevant_shares
from visavis.retrieval.stores.base import StoreDigest

HAND = NullScores(scores=(0.5, 0.3, 0.0), shares=(0.001, 0.1, 1.0), tail_mean=0.1)
TEXTS, PLACES = bank_texts()


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_bank_texts_are_plain_and_unique():
    assert len(set(TEXTS)) == len(TEXTS) == len(PLACES) > 5 * MIN_TEXTS
    assert {"a red star", "an orange boat", "a horse reading", "a map of an airport"} <= set(TEXTS)
    assert not any(text.startswith(("a o", "an r")) or " a a" in text for text in TEXTS)


def test_null_scores_of_hand_computed_values():
    shares = HAND.share_above([0.6, 0.5, 0.4, 0.3, 0.15, -1.0])
    assert shares == pytest.approx([0.001 / np.e, 0.001, 0.01, 0.1, np.sqrt(0.1), 1.0])
    # 0.1, 0.2 and 1.8 irrelevant items are expected above, between and below the first results.
    two = float(np.interp(np.log(0.003), np.log([0.001, 0.1]), [0.5, 0.3]))
    probabilities = HAND.match_probabilities([0.5, two, 0.3], 100)
    assert probabilities == pytest.approx([0.9, 0.8, 0.0])
    assert irrelevant_shares(probabilities) == pytest.approx([0.1, 0.15, 1.3 / 3])
    assert [count_within(probabilities, level) for level in (0.05, 0.12, 0.2, 0.5)] == [0, 1, 2, 3]


def test_match_probability_falls_with_rank_and_size():
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = np.sort(random.uniform(-0.2, 0.8, 30))[::-1].tolist()
        small, large = (HAND.match_probabilities(scores, count) for count in (50, 5000))
        assert small == sorted(small, reverse=True)
        assert all(0 <= b <= a <= 1 for a, b in zip(small, large, strict=True))
        # Later results do not change earlier ones, so that pages agree.
        assert HAND.match_probabilities(scores[:7], 50) == small[:7]
        assert count_within(small, 0) == 0
        assert count_within(small, 1) == 30
        counts = [count_within(small, level) for level in np.linspace(0, 1, 21)]
        assert counts == sorted(counts)


def test_null_scores_ignore_a_common_rotation():
    random = np.random.default_rng(1)
    rotation = np.linalg.qr(random.normal(size=(16, 16)))[0]
    texts, items = unit(random.normal(size=(len(TEXTS), 16))), unit(random.normal(size=(300, 16)))
    scores = np.linspace(0.9, 0.3, 12).tolist()
    plain, rotated = (
        fit_null_scores(a @ b.T, PLACES)
        for a, b in ((texts, items), (texts @ rotation, items @ rotation))
    )
    assert plain.match_probabilities(scores, 300) == pytest.approx(
        rotated.match_probabilities(scores, 300), abs=1e-9
    )
    assert plain.contradicted == pytest.approx(rotated.contradicted)


@pytest.mark.parametrize("matches", [1, 5])
def test_cut_off_keeps_its_level_in_a_simulation(matches):
    """Items that match score 6 standard deviations higher."""
    random = np.random.default_rng(2)
    null = fit_null_scores(random.normal(size=(len(TEXTS), 2000)), PLACES)
    irrelevant, kept, empty = [], [], []
    for _ in range(1000):
        scores = random.normal(size=2000)
        found = np.sort(scores)[::-1][:50].tolist()
        empty.append(count_within(null.match_probabilities(found, 2000), 0.1) == 0)
        scores[:matches] += 6
        best = np.argsort(-scores)[:50]
        length = count_within(null.match_probabilities(scores[best].tolist(), 2000), 0.1)
        kept.append((best[:length] < matches).sum() / matches)
        if length:
            irrelevant.append((best[:length] >= matches).mean())
    # 0.1 irrelevant items are expected in the list of each query, of which others are matches.
    assert np.mean(irrelevant) <= 0.1 + 0.02
    assert np.mean(kept) > 0.9
    assert np.mean(empty) == pytest.approx(0.9, abs=0.03)


def test_null_scores_ignore_texts_with_many_matches():
    """Also if 5 % of the texts describe 100 items each."""
    random = np.random.default_rng(4)
    scores = random.normal(size=(len(TEXTS), 2000))
    plain = fit_null_scores(scores, PLACES)
    scores[::20, :100] += 6
    matched = fit_null_scores(scores, PLACES)
    assert plain.match_probabilities([5.5], 2000)[0] > 0.99
    assert matched.match_probabilities([5.5], 2000)[0] == pytest.approx(0.95, abs=0.01)
    assert matched.match_probabilities([3.0], 2000) == [0.0]


def test_null_scores_reject_contradictions():
    random = np.random.default_rng(3)
    noise = random.normal(size=(len(TEXTS), 400)) / 10
    fits, confused = noise.copy(), noise.copy()
    for item, text in enumerate(random.integers(0, len(TEXTS), 400)):
        fits[text, item] += 1
        # The model understands the family of a text only.
        confused[PLACES[:, 0] == PLACES[text, 0], item] += 1
    assert fit_null_scores(fits, PLACES).contradicted < 0.05
    assert fit_null_scores(fits, PLACES).problem == ""
    assert "contradicting" in fit_null_scores(confused, PLACES).problem


@pytest.fixture(scope="module")
def index_folder(run, scenes, tmp_path_factory):
    """An index with hand-made null scores and no calibration by captions."""
    folder = tmp_path_factory.mktemp("no-match") / "index"
    build_index(run, scenes / "images", folder, progress=NoProgress())
    write_manifest(folder, replace(read_manifest(folder), calibration=None))
    return folder


@pytest.fixture
def hand_scores(monkeypatch):
    monkeypatch.setattr(Index, "null_scores", HAND)


@pytest.mark.usefixtures("hand_scores")
def test_search_ends_at_share_of_irrelevant_results(index_folder):
    text = "a red circle"
    plain = visavis.search(index_folder, text, top=20)
    assert plain.no_match is None
    assert {hit.match_probability for hit in plain} == {None}, "only on request"
    expected = HAND.match_probabilities([hit.score for hit in plain], 70)
    every = visavis.search(index_folder, text, top=20, max_irrelevant=1.0)
    assert [hit.match_probability for hit in every] == pytest.approx(expected)
    assert plain.weaker == ()
    for level in (0.0, 0.3, 0.6, 1.0):
        cut = visavis.search(index_folder, text, top=20, max_irrelevant=level)
        assert [hit.key for hit in (*cut.hits, *cut.weaker)] == [hit.key for hit in plain]
        assert len(cut.hits) == count_within(expected, level)
        assert bool(cut.message) == (not cut.hits)
        assert all(hit.irrelevant_share < level or level == 1 for hit in cut.hits)
    # With a filter, fewer irrelevant items are expected.
    with closing(Index.open(index_folder)) as index:
        count = index.count(ItemFilter(path="*1.png"))
    assert 0 < count < 70
    best = visavis.search(index_folder, text, top=1, path="*1.png", max_irrelevant=1.0)[0]
    assert best.match_probability == pytest.approx(HAND.match_probabilities([best.score], count)[0])


@pytest.mark.usefixtures("hand_scores")
def test_search_command_prints_weaker_results(index_folder):
    def invoke(*options):
        arguments = ["search", str(index_folder), "a red circle", "--max-irrelevant", "0", *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        return result.output

    assert "Probably no match" in invoke()
    assert "5 weaker results. Show them with --all." in invoke()
    assert "Weaker results:\n 1  " in invoke("--all")
    assert '"weaker"' in invoke("--json")


def test_max_irrelevant_names_what_is_missing(index_folder, run, scenes):
    for level in (-0.1, 1.5, float("nan")):
        with pytest.raises(VisavisError, match="from 0 to 1"):
            visavis.search(index_folder, "a star", max_irrelevant=level)
    with pytest.raises(VisavisError, match="one text"):
        visavis.search(index_folder, "a star", without="red", max_irrelevant=0.1)
    with pytest.raises(VisavisError, match="need an index"):
        visavis.search(run, "a star", max_irrelevant=0.1)


def test_null_scores_follow_the_items(run, scenes, tmp_path):
    source, folder = tmp_path / "photos", tmp_path / "index"
    source.mkdir()
    images = sorted((scenes / "images").iterdir())

    def index(count):
        for image in images[:count]:
            (source / image.name).write_bytes(image.read_bytes())
        build_index(run, source, folder, progress=NoProgress())
        with closing(Index.open(folder)) as opened:
            return opened.null_scores

    first = index(8)
    assert index(8) == first
    assert first.problem or index(9) != first


class HashedTexts:
    """A model whose vector of a text depends on its letters alone, which counts calls."""

    fingerprint, embedding_dim, calls = "hashed", None, 0

    def unknown_words(self, text):
        return []

    def encode_texts(self, texts):
        self.calls += 1
        rows = [np.random.default_rng(list(text.encode())).standard_normal(8) for text in texts]
        return torch.nn.functional.normalize(torch.tensor(np.array(rows), dtype=torch.float32))


class Items:
    num_items = 50

    def all_vectors(self):
        rows = np.random.default_rng(0).standard_normal((self.num_items, 8)).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def digest(self):
        return StoreDigest(self.num_items, "0")


def test_bank_is_scored_once_for_each_model_and_content(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model, items = HashedTexts(), Items()
    first = recall_null_scores(model, items, "model", has_several_vectors=False)
    assert recall_null_scores(model, items, "model", has_several_vectors=False) == first
    assert first == calibrate_without_labels(model, items, has_several_vectors=False)
    assert model.calls == 2
    recall_null_scores(model, items, "other", has_several_vectors=False)
    assert model.calls == 3
    items.num_items = 51
    assert recall_null_scores(model, items, "model", has_several_vectors=False) != first
    for file in (tmp_path / "checks").glob("no-match-*"):
        file.write_bytes(b"damaged")
    recall_null_scores(model, items, "model", has_several_vectors=False)
    assert model.calls == 5, "a damaged file is replaced"
