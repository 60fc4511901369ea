"""Robustness probes: minimal pairs, an oracle, a bag of words, and edits."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.stats import norm
from tests.fixtures.recipes import write_recipe
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.cli.console import print_result
from visavis.core.errors import RunError
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image as Item
from visavis.data.synthetic import (
    fact_relevance,
    sample_scene,
    write_synthetic_clips,
    write_synthetic_scenes,
)
from visavis.data.synthetic.captions import EDIT_KINDS, make_scene_pairs, write_caption
from visavis.data.words import tokenize
from visavis.papers.probes import (
    IMAGE_EDITS,
    MinimalPair,
    ProbeResult,
    RecallChange,
    add_typo,
    make_minimal_pairs,
    results_by_kind,
    select_pairs,
)
from visavis.papers.text_only import (
    TEXT_ONLY_LIMIT,
    NgramModel,
    balanced,
    learned_margins,
    share_correct,
)

SWAPS = {"colors swapped", "roles swapped"}


@pytest.fixture(scope="module")
def sampled():
    rng = np.random.default_rng(0)
    return [
        (scene, make_scene_pairs(scene, rng))
        for scene in (sample_scene(rng, training=False) for _ in range(60))
    ]


def test_scene_pairs_are_true_and_false(sampled):
    for scene, pairs in sampled:
        for pair in pairs:
            # A negation has no facts of its own.
            true, edited = (
                fact_relevance([scene], [caption.facts])[0, 0] if caption.facts.mentions else None
                for caption in (pair.true, pair.edited)
            )
            assert true == 1 or (true is None and " no " in pair.true.text)
            assert edited is None or edited < 1, (pair, scene)
            assert (true is None) + (edited is None) == (pair.kind == "negated")
            assert (Counter(tokenize(pair.true.text)) == Counter(tokenize(pair.edited.text))) == (
                pair.kind in SWAPS
            )
    assert {pair.kind for _, pairs in sampled for pair in pairs} == {*EDIT_KINDS, "negated"}


def test_probe_accuracy_of_oracle_is_100(sampled):
    def score_of(scene, pair, caption):
        """A negation is true where the other caption of its pair is false."""
        if caption.facts.mentions:
            return float(fact_relevance([scene], [caption.facts])[0, 0])
        other = pair.true if caption is pair.edited else pair.edited
        return float(score_of(scene, pair, other) < 1)

    cases = [(scene, pair) for scene, pairs in sampled for pair in pairs]
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
        ("negated", "A girl is happy", None),
        ("thing replaced", "A man and a woman", None),
        ("thing replaced", "The woman of the house", "The man of the house"),
        ("relation replaced", "A star left of a ring", "A star right of a ring"),
        ("color replaced", "a black and white dog", None),
        ("number replaced", "Two of two, three of them", None),
    ],
)
def test_caption_edits_match_examples(kind, caption, edited):
    found = [pair.edited for pair in make_minimal_pairs(captioned(caption)) if pair.kind == kind]
    assert found[:1] == ([] if edited is None else [edited])


def test_caption_edits_avoid_other_captions():
    sisters = (
        "Two red cars",
        "a blue or green or yellow or black or white car",
        "brown, orange, purple and pink in gray",
    )
    found = {
        pair.kind: pair
        for pair in make_minimal_pairs(captioned(*sisters, "Three or four cars, five at most"))
        if pair.kind != "thing added"
    }
    assert found.keys() == {"number replaced"}
    assert found["number replaced"].edited == "Six red cars"


def test_caption_edits_negate_true_and_false_texts():
    """The word "not" is in the false text, and as often in the true one."""
    (first, second) = [
        pair
        for pair in make_minimal_pairs(captioned("A dog is running."))
        if pair.kind == "negated"
    ]
    assert first.edited == "A dog is not running."
    assert first.true == "A dog is running."
    assert second.true == second.edited.replace(" is ", " is not ")
    assert "running" not in second.true


def test_caption_edits_add_things_to_both_texts():
    captions = "A man runs", "A man and his dog", "Someone in a hat"
    (pair, *_) = [
        one for one in make_minimal_pairs(captioned(*captions)) if one.kind == "thing added"
    ]
    assert pair.true in ("A man runs with a dog", "A man runs with a hat")
    assert pair.edited.startswith("A man runs with a ")
    assert not {"dog", "hat"} & set(pair.edited.split())


def test_ngram_model_sums_to_one():
    """Over all words of the captions and an unknown one, after a known and an unknown context."""
    model = NgramModel.from_captions(["a dog runs", "a cat runs", "the dog"])
    words = ["a", "dog", "runs", "cat", "the", ".", "unknown"]
    for context in (("", ""), ("a", "dog"), ("never", "seen")):
        assert sum(model._probability((*context, word)) for word in words) == pytest.approx(1)
    assert model.log_probability("a dog runs") > model.log_probability("runs dog a")


@given(st.lists(st.floats(-5, 5), max_size=40))
def test_balanced_pairs_have_as_many_of_both_signs(margins):
    margins = np.array(margins)
    selected = margins[balanced(margins)]
    above, below = (margins > 0).sum(), (margins < 0).sum()
    assert (selected > 0).sum() == (selected < 0).sum() == min(above, below)
    assert (selected == 0).sum() == (margins == 0).sum()


def test_learned_margins_find_a_word_of_edited_texts():
    """A word that only edited texts have is found in the other half of the images."""
    true = [f"a {word} dog" for word in ("red", "big", "old", "wet")]
    margins = learned_margins(true, [f"{text} not" for text in true], range(4))
    assert share_correct(margins) == 1
    assert share_correct(learned_margins(true, true, range(4))) == 0.5


def test_probe_pairs_are_not_solved_without_the_image(sampled):
    """Neither model without the image solves the selected pairs of any kind, while at least one of
    them solves all pairs.
    """
    rng = np.random.default_rng(1)
    training = [write_caption(scene, rng).text for scene, _ in sampled for _ in range(5)]
    pairs = [
        MinimalPair(pair.kind, image, pair.true.text, pair.edited.text)
        for image, (_, of_scene) in enumerate(sampled)
        for pair in of_scene
    ]
    selected, ngram_percent = select_pairs(pairs, training)
    assert ngram_percent == pytest.approx(50)
    results = results_by_kind(selected, np.zeros(len(selected)), np.zeros(len(selected)))
    assert max(one.text_only for one in results) <= TEXT_ONLY_LIMIT
    everything = results_by_kind(pairs, np.zeros(len(pairs)), np.zeros(len(pairs)))
    assert max(one.text_only for one in everything) > 90
    assert len(selected) > 0.5 * len(pairs)
    assert select_pairs(pairs, ()) == (pairs, None)


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
    recipe = write_recipe(
        root / "tiny.toml",
        {"objective": "VLC(gamma=20)", "optimizer": {"lr": 0.01}},
        model={
            "kind": "Heads",
            "embedding_dim": 16,
            "hidden_layers": 0,
            "num_filters": 24,
            "word_dim": 16,
        },
        training={"batch_size": 16},
    )
    run = visavis.train(recipe, data=scenes, out=root / "run").run
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
        RunError, match=r"expected captions that can be edited .*, got none in 2 images"
    ):
        visavis.papers_probe(blind, data=tmp_path)
