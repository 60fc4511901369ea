"""Statistics over seeds: scipy and hand-computed values, simulated coverage and false alarms, and
errors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from visavis.core.errors import DataError, SpecError
from visavis.evaluation.statistics import (
    PairedTest,
    compare_with_best,
    differences_from,
    format_number,
    holm,
    more_seeds,
    paired_t_test,
    paired_tests,
    power_of_paired_test,
    sequential_p_value,
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


def test_power_equals_noncentral_t_for_large_effects():
    """SciPy's function returns NaN for negligible tails, which must not count as a missing power."""
    seeds = np.arange(2, 60)
    for effect in (0.0, 0.3, 2.0, 9.1, 50.0, 1e200):
        for level in (0.05, 0.05 / 144):
            power = power_of_paired_test(effect, seeds, level)
            assert np.isfinite(power).all()
            assert (np.diff(power) >= -1e-12).all()
    assert power_of_paired_test(0.0, seeds, 0.05) == pytest.approx(0.05)
    for effect, level in ((2.0, 0.05 / 144), (9.1, 0.05 / 144), (9.1, 0.05 / 28)):
        bound = stats.t.isf(level / 2, seeds[:9] - 1)
        expected = stats.nct.sf(bound, seeds[:9] - 1, effect * np.sqrt(seeds[:9]))
        found = power_of_paired_test(effect, seeds[:9], level)
        assert found == pytest.approx(np.nan_to_num(expected, nan=1.0), abs=1e-6)
    assert more_seeds(9.1, 1.0, 3, level=0.05 / 144) == 2


STAGES = ((3, 5, 8, 12, 20), (5, 10))


def p_values_by_stage(stages, difference):
    """p-values of 5,000 repeated experiments at each stage. Shape [experiments, stages]."""
    values = np.random.default_rng(5).normal(difference, 1, (5000, stages[-1]))
    return np.stack([stats.ttest_1samp(values[:, :n], 0, axis=1).pvalue for n in stages], axis=1)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("planned", [True, False])
def test_sequential_p_value_keeps_error_with_stopping(stages, planned):
    """A user stops at the first significant stage. Without the shares, the error exceeds 5 %."""
    p_values = p_values_by_stage(stages, 0.0)
    num_stages = len(stages) if planned else None
    found = [
        any(sequential_p_value(row[: k + 1], num_stages) <= 0.05 for k in range(len(row)))
        for row in p_values.tolist()
    ]
    assert 0.03 < np.mean(found) <= 0.05
    without_shares = (p_values <= 0.05).any(1).mean()
    assert without_shares == pytest.approx(0.09 if len(stages) == 2 else 0.16, abs=0.012)


@pytest.mark.parametrize(
    ("stages", "difference", "planned_power", "open_power", "fixed_power"),
    [((3, 5, 8, 12, 20), 1.0, 0.94, 0.81, 0.99), ((5, 10), 1.0, 0.70, 0.58, 0.80)],
)
def test_sequential_p_value_power(stages, difference, planned_power, open_power, fixed_power):
    p_values = p_values_by_stage(stages, difference).tolist()
    planned = [sequential_p_value(row, len(stages)) <= 0.05 for row in p_values]
    unplanned = [sequential_p_value(row) <= 0.05 for row in p_values]
    assert np.mean(planned) == pytest.approx(planned_power, abs=0.02)
    assert np.mean(unplanned) == pytest.approx(open_power, abs=0.02)
    assert np.mean([row[-1] <= 0.05 for row in p_values]) == pytest.approx(fixed_power, abs=0.02)
    if len(stages) == 5:
        stops = [
            next((n for n, p in zip(stages, row, strict=True) if p <= 0.05 / 5), stages[-1])
            for row in p_values
        ]
        assert np.mean(stops) == pytest.approx(13, abs=0.5)


def test_sequential_p_value_by_hand():
    assert sequential_p_value([0.03]) == 0.06
    assert sequential_p_value([0.03], stages=1) == 0.03
    assert sequential_p_value([0.03, 0.005, 0.04]) == pytest.approx(0.02)
    assert sequential_p_value([0.03, 0.005, 0.04], stages=3) == pytest.approx(0.015)
    assert sequential_p_value([0.6, 0.9]) == 1
    assert sequential_p_value([]) == sequential_p_value([], stages=4) == 1
    assert sequential_p_value([0.0, 1.0], stages=2) == 0


@pytest.mark.parametrize("p_values", [[0.2], [0.01, 0.3, 0.04], [0.5, 0.02]])
def test_sequential_p_value_never_rises_with_stages(p_values):
    """So that a stop cannot be regretted, and a plan of more stages costs power."""
    for stages in (None, 3, 5):
        stops = [sequential_p_value(p_values[:k], stages) for k in range(1, len(p_values) + 1)]
        assert stops == sorted(stops, reverse=True)
        assert stops[-1] >= min(p_values)
    assert sequential_p_value(p_values, 5) >= sequential_p_value(p_values, 3)


def test_sequential_p_value_rejects_more_stages_than_planned():
    with pytest.raises(
        SpecError, match=r"^stages: expected at least 2, one for each p-value, got 1\. Plan more"
    ):
        sequential_p_value([0.1, 0.2], stages=1)
    with pytest.raises(SpecError, match=r"^p_values: expected numbers from 0 to 1, got 1\.5\. "):
        sequential_p_value([1.5])
    with pytest.raises(SpecError, match=r"^p_values: expected numbers from 0 to 1, got nan\. "):
        sequential_p_value([math.nan])


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


def test_compare_with_best_multiply_p_by_other_rows():
    rows = {"a": row([3, 4, 6]), "b": row([1, 3, 4]), "c": row([0, 1, 1]), "one seed": {0: 1.0}}
    tests = compare_with_best(rows, "a")
    assert list(tests) == ["b", "c", "one seed"]
    p = stats.ttest_rel([1, 3, 4], [3, 4, 6]).pvalue
    assert tests["b"].adjusted_p == pytest.approx(min(1, 3 * p))
    assert tests["b"].difference == pytest.approx(-5 / 3)
    assert tests["one seed"].verdict == "not tested"
    assert compare_with_best({"a": row([1, 2])}, "a") == {}


@pytest.mark.parametrize("others", [0.0, -0.5])
def test_compare_with_best_keep_the_truly_best_row(others):
    random = np.random.default_rng(3)
    missed = 0
    for _ in range(300):
        values = random.normal(0, 1, (5, 5)) + others
        values[0] -= others  # the truly best row
        rows = {str(number): row(each) for number, each in enumerate(values)}
        best = str(values.mean(1).argmax())
        missed += best != "0" and compare_with_best(rows, best)["0"].verdict == "lower"
    # 300 trials at 5 % have 15 misses, and at most 25 with a probability of 99.5 %.
    assert missed <= 25


@pytest.mark.parametrize(
    ("p", "text"), [(1e-9, "< 0.001"), (0.0123, "0.012"), (0.234, "0.23"), (None, None)]
)
def test_small_p_value_is_not_shown_as_zero(p, text):
    [test] = paired_tests({"a": {1: 1.0, 2: 2.0, 3: 4.0}, "b": {1: 0.0, 2: 1.5, 3: 2.0}})
    assert replace(test, adjusted_p=p).p_text == text
