"""The statistics of an audit: mixtures with a known part, and what twice as much data would bring."""

import numpy as np
import pytest

from visavis.auditing.mixture import Mixture, odds
from visavis.auditing.power_law import outlook

SIZES = np.repeat([750, 1500, 3000, 6000], 3)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_the_share_of_wrong_things_and_the_precision_of_a_list_are_those_that_were_planted(share):
    random, shares, precisions, bounds = np.random.default_rng(0), [], [], []
    for _ in range(20):
        bad = random.random(2000) < share
        scores = np.where(bad, random.normal(3, 1, 2000), random.normal(0, 1, 2000))
        mixture = Mixture.of(scores, random.normal(3, 1, 2000))
        listed = mixture.precision >= 0.8
        shares.append(mixture.share)
        bounds.append(mixture.upper >= bad.mean())
        precisions.append(bad[listed].mean())
    assert np.mean(shares) == pytest.approx(share, rel=0.25)
    assert np.mean(bounds) >= 0.9
    assert np.mean(precisions) == pytest.approx(0.83, abs=0.08)
    worst_first = np.argsort(-scores, kind="stable")
    assert (np.diff(mixture.precision[worst_first]) <= 0).all()


def test_nothing_wrong_is_about_nothing():
    random = np.random.default_rng(0)
    shares = [Mixture.of(random.normal(0, 1, 1000), random.normal(3, 1, 1000)).share for _ in range(20)]
    assert max(shares) < 0.01
    same = random.normal(0, 1, 1000)
    assert Mixture.of(same, random.permutation(same)).share > 0.8


def test_odds_use_every_fact_that_tells_something():
    random = np.random.default_rng(0)
    data, wrong = random.normal(size=(500, 3)), random.normal(size=(500, 3))
    wrong[:, 0] += 2
    wrong[:, 1] -= 2
    data[::7, 1] = np.nan
    scores, of_wrong = odds(data, wrong)
    assert np.isfinite(scores).all()
    assert (of_wrong[:, None] > scores).mean() > 0.95
    assert (wrong[:, :1] > data[:, 0]).mean() < 0.95


def test_a_law_without_noise_is_found():
    for exponent in (0.2, 0.5, 1.0):
        values = 400 - 900 * (SIZES / 100) ** -exponent
        gain = 900 * (60**-exponent - 120**-exponent)
        told = outlook(SIZES, values + np.tile([-0.2, 0, 0.2], 4))
        assert told.gain == pytest.approx(gain, rel=0.1)
        assert told.low <= gain * 1.02
        assert told.high >= gain * 0.98
        assert told.told == "more"
        assert told.size == 12000


def told_of_logarithm(random):
    """Of a curve that does not level off: the end of all exponents."""
    return outlook(SIZES, 300 + 40 * np.log(SIZES / 6000) + random.normal(0, 2, 12))


def test_the_interval_holds_the_truth_and_says_when_it_cannot_be_told():
    random, inside = np.random.default_rng(1), []
    for _ in range(20):
        exponent, scale = random.uniform(0.2, 0.8), random.uniform(200, 1000)
        true = scale * (60**-exponent - 120**-exponent)
        told = outlook(SIZES, 400 - scale * (SIZES / 100) ** -exponent + random.normal(0, 2, 12))
        inside.append(told.low <= true <= told.high)
    assert np.mean(inside) >= 0.85
    curves = [told_of_logarithm(random) for _ in range(40)]
    inside = [told.low <= 40 * np.log(2) <= told.high for told in curves]
    assert np.mean(inside) >= 0.9
    assert outlook(SIZES, 300 + np.tile([-0.1, 0, 0.1], 4)).told == "little"
    noisy = outlook(SIZES, 300 + np.random.default_rng(2).normal(0, 40, 12))
    assert noisy.told == "unclear"
    assert "cannot be told" in str(noisy)
