"""Match probabilities on random scores with known relevance, with captions and without."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr
from sklearn.isotonic import IsotonicRegression

from visavis.core.errors import DataError
from visavis.retrieval.calibrate.calibration import (
    CALIBRATED_RESULTS,
    INFLATION,
    Calibration,
    Moments,
    NullScores,
    count_within,
    fit_calibration,
    irrelevant_shares,
    isotonic,
    normal_tail,
    standardize_by,
)

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).resolve().parents[2] / "studies")
    reliability = importlib.import_module("calibration").reliability

# The share of irrelevant items above z is e^-z.
HAND = NullScores((0.0, -1.0, 0.0))
NORMAL = NullScores((-100.0, 0.0, 0.0))


def random_scores(seed, queries=400, candidates=200):
    """Scores with one relevant candidate per query, whose score is raised by a random amount."""
    random = np.random.default_rng(seed)
    scores = random.normal(0, 0.1, (queries, candidates))
    relevant = random.integers(0, candidates, queries)[:, None] == np.arange(candidates)
    scores[relevant] += random.uniform(0, 0.6, queries)
    return scores, relevant


def fit(scores, relevant):
    return fit_calibration(["a caption"] * len(scores), scores, relevant)


def test_calibration_is_reliable_on_other_queries():
    calibration = fit(*random_scores(1, queries=2000))
    scores, relevant = random_scores(2, queries=2000)
    result = reliability(calibration, standardize_by(scores, scores), relevant)
    assert result.expected_calibration_error < 0.03
    assert result.brier_skill > 0.2
    assert sum(count for _, _, count in result.bins) == 2000 * CALIBRATED_RESULTS


def test_calibration_ignores_the_scale_of_each_text():
    """Texts differ in the mean and in the standard deviation of their scores."""
    scores, relevant = random_scores(6)
    random = np.random.default_rng(7)
    factors, offsets = random.uniform(0.1, 9, (2, len(scores), 1))
    plain, scaled = fit(scores, relevant), fit(factors * scores + offsets, relevant)
    assert scaled.scores == pytest.approx(plain.scores, abs=1e-9)
    assert scaled.probabilities == plain.probabilities
    assert scaled.min_score == pytest.approx(plain.min_score)


def test_match_probability_is_monotonic():
    calibration = fit(*random_scores(3))
    probabilities = calibration.cautious_probabilities(np.linspace(-6, 9, 201), 200).tolist()
    assert probabilities == sorted(probabilities)
    assert 0 <= probabilities[0] <= probabilities[-1] <= 1


@pytest.mark.parametrize("seed", range(5))
def test_match_probabilities_equal_those_of_scikit_learn(seed):
    """Also with equal scores, which one knot represents."""
    scores, relevant = random_scores(seed, queries=60, candidates=30)
    scores = scores if seed % 2 else (20 * scores).round() / 20
    calibration = fit(scores, relevant)
    scores = standardize_by(scores, scores)
    results = np.argsort(-scores, axis=1, kind="stable")[:, :CALIBRATED_RESULTS]
    top_scores = np.take_along_axis(scores, results, 1)
    reference = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    reference.fit(top_scores.ravel(), np.take_along_axis(relevant, results, 1).ravel())
    others = np.linspace(-6, 9, 201)
    assert calibration.cautious_probabilities(others, 30) == pytest.approx(
        reference.predict(others), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_equals_scikit_learn(seed):
    random = np.random.default_rng(seed)
    values, weights = random.normal(size=50).round(1), random.uniform(0.1, 3, 50)
    reference = IsotonicRegression().fit_transform(np.arange(50), values, sample_weight=weights)
    assert isotonic(values, weights) == pytest.approx(reference, abs=1e-12)


def test_normal_tail_equals_scipy():
    values = np.linspace(-8, 30, 77)
    assert normal_tail(values) == pytest.approx(ndtr(-values), rel=1e-12)


def test_no_match_has_known_error_rates():
    scores, relevant = random_scores(4, queries=4000)
    calibration = fit(scores, relevant)
    scores = standardize_by(scores, scores)
    alarms = (scores.max(1) < calibration.min_score).mean()
    found = (np.where(relevant, -9, scores).max(1) < calibration.min_score).mean()
    assert alarms == pytest.approx(0.1, abs=0.001)
    assert found == pytest.approx(calibration.detection_rate)


def test_calibration_of_hand_computed_values():
    calibration = Calibration(
        scores=(0.0, 1.0),
        probabilities=(0.0, 0.5),
        num_candidates=100,
        num_queries=10,
        min_score=0.2,
        detection_rate=0.5,
        min_length=8,
    )
    probabilities = calibration.cautious_probabilities(np.array([-1.0, 0.5, 2.0]), 100)
    assert probabilities.tolist() == [0.0, 0.25, 0.5]
    assert [calibration.holds_for("a red star", count) for count in (49, 50, 200, 201)] == [
        False,
        True,
        True,
        False,
    ]
    assert [calibration.holds_for(text, 100) for text in (" a star  ", "a stars!", None)] == [
        False,
        True,
        True,
    ]
    assert [calibration.is_no_match(np.array([z]), 100) for z in (0.1, 0.2)] == [
        True,
        False,
    ]
    unsure = replace(calibration, detection_rate=0.19)
    assert unsure.is_no_match(np.array([0.1]), 100) is None
    certain = reliability(calibration, np.array([[1.0, 0.0]]), np.array([[True, False]]), bins=2)
    assert certain.expected_calibration_error == pytest.approx((0.5 + 0.0) / 2)
    assert certain.brier_skill == pytest.approx(1 - 0.125 / 0.25)


def test_calibration_knows_the_length_of_captions():
    captions = ["a" * length for length in range(101)]
    scores, relevant = random_scores(5, queries=101)
    assert fit_calibration(captions, scores, relevant).min_length == 5


def test_fit_calibration_requires_both_outcomes():
    for all_relevant in (False, True):
        with pytest.raises(DataError, match="expected relevant and irrelevant"):
            fit(np.random.default_rng(0).random((3, 5)), np.full((3, 5), all_relevant))


def test_moments_standardize_as_scores_of_all_items():
    random = np.random.default_rng(0)
    queries, items = random.normal(size=(3, 8)), random.normal(1, 2, size=(50, 8))
    moments = Moments.of(items)
    scores = queries @ items.T
    expected = standardize_by(scores, scores)
    assert moments.standardize(queries, scores) == pytest.approx(expected, abs=1e-9)
    assert expected.mean(1) == pytest.approx(0, abs=1e-9)
    assert expected.std(1) == pytest.approx(1)
    stored = Moments.from_bytes(moments.to_bytes(), 8)
    assert stored.standardize(queries, scores) == pytest.approx(expected, abs=1e-4)


def test_moments_of_hand_computed_values():
    moments = Moments(np.array([0.1]), np.array([[0.01]]))
    (standardized,) = moments.standardize(np.array([[2.0]]), np.array([[0.4, 0.2, -0.4]]))
    assert standardized == pytest.approx([1.0, 0.0, -3.0])
    # Equal items have no variance.
    assert Moments.of(np.ones((5, 1))).standardize(np.ones((1, 1)), np.ones((1, 2))).tolist() == [
        [0.0, 0.0]
    ]


def test_null_scores_of_hand_computed_values():
    assert HAND.share_above(np.array([2.0, 1.0, -1.0])) == pytest.approx(
        [np.exp(-2), np.exp(-1), 1.0]
    )
    # The normal distribution is the least: 0.0013499 is its share above 3.
    assert NORMAL.share_above(np.array([3.0])) == pytest.approx([0.0013499], rel=1e-4)
    # 0.01, 0.2 and 2 irrelevant items are expected above the results.
    expected = np.array([0.01, 0.2, 2.0])
    first, second = (np.e * p * np.log(1 / p) for p in (0.01, 0.2))
    probabilities = HAND.cautious_probabilities(np.log(INFLATION * 100 / expected), 100).tolist()
    assert probabilities == pytest.approx([6 / (6 + first), 1 - 0.19, 0.0])
    assert 6 / (6 + second) > 1 - 0.19, "the rate is larger than the factor"
    assert probabilities == pytest.approx([0.9796, 0.81, 0.0], abs=1e-4)
    assert irrelevant_shares(probabilities) == pytest.approx([0.0204, 0.1052, 0.4035], abs=1e-4)
    assert [count_within(probabilities, level) for level in (0.01, 0.1, 0.2, 0.5)] == [0, 1, 2, 3]
    # The message does without the factor: 0.84 and 0.86 irrelevant items are expected.
    best = [np.log(100 / np.array([count])) for count in (0.84, 0.86)]
    assert [HAND.is_no_match(each, 100) for each in best] == [False, True]


def test_null_scores_average_the_rates_of_many_results():
    """Of 5 results, 0.5 irrelevant ones are expected, however they are spread."""
    expected = np.array([0.4, 0.4, 0.4, 0.4, 0.5])
    probabilities = HAND.cautious_probabilities(np.log(INFLATION * 100 / expected), 100)
    floor = 1 / (1 + 6)  # the Bayes factor is 1
    assert 1 - probabilities == pytest.approx([max(0.1, floor)] * 5)


def test_match_probability_falls_with_rank_and_size():
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = np.sort(random.uniform(-2, 12, 30))[::-1]
        small, large = (HAND.cautious_probabilities(scores, count).tolist() for count in (50, 5000))
        assert small == sorted(small, reverse=True)
        assert all(0 <= b <= a <= 1 for a, b in zip(small, large, strict=True))
        assert count_within(small, 0) == 0
        assert count_within(small, 1) == 30
        counts = [count_within(small, level) for level in np.linspace(0, 1, 21)]
        assert counts == sorted(counts)


def test_more_matches_raise_the_probability_of_each():
    random = np.random.default_rng(1)
    irrelevant = np.sort(random.normal(size=1000))[::-1]
    best = [
        NORMAL.cautious_probabilities(
            np.r_[np.full(copies, 3.1), irrelevant[irrelevant < 3]], 1000
        )[0]
        for copies in (1, 2, 5, 30)
    ]
    assert best == sorted(best)
    assert best[0] < 0.1
    assert best[-1] > 0.8


def test_scores_of_irrelevant_items_are_no_matches():
    """Some of such texts get the message, and few have a result. A clear match has one."""
    random = np.random.default_rng(2)
    scores = -np.sort(-random.normal(size=(500, 1000)), axis=1)

    def rated(scores):
        rows = [NORMAL.cautious_probabilities(row, 1000) for row in scores]
        no_match = [NORMAL.is_no_match(row, 1000) for row in scores]
        empty = [count_within(row.tolist(), 0.1) == 0 for row in rows]
        return np.mean(no_match), np.mean(empty)

    no_match, empty = rated(scores)
    assert no_match > 0.1
    assert empty > 0.9
    assert rated(np.c_[np.full(500, 6.0), scores]) == (0, 0)


@pytest.mark.parametrize("matches", [1, 5, 50])
@pytest.mark.parametrize("level", [0.1, 0.3])
def test_lists_keep_their_level_in_a_simulation(matches, level):
    """Items that match score 4 standard deviations higher, as often as not among the others."""
    random = np.random.default_rng(3)
    irrelevant, kept = [], []
    for _ in range(300):
        scores = random.normal(size=1000)
        scores[:matches] += 4
        best = np.argsort(-scores)[:200]
        length = count_within(NORMAL.cautious_probabilities(scores[best], 1000).tolist(), level)
        kept.append((best[:length] < matches).sum() / matches)
        if length:
            irrelevant.append((best[:length] >= matches).mean())
    assert np.mean(irrelevant) < level + 0.03
    assert np.mean(kept) > 0.4
