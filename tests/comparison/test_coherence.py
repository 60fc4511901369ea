"""Lists of runs side by side: counts by hand and by loops, the marks of a page and a picture, what is refused."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from scipy.stats import kendalltau

import visavis
from visavis.comparison.lists import answer, choose
from visavis.comparison.measure import Mean, Ranker, Scale, measure
from visavis.data import open_dataset
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.dataset import Image as Listed
from visavis.data.scenes import SceneGraphs, write_scenes
from visavis.degrees import Degrees
from visavis.errors import DataError, RefusedOverwrite, RunError, SpecError, VisavisError
from visavis.progress import Silent
from visavis.report.coherence import page
from visavis.report.coherence.figures import lists_picture
from visavis.report.figures import LIGHT
from visavis.report.page import Shades
from visavis.report.thumbnails import Thumbnails
from visavis.runs.folder import open_run, recipe_of
from visavis.types import Encoded

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 8, word_width = 4 }
training = { batch_size = 8, probe_batches = 1, threads = 1 }
[[phases]]
epochs = 1
objective = "Ladder()"
supervision = "GradedSupervision(degrees='SceneDegrees()')"
"""
VOID = {"meta", "img", "source", "br"}


def given(name, matrix):
    """A ranker that scores as it is told: a matrix of images and captions."""
    ones = torch.eye(len(matrix))
    return Ranker(name, "none", Encoded(ones @ torch.tensor(matrix)), Encoded(ones), lambda images, texts: images.vectors @ texts.vectors.T)


def four(*captions):
    """Four images, each with a caption."""
    return Dataset("four", tuple(Listed(f"{i}.png", "test") for i in range(4)), captions or ("a", "b", "c", "d"), np.arange(4))


DEGREES = torch.tensor([[1.0, 0.1, 0.2, 0.3], [0.5, 1.0, 0.2, 0.2], [0.6, 0.3, 1.0, 0.1], [0.7, 0.4, 0.3, 1.0]])
TRUE = given("true", DEGREES.tolist())
FALSE = given("false", (1 - DEGREES).tolist())


class Told(Degrees):
    """A matrix of images and captions as degrees."""

    def __init__(self, matrix):
        self.matrix = matrix

    def of(self, captions):
        raise AssertionError

    def between(self, data, image="own"):
        return lambda images, captions, own=None: self.matrix[images][:, captions]


TOLD = Told(DEGREES)


def test_bands_by_hand():
    """Of four candidates two, three, four and four lie up to the bounds at 50, 75, 90 and 99 %."""
    degrees = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0, 0, 1, 0], [0.5, 1, 1, 1], [1, 1, 1, 1]])
    assert Scale().shares == (0.5, 0.75, 0.9, 0.99)
    assert Scale().bounds(degrees[:1]).tolist() == degrees[0, [3, 2, 1, 1]][None].tolist()
    assert Scale().bands(degrees).tolist() == [[0, 2, 1, 0], [0, 0, 2, 0], [0, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("irrelevant", [0.2, 0.5, 0.9])
def test_distinct_degrees_give_every_query_its_share_of_irrelevant_candidates_whatever_their_scale(irrelevant):
    scale, degrees = Scale(irrelevant), torch.rand(7, 1000)
    bands = scale.bands(degrees)
    assert (bands == 0).sum(1).tolist() == [1000 * irrelevant] * 7
    assert torch.equal(scale.bands(0.9 + 0.1 * degrees**2), bands)
    for band, share in enumerate(scale.shares, 1):
        assert (bands >= band).double().mean() == pytest.approx(1 - share, abs=1e-3)


def test_a_mean_counts_what_is_undefined_and_keeps_captions_of_an_image_together():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert Mean.of(values, np.arange(4)) == Mean(2.0, pytest.approx(1.96 * math.sqrt(2) / 4), 0)
    assert Mean.of(values, np.array([0, 0, 1, 1])) == Mean(2.0, 0.0, 0)
    assert Mean.of(torch.tensor([math.nan, 1.0, 2.0]), np.arange(3)) == Mean(1.5, pytest.approx(1.96 * math.sqrt(0.5) / 2), 1)
    assert math.isnan(Mean.of(torch.tensor([math.nan]), np.arange(1)).mean)


def test_counts_and_scores_by_hand():
    """Captions a to d have these degrees with images 0 to 3; two of four, and what is as low, are irrelevant:

    a 1 .5 .6 .7: 1, 2;  b .1 1 .3 .4: 0, 2;  c .2 .2 1 .3: 0, 1;  d .3 .2 .1 1: 1, 2. The first two of the false order,
    lowest degree first, are exactly these; so are they for images as queries.
    """
    for way in ("t2i", "i2t"):
        true, false = measure([TRUE, FALSE], TOLD, "best", four(), Scale(), 2, Silent())[way]
        assert (true.irrelevant.mean, false.irrelevant.mean) == (0, 2)
        assert (true.more.mean, false.more.mean, false.more.half) == (0, 2, 0)
        assert list(true.scores) == [4]
        assert (true.whole.mean, false.whole.mean) == (pytest.approx(1), pytest.approx(-1))
    (three,) = measure([FALSE], TOLD, "best", four(), Scale(), 3, Silent())["t2i"]
    assert three.irrelevant.mean == 2


def test_a_query_whose_degrees_are_all_equal_is_counted_as_undefined():
    (found,) = measure([TRUE], Told(torch.ones(4, 4)), "best", four(), Scale(), 2, Silent())["t2i"]
    assert found.whole.undefined == 4
    assert found.irrelevant.mean == 0


def test_lists_mark_the_own_item_and_say_its_rank():
    query = answer("t2i", 1, [TRUE, FALSE], TOLD.between(four()), four(), Scale(), 2)
    true, false = query.lists
    assert [(item.index, item.own, item.irrelevant) for item in true.items] == [(1, True, False), (3, False, False)]
    assert [(item.index, item.own, item.irrelevant) for item in false.items] == [(0, False, True), (2, False, True)]
    assert (true.own_rank, false.own_rank, query.bound) == (1, 4, pytest.approx(0.3))
    assert [one["irrelevant"] for one in query.to_json(four())["lists"]] == [0, 2]
    (by_image,) = answer("i2t", 2, [TRUE], TOLD.between(four()), four(), Scale(), 4).lists
    assert [item.index for item in by_image.items] == [2, 0, 1, 3]


def test_queries_are_drawn_by_lot_or_named():
    data = four("A dog.", "a cat", "two birds", "nothing")
    drawn = choose(3, data, 0)
    assert drawn == choose(3, data, 0) != choose(3, data, 1)
    assert [way for way, _ in drawn] == ["t2i"] * 3 + ["i2t"] * 3
    assert [index for _, index in drawn[:3]] == [index for _, index in drawn[3:]]
    assert choose(["a dog", "2.png"], data, 0) == [("t2i", 0), ("i2t", 2)]
    with pytest.raises(VisavisError, match=r"split test of four has no caption and no image 'a dgo': did you mean 'A dog\.'\?"):
        choose(["a dgo"], data, 0)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=16, num_val=4, num_test=40, captions_per_image=2, size=32)


def trained(scenes, folder, seed):
    (folder / "tiny.toml").write_text(RECIPE)
    return visavis.train(folder / "tiny.toml", data=scenes, out=folder / f"run-{seed}", overrides={"seed": seed}).folder


@pytest.fixture(scope="module")
def runs(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [trained(scenes, folder, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def comparison(runs, tmp_path_factory):
    return visavis.coherence(runs, degrees="SceneDegrees()", queries=2, out=tmp_path_factory.mktemp("seen") / "new")


def test_it_leaves_a_report_pictures_and_all_numbers(comparison):
    assert {path.name for path in comparison.folder.iterdir()} == {"report.html", "coherence.json", "lists.png", "scores.png"}
    assert json.loads((comparison.folder / "coherence.json").read_text()) == json.loads(json.dumps(comparison.to_json()))
    assert Image.open(io.BytesIO((comparison.folder / "lists.png").read_bytes())).width == 1800
    assert [run["name"] for run in comparison.to_json()["runs"]] == ["run-0", "run-1", "random"]
    assert comparison.taught == ("run-0", "run-1")


@pytest.fixture(scope="module")
def given_split(runs, scenes):
    """Scores and true degrees of the test captions (rows) with all test images, of the second run."""
    data_module, matcher = open_run(runs[1], recipe_of(runs[1]), Silent())
    data = data_module.data.split("test")
    images, texts = data_module.encode(matcher, data)
    with torch.inference_mode():
        scores = matcher.score(images, texts).T
    return data, scores, SceneGraphs.open(scenes).relevance(data.image_rows, data.caption_rows).T


def test_the_counts_are_those_of_loops_over_scores_and_truth(comparison, given_split):
    data, scores, truth = given_split
    counts = []
    for score, degrees in zip(scores.tolist(), truth.tolist(), strict=True):
        first = sorted(range(40), key=lambda i, score=score: -score[i])[:30]
        bound = sorted(degrees)[19]
        counts.append(sum(degrees[i] <= bound and degrees[i] < max(degrees) for i in first))
    assert comparison.measured["t2i"][1].irrelevant.mean == pytest.approx(sum(counts) / 80)
    for query in comparison.queries[:2]:
        assert query.lists[1].num_irrelevant == counts[query.index]
        ahead = (scores[query.index] > scores[query.index, data.image_of[query.index]]).sum()
        assert query.lists[1].own_rank == ahead + 1


def test_scores_are_those_of_the_first_captions(comparison, given_split):
    data, scores, truth = given_split
    firsts = [own[0] for own in data.captions_of]
    for way, given, degrees in (("t2i", scores[firsts], truth[firsts]), ("i2t", scores[firsts].T, truth[firsts].T)):
        taus = [kendalltau(*pair).statistic for pair in zip(given.numpy(), degrees, strict=True)]
        assert comparison.measured[way][1].whole.mean == pytest.approx(np.mean(taus))
        assert list(comparison.measured[way][1].scores) == [10, 20, 40]


class Marks(HTMLParser):
    """Notes tags that open without closing, tags met, and how many items carry which classes."""

    def __init__(self):
        super().__init__()
        self.open, self.met, self.classes, self.alts = [], set(), [], []

    def handle_starttag(self, tag, attributes):
        self.met.add(tag)
        facts = dict(attributes)
        self.classes += facts.get("class", "").split()
        self.alts += [facts["alt"]] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def marks(text):
    parser = Marks()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.met
    return parser


def test_the_page_is_whole_fetches_nothing_and_marks_every_item(comparison):
    text = (comparison.folder / "report.html").read_text()
    found = marks(text)
    items = [item for query in comparison.queries for one in query.lists for item in one.items]
    keys = 2
    assert found.classes.count("b0") == sum(item.irrelevant for item in items) > 0
    assert found.classes.count("own") == sum(item.own for item in items) > 0
    assert found.classes.count("wrong") == sum(item.irrelevant for item in items) + keys
    assert found.classes.count("right") == sum(item.own for item in items) + keys
    assert all(found.alts)
    words = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "data:", text)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", words)
    for one in comparison.measured["t2i"]:
        assert f"<dd>{one.irrelevant.mean:.1f}</dd>" in text
    assert "trained by the very degrees" in text


def test_captions_are_text_and_images_without_pixels_are_shown_by_their_words(comparison):
    nasty = "<script>alert('x')</script> & \"quotes\" $x_1$"
    bare = replace(comparison.data, images=tuple(replace(image, bytes=None) for image in comparison.data.images), captions=(nasty,) * 80)
    blind = replace(comparison, data=bare)
    text = page.page_of(blind, Shades(b"light", b"dark"), Thumbnails(bare))
    assert nasty not in text
    assert marks(text).classes.count("words") == 2 * 2 * 30 + 4
    assert Image.open(io.BytesIO(lists_picture(blind.queries[:2], bare, Thumbnails(bare)))).width == 1800
    query = replace(blind.queries[0], lists=blind.queries[0].lists[:1] * 6)
    tall = Image.open(io.BytesIO(lists_picture([query], bare, Thumbnails(bare))))
    inches = 0.5 + 6 * (0.3 + 2 * (10 / 15 + 0.1)) + 0.35
    assert tall.height / 150 == pytest.approx(inches, abs=0.02), "six lists of two rows each"


def test_the_frame_of_the_own_image_is_seen_at_a_glance(comparison):
    query = next(query for query in comparison.queries if any(item.own for item in query.lists[0].items))
    picture = Image.open(io.BytesIO(lists_picture([replace(query, lists=query.lists[:1])], comparison.data, Thumbnails(comparison.data))))
    green = np.abs(np.asarray(picture.convert("RGB"), int) - np.array(ImageColor.getrgb(LIGHT.right))).sum(-1) < 12
    own = sum(item.own for item in query.lists[0].items)
    assert green.sum() > 5.5 * own * 4 * 100, "a line of about six pixels around a tile of a hundred"


def test_one_run_and_queries_by_name(runs, scenes, tmp_path):
    data = open_dataset(scenes).split("test")
    found = visavis.coherence(runs[0], degrees="SceneDegrees()", queries=data.images[3].name, top=5, out=tmp_path / "one")
    assert [(query.way, query.index) for query in found.queries] == [("i2t", 3)]
    assert not (tmp_path / "one" / "lists.png").exists()
    assert [len(one.items) for one in found.queries[0].lists] == [5]


@pytest.fixture(scope="module")
def one_vector(scenes, tmp_path_factory):
    """Word vectors that are all the same."""
    path = tmp_path_factory.mktemp("vectors") / "same.txt"
    words = {word for caption in open_dataset(scenes).captions for word in tokenize(caption)}
    path.write_text("".join(f"{word} 1 0\n" for word in sorted(words)))
    return path


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"degrees": "CBow()"}, SpecError, r"'CBow' in 'CBow\(\)' is not in the catalog: did you mean CBoW\?"),
        ({"degrees": "CBoW(vectors={one_vector!r})"}, DataError, "run from 1 to 1, so that nothing is more relevant"),
        ({"queries": "a zebra"}, VisavisError, "has no caption and no image 'a zebra': did you mean"),
        ({"queries": 41}, VisavisError, "queries is 41, expected 1 to 40"),
        ({"irrelevant": 1.0}, VisavisError, "irrelevant is 1, expected a share"),
        ({"top": 0}, VisavisError, "top is 0, expected at least 1"),
        ({"split": "tset"}, DataError, r"has no split tset: did you mean test\?"),
        ({"image": "worst"}, VisavisError, "image is 'worst', expected own, best or mean"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_no_folder(runs, one_vector, tmp_path, change, kind, sentence):
    change = {key: value.format(one_vector=str(one_vector)) if key == "degrees" else value for key, value in change.items()}
    with pytest.raises(kind, match=sentence) as error:
        visavis.coherence(runs, **{"degrees": "SceneDegrees()", "out": tmp_path / "new", **change})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_runs_of_different_data_and_a_folder_in_use_are_refused(runs, tmp_path):
    others = write_scenes(tmp_path / "others", num_train=8, num_val=4, num_test=40, captions_per_image=2, size=32, seed=9)
    run = trained(others, tmp_path, 2)
    with pytest.raises(RunError, match=r"split test of others, the data of .*run-2, is not that of scenes, the data of .*run-0"):
        visavis.coherence([runs[0], run], degrees="SceneDegrees()", out=tmp_path / "new")
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.coherence(runs, degrees="SceneDegrees()", out=run)
