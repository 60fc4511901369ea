"""Ranked lists of runs: counts by hand and by loops, report, plot and errors."""

from __future__ import annotations

import io
import json
import math
import operator
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from scipy.stats import kendalltau
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RefusedOverwrite, RunError, SpecError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import Image as Listed
from visavis.data.synthetic import SceneGraphs, write_synthetic_scenes
from visavis.data.words import tokenize
from visavis.papers.relevance import RelevanceEstimator
from visavis.papers.relevance import coherence_report as page
from visavis.papers.relevance.coherence_report import plot_ranked_lists
from visavis.papers.relevance.ranked_lists import (
    ClusteredMean,
    Ranker,
    RelevanceBands,
    choose_queries,
    measure_lists,
    ndcg_without_match,
    query_lists,
)
from visavis.research.reports.html_report import LIGHT_THEME, ThemedImage, Thumbnails
from visavis.training.runs.open_run import open_run, read_run_recipe

VOID = {"meta", "img", "source", "br"}


def given(name, matrix):
    """A ranker with given scores: a matrix of images and captions."""
    ones = torch.eye(len(matrix))
    return Ranker(
        name,
        "none",
        Encoded(ones @ torch.tensor(matrix)),
        Encoded(ones),
        lambda images, texts: images.vectors @ texts.vectors.T,
    )


def four(*captions):
    """Four images, each with a caption."""
    return Dataset(
        "four",
        tuple(Listed(f"{i}.png", "test") for i in range(4)),
        captions or ("a", "b", "c", "d"),
        np.arange(4),
    )


RELEVANCE = torch.tensor(
    [[1.0, 0.1, 0.2, 0.3], [0.5, 1.0, 0.2, 0.2], [0.6, 0.3, 1.0, 0.1], [0.7, 0.4, 0.3, 1.0]]
)
TRUE = given("true", RELEVANCE.tolist())
FALSE = given("false", (1 - RELEVANCE).tolist())


class MatrixEstimator(RelevanceEstimator):
    """A matrix of images and captions as relevance."""

    def __init__(self, matrix):
        self.matrix = matrix

    def for_captions(self, captions):
        raise AssertionError

    def for_dataset(self, data, caption_aggregation="paired"):
        return lambda images, captions, paired_captions=None: self.matrix[images][:, captions]


ESTIMATOR = MatrixEstimator(RELEVANCE)


def test_relevance_bands_match_hand_values():
    """Of four candidates two, three, four and four lie up to the bounds at 50, 75, 90 and 99 %."""
    relevance = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0, 0, 1, 0], [0.5, 1, 1, 1], [1, 1, 1, 1]])
    assert RelevanceBands().quantiles == (0.5, 0.75, 0.9, 0.99)
    assert (
        RelevanceBands().bounds(relevance[:1]).tolist() == relevance[0, [3, 2, 1, 1]][None].tolist()
    )
    assert RelevanceBands().bands(relevance).tolist() == [
        [0, 2, 1, 0],
        [0, 0, 2, 0],
        [0, 1, 1, 1],
        [1, 1, 1, 1],
    ]


@pytest.mark.parametrize("irrelevant", [0.2, 0.5, 0.9])
def test_relevance_bands_have_given_share_at_any_scale(irrelevant):
    scale, relevance = RelevanceBands(irrelevant), torch.rand(7, 1000)
    bands = scale.bands(relevance)
    assert (bands == 0).sum(1).tolist() == [1000 * irrelevant] * 7
    assert torch.equal(scale.bands(0.9 + 0.1 * relevance**2), bands)
    for band, share in enumerate(scale.quantiles, 1):
        assert (bands >= band).double().mean() == pytest.approx(1 - share, abs=1e-3)


def test_clustered_mean_counts_undefined_and_clusters_images():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert ClusteredMean.from_values(values, np.arange(4)) == ClusteredMean(
        2.0, pytest.approx(1.96 * math.sqrt(2) / 4), 0
    )
    assert ClusteredMean.from_values(values, np.array([0, 0, 1, 1])) == ClusteredMean(2.0, 0.0, 0)
    assert ClusteredMean.from_values(
        torch.tensor([math.nan, 1.0, 2.0]), np.arange(3)
    ) == ClusteredMean(1.5, pytest.approx(1.96 * math.sqrt(0.5) / 2), 1)
    assert math.isnan(ClusteredMean.from_values(torch.tensor([math.nan]), np.arange(1)).mean)


def test_list_statistics_match_hand_values():
    """Captions a to d have these relevance values for images 0 to 3; two of four, and what is as
    low, are irrelevant:

    a 1 .5 .6 .7: 1, 2;  b .1 1 .3 .4: 0, 2;  c .2 .2 1 .3: 0, 1;  d .3 .2 .1 1: 1, 2. The first two
    of the false order, lowest relevance first, are exactly these, also for images as queries.
    """
    for way in ("t2i", "i2t"):
        true, false = measure_lists(
            [TRUE, FALSE],
            ESTIMATOR,
            ESTIMATOR.for_dataset(four()),
            four(),
            RelevanceBands(),
            2,
            NoProgress(),
        )[way]
        assert (true.irrelevant.mean, false.irrelevant.mean) == (0, 2)
        assert (
            true.irrelevant_difference.mean,
            false.irrelevant_difference.mean,
            false.irrelevant_difference.half_width,
        ) == (0, 2, 0)
        assert list(true.coherence_by_k) == [4]
        assert (true.full_list_coherence.mean, false.full_list_coherence.mean) == (
            pytest.approx(1),
            pytest.approx(-1),
        )
    (three,) = measure_lists(
        [FALSE], ESTIMATOR, ESTIMATOR.for_dataset(four()), four(), RelevanceBands(), 3, NoProgress()
    )["t2i"]
    assert three.irrelevant.mean == 2


def test_ndcg_without_match_by_hand():
    """Without the positive, the gains of the others count: 0.5 first instead of 0.8."""
    relevance = torch.tensor([[1.0, 0.5, 0.8, 0.0]])
    positive = torch.tensor([[True, False, False, False]])
    found = ndcg_without_match(torch.tensor([[0, 1, 2, 3]]), relevance, positive, k=2)
    discount = 1 / math.log2(3)
    expected = (0.5 + 0.8 * discount) / (0.8 + 0.5 * discount)
    assert found.tolist() == [pytest.approx(expected)]
    # The place of the positive changes nothing.
    last = ndcg_without_match(torch.tensor([[1, 2, 3, 0]]), relevance, positive, k=2)
    assert last.tolist() == found.tolist()


def test_list_statistics_remove_own_items():
    """The true order is perfect, the false one is the worst, and own items are not counted."""
    for way in ("t2i", "i2t"):
        true, false = measure_lists(
            [TRUE, FALSE],
            ESTIMATOR,
            ESTIMATOR.for_dataset(four()),
            four(),
            RelevanceBands(),
            2,
            NoProgress(),
        )[way]
        matrix = RELEVANCE.T if way == "t2i" else RELEVANCE
        gains = []
        for query in range(4):
            others = sorted(matrix[query, [i for i in range(4) if i != query]].tolist())
            discounts = [1 / math.log2(place + 2) for place in range(3)]
            worst = sum(map(operator.mul, others, discounts))
            gains.append(worst / sum(map(operator.mul, others[::-1], discounts)))
        assert true.no_match.mean == pytest.approx(1)
        assert false.no_match.mean == pytest.approx(statistics.mean(gains))
        assert false.no_match_difference.mean == pytest.approx(statistics.mean(gains) - 1)


def test_list_statistics_count_queries_with_equal_relevance():
    estimator = MatrixEstimator(torch.ones(4, 4))
    (found,) = measure_lists(
        [TRUE], estimator, estimator.for_dataset(four()), four(), RelevanceBands(), 2, NoProgress()
    )["t2i"]
    assert found.full_list_coherence.undefined == 4
    assert found.irrelevant.mean == 0


def test_query_lists_mark_positive_and_its_rank():
    query = query_lists(
        "t2i", 1, [TRUE, FALSE], ESTIMATOR.for_dataset(four()), four(), RelevanceBands(), 2
    )
    true, false = query.lists
    assert [(item.index, item.is_positive, item.irrelevant) for item in true.items] == [
        (1, True, False),
        (3, False, False),
    ]
    assert [(item.index, item.is_positive, item.irrelevant) for item in false.items] == [
        (0, False, True),
        (2, False, True),
    ]
    assert (true.best_positive_rank, false.best_positive_rank, query.irrelevant_bound) == (
        1,
        4,
        pytest.approx(0.3),
    )
    assert [one["irrelevant"] for one in query.to_json(four())["lists"]] == [0, 2]
    (by_image,) = query_lists(
        "i2t", 2, [TRUE], ESTIMATOR.for_dataset(four()), four(), RelevanceBands(), 4
    ).lists
    assert [item.index for item in by_image.items] == [2, 0, 1, 3]


def test_choose_queries_samples_or_finds_by_name():
    data = four("A dog.", "a cat", "two birds", "nothing")
    drawn = choose_queries(3, data, 0)
    assert drawn == choose_queries(3, data, 0) != choose_queries(3, data, 1)
    assert [way for way, _ in drawn] == ["t2i"] * 3 + ["i2t"] * 3
    assert [index for _, index in drawn[:3]] == [index for _, index in drawn[3:]]
    assert choose_queries(["a dog", "2.png"], data, 0) == [("t2i", 0), ("i2t", 2)]
    with pytest.raises(
        VisavisError,
        match=r"image names of split test of four, got 'a dgo'\. Did you mean 'A dog\.'\?",
    ):
        choose_queries(["a dgo"], data, 0)


@pytest.fixture(scope="module")
def tested_scenes(tmp_path_factory):
    """Forty images for tests, so that lists differ."""
    return write_synthetic_scenes(
        tmp_path_factory.mktemp("world") / "scenes",
        num_train=16,
        num_val=4,
        num_test=40,
        captions_per_image=2,
        size=32,
    )


def trained(tested_scenes, folder, seed):
    graded = "GradedSupervision(relevance='SceneRelevance()')"
    recipe = write_recipe(folder / "tiny.toml", {"objective": "Ladder()", "supervision": graded})
    return visavis.train(
        recipe, data=tested_scenes, out=folder / f"run-{seed}", overrides={"seed": seed}
    ).run


@pytest.fixture(scope="module")
def runs(tested_scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [trained(tested_scenes, folder, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def comparison(runs, tmp_path_factory):
    return visavis.papers_coherence(
        runs, relevance="SceneRelevance()", queries=2, out=tmp_path_factory.mktemp("seen") / "new"
    )


def test_coherence_writes_report_plots_and_json(comparison):
    assert {path.name for path in comparison.folder.iterdir()} == {
        "report.html",
        "coherence.json",
        "lists.png",
        "scores.png",
    }
    assert json.loads((comparison.folder / "coherence.json").read_text()) == json.loads(
        json.dumps(comparison.to_json())
    )
    assert Image.open(io.BytesIO((comparison.folder / "lists.png").read_bytes())).width == 1800
    assert [run["name"] for run in comparison.to_json()["runs"]] == ["run-0", "run-1", "random"]
    assert comparison.trained_on_estimator == ("run-0", "run-1")


@pytest.fixture(scope="module")
def given_split(runs, tested_scenes):
    """Scores and true relevance of the test captions (rows) with all test images, of the second
    run.
    """
    data_module, matcher = open_run(runs[1], read_run_recipe(runs[1]), NoProgress())
    data = data_module.data.split("test")
    images, texts = data_module.encode(matcher, data)
    with torch.inference_mode():
        scores = matcher.score(images, texts).T
    return (
        data,
        scores,
        SceneGraphs.open(tested_scenes).relevance(data.image_rows, data.caption_rows).T,
    )


def test_coherence_counts_equal_loops(comparison, given_split):
    data, scores, truth = given_split
    counts = []
    for score, relevance in zip(scores.tolist(), truth.tolist(), strict=True):
        first = sorted(range(40), key=lambda i, score=score: -score[i])[:30]
        bound = sorted(relevance)[19]
        counts.append(sum(relevance[i] <= bound and relevance[i] < max(relevance) for i in first))
    assert comparison.statistics["t2i"][1].irrelevant.mean == pytest.approx(sum(counts) / 80)
    for query in comparison.queries[:2]:
        assert query.lists[1].num_irrelevant == counts[query.index]
        ahead = (scores[query.index] > scores[query.index, data.image_of[query.index]]).sum()
        assert query.lists[1].best_positive_rank == ahead + 1


def test_coherence_scores_use_first_captions(comparison, given_split):
    data, scores, truth = given_split
    firsts = [own[0] for own in data.captions_of]
    for way, given, relevance in (
        ("t2i", scores[firsts], truth[firsts]),
        ("i2t", scores[firsts].T, truth[firsts].T),
    ):
        taus = [kendalltau(*pair).statistic for pair in zip(given.numpy(), relevance, strict=True)]
        assert comparison.statistics[way][1].full_list_coherence.mean == pytest.approx(
            np.mean(taus)
        )
        assert list(comparison.statistics[way][1].coherence_by_k) == [10, 20, 40]


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


def test_coherence_report_is_offline_and_marks_items(comparison):
    text = (comparison.folder / "report.html").read_text()
    found = marks(text)
    items = [item for query in comparison.queries for one in query.lists for item in one.items]
    keys = 2
    assert found.classes.count("b0") == sum(item.irrelevant for item in items) > 0
    assert found.classes.count("positive") == sum(item.is_positive for item in items) > 0
    assert found.classes.count("irrelevant") == sum(item.irrelevant for item in items) + keys
    assert found.classes.count("relevant") == sum(item.is_positive for item in items) + keys
    assert all(found.alts)
    words = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "data:", text)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", words)
    for one in comparison.statistics["t2i"]:
        assert f"<dd>{one.irrelevant.mean:.1f}</dd>" in text
    assert "trained with the same relevance estimator" in text


@pytest.mark.slow
def test_coherence_report_escapes_captions_without_pixels(comparison):
    nasty = "<script>alert('x')</script> & \"quotes\" $x_1$"
    bare = replace(
        comparison.data,
        images=tuple(replace(image, location=None) for image in comparison.data.images),
        captions=(nasty,) * 80,
    )
    blind = replace(comparison, data=bare)
    text = page.render_coherence(blind, ThemedImage(b"light", b"dark"), Thumbnails(bare))
    assert nasty not in text
    assert marks(text).classes.count("words") == 2 * 2 * 30 + 4
    assert (
        Image.open(io.BytesIO(plot_ranked_lists(blind.queries[:2], bare, Thumbnails(bare)))).width
        == 1800
    )
    query = replace(blind.queries[0], lists=blind.queries[0].lists[:1] * 6)
    tall = Image.open(io.BytesIO(plot_ranked_lists([query], bare, Thumbnails(bare))))
    inches = 0.5 + 6 * (0.3 + 2 * (10 / 15 + 0.1)) + 0.35
    assert tall.height / 150 == pytest.approx(inches, abs=0.02), "six lists of two rows each"


def test_ranked_list_plot_frames_positive(comparison):
    query = next(
        query
        for query in comparison.queries
        if any(item.is_positive for item in query.lists[0].items)
    )
    plot = Image.open(
        io.BytesIO(
            plot_ranked_lists(
                [replace(query, lists=query.lists[:1])],
                comparison.data,
                Thumbnails(comparison.data),
            )
        )
    )
    green = (
        np.abs(
            np.asarray(plot.convert("RGB"), int) - np.array(ImageColor.getrgb(LIGHT_THEME.positive))
        ).sum(-1)
        < 12
    )
    own = sum(item.is_positive for item in query.lists[0].items)
    assert green.sum() > 5.5 * own * 4 * 100, (
        "a line of about six pixels around a tile of a hundred"
    )


def test_coherence_of_one_run_with_named_query(runs, tested_scenes, tmp_path):
    data = open_dataset(tested_scenes).split("test")
    found = visavis.papers_coherence(
        runs[0],
        relevance="SceneRelevance()",
        queries=data.images[3].name,
        top=5,
        out=tmp_path / "one",
    )
    assert [(query.direction, query.index) for query in found.queries] == [("i2t", 3)]
    assert not (tmp_path / "one" / "lists.png").exists()
    assert [len(one.items) for one in found.queries[0].lists] == [5]


@pytest.fixture(scope="module")
def one_vector(tested_scenes, tmp_path_factory):
    """Word vectors that are all the same."""
    path = tmp_path_factory.mktemp("vectors") / "same.txt"
    words = {word for caption in open_dataset(tested_scenes).captions for word in tokenize(caption)}
    path.write_text("".join(f"{word} 1 0\n" for word in sorted(words)))
    return path


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (
            {"relevance": "CBow()"},
            SpecError,
            r"'CBow' in 'CBow\(\)' is not in the catalog: did you mean CBoW\?",
        ),
        (
            {"relevance": "CBoW(vectors={one_vector!r})"},
            DataError,
            "expected different values, got only values from 1 to 1",
        ),
        ({"queries": "a zebra"}, VisavisError, "got 'a zebra'. Did you mean"),
        ({"queries": 41}, VisavisError, "queries: expected 1 to 40, .*, got 41"),
        (
            {"irrelevant_share": 1.0},
            VisavisError,
            "irrelevant_share: expected a number between 0 and 1 such as 0.5, got 1",
        ),
        ({"top": 0}, VisavisError, "top: expected an integer >= 1, got 0"),
        (
            {"split": "tset"},
            DataError,
            r"expected one of its splits \(.*\), got tset\. Use test\.$",
        ),
    ],
)
def test_coherence_rejects_invalid_arguments_without_folder(
    runs, one_vector, tmp_path, change, kind, sentence
):
    change = {
        key: value.format(one_vector=str(one_vector)) if key == "relevance" else value
        for key, value in change.items()
    }
    with pytest.raises(kind, match=sentence) as error:
        visavis.papers_coherence(
            runs, **{"relevance": "SceneRelevance()", "out": tmp_path / "new", **change}
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_coherence_rejects_other_data_and_existing_folder(runs, tmp_path):
    others = write_synthetic_scenes(
        tmp_path / "others",
        num_train=8,
        num_val=4,
        num_test=40,
        captions_per_image=2,
        size=32,
        seed=9,
    )
    run = trained(others, tmp_path, 2)
    with pytest.raises(
        RunError,
        match=r"run-2: expected split test of scenes, .*run-0 ranks, got another split test of others",
    ):
        visavis.papers_coherence([runs[0], run], relevance="SceneRelevance()", out=tmp_path / "new")
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.papers_coherence(runs, relevance="SceneRelevance()", out=run)
