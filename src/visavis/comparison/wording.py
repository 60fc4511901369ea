"""Judgements in words: one sentence for two rows and one metric, over seeds and over images.

>>> from visavis.comparison.statistics import compared
>>> rows = {"Unified": {0: 80.1, 1: 79.2, 2: 80.4}, "Triplet": {0: 75.2, 1: 74.6, 2: 75.8}}
>>> over_seeds(compared(rows)[0], "R@1")
'Unified is higher than Triplet in R@1 over 3 seeds: +4.70 (95 % interval 4.27 to 5.13, p < 0.001).'
"""

from __future__ import annotations

from visavis.comparison.bootstrap import Drawn
from visavis.comparison.statistics import MOST_SEEDS, Paired, number

FEWEST_UNITS = 20
"""Test images, or judged sentences, from which on draws of them say something of others: of fewer, intervals are too short."""


def over_seeds(pair: Paired, metric: str) -> str:
    """What the seeds say of a minus b, with the numbers that it rests on."""
    names, difference, seeds = f"{pair.a} and {pair.b}", number(pair.difference, signed=True), len(pair.seeds)
    if pair.p is None:
        return f"{names} share {'one' if seeds else 'no'} seed, {difference} {metric}: no test can be made; train more seeds of both."
    if pair.deviation == 0:
        if not pair.difference:
            return f"{names} have the same {metric} in each of {seeds} seeds."
        same = f"is {difference} {metric} in each of {seeds} seeds, so that only its sign can be tested ({_p(pair)})"
        settled = "" if pair.verdict == "not distinguishable" else f": {pair.a} is {pair.verdict}"
        return f"{pair.a} against {pair.b} {same}{settled}."
    numbers = f"(95 % interval {pair.interval}, {_p(pair)})"
    if pair.verdict == "not distinguishable":
        return f"{names} are not distinguishable in {metric} over {seeds} seeds: {difference} {numbers}; {_more(pair)}."
    return f"{pair.a} is {pair.verdict} than {pair.b} in {metric} over {seeds} seeds: {difference} {numbers}."


def over_images(drawn: Drawn, metric: str) -> str:
    """What the test images, or judged sentences, say of the same difference, of these very models."""
    difference = f"{number(drawn.value, signed=True)} {metric}"
    if drawn.interval is None:
        return f"Every draw of the {drawn.units:,} {drawn.of} gives the same: {difference}."
    if drawn.units < FEWEST_UNITS:
        return f"{drawn.units} {drawn.of} are too few to tell what others would say: {difference} over these; {FEWEST_UNITS} can."
    what = f"{difference} (95 % interval {drawn.interval} over {drawn.units:,} {drawn.of})"
    if 0 in drawn.interval:
        return f"Other {drawn.of} could turn it round: {what}."
    return f"Other {drawn.of} would not turn it round: {what}."


def _more(pair: Paired) -> str:
    if pair.more_seeds is None:
        return f"more than {MOST_SEEDS} more seeds would be needed for a difference of this size"
    return f"about {pair.more_seeds} more seed{'s' * (pair.more_seeds > 1)} would settle a difference of this size"


def _p(pair: Paired) -> str:
    assert pair.adjusted_p is not None
    p = "p < 0.001" if pair.adjusted_p < 0.001 else f"p = {pair.adjusted_p:.{3 if pair.adjusted_p < 0.1 else 2}f}"
    return p if pair.tests == 1 else f"{p} after Holm's correction for {pair.tests} tests"
