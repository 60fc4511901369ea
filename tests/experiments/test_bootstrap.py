"""Bootstrap over test images: values, resampling units, coverage, errors, and files of query ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from visavis.core.errors import RunError, ShapeError
from visavis.evaluation import rank_scores
from visavis.evaluation.bootstrap import BOOTSTRAP_METRICS, bootstrap_images
from visavis.evaluation.metrics.ranking import RSUM_CUTOFFS
from visavis.evaluation.query_ranks import QueryRanks, read_query_ranks, write_query_ranks

CAPTION_COUNTS = [5, 1, 2, 5, 3] * 8
"""Number of captions of each image."""


def evaluation(seed, noise=1.0, counts=CAPTION_COUNTS, ties=None):
    random = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(counts)) * 7 + 3
    text_ids = ids.repeat_interleave(torch.tensor(counts))
    scores = (ids[:, None] == text_ids).float() + noise * torch.randn(
        len(ids), len(text_ids), generator=random
    )
    return rank_scores(scores.round(decimals=1), ids, text_ids, ties=ties)


def ranks_from_hits(image_hits, text_hits):
    """Query ranks 1 (hit) and 100 (miss) of images ``[N]`` and of their captions ``[N, C]``."""
    images, captions = text_hits.shape
    ids = np.arange(images)
    return QueryRanks(
        np.where(image_hits, 1, 100), np.where(text_hits, 1, 100).ravel(), ids, ids.repeat(captions)
    )


def test_bootstrap_values_equal_evaluation_metrics():
    rows = {
        "a": {0: evaluation(0), 1: evaluation(1)},
        "b": {0: evaluation(2, 0.5), 1: evaluation(3, 0.5)},
    }
    bootstrap = bootstrap_images(
        {
            name: {seed: result.query_ranks for seed, result in row.items()}
            for name, row in rows.items()
        },
        num_samples=50,
    )
    mean = {
        name: {
            key: np.mean([result.metrics[key] for result in row.values()])
            for key in BOOTSTRAP_METRICS
        }
        for name, row in rows.items()
    }
    for metric in BOOTSTRAP_METRICS:
        assert bootstrap.value("a", metric).value == pytest.approx(mean["a"][metric])
        assert bootstrap.difference("a", "b", metric).value == pytest.approx(
            mean["a"][metric] - mean["b"][metric]
        )
    assert bootstrap.difference("a", "b").num_units == len(CAPTION_COUNTS)


def test_bootstrap_sample_equals_evaluation_of_its_images():
    """Each sample is recomputed by repeating the ranks of its images."""
    ranks = evaluation(0).query_ranks
    samples = bootstrap_images({"a": {0: ranks}}, num_samples=20, seed=5).samples["a"][0]
    chosen = np.random.default_rng(5).integers(0, len(CAPTION_COUNTS), (20, len(CAPTION_COUNTS)))
    for sample, images in zip(samples, chosen, strict=True):
        image_ranks = np.concatenate(
            [ranks.image_ranks[ranks.image_ids == image * 7 + 3] for image in images]
        )
        text_ranks = np.concatenate(
            [ranks.text_ranks[ranks.text_ids == image * 7 + 3] for image in images]
        )
        recalls = [
            100 * np.mean(side <= k) for side in (image_ranks, text_ranks) for k in RSUM_CUTOFFS
        ]
        assert sample == pytest.approx([*recalls, sum(recalls)])


def test_bootstrap_resamples_images_with_their_captions():
    """Five captions with equal hits count as one: the standard error is that of the images."""
    hits = np.arange(200) % 2 == 0
    alike = bootstrap_images({"a": {0: ranks_from_hits(hits, np.repeat(hits[:, None], 5, 1))}})
    assert alike.value("a", "t2i_r1").std_error == pytest.approx(
        100 * math.sqrt(0.25 / 200), rel=0.05
    )
    assert alike.value("a").std_error == pytest.approx(6 * alike.value("a", "t2i_r1").std_error)
    balanced = bootstrap_images({"a": {0: ranks_from_hits(hits, np.repeat(~hits[:, None], 5, 1))}})
    assert balanced.value("a").std_error == 0  # the captions gain what the image loses
    assert balanced.value("a").interval is None


def test_bootstrap_pairs_rows_on_the_same_images():
    """The standard error of a difference is that of the per-image differences, far below that of
    each row.
    """
    random = np.random.default_rng(0)
    hits = random.random(400) < 0.5
    other = np.where(random.random(400) < 0.05, ~hits, hits)
    bootstrap = bootstrap_images(
        {
            name: {0: ranks_from_hits(row_hits, row_hits[:, None])}
            for name, row_hits in (("a", hits), ("b", other))
        }
    )
    expected = 100 * np.std(other.astype(float) - hits, ddof=1) / math.sqrt(400)
    assert bootstrap.difference("b", "a", "i2t_r1").std_error == pytest.approx(expected, rel=0.05)
    assert bootstrap.value("a", "i2t_r1").std_error > 2 * expected


@pytest.mark.slow
def test_bootstrap_intervals_cover_93_to_97_percent():
    """1,000 test sets of 150 images with 5 captions each. Difficulty is shared by both rows and all
    queries of an image.
    """
    random = np.random.default_rng(1)
    easy = random.normal(size=(1000, 150, 1))

    def hits(mean):
        return (easy + random.normal(size=(1000, 150, 6)) < mean) * 1

    truth = 100 * (normal_cdf(0.3 / math.sqrt(2)) - normal_cdf(0.1 / math.sqrt(2)))
    a, b = (hits(mean) for mean in (0.3, 0.1))
    rows = {
        f"{name}{test}": {0: ranks_from_hits(row_hits[test, :, 0], row_hits[test, :, 1:])}
        for name, row_hits in (("a", a), ("b", b))
        for test in range(1000)
    }
    bootstrap = bootstrap_images(rows, num_samples=800)
    for metric, factor in (("i2t_r1", 1), ("t2i_r5", 1), ("rsum", 6)):
        covered = [
            factor * truth in bootstrap.difference(f"a{test}", f"b{test}", metric).interval
            for test in range(1000)
        ]
        assert 0.93 < np.mean(covered) < 0.97, metric


def normal_cdf(value):
    return (1 + math.erf(value / math.sqrt(2))) / 2


def test_bootstrap_uses_common_seeds_and_is_reproducible():
    ranks = [evaluation(seed).query_ranks for seed in range(5)]
    rows = {"a": {0: ranks[0], 1: ranks[1], 2: ranks[2]}, "b": {1: ranks[3], 2: ranks[4]}}
    bootstrap, again = (
        bootstrap_images(rows, num_samples=300),
        bootstrap_images(dict(reversed(rows.items())), num_samples=300),
    )
    common = bootstrap_images({"a": {1: ranks[1], 2: ranks[2]}, "b": rows["b"]}, num_samples=300)
    assert (
        bootstrap.difference("a", "b") == common.difference("a", "b") == again.difference("a", "b")
    )
    assert bootstrap.difference("b", "a").value == -bootstrap.difference("a", "b").value
    assert bootstrap.difference("a", "b") != bootstrap_images(
        rows, num_samples=300, seed=1
    ).difference("a", "b")


def test_bootstrap_uses_all_seeds_without_common_ones():
    ranks = [evaluation(seed).query_ranks for seed in range(3)]
    apart = bootstrap_images(
        {"a": {0: ranks[0], 1: ranks[1]}, "b": {2: ranks[2]}}, num_samples=300
    ).difference("a", "b")
    first, second = (
        bootstrap_images({"a": {0: one}, "b": {0: ranks[2]}}, num_samples=300).difference("a", "b")
        for one in ranks[:2]
    )
    assert apart.value == pytest.approx((first.value + second.value) / 2)
    assert apart.std_error > 0


def test_bootstrap_rejects_invalid_input():
    ranks = evaluation(0).query_ranks
    with pytest.raises(
        ShapeError,
        match=r"^b, seed 1: expected the [\d,]+ images and [\d,]+ captions of a, seed 0, got [\d,]+ and [\d,]+( with other ids)?\. Evaluate all runs on",
    ):
        bootstrap_images(
            {"a": {0: ranks}, "b": {1: evaluation(0, counts=CAPTION_COUNTS[::-1]).query_ranks}}
        )
    with pytest.raises(ShapeError, match=r"^rows: expected at least one run, got none"):
        bootstrap_images({"a": {}})
    with pytest.raises(
        ShapeError,
        match=r"expected one id per query, got ranks of shape \[40\] and ids of shape \[39\]",
    ):
        replace(ranks, image_ids=ranks.image_ids[1:])


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_query_ranks_round_trip_through_their_file(tmp_path, ties):
    first, second = evaluation(0, ties=ties), replace(evaluation(1, ties=ties), protocol="other")
    write_query_ranks(
        tmp_path / "ranks.safetensors",
        replace(first, other_protocols=(second,)).query_ranks_by_protocol,
    )
    restored = read_query_ranks(tmp_path / "ranks.safetensors")
    assert list(restored) == ["other", "plain"]
    for evaluated in (first, second):
        for name in ("image_ranks", "text_ranks", "image_ids", "text_ids"):
            assert np.array_equal(
                getattr(restored[evaluated.protocol], name), getattr(evaluated, name)
            )
    bootstrap = bootstrap_images({"a": {0: restored["plain"]}}, num_samples=10)
    assert bootstrap.value("a").value == pytest.approx(first.metrics["rsum"])


def test_query_ranks_keep_64_bit_ids(tmp_path):
    large = replace(
        evaluation(0),
        image_ids=evaluation(0).image_ids + 2**40,
        text_ids=evaluation(0).text_ids + 2**40,
    )
    write_query_ranks(tmp_path / "ranks.safetensors", large.query_ranks_by_protocol)
    assert np.array_equal(
        read_query_ranks(tmp_path / "ranks.safetensors")["plain"].text_ids, large.text_ids
    )


def test_read_query_ranks_rejects_incomplete_file(tmp_path):
    from visavis.core import storage

    storage.write_tensors(tmp_path / "ranks.safetensors", {"plain/image_ranks": torch.ones(3)})
    with pytest.raises(
        RunError, match=r"ranks\.safetensors: expected image_ids, .* Evaluate the run again\.$"
    ):
        read_query_ranks(tmp_path / "ranks.safetensors")


def test_describe_bootstrap_reports_sign_stability():
    hits = np.arange(100) < 60
    rows = {"a": hits, "b": np.arange(100) < 40, "c": np.roll(hits, 1)}
    bootstrap = bootstrap_images(
        {
            name: {0: ranks_from_hits(row_hits, row_hits[:, None])}
            for name, row_hits in rows.items()
        },
        num_samples=500,
    )
    assert (
        bootstrap.difference("a", "b", "i2t_r1")
        .describe("R@1")
        .startswith(
            "With other test images, the difference would have the same sign: +20.0 R@1 (95 % interval 1"
        )
    )
    assert (
        bootstrap.difference("a", "b", "i2t_r1").describe("R@1").endswith(" over 100 test images).")
    )
    assert (
        bootstrap.difference("a", "c", "i2t_r1")
        .describe("R@1")
        .startswith("With other test images, the difference could have the opposite sign: ")
    )
    assert (
        bootstrap.difference("a", "a").describe("RSUM")
        == "Every sample of the 100 test images gives the same: 0 RSUM."
    )
    assert bootstrap.difference("a", "b").num_samples == 500
    few = bootstrap_images(
        {
            name: {0: ranks_from_hits(rows[name][50:65], rows[name][50:65, None])}
            for name in ("a", "b")
        },
        num_samples=50,
    )
    text = few.difference("a", "b", "i2t_r1").describe("R@1")
    assert text == "+66.7 R@1 over 15 test images. At least 20 are needed for an interval."
