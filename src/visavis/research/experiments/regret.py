"""Expected regret of a choice: how much lower its test RSUM may be than the best of all candidates.

The differences of the finalists to the choice are known from paired runs: their means over seeds have
t distributions. A candidate that was dropped has results of short trainings only. What its
confirmation would have been is predicted by a line from the results of its last round, fitted to the
candidates that trained in the last round, too: the finalists, and spot checks of dropped ones. The
regret is the maximum of all these differences and 0. Its distribution is sampled.

The prediction assumes that candidates of one model learn alike, up to the errors that the line has for
the known ones.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from visavis.evaluation.statistics import Interval
from visavis.research.experiments.screening import NUM_ROUNDS, ScreenedSetting

SAMPLES = 20_000
TAIL = 0.025
ALL_MODELS = -1
"""Key of a line that all models share."""
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
    all candidates in the screening, and the mean validation RSUM of each finalist. None if there are
    too few seeds for the spread, or too few whole trainings for a prediction.
    """
    random = np.random.default_rng(0)
    others = [name for name in finalists if name != choice]
    differences = [_differences(finalists[name], finalists[choice]) for name in others]
    dropped = [one for one in screened if one.name not in finalists and not one.has_failed]
    spread, freedom = (
        _pooled_spread(differences) if others else _spread_of_difference(finalists[choice])
    )
    if (others or dropped) and freedom < MIN_FREEDOM:
        return None
    samples = dict[str, np.ndarray]()
    for name, values in zip(others, differences, strict=True):
        noise = random.standard_t(freedom, SAMPLES) * spread / math.sqrt(len(values))
        samples[name] = statistics.fmean(values) + noise
    known = _whole_results(screened, validation)
    for round_number in sorted({one.last_round for one in dropped}):
        group = [one for one in dropped if one.last_round == round_number]
        if round_number == NUM_ROUNDS - 1:
            noise = spread * random.standard_t(freedom, (len(group), SAMPLES))
            predicted = [known[one.name] + own for one, own in zip(group, noise, strict=True)]
        else:
            line = _fit_line(screened, known, round_number, {one.model for one in group})
            if line is None:
                return None
            predicted = line.sample(group, random)
        for one, whole in zip(group, predicted, strict=True):
            samples[one.name] = whole - validation[choice]
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


def _spread_of_difference(by_seed: Mapping[int, float]) -> tuple[float, int]:
    """Standard deviation of a difference to another setting whose results spread alike, and its
    degrees of freedom.
    """
    if len(by_seed) < 2:
        return 0.0, 0
    return math.sqrt(2 * statistics.variance(by_seed.values())), len(by_seed) - 1


def _whole_results(
    screened: Sequence[ScreenedSetting], validation: Mapping[str, float]
) -> dict[str, float]:
    """Validation RSUM, as in a confirmation, of all candidates that trained in the last round."""
    last = {
        one.name: result
        for one in screened
        if (result := one.best_by_round[-1]) is not None and result > -math.inf
    }
    # The result of the best of a few trials is too high.
    gains = [validation[name] - last[name] for name in last if name in validation]
    gain = statistics.fmean(gains) if gains else 0.0
    return {name: validation.get(name, result + gain) for name, result in last.items()}


@dataclass(frozen=True)
class _Line:
    """A line from the results of a round to whole results, one for each model with the same slope.

    Attributes:
        round_number: Round, from 0.
        centers: Mean result in the round, and mean whole result, of each model.
        counts: Number of known candidates of each model.
        slope: Slope.
        slope_std: Its standard error, as a share of the residuals' standard deviation.
        residual_std: Standard deviation of the residuals.
        freedom: Degrees of freedom.
    """

    round_number: int
    centers: Mapping[int, tuple[float, float]]
    counts: Mapping[int, int]
    slope: float
    slope_std: float
    residual_std: float
    freedom: int

    def sample(
        self, candidates: Sequence[ScreenedSetting], random: np.random.Generator
    ) -> list[np.ndarray]:
        """Sample the whole results of candidates, with the errors of the line and their own."""
        chi_square = random.chisquare(self.freedom, SAMPLES)
        std = self.residual_std * np.sqrt(self.freedom / chi_square)
        slope = self.slope + self.slope_std * std * random.standard_normal(SAMPLES)
        # A candidate that is better after short trainings is not expected to be worse.
        slope = np.maximum(slope, 0.0)
        offsets = {
            model: std / math.sqrt(count) * random.standard_normal(SAMPLES)
            for model, count in self.counts.items()
        }
        samples = list[np.ndarray]()
        for one in candidates:
            result = one.best_by_round[self.round_number]
            assert result is not None
            model = one.model if one.model in self.centers else ALL_MODELS
            center, whole = self.centers[model]
            own = std * random.standard_normal(SAMPLES)
            samples.append(whole + offsets[model] + slope * (result - center) + own)
        return samples


def _fit_line(
    screened: Sequence[ScreenedSetting],
    whole: Mapping[str, float],
    round_number: int,
    models: Collection[int],
) -> _Line | None:
    """Fit the line of a round by least squares, to predict candidates of some models. None if too few
    candidates are known.
    """
    points = [
        (one.model, result, whole[one.name])
        for one in screened
        if one.name in whole
        and (result := one.best_by_round[round_number]) is not None
        and result > -math.inf
    ]
    # With few points, or without one of a model, all models share one line.
    for is_by_model in (True, False):
        groups = defaultdict[int, list[tuple[float, float]]](list)
        for model, result, value in points:
            groups[model if is_by_model else ALL_MODELS].append((result, value))
        freedom = len(points) - len(groups) - 1
        if freedom >= MIN_FREEDOM and (not is_by_model or set(models) <= groups.keys()):
            break
    else:
        return None
    centers = {
        model: (statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each))
        for model, each in groups.items()
    }
    x = np.array([x - centers[model][0] for model, each in groups.items() for x, _ in each])
    y = np.array([y - centers[model][1] for model, each in groups.items() for _, y in each])
    squares = float(x @ x)
    # Equal results keep their distance.
    slope = float(x @ y) / squares if squares else 1.0
    residuals = y - max(slope, 0.0) * x
    return _Line(
        round_number,
        centers,
        {model: len(each) for model, each in groups.items()},
        slope,
        1 / math.sqrt(squares) if squares else 0.0,
        math.sqrt(float(residuals @ residuals) / freedom),
        freedom,
    )


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
