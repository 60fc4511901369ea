"""Probes: edited captions are false, an oracle understands all of them, a bag of words none that has the same words."""

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
from visavis.cli.output import print_probes
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.dataset import Image as Item
from visavis.data.minimal_pairs import MinimalPair, pairs_of_captions, with_typo
from visavis.data.scenes import draw_scene, relevance, write_moving_scenes, write_scenes
from visavis.data.scenes.minimal_pairs import KINDS, scene_pairs
from visavis.diagnosis.probes.pictures import EDITS
from visavis.diagnosis.probes.result import Cost, Slice, slices_of
from visavis.errors import RunError

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "Heads", width = 16, depth = 0, filters = 24, word_width = 16 }
training = { batch_size = 16, probe_batches = 1, threads = 1 }

[[phases]]
epochs = 1
objective = "VLC(gamma=20)"
optimizer = { lr = 0.01 }
"""
SWAPS = {"colors swapped", "roles swapped"}


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    return [(scene, scene_pairs(scene, rng)) for scene in (draw_scene(rng, training=False) for _ in range(60))]


def test_of_a_scene_the_true_caption_is_true_and_the_edited_one_false(drawn):
    for scene, pairs in drawn:
        for pair in pairs:
            facts = [pair.true.facts] if pair.kind == "negated" else [pair.true.facts, pair.edited.facts]
            true, *edited = relevance([scene], facts)[0]
            assert true == 1
            assert all(degree < 1 for degree in edited), (pair, scene)
            assert (Counter(tokenize(pair.true.text)) == Counter(tokenize(pair.edited.text))) == (pair.kind in SWAPS)
    assert {pair.kind for _, pairs in drawn for pair in pairs} == {*KINDS, "negated"}


def test_an_oracle_understands_everything(drawn):
    def told(scene, pair, caption):
        return float(relevance([scene], [caption.facts])[0, 0]) if caption.facts.mentions else 0.0

    cases = [(scene, pair) for scene, pairs in drawn for pair in pairs]
    true, edited = (np.array([told(scene, pair, getattr(pair, which)) for scene, pair in cases]) for which in ("true", "edited"))
    slices = slices_of([MinimalPair(pair.kind, 0, pair.true.text, pair.edited.text) for _, pair in cases], true, edited)
    assert {(one.percent, one.high, one.ties) for one in slices} == {(100.0, 100.0, 0)}
    assert {one.kind for one in slices if one.same_words} == SWAPS


@pytest.mark.parametrize(("right", "cases"), [(0, 7), (3, 7), (45, 50), (50, 50)])
def test_intervals_are_wilsons(right, cases):
    z, share = norm.ppf(0.975), right / cases
    middle, half = share + z**2 / (2 * cases), z * np.sqrt(share * (1 - share) / cases + z**2 / (4 * cases**2))
    one = Slice.of("any", np.arange(cases) < right, np.full(cases, 0.5), same_words=False)
    assert (one.low, one.high) == pytest.approx((100 * (middle - half) / (1 + z**2 / cases), 100 * (middle + half) / (1 + z**2 / cases)))
    assert (one.understood, one.ties) == (right, 0)


def test_a_tie_is_not_understood():
    one = Slice.of("any", np.array([0.5, 0.5, 0.5]), np.array([0.5, 0.5 + 1e-8, 0.4]), same_words=True)
    assert (one.understood, one.ties) == (1, 2)


def test_what_an_edit_costs_by_hand():
    """Of two captions an image: one image loses both hits, one none, one gains one."""
    images = np.array([0, 0, 1, 1, 2, 2])
    cost = Cost.of("any", "t2i", 1, np.array([1, 1, 1, 2, 2, 2]), np.array([2, 3, 1, 2, 1, 2]), images)
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
        ("colors swapped", "A red car beside a red house", None),
        ("colors swapped", "An orange car beside a red house", None),
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
def test_edits_of_own_captions(kind, caption, edited):
    found = {pair.kind: pair.edited for pair in pairs_of_captions(captioned(caption))}
    assert found.get(kind) == edited


def test_no_edit_says_what_another_caption_says():
    sisters = "Two red cars", "a blue or green or yellow or black or white car", "brown, orange, purple and pink in gray"
    found = {pair.kind: pair for pair in pairs_of_captions(captioned(*sisters, "Three or four cars, five at most"))}
    assert found.keys() == {"number replaced"}
    assert found["number replaced"].edited == "Six red cars"


def test_a_typo_is_two_letters_that_change_places():
    caption = "Two dogs are swimming."
    typed = with_typo(caption, np.random.default_rng(0))
    assert sorted(typed) == sorted(caption)
    assert sum(a != b for a, b in zip(typed, caption, strict=True)) == 2
    assert with_typo("an ox", np.random.default_rng(0)) == "an ox"


def test_pictures_are_edited_visibly():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    edited = {name: edit(noise) for name, edit in EDITS.items()}
    assert edited["cropped"].size == (48, 32)
    assert np.ptp(np.asarray(edited["gray"]), axis=2).max() == 0
    assert all(picture.mode == "RGB" and picture.tobytes() != noise.tobytes() for picture in edited.values())


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """A run whose filters over words see one word each, at whatever place."""
    root = tmp_path_factory.mktemp("blind")
    scenes = write_scenes(root / "scenes", num_train=40, num_val=6, num_test=24, captions_per_image=2, size=48, seed=1)
    (root / "tiny.toml").write_text(RECIPE)
    run = visavis.train(root / "tiny.toml", data=scenes, out=root / "run").folder
    weights = load_file(run / "model" / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(".weight") and "convolutions" in name:
            tensor[:, :, torch.arange(tensor.shape[2]) != (tensor.shape[2] - 1) // 2] = 0
    save_file(weights, run / "model" / "model.safetensors")
    return run


@pytest.fixture(scope="module")
def probes(blind):
    return visavis.probe(blind)


def test_a_bag_of_words_is_found_blind_to_order_and_to_nothing_else(probes):
    for one in probes.slices:
        assert (one.ties == one.cases) == (one.kind in SWAPS), one
        assert one.kind not in SWAPS or one.percent == 0
    assert {cost.edit for cost in probes.costs} == {"typos in captions", *(f"{name} pictures" for name in EDITS)}
    assert probes.images == 24


def test_the_command_line_says_the_same(blind, probes, capsys):
    told = CliRunner().invoke(cli.app, ["probe", str(blind), "--json"])
    assert json.loads(told.stdout) == json.loads(json.dumps(probes.to_json()))
    print_probes(probes)
    shown = capsys.readouterr().out
    assert "roles swapped *" in shown
    assert "Chance is 50 %" in shown


def test_averages_over_time_are_blind_to_the_order_of_events_and_stored_features_are_not_edited(tmp_path):
    clips = write_moving_scenes(tmp_path / "moving", num_train=40, num_val=6, num_test=40, captions_per_clip=2)
    small = {"epochs": 1, "training.threads": 1, "training.batch_size": 20, "model.width": 8, "model.hidden": 8, "model.word_width": 8}
    run = visavis.train("moving-scenes/ce-appearance", data=clips, out=tmp_path / "run", overrides=small).folder
    probes = visavis.probe(run)
    assert [one.kind for one in probes.slices] == ["order of events", "direction"]
    assert all(one.ties == one.cases for one in probes.slices)
    assert probes.left_out == ("Pictures were not edited: the model reads stored features of images (visual.features).",)


def test_a_split_without_anything_to_edit_is_refused(blind, tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    for name in ("a", "b"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "captions.csv").write_text("filename,caption,split\na.png,something,test\nb.png,nothing,test\n")
    with pytest.raises(RunError, match=r"none of the captions of 2 images of .* could be edited so that they become false"):
        visavis.probe(blind, data=tmp_path)
