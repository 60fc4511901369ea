"""Expected regret of a choice: how much lower its test RSUM may be than the best of all candidates.

The differences of the finalists to the choice are known from paired runs: their means over seeds have
t distributions. A candidate that was dropped has results of short trainings only. Its confirmation is
predicted from the best finalist of its model: it keeps the distance of its last round, with an error
whose spread is estimated from the other finalists. The regret is the maximum of all these differences
and 0. Its distribution is sampled.

The prediction assumes that candidates of one model learn alike. A candidate that learns late is
underrated by it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from visavis.evaluation.statistics import Interval
from visavis.research.experiments.screening import ScreenedSetting

SAMPLES = 20_000
TAIL = 0.025
MIN_FREEDOM = 2
"""Degrees of freedom from which a t distribution has a mean."""


@dataclass(frozen=True)
class Regret:
    """Distribution of the regret of a choice, in RSUM.

    Attributes:
        expected: Mean.
        interval: 95 % interval.
        with_twice_the_seeds: Expected regret after as many seeds again of each finalist.
        by_candidate: Probability in percent that each other candidate is the best one.
    """

    expected: float
    interval: Interval
    with_twice_the_seeds: float
    by_candidate: dict[str, float]


def estimate_regret(
    finalists: Mapping[str, Mapping[int, float]],
    choice: str,
    screened: Sequence[ScreenedSetting],
    validation: Mapping[str, float],
) -> Regret | None:
    """Estimate the regret of a choice, from the test RSUM by seed of each finalist, the results of
    all candidates in the screening, and the mean validation RSUM of each finalist. None if the
    seeds show too little of the spread.
    """
    random = np.random.default_rng(0)
    others = [name for name in finalists if name != choice]
    differences = [_differences(finalists[name], finalists[choice]) for name in others]
    spread, freedom = _pooled_spread(differences)
    if others and freedom < MIN_FREEDOM:
        return None
    samples = dict[str, np.ndarray]()
    for name, values in zip(others, differences, strict=True):
        noise = random.standard_t(freedom, SAMPLES) * spread / math.sqrt(len(values))
        samples[name] = statistics.fmean(values) + noise
    for one in screened:
        if one.name not in finalists and min(one.best_by_round) > -math.inf:
            mean, std = _predicted(one, screened, validation)
            samples[one.name] = mean - validation[choice] + std * random.standard_normal(SAMPLES)
    # The choice itself has the difference 0.
    table = np.stack([np.zeros(SAMPLES), *samples.values()])
    regrets = table.max(axis=0)
    best = table.argmax(axis=0)
    low, high = np.quantile(regrets, (TAIL, 1 - TAIL))
    return Regret(
        float(regrets.mean()),
        Interval(float(low), float(high)),
        _with_more_seeds(table, differences, spread, random),
        {name: 100 * float((best == number).mean()) for number, name in enumerate(samples, 1)},
    )


def _predicted(
    one: ScreenedSetting, screened: Sequence[ScreenedSetting], validation: Mapping[str, float]
) -> tuple[float, float]:
    """Mean and standard deviation of the validation RSUM that a dropped candidate would have had. The
    mean is minus infinity if no finalist of its model was trained in all rounds.
    """
    peers = [
        peer
        for peer in screened
        if peer.model == one.model
        and peer.name in validation
        and min(peer.best_by_round) > -math.inf
    ]
    if not peers:
        return -math.inf, 0.0
    best = max(peers, key=lambda peer: validation[peer.name])
    number = len(one.best_by_round) - 1
    distance = one.best_by_round[number] - best.best_by_round[number]
    return validation[best.name] + distance, _prediction_std(screened, validation, number)


def _differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Differences over the seeds that both have, or the difference of the means."""
    seeds = a.keys() & b.keys()
    if not seeds:
        return [statistics.fmean(a.values()) - statistics.fmean(b.values())]
    return [a[seed] - b[seed] for seed in sorted(seeds)]


def _pooled_spread(differences: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation of a difference over seeds, pooled over pairs, and its degrees of freedom."""
    squares = [statistics.variance(each) * (len(each) - 1) for each in differences if len(each) > 1]
    freedom = sum(len(each) - 1 for each in differences)
    return (math.sqrt(sum(squares) / freedom), freedom) if freedom else (0.0, 0)


def _prediction_std(
    screened: Sequence[ScreenedSetting], validation: Mapping[str, float], number: int
) -> float:
    """Standard deviation of the error of a prediction from a round: of the finalists' gains from it
    to the confirmation, around the mean of their model.
    """
    squares = 0.0
    freedom = 0
    spreads = list[float]()
    for model in {one.model for one in screened}:
        candidates = [
            one for one in screened if one.model == model and len(one.best_by_round) > number
        ]
        results = [one.best_by_round[number] for one in candidates]
        finite = [result for result in results if math.isfinite(result)]
        if len(finite) > 1:
            spreads.append(statistics.variance(finite))
        gains = [
            validation[one.name] - one.best_by_round[number]
            for one in candidates
            if one.name in validation and math.isfinite(one.best_by_round[number])
        ]
        if len(gains) > 1:
            squares += statistics.variance(gains) * (len(gains) - 1)
            freedom += len(gains) - 1
    # Two or three finalists are few. The spread of all candidates in the round counts as one
    # more of them.
    prior = statistics.fmean(spreads) if spreads else 0.0
    return math.sqrt((squares + prior) / (freedom + 1))


def _with_more_seeds(
    table: np.ndarray,
    differences: Sequence[Sequence[float]],
    spread: float,
    random: np.random.Generator,
) -> float:
    """Expected regret of the choice after as many seeds again, for sampled true differences
    ``[candidates, samples]``, of which the first rows are the choice and the finalists.
    """
    true = table[: 1 + len(differences)]
    estimates = np.zeros_like(true)
    for row, truth, values in zip(estimates[1:], true[1:], differences, strict=True):
        noise = spread / math.sqrt(len(values)) * random.standard_normal(len(truth))
        # The mean of the seeds so far and of as many new ones.
        row += (statistics.fmean(values) + truth + noise) / 2
    chosen = np.take_along_axis(true, estimates.argmax(axis=0)[None], axis=0)[0]
    return float((table.max(axis=0) - chosen).mean())
