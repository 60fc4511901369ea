"""Drawn scenes: the same every time, true captions, true degrees, a long tail kept out of training."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from visavis.data.scenes import Facts, Scene, SceneGraphs, Thing, captions, draw, draw_scene, redraw, relevance, write_scenes
from visavis.data.scenes.backgrounds import paint_background
from visavis.data.scenes.relevance import WEIGHTS
from visavis.data.scenes.style import STYLES
from visavis.data.scenes.words import article, join
from visavis.data.scenes.world import BACKGROUNDS, COLORS, PATTERNS, SHAPES, held_out_colors, held_out_relations
from visavis.errors import DataError, RecipeError, RefusedOverwrite

SMALL = {"num_train": 60, "num_val": 10, "num_test": 40, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes") / "world", noise=0.2, near_duplicates=0.25, **SMALL)


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(0)
    return [draw_scene(rng, training=True) for _ in range(400)], [draw_scene(rng, training=False) for _ in range(400)]


def star_left_of_heart(**changes):
    star, heart = Thing("star", "red", "plain", "small", 0.2, 0.5), Thing("heart", "blue", "dotted", "large", 0.7, 0.5, 0.18)
    return Scene("beach", (replace(star, **changes), heart))


def by_hand(scene, facts):
    """The docstring's formula as loops over all matchings."""
    slots = [*range(len(scene.things)), *[None] * len(facts.mentions)]
    stated = [WEIGHTS[name] for mention in facts.mentions for name in mention] + [WEIGHTS["relation"]] * len(facts.relations)
    stated += [WEIGHTS["background"]] * (facts.background is not None) + [WEIGHTS["total"]] * (facts.total is not None)
    best = 0
    for match in set(itertools.permutations(slots, len(facts.mentions))):
        points = WEIGHTS["background"] * (facts.background == scene.background) + WEIGHTS["total"] * (facts.total == len(scene.things))
        for i, mention in zip(match, facts.mentions, strict=True):
            points += sum(WEIGHTS[name] for name, value in mention.items() if i is not None and getattr(scene.things[i], name) == value)
        points += sum(WEIGHTS["relation"] for a, name, b in facts.relations if (match[a], name, match[b]) in scene.relations)
        best = max(best, points)
    return best / sum(stated)


def test_degrees_equal_the_formula_by_hand(scenes):
    rng = np.random.default_rng(1)
    some = scenes[1][:12]
    facts = [caption.facts for scene in some for caption in captions(scene, 2, rng)]
    expected = [[by_hand(scene, one) for one in facts] for scene in some]
    np.testing.assert_allclose(relevance(some, facts, block=5), expected, rtol=1e-6)


def test_a_caption_is_wholly_true_of_its_own_scene(scenes):
    rng = np.random.default_rng(2)
    for scene in scenes[0][:60]:
        assert (relevance([scene], [caption.facts for caption in captions(scene, 5, rng)]) == 1).all()


def test_degrees_lie_between_nothing_and_everything(folder):
    degrees = SceneGraphs.open(folder).relevance()
    assert degrees.shape == (110, 550)
    assert degrees.dtype == np.float32
    assert degrees.min() == 0
    assert degrees.max() == 1


def test_degrees_of_a_part_are_a_part_of_the_degrees(folder):
    graphs = SceneGraphs.open(folder)
    rows, columns = np.array([5, 2]), np.array([7, 100, 3])
    np.testing.assert_array_equal(graphs.relevance(rows, columns), graphs.relevance()[np.ix_(rows, columns)])


def test_each_fact_that_fails_lowers_the_degree_by_its_weight():
    facts = Facts(({"shape": "star", "color": "red", "size": "small"}, {"shape": "heart"}), ((0, "left", 1),), "beach", 2)
    whole = 2 + 2 + 1 + 2 + 2 + 2 + 1
    changed = [star_left_of_heart(), star_left_of_heart(color="green"), star_left_of_heart(size="large"), star_left_of_heart(x=0.95)]
    changed += [replace(star_left_of_heart(), background="snow"), star_left_of_heart(color="green", shape="ring")]
    points = np.array([whole, whole - 2, whole - 1, whole - 2, whole - 2, whole - 4])
    np.testing.assert_allclose(relevance(changed, [facts])[:, 0], points / whole, rtol=1e-6)


def test_two_mentions_need_two_things():
    two_stars = Facts(({"shape": "star"}, {"shape": "star"}))
    star = star_left_of_heart().things[0]
    stars = [Scene("beach", (star,) * count) for count in (1, 2, 3)]
    assert relevance(stars, [two_stars])[:, 0].tolist() == [0.5, 1, 1]


def test_relations_follow_from_places():
    assert star_left_of_heart().relations == {(0, "left", 1)}
    assert star_left_of_heart(x=0.69, y=0.1).relations == {(0, "above", 1)}
    over = Scene("beach", tuple(reversed(star_left_of_heart(x=0.7, y=0.51).things)))
    assert over.relations == {(1, "inside", 0)}
    edge = Scene("beach", tuple(reversed(star_left_of_heart(x=0.9).things)))
    assert edge.relations == {(1, "front", 0), (0, "left", 1)}


def test_held_out_combinations_are_never_trained_on_and_always_tested(scenes):
    train, test = scenes

    def pairs(many):
        return {(thing.shape, thing.color) for scene in many for thing in scene.things}

    def triples(many):
        return {(scene.things[i].shape, name, scene.things[j].shape) for scene in many for i, name, j in scene.relations}

    assert not pairs(train) & held_out_colors
    assert not triples(train) & held_out_relations
    assert len(pairs(test) & held_out_colors) >= 8
    assert triples(test) & held_out_relations
    assert 1 / 3 < np.mean([scene.held_out for scene in test]) < 2 / 3


def test_every_word_of_the_world_is_trained_on_and_the_first_are_frequent(scenes):
    things = [thing for scene in scenes[0] for thing in scene.things]
    assert {thing.color for thing in things} == set(COLORS)
    assert {thing.pattern for thing in things} == set(PATTERNS)
    assert {scene.background for scene in scenes[0]} == set(BACKGROUNDS)
    counts = [sum(thing.shape == shape for thing in things) for shape in SHAPES]
    assert min(counts) > 0
    assert sum(counts[:4]) > 1.5 * sum(counts[-4:])


def test_a_redrawing_keeps_the_graph_and_changes_the_pixels(scenes):
    rng = np.random.default_rng(4)
    for scene in scenes[0][:20]:
        again = redraw(scene, rng)
        assert again.relations == scene.relations
        assert [(t.shape, t.color, t.pattern, t.size) for t in again.things] == [
            (t.shape, t.color, t.pattern, t.size) for t in scene.things
        ]
        assert draw(again).tobytes() != draw(scene).tobytes()


def test_a_picture_is_the_same_every_time_at_any_size(scenes):
    for scene in scenes[0][:10]:
        assert draw(scene).tobytes() == draw(scene).tobytes()
        assert draw(scene, 160).size == (160, 160)
        assert draw(scene, 160).mode == "RGB"


def test_everything_in_a_scene_can_be_seen(scenes):
    for scene in scenes[0][:20]:
        whole = np.asarray(draw(scene), float)
        for i in range(len(scene.things)):
            without = np.asarray(draw(replace(scene, things=scene.things[:i] + scene.things[i + 1 :])), float)
            assert (np.abs(whole - without).sum(-1) > 60).sum() > 10, (scene.background, scene.things[i])


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_ones(tmp_path):
    knobs = {"num_train": 6, "num_val": 1, "num_test": 2, "noise": 0.2, "near_duplicates": 0.3}
    one, two, other = (write_scenes(tmp_path / name, seed=seed, **knobs) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 11
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)
    assert all((one / name).read_bytes() != (other / name).read_bytes() for name in files)


def test_the_folder_has_the_format_of_any_data_set(folder):
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 60 + ["val"] * 10 + ["test"] * 40
    assert all(set(row) == {"filename", "split", "captions"} for row in rows)
    assert all(len(set(row["captions"])) >= 4 for row in rows)
    for row in rows:
        with Image.open(folder / row["filename"]) as image:
            assert (image.size, image.mode, image.format) == ((96, 96), "RGB", "PNG")


def test_the_asked_share_of_training_captions_is_wrong_and_recorded(folder):
    graphs = SceneGraphs.open(folder)
    assert graphs.swapped.sum() == round(0.2 * 60 * 5)
    assert not graphs.swapped[300:].any()
    lines = [json.loads(line) for line in (folder / "scenes.jsonl").read_text().splitlines()]
    assert all(source != line["filename"] for line in lines for source in line["swapped_from"])
    own = graphs.relevance()[graphs.image_of, np.arange(550)]
    assert (own[~graphs.swapped] == 1).all()
    assert own[graphs.swapped].mean() < 0.6


def test_the_asked_share_of_images_are_near_duplicates(folder):
    graphs = SceneGraphs.open(folder)
    copies = np.flatnonzero(graphs.duplicate_of >= 0)
    assert [(copies < 60).sum(), ((copies >= 60) & (copies < 70)).sum(), (copies >= 70).sum()] == [15, 2, 10]
    for copy in copies:
        origin = graphs.duplicate_of[copy]
        assert origin < copy
        assert graphs.scenes[origin].relations == graphs.scenes[copy].relations


def test_nothing_is_written_over(folder, tmp_path):
    before = (folder / "captions.jsonl").read_bytes()
    with pytest.raises(RefusedOverwrite, match="already exists"):
        write_scenes(folder, **SMALL)
    assert (folder / "captions.jsonl").read_bytes() == before
    with pytest.raises(DataError, match=r"scenes\.jsonl"):
        SceneGraphs.open(tmp_path)


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_test": -1},
        {"captions_per_image": 0},
        {"size": 8},
        {"seed": -1},
        {"noise": 1.2},
        {"near_duplicates": -0.1},
        {"noise": 0.1, "num_train": 2},
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_written(tmp_path, knobs):
    with pytest.raises(RecipeError, match=next(iter(knobs))):
        write_scenes(tmp_path / "world", **knobs)
    assert not (tmp_path / "world").exists()


def test_another_style_has_the_same_scenes_in_other_paint_and_under_other_names(tmp_path):
    paper, glass = STYLES["paper"], STYLES["glass"]
    for kind in ("shapes", "colors"):
        own, other = getattr(paper, kind), getattr(glass, kind)
        assert own.keys() == other.keys()
        assert not {word for words in own.values() for word in words} & {word for words in other.values() for word in words}
    assert paper.paint.keys() == glass.paint.keys()
    assert all(np.abs(np.subtract(paper.paint[color], glass.paint[color])).max() > 0.05 for color in COLORS)
    folders = [write_scenes(tmp_path / style, num_train=3, num_val=0, num_test=0, style=style) for style in STYLES]
    one, two = (SceneGraphs.open(folder) for folder in folders)
    assert replace(one.scenes[0], things=()) == replace(two.scenes[0], things=()), "of the same seed"
    assert (folders[0] / "images/000000.png").read_bytes() != (folders[1] / "images/000000.png").read_bytes()
    names = {word for words in (*paper.shapes.values(), *paper.colors.values()) for phrase in words for word in phrase.split()}
    said = (folders[1] / "captions.jsonl").read_text().lower()
    assert not [word for word in sorted(names - {"moon", "sign", "blue"}) if re.search(rf"\b(a|an|plain|shiny) {word}\b", said)]
    with pytest.raises(RecipeError, match=r"style='glas' is no style of drawn worlds: did you mean glass\?"):
        write_scenes(tmp_path / "other", style="glas")


def test_progress_counts_the_images(tmp_path):
    calls = []
    write_scenes(tmp_path / "world", num_train=3, num_val=0, num_test=1, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_captions_are_english(scenes):
    assert [article(word) for word in ("emerald ring", "unpatterned star", "huge heart")] == [
        "an emerald ring",
        "an unpatterned star",
        "a huge heart",
    ]
    assert join(["a", "b", "c"]) == "a, b and c"
    rng = np.random.default_rng(5)
    for scene in scenes[0][:60]:
        for caption in captions(scene, 5, rng):
            assert caption.text[0].isupper()
            assert "  " not in caption.text
            words = caption.text.rstrip(".").lower().replace(",", "").split()
            assert all(a != b for a, b in itertools.pairwise(words)), caption.text


def test_the_world_of_a_seed_stays_what_it_is(tmp_path):
    """Figures that were measured on drawn worlds hold as long as these do not change: captions to the letter, pictures by what one sees."""
    folder = write_scenes(tmp_path / "world", num_train=120, num_val=20, num_test=60, size=48, seed=11, noise=0.1, near_duplicates=0.2)
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    said = "\n".join(caption for row in rows for caption in row["captions"])
    seen = np.stack([np.asarray(Image.open(folder / row["filename"]).resize((4, 4), Image.Resampling.BOX), float) for row in rows])
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "abfeeb66b1a7ce9c"
    assert hashlib.sha256((folder / "scenes.jsonl").read_bytes()).hexdigest()[:16] == "d71cb0c291fe9aee"
    assert seen.mean((0, 1, 2)) == pytest.approx([143.24, 147.62, 145.04], abs=0.1)
    assert seen.std((0, 1, 2)) == pytest.approx([69.63, 58.61, 61.18], abs=0.1)
    assert seen[::20].mean((1, 2, 3)) == pytest.approx([141, 143, 121, 158, 105, 121, 134, 216, 158, 187], abs=0.7)


BACKGROUND_COLORS = {
    "meadow": (145.69, 200.04, 162.33),
    "beach": (171.57, 205.29, 201.93),
    "night": (38.30, 36.00, 79.53),
    "snow": (205.45, 220.81, 237.09),
    "table": (192.10, 141.12, 92.64),
    "sea": (48.54, 136.91, 181.16),
    "desert": (237.89, 186.23, 125.24),
    "paper": (226.92, 231.78, 231.25),
    "sunset": (191.87, 120.88, 121.56),
    "forest": (83.75, 119.39, 84.74),
}


@pytest.mark.parametrize("name", BACKGROUNDS)
def test_backgrounds_keep_their_colors(name):
    canvas = paint_background(name, 64, np.random.default_rng(5))
    assert 255 * canvas.mean((0, 1)) == pytest.approx(BACKGROUND_COLORS[name], abs=0.1)
