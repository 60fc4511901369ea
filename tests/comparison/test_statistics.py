"""Judgements over seeds: against scipy and hand values, coverage and false alarms in simulations, and what cannot be tested."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from visavis.comparison.statistics import Paired, against, compared, holm, more_seeds, number, paired_by_seed, t_interval
from visavis.comparison.wording import over_seeds
from visavis.errors import DataError, SpecError

RANDOM = np.random.default_rng(0)


def row(values):
    return dict(enumerate(map(float, values)))


@pytest.mark.parametrize("number_of_seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_an_interval_is_that_of_scipy(number_of_seeds, confidence):
    values = RANDOM.normal(480, 3, number_of_seeds)
    interval = t_interval(values, confidence)
    assert (interval.low, interval.high) == pytest.approx(stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values)))
    assert values.mean() in interval
    assert interval.high + 1 not in interval


@pytest.mark.parametrize("number_of_seeds", [2, 5, 30])
def test_a_paired_test_is_that_of_scipy(number_of_seeds):
    a, b = RANDOM.normal(480, 3, (2, number_of_seeds))
    pair, expected = paired_by_seed(row(a), row(b)), stats.ttest_rel(a, b)
    assert pair.difference == pytest.approx((a - b).mean())
    assert pair.deviation == pytest.approx((a - b).std(ddof=1))
    assert pair.p == pair.adjusted_p == pytest.approx(expected.pvalue)
    assert (pair.interval.low, pair.interval.high) == pytest.approx(tuple(expected.confidence_interval()))
    turned = pair.turned()
    assert (turned.a, turned.b, turned.difference, turned.p) == (pair.b, pair.a, -pair.difference, pair.p)
    assert (turned.interval.low, turned.interval.high) == (-pair.interval.high, -pair.interval.low)


def test_a_paired_test_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3) of two degrees of freedom, where p = 1 - t / sqrt(t^2 + 2)."""
    pair = paired_by_seed({0: 11, 1: 22, 2: 33}, {0: 10, 1: 20, 2: 30})
    assert (pair.difference, pair.deviation) == (2, 1)
    assert pair.p == pytest.approx(1 - math.sqrt(12 / 14))


def test_seeds_are_compared_with_themselves_whatever_their_order_and_only_common_ones_count():
    a, b = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}, {7: -50.0, 2: 3.0, 1: 1.5, 0: 0.0}
    pair = paired_by_seed(a, b)
    assert pair.seeds == (0, 1, 2)
    assert pair.difference == pytest.approx((1 + 0.5 + 1) / 3)
    assert pair.p == pytest.approx(stats.ttest_rel([1, 2, 4], [0, 1.5, 3]).pvalue)


def test_holm_by_hand_and_never_below_bonferronis_smallest_or_above_bonferroni():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1, 1]
    assert holm([]) == []
    for p in RANDOM.random((50, 6)):
        adjusted = np.array(holm(p))
        assert (p <= adjusted).all()
        assert (adjusted <= np.minimum(1, 6 * p) + 1e-12).all()
        assert adjusted.min() == pytest.approx(min(1, 6 * p.min()))
        assert (np.argsort(p) == np.argsort(adjusted, kind="stable")).all() or len(set(adjusted)) < 6


@pytest.mark.parametrize("number_of_seeds", [2, 3, 5, 10])
def test_nominal_95_percent_intervals_cover_93_to_97(number_of_seeds):
    values = np.random.default_rng(number_of_seeds).normal(480, 3, (4000, number_of_seeds))
    assert 0.93 < np.mean([480 in t_interval(seeds) for seeds in values.tolist()]) < 0.97


def test_a_percentile_bootstrap_of_five_seeds_does_not_cover_95_percent():
    """Why the intervals are Student's."""
    random = np.random.default_rng(0)
    values, chosen = random.normal(size=(2000, 5)), random.integers(0, 5, (500, 5))
    low, high = np.quantile(values[:, chosen].mean(2), (0.025, 0.975), axis=1)
    assert 0.80 < ((low <= 0) & (high >= 0)).mean() < 0.88


def equal_rows(random, number_of_rows=6, seeds=5):
    """Rows of one mean and unequal deviations, with a common effect of the seed."""
    values = 480 + random.normal(0, 4, seeds) + np.linspace(1, 3, number_of_rows)[:, None] * random.normal(size=(number_of_rows, seeds))
    return {f"row {i}": row(own) for i, own in enumerate(values)}


@pytest.mark.parametrize("reference", [None, "row 3"])
def test_equal_rows_are_told_apart_in_at_most_6_5_percent_of_comparisons(reference):
    random = np.random.default_rng(1)
    found = [any(pair.verdict != "not distinguishable" for pair in compared(equal_rows(random), reference)) for _ in range(1000)]
    assert 0.01 < np.mean(found) <= 0.065


def test_a_reference_chosen_by_what_the_seeds_reached_raises_more_false_alarms_than_it_says_and_all_pairs_do_not():
    """The luck of a seed that validation and test share is not corrected by the number of rows."""
    random, chosen, honest = np.random.default_rng(2), [], []
    for _ in range(400):
        own = random.normal(size=(8, 5))
        rows = {f"row {i}": row(values) for i, values in enumerate(own)}
        best = f"row {own.mean(1).argmax()}"
        chosen.append(any(pair.verdict != "not distinguishable" for pair in compared(rows, best)))
        honest.append(any(pair.verdict != "not distinguishable" for pair in against(compared(rows), best).values()))
    assert np.mean(chosen) > 0.075
    assert np.mean(honest) <= 0.065


def test_a_real_difference_is_found_as_often_as_the_number_of_seeds_promises():
    random, difference, deviation = np.random.default_rng(3), 1.0, 1.0
    needed = 2 + more_seeds(difference, deviation, 2)
    found = [paired_by_seed(row(random.normal(difference, deviation, needed)), row(np.zeros(needed))).verdict for _ in range(2000)]
    assert 0.78 < np.mean([verdict == "higher" for verdict in found]) < 0.85


@pytest.mark.parametrize(("effect", "needed"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_for_a_power_of_80_percent_are_those_of_the_tables(effect, needed):
    """Of a paired t-test at 5 %, as G*Power and R's power.t.test give them."""
    assert 2 + more_seeds(effect, 1.0, 2, most=300) == needed
    assert 2 + more_seeds(-effect * 7, 7.0, 2, most=300) == needed
    assert more_seeds(effect, 1.0, needed) == 0
    assert more_seeds(effect, 1.0, needed - 1) == 1


def test_more_seeds_are_none_where_a_hundred_would_not_do():
    assert more_seeds(0.1, 1.0, 5) is None
    assert more_seeds(0.0, 1.0, 5) is None
    assert more_seeds(0.28, 1.0, 5) is not None
    assert more_seeds(0.28, 1.0, 5, most=50) is None


def test_what_is_not_settled_wants_more_seeds_and_what_is_settled_none():
    random = np.random.default_rng(4)
    for _ in range(30):
        rows = {name: row(random.normal(mean, 1, 5)) for name, mean in (("a", 0), ("b", 1), ("c", 4), ("d", 8))}
        for pair in compared(rows):
            assert (pair.more_seeds == 0) == (pair.verdict in ("higher", "lower"))


def test_all_pairs_or_each_against_a_reference():
    rows = {"a": row([1, 2, 3]), "b": row([4, 6, 5]), "c": row([9, 7, 8])}
    pairs = compared(rows)
    assert [(pair.a, pair.b, pair.tests) for pair in pairs] == [("a", "b", 3), ("a", "c", 3), ("b", "c", 3)]
    assert [pair.adjusted_p for pair in pairs] == holm([pair.p for pair in pairs])
    assert [(pair.a, pair.b, pair.tests) for pair in compared(rows, "b")] == [("a", "b", 2), ("c", "b", 2)]
    seen = against(pairs, "b")
    assert list(seen) == ["a", "c"]
    assert [(pair.b, pair.difference) for pair in seen.values()] == [("b", -3), ("b", 3)]
    assert compared({"a": rows["a"]}) == []


def test_one_seed_is_not_tested_and_does_not_count_among_the_tests():
    rows = {"a": row([1, 2, 3]), "b": row([4, 6, 5]), "c": {0: 7.0}}
    pairs = compared(rows)
    assert [(pair.verdict == "not tested", pair.tests) for pair in pairs] == [(False, 1), (True, 1), (True, 1)]
    assert (pairs[1].difference, pairs[1].interval, pairs[1].p, pairs[1].more_seeds) == (-6, None, None, None)
    assert over_seeds(pairs[1], "RSUM") == "a and c share one seed, −6.00 RSUM: no test can be made; train more seeds of both."
    assert t_interval([480.0]) is None


@pytest.mark.parametrize(
    ("seeds", "p", "verdict"), [(2, 0.5, "not distinguishable"), (5, 0.0625, "not distinguishable"), (6, 0.03125, "higher")]
)
def test_a_difference_that_is_the_same_in_every_seed_is_tested_by_its_sign(seeds, p, verdict):
    """A t-test would divide by the rounding of 0.1 + 0.2 and be sure of anything."""
    values = RANDOM.normal(50, 3, seeds)
    pair = paired_by_seed(row(values + 0.1 + 0.2), row(values))
    assert (pair.p, pair.interval, pair.deviation, pair.verdict) == (p, None, 0.0, verdict)
    assert pair.more_seeds == (0 if verdict == "higher" else None)
    assert over_seeds(pair, "R@1") == (
        f"a against b is +0.300 R@1 in each of {seeds} seeds, so that only its sign can be tested (p = {p:.{3 if p < 0.1 else 2}f})"
        + (": a is higher." if verdict == "higher" else ".")
    )


def test_equal_values_in_all_seeds():
    pair = paired_by_seed(row([0.1 + 0.2] * 5), row([0.3] * 5))
    assert (pair.difference, pair.p, pair.verdict, pair.more_seeds) == (0, 1, "not distinguishable", None)
    assert over_seeds(pair, "R@10") == "a and b have the same R@10 in each of 5 seeds."
    assert t_interval([100.0] * 5) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused_in_one_sentence(wrong):
    with pytest.raises(
        DataError, match=rf"^Unified, seed 3, is {wrong}, expected a number: leave out the run that came to it, or train it anew\.$"
    ):
        compared({"Unified": {0: 1.0, 3: wrong}, "VLC": {0: 1.0, 3: 2.0}})
    with pytest.raises(DataError, match=rf"^a value is {wrong}, "):
        t_interval([1.0, wrong])


def test_rows_whose_common_seeds_all_failed_are_not_tested():
    [pair] = compared({"Unified": {0: 5.0, 1: 6.0}, "VLC": {2: 1.0}})
    assert (pair.seeds, pair.difference, pair.verdict, pair.more_seeds) == ((), 4.5, "not tested", None)
    assert over_seeds(pair, "RSUM") == "Unified and VLC share no seed, +4.50 RSUM: no test can be made; train more seeds of both."
    with pytest.raises(
        DataError, match=r"^Unified and VLC have no seed in common, so that nothing can be compared: run both with the same seeds\.$"
    ):
        paired_by_seed({0: 1.0}, {1: 1.0}, names=("Unified", "VLC"))


def test_empty_rows_and_references_that_are_none_are_refused():
    with pytest.raises(DataError, match=r"^VLC has no values to compare: leave it out, or train it\.$"):
        compared({"Unified": {0: 1.0}, "VLC": {}})
    with pytest.raises(SpecError, match=r"^the reference Unifed is no row of the comparison: did you mean Unified\?$"):
        compared({"Unified": {0: 1.0}, "VLC": {0: 1.0}}, "Unifed")


def pair_of(difference, deviation, p, tests=1, seeds=5):
    interval = t_interval(stats.zscore(range(seeds), ddof=1) * deviation + difference)
    return Paired(
        a="A",
        b="B",
        seeds=tuple(range(seeds)),
        difference=difference,
        deviation=deviation,
        interval=interval,
        p=p,
        adjusted_p=p,
        tests=tests,
    )


ALIKE = "A and B are not distinguishable in RSUM over 5 seeds:"


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (pair_of(2.3, 1.0, 0.004), "A is higher than B in RSUM over 5 seeds: +2.30 (95 % interval 1.06 to 3.54, p = 0.004)."),
        (
            pair_of(-2.3, 1.0, 0.0004, 28),
            "A is lower than B in RSUM over 5 seeds: −2.30 (95 % interval −3.54 to −1.06, p < 0.001 after Holm's correction for 28 tests).",
        ),
        (
            pair_of(0.5, 1.0, 0.33),
            f"{ALIKE} +0.500 (95 % interval −0.742 to 1.74, p = 0.33); about 29 more seeds would settle a difference of this size.",
        ),
        (
            pair_of(0.05, 1.0, 0.92),
            f"{ALIKE} +0.0500 (95 % interval −1.19 to 1.29, p = 0.92); more than 100 more seeds would be needed for a difference of this size.",
        ),
    ],
)
def test_a_judgement_is_one_sentence_with_its_numbers(pair, sentence):
    assert over_seeds(pair, "RSUM") == sentence


def test_a_pair_as_json():
    [pair] = compared({"a": row([1, 2, 4]), "b": row([0, 1.5, 3])})
    found = json.loads(json.dumps(pair.to_json()))
    assert found["interval"] == {"low": pair.interval.low, "high": pair.interval.high}
    assert (found["verdict"], found["more_seeds"], found["seeds"]) == (pair.verdict, pair.more_seeds, [0, 1, 2])


def test_numbers_to_three_digits():
    assert [number(value) for value in (493.04, 2.346, 0.01234, 1234.6, 999.7, -0.5, 0.0)] == [
        "493",
        "2.35",
        "0.0123",
        "1235",
        "1000",
        "−0.500",
        "0",
    ]
