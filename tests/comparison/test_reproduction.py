"""Tables of papers made anew: published figures are the catalog's, reached ones those of the runs."""

from __future__ import annotations

import json
import statistics

import pytest

import visavis
from visavis.comparison.jobs import Outcome
from visavis.comparison.reproducing import chosen_rows
from visavis.comparison.reproduction import Reproduction
from visavis.errors import RecipeError, RunError
from visavis.runs.published import published_rows


@pytest.fixture(scope="module")
def table(recipe, tmp_path_factory):
    """Two rows of a table of GOAL, once as trained and once as fine-tuned there, which is the same here."""
    out = tmp_path_factory.mktemp("table") / "goal"
    rows, overrides = ["r152-con-con", "r152-*cir-sig-ms"], {"training.clip_norm": 1.5}
    return visavis.reproduce("goal/3", rows=rows, base=str(recipe), overrides=overrides, seeds=2, out=out, workers=1)


def test_rows_on_a_base_have_the_objectives_of_the_paper(table):
    assert list(table.outcomes) == ["goal/3/r152-con-con", "goal/3/r152-cir-sig-ms", "goal/3/r152-ft-cir-sig-ms"]
    runs = table.outcomes["goal/3/r152-cir-sig-ms"]
    assert [one.seed for one in runs] == [1, 2]
    written = (runs[0].folder / "run.toml").read_text()
    assert "Goal(triplet='cir', pair='sig_ms'" in written
    assert "PairSupervision(by='position')" in written
    assert table.outcomes["goal/3/r152-ft-cir-sig-ms"] == runs, "they differ in the image encoder's training alone, which a base replaces"
    assert len(list((table.folder / "runs").iterdir())) == 4


def test_figures_are_published_and_reached(table):
    figure = next(one for one in table.figures if (one.row.row, one.key) == ("r152-con-con", "t2i_r1"))
    row = published_rows()["goal/3/r152-con-con"]
    reached = [one.metrics["t2i_r1"] for one in table.outcomes[row.address]]
    assert (figure.published, figure.published_deviation) == row.values["t2i_r1"]
    assert figure.reached == pytest.approx(statistics.mean(reached))
    assert figure.deviation == pytest.approx(statistics.stdev(reached))
    assert figure.difference == pytest.approx(figure.reached - figure.published)
    assert "Not the paper's setting" in table.substitution
    assert "on tiny, training.clip_norm=1.5, protocol" in table.substitution
    assert "MS-COCO" in table.substitution
    said = (table.folder / "reproduction.md").read_text()
    assert said.index(table.substitution) < said.index("| row |")
    assert json.loads((table.folder / "reproduction.json").read_text())["figures"] == [one.to_json() for one in table.figures]


def test_a_table_goes_on_with_more_seeds(table):
    before = {one.folder: (one.folder / "result.json").stat().st_mtime_ns for runs in table.outcomes.values() for one in runs}
    again = visavis.reproduce(resume=table.folder, seeds=2, workers=1)
    assert [one.to_json() for one in again.figures] == [one.to_json() for one in table.figures]
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in before} == before


def test_orders_and_deviations_by_hand(tmp_path):
    rows = [row for row in published_rows().values() if row.address.startswith("cocos/1/") and "i2t_r1" in row.values]
    other, *rows = rows[:5]
    by_rank = sorted(rows, key=lambda row: row.values["i2t_r1"][0])
    runs = {
        row.address: (row, [Outcome(row.row, seed, tmp_path / f"{row.row}-{seed}", 1.0, {"i2t_r1": place + 2.0 * seed}) for seed in (1, 2)])
        for place, row in enumerate(by_rank)
    }
    made = Reproduction.of(tmp_path, "cocos/1", "", runs)
    [order] = made.orders
    assert (order.key, order.rows, order.rho, order.p) == ("i2t_r1", 4, pytest.approx(1.0), pytest.approx(2 / 24)), "of 24 orders two"
    again = Reproduction.of(tmp_path, "cocos/1", "", runs | {other.address: (other, runs[rows[0].address][1])})
    assert again.orders == made.orders, "what shares its runs says nothing new"
    [figure] = [one for one in made.figures if one.row is by_rank[0] and one.key == "i2t_r1"]
    assert (figure.reached, figure.deviation) == (3.0, 1.0), "COCOS prints the deviation of the population"


@pytest.mark.parametrize(
    ("table", "patterns", "sentence"),
    [
        ("goal/9", [], "goal/9 is no table of a paper: did you mean goal/"),
        ("goal/3", ["r152-con-cor"], "goal/3 has no row r152-con-cor: did you mean r152-con-con"),
        ("cocos/2", [], "counts trainings and measures no models"),
    ],
)
def test_what_is_no_table_is_refused(table, patterns, sentence):
    with pytest.raises(RecipeError, match=sentence):
        chosen_rows(table, patterns)


def test_rows_that_cannot_be_trained_and_folders_that_are_no_table(tmp_path):
    with pytest.raises(RecipeError, match="can be trained: scores are drawn at random"):
        visavis.reproduce("ladder/1", rows="random-1k", out=tmp_path / "out")
    with pytest.raises(RunError, match=r"expected table\.json in it"):
        visavis.reproduce(resume=tmp_path)
    with pytest.raises(RunError, match="no table is named"):
        visavis.reproduce()


def test_without_its_data_a_table_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    with pytest.raises(visavis.VisavisError, match="MS-COCO"):
        visavis.reproduce("goal/3", rows="r152-con-con")
    assert not (tmp_path / "runs").exists()
