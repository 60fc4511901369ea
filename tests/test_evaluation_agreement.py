"""Agreement with people: correlations by hand, laws of the bootstrap, files that are missing or damaged, the real judgements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

import visavis
from visavis.data import open_dataset
from visavis.data.dataset import Dataset, Image
from visavis.errors import DataError, RunError
from visavis.evaluation.agreement import agree, degrees_of_pairs
from visavis.evaluation.human_judgements import FILES, Judgements, read_crisscrossed, read_judgements
from visavis.evaluation.rank_correlation import SEED, correlate, sampled_spearman

IMAGES = 5


@pytest.fixture
def split() -> Dataset:
    return Dataset(
        name="judged",
        images=tuple(Image(f"{i}.jpg", "test") for i in range(IMAGES)),
        captions=tuple(f"caption {i}" for i in range(2 * IMAGES)),
        image_of=np.repeat(np.arange(IMAGES), 2),
    )


def judgements(images: int = 60, each: int = 8) -> Judgements:
    random = np.random.default_rng(0)
    number = images * each
    truth = random.normal(size=number)
    raters = np.clip(np.round(truth + 0.7 * random.normal(size=(3, number)) + 2.5), 1, 4)
    own = np.arange(number) % each == 0
    nothing = np.zeros(number, int)
    return Judgements("expert", np.repeat(np.arange(images), each), nothing, own, raters.mean(0), raters, (raters.sum(0) - raters) / 2)


def test_a_perfect_a_reversed_and_a_blind_model() -> None:
    said = judgements()
    blind = np.random.default_rng(1).random(len(said.own))
    everything, _ = agree(said, {"perfect": said.ratings, "reversed": -said.ratings, "blind": blind}, resamples=50)
    for name in ("kendall", "spearman"):
        assert everything.runs["perfect"][name].value == pytest.approx(1)
        assert everything.runs["perfect"][name].interval == pytest.approx((1, 1))
        assert everything.runs["reversed"][name].value == pytest.approx(-1)
        low, high = everything.runs["blind"][name].interval
        assert low < 0 < high
        assert 0 < everything.people[name].value < 1


def test_values_are_those_of_scipy_and_own_pairs_can_be_left_out() -> None:
    said = judgements()
    scores = said.ratings + np.random.default_rng(2).normal(size=len(said.own))
    everything, others = agree(said, {"run": scores}, resamples=3)
    assert (everything.own_pairs, everything.pairs, others.own_pairs, others.pairs) == (True, 480, False, 420)
    for found, kept in ((everything, said.own | True), (others, ~said.own)):
        assert found.runs["run"]["kendall"].value == pytest.approx(kendalltau(scores[kept], said.ratings[kept]).statistic)
        assert found.runs["run"]["spearman"].value == pytest.approx(spearmanr(scores[kept], said.ratings[kept]).statistic)
        single = [kendalltau(one[kept], rest[kept]).statistic for one, rest in zip(said.raters, said.others, strict=True)]
        assert found.people["kendall"].value == pytest.approx(np.mean(single))


def test_resamples_are_of_images_with_all_their_pairs_and_seeded() -> None:
    """Pairs of one image that are copies of each other say nothing more: the interval stays as wide."""
    said = judgements(each=1)
    scores = said.ratings + np.random.default_rng(3).normal(size=60)
    one = correlate(scores, said.ratings, said.images, 200)["spearman"]
    copied = correlate(*(np.repeat(values, 20) for values in (scores, said.ratings, said.images)), 200)["spearman"]
    assert copied.value == pytest.approx(one.value)
    assert copied.resampled == pytest.approx(one.resampled)
    shuffled = np.random.default_rng(4).permutation(60)
    again = correlate(scores[shuffled], said.ratings[shuffled], said.images[shuffled], 200)["spearman"]
    assert again.resampled == pytest.approx(one.resampled)
    low, high = one.interval
    assert low < one.value < high
    fisher = 1.96 / np.sqrt(60 - 3)
    assert high - low == pytest.approx(np.diff(np.tanh(np.arctanh(one.value) + fisher * np.array([-1, 1])))[0], rel=0.35)


@pytest.mark.parametrize("digits", [0, 1, 9])  # scores with many ties, with some, with none
def test_a_resample_is_correlated_as_scipy_would(digits: int) -> None:
    random = np.random.default_rng(5)
    images, ratings = random.integers(12, size=90), random.integers(5, size=90)
    scores = (ratings + 2 * random.normal(size=90)).round(digits)
    found = correlate(scores, ratings, images, 20)
    draws = np.random.default_rng(SEED)
    for draw in range(20):
        rows = np.concatenate([np.flatnonzero(images == image) for image in draws.integers(12, size=12)])
        assert found["kendall"].resampled[draw] == pytest.approx(kendalltau(scores[rows], ratings[rows]).statistic, abs=1e-12)
        assert found["spearman"].resampled[draw] == pytest.approx(spearmanr(scores[rows], ratings[rows]).statistic, abs=1e-12)


def test_a_sample_is_half_of_the_queries_with_one_pair_each() -> None:
    """Of two pairs Spearman's rho is 1 or -1: over halves of four queries its mean is Kendall's tau, here 2/3, whatever is copied."""
    first, second, queries = np.arange(4.0), np.array([1.0, 0, 2, 3]), np.array([7, 3, 5, 1])
    times = np.array([1, 4, 2, 3])
    for found in (
        sampled_spearman(first, second, queries, 200),
        sampled_spearman(*(np.repeat(each, times) for each in (first, second, queries)), 200),
    ):
        assert set(found.resampled.round(9)) == {-1, 1}
        assert found.value == pytest.approx(2 / 3, abs=3 * np.sqrt((1 - 4 / 9) / 200))
        assert found.deviation == pytest.approx(np.sqrt(1 - found.value**2))


def test_a_difference_is_paired() -> None:
    said = judgements()
    scores = said.ratings + np.random.default_rng(5).normal(size=len(said.own))
    found = next(agree(said, {"one": scores, "same": 3 * scores + 1, "none": -scores}, resamples=20))
    assert found.differences.keys() == {"same", "none"}
    assert found.differences["same"]["kendall"].interval == pytest.approx((0, 0))
    assert found.differences["none"]["kendall"].value == pytest.approx(-2 * found.runs["one"]["kendall"].value)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["less_the_first"]["same"]["kendall"]["value"] == pytest.approx(0)


def write(folder: Path, expert: str, crowd: str = "0.jpg\t1.jpg#0\t0.25\t1\t3\n1.jpg\t1.jpg#1\t1\t3\t0\n") -> None:
    (folder / FILES["expert"]).write_text(expert)
    (folder / FILES["crowd"]).write_text(crowd)


def test_files_are_read_as_they_are_written(split: Dataset, tmp_path: Path) -> None:
    write(tmp_path, "0.jpg\t3.jpg#1\t1\t1\t2\n4.jpg\t4.jpg#0\t4\t3\t4\n")
    said = read_judgements("expert", tmp_path, split)
    assert (said.images.tolist(), said.captions.tolist(), said.own.tolist()) == ([0, 4], [7, 8], [False, True])
    assert said.ratings.tolist() == pytest.approx([4 / 3, 11 / 3])
    assert said.raters.tolist() == [[1, 4], [1, 3], [2, 4]]
    assert said.others.tolist() == [[1.5, 3.5], [1.5, 4], [1, 3.5]]
    crowd = read_judgements("crowd", tmp_path, split)
    assert crowd.ratings.tolist() == [0.25, 1]
    assert (crowd.raters[0] + 3 * crowd.others[0])[0] == 1
    assert (crowd.raters[0][1], crowd.others[0][1]) == (1, 1)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "0.jpg\t3.jpg#1\t1\t1",
            r"ExpertAnnotations\.txt:2: '0\.jpg\\t3\.jpg#1\\t1\\t1' is damaged: expected an image, a caption as file#number",
        ),
        ("0.jpg\t3.jpg#1\t1\t1\t5", "is damaged: .* three ratings from 1 to 4"),
        ("0.jpg\t3.jpg#1\t1\t1\tnan", "is damaged"),
        ("0.jpg\t3.jpg#one\t1\t1\t2", "is damaged"),
        ("", "is damaged"),
        ("9.jpg\t3.jpg#1\t1\t1\t2", r":2: the split of 5 images has no image '9\.jpg'"),
        ("0.jpg\t3.jpg\t1\t1\t2", r":2: (the split of 5 images has no image ''|.* is damaged)"),
        ("0.jpg\t3.jpg#2\t1\t1\t2", r":2: image 3\.jpg has 2 captions, none of number 2 counted from 0"),
        ("0.jpg\t3.jpg#-1\t1\t1\t2", r"none of number -1"),
    ],
)
def test_a_damaged_line_is_named(split: Dataset, tmp_path: Path, line: str, sentence: str) -> None:
    write(tmp_path, f"0.jpg\t3.jpg#1\t1\t1\t2\n{line}\n0.jpg\t3.jpg#0\t1\t1\t2\n")
    with pytest.raises(DataError, match=sentence):
        read_judgements("expert", tmp_path, split)


def test_missing_empty_and_impossible_judgements_are_told(split: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ExpertAnnotations\.txt does not exist: people's judgements are of Flickr8k's test images"):
        read_judgements("expert", tmp_path, split)
    write(tmp_path, "", "0.jpg\t1.jpg#0\t1\t1\t0\n")
    with pytest.raises(DataError, match=r"ExpertAnnotations\.txt is empty"):
        read_judgements("expert", tmp_path, split)
    with pytest.raises(DataError, match=r"CrowdFlowerAnnotations\.txt:1: .* is damaged"):  # one answer has nobody to agree with
        read_judgements("crowd", tmp_path, split)
    with pytest.raises(DataError, match=r"^run: the score of pair 3 is NaN"):
        next(agree(judgements(), {"run": np.where(np.arange(480) == 3, np.nan, 1.0)}))
    with pytest.raises(RunError, match=r"^there is no run to compare with people"):
        visavis.agreement([])


@pytest.mark.data
def test_the_judgements_of_flickr8k_are_read_whole() -> None:
    test = open_dataset("flickr8k").split("test")
    folder = Path(test.images[0].bytes.path).parent
    expert, crowd = (read_judgements(kind, folder, test) for kind in FILES)
    assert (len(expert.own), expert.own.sum(), len(np.unique(expert.images))) == (5822, 158, 1000)
    assert (len(crowd.own), crowd.own.sum(), len(np.unique(crowd.images))) == (47830, 721, 1000)
    assert expert.ratings[expert.own].mean() > expert.ratings[~expert.own].mean() + 1
    assert crowd.ratings[crowd.own].mean() > crowd.ratings[~crowd.own].mean() + 0.5
    everything, _ = agree(expert, {"the crowd": expert.ratings}, resamples=2)
    assert 0.6 < everything.people["kendall"].value < 0.9


@pytest.mark.data
def test_the_ratings_of_crisscrossed_captions_are_read_whole(data_folder: Path, split: Dataset) -> None:
    folder = data_folder / "coco_5k_test_text"
    source, ratings = folder / "dataset_coco_5k_test.json", folder / "cxc_sits_test.csv"
    test = open_dataset(folder).split("test")
    said = read_crisscrossed(ratings, source, test)
    assert (len(said.own), said.own.sum(), len(np.unique(said.images)), len(np.unique(said.captions))) == (44_833, 25_000, 5_000, 25_000)
    assert (said.ratings[0], test.images[said.images[0]].name) == (2.2, "COCO_val2014_000000365325.jpg")
    assert said.ratings[said.own].mean() > said.ratings[~said.own].mean() + 1
    with pytest.raises(DataError, match=r"csv rates 'COCO_val2014_\d+\.jpg', which is not among the 7 images of the split"):
        read_crisscrossed(ratings, source, test.take(np.arange(7)))
    with pytest.raises(DataError, match=r"image 0\.jpg is not in .*dataset_coco_5k_test\.json"):
        read_crisscrossed(ratings, source, split)


def test_degrees_of_pairs_are_those_of_the_block(split: Dataset) -> None:
    said = judgements(images=IMAGES, each=6)
    captions = np.random.default_rng(6).integers(2 * IMAGES, size=30)
    matrix = torch.rand(IMAGES, 2 * IMAGES, dtype=torch.float64)
    found = degrees_of_pairs(replace(said, captions=captions), lambda images, captions: matrix[images][:, captions])
    assert found == pytest.approx(matrix[said.images, captions].numpy())
