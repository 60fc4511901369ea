"""Expected regret of a choice: how much lower its test RSUM may be than the best of all candidates,
each at the best of its learning rates.

The differences of the finalists to the choice are known from paired runs: their means over seeds have
t distributions. Of the other candidates, and of all other learning rates, only trials are known. They
predict what many whole runs would have shown: lines lead from the results of a round to those of the
next one, fitted to what trained in both, and a whole trial has the error of one seed. The level of
the trials, whose seed may have easier validation images, is that of the finalists among them. The
finalists have validation and test, and show how a difference on one becomes a difference on the other.
The regret is the maximum of all these differences and 0. Its distribution is sampled.

The prediction assumes that candidates of one model learn alike, up to the errors of the lines.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from visavis.evaluation.metrics.catalog import RSUM
from visavis.evaluation.statistics import Interval
from visavis.research.experiments.screening import (
    NUM_ROUNDS,
    Schedule,
    ScreenedRate,
    ScreenedSetting,
)
from visavis.research.experiments.setting_results import bounds_of

SAMPLES = 20_000
TAIL = 0.025
ALL_MODELS = -1
"""Key of a line that all models share."""
MIN_FREEDOM = 2
"""Degrees of freedom from which a t distribution has a mean."""
MAX_RSUM = bounds_of(RSUM.name)[1]
MIN_SHARE = 0.02
"""Least distance of a mean RSUM from 0 and from `MAX_RSUM`, as a share of it, that shows its level."""
SLOPE_STD = 0.3
"""Standard deviation of the slopes of different data around the expected one."""
MIN_VARIANCE = 1e-6
"""Least variance of a point of the line, for finalists without any spread."""
SHARED_FREEDOM = 4
"""Weight of the typical variance in the variance of a difference, as degrees of freedom. Five seeds
alone show it with four.
"""


@dataclass(frozen=True)
class Finalist:
    """Confirmation of a candidate.

    Attributes:
        factor: Factor of the recipe's learning rate.
        validation: Validation RSUM by seed.
        test: Test RSUM by seed.
    """

    factor: float
    validation: Mapping[int, float]
    test: Mapping[int, float]


@dataclass(frozen=True)
class Regret:
    """Distribution of the regret of a choice, in RSUM.

    Attributes:
        expected: Mean.
        interval: 95 % interval.
        with_twice_the_seeds: Expected regret after as many seeds again of each finalist.
        by_candidate: Probability in percent that each candidate is the best one, at any of its rates.
            That of the choice is of its other rates.
        excluded: Finalists that are better than the choice with a probability below 2.5 %.
    """

    expected: float
    interval: Interval
    with_twice_the_seeds: float
    by_candidate: dict[str, float]
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class _Rate(ScreenedRate):
    """A learning rate with its candidate.

    Attributes:
        name: Name of the candidate.
        model: Number of its model.
    """

    name: str
    model: int


def estimate_regret(
    finalists: Mapping[str, Finalist],
    choice: str,
    screened: Sequence[ScreenedSetting],
    schedule: Schedule,
) -> Regret | None:
    """Estimate the regret of a choice, from the confirmations, and from the results of all candidates in
    the screening and its schedule. None if there are too few seeds for the spread, or too few trials
    for a prediction.
    """
    random = np.random.default_rng(0)
    others = [name for name in finalists if name != choice]
    differences = [_differences(finalists[name].test, finalists[choice].test) for name in others]
    # A single finalist has no differences. Then its own seeds show the spread.
    groups = differences or [list(finalists[choice].test.values())]
    freedom = sum(len(each) - 1 for each in groups)
    tried = [
        _Rate(rate.factor, _by_length(rate, schedule), one.name, one.model)
        for one in screened
        if not one.has_failed
        for rate in one.rates
        if -math.inf not in rate.by_round
    ]
    unconfirmed = [
        rate
        for rate in tried
        if rate.name not in finalists or finalists[rate.name].factor != rate.factor
    ]
    if (others or unconfirmed) and freedom < MIN_FREEDOM:
        return None
    # The choice itself has the difference 0.
    names, rows = [""], [np.zeros(SAMPLES)]
    names += others
    rows += [
        statistics.fmean(values) + std.sample(random) * random.standard_normal(SAMPLES)
        for values, std in zip(differences, _stds_of_means(differences), strict=True)
    ]
    on_validation = _unconfirmed_differences(
        finalists, choice, tried, unconfirmed, schedule, random
    )
    if on_validation is None:
        return None
    transfer = _transfer(finalists[choice], [finalists[name] for name in others])
    slope = transfer.sample_slope(random)
    transfer_std = transfer.std.sample(random)
    images = {
        one.name: transfer_std * random.standard_normal(SAMPLES)
        for one in screened
        if one.name != choice
    }
    names += [rate.name for rate in unconfirmed]
    rows += [
        slope * samples + images.get(rate.name, 0.0)
        for rate, samples in zip(unconfirmed, on_validation, strict=True)
    ]
    table = np.stack(rows)
    regrets = table.max(axis=0)
    low, high = np.quantile(regrets, (TAIL, 1 - TAIL))
    by_candidate = dict.fromkeys(names[1:], 0.0)
    counts = np.bincount(table.argmax(axis=0), minlength=len(names))
    for name, count in zip(names, counts, strict=True):
        if name:
            by_candidate[name] += 100 * float(count) / SAMPLES
    return Regret(
        float(regrets.mean()),
        Interval(float(low), float(high)),
        _with_more_seeds(table, differences, random),
        by_candidate,
        tuple(
            name
            for name, samples in zip(others, table[1 : 1 + len(others)], strict=True)
            if np.mean(samples > 0) < TAIL
        ),
    )


def _unconfirmed_differences(
    finalists: Mapping[str, Finalist],
    choice: str,
    tried: Sequence[_Rate],
    unconfirmed: Sequence[_Rate],
    schedule: Schedule,
    random: np.random.Generator,
) -> list[np.ndarray] | None:
    """Sample by how much the choice is worse on validation than rates that only have trials. None if
    too few rates are known.
    """
    # Each seed may have its own validation images, so only results of equal seeds are compared.
    paired = {
        name: _differences(one.validation, finalists[choice].validation)
        for name, one in finalists.items()
        if name != choice
    }
    own_std = (
        _typical_std([*paired.values()]).over(2)
        if paired
        else _typical_std([[*finalists[choice].test.values()]])
    )
    confirmed = [rate for rate in tried if rate not in unconfirmed]
    predicted = _predict(
        tried, [*confirmed, *unconfirmed], own_std.over(schedule.trial_seeds), random
    )
    if predicted is None or (unconfirmed and not confirmed):
        return None
    means = {choice: 0.0} | {name: statistics.fmean(each) for name, each in paired.items()}
    noises = [own_std.over(len(finalists[name].validation)) for name in means]
    better = dict(zip(means, _shrunk([*means.values()], noises, random), strict=True))
    # What the choice would have had among the trials, with their images: each finalist shows it.
    levels = [
        predicted[number] - better[rate.name] + better[choice]
        for number, rate in enumerate(confirmed)
    ]
    return [samples - np.mean(levels, axis=0) for samples in predicted[len(confirmed) :]]


def _by_length(rate: ScreenedRate, schedule: Schedule) -> tuple[float | None, ...]:
    """Results by round. Whole trials belong to the last one."""
    if not schedule.is_whole:
        return rate.by_round
    return *(None for _ in rate.by_round[1:]), rate.by_round[rate.last_round]


def _differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Differences over the seeds that both have, or the difference of the means."""
    seeds = a.keys() & b.keys()
    if not seeds:
        return [statistics.fmean(a.values()) - statistics.fmean(b.values())]
    return [a[seed] - b[seed] for seed in sorted(seeds)]


@dataclass(frozen=True)
class _Transfer:
    """How differences between candidates on validation become differences on test.

    Attributes:
        slope: Test RSUM for each RSUM of validation. Galleries of different sizes have different levels.
        slope_std: Its standard error.
        std: How much other images change a difference. A difference to the choice has the variance of two
            candidates.
    """

    slope: float
    slope_std: float
    std: _Std

    def sample_slope(self, random: np.random.Generator) -> np.ndarray:
        """Sample the true slope, which is not negative."""
        return np.maximum(self.slope + self.slope_std * random.standard_normal(SAMPLES), 0.0)


def _transfer(choice: Finalist, others: Sequence[Finalist]) -> _Transfer:
    """Estimate from the finalists, which have both splits, what the test images change: a line by
    weighted least squares, and the spread around it without the part of the seeds.
    """
    prior = _expected_slope((choice, *others))
    if not others:
        return _Transfer(prior, SLOPE_STD, _Std(0.0, 0))
    seeds = np.array([len(choice.test), *(len(one.test) for one in others)])
    on_validation = [_differences(one.validation, choice.validation) for one in others]
    on_test = [_differences(one.test, choice.test) for one in others]
    x, y = (np.array([0.0, *map(statistics.fmean, each)]) for each in (on_validation, on_test))
    between, of_seed = _transfer_variances(choice, others, prior)
    weights = 1 / np.maximum(between / 2 + of_seed / seeds, MIN_VARIANCE)
    centered = x - np.average(x, weights=weights)
    precision = float(weights @ centered**2) + SLOPE_STD**-2
    slope = (float((weights * centered) @ y) + prior * SLOPE_STD**-2) / precision
    between, _ = _transfer_variances(choice, others, max(slope, 0.0))
    std = _Std(math.sqrt(between), max(MIN_FREEDOM, len(others)))
    return _Transfer(slope, precision**-0.5, std)


def _expected_slope(finalists: Sequence[Finalist]) -> float:
    """Slope of the test RSUM over the one of validation at the levels of the finalists, if log odds of
    recalls are shifted alike for all.
    """
    slopes = list[float]()
    for results in ([one.validation for one in finalists], [one.test for one in finalists]):
        mean = statistics.fmean(statistics.fmean(one.values()) for one in results)
        share = min(max(mean / MAX_RSUM, MIN_SHARE), 1 - MIN_SHARE)
        slopes.append(share * (1 - share))
    of_validation, of_test = slopes
    return of_test / of_validation


def _transfer_variances(
    choice: Finalist, others: Sequence[Finalist], slope: float
) -> tuple[float, float]:
    """Variance that the images add to the difference of two candidates, and variance of a seed. It is
    the estimate of a one-way analysis of variance, where many seeds weigh more.
    """
    own, *gaps = (
        {seed: one.test[seed] - slope * one.validation[seed] for seed in one.test}
        for one in (choice, *others)
    )
    differences = [_differences(each, own) for each in gaps]
    means = np.array([0.0, *map(statistics.fmean, differences)])
    seeds = np.array([len(own), *map(len, differences)])
    between = float(seeds @ (means - np.average(means, weights=seeds)) ** 2)
    of_seed = _typical_std(differences).over(2).value ** 2
    weight = float(seeds.sum() - (seeds @ seeds) / seeds.sum())
    return 2 * max(0.0, between - len(others) * of_seed) / weight, of_seed


@dataclass(frozen=True)
class _Std:
    """A standard deviation that was estimated with some degrees of freedom."""

    value: float
    freedom: int

    def over(self, count: int) -> _Std:
        """Standard deviation of a variance that is divided by a number, as that of a mean is."""
        return replace(self, value=self.value / math.sqrt(count))

    def sample(self, random: np.random.Generator) -> np.ndarray:
        """Sample the true standard deviation."""
        if not self.freedom:
            return np.zeros(SAMPLES)
        return self.value * np.sqrt(self.freedom / random.chisquare(self.freedom, SAMPLES))


def _typical_std(groups: Sequence[Sequence[float]]) -> _Std:
    """Standard deviation within most groups of values: of the median variance, because a few unstable
    settings have a far larger one.
    """
    freedom = sum(len(each) - 1 for each in groups)
    # The median of a sampled variance is lower than its mean.
    variances = [
        statistics.variance(each) * (len(each) - 1) / float(chi2.median(len(each) - 1))
        for each in groups
        if len(each) > 1
    ]
    return _Std(math.sqrt(statistics.median(variances)) if variances else 0.0, freedom)


def _stds_of_means(groups: Sequence[Sequence[float]]) -> list[_Std]:
    """Standard deviation of the mean of each group of values, whose own variance is averaged with the
    typical one.
    """
    typical = _typical_std(groups)
    stds = list[_Std]()
    for values in groups:
        own = len(values) - 1
        shared = min(SHARED_FREEDOM, typical.freedom - own)
        squares = shared * typical.value**2 + (own * statistics.variance(values) if own else 0.0)
        freedom = shared + own
        std = _Std(math.sqrt(squares / freedom) if freedom else 0.0, freedom)
        stds.append(std.over(len(values)))
    return stds


def _shrunk(
    values: Sequence[float], noises: Sequence[_Std], random: np.random.Generator
) -> list[np.ndarray]:
    """Sample what was measured with noise. The part of the spread between the values that the noise
    explains is taken off, because high values are partly luck.
    """
    mean = statistics.fmean(values)
    variance = statistics.variance(values) if len(values) > 1 else math.inf
    own = variance - statistics.fmean(noise.value**2 for noise in noises)
    samples = list[np.ndarray]()
    for value, noise in zip(values, noises, strict=True):
        share = 1.0 if math.isinf(own) else max(0.0, own) / (max(0.0, own) + noise.value**2 or 1.0)
        std = math.sqrt(share) * noise.sample(random)
        samples.append(mean + share * (value - mean) + std * random.standard_normal(SAMPLES))
    return samples


def _predict(
    tried: Sequence[_Rate],
    predicted_rates: Sequence[_Rate],
    noise: _Std,
    random: np.random.Generator,
) -> list[np.ndarray] | None:
    """Sample the mean validation RSUM of many whole runs of some of the rates. ``noise`` is that of
    the result of one in the last round. None if too few rates are known.
    """
    last = NUM_ROUNDS - 1
    first = min([last, *(rate.last_round for rate in predicted_rates)])
    models = {rate.model for rate in predicted_rates}
    lines = [_fit_line(tried, number, models) for number in range(first, last)]
    fitted = [line for line in lines if line is not None]
    freedom = sum(line.freedom for line in fitted)
    if len(fitted) < len(lines) or (lines and freedom < MIN_FREEDOM):
        return None
    # Few rates train in two rounds. The lines have one standard deviation, so that more of them show it.
    squares = sum(line.squares for line in fitted)
    std = _Std(math.sqrt(squares / freedom) if freedom else 0.0, freedom).sample(random)
    moving = list[tuple[_Rate, np.ndarray]]()
    for number, line in enumerate(fitted, first):
        moving += [
            (rate, np.full(SAMPLES, rate.by_round[number]))
            for rate in predicted_rates
            if rate.last_round == number
        ]
        own_noise = noise.value if number + 1 == last else 0.0
        following = line.sample([(rate.model, x) for rate, x in moving], std, own_noise, random)
        moving = [(rate, y) for (rate, _), y in zip(moving, following, strict=True)]
    samples = dict(moving)
    whole = defaultdict[int, dict[_Rate, float]](dict)
    for rate in tried:
        if (result := rate.by_round[last]) is not None:
            whole[rate.model][rate] = result
    for results in whole.values():
        noises = [noise] * len(results)
        samples |= zip(results, _shrunk([*results.values()], noises, random), strict=True)
    return [samples[rate] for rate in predicted_rates]


@dataclass(frozen=True)
class _Line:
    """A line from the results of a round to those of the next one, one for each model with the same
    slope.

    Attributes:
        centers: Mean result in both rounds of each model.
        counts: Number of known rates of each model.
        slope: Slope.
        slope_std: Its standard error, as a share of the residuals' standard deviation.
        squares: Sum of the squared residuals.
        freedom: Degrees of freedom.
    """

    centers: Mapping[int, tuple[float, float]]
    counts: Mapping[int, int]
    slope: float
    slope_std: float
    squares: float
    freedom: int

    def sample(
        self,
        results: Sequence[tuple[int, np.ndarray]],
        std: np.ndarray,
        noise: float,
        random: np.random.Generator,
    ) -> list[np.ndarray]:
        """Sample results in the next round from models and results in this one. ``std`` is the
        standard deviation of the residuals. The part of it that is noise does not count.
        """
        slope = self.slope + self.slope_std * std * random.standard_normal(SAMPLES)
        # A rate that is better after short trainings is not expected to be worse.
        slope = np.maximum(slope, 0.0)
        offsets = {
            model: std / math.sqrt(count) * random.standard_normal(SAMPLES)
            for model, count in self.counts.items()
        }
        own_std = np.sqrt(np.maximum(std**2 - noise**2, 0.0))
        samples = list[np.ndarray]()
        for model, x in results:
            key = model if model in self.centers else ALL_MODELS
            center, whole = self.centers[key]
            own = own_std * random.standard_normal(SAMPLES)
            samples.append(whole + offsets[key] + slope * (x - center) + own)
        return samples


def _fit_line(tried: Sequence[_Rate], number: int, models: set[int]) -> _Line | None:
    """Fit the line from a round to the next one by least squares, to predict rates of some models.
    None if too few rates are known.
    """
    points = [
        (rate.model, x, y)
        for rate in tried
        if (x := rate.by_round[number]) is not None and (y := rate.by_round[number + 1]) is not None
    ]
    # With few points, or without one of a model, all models share one line.
    for is_by_model in (True, False):
        groups = defaultdict[int, list[tuple[float, float]]](list)
        for model, x, y in points:
            groups[model if is_by_model else ALL_MODELS].append((x, y))
        freedom = len(points) - len(groups) - 1
        if freedom > 0 and (not is_by_model or models <= groups.keys()):
            break
    else:
        return None
    centers = {
        model: (statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each))
        for model, each in groups.items()
    }
    x_of = np.array([x - centers[model][0] for model, each in groups.items() for x, _ in each])
    y_of = np.array([y - centers[model][1] for model, each in groups.items() for _, y in each])
    # A point of slope 1 is added, at one standard deviation: few points hardly show a slope.
    squares = float(x_of @ x_of)
    added = squares / len(points)
    slope = (float(x_of @ y_of) + added) / (squares + added) if squares else 1.0
    residuals = y_of - max(slope, 0.0) * x_of
    return _Line(
        centers,
        {model: len(each) for model, each in groups.items()},
        slope,
        1 / math.sqrt(squares + added) if squares else 0.0,
        float(residuals @ residuals),
        freedom,
    )


def _with_more_seeds(
    table: np.ndarray,
    differences: Sequence[Sequence[float]],
    random: np.random.Generator,
) -> float:
    """Expected regret of the choice after as many seeds again, for sampled true differences
    ``[candidates, samples]``, of which the first rows are the choice and the finalists.
    """
    true = table[: 1 + len(differences)]
    estimates = np.zeros_like(true)
    stds = _stds_of_means(differences)
    for row, truth, values, std in zip(estimates[1:], true[1:], differences, stds, strict=True):
        noise = std.value * random.standard_normal(len(truth))
        # The mean of the seeds so far and of as many new ones.
        row += (statistics.fmean(values) + truth + noise) / 2
    chosen = np.take_along_axis(true, estimates.argmax(axis=0)[None], axis=0)[0]
    return float((table.max(axis=0) - chosen).mean())
