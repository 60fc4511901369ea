"""Vectors whose first numbers serve alone: what a recipe asks for, what a run keeps, and that nothing else changes."""

import json

import pytest

import visavis
from visavis.errors import RecipeError, RunError
from visavis.training.recipe_files import read_recipe

SHORT = {"phases.0.epochs": 1, "phases.1.epochs": 1, "training.batches_per_epoch": 4}


def test_stopped_anywhere_it_ends_as_the_uninterrupted_one_and_remembers_its_widths(recipe, scenes, outcome, in_pieces, tmp_path):
    given = {"widths": [8, 2], **SHORT}
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=given)
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=given) > 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "model" / "config.json").read_text())["widths"] == [2, 8, 16]
    assert read_recipe(tmp_path / "whole" / "run.toml", {}).widths == (8, 2)
    assert visavis.load(tmp_path / "whole").matcher.widths == (2, 8, 16)
    (tmp_path / "pieces" / "run.toml").write_text((tmp_path / "pieces" / "run.toml").read_text().replace("    2,\n", "    4,\n", 1))
    with pytest.raises(RunError, match=r"widths is .*4.*, and was .*2.* when the run began: a run keeps its recipe"):
        visavis.train(resume=tmp_path / "pieces")


def test_the_whole_width_alone_changes_no_step_and_no_widths_are_kept_where_none_are_asked_for(recipe, scenes, outcome, tmp_path):
    runs = [tmp_path / "none", tmp_path / "whole"]
    for run, widths in zip(runs, ([], [16]), strict=True):
        visavis.train(recipe, data=scenes, out=run, overrides={"widths": widths, **SHORT})
    plain, whole = ({key: value for key, value in outcome(run).items() if key != "config"} for run in runs)
    assert plain == whole
    assert "widths" not in json.loads((runs[0] / "model" / "config.json").read_text())
    assert visavis.load(runs[0]).matcher.widths == ()


def test_the_loss_of_a_run_is_the_sum_over_its_widths_and_its_health_that_of_one(recipe, scenes, tmp_path):
    """Before the first step, both runs have the same weights; the loss of identical embeddings is that of one width."""
    rows = {}
    for widths in ([], [4]):
        folder = visavis.train(recipe, data=scenes, out=tmp_path / str(len(widths)), overrides={"widths": widths, **SHORT}).folder
        rows[len(widths)] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert rows[1]["rsum"] == rows[0]["rsum"]
    assert rows[1]["health"]["collapsed_loss"] == rows[0]["health"]["collapsed_loss"]
    assert rows[1]["health"]["loss"] == pytest.approx(rows[1]["train"]["loss"] / 2)
    assert rows[1]["train"]["loss"] > rows[0]["train"]["loss"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"widths": [4, 17]}, "widths are 4, 17, but the vectors of this model have 16 numbers: expected none above 16."),
        (
            {"widths": [4], "model": "SCAN(width=16, word_width=8)"},
            "whose first numbers alone it cannot compare: leave widths out, or take a model of one vector an item, such as Heads.",
        ),
        (
            {"widths": [4], "phases.1.supervision": "BankSupervision(size=3)", "phases.1.objective": "AOQ()"},
            "widths are 4, but BankSupervision tells scores of whole vectors: leave out one of them.",
        ),
        ({"widths": 4}, "widths is 4: expected a list."),
        ({"widths": [0]}, "widths.0 is 0: input should be greater than 0."),
    ],
    ids=["too wide", "no cosines", "offline scores", "no list", "no width"],
)
def test_what_does_not_fit_is_refused_before_the_training(recipe, scenes, tmp_path, given, sentence):
    with pytest.raises(RecipeError) as told:
        visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=given)
    assert str(told.value).endswith(sentence)
    assert not (tmp_path / "run").exists()
