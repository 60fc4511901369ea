"""Synthetic scenes: reproducible, true captions, true relevance, and held-out combinations."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from visavis.core.errors import DataError, RecipeError, RefusedOverwrite
from visavis.data.synthetic import (
    CaptionFacts,
    Scene,
    SceneGraphs,
    SceneObject,
    fact_relevance,
    render_scene,
    resample_layout,
    sample_scene,
    write_captions,
    write_synthetic_scenes,
)
from visavis.data.synthetic.captions import FACT_WEIGHTS
from visavis.data.synthetic.lexicon import STYLES, join_phrases, with_article
from visavis.data.synthetic.scene import (
    BACKGROUNDS,
    COLORS,
    HELD_OUT_COLORS,
    HELD_OUT_RELATIONS,
    PATTERNS,
    SHAPES,
)

SMALL = {"num_train": 60, "num_val": 10, "num_test": 40, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_synthetic_scenes(
        tmp_path_factory.mktemp("scenes") / "world", noise_ratio=0.2, near_duplicates=0.25, **SMALL
    )


@pytest.fixture(scope="module")
def sampled():
    rng = np.random.default_rng(0)
    return [sample_scene(rng, training=True) for _ in range(400)], [
        sample_scene(rng, training=False) for _ in range(400)
    ]


def star_left_of_heart(**changes):
    star, heart = (
        SceneObject("star", "red", "plain", "small", 0.2, 0.5),
        SceneObject("heart", "blue", "dotted", "large", 0.7, 0.5, 0.18),
    )
    return Scene("beach", (replace(star, **changes), heart))


def by_hand(scene, facts):
    """The formula of ``fact_relevance`` as loops over all matchings."""
    slots = [*range(len(scene.things)), *[None] * len(facts.mentions)]
    stated = [FACT_WEIGHTS[name] for mention in facts.mentions for name in mention] + [
        FACT_WEIGHTS["relation"]
    ] * len(facts.relations)
    stated += [FACT_WEIGHTS["background"]] * (facts.background is not None) + [
        FACT_WEIGHTS["total"]
    ] * (facts.total is not None)
    best = 0
    for match in set(itertools.permutations(slots, len(facts.mentions))):
        points = FACT_WEIGHTS["background"] * (facts.background == scene.background) + FACT_WEIGHTS[
            "total"
        ] * (facts.total == len(scene.things))
        for i, mention in zip(match, facts.mentions, strict=True):
            points += sum(
                FACT_WEIGHTS[name]
                for name, value in mention.items()
                if i is not None and getattr(scene.things[i], name) == value
            )
        points += sum(
            FACT_WEIGHTS["relation"]
            for a, name, b in facts.relations
            if (match[a], name, match[b]) in scene.relations
        )
        best = max(best, points)
    return best / sum(stated)


def test_fact_relevance_equals_loop(sampled):
    rng = np.random.default_rng(1)
    some = sampled[1][:12]
    facts = [caption.facts for scene in some for caption in write_captions(scene, 2, rng)]
    expected = [[by_hand(scene, one) for one in facts] for scene in some]
    np.testing.assert_allclose(fact_relevance(some, facts, block_size=5), expected, rtol=1e-6)


def test_scene_relevance_of_a_part_is_a_part(folder):
    graphs = SceneGraphs.open(folder)
    rows, columns = np.array([5, 2]), np.array([7, 100, 3])
    np.testing.assert_array_equal(
        graphs.relevance(rows, columns), graphs.relevance()[np.ix_(rows, columns)]
    )


def test_fact_relevance_decreases_by_the_weight_of_a_false_fact():
    facts = CaptionFacts(
        ({"shape": "star", "color": "red", "size": "small"}, {"shape": "heart"}),
        ((0, "left", 1),),
        "beach",
        2,
    )
    whole = 2 + 2 + 1 + 2 + 2 + 2 + 1
    changed = [
        star_left_of_heart(),
        star_left_of_heart(color="green"),
        star_left_of_heart(size="large"),
        star_left_of_heart(x=0.95),
    ]
    changed += [
        replace(star_left_of_heart(), background="snow"),
        star_left_of_heart(color="green", shape="ring"),
    ]
    points = np.array([whole, whole - 2, whole - 1, whole - 2, whole - 2, whole - 4])
    np.testing.assert_allclose(fact_relevance(changed, [facts])[:, 0], points / whole, rtol=1e-6)


def test_fact_relevance_needs_a_thing_per_mention():
    two_stars = CaptionFacts(({"shape": "star"}, {"shape": "star"}))
    star = star_left_of_heart().things[0]
    stars = [Scene("beach", (star,) * count) for count in (1, 2, 3)]
    assert fact_relevance(stars, [two_stars])[:, 0].tolist() == [0.5, 1, 1]


def test_scene_relations_follow_from_positions():
    assert star_left_of_heart().relations == {(0, "left", 1)}
    assert star_left_of_heart(x=0.69, y=0.1).relations == {(0, "above", 1)}
    over = Scene("beach", tuple(reversed(star_left_of_heart(x=0.7, y=0.51).things)))
    assert over.relations == {(1, "inside", 0)}
    edge = Scene("beach", tuple(reversed(star_left_of_heart(x=0.9).things)))
    assert edge.relations == {(1, "front", 0), (0, "left", 1)}


def test_held_out_combinations_are_only_in_test(sampled):
    train, test = sampled

    def pairs(many):
        return {(thing.shape, thing.color) for scene in many for thing in scene.things}

    def triples(many):
        return {
            (scene.things[i].shape, name, scene.things[j].shape)
            for scene in many
            for i, name, j in scene.relations
        }

    assert not pairs(train) & HELD_OUT_COLORS
    assert not triples(train) & HELD_OUT_RELATIONS
    assert len(pairs(test) & HELD_OUT_COLORS) >= 8
    assert triples(test) & HELD_OUT_RELATIONS
    assert 1 / 3 < np.mean([scene.has_held_out_combination for scene in test]) < 2 / 3


def test_training_scenes_have_all_words_with_zipf_frequencies(sampled):
    things = [thing for scene in sampled[0] for thing in scene.things]
    assert {thing.color for thing in things} == set(COLORS)
    assert {thing.pattern for thing in things} == set(PATTERNS)
    assert {scene.background for scene in sampled[0]} == set(BACKGROUNDS)
    counts = [sum(thing.shape == shape for thing in things) for shape in SHAPES]
    assert min(counts) > 0
    assert sum(counts[:4]) > 1.5 * sum(counts[-4:])


def test_resample_layout_keeps_relations_and_changes_pixels(sampled):
    rng = np.random.default_rng(4)
    for scene in sampled[0][:20]:
        again = resample_layout(scene, rng)
        assert again.relations == scene.relations
        assert [(t.shape, t.color, t.pattern, t.size) for t in again.things] == [
            (t.shape, t.color, t.pattern, t.size) for t in scene.things
        ]
        assert render_scene(again).tobytes() != render_scene(scene).tobytes()


def test_render_scene_shows_all_things(sampled):
    for scene in sampled[0][:20]:
        whole = np.asarray(render_scene(scene), float)
        for i in range(len(scene.things)):
            without = np.asarray(
                render_scene(replace(scene, things=scene.things[:i] + scene.things[i + 1 :])), float
            )
            assert (np.abs(whole - without).sum(-1) > 60).sum() > 10, (
                scene.background,
                scene.things[i],
            )


def test_synthetic_scenes_are_reproducible(tmp_path):
    arguments = {
        "num_train": 6,
        "num_val": 1,
        "num_test": 2,
        "noise_ratio": 0.2,
        "near_duplicates": 0.3,
    }
    one, two, other = (
        write_synthetic_scenes(tmp_path / name, seed=seed, **arguments)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 11
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)
    assert all((one / name).read_bytes() != (other / name).read_bytes() for name in files)


def test_synthetic_scenes_are_a_data_set(folder):
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 60 + ["val"] * 10 + ["test"] * 40
    assert all(set(row) == {"filename", "split", "captions"} for row in rows)
    assert all(len(set(row["captions"])) >= 4 for row in rows)
    for row in rows:
        with Image.open(folder / row["filename"]) as image:
            assert (image.size, image.mode, image.format) == ((96, 96), "RGB", "PNG")


def test_synthetic_scenes_have_given_noise_ratio(folder):
    graphs = SceneGraphs.open(folder)
    assert graphs.swapped.sum() == round(0.2 * 60 * 5)
    assert not graphs.swapped[300:].any()
    lines = [json.loads(line) for line in (folder / "scenes.jsonl").read_text().splitlines()]
    assert all(source != line["filename"] for line in lines for source in line["swapped_from"])
    own = graphs.relevance()[graphs.image_of, np.arange(550)]
    assert (own[~graphs.swapped] == 1).all()
    assert own[graphs.swapped].mean() < 0.6


def test_synthetic_scenes_have_given_near_duplicates(folder):
    graphs = SceneGraphs.open(folder)
    copies = np.flatnonzero(graphs.duplicate_of >= 0)
    assert [(copies < 60).sum(), ((copies >= 60) & (copies < 70)).sum(), (copies >= 70).sum()] == [
        15,
        2,
        10,
    ]
    for copy in copies:
        origin = graphs.duplicate_of[copy]
        assert origin < copy
        assert graphs.scenes[origin].relations == graphs.scenes[copy].relations


def test_synthetic_scenes_never_overwrite(folder, tmp_path):
    before = (folder / "captions.jsonl").read_bytes()
    with pytest.raises(RefusedOverwrite, match="already exists"):
        write_synthetic_scenes(folder, **SMALL)
    assert (folder / "captions.jsonl").read_bytes() == before
    with pytest.raises(DataError, match=r"scenes\.jsonl"):
        SceneGraphs.open(tmp_path)


def test_synthetic_scenes_refuse_numbers_out_of_range(tmp_path):
    wrong = {
        "num_test": -1,
        "captions_per_image": 0,
        "size": 8,
        "seed": -1,
        "noise_ratio": 1.2,
        "near_duplicates": -0.1,
    }
    for arguments in (
        *({name: value} for name, value in wrong.items()),
        {"noise_ratio": 0.1, "num_train": 2},
    ):
        with pytest.raises(RecipeError, match=next(iter(arguments))):
            write_synthetic_scenes(tmp_path / "world", **arguments)
    assert not (tmp_path / "world").exists()


def test_style_changes_only_colors_and_words(tmp_path):
    paper, glass = STYLES["paper"], STYLES["glass"]
    for kind in ("shapes", "colors"):
        own, other = getattr(paper, kind), getattr(glass, kind)
        assert own.keys() == other.keys()
        assert not {word for words in own.values() for word in words} & {
            word for words in other.values() for word in words
        }
    assert paper.palette.keys() == glass.palette.keys()
    assert all(
        np.abs(np.subtract(paper.palette[color], glass.palette[color])).max() > 0.05
        for color in COLORS
    )
    folders = [
        write_synthetic_scenes(tmp_path / style, num_train=3, num_val=0, num_test=0, style=style)
        for style in STYLES
    ]
    one, two = (SceneGraphs.open(folder) for folder in folders)
    assert replace(one.scenes[0], things=()) == replace(two.scenes[0], things=()), (
        "of the same seed"
    )
    assert (folders[0] / "images/000000.png").read_bytes() != (
        folders[1] / "images/000000.png"
    ).read_bytes()
    names = {
        word
        for words in (*paper.shapes.values(), *paper.colors.values())
        for phrase in words
        for word in phrase.split()
    }
    text = (folders[1] / "captions.jsonl").read_text().lower()
    assert not [
        word
        for word in sorted(names - {"moon", "sign", "blue"})
        if re.search(rf"\b(a|an|plain|shiny) {word}\b", text)
    ]
    with pytest.raises(RecipeError, match=r"style: unknown style 'glas': did you mean glass\?"):
        write_synthetic_scenes(tmp_path / "other", style="glas")


def test_synthetic_scenes_report_progress(tmp_path):
    calls = []
    write_synthetic_scenes(
        tmp_path / "world",
        num_train=3,
        num_val=0,
        num_test=1,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_scene_captions_are_english(sampled):
    assert [with_article(word) for word in ("emerald ring", "unpatterned star", "huge heart")] == [
        "an emerald ring",
        "an unpatterned star",
        "a huge heart",
    ]
    assert join_phrases(["a", "b", "c"]) == "a, b and c"
    rng = np.random.default_rng(5)
    for scene in sampled[0][:60]:
        for caption in write_captions(scene, 5, rng):
            assert caption.text[0].isupper()
            assert "  " not in caption.text
            words = caption.text.rstrip(".").lower().replace(",", "").split()
            assert all(a != b for a, b in itertools.pairwise(words)), caption.text


def test_synthetic_scenes_of_a_seed_are_pinned(tmp_path):
    """Measurements on synthetic scenes stay valid only if captions are equal and images look the
    same.
    """
    folder = write_synthetic_scenes(
        tmp_path / "world",
        num_train=120,
        num_val=20,
        num_test=60,
        size=48,
        seed=11,
        noise_ratio=0.1,
        near_duplicates=0.2,
    )
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    text = "\n".join(caption for row in rows for caption in row["captions"])
    seen = np.stack(
        [
            np.asarray(
                Image.open(folder / row["filename"]).resize((4, 4), Image.Resampling.BOX), float
            )
            for row in rows
        ]
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "abfeeb66b1a7ce9c"
    assert (
        hashlib.sha256((folder / "scenes.jsonl").read_bytes()).hexdigest()[:16]
        == "d71cb0c291fe9aee"
    )
    assert seen.mean((0, 1, 2)) == pytest.approx([143.24, 147.62, 145.04], abs=0.1)
    assert seen.std((0, 1, 2)) == pytest.approx([69.63, 58.61, 61.18], abs=0.1)
    assert seen[::20].mean((1, 2, 3)) == pytest.approx(
        [141, 143, 121, 158, 105, 121, 134, 216, 158, 187], abs=0.7
    )


BACKGROUND_COLORS = {
    "meadow": (145.69, 200.04, 162.33),
    "beach": (171.57, 205.29, 201.93),
    "night": (38.30, 36.00, 79.53),
    "snow": (205.45, 220.81, 237.09),
    "table": (192.10, 141.12, 92.64),
    "sea": (48.54, 136.91, 180.88),
    "desert": (237.89, 186.23, 125.24),
    "paper": (226.92, 231.78, 231.25),
    "sunset": (188.65, 120.88, 121.56),
    "forest": (83.75, 119.39, 84.74),
}


def test_backgrounds_have_pinned_colors():
    for name, color in BACKGROUND_COLORS.items():
        background = np.asarray(render_scene(Scene(name, (), 5), 64), float)
        assert background.mean((0, 1)) == pytest.approx(color, abs=0.1), name
    assert BACKGROUND_COLORS.keys() == set(BACKGROUNDS)
