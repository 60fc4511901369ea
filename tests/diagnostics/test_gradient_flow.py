"""Recorded gradients of runs: read from logs, averaged by objective, and plotted."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from PIL import Image

from visavis.core.errors import RunError
from visavis.research.reports.gradient_flow import (
    GradientFlow,
    flow_panels,
    flow_section,
    flow_table,
    plot_gradient_flow,
    read_gradient_flow,
    read_gradient_flows,
)


def record(step, scores, visual=3.0, text=4.0):
    return {"step": step, "scores": scores, "visual_tangent": visual, "text_tangent": text}


def flow(name, *records):
    return GradientFlow(Path("runs") / name, name, records)


def write_log(run: Path, *rows: tuple[str, list[dict]]) -> Path:
    run.mkdir()
    common = {"phase": 0, "epoch": 0, "running_loss": 1.0, "train": {}, "val": {}, "rsum": 1.0}
    common |= {"health": {}, "time": {"training_s": 1.0, "validation_s": 1.0, "pairs_per_s": 1.0}}
    lines = [
        common
        | {"step": step, "objective": objective}
        | ({"gradient_steps": steps} if steps else {})
        for step, (objective, steps) in enumerate(rows)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_flow_of_a_run_joins_the_records_of_all_validations(tmp_path):
    rows = [("VLC()", []), ("VLC()", [record(0, 2.0)]), ("Goal()", [record(5, 1.0)])]
    found = read_gradient_flow(write_log(tmp_path / "run", *rows))
    assert found.name == "VLC(), then Goal()"
    assert found.series("scores") == {0: 2.0, 5: 1.0}
    assert found.series("tangent") == {0: 5.0, 5: 5.0}
    assert found.series("normalized") == found.series("visual_parameters") == {}
    assert found.to_json()["records"] == [record(0, 2.0), record(5, 1.0)]


def test_run_without_records_has_no_flow(tmp_path):
    assert read_gradient_flow(write_log(tmp_path / "run", ("VLC()", []))) is None
    assert read_gradient_flow(tmp_path) is None
    assert read_gradient_flows([tmp_path]) == ()
    assert flow_section([]) is None


def test_one_of_several_folders_must_be_a_run(tmp_path):
    run = write_log(tmp_path / "run", ("VLC()", [record(0, 2.0)]))
    with pytest.raises(RunError, match=r"run\.toml"):
        read_gradient_flows([run, tmp_path])


def test_table_averages_runs_of_one_name():
    """At the steps that all of them have."""
    flows = [
        flow("VLC", record(0, 1.0), record(5, 4.0), record(10, 2.0)),
        flow("VLC", record(0, 3.0), record(5, 0.0)),
        flow("SCAN", {"step": 0, "scores": 7.0, "visual_parameters": 0.5}),
    ]
    assert flow_panels(flows) == {
        "scores": "scores",
        "tangent": "tangent part",
        "visual_parameters": "visual parameters",
    }
    assert flow_table(flows).rows == (
        ("VLC",),
        ("  first", 2, 5, None),
        ("  lowest", 2, 5, None),
        ("  last", 2, 5, None),
        ("SCAN",),
        ("  first", 7, None, 0.5),
        ("  lowest", 7, None, 0.5),
        ("  last", 7, None, 0.5),
    )


@pytest.mark.parametrize("number", [1, 6])
def test_plot_has_a_line_per_name_and_accepts_zero_norms(number):
    flows = [
        flow(f"objective {index % 6}", record(0, 2.0), record(5, 0.0), record(10, 1e-9))
        for index in range(2 * number)
    ]
    section = flow_section(flows)
    assert section.num_runs == (2 if number == 6 else 1)
    assert len(section.table.rows) == 4 * len({each.name for each in flows})
    image = Image.open(io.BytesIO(plot_gradient_flow(flows)))
    assert image.width == 1290
    assert section.image.light != section.image.dark


def test_norm_over_both_encoders_is_that_of_all_embeddings():
    assert flow("VLC", record(3, 1.0, 1.0, 2.0)).series("tangent") == {3: math.sqrt(5)}
