"""Robustness probes: minimal pairs, an oracle, a bag of words, and edits."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.stats import norm
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.cli.console import print_result
from visavis.core.errors import RunError
from visavis.data.dataset import Dataset
from visavis.data.dataset import Image as Item
from visavis.data.synthetic import (
    fact_relevance,
    sample_scene,
    write_synthetic_clips,
    write_synthetic_scenes,
)
from visavis.data.synthetic.captions import EDIT_KINDS, make_scene_pairs
from visavis.data.words import tokenize
from visavis.papers.probes import (
    IMAGE_EDITS,
    MinimalPair,
    ProbeResult,
    RecallChange,
    add_typo,
    make_minimal_pairs,
    results_by_kind,
)

RECIPE = """
name = "tiny"
visual = { encoder = "scenes", granularity = "pooled" }
text = { encoder = "vocabulary", min_count = 1 }
model = { kind = "Heads", embedding_dim = 16, hidden_layers = 0, num_filters = 24, word_dim = 16 }
training = { batch_size = 16, metric_batches = 1, threads = 1 }

[[phases]]
epochs = 1
objective = "VLC(gamma=20)"
optimizer = { lr = 0.01 }
"""
SWAPS = {"colors swapped", "roles swapped"}


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(0)
    return [
        (scene, make_scene_pairs(scene, rng))
        for scene in (sample_scene(rng, training=False) for _ in range(60))
    ]


def test_scene_pairs_are_true_and_false(scenes):
    for scene, pairs in scenes:
        for pair in pairs:
            facts = (
                [pair.true.facts]
                if pair.kind == "negated"
                else [pair.true.facts, pair.edited.facts]
            )
            true, *edited = fact_relevance([scene], facts)[0]
            assert true == 1
            assert all(degree < 1 for degree in edited), (pair, scene)
            assert (Counter(tokenize(pair.true.text)) == Counter(tokenize(pair.edited.text))) == (
                pair.kind in SWAPS
            )
    assert {pair.kind for _, pairs in scenes for pair in pairs} == {*EDIT_KINDS, "negated"}


def test_probe_accuracy_of_oracle_is_100(scenes):
    def score_of(scene, pair, caption):
        return (
            float(fact_relevance([scene], [caption.facts])[0, 0]) if caption.facts.mentions else 0.0
        )

    cases = [(scene, pair) for scene, pairs in scenes for pair in pairs]
    true, edited = (
        np.array([score_of(scene, pair, getattr(pair, which)) for scene, pair in cases])
        for which in ("true", "edited")
    )
    slices = results_by_kind(
        [MinimalPair(pair.kind, 0, pair.true.text, pair.edited.text) for _, pair in cases],
        true,
        edited,
    )
    assert {(one.percent, one.high, one.num_ties) for one in slices} == {(100.0, 100.0, 0)}
    assert {one.kind for one in slices if one.same_words} == SWAPS


@pytest.mark.parametrize(("right", "cases"), [(0, 7), (3, 7), (45, 50), (50, 50)])
def test_probe_interval_is_wilson(right, cases):
    z, share = norm.ppf(0.975), right / cases
    middle, half = (
        share + z**2 / (2 * cases),
        z * np.sqrt(share * (1 - share) / cases + z**2 / (4 * cases**2)),
    )
    one = ProbeResult.from_scores(
        "any", np.arange(cases) < right, np.full(cases, 0.5), same_words=False
    )
    assert (one.low, one.high) == pytest.approx(
        (100 * (middle - half) / (1 + z**2 / cases), 100 * (middle + half) / (1 + z**2 / cases))
    )
    assert (one.num_correct, one.num_ties) == (right, 0)


def test_probe_tie_is_not_correct():
    one = ProbeResult.from_scores(
        "any", np.array([0.5, 0.5, 0.5]), np.array([0.5, 0.5 + 1e-8, 0.4]), same_words=True
    )
    assert (one.num_correct, one.num_ties) == (1, 2)


def test_recall_change_matches_hand_values():
    """Of two captions an image: one image loses both hits, one none, one gains one."""
    images = np.array([0, 0, 1, 1, 2, 2])
    cost = RecallChange.from_ranks(
        "any", "t2i", 1, np.array([1, 1, 1, 2, 2, 2]), np.array([2, 3, 1, 2, 1, 2]), images
    )
    change = np.array([-100.0, 0.0, 50.0])
    half = 4.302652729911275 * change.std(ddof=1) / np.sqrt(3)
    assert (cost.before, cost.after, cost.difference) == pytest.approx((50, 100 / 3, -50 / 3))
    assert (cost.low, cost.high) == pytest.approx((-50 / 3 - half, -50 / 3 + half))


def captioned(*captions):
    return Dataset("own", (Item("a.jpg", "test"),), captions, np.zeros(len(captions), int))


@pytest.mark.parametrize(
    ("kind", "caption", "edited"),
    [
        ("colors swapped", "A red ball and a blue dog.", "A blue ball and a red dog."),
        ("colors swapped", "A black and white dog", None),
        ("colors swapped", "A red car near a red house", None),
        ("colors swapped", "An orange car near a red house", None),
        ("colors swapped", "A red-haired girl with a blue dog", None),
        ("roles swapped", "A dog chases a man on the beach.", "A man chases a dog on the beach."),
        ("roles swapped", "A dog and a man are behind a wall", None),
        ("relation replaced", "Behind a tree stands a cow", "In front of a tree stands a cow"),
        ("relation replaced", "a bird above a tree under the clouds", None),
        ("negated", "A girl is swimming", "A girl is not swimming"),
        ("negated", "A girl swims", None),
        ("color replaced", "a black and white dog", None),
        ("number replaced", "Two of two, three of them", None),
    ],
)
def test_caption_edits_match_examples(kind, caption, edited):
    found = {pair.kind: pair.edited for pair in make_minimal_pairs(captioned(caption))}
    assert found.get(kind) == edited


def test_caption_edits_avoid_other_captions():
    sisters = (
        "Two red cars",
        "a blue or green or yellow or black or white car",
        "brown, orange, purple and pink in gray",
    )
    found = {
        pair.kind: pair
        for pair in make_minimal_pairs(captioned(*sisters, "Three or four cars, five at most"))
    }
    assert found.keys() == {"number replaced"}
    assert found["number replaced"].edited == "Six red cars"


def test_add_typo_exchanges_two_letters():
    caption = "Two dogs are swimming."
    typed = add_typo(caption, np.random.default_rng(0))
    assert sorted(typed) == sorted(caption)
    assert sum(a != b for a, b in zip(typed, caption, strict=True)) == 2
    assert add_typo("an ox", np.random.default_rng(0)) == "an ox"


def test_image_edits_change_pixels():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    edited = {name: edit(noise) for name, edit in IMAGE_EDITS.items()}
    assert edited["cropped"].size == (48, 32)
    assert np.ptp(np.asarray(edited["gray"]), axis=2).max() == 0
    assert all(
        image.mode == "RGB" and image.tobytes() != noise.tobytes() for image in edited.values()
    )


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """A run whose filters over words see one word each, at whatever place."""
    root = tmp_path_factory.mktemp("blind")
    scenes = write_synthetic_scenes(
        root / "scenes", num_train=40, num_val=6, num_test=24, captions_per_image=2, size=48, seed=1
    )
    (root / "tiny.toml").write_text(RECIPE)
    run = visavis.train(root / "tiny.toml", data=scenes, out=root / "run").run
    weights = load_file(run / "model" / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(".weight") and "convolutions" in name:
            tensor[:, :, torch.arange(tensor.shape[2]) != (tensor.shape[2] - 1) // 2] = 0
    save_file(weights, run / "model" / "model.safetensors")
    return run


@pytest.fixture(scope="module")
def probes(blind):
    return visavis.papers_probe(blind)


def test_probe_of_bag_of_words_fails_only_on_order(probes):
    for one in probes.results:
        assert (one.num_ties == one.num_pairs) == (one.kind in SWAPS), one
        assert one.kind not in SWAPS or one.percent == 0
    assert {cost.edit for cost in probes.recall_changes} == {
        "typos in captions",
        *(f"{name} images" for name in IMAGE_EDITS),
    }
    assert probes.images == 24


def test_probe_command_prints_report(blind, probes, capsys):
    score_of = CliRunner().invoke(cli.app, ["papers", "probe", str(blind), "--json"])
    assert json.loads(score_of.stdout) == json.loads(json.dumps(probes.to_json()))
    print_result(probes)
    shown = capsys.readouterr().out
    assert "roles swapped *" in shown
    assert "Chance is 50 %" in shown


def test_probe_of_clip_averages_ties_on_order(tmp_path):
    clips = write_synthetic_clips(
        tmp_path / "moving", num_train=40, num_val=6, num_test=40, captions_per_clip=2
    )
    small = {
        "epochs": 1,
        "training.threads": 1,
        "training.batch_size": 20,
        "model.embedding_dim": 8,
        "model.hidden_dim": 8,
        "model.word_dim": 8,
    }
    run = visavis.train(
        "synthetic-clips/ce-appearance", data=clips, out=tmp_path / "run", overrides=small
    ).run
    probes = visavis.papers_probe(run)
    assert [one.kind for one in probes.results] == ["order of events", "direction"]
    assert all(one.num_ties == one.num_pairs for one in probes.results)
    assert probes.skipped == (
        "Images were not edited: the model reads stored image features (visual.features).",
    )


def test_probe_rejects_captions_without_edits(blind, tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    for name in ("a", "b"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "captions.csv").write_text(
        "filename,caption,split\na.png,something,test\nb.png,nothing,test\n"
    )
    with pytest.raises(
        RunError, match=r"expected a caption that can be edited, got none in 2 images"
    ):
        visavis.papers_probe(blind, data=tmp_path)
