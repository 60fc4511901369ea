"""Statistics of an audit: the noise ratio, and the extrapolation of a learning curve."""

import numpy as np
import pytest

from visavis.research.audit.caption_audit import NoiseEstimate, mismatch_log_odds
from visavis.research.audit.learning_curve import extrapolate
from visavis.research.audit.mislabeled_pairs import MislabeledPairs, SuspectPair

SIZES = np.repeat([750, 1500, 3000, 6000], 3)


@pytest.mark.parametrize("noise_ratio", [0.02, 0.1, 0.3])
def test_noise_estimate_recovers_ratio_and_precision(noise_ratio):
    random, ratios, precisions, bounds = np.random.default_rng(0), [], [], []
    for _ in range(20):
        bad = random.random(2000) < noise_ratio
        scores = np.where(bad, random.normal(3, 1, 2000), random.normal(0, 1, 2000))
        estimate = NoiseEstimate.from_scores(scores, random.normal(3, 1, 2000))
        listed = estimate.precision >= 0.8
        ratios.append(estimate.noise_ratio)
        bounds.append(
            (estimate.min_noise_ratio <= bad.mean(), estimate.max_noise_ratio >= bad.mean())
        )
        precisions.append(bad[listed].mean())
    assert np.mean(ratios) == pytest.approx(noise_ratio, rel=0.25)
    assert (np.mean(bounds, axis=0) >= 0.9).all()
    assert np.mean(precisions) == pytest.approx(0.83, abs=0.08)
    worst_first = np.argsort(-scores, kind="stable")
    assert (np.diff(estimate.precision[worst_first]) <= 0).all()


def test_noise_estimate_of_clean_data_is_near_zero():
    random = np.random.default_rng(0)
    ratios = [
        NoiseEstimate.from_scores(random.normal(0, 1, 1000), random.normal(3, 1, 1000)).noise_ratio
        for _ in range(20)
    ]
    assert max(ratios) < 0.01
    same = random.normal(0, 1, 1000)
    assert NoiseEstimate.from_scores(same, random.permutation(same)).noise_ratio > 0.8


def test_bounds_of_noise_estimate_narrow_with_the_data():
    estimates = [
        NoiseEstimate.from_scores(np.repeat([0.0, 9.0], [98 * n, 2 * n]), np.full(100, 9.0))
        for n in (1, 10, 100)
    ]
    assert [estimate.noise_ratio for estimate in estimates] == [0.02] * 3
    lower, upper = zip(
        *((estimate.min_noise_ratio, estimate.max_noise_ratio) for estimate in estimates),
        strict=True,
    )
    assert 0 < lower[0] < lower[1] < lower[2] < 0.02 < upper[2] < upper[1] < upper[0]


@pytest.mark.parametrize(("lower", "serious"), [(0.005, False), (0.01, True)])
def test_lower_bound_decides_whether_an_issue_is_serious(lower, serious):
    suspect = SuspectPair(
        "a.jpg",
        "train",
        "a dog",
        weight=1.0,
        rank=2,
        candidates=9,
        best_image="b.jpg",
        precision=0.8,
    )
    pairs = MislabeledPairs(
        (suspect,),
        400,
        noise_ratio=0.02,
        min_noise_ratio=lower,
        max_noise_ratio=0.05,
        recall=0.5,
        objective="VLC()",
        folds=2,
    )
    (issue,) = pairs.issues()
    assert issue.serious == serious
    assert f"2.0% of the 400 pairs ({lower:.1%} to 5.0%)" in issue.description


def test_mismatch_log_odds_use_all_informative_features():
    random = np.random.default_rng(0)
    data, wrong = random.normal(size=(500, 3)), random.normal(size=(500, 3))
    wrong[:, 0] += 2
    wrong[:, 1] -= 2
    data[::7, 1] = np.nan
    scores, wrong_scores = mismatch_log_odds(data, wrong)
    assert np.isfinite(scores).all()
    assert (wrong_scores[:, None] > scores).mean() > 0.95
    assert (wrong[:, :1] > data[:, 0]).mean() < 0.95


def test_extrapolation_recovers_power_law():
    for exponent in (0.2, 0.5, 1.0):
        values = 400 - 900 * (SIZES / 100) ** -exponent
        gain = 900 * (60**-exponent - 120**-exponent)
        result = extrapolate(SIZES, values + np.tile([-0.2, 0, 0.2], 4))
        assert result.gain == pytest.approx(gain, rel=0.1)
        assert result.low <= gain * 1.02
        assert result.high >= gain * 0.98
        assert result.verdict == "more"
        assert result.size == 12000


def extrapolate_logarithm(random):
    """Extrapolate a curve that does not level off: the smallest exponent."""
    return extrapolate(SIZES, 300 + 40 * np.log(SIZES / 6000) + random.normal(0, 2, 12))


def test_extrapolation_interval_covers_the_true_gain():
    random, inside = np.random.default_rng(1), []
    for _ in range(20):
        exponent, scale = random.uniform(0.2, 0.8), random.uniform(200, 1000)
        true = scale * (60**-exponent - 120**-exponent)
        result = extrapolate(
            SIZES, 400 - scale * (SIZES / 100) ** -exponent + random.normal(0, 2, 12)
        )
        inside.append(result.low <= true <= result.high)
    assert np.mean(inside) >= 0.85
    curves = [extrapolate_logarithm(random) for _ in range(40)]
    inside = [result.low <= 40 * np.log(2) <= result.high for result in curves]
    assert np.mean(inside) >= 0.9
    assert extrapolate(SIZES, 300 + np.tile([-0.1, 0, 0.1], 4)).verdict == "little"
    noisy = extrapolate(SIZES, 300 + np.random.default_rng(2).normal(0, 40, 12))
    assert noisy.verdict == "unclear"
    assert "inconclusive" in str(noisy)
