"""The comparison table: means and deviations by hand, chance by its formula, and the rules beside every number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from visavis.comparison.table import METRICS, Rules, Table
from visavis.errors import RunError
from visavis.evaluation import Evaluation, rank_scores


def result(*recalls: float, num_images: int = 500) -> Evaluation:
    """Six recalls, both ways, and their sum."""
    metrics = dict(zip(METRICS, [*recalls, sum(recalls)], strict=True))
    nothing = np.empty(0)
    return Evaluation("plain", num_images, 5 * num_images, 5.0, "pessimistic", metrics, nothing, nothing)


TABLE = Table.of(
    {
        "TripletHN": [result(40, 70, 80, 30, 60, 70), result(44, 74, 84, 30, 60, 70)],
        "Unified": [result(50, 75, 85, 29, 61, 72), result(53, 75, 85, 29, 61, 72)],
    }
)


def test_mean_and_sample_deviation_by_hand():
    first, second = TABLE.rows
    assert first.mean("i2t_r1") == 42
    assert first.deviation("i2t_r1") == pytest.approx(math.sqrt(((40 - 42) ** 2 + (44 - 42) ** 2) / 1))
    assert second.mean("rsum") == (372 + 375) / 2
    assert second.deviation("t2i_r1") == 0
    assert TABLE.best() is second
    assert TABLE.best("t2i_r1") is first


def test_a_single_run_has_no_deviation():
    table = Table.of({"VLC": [result(1, 2, 3, 4, 5, 6)]})
    assert table.rows[0].deviation("rsum") is None
    assert "±" not in table.text()
    assert "one seed" in table.caption()


def test_chance_by_its_formula():
    rules = Rules("plain", 500, 2500, 5.0, "pessimistic")
    assert rules.chance("t2i_r1") == pytest.approx(100 / 500)
    assert rules.chance("t2i_r10") == pytest.approx(100 * 10 / 500)
    assert rules.chance("i2t_r1") == pytest.approx(100 * 5 / 2500)
    none = math.prod((2495 - i) / (2500 - i) for i in range(10))
    assert rules.chance("i2t_r10") == pytest.approx(100 * (1 - none))
    assert rules.chance("rsum") == pytest.approx(sum(rules.chance(name) for name in METRICS[:-1]))


def test_chance_is_what_random_scores_reach(generator):
    ids = torch.arange(40), torch.arange(40).repeat_interleave(5)
    found = [rank_scores(torch.rand(40, 200, generator=generator), *ids).metrics["i2t_r5"] for _ in range(60)]
    assert np.mean(found) == pytest.approx(Rules("plain", 40, 200, 5.0, "pessimistic").chance("i2t_r5"), abs=1.5)


def test_one_table_holds_one_set_of_rules():
    with pytest.raises(RunError, match=r"found protocol plain: 500 images.* / protocol plain: 400 images"):
        Table.of({"a": [result(*[1] * 6)], "b": [result(*[1] * 6, num_images=400)]})
    with pytest.raises(RunError, match="found nothing"):
        Table.of({})


def test_text_is_aligned_and_fits_a_terminal():
    lines = TABLE.text().split("\n")
    assert len({len(line) for line in lines[1:]}) == 1
    assert len(lines[1]) <= 80
    assert lines[2].split() == ["TripletHN", "42.0±2.8", "72.0±2.8", "82.0±2.8", "30.0±0.0", "60.0±0.0", "70.0±0.0", "356.0±8.5"]
    assert lines[-1].split()[0] == "chance"


def test_markdown_marks_the_best_of_each_column_and_names_the_rules():
    text = TABLE.markdown()
    assert "| Unified | **51.5 ± 2.1** |" in text
    assert "| **30.0 ± 0.0** |" in text
    assert "over 2 seeds; protocol plain: 500 images, 2,500 texts, 5 captions an image; ties pessimistic." in text
    assert len({line.count("|") for line in text.split("\n\n")[0].split("\n")}) == 1


def test_equal_means_as_printed_lead_together():
    table = Table.of({"A": [result(40, 70, 80, 30, 60, 70)], "B": [result(40.04, 69, 80, 30, 60, 70)]})
    first, second = (line for line in table.markdown().splitlines() if line.startswith(("| A", "| B")))
    assert first.startswith("| A | **40.0** | **70.0** | **80.0** |")
    assert second.startswith("| B | **40.0** | 69.0 | **80.0** |")


def test_json_holds_numbers():
    content = TABLE.to_json()
    assert content["rows"][0]["mean"]["rsum"] == 356
    assert content["rows"][0]["runs"][1]["i2t_r1"] == 44
    assert content["rules"] == {"protocol": "plain", "num_images": 500, "num_texts": 2500, "captions_per_image": 5.0, "ties": "pessimistic"}
