"""Comparison table: means and standard deviations by hand, chance levels, and measurement
conditions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from visavis.core.errors import RunError
from visavis.core.table_formats import format_markdown, format_text
from visavis.evaluation import Evaluation
from visavis.evaluation.bootstrap import BOOTSTRAP_METRICS
from visavis.research.experiments.setting_results import (
    RECALL_KEYS,
    MeasurementConditions,
    ResultRow,
    SettingResults,
    bounds_of,
)


def result(*recalls: float, num_images: int = 500) -> Evaluation:
    """Evaluation of six recalls, three per direction, and their sum."""
    metrics = dict(zip(BOOTSTRAP_METRICS, [*recalls, sum(recalls)], strict=True))
    nothing = np.empty(0)
    return Evaluation(
        "plain", num_images, 5 * num_images, 5.0, "pessimistic", metrics, nothing, nothing
    )


def table_of(results):
    """Table of the evaluations of each row."""
    return SettingResults.from_runs(
        {
            name: [(run.metrics, MeasurementConditions.from_evaluation(run)) for run in runs]
            for name, runs in results.items()
        }
    )


TABLE = table_of(
    {
        "TripletHN": [result(40, 70, 80, 30, 60, 70), result(44, 74, 84, 30, 60, 70)],
        "Unified": [result(50, 75, 85, 29, 61, 72), result(53, 75, 85, 29, 61, 72)],
    }
)


def test_setting_results_mean_and_std_by_hand():
    first, second = TABLE.rows
    assert first.mean("i2t_r1") == 42
    assert first.std("i2t_r1") == pytest.approx(math.sqrt(((40 - 42) ** 2 + (44 - 42) ** 2) / 1))
    assert second.mean("rsum") == (372 + 375) / 2
    assert second.std("t2i_r1") == 0
    assert TABLE.best() is second
    assert TABLE.best("t2i_r1") is first


def test_setting_results_of_one_run_has_no_std():
    table = table_of({"VLC": [result(1, 2, 3, 4, 5, 6)]})
    assert table.rows[0].std("rsum") is None
    assert "range" not in format_text(table.table(row_notes=table.spread_kinds))
    assert "one seed" in table.caption()


def test_chance_equals_its_formula():
    conditions = MeasurementConditions("plain", 500, 2500, 5.0, "pessimistic")
    assert conditions.chance("t2i_r1") == pytest.approx(100 / 500)
    assert conditions.chance("t2i_r10") == pytest.approx(100 * 10 / 500)
    assert conditions.chance("i2t_r1") == pytest.approx(100 * 5 / 2500)
    none = math.prod((2495 - i) / (2500 - i) for i in range(10))
    assert conditions.chance("i2t_r10") == pytest.approx(100 * (1 - none))
    assert conditions.chance("rsum") == pytest.approx(
        sum(conditions.chance(name) for name in BOOTSTRAP_METRICS[:-1])
    )


def test_setting_results_rejects_mixed_conditions():
    with pytest.raises(
        RunError, match=r"got protocol plain: 500 images.* / protocol plain: 400 images"
    ):
        table_of({"a": [result(*[1] * 6)], "b": [result(*[1] * 6, num_images=400)]})
    with pytest.raises(RunError, match="got nothing"):
        table_of({})


def test_setting_results_text_is_aligned_and_fits_80_columns():
    lines = format_text(TABLE.table(row_notes=TABLE.spread_kinds)).split("\n")
    assert len({len(line) for line in lines[1:]}) == 1
    assert len(lines[1]) <= 80
    assert lines[2].split() == [
        "TripletHN",
        "42.0",
        "72.0",
        "82.0",
        "30.0",
        "60.0",
        "70.0",
        "356.0",
    ]
    assert lines[3].split() == ["range", "40–44", "70–74", "80–84", "350.0–362.0"]
    assert lines[-1].split()[0] == "chance"


def test_setting_results_markdown_marks_best_and_conditions():
    text = format_markdown(TABLE.table("setting"))
    assert "| Unified | **51.5 (50.0–53.0)** |" in text
    assert "| **30.0** |" in text
    assert (
        "mean over 2 seeds (range of the runs), protocol plain: 500 images, 2,500 texts, 5 captions per image, ties "
        "count against the model." in text
    )
    assert len({line.count("|") for line in text.split("\n\n")[0].split("\n")}) == 1


def test_setting_results_markdown_marks_ties_in_bold():
    table = table_of(
        {"A": [result(40, 70, 80, 30, 60, 70)], "B": [result(40.04, 69, 80, 30, 60, 70)]}
    )
    first, second = (
        line
        for line in format_markdown(table.table("setting")).splitlines()
        if line.startswith(("| A", "| B"))
    )
    assert first.startswith("| A | **40.0** | **70.0** | **80.0** |")
    assert second.startswith("| B | **40.0** | 69.0 | **80.0** |")


def row_of(metric, *values):
    return ResultRow("a", tuple({metric: value} for value in values))


def test_describe_mean_names_the_kind_of_spread():
    assert row_of("rsum", 100.0).describe_mean("rsum") == "one seed, without a range"
    assert row_of("rsum", 98.0, 98.0).describe_mean("rsum") == "the same value for 2 seeds"
    assert row_of("rsum", 99.0, 101.0).describe_mean("rsum") == "range of 2 seeds 99.0 to 101"
    # Mean 100, standard error 1, t of three degrees of freedom 3.182.
    four = row_of("rsum", 98.0, 99.0, 101.0, 102.0)
    error = stats.sem([98, 99, 101, 102])
    assert four.spread("rsum").low == pytest.approx(100 - 3.182446 * error)
    assert four.describe_mean("rsum").startswith("95 % interval 97.1 to 103 over 4 seeds")


@given(
    st.sampled_from(BOOTSTRAP_METRICS),
    st.lists(st.floats(0, 100), min_size=2, max_size=6),
)
def test_spread_stays_on_the_scale(metric, shares):
    low, high = bounds_of(metric)
    row = row_of(metric, *(share * high / 100 for share in shares))
    spread = row.spread(metric)
    if spread is not None:
        assert low <= spread.low <= row.mean(metric) + 1e-9
        assert row.mean(metric) - 1e-9 <= spread.high <= high
    assert (row.interval(metric) is None) == (spread is None or len(shares) < 4)


def test_highest_chance_rsum_exceeds_the_expected_one():
    conditions = MeasurementConditions("plain", 100, 200, 2, "pessimistic")
    chance = conditions.chance("rsum")
    assert chance < conditions.highest_chance_rsum < 2 * chance


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ({"a": ["", ""], "b": [""]}, ""),
        ({"a": ["x", "y"], "b": ["y"]}, "x, y"),
        ({"a": ["x", "y"], "b": ["x", "z"]}, "differs by setting: x, y of a, x, z of b"),
        ({"a": ["x"], "b": [""]}, "differs by setting: x of a, none of b"),
    ],
)
def test_table_reports_noise_of_its_settings(noise, expected):
    """Runs with different wrong captions are in one table only with a report. A failed run leaves
    one index out.
    """
    clean = MeasurementConditions("plain", 100, 200, 2, "pessimistic")
    runs = {
        name: [
            (dict.fromkeys(RECALL_KEYS, 50.0) | {"rsum": 300.0}, replace(clean, noise_index=each))
            for each in indices
        ]
        for name, indices in noise.items()
    }
    conditions = SettingResults.from_runs(runs).conditions
    assert conditions.noise_index == expected
    assert ("noise index" in str(conditions)) == bool(expected)
