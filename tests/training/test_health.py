"""The health line: its numbers by their formulas and by hand, each alarm raised by what it is of, and said once."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import visavis
from visavis import Targets
from visavis.data.dataset import Dataset, Image
from visavis.data.scenes import write_scenes
from visavis.evaluation import rank_scores
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified
from visavis.progress import Silent
from visavis.training.alarms import alarms, news
from visavis.training.health import collapsed_loss, effective_rank, examine, first_found
from visavis.training.run_files import RunFiles
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
    vital = {"loss": loss, "collapsed_loss": collapsed, "image_rank": images, "text_rank": texts, "misdirected": 0.0}
    vital |= {f"{way}_{what}": number for way in ("i2t", "t2i") for what, number in (("first_share", 0.1), ("hubs", 3), ("hub_share", 0.1))}
    watched = {"loss": loss, "gradient_i2t": i2t, "gradient_t2i": t2i}
    return {"phase": 0, "step": step, "objective": "VLC()", "rsum": 100.0, "health": vital | more, "train": watched}


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


def world(images, captions):
    names = tuple(Image(f"{number}.jpg", "val") for number in range(images))
    sentences = tuple(f"sentence {number}" for number in range(images * captions))
    return Dataset("world", names, sentences, np.arange(images).repeat(captions))


def found_in(scores, data):
    return first_found(rank_scores(scores, torch.arange(len(data.images)), torch.from_numpy(data.image_of)), data)


def test_what_is_found_first_by_hand():
    data = world(3, 2)
    scores = torch.tensor([[3.0, 3, 3, 3, 0, 0], [0, 0, 2, 4, 0, 0], [1, 9, 1, 1, 1, 1]])
    found = found_in(scores, data)  # texts find the images 0 2 0 1 2 2, images the texts 0 3 1
    assert found["t2i_first"] == "2.jpg"
    assert found["t2i_first_share"] == found["t2i_hub_share"] == 0.5
    assert found["i2t_first_share"] == pytest.approx(1 / 3)


def test_hubs_and_one_item_for_all_are_sentences_with_their_numbers(generator):
    """Two of 200 images are popular with every text; without them, nothing is wrong."""
    data = world(200, 5)
    own = torch.nn.functional.one_hot(torch.from_numpy(data.image_of), 200).T
    healthy = 2.0 * own + torch.randn(200, 1000, generator=generator)
    popular = healthy.clone()
    popular[[11, 140]] += 3.0
    found = found_in(popular, data)
    assert found["t2i_hubs"] == 2
    assert found["t2i_first_share"] < 0.4
    assert found["t2i_hub_share"] > 0.5
    assert alarms(row(images=9.0, **found)) == alarms(row(images=9.0, **found), [row(step=0, **found)]) == {}
    assert alarms(row(images=9.0, **found), [row(step=3, images=9.0, **found), row(step=5, images=9.0)]) == {}
    (sentence,) = alarms(row(images=9.0, **found), [row(step=5, images=9.0, **found)]).values()
    assert sentence.startswith(f"hubs at step 7: {found['t2i_hub_share']:.0%} of the texts find one of the same 2 images first, the 1 %")
    assert alarms(row(images=9.0, **found_in(healthy, data))) == {}
    popular[11] += 3.0
    (sentence,) = alarms(row(images=9.0, **found_in(popular, data))).values()
    assert sentence.startswith("one item for all at step 7: ")
    assert "of the texts of the validation find the same image first, '11.jpg'" in sentence


def test_a_scale_that_ran_to_a_bound_is_a_sentence_and_one_that_began_there_is_none():
    began, ran = ({"scale": scale, "scale_bounds": [1.0, 100.0]} for scale in (20.0, 99.5))
    (sentence,) = alarms(row(images=9.0, **ran), [row(step=0, **began)]).values()
    assert sentence.startswith("temperature at step 7: the learned scale ran from 20 to its bound, 99.5 of 100, ")
    assert alarms(row(images=9.0, **ran), [row(step=0, **ran)]) == alarms(row(images=9.0, **began), [row(step=0, **began)]) == {}


@pytest.fixture(scope="module")
def misled(tmp_path_factory):
    """The logs of a training to which other captions of an image are wrong answers, and of one that goes on from it with wrong captions."""
    root = tmp_path_factory.mktemp("misled")
    scenes = write_scenes(root / "scenes", num_train=60, num_val=60, num_test=0, captions_per_image=3, size=48, seed=1)
    shared = {"model.width": 64, "training.batch_size": 60, "phases.0.schedule.kind": "constant", "phases.0.schedule.warmup": 0.0}
    siblings = {"epochs": 9, "phases.0.optimizer.lr": 0.01, "phases.0.supervision": "PairSupervision(by='position')"}
    moved = {"epochs": 5, "phases.0.optimizer.lr": 0.002, "data.misplaced": 1.0, "start_from": str(root / "siblings")}
    for name, own in (("siblings", siblings), ("moved", moved)):
        visavis.train("demo", data=scenes, out=root / name, overrides=shared | own)
    return {name: RunFiles(root / name).read_log() for name in ("siblings", "moved")}


def test_siblings_as_wrong_answers_and_one_image_for_all_are_told(misled):
    log = misled["siblings"]
    raised = [row["health"]["alarms"] for row in log]
    assert raised[-1] == ["false negatives"]
    assert any("one item" in names for names in raised)
    sentence = alarms(log[-1], log[:-1])["false negatives"]
    assert sentence.startswith(f"false negatives at step {log[-1]['step']}: {log[-1]['health']['misdirected']:.0%} of what Unified(")
    assert "belongs together by the words of the captions or the ids of the images: take positives by ids" in sentence


def test_a_training_that_learns_wrong_captions_by_heart_over_fits(misled):
    log = misled["moved"]
    assert [row["health"]["alarms"] for row in log[:3]] == [[], [], []]
    assert "over-fitting" in log[-1]["health"]["alarms"]
    assert alarms(log[-1], log[:-1])["over-fitting"].startswith(
        f"over-fitting at step {log[-1]['step']}: validation RSUM fell from {log[0]['rsum']:.1f} at step 0 to {log[-1]['rsum']:.1f}, while"
    )


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
