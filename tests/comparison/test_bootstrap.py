"""The bootstrap over images: its values, what is drawn together, coverage, what it refuses, and ranks that come back from a file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from visavis.comparison.bootstrap import KS, METRICS, over_images
from visavis.comparison.wording import over_images as sentence
from visavis.errors import RunError, ShapeError, SpecError
from visavis.evaluation import rank_scores
from visavis.evaluation.ranks import QueryRanks, read_ranks, write_ranks

NUMBERS = [5, 1, 2, 5, 3] * 8
"""Captions of each image."""


def evaluation(seed, noise=1.0, numbers=NUMBERS, ties=None):
    random = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(numbers)) * 7 + 3
    text_ids = ids.repeat_interleave(torch.tensor(numbers))
    scores = (ids[:, None] == text_ids).float() + noise * torch.randn(len(ids), len(text_ids), generator=random)
    return rank_scores(scores.round(decimals=1), ids, text_ids, ties=ties)


def of_hits(image_hits, text_hits):
    """Ranks 1 and 100 of images ``[N]`` and of their captions ``[N, C]``."""
    images, captions = text_hits.shape
    ids = np.arange(images)
    return QueryRanks(np.where(image_hits, 1, 100), np.where(text_hits, 1, 100).ravel(), ids, ids.repeat(captions))


def test_what_is_measured_is_what_the_evaluation_says():
    rows = {"a": {0: evaluation(0), 1: evaluation(1)}, "b": {0: evaluation(2, 0.5), 1: evaluation(3, 0.5)}}
    draws = over_images({name: {seed: found.ranks for seed, found in row.items()} for name, row in rows.items()}, draws=50)
    mean = {name: {key: np.mean([found.metrics[key] for found in row.values()]) for key in METRICS} for name, row in rows.items()}
    for metric in METRICS:
        assert draws.value("a", metric).value == pytest.approx(mean["a"][metric])
        assert draws.difference("a", "b", metric).value == pytest.approx(mean["a"][metric] - mean["b"][metric])
    assert draws.difference("a", "b").units == len(NUMBERS)


def test_every_draw_is_the_evaluation_of_the_images_drawn():
    """Each draw, worked out again by repeating the ranks of the images that it holds."""
    ranks = evaluation(0).ranks
    draws = over_images({"a": {0: ranks}}, draws=20, seed=5).drawn["a"][0]
    chosen = np.random.default_rng(5).integers(0, len(NUMBERS), (20, len(NUMBERS)))
    for drawn, images in zip(draws, chosen, strict=True):
        of_images = np.concatenate([ranks.image_ranks[ranks.image_ids == image * 7 + 3] for image in images])
        of_texts = np.concatenate([ranks.text_ranks[ranks.text_ids == image * 7 + 3] for image in images])
        recalls = [100 * np.mean(side <= k) for side in (of_images, of_texts) for k in KS]
        assert drawn == pytest.approx([*recalls, sum(recalls)])


def test_an_image_and_its_captions_are_drawn_together():
    """Five captions that share their image's fate tell as much as one: the deviation is that of the images."""
    hits = np.arange(200) % 2 == 0
    alike = over_images({"a": {0: of_hits(hits, np.repeat(hits[:, None], 5, 1))}})
    assert alike.value("a", "t2i_r1").deviation == pytest.approx(100 * math.sqrt(0.25 / 200), rel=0.05)
    assert alike.value("a").deviation == pytest.approx(6 * alike.value("a", "t2i_r1").deviation)
    balanced = over_images({"a": {0: of_hits(hits, np.repeat(~hits[:, None], 5, 1))}})
    assert balanced.value("a").deviation == 0  # what the image loses its captions win
    assert balanced.value("a").interval is None


def test_rows_are_drawn_with_the_same_images():
    """The deviation of a difference is that of the differences of images, far below what each row has alone."""
    random = np.random.default_rng(0)
    hits = random.random(400) < 0.5
    other = np.where(random.random(400) < 0.05, ~hits, hits)
    draws = over_images({name: {0: of_hits(own, own[:, None])} for name, own in (("a", hits), ("b", other))})
    expected = 100 * np.std(other.astype(float) - hits, ddof=1) / math.sqrt(400)
    assert draws.difference("b", "a", "i2t_r1").deviation == pytest.approx(expected, rel=0.05)
    assert draws.value("a", "i2t_r1").deviation > 2 * expected


def test_95_percent_intervals_cover_93_to_97_percent_of_differences():
    """1,000 test sets of 150 images, 5 captions each; hits depend on the image, which is easy or hard for both rows and all queries."""
    random = np.random.default_rng(1)
    easy = random.normal(size=(1000, 150, 1))

    def hits(mean):
        return (easy + random.normal(size=(1000, 150, 6)) < mean) * 1

    truth = 100 * (normal(0.3 / math.sqrt(2)) - normal(0.1 / math.sqrt(2)))
    a, b = (hits(mean) for mean in (0.3, 0.1))
    rows = {f"{name}{test}": {0: of_hits(own[test, :, 0], own[test, :, 1:])} for name, own in (("a", a), ("b", b)) for test in range(1000)}
    draws = over_images(rows, draws=800)
    for metric, factor in (("i2t_r1", 1), ("t2i_r5", 1), ("rsum", 6)):
        covered = [factor * truth in draws.difference(f"a{test}", f"b{test}", metric).interval for test in range(1000)]
        assert 0.93 < np.mean(covered) < 0.97, metric


def normal(value):
    return (1 + math.erf(value / math.sqrt(2))) / 2


def test_the_mean_over_common_seeds_is_drawn_and_the_draws_are_the_same_again():
    ranks = [evaluation(seed).ranks for seed in range(5)]
    rows = {"a": {0: ranks[0], 1: ranks[1], 2: ranks[2]}, "b": {1: ranks[3], 2: ranks[4]}}
    draws, again = over_images(rows, draws=300), over_images(dict(reversed(rows.items())), draws=300)
    common = over_images({"a": {1: ranks[1], 2: ranks[2]}, "b": rows["b"]}, draws=300)
    assert draws.difference("a", "b") == common.difference("a", "b") == again.difference("a", "b")
    assert draws.difference("b", "a").value == -draws.difference("a", "b").value
    assert draws.difference("a", "b") != over_images(rows, draws=300, seed=1).difference("a", "b")


def test_rows_without_a_common_seed_are_drawn_each_with_its_own():
    ranks = [evaluation(seed).ranks for seed in range(3)]
    apart = over_images({"a": {0: ranks[0], 1: ranks[1]}, "b": {2: ranks[2]}}, draws=300).difference("a", "b")
    first, second = (over_images({"a": {0: one}, "b": {0: ranks[2]}}, draws=300).difference("a", "b") for one in ranks[:2])
    assert apart.value == pytest.approx((first.value + second.value) / 2)
    assert apart.deviation > 0


def test_what_cannot_be_drawn_is_refused_in_one_sentence():
    ranks = evaluation(0).ranks
    draws = over_images({"a": {0: ranks}, "b": {1: ranks}}, draws=10)
    with pytest.raises(SpecError, match=r"^c is no row of the comparison: known: a, b\.$"):
        draws.value("c")
    with pytest.raises(SpecError, match=r"^i2t_r2 is not drawn over test images: did you mean i2t_r"):
        draws.value("a", "i2t_r2")
    with pytest.raises(
        ShapeError, match=r"^b, seed 1, was asked other queries than a, seed 0: evaluate all runs on the same images and captions\.$"
    ):
        over_images({"a": {0: ranks}, "b": {1: evaluation(0, numbers=NUMBERS[::-1]).ranks}})
    with pytest.raises(ShapeError, match=r"^there are no runs"):
        over_images({"a": {}})
    with pytest.raises(ShapeError, match=r"^ranks of shape \[40\] have ids of shape \[39\]"):
        replace(ranks, image_ids=ranks.image_ids[1:])


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_ranks_come_back_from_their_file(tmp_path, ties):
    first, second = evaluation(0, ties=ties), replace(evaluation(1, ties=ties), protocol="other")
    write_ranks(tmp_path / "ranks.safetensors", replace(first, others=(second,)).ranks_by_protocol)
    found = read_ranks(tmp_path / "ranks.safetensors")
    assert list(found) == ["other", "plain"]
    for evaluated in (first, second):
        for name in ("image_ranks", "text_ranks", "image_ids", "text_ids"):
            assert np.array_equal(getattr(found[evaluated.protocol], name), getattr(evaluated, name))
    draws = over_images({"a": {0: found["plain"]}}, draws=10)
    assert draws.value("a").value == pytest.approx(first.metrics["rsum"])


def test_ids_of_any_size_come_back(tmp_path):
    large = replace(evaluation(0), image_ids=evaluation(0).image_ids + 2**40, text_ids=evaluation(0).text_ids + 2**40)
    write_ranks(tmp_path / "ranks.safetensors", large.ranks_by_protocol)
    assert np.array_equal(read_ranks(tmp_path / "ranks.safetensors")["plain"].text_ids, large.text_ids)


def test_a_file_without_ranks_is_refused(tmp_path):
    from visavis import storage

    storage.write_tensors(tmp_path / "ranks.safetensors", {"plain/image_ranks": torch.ones(3)})
    with pytest.raises(RunError, match=r"ranks\.safetensors holds no ranks of queries, expected image_ids, .* evaluate the run anew\.$"):
        read_ranks(tmp_path / "ranks.safetensors")


def test_what_the_images_say_in_words():
    hits = np.arange(100) < 60
    rows = {"a": hits, "b": np.arange(100) < 40, "c": np.roll(hits, 1)}
    draws = over_images({name: {0: of_hits(own, own[:, None])} for name, own in rows.items()}, draws=500)
    assert sentence(draws.difference("a", "b", "i2t_r1"), "R@1").startswith(
        "Other test images would not turn it round: +20.0 R@1 (95 % interval 1"
    )
    assert sentence(draws.difference("a", "b", "i2t_r1"), "R@1").endswith(" over 100 test images).")
    assert sentence(draws.difference("a", "c", "i2t_r1"), "R@1").startswith("Other test images could turn it round: ")
    assert sentence(draws.difference("a", "a"), "RSUM") == "Every draw of the 100 test images gives the same: 0 RSUM."
    assert json.loads(json.dumps(draws.difference("a", "b").to_json()))["draws"] == 500
    few = over_images({name: {0: of_hits(rows[name][50:65], rows[name][50:65, None])} for name in ("a", "b")}, draws=50)
    assert sentence(few.difference("a", "b", "i2t_r1"), "R@1").startswith("15 test images are too few to tell what others would say: +")
