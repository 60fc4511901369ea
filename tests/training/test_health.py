"""Health metrics match formulas and hand values, and each alert is raised once."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import visavis
from visavis import Targets
from visavis.core.encoded import Encoded
from visavis.core.progress import NoProgress
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.data.synthetic import write_synthetic_scenes
from visavis.data.workers import BatchReader
from visavis.evaluation import rank_scores
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified
from visavis.training.monitoring.alerts import find_alerts, new_alerts
from visavis.training.monitoring.validation_metrics import (
    batch_health,
    collapsed_loss,
    effective_rank,
    hubness,
)
from visavis.training.runs.run_folder import RunFolder


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_effective_rank_of_orthogonal_and_identical_vectors(size):
    assert effective_rank(Encoded(3 * torch.eye(size))) == pytest.approx(size)
    assert effective_rank(Encoded(torch.full((size, 5), -0.3))) == pytest.approx(1, abs=1e-5)
    pairs = torch.eye(size).repeat_interleave(2, dim=0)
    assert effective_rank(Encoded(pairs)) == pytest.approx(size)


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9, 0.99])
def test_effective_rank_of_equal_cosines(cosine):
    """N vectors with one cosine c have eigenvalues (1 + (N - 1) c) / N and N - 1 times (1 - c) / N."""
    number = 32
    gram = torch.full((number, number), cosine, dtype=torch.float64).fill_diagonal_(1)
    vectors = torch.linalg.cholesky(gram)
    shares = [(1 + (number - 1) * cosine) / number, *[(1 - cosine) / number] * (number - 1)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert effective_rank(Encoded(vectors)) == pytest.approx(math.exp(entropy), abs=1e-5)


def test_effective_rank_uses_mean_of_several_vectors():
    vectors = torch.randn(6, 4)
    regions = torch.stack([vectors + 1, vectors - 1], 1)
    assert effective_rank(Encoded(regions)) == pytest.approx(
        effective_rank(Encoded(vectors)), abs=1e-5
    )
    parts = {"motion": vectors[:, :2], "sound": vectors[:, 2:]}
    assert effective_rank(Encoded(parts)) == pytest.approx(
        effective_rank(Encoded(vectors)), abs=1e-5
    )


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
def test_collapsed_loss_matches_hand_values(objective, expected):
    assert collapsed_loss(objective, torch.rand(6, 6), Targets.paired(6)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_collapsed_loss_matches_identical_embeddings(kind):
    one = normalize(torch.randn(1, 8), dim=1).expand(5, 8)
    annotations = {name: torch.rand(5, 5) for name in ("relevance", "weight", "pair_margin")}
    annotations |= {f"{side}_offline_scores": torch.rand(5, 2) for side in ("query", "candidate")}
    targets, scores = Targets.paired(5, **annotations), one @ one.T
    health = batch_health(
        kind(), Encoded(one), Encoded(one), scores, targets, kind()(scores, targets)
    )
    assert health["loss"] == pytest.approx(health["collapsed_loss"], rel=1e-4, abs=1e-5)
    assert health["image_effective_rank"] == health["text_effective_rank"] == pytest.approx(1)


def row(step=7, loss=12.0, collapsed=12.1, images=1.02, texts=9.0, i2t=1.0, t2i=1.0, **more):
    health = {
        "loss": loss,
        "collapsed_loss": collapsed,
        "image_effective_rank": images,
        "text_effective_rank": texts,
        "false_negative_share": 0.0,
    }
    health |= {
        f"{way}_{what}": number
        for way in ("i2t", "t2i")
        for what, number in (("top_item_share", 0.1), ("num_hubs", 3), ("hub_share", 0.1))
    }
    watched = {"loss": loss, "gradient_i2t": i2t, "gradient_t2i": t2i}
    times = {"data_wait_s": 1.0, "data_wait_share": 0.02}
    return {
        "phase": 0,
        "step": step,
        "objective": "VLC()",
        "rsum": 100.0,
        "health": health | more,
        "train": watched,
        "time": times,
    }


def test_collapse_raises_alert():
    """Except at the first trained validation, whose collapse many trainings leave."""
    log = [row(step=0), row(step=3)]
    assert find_alerts(row()) == find_alerts(row(), log[:1]) == {}
    (sentence,) = find_alerts(row(), log).values()
    assert sentence.startswith(
        "Collapse at step 7: the effective rank of a batch is 1.02 for images and 9.00 for texts"
    )
    assert "its loss 12 is not below 12.1, the value of VLC() for identical embeddings" in sentence
    assert list(find_alerts(row(images=9.0, texts=1.49), log)) == ["collapse"]
    assert list(find_alerts(row(loss=-1.0, collapsed=-1.01), log)) == ["collapse"]
    for healthy in (row(images=1.51), row(loss=11.0), row(step=0), row(loss=-1.1, collapsed=-1.0)):
        assert find_alerts(healthy, log) == {}


def test_dead_gradients_raise_alert():
    (sentence,) = find_alerts(row(images=9.0, i2t=0.004, t2i=0.0)).values()
    assert sentence.startswith(
        "Dead gradients at step 7: 0.4% of the images and 0.0% of the texts of training batches "
        "receive a gradient from VLC()"
    )
    assert find_alerts(row(images=9.0, i2t=0.02, t2i=0.0)) == {}
    assert list(find_alerts(row(i2t=0.0, t2i=0.0), [row(step=3)])) == ["collapse", "dead gradients"]


def world(images, captions):
    names = tuple(Image(f"{number}.jpg", "val") for number in range(images))
    sentences = tuple(f"sentence {number}" for number in range(images * captions))
    return Dataset("world", names, sentences, np.arange(images).repeat(captions))


def found_in(scores, data):
    return hubness(
        rank_scores(scores, torch.arange(len(data.images)), torch.from_numpy(data.image_of)), data
    )


def test_top_items_match_hand_values():
    data = world(3, 2)
    scores = torch.tensor([[3.0, 3, 3, 3, 0, 0], [0, 0, 2, 4, 0, 0], [1, 9, 1, 1, 1, 1]])
    found = found_in(
        scores, data
    )  # Texts rank images 0 2 0 1 2 2 first, images rank texts 0 3 1 first.
    assert found["t2i_top_item"] == "2.jpg"
    assert found["t2i_top_item_share"] == found["t2i_hub_share"] == 0.5
    assert found["i2t_top_item_share"] == pytest.approx(1 / 3)


def test_hubs_and_dominant_item_raise_alerts(generator):
    """Two of 200 images score high for every text. Without them there are no alerts."""
    data = world(200, 5)
    own = torch.nn.functional.one_hot(torch.from_numpy(data.image_of), 200).T
    healthy = 2.0 * own + torch.randn(200, 1000, generator=generator)
    popular = healthy.clone()
    popular[[11, 140]] += 3.0
    found = found_in(popular, data)
    assert found["t2i_num_hubs"] == 2
    assert found["t2i_top_item_share"] < 0.4
    assert found["t2i_hub_share"] > 0.5
    assert (
        find_alerts(row(images=9.0, **found))
        == find_alerts(row(images=9.0, **found), [row(step=0, **found)])
        == {}
    )
    assert (
        find_alerts(
            row(images=9.0, **found), [row(step=3, images=9.0, **found), row(step=5, images=9.0)]
        )
        == {}
    )
    (sentence,) = find_alerts(row(images=9.0, **found), [row(step=5, images=9.0, **found)]).values()
    assert sentence.startswith(
        f"Hubs at step 7: {found['t2i_hub_share']:.0%} of the texts rank one of the same 2 images "
        "first, the 1 %"
    )
    assert find_alerts(row(images=9.0, **found_in(healthy, data))) == {}
    popular[11] += 3.0
    (sentence,) = find_alerts(row(images=9.0, **found_in(popular, data))).values()
    assert sentence.startswith("Dominant item at step 7: ")
    assert "of the validation texts rank the same image first, '11.jpg'" in sentence


def test_scale_that_reaches_bound_raises_alert():
    began, ran = ({"scale": scale, "scale_bounds": [1.0, 100.0]} for scale in (20.0, 99.5))
    (sentence,) = find_alerts(row(images=9.0, **ran), [row(step=0, **began)]).values()
    assert sentence.startswith(
        "Temperature at step 7: the learned scale moved from 20 to 99.5, its bound is 100."
    )
    assert (
        find_alerts(row(images=9.0, **ran), [row(step=0, **ran)])
        == find_alerts(row(images=9.0, **began), [row(step=0, **began)])
        == {}
    )


@pytest.fixture(scope="module")
def mistrained(tmp_path_factory):
    """Logs of a training with other captions of an image as negatives, and of a second one with
    mismatched captions.
    """
    root = tmp_path_factory.mktemp("mistrained")
    scenes = write_synthetic_scenes(
        root / "scenes", num_train=60, num_val=60, num_test=0, captions_per_image=3, size=48, seed=1
    )
    shared = {
        "model.embedding_dim": 64,
        "training.batch_size": 60,
        "phases.0.schedule.kind": "constant",
        "phases.0.schedule.warmup": 0.0,
    }
    siblings = {
        "epochs": 9,
        "phases.0.optimizer.lr": 0.01,
        "phases.0.supervision": "PairSupervision(by='position')",
    }
    moved = {
        "epochs": 8,
        "phases.0.optimizer.lr": 0.002,
        "data.noise": "ShuffledCaptions(share=1.0)",
        "start_from": str(root / "siblings"),
    }
    for name, own in (("siblings", siblings), ("moved", moved)):
        visavis.train("demo", data=scenes, out=root / name, overrides=shared | own)
    return {name: RunFolder(root / name).read_log() for name in ("siblings", "moved")}


def test_false_negatives_and_dominant_image_raise_alerts(mistrained):
    log = mistrained["siblings"]
    raised = [row["health"]["alerts"] for row in log]
    assert raised[-1] == ["false negatives"]
    assert any("dominant item" in names for names in raised)
    sentence = find_alerts(log[-1], log[:-1])["false negatives"]
    assert sentence.startswith(
        f"False negatives at step {log[-1]['step']}: "
        f"{log[-1]['health']['false_negative_share']:.0%} of the gradient by which Unified("
    )
    assert (
        "pairs that match by the words of the captions or the ids of the images. Define positives "
        "by ids" in sentence
    )


def test_memorized_wrong_captions_raise_overfitting_alert(mistrained):
    # With some seeds, an image dominates, and its alert would replace the alert of overfitting.
    shares = dict.fromkeys(("i2t_top_item_share", "t2i_top_item_share"), 0.0)
    log = [row | {"health": row["health"] | shares} for row in mistrained["moved"]]
    number = next(
        number for number, row in enumerate(log) if "overfitting" in find_alerts(row, log[:number])
    )
    assert number >= 3
    row, best = log[number], max(log[:number], key=lambda earlier: earlier["rsum"])
    assert find_alerts(row, log[:number])["overfitting"].startswith(
        f"Overfitting at step {row['step']}: validation RSUM fell from {best['rsum']:.1f} at step "
        f"{best['step']} to {row['rsum']:.1f}, while"
    )


def test_waiting_for_data_raises_alert():
    waiting = row(images=9.0) | {"time": {"data_wait_s": 12.3, "data_wait_share": 0.41}}
    (sentence,) = find_alerts(waiting).values()
    assert sentence.startswith(
        "Waiting for data at step 7: 41% of the training time since the last validation, 12 s, was "
        "spent waiting for batches. "
        "Set more training.workers"
    )
    for enough in (
        {"data_wait_s": 12.3, "data_wait_share": 0.2},
        {"data_wait_s": 4.9, "data_wait_share": 0.9},
    ):
        assert find_alerts(row(images=9.0) | {"time": enough}) == {}


@pytest.mark.slow
def test_log_and_progress_show_time_waiting_for_data(recipe, scenes, tmp_path, monkeypatch):
    read, shares = BatchReader.__call__, []

    class Shares(NoProgress):
        def training_step(self, step):
            shares.append(step.data_wait_share)

    def read_slowly(*request):
        time.sleep(0.1)
        return read(*request)

    monkeypatch.setattr(BatchReader, "__call__", read_slowly)
    monkeypatch.setattr("visavis.training.monitoring.alerts.MIN_DATA_WAIT_S", 0.1)
    overrides = {
        "training.batches_per_epoch": 3,
        "training.workers": 0,
        "training.evaluate_every": 0,
    }
    run = visavis.train(
        recipe, data=scenes, out=tmp_path / "run", overrides=overrides, progress=Shares()
    ).run
    times = [entry["time"] for entry in RunFolder(run).read_log()]
    assert (times[0]["data_wait_s"], times[0]["data_wait_share"]) == (0, 0)
    assert all(0.1 < each["data_wait_s"] < each["training_s"] + 0.01 for each in times[1:])
    assert all(
        0.2 < share <= 1 for share in (*shares, *(each["data_wait_share"] for each in times[1:]))
    )
    assert "waiting for data" in RunFolder(run).read_log()[-1]["health"]["alerts"]


def test_new_alerts_are_absent_from_earlier_rows():
    found = {"collapse": "it fell", "dead gradients": "it stopped"}
    log = [row(alerts=[]), row(alerts=["collapse"]), row(alerts=[])]
    assert new_alerts(found, log) == ["it stopped"]


class Listener(NoProgress):
    def __init__(self):
        self.sentences = []

    def message(self, text):
        self.sentences.append(text)


def test_stuck_training_alerts_once_and_logs_always(recipe, scenes, tmp_path):
    """An untrained recurrent network gives all captions similar vectors, and a learning rate near 0
    keeps them.
    """
    progress = Listener()
    overrides = {"phases.0.optimizer.lr": 1e-12, "phases.1.optimizer.lr": 1e-12}
    run = visavis.train(
        recipe, data=scenes, out=tmp_path / "run", overrides=overrides, progress=progress
    ).run
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(
        entry["health"]["text_effective_rank"] < 1.5 <= entry["health"]["image_effective_rank"]
        for entry in log
    )
    assert [entry["health"]["alerts"] for entry in log[:2]] == [[], []]
    assert len(log) > 3
    assert [entry["health"]["alerts"] for entry in log[2:]] == [["collapse"]] * (len(log) - 2)
    (sentence,) = [sentence for sentence in progress.sentences if sentence.startswith("Collapse")]
    assert f"at step {log[2]['step']}:" in sentence


def test_satisfied_objective_has_dead_gradients(recipe, scenes, tmp_path):
    progress = Listener()
    objective = "TripletHN(margin=-3)"  # Every hinge is closed: cosines differ by at most 2.
    run = visavis.train(
        recipe,
        data=scenes,
        out=tmp_path / "run",
        overrides={"objective": objective},
        progress=progress,
    ).run
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("dead gradients" in entry["health"]["alerts"] for entry in log[1:])
    assert (
        sum(sentence.startswith("Dead gradients at step") for sentence in progress.sentences) == 1
    )
