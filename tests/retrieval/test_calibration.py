"""Calibration on drawn scores whose truth is known."""

import numpy as np
import pytest
import torch

from visavis.errors import DataError
from visavis.retrieval.calibration import TOP, Calibration, fit_calibration, reliability


def drawn(seed, queries=400, candidates=200):
    """Scores of which the right one of each query is the higher the easier the query is."""
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(0, 0.1, (queries, candidates)))
    relevant = torch.zeros(queries, candidates, dtype=torch.bool)
    right = torch.from_numpy(random.integers(0, candidates, queries))
    relevant[torch.arange(queries), right] = True
    scores[relevant] += torch.from_numpy(random.uniform(0, 0.6, queries))
    return scores, relevant


def test_what_is_said_is_how_often_it_holds_on_other_queries():
    calibration = fit_calibration(*drawn(1, queries=2000))
    told = reliability(calibration, *drawn(2, queries=2000))
    assert told.error < 0.03
    assert told.skill > 0.2
    assert sum(count for _, _, count in told.bins) == 2000 * TOP


def test_a_higher_score_is_never_less_likely_and_all_are_probabilities():
    calibration = fit_calibration(*drawn(3))
    said = [calibration.match(score) for score in np.linspace(-1, 1, 201)]
    assert said == sorted(said)
    assert 0 <= said[0] <= said[-1] <= 1


def test_one_in_twenty_queries_with_an_answer_is_called_unanswered_and_of_those_without_the_share_told():
    scores, relevant = drawn(4, queries=4000)
    calibration = fit_calibration(scores, relevant)
    alarms = np.mean([calibration.nothing_fits(best) for best in scores.amax(1).tolist()])
    found = np.mean([calibration.nothing_fits(best) for best in scores.masked_fill(relevant, -9).amax(1).tolist()])
    assert alarms == pytest.approx(0.05, abs=0.001)
    assert found == pytest.approx(calibration.found)


def test_hand_values():
    calibration = Calibration(scores=(0.0, 1.0), probabilities=(0.0, 0.5), candidates=100, queries=10, floor=0.2, found=0.5)
    assert [calibration.match(score) for score in (-1.0, 0.5, 2.0)] == [0.0, 0.25, 0.5]
    assert [calibration.holds_for(count) for count in (49, 50, 200, 201)] == [False, True, True, False]
    certain = reliability(calibration, torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]]), bins=2)
    assert certain.error == pytest.approx((0.5 + 0.0) / 2)
    assert certain.skill == pytest.approx(1 - 0.125 / 0.25)


@pytest.mark.parametrize("all_fit", [False, True])
def test_without_both_outcomes_nothing_is_learned(all_fit):
    with pytest.raises(DataError, match="nothing can be learned"):
        fit_calibration(torch.rand(3, 5), torch.full((3, 5), all_fit))
