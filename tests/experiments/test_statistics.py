"""Statistics over seeds: scipy and hand-computed values, simulated coverage and false alarms, and
errors.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from visavis.core.errors import DataError, SpecError
from visavis.evaluation.statistics import (
    PairedTest,
    differences_from,
    format_number,
    holm,
    more_seeds,
    paired_t_test,
    paired_tests,
    t_interval,
)

RANDOM = np.random.default_rng(0)


def row(values):
    return dict(enumerate(map(float, values)))


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_t_interval_equals_scipy(num_seeds, confidence):
    values = RANDOM.normal(480, 3, num_seeds)
    interval = t_interval(values, confidence)
    assert (interval.low, interval.high) == pytest.approx(
        stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))
    )
    assert values.mean() in interval
    assert interval.high + 1 not in interval


@pytest.mark.parametrize("num_seeds", [2, 5, 30])
def test_paired_t_test_equals_scipy(num_seeds):
    a, b = RANDOM.normal(480, 3, (2, num_seeds))
    pair, expected = paired_t_test(row(a), row(b)), stats.ttest_rel(a, b)
    assert pair.difference == pytest.approx((a - b).mean())
    assert pair.std == pytest.approx((a - b).std(ddof=1))
    assert pair.p == pair.adjusted_p == pytest.approx(expected.pvalue)
    assert (pair.interval.low, pair.interval.high) == pytest.approx(
        tuple(expected.confidence_interval())
    )
    turned = pair.swapped()
    assert (turned.a, turned.b, turned.difference, turned.p) == (
        pair.b,
        pair.a,
        -pair.difference,
        pair.p,
    )
    assert (turned.interval.low, turned.interval.high) == (-pair.interval.high, -pair.interval.low)


def test_paired_t_test_pairs_common_seeds_in_any_order():
    a, b = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}, {7: -50.0, 2: 3.0, 1: 1.5, 0: 0.0}
    pair = paired_t_test(a, b)
    assert pair.seeds == (0, 1, 2)
    assert pair.difference == pytest.approx((1 + 0.5 + 1) / 3)
    assert pair.p == pytest.approx(stats.ttest_rel([1, 2, 4], [0, 1.5, 3]).pvalue)


def test_holm_by_hand_and_bounded_by_bonferroni():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1, 1]
    assert holm([]) == []
    for p in RANDOM.random((50, 6)):
        adjusted = np.array(holm(p))
        assert (p <= adjusted).all()
        assert (adjusted <= np.minimum(1, 6 * p) + 1e-12).all()
        assert adjusted.min() == pytest.approx(min(1, 6 * p.min()))
        assert (np.argsort(p) == np.argsort(adjusted, kind="stable")).all() or len(
            set(adjusted)
        ) < 6


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
def test_t_interval_covers_93_to_97_percent(num_seeds):
    values = np.random.default_rng(num_seeds).normal(480, 3, (4000, num_seeds))
    assert 0.93 < np.mean([480 in t_interval(seeds) for seeds in values.tolist()]) < 0.97


def equal_rows(random, num_rows=6, seeds=5):
    """Rows with one mean, unequal standard deviations, and a shared effect of the seed."""
    values = (
        480
        + random.normal(0, 4, seeds)
        + np.linspace(1, 3, num_rows)[:, None] * random.normal(size=(num_rows, seeds))
    )
    return {f"row {i}": row(row_values) for i, row_values in enumerate(values)}


@pytest.mark.parametrize("reference", [None, "row 3"])
def test_paired_tests_limit_false_alarms_to_6_5_percent(reference):
    random = np.random.default_rng(1)
    found = [
        any(
            pair.verdict != "not distinguishable"
            for pair in paired_tests(equal_rows(random), reference)
        )
        for _ in range(1000)
    ]
    assert 0.01 < np.mean(found) <= 0.065


def test_paired_tests_selected_reference_needs_all_pairs():
    """A reference selected by its results raises false alarms above the level. Correcting over all
    pairs prevents that.
    """
    random, against_selected, all_pairs = np.random.default_rng(2), [], []
    for _ in range(400):
        results = random.normal(size=(8, 5))
        rows = {f"row {i}": row(values) for i, values in enumerate(results)}
        best = f"row {results.mean(1).argmax()}"
        against_selected.append(
            any(pair.verdict != "not distinguishable" for pair in paired_tests(rows, best))
        )
        all_pairs.append(
            any(
                pair.verdict != "not distinguishable"
                for pair in differences_from(paired_tests(rows), best).values()
            )
        )
    assert np.mean(against_selected) > 0.075
    assert np.mean(all_pairs) <= 0.065


def test_more_seeds_reach_the_promised_power():
    random, difference, deviation = np.random.default_rng(3), 1.0, 1.0
    needed = 2 + more_seeds(difference, deviation, 2)
    found = [
        paired_t_test(
            row(random.normal(difference, deviation, needed)), row(np.zeros(needed))
        ).verdict
        for _ in range(2000)
    ]
    assert 0.78 < np.mean([verdict == "higher" for verdict in found]) < 0.85


@pytest.mark.parametrize(("effect", "needed"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_more_seeds_equals_published_power_tables(effect, needed):
    """Paired t-test at 5 %, by G*Power and R's power.t.test."""
    assert 2 + more_seeds(effect, 1.0, 2, max_seeds=300) == needed
    assert 2 + more_seeds(-effect * 7, 7.0, 2, max_seeds=300) == needed
    assert more_seeds(effect, 1.0, needed) == 0
    assert more_seeds(effect, 1.0, needed - 1) == 1


def test_more_seeds_is_none_above_the_maximum():
    assert more_seeds(0.1, 1.0, 5) is None
    assert more_seeds(0.0, 1.0, 5) is None
    assert more_seeds(0.28, 1.0, 5) is not None
    assert more_seeds(0.28, 1.0, 5, max_seeds=50) is None


def test_more_seeds_is_zero_only_for_settled_pairs():
    random = np.random.default_rng(4)
    for _ in range(30):
        rows = {
            name: row(random.normal(mean, 1, 5))
            for name, mean in (("a", 0), ("b", 1), ("c", 4), ("d", 8))
        }
        for pair in paired_tests(rows):
            assert (pair.more_seeds == 0) == (pair.verdict in ("higher", "lower"))


def test_paired_tests_cover_all_pairs_or_one_reference():
    rows = {"a": row([1, 2, 3]), "b": row([4, 6, 5]), "c": row([9, 7, 8])}
    pairs = paired_tests(rows)
    assert [(pair.a, pair.b, pair.tests) for pair in pairs] == [
        ("a", "b", 3),
        ("a", "c", 3),
        ("b", "c", 3),
    ]
    assert [pair.adjusted_p for pair in pairs] == holm([pair.p for pair in pairs])
    assert [(pair.a, pair.b, pair.tests) for pair in paired_tests(rows, "b")] == [
        ("a", "b", 2),
        ("c", "b", 2),
    ]
    against_b = differences_from(pairs, "b")
    assert list(against_b) == ["a", "c"]
    assert [(pair.b, pair.difference) for pair in against_b.values()] == [("b", -3), ("b", 3)]
    assert paired_tests({"a": rows["a"]}) == []


def test_paired_tests_exclude_rows_with_one_common_seed():
    rows = {"a": row([1, 2, 3]), "b": row([4, 6, 5]), "c": {0: 7.0}}
    pairs = paired_tests(rows)
    assert [(pair.verdict == "not tested", pair.tests) for pair in pairs] == [
        (False, 1),
        (True, 1),
        (True, 1),
    ]
    assert (pairs[1].difference, pairs[1].interval, pairs[1].p, pairs[1].more_seeds) == (
        -6,
        None,
        None,
        None,
    )
    assert (
        pairs[1].describe("RSUM")
        == "a and c share one seed: −6.00 RSUM. No test is possible. Train more seeds of both."
    )
    assert t_interval([480.0]) is None


@pytest.mark.parametrize(
    ("seeds", "p", "verdict"),
    [(2, 0.5, "not distinguishable"), (5, 0.0625, "not distinguishable"), (6, 0.03125, "higher")],
)
def test_paired_t_test_uses_sign_test_for_constant_differences(seeds, p, verdict):
    """A t-test would divide by the rounding error of 0.1 + 0.2 and report any difference as
    certain.
    """
    values = RANDOM.normal(50, 3, seeds)
    pair = paired_t_test(row(values + 0.1 + 0.2), row(values))
    assert (pair.p, pair.interval, pair.std, pair.verdict) == (p, None, 0.0, verdict)
    assert pair.more_seeds == (0 if verdict == "higher" else None)
    assert pair.describe("R@1") == (
        f"a against b is +0.300 R@1 in each of {seeds} seeds, so only its sign is tested (p = "
        f"{p:.{3 if p < 0.1 else 2}f})" + (": a is higher." if verdict == "higher" else ".")
    )


def test_paired_t_test_of_equal_values():
    pair = paired_t_test(row([0.1 + 0.2] * 5), row([0.3] * 5))
    assert (pair.difference, pair.p, pair.verdict, pair.more_seeds) == (
        0,
        1,
        "not distinguishable",
        None,
    )
    assert pair.describe("R@10") == "a and b have the same R@10 in each of 5 seeds."
    assert t_interval([100.0] * 5) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_statistics_reject_non_finite_values(wrong):
    with pytest.raises(
        DataError,
        match=rf"^Unified, seed 3: expected a finite number, got {wrong}\. Remove this run or train it again\.$",
    ):
        paired_tests({"Unified": {0: 1.0, 3: wrong}, "VLC": {0: 1.0, 3: 2.0}})
    with pytest.raises(DataError, match=rf"^a value: expected a finite number, got {wrong}\. "):
        t_interval([1.0, wrong])


def test_paired_tests_skip_rows_without_common_seeds():
    [pair] = paired_tests({"Unified": {0: 5.0, 1: 6.0}, "VLC": {2: 1.0}})
    assert (pair.seeds, pair.difference, pair.verdict, pair.more_seeds) == (
        (),
        4.5,
        "not tested",
        None,
    )
    assert (
        pair.describe("RSUM")
        == "Unified and VLC share no seed: +4.50 RSUM. No test is possible. Train more seeds of both."
    )
    with pytest.raises(
        DataError,
        match=r"^Unified, VLC: expected a seed in common, got none\. Run both with the same seeds\.$",
    ):
        paired_t_test({0: 1.0}, {1: 1.0}, names=("Unified", "VLC"))


def test_paired_tests_reject_empty_rows_and_bad_reference():
    with pytest.raises(
        DataError,
        match=r"^VLC: expected a value to compare, got none\. Remove this row or train it\.$",
    ):
        paired_tests({"Unified": {0: 1.0}, "VLC": {}})
    with pytest.raises(
        SpecError,
        match=r"^reference: Unifed is not a row of the comparison: did you mean Unified\?$",
    ):
        paired_tests({"Unified": {0: 1.0}, "VLC": {0: 1.0}}, "Unifed")


def pair_of(difference, deviation, p, tests=1, seeds=5):
    interval = t_interval(stats.zscore(range(seeds), ddof=1) * deviation + difference)
    return PairedTest(
        a="A",
        b="B",
        seeds=tuple(range(seeds)),
        difference=difference,
        std=deviation,
        interval=interval,
        p=p,
        adjusted_p=p,
        tests=tests,
    )


ALIKE = "A and B are not distinguishable in RSUM over 5 seeds:"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            pair_of(2.3, 1.0, 0.004),
            (
                "A is higher than B in RSUM over 5 seeds: +2.30 (95 % interval 1.06 to 3.54, p = "
                "0.004)."
            ),
        ),
        (
            pair_of(-2.3, 1.0, 0.0004, 28),
            (
                "A is lower than B in RSUM over 5 seeds: −2.30 (95 % interval −3.54 to −1.06, p < "
                "0.001 after Holm's correction for 28 tests)."
            ),
        ),
        (
            pair_of(0.5, 1.0, 0.33),
            (
                f"{ALIKE} +0.500 (95 % interval −0.742 to 1.74, p = 0.33). If the difference is real, "
                "a test needs about 29 more seeds to show it."
            ),
        ),
        (
            pair_of(0.05, 1.0, 0.92),
            (
                f"{ALIKE} +0.0500 (95 % interval −1.19 to 1.29, p = 0.92). If the difference is "
                "real, a test needs more than 100 more seeds to show it."
            ),
        ),
    ],
)
def test_describe_paired_test_reports_every_value(pair, message):
    assert pair.describe("RSUM") == message


def test_format_number_uses_three_digits():
    assert [
        format_number(value) for value in (493.04, 2.346, 0.01234, 1234.6, 999.7, -0.5, 0.0)
    ] == [
        "493",
        "2.35",
        "0.0123",
        "1235",
        "1000",
        "−0.500",
        "0",
    ]
