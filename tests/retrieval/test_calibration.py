"""Match probabilities on random scores with known relevance."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from visavis.core.errors import DataError
from visavis.retrieval.search import CALIBRATED_RESULTS, Calibration, fit_calibration

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).resolve().parents[2] / "studies")
    reliability = importlib.import_module("calibration").reliability


def random_scores(seed, queries=400, candidates=200):
    """Scores with one relevant candidate per query, whose score is raised by a random amount."""
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(0, 0.1, (queries, candidates)))
    relevant = torch.zeros(queries, candidates, dtype=torch.bool)
    positives = torch.from_numpy(random.integers(0, candidates, queries))
    relevant[torch.arange(queries), positives] = True
    scores[relevant] += torch.from_numpy(random.uniform(0, 0.6, queries))
    return scores, relevant


def test_calibration_is_reliable_on_other_queries():
    calibration = fit_calibration(*random_scores(1, queries=2000))
    result = reliability(calibration, *random_scores(2, queries=2000))
    assert result.expected_calibration_error < 0.03
    assert result.brier_skill > 0.2
    assert sum(count for _, _, count in result.bins) == 2000 * CALIBRATED_RESULTS


def test_match_probability_is_monotonic():
    calibration = fit_calibration(*random_scores(3))
    probabilities = [calibration.match_probability(score) for score in np.linspace(-1, 1, 201)]
    assert probabilities == sorted(probabilities)
    assert 0 <= probabilities[0] <= probabilities[-1] <= 1


@pytest.mark.parametrize("seed", range(5))
def test_match_probabilities_equal_those_of_scikit_learn(seed):
    """Also with equal scores, which one knot represents."""
    scores, relevant = random_scores(seed, queries=60, candidates=30)
    scores = scores if seed % 2 else (20 * scores).round() / 20
    calibration = fit_calibration(scores, relevant)
    top_scores, results = scores.topk(CALIBRATED_RESULTS)
    reference = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    reference.fit(top_scores.flatten(), relevant.gather(1, results).flatten().double())
    others = np.linspace(-1, 1, 201)
    assert [calibration.match_probability(score) for score in others] == pytest.approx(
        reference.predict(others).tolist(), abs=1e-12
    )


def test_no_match_has_known_error_rates():
    scores, relevant = random_scores(4, queries=4000)
    calibration = fit_calibration(scores, relevant)
    alarms = (scores.amax(1) < calibration.min_score).double().mean().item()
    found = (
        (scores.masked_fill(relevant, -9).amax(1) < calibration.min_score).double().mean().item()
    )
    assert alarms == pytest.approx(0.05, abs=0.001)
    assert found == pytest.approx(calibration.detection_rate)


def test_calibration_of_hand_computed_values():
    calibration = Calibration(
        scores=(0.0, 1.0),
        probabilities=(0.0, 0.5),
        num_candidates=100,
        num_queries=10,
        min_score=0.2,
        detection_rate=0.5,
    )
    assert [calibration.match_probability(score) for score in (-1.0, 0.5, 2.0)] == [0.0, 0.25, 0.5]
    assert [calibration.is_valid_for(count) for count in (49, 50, 200, 201)] == [
        False,
        True,
        True,
        False,
    ]
    certain = reliability(
        calibration, torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]]), bins=2
    )
    assert certain.expected_calibration_error == pytest.approx((0.5 + 0.0) / 2)
    assert certain.brier_skill == pytest.approx(1 - 0.125 / 0.25)


def test_fit_calibration_requires_both_outcomes():
    for all_relevant in (False, True):
        with pytest.raises(DataError, match="expected relevant and irrelevant"):
            fit_calibration(torch.rand(3, 5), torch.full((3, 5), all_relevant))
