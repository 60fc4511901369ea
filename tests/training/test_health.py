"""The health line: effective ranks and losses of identical embeddings by their formulas, and alarms said once."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import normalize

import visavis
from visavis import Targets
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified
from visavis.progress import Silent
from visavis.training.health import alarms, collapsed_loss, effective_rank, examine, news
from visavis.types import Encoded


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_effective_rank_of_orthogonal_and_of_identical_vectors(size):
    assert effective_rank(Encoded(3 * torch.eye(size))) == pytest.approx(size)
    assert effective_rank(Encoded(torch.full((size, 5), -0.3))) == pytest.approx(1, abs=1e-5)
    pairs = torch.eye(size).repeat_interleave(2, dim=0)
    assert effective_rank(Encoded(pairs)) == pytest.approx(size)


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9, 0.99])
def test_the_effective_rank_of_equal_cosines(cosine):
    """N vectors with one cosine c have eigenvalues (1 + (N - 1) c) / N and N - 1 times (1 - c) / N."""
    number = 32
    gram = torch.full((number, number), cosine, dtype=torch.float64).fill_diagonal_(1)
    vectors = torch.linalg.cholesky(gram)
    shares = [(1 + (number - 1) * cosine) / number, *[(1 - cosine) / number] * (number - 1)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert effective_rank(Encoded(vectors)) == pytest.approx(math.exp(entropy), abs=1e-5)


def test_items_of_several_vectors_count_by_their_mean():
    vectors = torch.randn(6, 4)
    regions = torch.stack([vectors + 1, vectors - 1], 1)
    assert effective_rank(Encoded(regions)) == pytest.approx(effective_rank(Encoded(vectors)), abs=1e-5)
    parts = {"motion": vectors[:, :2], "sound": vectors[:, 2:]}
    assert effective_rank(Encoded(parts)) == pytest.approx(effective_rank(Encoded(vectors)), abs=1e-5)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Triplet(margin=0.3), 2 * 6 * 5 * 0.3),
        (TripletHN(margin=0.3), 2 * 6 * 0.3),
        (VLC(gamma=9), 2 * 6 * math.log(6)),
        (NTXent(), math.log(6)),
        (Unified(margin=0.2, gamma=10), 2 * 6 * math.log(1 + 5 * math.exp(2)) / 10),
    ],
    ids=repr,
)
def test_the_loss_of_identical_embeddings_by_hand(objective, expected):
    assert collapsed_loss(objective, torch.rand(6, 6), Targets.paired(6)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_identical_embeddings_have_the_loss_of_identical_embeddings(kind):
    one = normalize(torch.randn(1, 8), dim=1).expand(5, 8)
    facts = {name: torch.rand(5, 5) for name in ("relevance", "weight", "pair_margin")}
    facts |= {f"{side}_offline_scores": torch.rand(5, 2) for side in ("query", "candidate")}
    targets, scores = Targets.paired(5, **facts), one @ one.T
    vital = examine(kind(), Encoded(one), Encoded(one), scores, targets, kind()(scores, targets))
    assert vital["loss"] == pytest.approx(vital["collapsed_loss"], rel=1e-4, abs=1e-5)
    assert vital["image_rank"] == vital["text_rank"] == pytest.approx(1)


def row(step=7, loss=12.0, collapsed=12.1, images=1.02, texts=9.0, i2t=1.0, t2i=1.0, **more):
    vital = {"loss": loss, "collapsed_loss": collapsed, "image_rank": images, "text_rank": texts}
    return {"step": step, "objective": "VLC()", "health": vital | more, "train": {"gradient_i2t": i2t, "gradient_t2i": t2i}}


def test_a_collapse_is_a_sentence_with_its_numbers():
    (sentence,) = alarms(row()).values()
    assert sentence.startswith("collapse at step 7: the images of a batch span 1.02 dimensions and its texts 9.00 (effective rank)")
    assert "their loss 12 is no better than the 12.1 that VLC() gives identical embeddings" in sentence
    assert list(alarms(row(images=9.0, texts=1.49))) == ["collapse"]
    assert list(alarms(row(loss=-1.0, collapsed=-1.01))) == ["collapse"]
    for healthy in (row(images=1.51), row(loss=11.0), row(step=0), row(loss=-1.1, collapsed=-1.0)):
        assert alarms(healthy) == {}


def test_dead_gradients_are_a_sentence_with_their_numbers():
    (sentence,) = alarms(row(images=9.0, i2t=0.004, t2i=0.0)).values()
    assert sentence.startswith(
        "dead gradients at step 7: 0.4% of the images and 0.0% of the texts of training batches get a gradient from VLC()"
    )
    assert alarms(row(images=9.0, i2t=0.02, t2i=0.0)) == {}
    assert list(alarms(row(i2t=0.0, t2i=0.0))) == ["collapse", "dead gradients"]


def test_news_are_what_no_earlier_row_has():
    found = {"collapse": "it fell", "dead gradients": "it stopped"}
    log = [row(alarms=[]), row(alarms=["collapse"]), row(alarms=[])]
    assert news(found, log) == ["it stopped"]
    assert news(found, [{"step": 0}]) == ["it fell", "it stopped"]  # a log of before there was a health line


class Listener(Silent):
    def __init__(self):
        self.sentences = []

    def say(self, sentence):
        self.sentences.append(sentence)


def test_a_training_that_does_not_move_says_so_once_and_logs_it_always(recipe, scenes, tmp_path):
    """A fresh recurrent network gives all captions nearly the same vector; at a rate of nothing it stays there."""
    progress = Listener()
    overrides = {"phases.0.optimizer.lr": 1e-12, "phases.1.optimizer.lr": 1e-12}
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides, progress=progress).folder
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(entry["health"]["text_rank"] < 1.5 <= entry["health"]["image_rank"] for entry in log)
    assert log[0]["health"]["alarms"] == []
    assert len(log) > 2
    assert [entry["health"]["alarms"] for entry in log[1:]] == [["collapse"]] * (len(log) - 1)
    (sentence,) = [sentence for sentence in progress.sentences if sentence.startswith("collapse")]
    assert f"at step {log[1]['step']}:" in sentence


def test_an_objective_that_is_content_leaves_dead_gradients(recipe, scenes, tmp_path):
    progress = Listener()
    objective = "TripletHN(margin=-3)"  # every hinge is closed: no cosine differs by more than 2
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides={"objective": objective}, progress=progress).folder
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("dead gradients" in entry["health"]["alarms"] for entry in log[1:])
    assert sum(sentence.startswith("dead gradients at step") for sentence in progress.sentences) == 1
