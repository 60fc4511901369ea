"""Several runs as one: the mean of score matrices of models that read different features, on the command line and in Python."""

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.comparison.bootstrap import over_images
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.errors import RunError
from visavis.evaluation import rank_scores
from visavis.evaluation.ranks import read_ranks
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of

RECIPE = """
name = "tiny"
visual = {{ tower = "scenes", view = "{view}" }}
text = {{ tower = "vocabulary", min_count = {count} }}
model = {{ kind = "{kind}", width = 16, word_width = 8 }}
training = {{ batch_size = 10, probe_batches = 1, threads = 1 }}
phases = [{{ epochs = 2, objective = "VLC()", optimizer = {{ lr = 0.01 }} }}]
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(
        tmp_path_factory.mktemp("w") / "scenes", num_train=30, num_val=8, num_test=12, captions_per_image=2, size=32, seed=2
    )


@pytest.fixture(scope="module")
def runs(scenes, tmp_path_factory):
    """A model of whole pictures, and one of regions with fewer words."""
    root = tmp_path_factory.mktemp("runs")
    for kind, view, count in (("VSE++", "pooled", 1), ("SCAN", "grid", 3)):
        (root / "recipe.toml").write_text(RECIPE.format(kind=kind, view=view, count=count))
        visavis.train(root / "recipe.toml", data=scenes, out=root / kind)
    return [root / "VSE++", root / "SCAN"]


def matrix(run, split="test"):
    """The scores of a run on its own data, of the features that it stored."""
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    with torch.no_grad():
        return matcher.score(*data_module.encode(matcher.eval(), data_module.data.split(split)))


def test_metrics_and_hits_are_those_of_the_mean_of_the_score_matrices(runs, scenes):
    test = open_dataset(scenes).split("test")
    mean = torch.stack([matrix(run) for run in runs]).mean(0)
    expected = rank_scores(mean, torch.arange(12), torch.from_numpy(test.image_of))
    together = visavis.evaluate(runs)
    assert together.metrics == expected.metrics
    assert np.array_equal(together.text_ranks, expected.text_ranks)
    assert together.metrics not in [visavis.evaluate(run).metrics for run in runs]
    assert visavis.evaluate([runs[1], runs[1]]).metrics == visavis.evaluate(runs[1]).metrics

    alone = [{hit.name: hit.score for hit in visavis.search(run, "a red circle", top=99)} for run in runs]
    hits = visavis.search(runs, "a red circle", top=99)
    assert len(hits) == 50
    assert [hit.score for hit in hits] == pytest.approx([np.mean([scores[hit.name] for scores in alone]) for hit in hits])
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert [hit.name for hit in visavis.search(runs, "a red circle", inside=scenes, top=3)] == [hit.name for hit in hits[:3]]


def test_a_run_keeps_the_rank_of_every_query_of_its_test(runs):
    for run in runs:
        kept, expected = read_ranks(run / "ranks.safetensors"), visavis.evaluate(run).ranks
        assert list(kept) == ["plain"]
        for name, values in vars(expected).items():
            assert np.array_equal(getattr(kept["plain"], name), values)
        assert over_images({"run": {0: kept["plain"]}}, draws=2).value("run").value == pytest.approx(visavis.evaluate(run).metrics["rsum"])


def test_the_command_line_takes_several_runs(runs):
    command = ["evaluate", *map(str, runs), "--json"]
    assert json.loads(CliRunner().invoke(app, command).stdout)["rsum"] == visavis.evaluate(runs).metrics["rsum"]
    found = CliRunner().invoke(app, ["search", *map(str, runs), "a red circle", "--top", "1", "--json"])
    assert json.loads(found.stdout)["hits"][0]["name"] == visavis.search(runs, "a red circle", top=1)[0].name


def test_an_untrained_model_joins_a_run_on_its_data(runs, dual_encoders):
    together = visavis.evaluate([dual_encoders / "clip", runs[0]])
    assert (together.protocol, together.num_images) == ("plain", 12)
    assert together.metrics != visavis.evaluate(runs[0]).metrics


def test_runs_on_other_data_or_by_other_rules_are_refused(runs, scenes, tmp_path):
    other = write_scenes(tmp_path / "other", num_train=30, num_val=8, num_test=12, captions_per_image=2, size=32, seed=3)
    visavis.train(runs[0] / "run.toml", data=other, out=tmp_path / "other run", overrides={"evaluation.protocol": "plain"})
    with pytest.raises(RunError, match=r"other run is evaluated on other data than .*VSE\+\+, where caption 0 is '.*' instead of '"):
        visavis.evaluate([runs[0], tmp_path / "other run"])
    with pytest.raises(RunError, match=r"SCAN is evaluated on other data than .*other run, where caption 0"):
        visavis.search([tmp_path / "other run", runs[1]], "a red circle")
    assert visavis.evaluate([runs[0], tmp_path / "other run"], data=other).num_texts == 24
    visavis.train(runs[0] / "run.toml", out=tmp_path / "val", overrides={"evaluation.test": "val"})
    with pytest.raises(RunError, match=r"^evaluation.test is 'test' in .*VSE\+\+ and 'val' in .*val: choose one with --split"):
        visavis.evaluate([runs[0], tmp_path / "val"])
    assert visavis.evaluate([runs[0], tmp_path / "val"], split="val").num_images == 8
    with pytest.raises(RunError, match="no peer: it trained one network"):
        visavis.evaluate(runs, average=True)


def test_a_run_that_lost_its_recipe_is_evaluated_on_data_that_are_named(runs, scenes, tmp_path):
    for run in runs:
        shutil.copytree(run / "model", tmp_path / run.name / "model")
        assert visavis.evaluate(tmp_path / run.name, data=scenes).metrics == visavis.evaluate(run).metrics
    with pytest.raises(RunError, match="brings no data: name a data set with --data"):
        visavis.evaluate(tmp_path / run.name)


def test_an_ensemble_where_one_run_is_meant_is_a_sentence_with_the_names_of_its_runs(tmp_path):
    folder = tmp_path / "both"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "run.toml").touch()
    (folder / "ensemble.toml").touch()
    for call in (visavis.diagnose, lambda run: visavis.explain(run, "a.jpg", "a dog")):
        with pytest.raises(RunError, match=r"both is an ensemble of a and b: name one of these runs, such as .*a"):
            call(folder)
