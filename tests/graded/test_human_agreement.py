"""Agreement with human judgments: hand values, laws of the bootstrap, damaged files, and published
judgments.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

import visavis
from visavis.core.errors import DataError, RunError
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import Image
from visavis.papers.relevance.human_agreement import (
    FLICKR8K_FILES,
    SEED,
    HumanJudgments,
    measure_agreement,
    rank_correlations,
    read_crisscrossed_image_captions,
    read_flickr8k_judgments,
    relevance_of_pairs,
    sampled_spearman,
)

IMAGES = 5


@pytest.fixture
def split() -> Dataset:
    return Dataset(
        name="judged",
        images=tuple(Image(f"{i}.jpg", "test") for i in range(IMAGES)),
        captions=tuple(f"caption {i}" for i in range(2 * IMAGES)),
        image_of=np.repeat(np.arange(IMAGES), 2),
    )


def make_judgments(images: int = 60, each: int = 8) -> HumanJudgments:
    random = np.random.default_rng(0)
    number = images * each
    truth = random.normal(size=number)
    raters = np.clip(np.round(truth + 0.7 * random.normal(size=(3, number)) + 2.5), 1, 4)
    own = np.arange(number) % each == 0
    nothing = np.zeros(number, int)
    return HumanJudgments(
        "expert",
        np.repeat(np.arange(images), each),
        nothing,
        own,
        raters.mean(0),
        raters,
        (raters.sum(0) - raters) / 2,
    )


def test_agreement_of_perfect_reversed_and_random_scores() -> None:
    judgments = make_judgments()
    blind = np.random.default_rng(1).random(len(judgments.is_own_caption))
    everything, _ = measure_agreement(
        judgments,
        {"perfect": judgments.ratings, "reversed": -judgments.ratings, "blind": blind},
        resamples=50,
    )
    for name in ("kendall", "spearman"):
        assert everything.runs["perfect"][name].value == pytest.approx(1)
        assert everything.runs["perfect"][name].interval == pytest.approx((1, 1))
        assert everything.runs["reversed"][name].value == pytest.approx(-1)
        low, high = everything.runs["blind"][name].interval
        assert low < 0 < high
        assert 0 < everything.annotators[name].value < 1


def test_agreement_equals_scipy_with_and_without_own_captions() -> None:
    judgments = make_judgments()
    scores = judgments.ratings + np.random.default_rng(2).normal(size=len(judgments.is_own_caption))
    everything, others = measure_agreement(judgments, {"run": scores}, resamples=3)
    assert (
        everything.includes_own_captions,
        everything.pairs,
        others.includes_own_captions,
        others.pairs,
    ) == (True, 480, False, 420)
    for found, kept in (
        (everything, judgments.is_own_caption | True),
        (others, ~judgments.is_own_caption),
    ):
        assert found.runs["run"]["kendall"].value == pytest.approx(
            kendalltau(scores[kept], judgments.ratings[kept]).statistic
        )
        assert found.runs["run"]["spearman"].value == pytest.approx(
            spearmanr(scores[kept], judgments.ratings[kept]).statistic
        )
        single = [
            kendalltau(one[kept], rest[kept]).statistic
            for one, rest in zip(
                judgments.single_ratings, judgments.mean_other_ratings, strict=True
            )
        ]
        assert found.annotators["kendall"].value == pytest.approx(np.mean(single))


def test_resamples_draw_whole_images_with_fixed_seed() -> None:
    """Pairs of one image that are copies of each other add no information: the interval stays as
    wide.
    """
    judgments = make_judgments(each=1)
    scores = judgments.ratings + np.random.default_rng(3).normal(size=60)
    one = rank_correlations(scores, judgments.ratings, judgments.images, 200)["spearman"]
    copied = rank_correlations(
        *(np.repeat(values, 20) for values in (scores, judgments.ratings, judgments.images)), 200
    )["spearman"]
    assert copied.value == pytest.approx(one.value)
    assert copied.resampled == pytest.approx(one.resampled)
    shuffled = np.random.default_rng(4).permutation(60)
    again = rank_correlations(
        scores[shuffled], judgments.ratings[shuffled], judgments.images[shuffled], 200
    )["spearman"]
    assert again.resampled == pytest.approx(one.resampled)
    low, high = one.interval
    assert low < one.value < high
    fisher = 1.96 / np.sqrt(60 - 3)
    assert high - low == pytest.approx(
        np.diff(np.tanh(np.arctanh(one.value) + fisher * np.array([-1, 1])))[0], rel=0.35
    )


@pytest.mark.parametrize("digits", [0, 1, 9])  # scores with many ties, with some, with none
def test_resampled_correlations_equal_scipy(digits: int) -> None:
    random = np.random.default_rng(5)
    images, ratings = random.integers(12, size=90), random.integers(5, size=90)
    scores = (ratings + 2 * random.normal(size=90)).round(digits)
    found = rank_correlations(scores, ratings, images, 20)
    draws = np.random.default_rng(SEED)
    for draw in range(20):
        rows = np.concatenate(
            [np.flatnonzero(images == image) for image in draws.integers(12, size=12)]
        )
        assert found["kendall"].resampled[draw] == pytest.approx(
            kendalltau(scores[rows], ratings[rows]).statistic, abs=1e-12
        )
        assert found["spearman"].resampled[draw] == pytest.approx(
            spearmanr(scores[rows], ratings[rows]).statistic, abs=1e-12
        )


def test_sampled_spearman_uses_one_pair_of_half_the_queries() -> None:
    """Of two pairs Spearman's rho is 1 or -1: over halves of four queries its mean is Kendall's
    tau, here 2/3, whatever is copied.
    """
    first, second, queries = np.arange(4.0), np.array([1.0, 0, 2, 3]), np.array([7, 3, 5, 1])
    times = np.array([1, 4, 2, 3])
    for found in (
        sampled_spearman(first, second, queries, 200),
        sampled_spearman(*(np.repeat(each, times) for each in (first, second, queries)), 200),
    ):
        assert set(found.resampled.round(9)) == {-1, 1}
        assert found.value == pytest.approx(2 / 3, abs=3 * np.sqrt((1 - 4 / 9) / 200))
        assert found.std == pytest.approx(np.sqrt(1 - found.value**2))


def test_agreement_differences_are_paired() -> None:
    judgments = make_judgments()
    scores = judgments.ratings + np.random.default_rng(5).normal(size=len(judgments.is_own_caption))
    found = next(
        measure_agreement(
            judgments, {"one": scores, "same": 3 * scores + 1, "none": -scores}, resamples=20
        )
    )
    assert found.differences.keys() == {"same", "none"}
    assert found.differences["same"]["kendall"].interval == pytest.approx((0, 0))
    assert found.differences["none"]["kendall"].value == pytest.approx(
        -2 * found.runs["one"]["kendall"].value
    )
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["difference_to_first"]["same"][
        "kendall"
    ]["value"] == pytest.approx(0)


def write(
    folder: Path, expert: str, crowd: str = "0.jpg\t1.jpg#0\t0.25\t1\t3\n1.jpg\t1.jpg#1\t1\t3\t0\n"
) -> None:
    (folder / FLICKR8K_FILES["expert"]).write_text(expert)
    (folder / FLICKR8K_FILES["crowd"]).write_text(crowd)


def test_flickr8k_judgments_match_files(split: Dataset, tmp_path: Path) -> None:
    write(tmp_path, "0.jpg\t3.jpg#1\t1\t1\t2\n4.jpg\t4.jpg#0\t4\t3\t4\n")
    judgments = read_flickr8k_judgments("expert", tmp_path, split)
    assert (
        judgments.images.tolist(),
        judgments.captions.tolist(),
        judgments.is_own_caption.tolist(),
    ) == ([0, 4], [7, 8], [False, True])
    assert judgments.ratings.tolist() == pytest.approx([4 / 3, 11 / 3])
    assert judgments.single_ratings.tolist() == [[1, 4], [1, 3], [2, 4]]
    assert judgments.mean_other_ratings.tolist() == [[1.5, 3.5], [1.5, 4], [1, 3.5]]
    crowd = read_flickr8k_judgments("crowd", tmp_path, split)
    assert crowd.ratings.tolist() == [0.25, 1]
    assert (crowd.single_ratings[0] + 3 * crowd.mean_other_ratings[0])[0] == 1
    assert (crowd.single_ratings[0][1], crowd.mean_other_ratings[0][1]) == (1, 1)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "0.jpg\t3.jpg#1\t1\t1",
            (
                r"ExpertAnnotations\.txt:2: expected an image, a caption as file#number .*, got "
                r"'0\.jpg\\t3\.jpg#1\\t1\\t1'\.$"
            ),
        ),
        ("0.jpg\t3.jpg#1\t1\t1\t5", "expected .* three ratings from 1 to 4"),
        ("0.jpg\t3.jpg#1\t1\t1\tnan", ":2: expected an image, a caption"),
        ("0.jpg\t3.jpg#one\t1\t1\t2", ":2: expected an image, a caption"),
        ("9.jpg\t3.jpg#1\t1\t1\t2", r":2: expected one of the 5 images of the split, got '9\.jpg'"),
        ("0.jpg\t3.jpg\t1\t1\t2", r":2: expected one of the 5 images of the split, got ''"),
        (
            "0.jpg\t3.jpg#2\t1\t1\t2",
            r":2: expected a caption number from 0 to 1 of image 3\.jpg, got 2",
        ),
        ("0.jpg\t3.jpg#-1\t1\t1\t2", r"from 0 to 1 of image 3\.jpg, got -1"),
    ],
)
def test_flickr8k_judgments_report_damaged_line(
    split: Dataset, tmp_path: Path, line: str, sentence: str
) -> None:
    write(tmp_path, f"0.jpg\t3.jpg#1\t1\t1\t2\n{line}\n0.jpg\t3.jpg#0\t1\t1\t2\n")
    with pytest.raises(DataError, match=sentence):
        read_flickr8k_judgments("expert", tmp_path, split)


def test_judgments_report_missing_empty_and_invalid_files(split: Dataset, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"ExpertAnnotations\.txt: expected human judgments, which are available for the test images of Flickr8k",
    ):
        read_flickr8k_judgments("expert", tmp_path, split)
    write(tmp_path, "", "0.jpg\t1.jpg#0\t1\t1\t0\n")
    with pytest.raises(DataError, match=r"ExpertAnnotations\.txt: .* got an empty file"):
        read_flickr8k_judgments("expert", tmp_path, split)
    with pytest.raises(
        DataError, match=r"CrowdFlowerAnnotations\.txt:1: expected"
    ):  # only one annotator
        read_flickr8k_judgments("crowd", tmp_path, split)
    with pytest.raises(DataError, match=r"^run: expected a finite score, got NaN for pair 3"):
        next(
            measure_agreement(make_judgments(), {"run": np.where(np.arange(480) == 3, np.nan, 1.0)})
        )
    with pytest.raises(RunError, match=r"^run, index: expected at least one folder"):
        visavis.papers_agreement([])


@pytest.mark.slow
@pytest.mark.data
def test_flickr8k_judgments_have_published_sizes() -> None:
    test = open_dataset("flickr8k").split("test")
    folder = Path(test.images[0].location.path).parent
    expert, crowd = (read_flickr8k_judgments(kind, folder, test) for kind in FLICKR8K_FILES)
    assert (
        len(expert.is_own_caption),
        expert.is_own_caption.sum(),
        len(np.unique(expert.images)),
    ) == (5822, 158, 1000)
    assert (
        len(crowd.is_own_caption),
        crowd.is_own_caption.sum(),
        len(np.unique(crowd.images)),
    ) == (47830, 721, 1000)
    assert (
        expert.ratings[expert.is_own_caption].mean()
        > expert.ratings[~expert.is_own_caption].mean() + 1
    )
    assert (
        crowd.ratings[crowd.is_own_caption].mean()
        > crowd.ratings[~crowd.is_own_caption].mean() + 0.5
    )
    everything, _ = measure_agreement(expert, {"the crowd": expert.ratings}, resamples=2)
    assert 0.6 < everything.annotators["kendall"].value < 0.9


@pytest.mark.slow
@pytest.mark.data
def test_crisscrossed_captions_have_published_sizes(data_folder: Path, split: Dataset) -> None:
    folder = data_folder / "coco_5k_test_text"
    source, ratings = folder / "dataset_coco_5k_test.json", folder / "cxc_sits_test.csv"
    test = open_dataset(folder).split("test")
    judgments = read_crisscrossed_image_captions(ratings, source, test)
    assert (
        len(judgments.is_own_caption),
        judgments.is_own_caption.sum(),
        len(np.unique(judgments.images)),
        len(np.unique(judgments.captions)),
    ) == (
        44_833,
        25_000,
        5_000,
        25_000,
    )
    assert (judgments.ratings[0], test.images[judgments.images[0]].name) == (
        2.2,
        "COCO_val2014_000000365325.jpg",
    )
    assert (
        judgments.ratings[judgments.is_own_caption].mean()
        > judgments.ratings[~judgments.is_own_caption].mean() + 1
    )
    with pytest.raises(
        DataError,
        match=r"csv: expected ratings of the 7 images of the split .*, got 'COCO_val2014_\d+\.jpg'",
    ):
        read_crisscrossed_image_captions(ratings, source, test.take(np.arange(7)))
    with pytest.raises(DataError, match=r"image 0\.jpg is not in .*dataset_coco_5k_test\.json"):
        read_crisscrossed_image_captions(ratings, source, split)


def test_relevance_of_pairs_equals_block(split: Dataset) -> None:
    judgments = make_judgments(images=IMAGES, each=6)
    captions = np.random.default_rng(6).integers(2 * IMAGES, size=30)
    matrix = torch.rand(IMAGES, 2 * IMAGES, dtype=torch.float64)
    found = relevance_of_pairs(
        replace(judgments, captions=captions), lambda images, captions: matrix[images][:, captions]
    )
    assert found == pytest.approx(matrix[judgments.images, captions].numpy())
