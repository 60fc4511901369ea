"""Reproduction of published tables: values of the paper, values of the runs, and their agreement."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace

import pytest

import visavis
from visavis.cli.console import print_result
from visavis.core.errors import RecipeError, RunError
from visavis.papers.reproduction.reproduction import (
    Reproduction,
    _on_base,
    select_rows,
)
from visavis.research.experiments.jobs import RunOutcome
from visavis.training.recipes.files import paper_figures, read_recipe
from visavis.training.recipes.published_tables import figure_curves, published_results
from visavis.training.recipes.recipe import build_recipe
from visavis.training.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def table(recipe, tmp_path_factory):
    """Two rows of a table of GOAL, trained and fine-tuned in the paper, which is the same run here."""
    out = tmp_path_factory.mktemp("table") / "goal"
    rows, overrides = ["r152-con-con", "r152-*cir-sig-ms"], {"training.clip_norm": 1.5}
    return visavis.papers_reproduce(
        "goal/3",
        rows=rows,
        base_recipe=str(recipe),
        overrides=overrides,
        seeds=2,
        out=out,
        workers=1,
    )


def test_reproduce_rows_use_objectives_of_the_paper(table):
    assert list(table.outcomes) == [
        "goal/3/r152-con-con",
        "goal/3/r152-cir-sig-ms",
        "goal/3/r152-ft-cir-sig-ms",
    ]
    runs = table.outcomes["goal/3/r152-cir-sig-ms"]
    assert [one.seed for one in runs] == [1, 2]
    written = (runs[0].folder / "run.toml").read_text()
    assert "Goal(triplet='cir', pair='sig_ms'" in written
    assert "PairSupervision(by='position')" in written
    assert table.outcomes["goal/3/r152-ft-cir-sig-ms"] == runs, (
        "they differ only in the training of the image encoder, which a base recipe replaces"
    )
    assert len(list((table.folder / "runs").iterdir())) == 4


def test_reproduce_keeps_captions_and_steps_of_smooth_ap(recipe):
    """COCOS trains SmoothAP on all five captions of an image, with five times the epochs. An epoch
    has a fifth of the batches.
    """
    decay = {
        "phases.0.schedule.kind": "exponential",
        "phases.0.schedule.factor": 0.5,
        "phases.0.loss_warmup_epochs": 0.5,
    }
    base = read_recipe(str(recipe), {"phases.0.schedule.milestones": [1], **decay})
    rows = [
        published_results()[f"cocos/1/vse++-flickr30k-{name}"]
        for name in ("smooth-ap", "triplet-hn")
    ]
    smooth_ap, triplet = (
        build_recipe(setting.recipe_values, {}, "test") for setting in _on_base(rows, base).values()
    )
    assert (smooth_ap.training.captions_per_image, triplet.training.captions_per_image) == (5, None)
    found, expected = smooth_ap.phases[0], triplet.phases[0]
    assert (found.epochs, found.schedule.milestones, found.loss_warmup_epochs) == (
        5 * expected.epochs,
        (5,),
        2.5,
    )
    assert found.schedule.factor**5 == pytest.approx(expected.schedule.factor) == 0.5
    assert (triplet.phases[0].epochs, triplet.phases[0].schedule) == (
        base.phases[0].epochs,
        base.phases[0].schedule,
    )


def test_reproduce_reports_published_and_reached_values(table):
    value = next(
        one for one in table.values if (one.row.row, one.key) == ("r152-con-con", "t2i_r1")
    )
    row = published_results()["goal/3/r152-con-con"]
    reached = [one.metrics["t2i_r1"] for one in table.outcomes[row.id]]
    assert (value.published, value.published_std) == row.values["t2i_r1"]
    assert value.reached == pytest.approx(statistics.mean(reached))
    assert value.reached_std == pytest.approx(statistics.stdev(reached))
    assert value.difference == pytest.approx(value.reached - value.published)
    assert "Not the setting of the paper" in table.substitution
    assert "on tiny, training.clip_norm=1.5, protocol" in table.substitution
    assert "MS-COCO" in table.substitution
    markdown = (table.folder / "reproduction.md").read_text()
    assert markdown.index(table.substitution) < markdown.index("| row |")
    assert json.loads((table.folder / "reproduction.json").read_text())["values"] == [
        one.to_json() for one in table.values
    ]


def test_reproduce_resume_keeps_finished_runs(table):
    before = {
        one.folder: (one.folder / "result.json").stat().st_mtime_ns
        for runs in table.outcomes.values()
        for one in runs
    }
    again = visavis.papers_reproduce(resume=table.folder, seeds=2, workers=1)
    assert [one.to_json() for one in again.values] == [one.to_json() for one in table.values]
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in before} == before


def test_reproduction_rank_agreement_and_std_by_hand(tmp_path):
    rows = [
        row
        for row in published_results().values()
        if row.id.startswith("cocos/1/") and "i2t_r1" in row.values
    ]
    other, *rows = rows[:5]
    by_rank = sorted(rows, key=lambda row: row.values["i2t_r1"][0])
    runs = {
        row.id: [
            RunOutcome(
                row.row, seed, tmp_path / f"{row.row}-{seed}", 1.0, {"i2t_r1": rank + 2.0 * seed}
            )
            for seed in (1, 2)
        ]
        for rank, row in enumerate(by_rank)
    }
    made = Reproduction(tmp_path, "cocos/1", "", runs)
    [order] = made.rank_agreements
    assert (order.key, order.rows, order.rho, order.p) == (
        "i2t_r1",
        4,
        pytest.approx(1.0),
        pytest.approx(2 / 24),
    ), "two of 24 orders are as extreme"
    again = Reproduction(tmp_path, "cocos/1", "", runs | {other.id: runs[rows[0].id]})
    assert again.rank_agreements == made.rank_agreements, "rows that share runs count once"
    [value] = [one for one in made.values if one.row is by_rank[0] and one.key == "i2t_r1"]
    assert (value.reached, value.reached_std) == (3.0, 1.0), (
        "COCOS prints the population standard deviation"
    )
    # Runs 2 and 4, below the number of seeds of an interval.
    assert value.interval.high - value.interval.low == 2
    assert value.difference in value.interval
    cells = made.tables()[-1].rows[made.values.index(value)]
    assert cells[-1].endswith(f" ({value.interval})")


@pytest.fixture(scope="module")
def counted(recipe, tmp_path_factory):
    """Two rows of counts of contributing samples of COCOS."""
    return visavis.papers_reproduce(
        "cocos/2",
        rows="vse++-flickr30k-*",
        base_recipe=str(recipe),
        out=tmp_path_factory.mktemp("counted") / "cocos",
        workers=1,
    )


def test_reproduce_counts_contributing_samples(counted):
    """The counts are those of a diagnosis, by the definition and as the released code counts."""
    row_id = "cocos/2/vse++-flickr30k-triplet"
    [run] = counted.outcomes[row_id]
    by_semantics = {count.semantics: count for count in visavis.papers_diagnose(run.folder).counts}
    values = [one for one in counted.values if one.row.id == row_id]
    assert {one.semantics for one in values} == {"paper", "reference"}
    for one in values:
        count = by_semantics[one.semantics]
        assert (one.reached, one.reached_std) == pytest.approx(
            (count.mean[one.key], count.std[one.key])
        )
        assert one.published == published_results()[row_id].values[one.key][0]
    hardest = [one for one in counted.values if one.row.row.endswith("triplet-hn")]
    assert {one.semantics for one in hardest} == {"paper"}
    assert {one.reached for one in hardest if one.key.endswith("per_moved")} == {1.0}
    markdown = (counted.folder / "reproduction.md").read_text()
    assert "text to image C^0, as the released code counts | 1.14 ± 1.22 |" in markdown
    assert "contributing samples of one run" in markdown


def test_reproduce_resume_keeps_counts(counted):
    files = [*counted.folder.glob("runs/*/contributions.json")]
    before = [file.stat().st_mtime_ns for file in files]
    again = visavis.papers_reproduce(resume=counted.folder, workers=1)
    assert [one.to_json() for one in again.values] == [one.to_json() for one in counted.values]
    assert len(files) == 2 and [file.stat().st_mtime_ns for file in files] == before


def test_counts_of_several_runs_by_hand(tmp_path):
    """Two runs of equally many batches: means 1 and 3, deviations 0 and 2 over batches."""
    row_id, key = "cocos/2/vse++-coco-triplet-hn", "i2t_in_batch"
    runs = [
        RunOutcome("a", 1, tmp_path / "1"),
        RunOutcome("a", 2, tmp_path / "2"),
        RunOutcome("a", 3, tmp_path / "3", failure="no memory"),
    ]
    counts = {
        tmp_path / "1": {"paper": {key: (1.0, 0.0)}},
        tmp_path / "2": {"paper": {key: (3.0, 2.0)}},
        tmp_path / "3": {},
    }
    values = Reproduction(tmp_path, "cocos/2", "", {row_id: runs}, counts).values
    [value] = [one for one in values if one.key == key]
    # Batches of the first run: 1 and 1. Of the second: 1 and 5. Squared deviations from 2: 1, 1, 1, 9.
    assert (value.reached, value.reached_std) == (2.0, pytest.approx(3**0.5))
    assert {one.reached for one in values if one.key != key} == {None}


def test_reproduce_evaluates_pretrained_rows(scenes, dual_encoders, tmp_path):
    """The row of an untrained CLIP has the values of its evaluation, next to a trained row."""
    clip = dual_encoders / "clip"
    overrides = {
        "visual.encoder": str(clip),
        "text.encoder": str(clip),
        "data.path": str(scenes),
        "training.batch_size": 16,
        "epochs": 1,
    }
    made = visavis.papers_reproduce(
        "unified/2",
        rows=["clip-flickr30k", "clip-flickr30k-unified"],
        base_recipe="clip/linear",
        overrides=overrides,
        out=tmp_path / "out",
        workers=1,
    )
    assert list(made.outcomes) == ["unified/2/clip-flickr30k", "unified/2/clip-flickr30k-unified"]
    [untrained] = made.outcomes["unified/2/clip-flickr30k"]
    expected = visavis.evaluate(clip, data=scenes)
    assert untrained.metrics == expected.all_metrics
    assert untrained.metrics != made.outcomes["unified/2/clip-flickr30k-unified"][0].metrics
    assert f"clip-flickr30k: {clip}, evaluated without training." in made.remarks
    again = visavis.papers_reproduce(resume=tmp_path / "out", workers=1)
    assert [one.to_json() for one in again.values] == [one.to_json() for one in made.values]


def test_reproduce_reports_missing_pretrained_models(recipe, tmp_path):
    """A model that cannot be loaded is a failed row. Missing data is an error before any run."""
    base = {"base_recipe": str(recipe), "out": tmp_path / "out", "workers": 1}
    made = visavis.papers_reproduce("unified/2", rows="clip-coco", **base)
    assert [one.reached for one in made.values] == [None] * 7
    assert any("openai/clip-vit-large-patch14-336" in text for text in made.remarks)
    with pytest.raises(visavis.VisavisError, match="MS-COCO with its images"):
        visavis.papers_reproduce(
            "unified/2",
            rows="clip-coco",
            overrides={"data.path": str(tmp_path / "none"), "epochs": 1},
            out=tmp_path / "other",
        )
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def figure(recipe, tmp_path_factory):
    """Figure 3 of Unified, two seeds."""
    out = tmp_path_factory.mktemp("figure") / "unified"
    return visavis.papers_reproduce(
        "unified/figure-3", base_recipe=str(recipe), seeds=2, out=out, workers=1
    )


def test_figure_has_the_means_of_the_logs(figure):
    names = ["triplet-hn", "vlc", "unified"]
    assert list(figure.outcomes) == [f"unified/figure-3/{name}" for name in names]
    for curve, runs in figure.outcomes.items():
        logs = [RunFolder(run.folder).read_log() for run in runs]
        points = [point for point in figure.points if point.curve == curve]
        assert [point.step for point in points] == [record["step"] for record in logs[0]]
        assert (points[0].step, points[0].loss) == (0, 1.0)
        last = points[-1]
        records = [log[-1] for log in logs]
        assert last.rsum == pytest.approx(statistics.mean(record["rsum"] for record in records))
        assert last.loss == pytest.approx(
            statistics.mean(log[-1]["val"]["loss"] / log[0]["val"]["loss"] for log in logs)
        )
        assert last.positive == pytest.approx(
            statistics.mean(record["similarity"]["positive_mean"] for record in records)
        )
        assert last.hardest == pytest.approx(
            statistics.mean(
                record["similarity"][f"hardest_{way}_mean"]
                for record in records
                for way in ("i2t", "t2i")
            )
        )
    written = json.loads((figure.folder / "reproduction.json").read_text())
    assert len(written["points"]) == len(figure.points)
    assert (figure.folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "MS-COCO" not in figure.substitution and "Flickr30K" in figure.substitution


def test_figure_prints_ten_points_of_each_curve(figure, capsys):
    points = [replace(figure.points[0], epoch=epoch) for epoch in range(31)]
    long = replace(figure, outcomes={points[0].curve: []})
    vars(long)["points"] = points
    epochs = [row[1] for row in long.point_table().rows]
    assert epochs == [0, 3, 7, 10, 13, 17, 20, 23, 27, 30]
    print_result(figure)
    printed = capsys.readouterr().out
    assert re.search(r"objective +epoch +loss, untrained = 1 +RSUM", printed)
    assert re.search(r"TripletHN +0 +1\.000 ", printed)
    assert "unified/figure-3/vlc: not reported: gamma of VLC" in printed


def test_figure_counts_the_runs_that_did_not_fail(figure):
    [(curve, runs), *_] = figure.outcomes.items()
    assert f"the mean of {len(runs)} runs" in figure.remarks[0]
    failed = replace(runs[0], failure="no memory")
    one_left = replace(figure, outcomes={curve: [failed, *runs[1:]]})
    assert "Each curve: one run on" in one_left.remarks[0]


def test_figure_of_similarities_is_resumed(recipe, tmp_path):
    """The runs of figure 4 are those of figure 3. An interrupted figure is continued."""
    made = visavis.papers_reproduce(
        "unified/figure-4", rows="vlc", base_recipe=str(recipe), out=tmp_path / "out", workers=1
    )
    for name in ("reproduction.json", "reproduction.md", "figure.png"):
        (made.folder / name).unlink()
    again = visavis.papers_reproduce(resume=made.folder, workers=1)
    assert again.points == made.points
    assert [column.title for column in again.point_table().columns] == [
        "objective",
        "epoch",
        "positive pairs",
        "hardest negatives",
    ]
    assert (made.folder / "figure.png").exists()


@pytest.mark.parametrize("figure", paper_figures())
def test_figure_curves_are_recipes(figure):
    curves = [row for row in figure_curves().values() if row.id.startswith(f"{figure}/")]
    objectives = [read_recipe(row.id).phases[-1].objective for row in curves]
    assert [type(objective).__name__ for objective in objectives] == ["TripletHN", "VLC", "Unified"]
    listed = [entry["name"] for entry in visavis.catalog("recipes")["recipes"]]
    assert {row.id for row in curves} <= {*listed}
    assert not any(row.values for row in curves)


@pytest.mark.parametrize(
    ("table", "patterns", "message"),
    [
        ("goal/9", [], "goal/9 is not a table or figure of a paper: did you mean goal/"),
        (
            "goal/3",
            ["r152-con-cor"],
            "goal/3: no row matches r152-con-cor: did you mean r152-con-con",
        ),
    ],
)
def test_select_rows_rejects_unknown_tables_and_rows(table, patterns, message):
    with pytest.raises(RecipeError, match=message):
        select_rows(table, patterns)


def test_reproduce_rejects_untrainable_rows_and_other_folders(tmp_path):
    with pytest.raises(
        RecipeError,
        match="expected a row that can be trained, got none: scores are sampled at random",
    ):
        visavis.papers_reproduce("ladder/1", rows="random-1k", out=tmp_path / "out")
    with pytest.raises(RunError, match=r"expected table\.json in it"):
        visavis.papers_reproduce(resume=tmp_path)
    with pytest.raises(RunError, match="table: expected a table such as goal/3, got none"):
        visavis.papers_reproduce()


def test_reproduce_names_the_missing_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    with pytest.raises(visavis.VisavisError, match="MS-COCO"):
        visavis.papers_reproduce("goal/3", rows="r152-con-con")
    assert not (tmp_path / "runs").exists()
